"""`assert_memory`: what a page may claim, what is stored, and how memory is counted."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from fake_driver import Driver, MemoryAttribute
from worker_processes import ANY_LOAD

from pytest_aisp.results import store
from pytest_aisp.results.messages import CountTask
from pytest_aisp.timing import memory
from pytest_aisp.util import process_group
from pytest_aisp.worker import metrics

BODY = "pair.assert_equivalent()\npair.assert_speedup()\npair.assert_memory(at_most={})"
ALONE = "pair.assert_equivalent()\npair.assert_memory(at_most={})"
MIB = 1 << 20
NAME = "doubling_test.py::test_doubling[doubled-n1001]"


@pytest.fixture
def needs(gpu):
    """Simulate a GPU on which the sides need the given numbers of MiB."""

    def install(baseline, optimized, **more):
        peaks = {"baseline": int(baseline * MIB), "optimized": int(optimized * MIB)}
        gpu(added=2e-5, doubled=1e-5, details={"goals": {"memory": peaks}}, **more)

    return install


@pytest.mark.parametrize("body", [BODY, ALONE], ids=["timed", "alone"])
def test_memory_within_the_claim_passes(page, needs, pytester, body):
    page(body=body.format(0.5))
    needs(600, 240)
    result = pytester.runpytest_subprocess("--aisp-artifacts=kept")
    note = "*: memory: 600 MiB / 240 MiB beyond the inputs, 0.4 of the baseline's against 0.5"
    result.stdout.fnmatch_lines([note])
    assert result.ret == 0
    [row] = map(json.loads, (pytester.path / "kept/results.jsonl").read_text().splitlines())
    assert row["goals"]["memory"] == {"baseline": 600 * MIB, "optimized": 240 * MIB}
    assert row["verdict"] == "new"
    assert (row["value"] is None) == (row["claim"] is None) == (body == ALONE)
    again = pytester.runpytest_subprocess("--aisp-replay=kept")
    again.stdout.fnmatch_lines([note])


@pytest.mark.parametrize("claim", [1.5, "neutral"])
def test_a_claimed_speedup_that_is_never_judged_fails(page, needs, pytester, claim):
    page(body=ALONE.format(0.5), at_least=repr(claim))
    needs(600, 240)
    result = pytester.runpytest_subprocess("--aisp-update-expectations", "--aisp-processes=1")
    result.stdout.fnmatch_lines(
        [
            "ch99/doubling_test.py:*: this page never judged what it claims, "
            f"{claim} by at_least on the page",
            "Call pair.assert_speedup(), or claim nothing",
        ]
    )
    assert result.ret == 1
    assert not list(pytester.path.glob("baselines/*/ch99.json"))


def test_memory_above_the_claim_fails_and_is_not_stored(page, needs, pytester):
    page(body=BODY.format(0.3))
    needs(600, 240)
    result = pytester.runpytest_subprocess("--aisp-update-expectations", "--aisp-processes=1")
    result.stdout.fnmatch_lines(
        [
            ">       pair.assert_memory(at_most=0.3)",
            "E       AssertionError: memory: 600 MiB / 240 MiB beyond the inputs, 0.4 of the"
            " baseline's against 0.3 (assert_memory on the page); in 3 processes 240 MiB,"
            " 240 MiB, 240 MiB -> red",
            "*pytest 'ch99/doubling_test.py::test_doubling[[]doubled-n1001[]]'",
        ]
    )
    assert result.ret == 1
    assert not (pytester.path / "baselines/simulated-gpu/ch99.json").exists()


def test_memory_growth_against_a_stored_result_is_regressed_or_stale(page, needs, pytester):
    page(body=BODY.format(0.9))
    needs(600, 240, environment={"power_limit_w": 700})
    pytester.runpytest_subprocess("--aisp-update-expectations", "--aisp-processes=1")
    file = pytester.path / "baselines/simulated-gpu/ch99.json"
    assert store.load(file).results[NAME].goals["memory"] == {
        "baseline": 600 * MIB,
        "optimized": 240 * MIB,
    }
    needs(600, 243, environment={"power_limit_w": 700})  # 1 % and 1 MiB: rounding
    assert pytester.runpytest_subprocess().ret == 0
    needs(600, 244, environment={"power_limit_w": 700})
    grown = pytester.runpytest_subprocess()
    words = "memory: 244 MiB against 240 MiB (stored in baselines/simulated-gpu/ch99.json), margin"
    words += " 1% + 1.0 MiB; in 3 processes 244 MiB, 244 MiB, 244 MiB -> red"
    grown.stdout.fnmatch_lines([f"E       AssertionError: {words}", "*=all*", "*REGRESSED*"])
    assert grown.ret == 1
    needs(600, 244, environment={"power_limit_w": 350})
    stale = pytester.runpytest_subprocess("-v")
    stale.stdout.fnmatch_lines(["*STALE*", f"stale: *{words}"])
    assert stale.ret == 0
    accepted = pytester.runpytest_subprocess("--aisp-update-expectations=all")
    assert accepted.ret == 0
    assert store.load(file).results[NAME].goals["memory"]["optimized"] == 244 * MIB


def test_without_a_gpu_memory_is_not_measured(page, pytester):
    page(body=ALONE.format(0.5))
    result = pytester.runpytest_subprocess("-v")
    result.stdout.fnmatch_lines(["*CHECKED*", "*1 checked*"])
    pytester.makeconftest(f"import sys\n\nsys.path.insert(0, {ANY_LOAD!r})")
    more = "cpu_sizes=[{'n': 99}],"
    page(body=BODY.format(0.5), more=more, at_least="'yardstick'")
    result = pytester.runpytest_subprocess("-vv", "-m", "aisp_cpu")
    result.stdout.fnmatch_lines(["*NEW*", "*memory: measured on GPUs only*"])


def test_nothing_is_counted_before_it_is_checked(page, needs, pytester):
    page(body="pair.assert_memory(at_most=0.5)")
    needs(1, 1)
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(["*assert_memory() before assert_equivalent(): nothing*"])
    assert result.ret == 1


class Allocator:
    """A fake of torch's allocator."""

    def __init__(self, monkeypatch):
        self.now = self.peak = self.reserved = 0
        for name, value in {
            "current_device": lambda: 0,
            "synchronize": lambda: None,
            "reset_peak_memory_stats": self.reset,
            "memory_allocated": lambda: self.now,
            "max_memory_allocated": lambda: self.peak,
            "memory_reserved": lambda: self.reserved,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(memory, "release", self.release)

    def release(self, device):
        self.reserved = self.now  # memory without a tensor goes back to the GPU

    def reset(self):
        self.peak = self.now

    def take(self, count):
        self.now += count
        self.peak = max(self.peak, self.now)
        self.reserved = max(self.reserved, self.now + 7)  # seven bytes are in no block


SIDE, LEAN = (5, 40, 300), (0, 20, 100)
"""Bytes that preparation holds, that the first call keeps, and that each call needs meanwhile."""


class Pool:
    """An input pool whose sides allocate, the first one a library workspace too.

    A side may have a fourth number: the bytes of the memory nodes of its graph.
    """

    def __init__(self, monkeypatch, workspace=0, driver=None):
        self.slots, self.allocator, self.workspace = [], Allocator(monkeypatch), workspace
        self.device, self.driver = "cpu", driver or Driver()
        monkeypatch.setattr(memory, "import_module", lambda name: self.driver)

    def lay_slots(self, count):
        self.slots = [count]

    def bind(self, side):
        held, kept, temporary, *nodes = side
        allocated = []

        def allocate(count):
            allocated.append(count)
            self.allocator.take(count)

        def run(slot):
            self.allocator.take(self.workspace)
            self.workspace = 0  # the library keeps it
            if len(allocated) == 1:
                allocate(kept)
            self.allocator.take(temporary)
            self.allocator.take(-temporary)
            for used in nodes:
                self.driver.use_graph_memory(used)

        def close():
            self.allocator.take(-sum(allocated))

        allocate(held)
        return SimpleNamespace(run=run, close=close, held_bytes=held, outputs=[None])


def test_kept_and_temporary_memory_count_but_no_library_workspace(monkeypatch):
    pool = Pool(monkeypatch, workspace=1000)
    trial = SimpleNamespace(pool=pool, sides=[(SIDE, None), (LEAN, None)])
    counts = metrics.count(CountTask(metric="memory"), trial)
    assert counts == {"baseline": 345, "optimized": 120}
    assert pool.slots == []
    assert pool.allocator.now == 1000


def test_reserved_memory_counts_from_the_first_call(monkeypatch):
    assert memory.reserved(Pool(monkeypatch), SIDE) == 352
    assert memory.fragmentation(Pool(monkeypatch), SIDE) == 7


NODES, FEW_NODES = (*LEAN, 6000), (*LEAN, 2000)
"""Sides whose graphs have memory nodes."""


def test_memory_nodes_of_graphs_count(monkeypatch):
    pool = Pool(monkeypatch)
    assert memory.allocated(pool, NODES) == 120 + 6000
    assert memory.reserved(pool, NODES) == 127 + 6001
    assert memory.fragmentation(pool, NODES) == 8


@pytest.mark.parametrize("resets", [True, False])
def test_memory_nodes_of_another_side_do_not_count(monkeypatch, resets):
    pool = Pool(monkeypatch, driver=Driver(resets=resets))
    pool.driver.keep_graph_memory(50)
    trial = SimpleNamespace(pool=pool, sides=[(NODES, None), (FEW_NODES, None)])
    assert metrics.count(CountTask(metric="memory"), trial) == {"baseline": 6120, "optimized": 2120}
    assert memory.reserved(pool, FEW_NODES) == 127 + 2001
    assert memory.allocated(pool, LEAN) == 120


def test_memory_nodes_that_a_call_frees_count(monkeypatch):
    pool = Pool(monkeypatch)
    bound = pool.bind(LEAN)

    def run(slot):
        pool.driver.use_graph_memory(700)
        pool.driver.cuDeviceGraphMemTrim(0)

    bound.run, bound.restore = run, lambda: None
    assert memory.peak_bytes(bound) == 700


def test_without_memory_nodes_only_the_allocator_counts(monkeypatch):
    pool = Pool(monkeypatch, driver=Driver(fails="cuDeviceGetGraphMemAttribute"))
    assert memory.allocated(pool, NODES) == 120
    assert memory.reserved(pool, NODES) == 127


@pytest.mark.parametrize("error", [ImportError("cuda.bindings"), RuntimeError("no driver")])
def test_without_a_driver_only_the_allocator_counts(monkeypatch, error):
    def missing(name):
        raise error

    pool = Pool(monkeypatch)
    monkeypatch.setattr(memory, "import_module", missing)
    assert memory.allocated(pool, NODES) == 120
    assert memory.reserved(pool, NODES) == 127


def test_the_driver_has_the_names_of_the_memory_of_graphs():
    driver = pytest.importorskip("cuda.bindings.driver")
    for name in MemoryAttribute.__members__:
        assert hasattr(driver.CUgraphMem_attribute, name)
    for function in ("Get", "Set"):
        assert callable(getattr(driver, f"cuDevice{function}GraphMemAttribute"))
    assert callable(driver.cuDeviceGraphMemTrim)
    assert int(driver.cuuint64_t(7)) == 7


def test_the_rank_that_needs_most_counts(monkeypatch):
    pool = Pool(monkeypatch)
    rank = SimpleNamespace(max=lambda value: max(value, 200.0), world=1)
    monkeypatch.setattr(process_group, "_current", rank)
    assert memory.allocated(pool, SIDE) == 345
    assert memory.allocated(pool, LEAN) == 200


class SendingPool(Pool):
    """A pool on ranks: sent tensors are held until the next collective begins."""

    sent = 0

    def start_window(self, device):
        self.allocator.take(-self.sent)
        self.sent = 0

    def bind(self, side):
        bound = super().bind(side)

        def close():
            bound.close()
            self.allocator.take(500)
            self.sent += 500

        def run(slot):
            self.start_window("cuda")  # a collective of the side
            bound.run(slot)

        return SimpleNamespace(**{**vars(bound), "run": run, "close": close})


def test_tensors_sent_by_the_last_side_are_dropped_before_counting(monkeypatch):
    pool = SendingPool(monkeypatch)
    rank = SimpleNamespace(max=lambda value: value, world=2, start_window=pool.start_window)
    monkeypatch.setattr(process_group, "_current", rank)
    monkeypatch.setattr(memory, "WATCHDOG", 0)
    assert memory.allocated(pool, SIDE) == 345
    monkeypatch.setattr(rank, "world", 1)
    assert memory.allocated(pool, SIDE) == 345 - 500
