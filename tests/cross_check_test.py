"""Several clocks and the profiler time the same work. Which differences between them are errors?"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aisp.isolation.protections import without
from pytest_aisp.timing.cross_check import (
    ATTEMPTS,
    Clocks,
    KernelProfile,
    contradiction,
    kernel_notes,
    summarize,
    union,
)
from pytest_aisp.util import process_group

HONEST = Clocks(events=5e-3, host=5.06e-3, counter=5.004e-3, late=8e-6)
TRICKS = {
    "side stream": (
        {"late": 4e-3},
        "work continues for 4e+03 us after the last call of 5000 us: the side does not wait for"
        " its own stream",
        "no-late-work",
    ),
    "one short call on a side stream": (
        {"late": 4.5e-5, "queued": True},
        "work continues for 45 us after the last call of 5000 us: the side does not wait for its"
        " own stream",
        "no-late-work",
    ),
    "replaced events": (
        {"events": 5e-5},
        "the events measure 50 us, but the host measures 5060 us between full waits",
        "clocks-agree",
    ),
    "replaced host clock": (
        {"host": 5e-5},
        "the events measure 5000 us, but the host measures 50 us between full waits",
        "clocks-agree",
    ),
    "replaced events and host clock": (
        {"events": 5e-5, "host": 5.1e-5},
        "the events measure 50 us, but the GPU's own counter measures 5004 us",
        "clocks-agree",
    ),
}


@pytest.mark.parametrize(("changes", "message", "protection"), TRICKS.values(), ids=TRICKS)
def test_cross_check_detects_a_replaced_clock(changes, message, protection):
    clocks = replace(HONEST, **changes)
    assert clocks.contradiction() == message
    with without([protection]):
        assert clocks.contradiction() == ""


@pytest.mark.parametrize(
    "clocks",
    [
        HONEST,
        replace(HONEST, host=None),  # queued behind a blocking kernel
        replace(HONEST, counter=None),  # no compiler for the timestamp kernel
        replace(HONEST, events=2e-6, host=1.2e-4, counter=1.5e-5),  # launches take time
    ],
)
def test_ordinary_noise_between_clocks_is_accepted(clocks):
    assert clocks.contradiction() == ""


def test_one_reading_without_contradiction_is_enough():
    busy = replace(HONEST, host=9e-3)
    readings = iter([busy] * (ATTEMPTS - 1) + [HONEST])
    assert contradiction(lambda: next(readings)) == ""
    assert "the host measures 9000 us between full waits" in contradiction(lambda: busy)


def test_several_ranks_may_be_idle_later(monkeypatch):
    slow = replace(HONEST, events=1e-3, host=None, counter=None, late=1.2e-4)
    assert "work continues" in slow.contradiction()
    monkeypatch.setattr(process_group, "_current", SimpleNamespace(world=2))
    assert slow.contradiction() == ""
    assert "work continues for 300 us" in replace(HONEST, late=3e-4).contradiction()
    monkeypatch.undo()
    assert replace(HONEST, late=1.2e-4).contradiction() == ""  # 2 % of a graph's replays


TIMES = st.floats(0, 100, allow_nan=False)
SPANS = st.lists(st.tuples(TIMES, TIMES).map(lambda pair: (min(pair), max(pair))), max_size=8)


def test_overlapping_spans_count_once():
    assert union([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == pytest.approx(4)
    assert union([]) == 0


@given(SPANS)
def test_a_union_is_between_the_longest_span_and_the_sum(spans):
    lengths = [end - start for start, end in spans]
    assert max(lengths, default=0) - 1e-9 <= union(spans) <= sum(lengths) + 1e-9
    assert union(spans) == pytest.approx(union(reversed(spans)))


def test_kernels_are_counted_per_call():
    events = [("add", 0, 1e-6), ("add", 1e-6, 2e-6), ("mul", 2e-6, 4e-6), ("mul", 4e-6, 6e-6)]
    profile = summarize(events, calls=2)
    assert profile.launches == {"add": 1, "mul": 1}
    assert profile.busy == pytest.approx(3e-6)


def test_long_kernel_names_are_truncated():
    [name] = summarize([("k" * 5000, 0, 1)], calls=1).launches
    assert len(name) == 90


@pytest.mark.parametrize(
    ("launches", "busy", "message"),
    [
        ({"add": 1}, 9e-6, ""),
        ({"add": 1}, 12e-6, ""),
        ({"add": 1}, 20e-6, "kernels run for 20 us a call, but the windows measure 10 us"),
        ({}, 0.0, "nothing is launched on the GPU"),
    ],
)
def test_kernels_contradict_windows_that_are_too_short(launches, busy, message):
    assert KernelProfile(launches, busy).contradiction(10e-6) == message


def test_notes_list_kernels_and_say_if_both_sides_launch_the_same():
    one, two = KernelProfile({"add": 2.0}, 9e-6), KernelProfile({"fused": 1.0}, 4e-6)
    assert kernel_notes({"eager": one, "fused": two}) == [
        "eager launches per call: 2 x add; busy 9 us",
        "fused launches per call: 1 x fused; busy 4 us",
    ]
    assert kernel_notes({"eager": one, "other": one})[-1] == "both sides launch the same kernels"
    assert kernel_notes({}) == []
