"""What the documents say is what is so: tables, commands, options, pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_aisp import plugin
from pytest_aisp.results import tables

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CHAPTERS = sorted((ROOT / "suites").glob("ch*/README.md"))


@pytest.mark.parametrize("readme", CHAPTERS, ids=lambda p: p.parent.name)
def test_a_chapters_table_is_what_is_stored(readme):
    assert tables.rewrite(readme, ROOT / "baselines") == readme.read_text()


def test_a_readme_without_a_place_for_the_table_says_so(tmp_path):
    (tmp_path / "README.md").write_text("nothing")
    with pytest.raises(tables.TableError, match="has no place for the table: add <!-- results -->"):
        tables.rewrite(tmp_path / "README.md", ROOT / "baselines")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([\w./-]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_every_option_named_exists(document, pytestconfig):
    known = {name for action in pytestconfig._parser._anonymous.options for name in action.names()}
    for group in pytestconfig._parser._groups:
        known |= {name for option in group.options for name in option.names()}
    planned = {"--aisp-against"}  # the README says that it is not built yet
    named = set(re.findall(r"--aisp-[a-z-]+[a-z]", document.read_text()))
    assert named - planned <= known


def test_the_page_of_the_guide_is_checked(pytester):
    guide = (ROOT / "docs" / "write-a-page.md").read_text()
    page = re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1]
    pytester.makepyfile(row_sums_test=page)
    result = pytester.runpytest_subprocess("--aisp-check", "-p", "no:randomly")
    result.stdout.fnmatch_lines(["*2 checked*"])


def test_every_marker_is_registered_and_used(pytestconfig):
    registered = "\n".join(pytestconfig.getini("markers"))
    assert all(marker.partition("(")[0] in registered for marker in plugin.MARKERS)


def test_the_fixtures_for_other_tests_work(pytester):
    pytester.makepyfile(
        """
        import torch


        def test_them(device, warmup, cuda_graph, timer, peaks):
            x = torch.ones(64, 64, device=device)
            assert warmup(lambda: x @ x) >= 3
            assert torch.equal(cuda_graph(lambda: x @ x)(), x @ x)
            assert 0 < timer(lambda: x @ x) < 1
            assert all(rate > 0 for rate in peaks.values())
        """
    )
    assert pytester.runpytest_subprocess().ret == 0


def test_the_ladder_is_what_is_stored_and_assembled(tmp_path):
    pytest.importorskip("cuda.core")
    page, readme = ROOT / "suites/ch10/gemm_test.py", ROOT / "suites/ch10/README.md"
    copy = tmp_path / "README.md"
    copy.write_text(readme.read_text())
    command = [sys.executable, ROOT / "benchmarks/ladder.py", page, "test_gemm", "--write"]
    # In a process of its own: this one may run Triton's interpreter, which compiles nothing.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    subprocess.run([*command, copy], check=True, env=environment)
    assert copy.read_text() == readme.read_text()


def test_a_document_without_a_place_for_the_ladder_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("no marks")
    command = [sys.executable, ROOT / "benchmarks/ladder.py", ROOT / "suites/ch10/gemm_test.py"]
    done = subprocess.run(
        [*command, "test_gemm", "--write", tmp_path / "README.md"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "has no place for the table: <!-- ladder --> and <!-- end of ladder -->" in done.stderr
    assert done.returncode == 1
