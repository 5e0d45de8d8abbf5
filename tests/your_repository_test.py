"""The guide for a repository of one's own, followed with a wheel that is built here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pytest_aisp.util.plugin_digest import own_digest

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs/how-to/your-repository.md"
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "artifacts")
OFFLINE = {"wheel": "--no-build-isolation -q", "install": "--no-deps --no-index -q --target lib"}
"""Further options of pip: everything is installed, and nothing is downloaded."""
PYTEST = (sys.executable, "-m", "pytest")
"""A new process, because a forked one has imported the plugin of this clone."""
MINE = "\n\nimport pytest_aisp\n\nassert 'lib/pytest_aisp' in pytest_aisp.__file__\n"
"""Appended to the page: pytest and worker processes import the installed plugin."""


def blocks(document, language):
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(), re.DOTALL)


@pytest.mark.slow
def test_the_guides_commands_work_in_a_new_repository(pytester, gpu, monkeypatch):
    pytest.importorskip("setuptools", minversion="77")
    monkeypatch.setenv("EDITOR", "true")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path / "lib"))
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")
    # A copy: what building leaves behind stays out of the checkout.
    shutil.copytree(ROOT, pytester.path / "path/to/pytest-aisp", ignore=LEFT_OUT)
    gpu(chained=2e-5, reduced=3e-6)
    subprocess.run(["git", "init", "-q", "."], check=True)
    [shown] = blocks(GUIDE, "sh")
    page = blocks(ROOT / "docs/tutorial/write-a-page.md", "python")[0]
    page = page.replace("65536", "1024").replace('    cpu_sizes=[{"n": 4096}],\n', "")
    for line in shown.splitlines():
        words = shlex.split(line, comments=True)
        if words[0] == "pytest":
            fewer = ["--aisp-processes=2"] if "--aisp-update-expectations" in words else []
            result = pytester.run(*PYTEST, *words[1:], *fewer)
            assert result.ret == 0
            continue
        if words[0] == "pip":
            line = f"{shlex.quote(sys.executable)} -m {line.split('#')[0]} {OFFLINE[words[1]]}"
        assert subprocess.run(line, shell=True, check=False).returncode == 0, line
        if words[0] == "mkdir":
            Path("bench/row_sums_test.py").write_text(page + MINE)
    result.stdout.fnmatch_lines(["bench/row_sums_test.py .*"])
    [wheel] = Path("dist").iterdir()
    holds_the_plugin_alone(wheel)
    assert own_digest(Path("lib/pytest_aisp")) == own_digest()

    gpu(chained=2e-5, reduced=3.6e-6)
    result = pytester.run(*PYTEST, "bench", "--aisp-artifacts=out")
    assert result.ret == 1
    why = "5.5??x against 6.6??x (stored in baselines/simulated-gpu/bench.json), margin *-> red"
    result.stdout.fnmatch_lines([f"*{why}", "*REGRESSED 5.5??x*row_sums_test.py*reduced-n1024*"])
    rows = [json.loads(line) for line in Path("out/results.jsonl").read_text().splitlines()]
    assert [row["verdict"] for row in rows] == ["regressed"]
    assert rows[0]["reasons"][0].startswith("5.5")


def holds_the_plugin_alone(wheel):
    """Assert that a wheel holds every file of the package, and besides only its metadata."""
    names = zipfile.ZipFile(wheel).namelist()
    package = ROOT / "pytest_aisp"
    files = {str(p.relative_to(ROOT)) for p in package.rglob("*") if p.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert {os.path.splitext(name)[1] for name in wanted} >= {".py", ".js", ".json", ".typed"}
