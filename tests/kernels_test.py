"""What the profiler sees of a side: kernels a call, and the time in which one is at work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aisp.timing.cross_check import KernelProfile, kernel_notes, summarize, union

TIMES = st.floats(0, 100, allow_nan=False)
SPANS = st.lists(st.tuples(TIMES, TIMES).map(lambda pair: (min(pair), max(pair))), max_size=8)


def test_overlapping_spans_count_once():
    assert union([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == pytest.approx(4)
    assert union([]) == 0


@given(SPANS)
def test_a_union_is_between_the_longest_span_and_the_sum(spans):
    lengths = [end - start for start, end in spans]
    assert max(lengths, default=0) - 1e-9 <= union(spans) <= sum(lengths) + 1e-9


@given(SPANS)
def test_the_order_of_spans_does_not_matter(spans):
    assert union(spans) == pytest.approx(union(reversed(spans)))


def test_kernels_are_counted_per_call():
    events = [("add", 0, 1e-6), ("add", 1e-6, 2e-6), ("mul", 2e-6, 4e-6), ("mul", 4e-6, 6e-6)]
    kernels = summarize(events, calls=2)
    assert kernels.launches == {"add": 1, "mul": 1}
    assert kernels.busy == pytest.approx(3e-6)


def test_long_kernel_names_are_truncated():
    [name] = summarize([("k" * 5000, 0, 1)], calls=1).launches
    assert len(name) == 90


@pytest.mark.parametrize(
    ("kernels", "says"),
    [
        (KernelProfile({"add": 1}, 9e-6), ""),
        (KernelProfile({"add": 1}, 12e-6), ""),
        (
            KernelProfile({"add": 1}, 20e-6),
            "kernels are at work for 20 us a call, the windows say 10 us",
        ),
        (KernelProfile({}, 0.0), "nothing is launched on the GPU"),
    ],
)
def test_kernels_contradict_windows_that_are_too_short(kernels, says):
    assert kernels.contradiction(10e-6) == says


def test_notes_list_kernels_and_say_if_both_sides_launch_the_same():
    one, two = KernelProfile({"add": 2.0}, 9e-6), KernelProfile({"fused": 1.0}, 4e-6)
    assert kernel_notes({"eager": one, "fused": two}) == [
        "eager launches a call: 2 x add; busy 9 us",
        "fused launches a call: 1 x fused; busy 4 us",
    ]
    assert kernel_notes({"eager": one, "other": one})[-1] == "both sides launch the same kernels"
    assert kernel_notes({}) == []
