"""Events that are not a side's work are counted per block, and disturb the block."""

from __future__ import annotations

import itertools
import math
import random
import resource
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from exploits.common import against
from exploits_test import SHORT

from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.isolation import interference
from pytest_aisp.isolation.interference import Cause, InterferenceMonitor
from pytest_aisp.isolation.protections import without
from pytest_aisp.page.pair import SideError
from pytest_aisp.timing import schedule
from pytest_aisp.timing.cpu_timer import CpuPairTimer
from pytest_aisp.timing.schedule import Budget, Samples, join
from pytest_aisp.worker.loader import pair_of

USED = SimpleNamespace(ru_majflt=7, ru_minflt=90)


@pytest.fixture
def quiet(monkeypatch):
    """A system on which nothing happens unless a test sets `used` or `swap`."""
    state = SimpleNamespace(used=USED, swap=0)
    monkeypatch.setattr(resource, "getrusage", lambda who: state.used)
    monkeypatch.setattr(interference, "swapped_kib", lambda: state.swap)
    return state


@pytest.fixture
def dynamo(monkeypatch):
    """Counters of Dynamo that only the test changes."""
    counters: dict[str, dict[str, int]] = {}
    utils = SimpleNamespace(counters=counters)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    return counters


def test_a_block_without_events_is_undisturbed(quiet):
    monitor = InterferenceMonitor()
    assert monitor.look() is None
    assert not monitor.grew()
    assert set(monitor.counts().values()) == {0}


def test_every_import_of_a_module_is_counted(quiet, monkeypatch):
    monitor = InterferenceMonitor()
    monkeypatch.setitem(sys.modules, "one_more", ModuleType("one_more"))
    message = "one_more imported inside a timed window (import at the page's top)"
    assert monitor.look() == Cause(message, machine=False)
    monitor.begin()
    assert monitor.look() is None
    monkeypatch.setitem(sys.modules, "one_more", ModuleType("one_more"))
    monkeypatch.setitem(sys.modules, "another", ModuleType("another"))
    assert monitor.look().text == message.replace("one_more", "one_more and 1 more")
    assert monitor.counts()["imports"] == 3
    with without(["no-imports"]):
        assert monitor.look() is None
    assert monitor.grew()  # warming goes on for it
    assert not monitor.grew()


def test_a_removed_module_is_not_an_import(quiet, monkeypatch):
    monkeypatch.setitem(sys.modules, "one_more", ModuleType("one_more"))
    monitor = InterferenceMonitor()
    monkeypatch.delitem(sys.modules, "one_more")
    assert monitor.look() is None


def test_compilations_of_dynamo_and_inductor_are_named_and_other_counters_ignored(quiet, dynamo):
    monitor = InterferenceMonitor()
    dynamo["frames"] = {"total": 2, "ok": 2}
    dynamo["inductor"] = {"fxgraph_cache_hit": 1, "cudagraph_skips": 9}
    dynamo["graph_break"] = {"print": 1}
    assert monitor.look().text == (
        "2 Dynamo frames and 1 Inductor graph compiled inside a timed window"
        " (only fresh processes time that)"
    )
    assert monitor.counts()["graph_breaks"] == 1
    with without(["no-compiling"]):
        assert monitor.look() is None
    assert monitor.grew()
    dynamo["inductor"]["cudagraph_skips"] = 10
    assert not monitor.grew()
    assert monitor.look() is None


def test_real_compilations_of_dynamo_are_counted(quiet):
    fresh = torch.compile(lambda x: x + 1, backend="eager")
    monitor = InterferenceMonitor()
    fresh(torch.ones(3))
    assert "1 Dynamo frame compiled inside a timed window" in str(monitor.look())
    monitor.begin()
    fresh(torch.ones(3))
    assert monitor.look() is None
    fresh(torch.ones(3, dtype=torch.float64))
    assert "1 Dynamo frame compiled" in str(monitor.look())


def test_page_faults_disturb_unless_the_page_owns_them(quiet):
    monitor, owner = InterferenceMonitor(), InterferenceMonitor(["page_faults"])
    quiet.used = SimpleNamespace(ru_majflt=8, ru_minflt=95)
    assert monitor.look() == Cause(
        "1 page read from disk inside a timed window (for mapped files and managed memory:"
        " Conditions(owns=['page_faults']))"
    )
    assert owner.look() is None
    assert owner.counts() | {"major_faults": 1, "minor_faults": 5} == owner.counts()


def test_swapping_disturbs_but_earlier_swap_does_not(quiet):
    quiet.swap = 4096
    monitor = InterferenceMonitor()
    assert monitor.look() is None
    quiet.swap = 4160
    assert monitor.look() == Cause("64 KiB of this process swapped out inside a timed window")
    assert monitor.counts()["swapped_kib"] == 64


def test_swap_is_not_reported_where_it_is_unknown(quiet):
    quiet.swap = None
    monitor = InterferenceMonitor()
    assert monitor.look() is None
    assert "swapped_kib" not in monitor.counts()


def test_linux_reports_how_much_is_swapped():
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc, which is Linux's")
    assert isinstance(interference.swapped_kib(), int)


def test_allocations_are_counted_but_do_not_disturb(quiet):
    number = itertools.count()
    monitor = InterferenceMonitor(allocations=lambda: next(number))
    assert monitor.look() is None
    assert monitor.counts()["allocations"] == 1


class Importing:
    """A side that imports a module at the next `times` calls."""

    __name__ = "importing"

    def __init__(self, monkeypatch):
        self.times, self._set = 0, monkeypatch.setitem

    def __call__(self, x):
        if self.times:
            self.times -= 1
            self._set(sys.modules, "imported_by_a_test", ModuleType("imported_by_a_test"))
        return 2 * x.sum(1)


def timer_of(monkeypatch, optimized):
    """Return a timer of the exploits' honest side and `optimized`, on the CPU."""
    monkeypatch.setattr("pytest_aisp.util.cpu_load.STOLEN", math.inf)  # on a busy machine too
    pair = pair_of(against(optimized))
    pool = InputPool(pair, {"n": 33}, "cpu", 1, 2)
    pool.lay_slots(2)
    sides = pool.bind(pair.baseline), pool.bind(optimized)
    return CpuPairTimer(pool, sides, Budget(**SHORT))


def test_a_block_with_an_import_is_measured_again(monkeypatch, quiet):
    side = Importing(monkeypatch)
    timer = timer_of(monkeypatch, side)
    rewrite = timer.pool.rewrite

    def arm(*args, **options):  # before the first block that counts
        rewrite(*args, **options)
        side.times = 1
        monkeypatch.setattr(timer.pool, "rewrite", rewrite)

    monkeypatch.setattr(timer.pool, "rewrite", arm)
    samples = schedule.measure(timer, Budget(**SHORT), random.Random(1))
    cause = "imported_by_a_test imported inside a timed window (import at the page's top)"
    assert samples.dropped == [cause]
    assert samples.details["housekeeping"]["imports"] == 1


def test_an_import_at_every_call_fails_the_case(monkeypatch, quiet):
    side = Importing(monkeypatch)
    timer = timer_of(monkeypatch, side)
    side.times = 10**9
    with pytest.raises(SideError, match="20 blocks were disturbed: imported_by_a_test imported"):
        schedule.measure(timer, Budget(**SHORT), random.Random(1))


def test_an_import_between_blocks_does_not_disturb(monkeypatch, quiet):
    timer = timer_of(monkeypatch, lambda x: 2 * x.sum(1))
    rewrite = timer.pool.rewrite

    def importing(*args, **options):
        monkeypatch.setitem(sys.modules, "imported_by_a_test", ModuleType("imported_by_a_test"))
        rewrite(*args, **options)

    monkeypatch.setattr(timer.pool, "rewrite", importing)
    assert schedule.measure(timer, Budget(**SHORT), random.Random(1)).dropped == []


def test_the_counts_of_laps_are_added():
    parts = [
        Samples("queue", [0.0], [1.0], [1.0], [], [], {"housekeeping": {"imports": n}, "slots": n})
        for n in (1, 2)
    ]
    assert join(parts).details == {"housekeeping": {"imports": 3}, "slots": 2}
