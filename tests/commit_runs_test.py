"""Runs of a case at a commit: where Python imports from, and how a row is read."""

from __future__ import annotations

import fake_results
import pytest

from pytest_aisp.page.pair import UNJUDGED
from pytest_aisp.results.row import Row
from pytest_aisp.results.verdict import NOT_COMPARED
from pytest_aisp.tools import commit_runs
from pytest_aisp.tools.commit_runs import CommitRuns, Measurement, read_row
from pytest_aisp.tools.commits import Commit, Worktree

CASE = "ch99/doubling_test.py::test_doubling[doubled-n1001]"


@pytest.mark.parametrize("plugin", [False, True])
def test_python_imports_from_the_worktree_but_not_another_plugin(tmp_path, monkeypatch, plugin):
    started = []

    class Started:
        def __init__(self, command, **options):
            started.append(options)

        def communicate(self):
            return "E   ValueError: no\nnothing", None

    root, top = tmp_path / "today", tmp_path / "tree"
    (top / "ch99").mkdir(parents=True)
    (top / "ch99/doubling_test.py").write_text("")
    monkeypatch.setattr(commit_runs, "Popen", Started)
    monkeypatch.setattr(Worktree, "check_out", lambda tree, commit: None)
    if plugin:
        monkeypatch.setattr(commit_runs, "PACKAGE", str(root / "pytest_aisp"))
    monkeypatch.setenv("PYTHONPATH", f"{root / 'src'}:/elsewhere:{root}")
    pages = fake_results.fake_catalog(root, [], imports=[".", "src"])
    commit = Commit("1" * 40, (), "t", "2026-01-01", "")
    page, _, case = CASE.partition("::")
    runs = CommitRuns(pages, Worktree(top, top), case, {commit.sha: page})
    found = runs.measure(commit, commit)
    assert found == Measurement(broken="ValueError: no")
    [options] = started
    assert options["cwd"] == top
    path = options["env"]["PYTHONPATH"].split(":")
    assert path == (
        [f"{top}/src", "/elsewhere", str(root)]
        if plugin
        else [str(top), f"{top}/src", "/elsewhere"]
    )


@pytest.fixture
def row():
    """Return a row in which the optimized side has these speedups over its old version."""

    def make(*values, **fields):
        results = [
            {"side": "optimized", "clock": "graph", "baseline": [], "optimized": [], "value": value}
            for value in values
        ]
        plain = {"value": 0.7, "spread": 0.001, "baseline": "added", "against": results}
        case = fake_results.case("ch99:doubling", "doubled")
        return Row.of({**fake_results.row(case), **plain, **fields})

    return make


@pytest.mark.parametrize(
    ("fields", "invalid", "expected"),
    [
        ({"verdict": "disturbed", "reasons": ["busy"]}, [], {"unclear": "busy"}),
        ({}, ["the canary failed"], {"unclear": "the canary failed"}),
        ({"value": None, "need": "needs sm100"}, [], {"broken": "needs sm100"}),
        ({"value": None, "reasons": ["doubled is wrong"]}, [], {"broken": "doubled is wrong"}),
        ({"value": None}, [], {"broken": "an error"}),
        ({"origins": {"claim": UNJUDGED}}, [], {"broken": UNJUDGED.partition("because ")[2]}),
        ({"remarks": ["a", f"{NOT_COMPARED} at x"]}, [], {"broken": f"{NOT_COMPARED} at x"}),
        ({"remarks": [f"f is {NOT_COMPARED}"]}, [], {"unclear": f"f is {NOT_COMPARED}"}),
    ],
)
def test_rows_without_a_measurement(row, fields, invalid, expected):
    assert read_row(row(-0.05, **fields), invalid, "an error") == Measurement(**expected)


def test_votes_count_instead_of_the_first_value(row):
    found = read_row(row(-0.06, -0.05, -0.05, -0.05), [], "").sides["optimized"]
    assert (found.name, found.values, found.outcome) == ("doubled", [-0.05] * 3, "red")
    found = read_row(row(-0.001), [], "").sides["optimized"]
    assert (found.values, found.outcome) == ([-0.001], "clear")
