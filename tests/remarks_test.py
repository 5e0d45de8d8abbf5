"""Notes and remarks of a row: graphs, memory, launch-bound sides."""

from __future__ import annotations

import pytest

from pytest_aisp.results import run_reader
from pytest_aisp.results.artifacts import Artifacts
from pytest_aisp.results.notes import graph_notes, launch_bound, launch_bound_note, memory_note
from pytest_aisp.results.row import amount

MIB = 1 << 20
NAMES = ("added", "doubled")


def test_graph_notes_count_nodes_per_call():
    by_side = {"baseline": {"kernel": 3.0, "memset": 1.0}, "optimized": {"kernel": 1.0}}
    assert graph_notes(NAMES, {"graph_nodes": by_side}) == [
        "added's graph: 3 kernels, 1 memset a call",
        "doubled's graph: 1 kernel a call",
    ]
    half = {"baseline": {"kernel": 0.5, "memcpy": 2.0}, "optimized": {"child graph": 1.0}}
    assert graph_notes(NAMES, {"graph_nodes": half}) == [
        "added's graph: 0.5 kernels, 2 memcpys a call",
        "doubled's graph: 1 child graph a call",
    ]


def test_a_graph_without_counts_gives_the_reason():
    text = graph_notes(NAMES, {"no graph_nodes": "cuGraphGetNodes: CUDA_ERROR_INVALID_VALUE"})
    assert text == ["graph: nodes not counted: cuGraphGetNodes: CUDA_ERROR_INVALID_VALUE"]
    assert graph_notes(NAMES, {}) == []  # another clock


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (64 * MIB, "64.0 MiB"),
        (640 * MIB, "640 MiB"),
        (1.2 * 1024 * MIB, "1.2 GiB"),
        (300 * 1024 * MIB, "300 GiB"),
    ],
)
def test_bytes_are_printed_with_a_fitting_unit(count, text):
    assert amount(count) == text


@pytest.mark.parametrize(
    ("baseline", "optimized", "traded"),
    [
        (600, 1200, True),
        (0, 65, True),
        (0, 64, False),  # no more than 64 MiB
        (600, 900, False),  # no more than 1.5 times
        (1200, 600, False),  # the baseline's own affair
    ],
)
def test_memory_is_traded_for_speed_if_the_optimized_side_needs_much_more(
    baseline, optimized, traded
):
    text, loud = memory_note({"baseline": baseline * MIB, "optimized": optimized * MIB})
    assert text == f"memory: {amount(baseline * MIB)} / {amount(optimized * MIB)} beyond the inputs"
    assert loud is traded


@pytest.mark.parametrize(
    ("as_called", "bound"),
    [
        ([6.2e-5, 1.1e-5], {"added": pytest.approx(3.1)}),
        ([6.2e-5, 1.6e-5], {"added": pytest.approx(3.1), "doubled": pytest.approx(1.6)}),
        ([2.1e-5, 1.4e-5], {}),
    ],
)
def test_a_side_that_is_much_slower_without_a_graph_is_launch_bound(as_called, bound):
    seconds = {"added": 2e-5, "doubled": 1e-5}
    assert launch_bound("graph", seconds, as_called) == bound
    assert launch_bound("queue", seconds, as_called) == {}


def test_launch_bound_sides_are_named():
    assert launch_bound_note({"added": 3.14, "doubled": 1.6}) == (
        "launch-bound: without a graph, a call takes longer: added 3.1x, doubled 1.6x"
    )


DETAILS = {
    "as_called": [6.2e-5, 1.1e-5],
    "graph_nodes": {"baseline": {"kernel": 3.0, "memset": 1.0}, "optimized": {"kernel": 1.0}},
    "peak_bytes": {"baseline": 600 * MIB, "optimized": 1200 * MIB},
}
CASE = "doubling_test.py::test_doubling[[]doubled-n1001[]]: "
BOUND = f"{CASE}launch-bound: without a graph, a call takes longer: added 3.1x"
TRADED = f"{CASE}memory: 600 MiB / 1.2 GiB beyond the inputs"
COUNTED = "test_doubling[[]doubled[]]: added's graph: 3 kernels, 1 memset a call"


@pytest.fixture
def measured(timed_page, pytester):
    """Run a page whose first process has seen `details`, and return what is shown of it."""
    timed_page()
    pytester.runpytest_subprocess("--aisp-artifacts=seen")

    def run(*options, **details):
        seen = run_reader.load(pytester.path / "seen")
        [row] = seen.rows()
        row.timings[0]["details"] |= details
        row.timings[0] |= {"baseline": [2e-5], "optimized": [1e-5]}
        again = Artifacts(seen.path)
        again.start(seen.manifest)
        again.add(row)
        result = pytester.runpytest_subprocess("--aisp-replay=seen", *options)
        assert result.ret == 0
        return result.stdout

    return run


def test_remarks_are_shown_without_vv_and_stored(measured, pytester):
    shown = measured("--aisp-artifacts=kept", **DETAILS)
    shown.fnmatch_lines([BOUND, TRADED])
    shown.no_fnmatch_line("*'s graph: *")
    [row] = run_reader.load(pytester.path / "kept").rows()
    assert row.launch_bound == {"added": pytest.approx(3.1)}
    assert len(row.remarks) == 2
    assert "added's graph: 3 kernels, 1 memset a call" in row.notes
    assert row.timings[0]["details"]["peak_bytes"] == DETAILS["peak_bytes"]


def test_vv_shows_every_note_and_remark_once(measured):
    text = measured("-vv", **DETAILS)
    text.fnmatch_lines([COUNTED, BOUND, TRADED])
    assert text.str().count("launch-bound: without a graph") == 1
    assert text.str().count("beyond the inputs") == 1


def test_notes_are_shown_only_with_vv(measured):
    peaks = {"baseline": 1200 * MIB, "optimized": 600 * MIB}
    details = DETAILS | {"as_called": [2.1e-5, 1.1e-5], "peak_bytes": peaks}
    silent = measured(**details)
    silent.no_fnmatch_line("*launch-bound*")
    silent.no_fnmatch_line("*beyond the inputs*")
    verbose = measured("-vv", **details)
    verbose.fnmatch_lines(
        ["test_doubling[[]doubled[]]: memory: 1.2 GiB / 600 MiB beyond the inputs"]
    )
    verbose.no_fnmatch_line("*launch-bound*")
