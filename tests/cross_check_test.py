"""Several clocks for the same work: which differences are told, and which are only noise."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pytest_aisp.isolation.protections import without
from pytest_aisp.timing.cross_check import ATTEMPTS, Clocks, contradiction
from pytest_aisp.util import process_group

HONEST = Clocks(events=5e-3, host=5.06e-3, counter=5.004e-3, late=8e-6)
LIES = {
    "a side stream": (
        {"late": 4e-3},
        "work goes on for 4e+03 us after the last call of 5000 us: a stream of its own is not"
        " waited for",
        "no-late-work",
    ),
    "one short call on a side stream": (
        {"late": 4.5e-5, "queued": True},
        "work goes on for 45 us after the last call of 5000 us: a stream of its own is not"
        " waited for",
        "no-late-work",
    ),
    "replaced events": (
        {"events": 5e-5},
        "events say 50 us, the host between full waits 5060 us",
        "clocks-agree",
    ),
    "a replaced clock of the host": (
        {"host": 5e-5},
        "events say 5000 us, the host between full waits 50 us",
        "clocks-agree",
    ),
    "replaced events and clock": (
        {"events": 5e-5, "host": 5.1e-5},
        "events say 50 us, the GPU's own counter 5004 us",
        "clocks-agree",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_cross_check_detects_a_replaced_clock(name):
    changed, says, protection = LIES[name]
    clocks = replace(HONEST, **changed)
    assert clocks.contradiction() == says
    with without([protection]):
        assert clocks.contradiction() == ""


@pytest.mark.parametrize(
    "clocks",
    [
        HONEST,
        replace(HONEST, host=None),  # queued behind a blocking kernel
        replace(HONEST, counter=None),  # nothing here compiles a stamp
        replace(HONEST, events=2e-6, host=1.2e-4, counter=1.5e-5),  # launching takes its time
    ],
)
def test_ordinary_noise_between_clocks_is_accepted(clocks):
    assert clocks.contradiction() == ""


def test_one_reading_without_contradiction_is_enough():
    busy = replace(HONEST, host=9e-3)
    readings = iter([busy] * (ATTEMPTS - 1) + [HONEST])
    assert contradiction(lambda: next(readings)) == ""
    assert "host between full waits 9000 us" in contradiction(lambda: busy)


def test_several_ranks_may_be_idle_later(monkeypatch):
    slow = replace(HONEST, events=1e-3, host=None, counter=None, late=1.2e-4)
    assert "work goes on" in slow.contradiction()
    monkeypatch.setattr(process_group, "_current", SimpleNamespace(world=2))
    assert slow.contradiction() == ""
    assert "work goes on for 300 us" in replace(HONEST, late=3e-4).contradiction()
    monkeypatch.undo()
    assert replace(HONEST, late=1.2e-4).contradiction() == ""  # 2 % of a graph's replays
