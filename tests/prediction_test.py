"""The predicted times in a row: stored, noted, reported, and no part of the verdict."""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec
import pytest

from pytest_aisp import Cost
from pytest_aisp.report.data import report_data
from pytest_aisp.report.run import ReportRun
from pytest_aisp.results import run_reader
from pytest_aisp.results.models import joined
from pytest_aisp.results.notes import predicted_note
from pytest_aisp.session import case, measurement
from pytest_aisp.timing import peaks
from pytest_aisp.util.device import Machine

COST = """costs={
            added: lambda n: copied(n) + Cost(read=4 * n, launches=1),
            doubled: lambda n: copied(n),
        },"""
DEFS = """
from pytest_aisp import Cost


def copied(n):
    return Cost(read=4 * n, write=4 * n, launches=1)
"""
# doubled: 8008 bytes at 1 GB/s and a start of 2 us. added: also 4004 bytes at 4 GB/s and a start.
RATES = {"copy": 1e9, "read": 4e9, "write": 1e9, "graph_node": 2e-6}
PREDICTED = {"added": pytest.approx(13.009e-6), "doubled": pytest.approx(10.008e-6)}


@pytest.fixture
def predicting(timed_page, pytester):
    """Run a page with costs; return the run and the result of pytest."""

    def run(*options, more=COST, seen="", rates=RATES, **parts):
        path = timed_page(more=more, defs=DEFS, **parts)
        path.write_text(path.read_text().replace('Doubling."""', f'Doubling.\n\n{seen}"""'))
        file = pytester.path / "baselines" / "simulated-gpu" / "peaks.json"
        peaks.save(file, peaks.Peaks("simulated-gpu", rates))
        result = pytester.runpytest_subprocess("--aisp-artifacts=kept", *options)
        return run_reader.load(pytester.path / "kept"), result

    return run


def test_a_row_holds_the_predicted_times_of_both_sides(predicting, pytester):
    found, result = predicting("-vv")
    (line,) = found.lines
    assert (line.verdict, line.predicted, line.unexplained) == ("new", PREDICTED, ["added"])
    note = "predicted 13.01 us / 10.01 us: 1.3x; unexplained: added takes 1.54x the predicted time"
    result.stdout.fnmatch_lines([f"*: {note}"])
    (case,) = json.loads((pytester.path / "kept" / "results.json").read_text())["cases"]
    assert case["predicted"] == {
        "baseline": PREDICTED["added"],
        "optimized": PREDICTED["doubled"],
    }
    assert case["unexplained"] == ["added"]
    data = json.loads(report_data(ReportRun.read(pytester.path / "kept")).json())
    assert data["cases"][0]["predicted"] == case["predicted"]
    assert data["cases"][0]["unexplained"] == ["added"]


@pytest.mark.parametrize(
    ("seen", "unexplained"),
    [("added waits.", []), ("Both sides wait.", []), ("doubled waits.", ["added"])],
)
def test_a_side_that_the_page_names_in_seen_is_not_unexplained(predicting, seen, unexplained):
    found, _ = predicting(seen=f"Seen       {seen}\n")
    assert (found.lines[0].predicted, found.lines[0].unexplained) == (PREDICTED, unexplained)


def test_a_missing_rate_is_a_note(predicting):
    found, result = predicting("-vv", rates={"copy": 1e9, "graph_node": 2e-6})
    assert (found.lines[0].verdict, found.lines[0].predicted) == ("new", {})
    result.stdout.fnmatch_lines(
        [
            "*: not predicted: *_test.py:*: the cost of added: the rate 'read' was not measured on"
            " simulated-gpu; measure it there: aisp machine peak --store"
        ]
    )


@pytest.mark.parametrize(
    "more",
    ["", "costs={added: lambda n: Cost(read=4 * n, write=4 * n, launches=1)},"],
    ids=["no cost", "one side's cost"],
)
def test_both_sides_must_declare_a_cost(predicting, more):
    found, _ = predicting("-vv", more=more)
    assert found.lines[0].predicted == {}
    assert not any("predicted" in note for note in found.lines[0].notes)


def test_recorded_times_are_compared_with_the_predicted_ones(predicting):
    found, _ = predicting("--aisp-update-expectations", "--aisp-processes=2")
    assert found.lines[0].predicted == PREDICTED
    assert found.lines[0].unexplained == ["added"]


def test_an_older_run_is_read_without_predicted_times(predicting, pytester):
    folder = pytester.path / "kept"
    predicting()
    journal = folder / "results.jsonl"
    line = json.loads(journal.read_text())
    del line["predicted"], line["unexplained"]
    journal.write_text(json.dumps(line) + "\n")
    assert run_reader.load(folder).lines[0].predicted == {}
    results = json.loads((folder / "results.json").read_text())
    del results["cases"][0]["predicted"], results["cases"][0]["unexplained"]
    (folder / "results.json").write_text(json.dumps(results))
    (case,) = ReportRun.read(folder).cases
    assert (case.predicted, case.unexplained) == (None, [])
    assert case.seconds is not None


def test_a_row_keeps_the_error_of_timed_outputs_and_the_precision(
    timed_page, pytester, forked_processes, monkeypatch
):
    read, errors = case.read_timing, {"added": 0.0, "doubled": 2e-3}

    def with_errors(client, stored, result):
        return read(client, stored, msgspec.structs.replace(result, relative=errors))

    monkeypatch.setattr(case, "read_timing", with_errors)
    timed_page("(2 * x).bfloat16().float()", variants="[Variant(doubled, precision='bf16')]")
    pytester.runpytest_inprocess("--aisp-artifacts=kept", "--aisp-processes=1")
    [line] = run_reader.load(pytester.path / "kept").lines
    assert (line.errors, line.precisions) == ({"doubled": 2e-3}, {"doubled": "bf16"})
    [found] = json.loads((pytester.path / "kept" / "results.json").read_text())["cases"]
    assert (found["errors"], found["precisions"]) == (line.errors, line.precisions)


@pytest.mark.parametrize(("nodes", "predicted"), [(1, {"twice": 0.5, "once": 0.25}), (2, {})])
def test_gpus_of_one_machine_copy_to_each_other_at_the_rate_of_two(monkeypatch, nodes, predicted):
    known = {
        "y1": peaks.Peaks("y1", {"copy": 1e9}),
        "y1-x2": peaks.Peaks("y1-x2", {"peer": 4e9}, {"peer": "NVLink 4 x18"}),
        joined("y1", 4, nodes): peaks.Peaks("y1-x4", {"busbw": 3e9}),
    }
    settings = SimpleNamespace(aa=False)
    run = SimpleNamespace(
        nodes=nodes, settings=settings, peaks=lambda product, measure=True: known.get(product)
    )

    def twice(n): ...

    def once(n): ...

    costs = {twice: lambda n: Cost(sent=2 * n), once: lambda n: Cost(sent=n)}
    pair = SimpleNamespace(baseline=twice, costs=costs)
    monkeypatch.setattr(measurement, "cost_at", lambda pair, side, size, world: costs[side](10**9))
    case = SimpleNamespace(pair=pair, variant=SimpleNamespace(side=once), size={}, gpus=4)
    client = SimpleNamespace(case=case, run=run, machine=Machine("sm90", "y1", "Y1"), notes=[])
    timing = measurement.Timing(None, None, "graph", 0.0, {"twice": 1.0, "once": 1.0}, {}, {}, {})
    assert measurement.with_prediction(client, timing).predicted == predicted
    assert bool(client.notes) is (nodes == 2)


def test_the_note_names_every_unexplained_side():
    times = {"slow": 2e-4, "fast": 1e-4}
    assert predicted_note(times, times, []) == "predicted 200 us / 100 us: 2x"
    assert predicted_note(times, {"slow": 3e-4, "fast": 5e-5}, ["slow", "fast"]) == (
        "predicted 200 us / 100 us: 2x;"
        " unexplained: slow takes 1.50x, fast takes 0.50x the predicted time"
    )


@pytest.mark.parametrize(
    ("seconds", "note"),
    [
        ({"added": 2e-5, "doubled": 1e-5}, "preparing doubled took 1 ms: pays after 100 calls"),
        ({"added": 1e-5, "doubled": 2e-5}, "preparing doubled took 1 ms: never pays"),
    ],
)
def test_a_note_says_after_how_many_calls_preparing_a_side_pays(
    page, gpu, pytester, forked_processes, monkeypatch, seconds, note
):
    read = case.read_timing

    def prepared(client, stored, result):
        changes = {
            "baseline": [seconds["added"]] * len(result.baseline),
            "optimized": [seconds["doubled"]] * len(result.optimized),
            "one_off": {"added": 0.0, "doubled": 1e-3},
        }
        return read(client, stored, msgspec.structs.replace(result, **changes))

    monkeypatch.setattr(case, "read_timing", prepared)
    gpu(**seconds)
    page()
    pytester.runpytest_inprocess("--aisp-artifacts=kept", "--aisp-processes=1")
    [line] = run_reader.load(pytester.path / "kept").lines
    assert [each for each in line.notes if "preparing" in each] == [note]
