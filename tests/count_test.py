"""`assert_launches` and goodput: what a page may claim, and how the profiler counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_aisp.results import store
from pytest_aisp.timing import cross_check
from pytest_aisp.timing.cross_check import KernelProfile
from pytest_aisp.util import process_group

BODY = "pair.assert_equivalent()\npair.assert_speedup()\npair.assert_launches(at_most={})"
NAME = "doubling_test.py::test_doubling[doubled-n1001]"


@pytest.fixture
def launching(gpu):
    """Simulate a GPU on which both sides launch so many kernels a call."""

    def install(baseline, optimized):
        counts = {"baseline": baseline, "optimized": optimized}
        gpu(added=2e-5, doubled=1e-5, details={"goals": {"launches": counts}})

    return install


def test_launches_are_claimed_stored_and_held(page, launching, pytester):
    page(body=BODY.format(2))
    launching(63, 2)
    result = pytester.runpytest_subprocess("--aisp-update-expectations", "--aisp-processes=1")
    result.stdout.fnmatch_lines(["*: launches: 63 / 2 launches a call, against 2"])
    assert result.ret == 0
    file = pytester.path / "baselines/simulated-gpu/ch99.json"
    counts = {"baseline": 63, "optimized": 2}
    assert store.load(file).results[NAME].goals == {"launches": counts}
    page(body=BODY.format(3))
    launching(63, 3)
    grown = pytester.runpytest_subprocess()
    words = "launches: 3 against 2 (stored in baselines/simulated-gpu/ch99.json), margin 0%"
    words += "; in 3 processes 3, 3, 3 -> red"
    grown.stdout.fnmatch_lines([f"E       AssertionError: {words}", "*REGRESSED*"])
    page(body=BODY.format(2))
    missed = pytester.runpytest_subprocess()
    missed.stdout.fnmatch_lines(
        [
            "E       AssertionError: launches: 63 / 3 launches a call, against 2"
            " (assert_launches on the page); in 3 processes 3, 3, 3 -> red"
        ]
    )


class Pool:
    """An input pool whose sides record their calls."""

    def __init__(self):
        self.slots, self.calls = [], []

    def lay_slots(self, count):
        self.slots = [count]

    def bind(self, side):
        return SimpleNamespace(run=lambda slot: self.calls.append(side), close=lambda: None)


def test_launches_are_counted_warm_on_the_rank_with_most(monkeypatch):
    pool = Pool()

    def profile_kernels(work, calls):
        work()
        first = 4.0 if len(pool.calls) <= 1 else 0.0  # only the first call launches these
        copies = {"a": 2.0, "b": 0.0}[pool.calls[-1]] + first
        return KernelProfile({"add": 1.0, "Memcpy": copies}, 1e-6)

    monkeypatch.setattr(cross_check, "profile_kernels", profile_kernels)
    assert [cross_check.launches_per_call(pool, side) for side in "ab"] == [3.0, 1.0]
    assert pool.calls == ["a"] * 4 + ["b"] * 4
    assert pool.slots == []
    rank = SimpleNamespace(max=lambda value: max(value, 2.0))
    monkeypatch.setattr(process_group, "_current", rank)
    assert [cross_check.launches_per_call(pool, side) for side in "ab"] == [3.0, 2.0]


def test_compute_time_is_that_of_the_rank_with_least(monkeypatch):
    pool = Pool()

    def profile_kernels(work, calls, counts):
        work()
        assert counts is cross_check.computes
        return KernelProfile({"add": 1.0}, 1e-3 if len(pool.calls) == 6 else 0.0)

    monkeypatch.setattr(cross_check, "profile_kernels", profile_kernels)
    assert cross_check.compute_seconds(pool, "a") == 1e-3
    pool.calls.clear()
    rank = SimpleNamespace(max=lambda value: max(value, -4e-4))
    monkeypatch.setattr(process_group, "_current", rank)
    assert cross_check.compute_seconds(pool, "a") == 4e-4


@pytest.mark.parametrize(
    ("name", "computes"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32", True),
        ("void at::native::reduce_kernel<512, 1>", True),
        ("Memcpy HtoD (Pinned -> Device)", False),
        ("Memset (Device)", False),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", False),
        ("one_shot_all_reduce_kernel", False),
    ],
)
def test_copies_and_collectives_do_not_compute(name, computes):
    assert cross_check.computes(name) == computes
