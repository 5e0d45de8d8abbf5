"""What goes on beside a side's work is counted between blocks, and disturbs the block it was in."""

from __future__ import annotations

import itertools
import math
import random
import resource
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from exploits_test import EXPLOITS, SHORT

from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.isolation import interference
from pytest_aisp.isolation.interference import InterferenceMonitor
from pytest_aisp.isolation.protections import without
from pytest_aisp.timing import schedule
from pytest_aisp.timing.cpu_timer import CpuPairTimer
from pytest_aisp.timing.schedule import Budget, Disturbed, Samples, join
from pytest_aisp.worker.loader import pair_of

USED = SimpleNamespace(ru_majflt=7, ru_minflt=90)


@pytest.fixture
def quiet(monkeypatch):
    """A system on which nothing happens by itself; set `used` and `swap` to make it."""
    state = SimpleNamespace(used=USED, swap=0)
    monkeypatch.setattr(resource, "getrusage", lambda who: state.used)
    monkeypatch.setattr(interference, "swapped_kib", lambda: state.swap)
    return state


@pytest.fixture
def dynamo(monkeypatch):
    """Dynamo's counters, of an instance that only the test counts in."""
    counters: dict[str, dict[str, int]] = {}
    utils = SimpleNamespace(counters=counters)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    return counters


def test_a_block_in_which_nothing_happens_is_undisturbed(quiet):
    keeping = InterferenceMonitor()
    assert keeping.look() is None
    assert not keeping.grew()
    assert set(keeping.counts().values()) == {0}


def test_a_module_is_counted_when_it_is_imported_and_when_it_is_again(quiet, monkeypatch):
    keeping = InterferenceMonitor()
    monkeypatch.setitem(sys.modules, "one_more", ModuleType("one_more"))
    said = "one_more imported inside a timed window (import at the page's top)"
    assert keeping.look() == said
    keeping.begin()
    assert keeping.look() is None
    monkeypatch.setitem(sys.modules, "one_more", ModuleType("one_more"))
    monkeypatch.setitem(sys.modules, "another", ModuleType("another"))
    assert keeping.look() == said.replace("one_more", "one_more and 1 more")
    assert keeping.counts()["imports"] == 3
    with without(["no-imports"]):
        assert keeping.look() is None
    assert keeping.grew()  # warming goes on for it
    assert not keeping.grew()


def test_a_module_that_goes_is_no_import(quiet, monkeypatch):
    monkeypatch.setitem(sys.modules, "one_more", ModuleType("one_more"))
    keeping = InterferenceMonitor()
    monkeypatch.delitem(sys.modules, "one_more")
    assert keeping.look() is None


def test_what_dynamo_and_inductor_compile_is_named_and_what_they_count_else_is_not(quiet, dynamo):
    keeping = InterferenceMonitor()
    dynamo["frames"] = {"total": 2, "ok": 2}
    dynamo["inductor"] = {"fxgraph_cache_hit": 1, "cudagraph_skips": 9}
    dynamo["graph_break"] = {"print": 1}
    assert keeping.look() == (
        "2 Dynamo frames and 1 Inductor graph compiled inside a timed window"
        " (only fresh processes time that)"
    )
    assert keeping.counts()["graph_breaks"] == 1
    with without(["no-compiling"]):
        assert keeping.look() is None
    assert keeping.grew()
    dynamo["inductor"]["cudagraph_skips"] = 10
    assert not keeping.grew()
    assert keeping.look() is None


def test_what_dynamo_really_compiles_is_counted(quiet):
    fresh = torch.compile(lambda x: x + 1, backend="eager")
    keeping = InterferenceMonitor()
    fresh(torch.ones(3))
    assert "1 Dynamo frame compiled inside a timed window" in str(keeping.look())
    keeping.begin()
    fresh(torch.ones(3))
    assert keeping.look() is None
    fresh(torch.ones(3, dtype=torch.float64))
    assert "1 Dynamo frame compiled" in str(keeping.look())


def test_pages_read_from_disk_disturb_unless_the_page_is_about_them(quiet):
    keeping, about = InterferenceMonitor(), InterferenceMonitor(["page_faults"])
    quiet.used = SimpleNamespace(ru_majflt=8, ru_minflt=95)
    assert keeping.look() == "1 page read from disk inside a timed window"
    assert about.look() is None
    assert about.counts() | {"major_faults": 1, "minor_faults": 5} == about.counts()


def test_swapping_out_disturbs_and_swap_that_was_there_does_not(quiet):
    quiet.swap = 4096
    keeping = InterferenceMonitor()
    assert keeping.look() is None
    quiet.swap = 4160
    assert keeping.look() == "64 KiB of this process swapped out inside a timed window"
    assert keeping.counts()["swapped_kib"] == 64


def test_where_nobody_says_what_is_swapped_nothing_is_said(quiet):
    quiet.swap = None
    keeping = InterferenceMonitor()
    assert keeping.look() is None
    assert "swapped_kib" not in keeping.counts()


def test_this_system_says_how_much_is_swapped():
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc, which is Linux's")
    assert isinstance(interference.swapped_kib(), int)


def test_allocations_are_counted_and_disturb_nothing(quiet):
    number = itertools.count()
    keeping = InterferenceMonitor(allocations=lambda: next(number))
    assert keeping.look() is None
    assert keeping.counts()["allocations"] == 1


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


def bout_of(monkeypatch, optimized):
    """Return a bout of the exploits' honest side against `optimized`, on the CPU."""
    monkeypatch.syspath_prepend(str(EXPLOITS))
    monkeypatch.setattr(
        "pytest_aisp.timing.cpu_timer.STOLEN", math.inf
    )  # a busy machine is none of this
    import honest

    pair = pair_of(honest.against(optimized))
    bench = InputPool(pair, {"n": 33}, "cpu", 1, 2)
    bench.lay_slots(2)
    subjects = bench.bind(pair.baseline), bench.bind(optimized)
    return CpuPairTimer(bench, subjects, Budget(**SHORT))


def test_an_import_once_is_measured_again(monkeypatch, quiet):
    side = Importing(monkeypatch)
    bout = bout_of(monkeypatch, side)
    rewrite = bout.pool.rewrite

    def arm(*args, **options):  # before the first block that counts
        rewrite(*args, **options)
        side.times = 1
        monkeypatch.setattr(bout.pool, "rewrite", rewrite)

    monkeypatch.setattr(bout.pool, "rewrite", arm)
    samples = schedule.measure(bout, Budget(**SHORT), random.Random(1))
    cause = "imported_by_a_test imported inside a timed window (import at the page's top)"
    assert samples.dropped == [cause]
    assert samples.details["housekeeping"]["imports"] == 1


def test_an_import_at_every_call_fails_the_case(monkeypatch, quiet):
    side = Importing(monkeypatch)
    bout = bout_of(monkeypatch, side)
    side.times = 10**9
    with pytest.raises(Disturbed, match="20 blocks were disturbed: imported_by_a_test imported"):
        schedule.measure(bout, Budget(**SHORT), random.Random(1))


def test_what_the_refresh_between_blocks_does_is_nobodys_fault(monkeypatch, quiet):
    bout = bout_of(monkeypatch, lambda x: 2 * x.sum(1))
    rewrite = bout.pool.rewrite

    def importing(*args, **options):
        monkeypatch.setitem(sys.modules, "imported_by_a_test", ModuleType("imported_by_a_test"))
        rewrite(*args, **options)

    monkeypatch.setattr(bout.pool, "rewrite", importing)
    assert schedule.measure(bout, Budget(**SHORT), random.Random(1)).dropped == []


def test_laps_add_their_counts():
    parts = [
        Samples("queue", [0.0], [1.0], [1.0], [], [], {"housekeeping": {"imports": n}, "slots": n})
        for n in (1, 2)
    ]
    assert join(parts).details == {"housekeeping": {"imports": 3}, "slots": 2}
