"""Editing a comment is no change: a loss stays `regressed`, and `--aisp-against` compares nothing.

Results that earlier versions stored, with digests of text, are still compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import triton  # noqa: F401 - once, out here: pytester forgets what a test imports
from msgspec.structs import replace

from pytest_aisp.kernels import cuda_cpp  # noqa: F401
from pytest_aisp.page import sources
from pytest_aisp.results import store
from pytest_aisp.tools import catalog, stored_results
from pytest_aisp.worker.loader import load_page

ROOT = Path(__file__).parents[1]
DEFS = '''
import triton
import triton.language as tl

from pytest_aisp import cuda_module

from helper import twice

kernels = cuda_module("kernels.cu")
half = lambda x: x / 2
third = lambda x: x / 3


@triton.jit
def kernel(x, BLOCK: tl.constexpr):
    tl.store(x, 2 * tl.load(x))


def added(x):
    """Add."""
    if x.is_cuda:
        kernel[(1,)](x, 1)
        kernels.add[1, 1](x)
        half(third(x))
    return twice(x)
'''
HELPER = "def twice(x):\n    return x + x\n"
KERNELS = '#include "add.cuh"\nextern "C" __global__ void add(float* x) { x[0] = ADD(x[0]); }\n'
HEADER = "#define ADD(x) (x + x)\n"
FILES = {"helper.py": HELPER, "kernels.cu": KERNELS, "add.cuh": HEADER}
PAGE = "doubling_test.py"
HARMLESS = [
    (PAGE, "    return twice(x)", "    # a comment\n\n    return (twice( x ))  # more"),
    (PAGE, '"""Add."""', '"""Add a number to itself."""\n    "And more."'),
    (PAGE, "    tl.store(x, 2", "    # in the kernel\n    tl.store(x,  2"),
    ("helper.py", "def twice(x):\n", 'def twice(\n    x,\n):\n    """Helps."""\n\n'),
    ("kernels.cu", "{ x[0] =", "{\n    // a comment\n    x[0] ="),
    ("add.cuh", "(x + x)", "(x + x)  // twice"),
]
CHANGES = [
    (PAGE, "return twice(x)", "return twice(x) + 0"),
    (PAGE, "2 * tl.load(x)", "tl.load(x) * 2"),
    (PAGE, "x / 3", "x / 4"),
    ("helper.py", "x + x", "2 * x"),
    ("kernels.cu", "ADD(x[0])", "2 * x[0]"),
    ("add.cuh", "(x + x)", "(2 * x)"),
]


@pytest.fixture
def pages(page, pytester, monkeypatch):
    """Write the page with its helper and kernels, and return a function that edits one of them."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions within one second
    path = page(defs=f"import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\n{DEFS}")
    for name, text in FILES.items():
        path.with_name(name).write_text(text)

    def edit(name, old, new):
        text = path.with_name(name).read_text()
        assert text.count(old) == 1
        path.with_name(name).write_text(text.replace(old, new))

    return edit


def digests(pytester):
    """Return the digests of syntax, with constants, and of text of the page's baseline."""
    root = str(pytester.path)
    for name in ("helper", "digest_test_page"):
        sys.modules.pop(name, None)
    side = load_page(str(pytester.path / "ch99" / PAGE), root, "digest_test_page").added
    sys.path.remove(str(pytester.path / "ch99"))
    constants = sources.digest(side, root, constants=True)
    return sources.digest(side, root), constants, sources.text_digest(side, root)


@pytest.mark.parametrize("edit", HARMLESS)
def test_comments_docstrings_and_formatting_do_not_change_the_digest(pages, pytester, edit):
    before = digests(pytester)
    pages(*edit)
    after = digests(pytester)
    assert after[:2] == before[:2]
    assert edit[0] == "add.cuh" or after[2] != before[2]  # no header was part of the text


@pytest.mark.parametrize("edit", CHANGES)
def test_every_other_change_changes_the_digest(pages, pytester, edit):
    before = digests(pytester)
    pages(*edit)
    assert not set(digests(pytester)[:2]) & set(before)


def test_a_docstring_that_code_reads_is_part_of_the_digest(pages, pytester):
    pages("helper.py", "x + x", "x + x + len(twice.__doc__ or '') * 0")
    before = digests(pytester)
    pages(PAGE, '"""Add."""', '"""Sum."""')
    assert digests(pytester)[0] != before[0]


def test_a_loss_after_a_comment_is_regressed_and_after_a_change_stale(
    pages, gpu, recorded, pytester, lines
):
    gpu(added=2e-5, doubled=1e-5)
    recorded()
    gpu(added=2e-5, doubled=1.2e-5)
    for edit in HARMLESS:
        pages(*edit)
    result = pytester.runpytest_subprocess("-v")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*REGRESSED 1.???x*"])
    pages(*CHANGES[3])
    result = pytester.runpytest_subprocess("-v")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*STALE 1.???x*", "*the baseline is not the one that was stored"])


@pytest.fixture
def recorded_earlier(pages, gpu, recorded, pytester):
    """Store results as earlier versions did, and return the file."""
    gpu(added=2e-5, doubled=1e-5)
    recorded()
    path = pytester.path / "baselines" / "simulated-gpu" / "ch99.json"
    now, stored = path.read_text(), store.load(path)
    options = ["--collect-only", "-q", "-p", catalog.COLLECTOR, "--aisp-catalog=catalog.json"]
    pytester.runpytest_subprocess(*options)
    (case,) = json.loads((pytester.path / "catalog.json").read_text())["cases"]
    results = {k: replace(r, sources=case["text_sources"]) for k, r in stored.results.items()}
    path.write_text(store.dump(store.Stored(stored.product, stored.environments, results)))
    assert "syntax:" in now
    assert "syntax:" not in path.read_text()
    return path, now


def test_a_digest_of_text_is_compared_with_todays_text(recorded_earlier, pages, gpu, pytester):
    gpu(added=2e-5, doubled=1.2e-5)
    result = pytester.runpytest_subprocess("-v")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*REGRESSED 1.???x*"])
    pages(*HARMLESS[0])  # whether the text's change matters is unknown
    result = pytester.runpytest_subprocess("-v")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*STALE 1.???x*"])


def test_recording_replaces_digests_of_text_and_keeps_the_result(recorded_earlier, pytester):
    path, now = recorded_earlier
    record = "--aisp-update-expectations", "--aisp-processes=1"
    result = pytester.runpytest_subprocess(*record)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["stored: *: 2.???x is kept, with digests of the syntax"])
    assert path.read_text() == now


def test_against_takes_a_comment_for_no_change(pages, gpu, pytester):
    def git(*command):
        name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *name, *command], cwd=pytester.path, check=True, capture_output=True)

    gpu(added=2e-5, doubled=1e-5)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "pages")
    for edit in HARMLESS:
        pages(*edit)
    result = pytester.runpytest_subprocess("--aisp-against=HEAD", "-vv")
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*against its version at*")
    pages(*CHANGES[5])  # in the header
    result = pytester.runpytest_subprocess("--aisp-against=HEAD", "-vv")
    result.stdout.fnmatch_lines(["*added against its version at *"])


def test_a_stored_result_names_the_blobs_of_its_files(pages, gpu, recorded, pytester):
    """From these blobs, the recorded code can be built again."""
    gpu(added=2e-5, doubled=1e-5)
    recorded()
    path = pytester.path / "baselines" / "simulated-gpu" / "ch99.json"
    (stored,) = store.load(path).results.values()
    assert set(stored.files) == {f"ch99/{name}" for name in (PAGE, *FILES)}
    for name, blob in stored.files.items():
        hashed = subprocess.run(
            ["git", "hash-object", "--no-filters", name],
            cwd=pytester.path,
            check=True,
            capture_output=True,
            text=True,
        )
        assert blob == hashed.stdout.strip()


def test_an_earlier_result_of_the_same_code_gets_its_blobs(pages, gpu, recorded, pytester):
    gpu(added=2e-5, doubled=1e-5)
    recorded()
    path = pytester.path / "baselines" / "simulated-gpu" / "ch99.json"
    now, stored = path.read_text(), store.load(path)
    results = {key: replace(result, files={}) for key, result in stored.results.items()}
    path.write_text(store.dump(store.Stored(stored.product, stored.environments, results)))
    result = pytester.runpytest_subprocess("--aisp-update-expectations", "--aisp-processes=1")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["stored: *: 2.???x is kept, with the blobs of its files"])
    assert path.read_text() == now


CHANGED_SINCE = {
    "ch01": ["forward_graph_test.py", "train_step_graph_test.py"],
    "ch07": ["copy_stride_test.py", "tile_copy_test.py", "vector_width_test.py"],
    "ch20": ["decode_ladder_test.py"],  # on an H100
}
"""The pages of which a side was changed after the recording. Record them again."""


@pytest.fixture(scope="module")
def suites():
    """Collect the pages of this repository once for both tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return catalog.collect()


def test_tables_of_the_chapters_show_the_stored_results(suites, monkeypatch):
    monkeypatch.chdir(ROOT)
    chapters = sorted((ROOT / "suites").glob("ch*/README.md"))
    differing = [r for r in chapters if stored_results.rewrite(r, suites) != r.read_text()]
    assert differing == [], "run python -m pytest_aisp.tools.stored_results FOLDER"


def test_stored_results_of_this_repository_have_digests_of_todays_pages(suites):
    cases = {(case.chapter, case.key): case for case in suites.cases}
    differing, unread = defaultdict(set), {Path(page.path).name for page in suites.unread}
    for path in sorted(suites.baselines.glob("*/ch*.json")):
        for key, result in store.load(path).results.items():
            if key.partition("::")[0] in unread:
                continue
            if cases[path.stem, key].stale_roles(result):
                differing[path.stem].add(key.partition("::")[0])
            else:
                assert result.files, f"{key}: name the files of its sides"
    assert {chapter: sorted(pages) for chapter, pages in differing.items()} == CHANGED_SINCE
