"""A full run names the stored results that no case uses. A partial run accuses no honest page."""

from __future__ import annotations

import subprocess

import fake_results
import pytest

STORED = "baselines/simulated-gpu/ch99.json"
FIRST, OTHER = (f"{name}_test.py::test_doubling[doubled-n1001]" for name in ("doubling", "other"))
ADVICE = [
    "no case uses these stored results: a page, a test or a size was renamed or removed",
    "Undo that, or record under the new name; then list the results that are left to remove:",
    "    aisp results prune",
]
NONE = ["-k", "nothing"]
"""Collects every page and runs no case, which takes less time."""


@pytest.fixture
def two_pages(timed_page, pytester):
    """Write two pages with stored results, and return their paths."""
    results = {FIRST: fake_results.result(2.0), OTHER: fake_results.result(2.0)}
    fake_results.stored(pytester.path, results, product="simulated-gpu", chapter="ch99")
    return timed_page(), timed_page(name="other_test.py")


@pytest.fixture
def unused(pytester):
    """Run pytest, and return the exit code and the keys that the run names as unused."""

    def run(*options):
        result = pytester.runpytest_subprocess(*options)
        begin = f"unused: {STORED}: "
        found = [line.removeprefix(begin) for line in result.outlines if line.startswith(begin)]
        assert (ADVICE[0] in result.outlines) == bool(found)
        return result.ret, found

    return run


def test_a_renamed_page_leaves_an_unused_result(two_pages, pytester):
    two_pages[0].rename(two_pages[0].with_name("moved_test.py"))
    two_pages[1].unlink()
    result = pytester.runpytest_subprocess()
    assert result.ret == 0
    lines = [f"unused: {STORED}: {key}" for key in (FIRST, OTHER)]
    assert "\n".join([*lines, *ADVICE]) in "\n".join(result.outlines)


@pytest.mark.parametrize("options", [["ch99"], ["-n2"], ["--aisp-update-expectations"]])
def test_each_run_that_collects_the_chapter_names_it(two_pages, unused, options):
    two_pages[0].rename(two_pages[0].with_name("moved_test.py"))
    assert unused(*NONE, *options) == (5, [FIRST])


def test_a_removed_size_leaves_an_unused_result(two_pages, unused):
    page = two_pages[0]
    page.write_text(page.read_text().replace('"n": 1001', '"n": 1002'))
    assert unused(*NONE, str(page)) == (5, [FIRST])


def test_a_renamed_chapter_leaves_unused_results(two_pages, pytester, unused):
    two_pages[0].parent.rename(pytester.path / "ch98")
    assert unused(*NONE, ".") == (5, [FIRST, OTHER])
    assert unused(*NONE, "ch98") == (5, [])  # ch99 was not requested


def test_many_unused_results_are_counted(two_pages, pytester):
    results = {f"gone_test.py::test_it[n{n}]": fake_results.result(2.0) for n in range(7)}
    fake_results.stored(pytester.path, results, product="simulated-gpu", chapter="ch99")
    result = pytester.runpytest_subprocess(*NONE)
    result.stdout.fnmatch_lines(["unused: *[[]n4[]]", "unused: 2 more", *ADVICE], consecutive=True)


@pytest.mark.parametrize(
    "options",
    [
        NONE,
        ["-m", "sm100 and aisp_cpu"],
        [*NONE, "ch99/other_test.py"],
        [*NONE, "ch99/other_test.py::test_doubling"],
        ["--ignore=ch99/doubling_test.py", *NONE],
        [f"--deselect=ch99/{FIRST}", f"--deselect=ch99/{OTHER}"],
        [*NONE, "-n2"],
    ],
    ids=" ".join,
)
def test_a_run_of_some_cases_accuses_no_page(two_pages, unused, options):
    assert unused(*options) == (5, [])


@pytest.mark.parametrize("mode", ["--aisp-check", "--aisp-compile", "--collect-only"])
def test_a_run_that_compares_nothing_with_stored_results_names_none(two_pages, unused, mode):
    two_pages[0].unlink()
    assert unused(*NONE, mode) == (5, [])


def test_one_page_says_nothing_about_a_removed_neighbor(two_pages, unused):
    two_pages[0].unlink()
    assert unused(*NONE, "ch99/other_test.py") == (5, [])


def test_a_page_that_is_collected_in_part_is_not_accused(two_pages, unused):
    path = two_pages[0]
    path.write_text(path.read_text().replace("def test_doubling", "def test_first"))
    assert unused(*NONE) == (5, [FIRST])
    broken = "\n\n@pytest.mark.parametrize('n')\ndef test_broken(n):\n    pass\n"
    path.write_text("import pytest\n" + path.read_text() + broken)
    assert unused(*NONE, "--continue-on-collection-errors") == (1, [])


def test_results_of_another_product_are_not_named(two_pages, pytester, unused):
    fake_results.stored(pytester.path, {"a_test.py::b[c]": fake_results.result(2.0)})
    assert unused(*NONE) == (5, [])


def test_a_deleted_file_that_git_has_is_named(two_pages, pytester):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)

    file = pytester.path / STORED
    git("init", "-q", ".")
    git("add", STORED)
    git("commit", "-q", "-m", "recorded")
    file.unlink()
    result = pytester.runpytest_subprocess("ch99/other_test.py")
    assert result.ret == 0
    lost = f"{file} is committed but not here, so its cases are new; restore it:"
    assert f"{lost}\n    git checkout -- {file}" in "\n".join(result.outlines)
    git("rm", "-q", "--cached", STORED)
    result = pytester.runpytest_subprocess("ch99/other_test.py")
    result.stdout.no_fnmatch_line("*is committed but*")
