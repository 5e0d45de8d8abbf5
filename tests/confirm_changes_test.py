"""`aisp results history --confirm`: the code gate compares a change's commits, and that is kept."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fake_results import fake_catalog
from msgspec import structs

from pytest_aisp.cli import app
from pytest_aisp.report.history_data import read_history
from pytest_aisp.results import history
from pytest_aisp.results.history import CodeGate, HistoryLine
from pytest_aisp.results.run_reader import RunError
from pytest_aisp.tools import catalog, confirm_changes
from pytest_aisp.tools.commit_runs import CommitRuns, Measurement, SideChange
from pytest_aisp.util.cli_result import CliError
from pytest_aisp.util.device import Machine

CASE = "ch99/doubling_test.py::test_doubling[doubled-n1001]"
FAST = {"added": 2e-5, "doubled": 1e-5, "doubled@old": 1e-5}
PRODUCT = "simulated-gpu"
SHOWN = "    aisp results history h --confirm"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(Machine, "here", lambda: Machine("sm90", PRODUCT, PRODUCT))


@pytest.fixture
def commits(page, gpu, git):
    """Commit a page, then its second version, which takes `seconds`; return both hashes."""

    def write(seconds=1.02e-5):
        shas = []
        for code, time in ("2 * x", 1e-5), ("x * 2", seconds):
            gpu(**{**FAST, "doubled": time})
            page(code)
            git("add", "-A")
            git("commit", "-qm", "c")
            shas.append(git("rev-parse", "HEAD"))
        return shas

    return write


@pytest.fixture
def series(pytester):
    """Write a history of 30 runs that is 2 % slower from the second commit on."""

    def write(old, new, product=PRODUCT):
        rng = random.Random(4)
        lines = [
            HistoryLine(
                run=f"{day:012}",
                started=f"2026-01-{1 + day:02}T07:00:00+00:00",
                commit=new if day >= 15 else old,
                product=product,
                chapter="ch99",
                case=CASE.removeprefix("ch99/"),
                id=CASE,
                clock="graph",
                value=0.7 - 0.02 * (day >= 15) + rng.gauss(0, 0.002),
                error=0.002,
                sources={"baseline": "a", "optimized": "c" if day >= 15 else "b"},
            )
            for day in range(30)
        ]
        history.add(Path("h"), lines)

    return write


@pytest.fixture
def aisp(capsys):
    """Return the exit code of `aisp results history h`, and the lines on stdout and stderr."""

    def ask(*words):
        code = app.main(["results", "history", "h", *words])
        output = capsys.readouterr()
        return code, output.out.splitlines(), output.err.splitlines()

    return ask


@pytest.mark.parametrize(
    ("seconds", "count", "code", "says"),
    [
        (1.02e-5, "1 change", 1, "; confirmed by the code gate: 0.9"),
        (1e-5, "no change, 1 unconfirmed", 0, "; not confirmed by the code gate: "),
    ],
)
def test_the_code_gate_decides_and_its_answer_is_kept(
    commits, series, aisp, runs, git, seconds, count, code, says
):
    old, new = commits(seconds)
    git("commit", "-q", "--allow-empty", "-m", "later")
    series(old, new)
    assert aisp()[1][-1] == SHOWN
    found, [line, change], errors = aisp("--confirm")
    assert (found, errors) == (code, [])
    assert line.endswith(f"x, 30 runs, 2026-01-01 to 2026-01-30, {count}")
    assert f"; the source of optimized changed{says}" in change
    assert f"--aisp-against={old}" in runs[-1]
    assert len(git("worktree", "list").splitlines()) == 1
    before = len(runs)
    assert aisp("--confirm") == (code, [line, change], [])
    assert len(runs) == before, "a change is measured once"
    _, past = read_history([Path("h")])
    [entries] = past.values()
    assert [entry.change for entry in entries if entry.change] == [change.strip()]


@pytest.fixture
def simulated(pytester, monkeypatch):
    """Replace the runs of pytest, which are counted. `answer` is the measurement or an error."""

    class Measured(list):
        answer = Measurement(PRODUCT, {"optimized": SideChange("doubled", [-0.02], 0.001, "red")})
        gate = True

    measured = Measured()

    def measure(runs, commit, against, use):
        measured.append((runs.page(against), runs.page(commit), runs.case))
        if isinstance(measured.answer, Exception):
            raise measured.answer
        use((commit.sha, against.sha))
        return measured.answer

    def lines_of(run):
        new, old = run
        [line] = [line for line in history.read(Path("h"))[0].lines if line.run[-2:] == "29"]
        gate = CodeGate(commit=old, values={"optimized": [-0.02]}, spread=0.001)
        plain = {"run": "f" * 12, "commit": new, "code_gate": gate if measured.gate else None}
        yield structs.replace(line, **plain)

    monkeypatch.setattr(CommitRuns, "measure", measure)
    monkeypatch.setattr(CommitRuns, "require_case", lambda runs, commit: None)
    monkeypatch.setattr(confirm_changes.history, "lines_of", lines_of)
    pages = fake_catalog(pytester.path, [])
    monkeypatch.setattr(catalog, "collect", lambda *targets, tell: pages)
    return measured


def test_only_changes_of_the_chosen_cases_are_measured(commits, series, aisp, simulated):
    series(*commits())
    assert aisp("--confirm", "--case=conv")[0] == 2
    assert simulated == []
    code, lines, _ = aisp("--confirm", "--case=ch99/")
    assert (code, len(lines)) == (1, 2)
    assert simulated == [("ch99/doubling_test.py", "ch99/doubling_test.py", CASE.split("::")[1])]


def test_a_change_on_another_product_waits_for_its_machine(commits, series, aisp, simulated):
    series(*commits(), product="nvidia-b200")
    code, lines, errors = aisp("--confirm")
    assert (code, errors, simulated) == (0, [], [])
    assert lines[1].endswith("; unconfirmed")
    assert lines[2:] == ["The code gate can confirm a change on nvidia-b200:", SHOWN]


def test_a_case_on_several_gpus_of_this_product_is_measured(commits, series, aisp, simulated):
    old, new = commits()
    series(old, new, product=f"{PRODUCT}-x2")
    _, _, errors = aisp("--confirm")
    why = f"here it runs on {PRODUCT}, not on {PRODUCT}-x2"
    assert errors == [f"{CASE}: {old[:12]} and {new[:12]} were not compared: {why}"]
    simulated.answer = structs.replace(simulated.answer, product=f"{PRODUCT}-x2")
    assert aisp("--confirm")[0] == 1
    assert len(simulated) == 2
    assert "; confirmed by the code gate: " in aisp()[1][1]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Measurement(unclear="the GPU was busy"), "the GPU was busy"),
        (Measurement(broken="no compiler"), "no compiler"),
        (CliError("there is no page"), "there is no page"),
        (RunError("its samples are missing"), "its samples are missing"),
    ],
)
def test_a_change_that_cannot_be_measured_is_named(commits, series, aisp, simulated, answer, why):
    old, new = commits()
    series(old, new)
    simulated.answer = answer
    code, lines, errors = aisp("--confirm")
    assert code == 1
    assert errors == [f"{CASE}: {old[:12]} and {new[:12]} were not compared: {why}"]
    assert lines[1].endswith("; unconfirmed")


def test_sides_that_the_code_gate_sees_unchanged_confirm_nothing(commits, series, aisp, simulated):
    series(*commits())
    simulated.gate = False
    code, _, [error] = aisp("--confirm")
    assert (code, error.endswith("the code gate sees no changed side")) == (1, True)
    assert len(history.read(Path("h"))[0].lines) == 30


def test_a_commit_that_the_clone_lacks_is_named(commits, series, aisp, simulated):
    _, new = commits()
    series("0" * 40, new)
    code, _, [error] = aisp("--confirm")
    assert (code, simulated) == (1, [])
    assert error.endswith(f"compared: {'0' * 40}: there is no such commit in this clone")


def test_to_add_and_to_confirm_are_two_commands(pytester, aisp):
    code, _, errors = aisp("--confirm", "--add=run")
    assert (code, errors) == (2, ["--add lists nothing; use --confirm in a second command"])
