"""`aisp results history`: runs are added once, nothing is lost, and changes name their cause."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fake_results
import pytest

from pytest_aisp.cli import app
from pytest_aisp.results import history
from pytest_aisp.results.history import CodeGate
from pytest_aisp.results.results_json import GitState

GEMM, SPLIT = fake_results.case("ch10:gemm"), fake_results.case("ch10:split_k")
FILE = "h/nvidia-h200/ch10.jsonl"
FACTS = {**fake_results.FACTS, "power_limit_w": 700}
SOURCES = {"baseline": "syntax:0a", "optimized": "syntax:1b"}

CHANGED = "def doubled(x):\n    return x * 2"


def commit(number):
    return f"{number:02}" * 20


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Write the folder of a run on one day, each value in ln(speedup); return its name."""
    monkeypatch.chdir(tmp_path)

    def write(day, value=0.7, *, cases=(GEMM,), against="", gate=(), dirty=False, **fields):
        fields = {"environment": FACTS, "sources": SOURCES, "spread": 0.002, **fields}
        fields |= {"value": value, "low": value - 0.0052, "high": value + 0.0052}
        fields["against"] = [{"side": "optimized", "value": v, "error": 0.001} for v in gate]
        manifest = {
            "started": f"2026-{1 + day // 28:02}-{1 + day % 28:02}T07:00:00+00:00",
            "git": GitState(commit=commit(day), branch="main", dirty=dirty),
            "options": {"against": against or None},
        }
        manifest["git"] = fields.pop("git", manifest["git"])
        name = f"run{day}"
        rows = [fake_results.row(case, **fields) for case in cases]
        fake_results.artifacts(tmp_path / name, rows, **manifest)
        return name

    return write


@pytest.fixture
def aisp(capsys):
    """Return the exit code of `aisp results history` and the lines that it prints."""

    def ask(*words, err=""):
        code = app.main(["results", "history", *words])
        output = capsys.readouterr()
        assert output.err == err
        return code, output.out.splitlines()

    return ask


@pytest.fixture
def series(run, aisp):
    """Add runs on successive days: a level of 0.7, and `step` more from the day `at` on."""

    def write(days=30, at=15, step=0.0, **fields):
        rng = random.Random(4)
        for day in range(days):
            changed = {name: each(day) for name, each in fields.items()}
            run(day, 0.7 + step * (day >= at) + rng.gauss(0, 0.002), **changed)
        code, _ = aisp(*(f"--add=run{day}" for day in range(days)), "h")
        assert code == 0

    return write


def after(at, new, old):
    return lambda day: new if day >= at else old


def test_a_run_is_added_once_wherever_its_folder_is(run, aisp, tmp_path):
    name = run(0, cases=(GEMM, SPLIT))
    assert aisp("--add", name, "h") == (0, [f"{name}: 2 cases added to h"])
    before = (tmp_path / FILE).read_bytes()
    shutil.move(tmp_path / name, tmp_path / "moved")
    assert aisp("--add=moved", "h") == (0, ["moved: 0 cases added to h, 2 were there"])
    assert (tmp_path / FILE).read_bytes() == before
    assert len(before.splitlines()) == 2


def test_a_line_has_what_later_runs_are_compared_with(run, aisp, tmp_path):
    run(3)
    aisp("--add=run3", "h")
    line = json.loads((tmp_path / FILE).read_text())
    assert len(line.pop("run")) == 12
    assert line == {
        "schema": 1,
        "started": "2026-01-04T07:00:00+00:00",
        "commit": commit(3),
        "dirty": False,
        "product": "nvidia-h200",
        "chapter": "ch10",
        "case": GEMM["key"],
        "id": GEMM["nodeid"],
        "clock": "graph",
        "verdict": "pass",
        "value": 0.7,
        "error": pytest.approx(0.002),
        "session": 0.0,
        "environment": FACTS,
        "sources": SOURCES,
        "code_gate": None,
    }


def test_each_case_has_a_line_and_too_few_runs_say_so(run, aisp):
    run(0, cases=(GEMM, SPLIT))
    run(1)
    aisp("--add=run0", "--add=run1", "h")
    assert aisp("h") == (
        0,
        [
            f"nvidia-h200 ch10/{GEMM['key']}: 2.014x, 2 runs, 2026-01-01 to 2026-01-02,"
            " too few runs for changes, which need 4",
            f"nvidia-h200 ch10/{SPLIT['key']}: 2.014x, 1 run, 2026-01-01,"
            " too few runs for changes, which need 4",
        ],
    )
    _, lines = aisp("h", "--case=split_k")
    assert len(lines) == 1
    assert app.main(["history", "h"]) == 0, "the old spelling"


def test_a_steady_history_has_no_change(series, aisp):
    series(environment=after(15, {**FACTS, "driver": "590.1"}, FACTS))
    code, [line] = aisp("h")
    assert code == 0
    assert line.endswith("30 runs, 2026-01-01 to 2026-02-02, no change")


def test_a_change_names_the_fact_that_changed(series, aisp):
    series(step=-0.02, environment=after(15, {**FACTS, "driver": "590.1"}, FACTS))
    code, [line, change] = aisp("h")
    assert code == 0
    assert line.endswith("1 change")
    assert change.startswith(f"    2026-01-16 at {commit(15)[:12]}: 2.01")
    assert "x -> 1.97" in change
    assert "%]; driver 580.65 -> 590.1" in change
    assert not change.endswith("unexplained")


def test_a_change_of_the_clock_is_named(series, aisp):
    series(step=0.1, clock=after(15, "host", "graph"))
    _, [_, change] = aisp("h")
    assert change.endswith("; clock graph -> host")


def test_a_change_without_a_known_cause_is_unexplained(series, aisp):
    series(step=-0.02)
    code, [_, change] = aisp("h")
    assert (code, change.endswith("; unexplained")) == (0, True)


def test_a_changed_source_is_unconfirmed_and_gets_the_command(series, aisp):
    series(step=-0.02, sources=after(15, {**SOURCES, "optimized": "syntax:2c"}, SOURCES))
    code, [line, change, *hint] = aisp("h")
    assert code == 0, "an unconfirmed change is not red"
    assert line.endswith(", no change, 1 unconfirmed")
    assert change.endswith("; the source of optimized changed; unconfirmed")
    assert hint == [
        "The code gate can confirm a change on nvidia-h200:",
        "    aisp results history h --confirm",
    ]
    _, lines = aisp("h", "--json")
    new, old = commit(15)[:12], commit(14)[:12]
    assert json.loads("\n".join(lines))["cases"][0]["changes"][0]["command"].split() == [
        *("git", "checkout", new, "&&", "pytest", f"--aisp-against={old}"),
        *("--aisp-artifacts=DIR", f"'{GEMM['nodeid']}'"),
    ]


def test_without_clean_commits_nothing_can_confirm_a_change(series, aisp):
    changed = after(15, {**SOURCES, "baseline": "syntax:2c"}, SOURCES)
    series(step=0.02, sources=changed, dirty=lambda day: day == 15)
    _, [_, change] = aisp("h")
    assert change.endswith(
        "; the source of baseline changed; unconfirmed,"
        " because the commits of both runs are not known, equal, or not clean"
    )


@pytest.mark.parametrize(
    ("gate", "step", "code", "says"),
    [
        ([-0.019], -0.02, 1, "; confirmed by the code gate: 0.981x"),
        ([-0.05, -0.020, -0.019, -0.021], -0.02, 1, "; confirmed by the code gate: 0.980x"),
        ([0.02], 0.02, 0, "; confirmed by the code gate: 1.020x"),
        ([-0.001], -0.02, 0, "; not confirmed by the code gate: 0.999x"),
        ([0.02], -0.02, 0, "; not confirmed by the code gate: 1.020x"),
    ],
)
def test_the_code_gate_over_both_commits_decides(series, aisp, gate, step, code, says):
    series(
        step=step,
        sources=after(15, {**SOURCES, "optimized": "syntax:2c"}, SOURCES),
        against=lambda day: commit(14)[:12] if day == 15 else "",
        gate=lambda day: gate if day == 15 else (),
    )
    found, [line, change] = aisp("h")
    assert found == code
    assert line.endswith("no change, 1 unconfirmed" if "not confirmed" in says else "1 change")
    assert change.endswith(f"; the source of optimized changed{says}")


@pytest.mark.parametrize("against", [commit(13), "main", "HEAD~1", commit(14)[:6]])
def test_a_code_gate_over_other_commits_confirms_nothing(series, aisp, against):
    series(
        step=-0.02,
        sources=after(15, {**SOURCES, "optimized": "syntax:2c"}, SOURCES),
        against=lambda day: against if day == 15 else "",
        gate=lambda day: [-0.02] if day == 15 else (),
    )
    assert aisp("h")[1][1].endswith("; unconfirmed")


def test_a_code_gate_over_uncommitted_code_confirms_nothing(series, aisp):
    series(
        step=-0.02,
        sources=after(15, {**SOURCES, "optimized": "syntax:2c"}, SOURCES),
        against=lambda day: commit(14) if day == 15 else "",
        gate=lambda day: [-0.02] if day == 15 else (),
        dirty=lambda day: day == 15,
    )
    assert "; unconfirmed" in aisp("h")[1][1]


def test_a_later_run_of_an_old_commit_only_confirms(series, run, aisp):
    changed = {**SOURCES, "optimized": "syntax:2c"}
    series(step=-0.02, sources=after(15, changed, SOURCES))
    assert aisp("h")[1][1].endswith("unconfirmed")
    again = {"against": commit(14), "gate": [-0.02], "sources": changed}
    aisp("--add", run(40, 0.0, git=GitState(commit=commit(15), dirty=False), **again), "h")
    code, [line, change] = aisp("h")
    assert (code, ", 30 runs, " in line) == (1, True)
    assert change.endswith("; confirmed by the code gate: 0.980x")


def test_a_comparison_with_the_record_is_no_comparison_of_commits(run, aisp, tmp_path):
    run(0, gate=[-0.02])
    aisp("--add=run0", "h")
    assert json.loads((tmp_path / FILE).read_text())["code_gate"] is None


def test_both_sides_count_in_the_code_gate():
    gate = CodeGate(commit="", values={"baseline": [0.05], "optimized": [0.01]}, spread=0.002)
    assert gate.effect == pytest.approx(-0.04)
    assert gate.confirms(-0.04)
    assert not gate.confirms(0.04)
    assert not CodeGate(commit="", values={"optimized": [-0.004]}, spread=0.002).confirms(-0.01)


def test_json_has_every_run_and_change(series, aisp):
    series(step=-0.02, environment=after(15, {**FACTS, "driver": "590.1"}, FACTS))
    code, lines = aisp("h", "--json")
    plain = json.loads("\n".join(lines))
    [case] = plain["cases"]
    assert (code, plain["problems"], len(case["runs"])) == (0, [], 30)
    [change] = case["changes"]
    assert change["state"] == "environment"
    assert change["low"] < math.expm1(-0.02) < change["high"]
    assert case["speedup"] == pytest.approx(change["new"])


def report_of(folder, *words):
    """Return the data of the only case in a report."""
    assert app.main(["results", "report", folder, *words]) == 0
    text = Path(folder, "report.html").read_text()
    [data] = re.findall(r'<script[^>]* id="data"[^>]*>(.*?)</script>', text, re.DOTALL)
    plain = json.loads(data)
    [case] = plain["cases"]
    return plain["runs"], case


def test_the_report_shows_a_history_with_its_changes(series, run, capsys):
    series(step=-0.02, environment=after(15, {**FACTS, "driver": "590.1"}, FACTS))
    runs, case = report_of("run29", "--history=h")
    entries = case["history"]
    assert (runs, len(entries)) == (30, 30), "the run itself is shown once"
    assert [entry["current"] for entry in entries] == [False] * 29 + [True]
    assert [n for n, entry in enumerate(entries) if entry["change"]] == [15]
    assert entries[15]["change"].endswith("; driver 580.65 -> 590.1")
    speedup = entries[3]["speedup"]
    assert speedup["low"] < speedup["value"] < speedup["high"]
    _, case = report_of(run(40), "--history=h", "--history=run3")
    assert len(case["history"]) == 31, "run 3 is in the history too"


def test_the_report_refuses_a_history_with_lines_that_cannot_be_used(run, aisp, tmp_path, capsys):
    run(0)
    aisp("--add=run0", "h")
    torn(tmp_path / FILE)
    assert app.main(["results", "report", "run0", "--history=h"]) == 2
    assert capsys.readouterr().err == (
        f"{FILE}:1: the last line, of {GEMM['key']}, is half written\n"
        "To see all such lines:\n    aisp results history h\n"
    )


def torn(path):
    text = path.read_bytes()
    path.write_bytes(text[:-30])
    return text


def test_a_half_written_last_line_is_named_and_moved_aside(run, aisp, tmp_path):
    run(0, cases=(GEMM, SPLIT))
    run(1, cases=(GEMM, SPLIT))
    aisp("--add=run0", "h")
    text = torn(tmp_path / FILE)
    message = f"{FILE}:2: the last line, of {SPLIT['key']}, is half written"
    code, lines = aisp("h")
    assert (code, lines[0], len(lines)) == (1, f"not used: {message}", 2)
    code, lines = aisp("--add=run1", "h")
    repaired = f"{FILE}: its last line, of {SPLIT['key']}, was half written"
    assert (code, lines) == (
        0,
        [
            "run1: 2 cases added to h",
            f"repaired: {repaired} and is now in ch10.jsonl.broken; add its run again",
        ],
    )
    left = (tmp_path / f"{FILE}.broken").read_bytes()
    assert text.splitlines()[1].startswith(left.rstrip(b"\n"))
    assert aisp("--add=run0", "h") == (0, ["run0: 1 cases added to h, 1 were there"])
    code, lines = aisp("h")
    assert (code, [", 2 runs, " in line for line in lines]) == (0, [True, True])


def test_a_whole_last_line_without_its_end_is_kept(run, aisp, tmp_path):
    run(0), run(1)
    aisp("--add=run0", "h")
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes().rstrip(b"\n"))
    assert aisp("--add=run1", "h")[0] == 0
    code, [line] = aisp("h")
    assert (code, ", 2 runs, " in line) == (0, True)


def test_lines_of_another_product_are_named_and_kept(run, aisp, tmp_path):
    run(0), run(1), run(2)
    aisp("--add=run0", "h")
    line = (tmp_path / FILE).read_text()
    other = line.replace("nvidia-h200", "nvidia-b200")
    (tmp_path / FILE).write_text(other + line + other.replace("gemm", "gemv"))
    message = (
        f"not used: {FILE}: lines 1, 3 (2 lines) are of nvidia-b200/ch10;"
        " move them to h/nvidia-b200/ch10.jsonl"
    )
    code, lines = aisp("h")
    assert (code, lines[0], len(lines)) == (1, message, 2)
    assert ", 1 run, " in lines[1]
    assert aisp("--add=run1", "--add=run2", "h") == (
        1,
        ["run1: 1 cases added to h", "run2: 1 cases added to h", message],
    )
    assert (tmp_path / FILE).read_text().startswith(other + line)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<<<<<<< HEAD", "is not a line of a history: "),
        ("[" * 100_000, "is not a line of a history: "),
        ("7", "is not a line of a history: Expected `object`, got `int`"),
        ('{"schema": 2}', "a newer pytest-aisp wrote it (schema 2; this one reads 1)"),
        ('{"schema": 1}', "Object missing required field `run`"),
    ],
)
def test_a_broken_line_in_the_middle_is_named_and_kept(run, aisp, tmp_path, text, why):
    run(0), run(1)
    aisp("--add=run0", "h")
    before = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(f"{text}\n{before}")
    code, lines = aisp("h")
    assert (code, len(lines)) == (1, 2)
    assert lines[0].startswith(f"not used: {FILE}:1: ")
    assert why in lines[0]
    assert aisp("--add=run1", "h")[0] == 1
    assert (tmp_path / FILE).read_text().startswith(f"{text}\n{before}")


def test_a_line_that_is_there_twice_counts_once_and_is_named(run, aisp, tmp_path):
    run(0)
    aisp("--add=run0", "h")
    (tmp_path / FILE).write_text(2 * (tmp_path / FILE).read_text())
    code, lines = aisp("h")
    assert (code, lines[0]) == (1, f"not used: {FILE}: line 2 is there twice; remove them")
    assert ", 1 run, " in lines[1]


def refused(capsys, *words):
    assert app.main(["results", "history", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


def test_what_cannot_be_added_is_refused(run, tmp_path, capsys):
    run(0)
    assert "there is no such folder" in refused(capsys, "--add=none", "h")
    assert "run0: is a run, not a history" in refused(capsys, "--add=run0", "run0")
    row = fake_results.row(GEMM)
    fake_results.artifacts(tmp_path / "aa", [row], mode="aa")
    assert "aa: is a run in the mode aa" in refused(capsys, "--add=aa", "h")
    fake_results.artifacts(tmp_path / "canary", [row], [{"wrong": "it saw nothing"}])
    assert "canary: its speedups are invalid: canary: it saw" in refused(
        capsys, "--add=canary", "h"
    )
    untimed = fake_results.row(GEMM, "checked", value=None, low=None, high=None)
    fake_results.artifacts(tmp_path / "untimed", [untimed])
    assert "untimed: no case was timed" in refused(capsys, "--add=untimed", "h")
    far = fake_results.row(GEMM, value=99.0, low=98.0, high=100.0)
    fake_results.artifacts(tmp_path / "far", [far])
    assert ": a value that no run writes: " in refused(capsys, "--add=far", "h")
    away = fake_results.row(GEMM, product="../../x")
    fake_results.artifacts(tmp_path / "away", [away])
    assert ": a value that no run writes: " in refused(capsys, "--add=away", "h")
    assert not (tmp_path / "h").exists()


def test_one_bad_run_keeps_all_from_being_added(run, tmp_path, capsys):
    run(0)
    refused(capsys, "--add=run0", "--add=none", "h")
    assert not (tmp_path / "h").exists()


def test_missing_samples_of_a_comparison_are_an_error(run, tmp_path, capsys):
    run(1, against=commit(0), gate=[-0.02])
    shutil.rmtree(tmp_path / "run1/samples")
    assert "its samples are missing" in refused(capsys, "--add=run1", "h")


def test_what_cannot_be_read_is_refused(run, aisp, tmp_path, capsys):
    run(0)
    assert refused(capsys, "h") == "h: there is no such folder\n"
    (tmp_path / "h").mkdir()
    assert "h: has no history\nAdd a run to it:\n" in refused(capsys, "h")
    aisp("--add=run0", "h")
    assert refused(capsys, "h", "--case=conv") == "h: none of its 1 cases contains 'conv'\n"
    (tmp_path / "h/nvidia-h200/ch11.jsonl").mkdir()
    assert "h: cannot be read: " in refused(capsys, "h")
    (tmp_path / "file").write_text("")
    assert "file: cannot be written: " in refused(capsys, "--add=run0", "file")


def test_a_killed_run_is_added_with_a_warning(tmp_path, monkeypatch, aisp):
    monkeypatch.chdir(tmp_path)
    fake_results.artifacts(tmp_path / "killed", [fake_results.row(GEMM)], code=None)
    assert aisp("--add=killed", "h") == (
        0,
        [
            "killed: the run did not finish; cases may be missing",
            "killed: 1 cases added to h",
        ],
    )


def test_processes_that_add_at_once_lose_nothing(run, aisp, tmp_path):
    names = [run(day, cases=(GEMM, SPLIT)) for day in range(6)]
    script = "import sys\nfrom pytest_aisp.cli.app import main\nsys.exit(main())"
    command = [sys.executable, "-c", script, "results", "history"]
    started = [subprocess.Popen([*command, f"--add={name}", "h"]) for name in names]
    assert [process.wait() for process in started] == [0] * 6
    [file] = history.read(Path("h"))
    assert (len(file.lines), file.problems) == (12, [])


def test_a_real_run_is_added_with_its_code_gate(page, gpu, commit, git, pytester, aisp):
    gpu(added=2e-5, doubled=1e-5, **{"doubled@old": 0.98e-5, "added@old": 2e-5})
    path = page()
    commit()
    sha = git("rev-parse", "HEAD")
    changed = path.read_text().replace("def doubled(x):\n    return 2 * x", CHANGED)
    path.write_text(changed)
    assert pytester.runpytest_subprocess(f"--aisp-against={sha}", "--aisp-artifacts=out").ret == 1
    assert aisp("--add=out", "h")[0] == 0
    [file] = history.read(Path("h"))
    [line] = file.lines
    assert line.value == pytest.approx(math.log(2), abs=0.02)
    assert line.code_gate.commit == sha
    assert line.code_gate.effect == pytest.approx(-0.02, abs=0.005)
    assert line.dirty
