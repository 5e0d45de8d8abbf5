"""The trials of the code gate: recorded on the simulated device, judged, replayed."""

from __future__ import annotations

import itertools
import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import code_gate
import code_gate_judge
import code_gate_others
import code_gate_record
import pytest
import torch
import triton.testing
from code_gate_environments import EnvironmentsRecorder
from code_gate_record import KERNELS, Plan, Recorder

from pytest_aisp.checking import inputs
from pytest_aisp.results import verdict
from pytest_aisp.results.messages import Reply
from pytest_aisp.timing import cuda_graph, schedule
from pytest_aisp.worker.loader import pair_of

DATA = Path(code_gate.__file__).parent / "data"
RECORDINGS = sorted(DATA.glob("code_gate_*.jsonl"))
FASTEST = DATA / "code_gate_rebuilt_nvidia-h100-80gb-hbm3_2.jsonl"
PLAN = Plan(processes=6, rounds=2, others=4, simulated=True, in_process=True)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    out = tmp_path_factory.mktemp("code_gate") / "recording.jsonl"
    Recorder(PLAN, out).run()
    return out


def judged(path):
    return code_gate_judge.judge(code_gate_judge.read([path]))


def rewritten(path, out, change):
    """Write the rows of `path` to `out`, with `change` applied to each trial."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["kind"] == "trial":
            change(row)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


@pytest.mark.parametrize(
    "recording",
    [pytest.param(path, marks=[pytest.mark.slow] * (path != FASTEST)) for path in RECORDINGS],
    ids=lambda path: path.stem,
)
def test_stored_recordings_give_the_stored_table(recording, capsys):
    table = recording.with_suffix(".md")
    same = code_gate.main(["judge", str(recording), "--check", str(table)]) == 0
    assert same, capsys.readouterr().err


def test_the_recorded_kernels_are_the_pages_kernels():
    import code_gate_kernels

    every = {name: pair_of(test) for name, test in vars(code_gate_kernels).items()}
    pairs = {name: pair for name, pair in every.items() if pair is not None}
    assert pairs.keys() == {f"test_{name}" for name in KERNELS}
    for name, kernel in KERNELS.items():
        pair = pairs[f"test_{name}"]
        assert [variant.name for variant in pair.variants] == [name]
        assert list(pair.sizes) == [dict(kernel.size)]


def test_few_false_reds_and_few_misses(recorded):
    count = judged(recorded).count()
    rounds = PLAN.processes * PLAN.rounds - 2  # the first two are the pilot
    assert count["unchanged"] == (2 * rounds + 2 * 3) * len(KERNELS)
    assert count["planted"] + count["below"] == rounds * len(KERNELS)
    assert count["unchanged red"] == 0
    assert count["planted red"] >= count["planted"] - 1
    assert count["below"] <= 2


def test_a_side_that_is_slower_is_red(recorded, tmp_path):
    def slower(row):
        for name in ("blocks", "laps"):
            row[name] = [value - 0.01 for value in row[name]]

    count = judged(rewritten(recorded, tmp_path / "slower.jsonl", slower)).count()
    assert count["unchanged red"] == count["unchanged"]


def test_slowdowns_below_the_detectable_one_are_counted_separately(recorded, tmp_path):
    def less(row):
        row["planted"] /= 2

    count = judged(rewritten(recorded, tmp_path / "less.jsonl", less)).count()
    assert count["planted"] == 0
    assert count["below"] == (PLAN.processes * PLAN.rounds - 2) * len(KERNELS)


def planted_in(processes, path, out):
    """Write the rows of `path` to `out`, but plant the losses of `added` in `processes` alone."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    left_out = [
        row
        for row in rows
        if row.get("kernel") == "added" and row.get("asked") and row["process"] not in processes
    ]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows if row not in left_out))
    return out


def test_slowdowns_planted_in_too_few_processes_are_counted_separately(recorded, tmp_path):
    enough = judged(planted_in({2, 3, 4, 5}, recorded, tmp_path / "enough.jsonl"))
    count = enough.count("added")
    assert count["planted"] == count["planted red"] > 0 == count["unvoted"]
    assert "to vote on" not in code_gate_judge.totals(enough)
    few = judged(planted_in({3, 4, 5}, recorded, tmp_path / "few.jsonl"))
    count = few.count()
    assert count["planted"] == count["planted red"] > 0 == few.count("added")["planted"]
    line = f"Planted in too few processes to vote on: {count['unvoted']}."
    assert line in code_gate_judge.totals(few).splitlines()
    [row] = [row for row in code_gate_judge.kernel_rows(few) if row[0] == "added"]
    assert (row[-3:], few.count("added")["unvoted"]) == (["0", "", "0"], count["unvoted"])


def test_a_planted_slowdown_that_is_no_suspect_is_missed_also_without_voters(recorded, tmp_path):
    def as_fast(row):
        for name in ("blocks", "laps"):
            row[name] = [0.0 for _ in row[name]]

    few = planted_in({3, 4, 5}, recorded, tmp_path / "few.jsonl")
    count = judged(rewritten(few, tmp_path / "missed.jsonl", as_fast)).count("added")
    assert count["planted"] > 0 == count["planted red"] == count["unvoted"]


def test_a_truncated_recording_is_read_up_to_its_last_line(recorded, tmp_path):
    lines = recorded.read_text().splitlines(keepends=True)
    stopped = tmp_path / "stopped.jsonl"
    stopped.write_text("".join(lines[:60]) + lines[60][:40])
    assert len(code_gate_judge.read([stopped]).trials) < 60
    stopped.write_text(lines[0] + lines[1][:40] + "\n" + lines[2])
    with pytest.raises(ValueError, match=r"stopped\.jsonl:2 is not a line of a recording"):
        code_gate_judge.read([stopped])


def test_the_seconds_of_a_trial_run_from_the_line_before_it(recorded, tmp_path):
    def half_a_second(row):
        row["after"] = row["number"] / 2

    changed = judged(rewritten(recorded, tmp_path / "changed.jsonl", half_a_second))
    lines = ["The median trial took 0.50 s.", "95 % of the trials took at most 0.50 s."]
    assert code_gate_judge.totals(changed).splitlines()[-2:] == lines


def test_several_recordings_are_judged_together(recorded):
    both = code_gate_judge.read([recorded, recorded])
    assert len({trial.process for trial in both.trials}) == 2 * PLAN.processes
    assert len(code_gate_judge.where(both).splitlines()) == 2


def test_votes_come_from_each_other_process_once(recorded):
    trials = code_gate_judge.read([recorded]).trials
    whose = {trial.reading: trial.process for trial in trials}
    pool = code_gate_judge.VotePool(trials)
    for trial in trials[:20]:
        votes = [whose[v] for v in pool.votes(trial, code_gate_judge._rng(trial))]
        assert sorted(votes) == sorted({t.process for t in trials} - {trial.process})


def test_check_compares_with_a_stored_table(recorded, tmp_path, capsys):
    arguments = ["judge", str(recorded), "--suites", "200"]
    assert code_gate.main(arguments) == 0
    table = tmp_path / "table.md"
    table.write_text(capsys.readouterr().out)
    assert code_gate.main([*arguments, "--check", str(table)]) == 0
    table.write_text(table.read_text().replace("| scaled |", "| other |"))
    assert code_gate.main([*arguments, "--check", str(table)]) == 1
    assert "-| other |" in capsys.readouterr().err


def test_every_way_to_judge_has_a_row(recorded):
    rows = code_gate_judge.comparison_rows(judged(recorded))
    assert rows[0][0] == "the code gate"
    assert len(rows) == 1 + len(code_gate_judge.WAYS) + len(code_gate_judge.STORED_WAYS)
    assert all(int(row[1]) and row[1] == row[4] for row in rows[1:])


def test_upper_limit_of_a_share():
    assert code_gate_judge.upper_limit(0, 1000) == pytest.approx(0.00299, abs=1e-5)
    assert code_gate_judge.upper_limit(1, 473) == pytest.approx(0.0100, abs=1e-4)
    assert code_gate_judge.upper_limit(700, 1000) == pytest.approx(0.7239, abs=1e-3)
    assert code_gate_judge.upper_limit(3, 3) == 1


@pytest.mark.parametrize(
    ("new", "limit", "expected"), [(1.011, 1, True), (1.009, 1, False), (1.06, 5, True)]
)
def test_the_rule_matches_pytest_benchmark(new, limit, expected):
    assert code_gate_judge.fails({"min": new}, {"min": 1.0}, "min", limit) == expected
    utils = pytest.importorskip("pytest_benchmark.utils")
    check = utils.parse_compare_fail(f"min:{limit}%")
    assert bool(check.fails({"min": new}, {"min": 1.0})) == expected


def test_the_rounds_match_pytest_benchmark():
    ticks = itertools.count(step=0.01)
    rounds = code_gate_others.fixture_rounds(lambda: None, lambda: next(ticks))
    assert len(rounds) == 15  # of 10 ms in 0.15 s
    assert rounds == pytest.approx([0.01] * 15)
    slow = itertools.count(step=1)
    assert len(code_gate_others.fixture_rounds(lambda: None, lambda: next(slow))) == 5


def test_other_timers_time_graphs_of_the_same_calls(monkeypatch):
    """Python functions replace CUDA."""
    calls = []

    def do_bench(function, warmup, rep, return_mode):
        assert (warmup, rep, return_mode) == (25, 100, "all")
        calls.clear()
        function()
        return [float(len(calls))]

    class CpuPool(inputs.InputPool):
        def __init__(self, pair, size, device, *seeds):
            super().__init__(pair, size, "cpu", *seeds)

        def bind(self, side):
            return super().bind(lambda *inputs: calls.append(inputs))

    properties = types.SimpleNamespace(L2_cache_size=1 << 16)
    graph = types.SimpleNamespace
    monkeypatch.setattr(cuda_graph, "capture_graph", lambda run: graph(replay=run))
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(inputs, "InputPool", CpuPool)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 30))
    where = Recorder(Plan(), Path())
    where.process = where.number = 0
    options = {**where._location("added"), "size": {"n": 4096}, "planted": 0.012}
    details = code_gate_others.measure("added", "added", options, schedule.Budget(), "").details
    assert details["planted"] == 0.02
    times = {row["graph"]: row["mean"] for row in details["found"] if row["way"] == "do_bench"}
    assert times == pytest.approx({"old": 1e-3, "same": 1e-3, "slow": 1.02e-3})
    graphs = [row["graph"] for row in details["found"] if row["way"] == "pytest-benchmark"]
    assert graphs == ["old", "slow"]


class Broken:
    """A worker whose every reply is an error."""

    def __init__(self, error):
        self.error, self.requests = error, 0

    def ask(self, task, seconds, progress):
        self.requests += 1
        return Reply(error=self.error, message="the context is lost")

    def close(self):
        """Nothing to release."""


@pytest.mark.parametrize(("error", "requests"), [("died", 1), ("side", 3 * len(KERNELS) + 1)])
def test_failures_are_recorded_and_end_the_recording(tmp_path, monkeypatch, error, requests):
    worker = Broken(error)
    monkeypatch.setattr(Recorder, "start", lambda self: worker)
    out = tmp_path / "broken.jsonl"
    recorder = Recorder(Plan(processes=1, minutes=10.0, others=0, simulated=True), out)
    recorder.run()
    assert worker.requests == requests
    errors = [
        row for row in map(json.loads, out.read_text().splitlines()) if row["kind"] == "error"
    ]
    assert len(errors) == requests
    assert errors[0]["message"] == ["the context is lost"]
    assert code_gate.main(["judge", str(out)]) == 1


def test_processes_share_the_time_evenly(monkeypatch):
    recorder = Recorder(Plan(processes=20, minutes=10.0), Path())
    recorder.started, recorder.reserve = 100.0, 2.0
    recorder.process = 4
    assert recorder._until() == pytest.approx(100 + 150 - 2)


def test_a_recording_is_not_overwritten(recorded):
    with pytest.raises(FileExistsError):
        Recorder(PLAN, recorded).run()


def test_record_and_judge_through_worker_processes(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    record = ["record", str(out), "--simulated", "--processes", "1", "--rounds", "1"]
    assert code_gate.main([*record, "--others", "1"]) == 0
    assert "process 1 of 1: 24 unchanged, 0 planted, 0 failed" in capsys.readouterr().out
    assert code_gate.main(["judge", str(out), "--suites", "20"]) == 0
    with pytest.raises(SystemExit):
        code_gate.main(record[:3])


@pytest.mark.slow
def test_kernels_are_compared_with_a_copy_of_their_page(tmp_path):
    out = tmp_path / "rebuilt.jsonl"
    recorder = Recorder(replace(PLAN, rebuilt=True, others=0), out)
    recorder.run()
    task = recorder.task("scaled")
    assert (task.versus, task.past.module) == ("old", "aisp_past.code_gate_kernels")
    counts = judged(out).count()
    assert counts["unchanged"] > counts["planted"] > 0 == counts["unchanged red"]
    assert counts["planted red"] == counts["planted"]


@pytest.mark.slow
def test_kernels_are_compared_with_another_environment(tmp_path):
    out = tmp_path / "environments.jsonl"
    plan = replace(PLAN, in_process=False, python=sys.executable)
    EnvironmentsRecorder(plan, out).run()
    result = judged(out)
    counts = result.count()
    assert counts["unchanged"] > counts["planted"] > 0 == counts["unchanged red"]
    assert counts["planted red"] == counts["planted"]
    assert set(result.spread.values()) == {verdict.DEFAULT_SPREAD["graph"]}
    assert all(t.planted in (0, 0.02) for t in result.recording.trials)


@pytest.mark.slow
def test_an_environment_that_cannot_answer_is_an_error(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    out = tmp_path / "environments.jsonl"
    plan = replace(PLAN, processes=1, rounds=1, in_process=False, python=str(python))
    recorder = EnvironmentsRecorder(plan, out)
    recorder.run()
    errors = [json.loads(line) for line in out.read_text().splitlines()][1:]
    assert [row["error"] for row in errors] == ["died"]
    assert recorder.failed == 2


def test_the_planted_share_follows_the_spread():
    recorder = Recorder(Plan(), Path())
    assert recorder.share("added") == pytest.approx(0.0151, abs=1e-4)
    recorder.values["added"] = [0.0005, -0.0005, 0.0004, -0.0004, 0.0]
    assert recorder.share("added") == 0.01
    recorder.values["added"] = [value * 8 for value in recorder.values["added"]]
    spread = code_gate_record.stats.trimmed_spread(recorder.values["added"])
    assert recorder.share("added") > 6 * spread


def test_the_effect_of_build_order_is_listed_by_kernel(recorded, tmp_path, capsys):
    def moved(row):
        row["laps"] = [-0.01, 0.01, -0.01, 0.01]

    made = rewritten(recorded, tmp_path / "moved.jsonl", moved)
    assert code_gate.main(["laps", str(made)]) == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(KERNELS)
    assert {tuple(row.split(" | ")[3:]) for row in rows} == {("1.00%", "1.00%", "0.00% |")}
