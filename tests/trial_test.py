"""How one process times a case: what is built when, and what is kept of it."""

from __future__ import annotations

import math

import pytest
from validity import EXPLOITS

from pytest_aisp import host
from pytest_aisp.engine import Engine
from pytest_aisp.messages import Task
from pytest_aisp.sides import slot_order
from pytest_aisp.trial import Trial

SHORT = {"blocks": 8, "least": 8, "seconds": 0.01, "window": 2e-4, "warmup": 3}


@pytest.fixture
def built(monkeypatch):
    """Return which side was built first, each time that both were; rebuilding costs nothing."""
    firsts = []
    build = Trial._build

    def watched(self, subjects, budget, first):
        firsts.append(first)
        return build(self, subjects, budget, first)

    monkeypatch.syspath_prepend(str(EXPLOITS))
    monkeypatch.setattr(host, "STOLEN", math.inf)  # a busy machine drops no block
    monkeypatch.setattr(Trial, "_build", watched)
    monkeypatch.setattr(Trial, "_rebuilds", lambda self: True)
    return firsts


def timed(**budget):
    common = {"page": str(EXPLOITS / "honest.py"), "root": str(EXPLOITS), "module": "honest"}
    common |= {"function": "test_lie", "variant": "lie", "seed": 1, "rule": {}, "device": "cpu"}
    common["without"] = ("own-clock",)  # the fixture replaces what that guards
    return Engine().time(Task(kind="time", size={"n": 257}, budget={**SHORT, **budget}, **common))


def test_laps_are_built_in_either_order_after_one_that_is_not_timed(built):
    result = timed()
    assert built == [0, 0, 1, 0, 1]
    assert result["firsts"] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert len(result["blocks"]) == len(result["orders"]) == 8
    assert len(result["laps"]) == 4


def test_every_lap_has_as_many_blocks_as_the_first(built):
    result = timed(blocks=40, least=4)
    assert len(result["blocks"]) % 4 == 0
    assert sorted(result["firsts"]).index(1) == len(result["firsts"]) / 2


@pytest.mark.parametrize(
    ("slots", "calls", "extra"), [(1, 3, 2), (2, 100, 1), (7, 98, 1), (9, 18, 3)]
)
def test_extra_calls_come_where_no_slot_was_lately(slots, calls, extra):
    order = slot_order(calls, slots, extra)
    assert order[:calls] == tuple(k % slots for k in range(calls))
    assert len(order) == calls + extra
    window = [*order, *order]  # the next one follows
    last = {}
    for at, slot in enumerate(window):
        assert at - last.get(slot, -calls) >= slots // 2
        last[slot] = at
