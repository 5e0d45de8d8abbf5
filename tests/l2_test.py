"""The check that an L2 is cold, on a simulated cache."""

from __future__ import annotations

import pytest

from pytest_aisp.timing.l2 import ATTEMPTS, LINE, Latency, measure, pointer_chain


class Cache:
    """A cache that keeps its lines. A round of `work` may evict them."""

    def __init__(self, *, evicts, hit=270.0, miss=620.0):
        self.evicts, self.hit, self.miss = evicts, hit, miss
        self.held, self.rounds = False, 0

    def flush(self):
        self.held = False

    def read(self):
        latency, self.held = (self.hit if self.held else self.miss), True
        return latency

    def work(self):
        self.rounds += 1
        self.held = not self.evicts


def test_a_lower_clock_after_the_work_is_no_warm_l2():
    """If work lowers the clock, a load from DRAM takes the same time, but fewer cycles."""
    cache = Cache(evicts=True, miss=720.0)
    assert Latency(287, 619, 720).cold is False

    def work():
        cache.work()
        cache.miss = 619.0

    assert measure(work, cache.read, cache.flush) == Latency(270, 619, 619)


def test_slow_loads_after_a_round_show_a_cold_l2():
    cache = Cache(evicts=True)
    assert measure(cache.work, cache.read, cache.flush) == Latency(270, 620, 620)
    assert cache.rounds == 1
    assert Latency(270, 620, 620).cold


def test_a_round_that_evicts_a_part_of_the_lines_leaves_the_l2_warm():
    assert not Latency(302, 526, 665).cold  # 24 MiB read four times on an H200
    assert Latency(302, 663, 665).cold  # 256 MiB


def test_nothing_is_said_of_an_l2_that_a_flush_does_not_cool():
    assert Latency(270, 270, 300).cold


def test_a_warm_l2_is_measured_again_before_it_is_reported():
    cache = Cache(evicts=False)
    assert not measure(cache.work, cache.read, cache.flush).cold
    assert cache.rounds == ATTEMPTS


@pytest.mark.parametrize("lines", [1, 2, 100])
def test_the_pointer_chain_visits_every_line_once(lines):
    chain, at, visited = pointer_chain(lines), 0, set()
    for _ in range(lines):
        assert at % LINE == 0
        visited.add(at // LINE)
        at = chain[at // LINE]
    assert (at, len(visited)) == (0, lines)
