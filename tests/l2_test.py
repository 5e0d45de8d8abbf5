"""The proof that an L2 is cold, on caches that are only told of."""

from __future__ import annotations

import pytest

from pytest_aisp.timing.l2 import ATTEMPTS, LINE, Latency, measure, pointer_chain


class Cache:
    """A cache that holds the lines until a round of `work` has driven them out, or never."""

    def __init__(self, *, evicts, hit=270.0, miss=620.0):
        self.evicts, self.hit, self.miss = evicts, hit, miss
        self.held, self.rounds = False, 0

    def read(self):
        seen, self.held = (self.hit if self.held else self.miss), True
        return seen

    def work(self):
        self.rounds += 1
        self.held = not self.evicts


def test_slow_loads_after_a_round_show_a_cold_l2():
    cache = Cache(evicts=True)
    assert measure(cache.work, cache.read) == Latency(270, 620)
    assert cache.rounds == 1
    assert Latency(270, 620).cold


def test_a_warm_l2_is_measured_again_before_it_is_reported():
    cache = Cache(evicts=False)
    assert not measure(cache.work, cache.read).cold
    assert cache.rounds == ATTEMPTS


@pytest.mark.parametrize("lines", [1, 2, 100])
def test_the_pointer_chain_visits_every_line_once(lines):
    following, at, seen = pointer_chain(lines), 0, set()
    for _ in range(lines):
        assert at % LINE == 0
        seen.add(at // LINE)
        at = following[at // LINE]
    assert (at, len(seen)) == (0, lines)
