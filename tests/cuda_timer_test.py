"""The timer for GPUs on a fake GPU: how windows are built, sized and cross-checked.

The fake's events read the host's clock, and its graphs call the captured function again.
"""

from __future__ import annotations

import math
import random
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch
from fake_driver import Driver, graph
from fake_driver import nodes as kinds

from pytest_aisp import Conditions, Work, compare
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.isolation import interference
from pytest_aisp.isolation.protections import without
from pytest_aisp.page.pair import SideError
from pytest_aisp.timing import cross_check, cuda_graph, cuda_timer, l2, memory, schedule
from pytest_aisp.timing.schedule import Budget
from pytest_aisp.util import cpu_load, device
from pytest_aisp.worker.loader import pair_of

CALLS = 4
"""Calls in a captured graph."""
BUDGET = Budget(blocks=4, least=2, seconds=0.01, window=2e-4, warmup=2)


class Event:
    """An event that completes when it is recorded."""

    def __init__(self, enable_timing=False):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        """It has completed."""

    def query(self):
        return False

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


@pytest.fixture
def gpu(monkeypatch):
    """Replace torch's CUDA functions. `gpu.captures` is whether sides can be captured."""
    latency = [270.0, 620.0, 270.0, 620.0] * 20  # before the work, after it, again, after a flush
    state = SimpleNamespace(captures=True, latency=latency, nodes="KERNEL")
    state.allocated, state.peak, state.driver = 0, 0, Driver()

    def capture(run):
        if not state.captures:
            raise cuda_graph.Uncapturable("a wait for the GPU")
        run()
        return graph(kinds(state.nodes) * CALLS, replay=run)

    properties = SimpleNamespace(L2_cache_size=1 << 20, uuid="0")
    for name, value in {
        "Event": Event,
        "synchronize": lambda: None,
        "current_device": lambda: 0,
        "get_device_properties": lambda *index: properties,
        "memory_stats": dict,
        "_sleep": lambda cycles: None,
        "memory_allocated": lambda: state.allocated,
        "max_memory_allocated": lambda: state.peak,
        "reset_peak_memory_stats": lambda: setattr(state, "peak", state.allocated),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graph, "capture_graph", capture)
    monkeypatch.setattr(cuda_graph, "import_module", lambda name: Driver())
    monkeypatch.setattr(memory, "import_module", lambda name: state.driver)
    monkeypatch.setattr(l2, "flush_l2", lambda l2_bytes: None)
    monkeypatch.setattr(device, "load_nvml", lambda: None)
    monkeypatch.setattr(cross_check, "gpu_timestamps", lambda: None)
    monkeypatch.setattr(l2, "latency_reader", lambda: lambda: state.latency.pop(0))
    # Sides run on the CPU, so no work is queued late. A busy host must not change that.
    monkeypatch.setattr(cross_check, "HOST", 60.0)
    monkeypatch.setattr(cross_check, "LATE", 60.0)
    monkeypatch.setattr(cross_check, "LATE_QUEUED", 60.0)
    monkeypatch.setattr(cpu_load, "STOLEN", math.inf)
    return state


def added(x):
    return x + x


def doubled(x):
    return 2 * x


def pool_of(**changes):
    @compare(
        baseline=added,
        optimized=[doubled],
        inputs=lambda device, n: (torch.randn(n, device=device),),
        reference=lambda x: 2 * x.double(),
        sizes=[{"n": 4096}],
        check_sizes=[{"n": 33}],
        work=lambda n: Work(read=4 * n, write=4 * n),
        **{"bound": "dram", **changes},
    )
    def test_it(pair):
        """Do nothing: only the declaration is used."""

    pool = InputPool(pair_of(test_it), {"n": 4096}, "cpu", 1, 2)
    pool.lay_slots(4)
    return pool


def timer_of(pool, **options):
    sides = pool.bind(added), pool.bind(doubled)
    return cuda_timer.CudaPairTimer(pool, sides, BUDGET, **options)


@pytest.mark.parametrize(
    ("captures", "bound", "clock"),
    [(True, "dram", "graph"), (False, "dram", "queue"), (True, "launch", "host")],
)
def test_the_timer_uses_the_best_clock_for_both_sides(gpu, captures, bound, clock):
    gpu.captures = captures
    timer = timer_of(pool_of(bound=bound))
    assert timer.clock == clock
    samples = schedule.measure(timer, BUDGET, random.Random(1))
    assert samples.clock == clock
    assert len(samples.blocks) >= BUDGET.least
    assert samples.details["slots"] == 4
    assert samples.details["calls"] == samples.details["counted"]
    assert all(count % 4 == 0 for count in samples.details["calls"])


@pytest.mark.parametrize(
    ("bound", "clock", "note"), [("dram", "queue", "no graph"), ("launch", "host", "no gpu_only")]
)
def test_a_page_that_owns_threads_is_never_captured(gpu, monkeypatch, bound, clock, note):
    monkeypatch.setattr(cuda_graph, "capture_graph", None)
    timer = timer_of(pool_of(bound=bound, conditions=Conditions(owns=["threads"])))
    assert timer.clock == clock
    assert {**timer.notes, **timer.other_clock()}[note] == cuda_timer.THREADS


@pytest.mark.parametrize(
    ("captures", "bound", "counted"),
    [(True, "dram", False), (False, "dram", True), (True, "launch", True)],
)
def test_interference_is_counted_where_python_runs(gpu, monkeypatch, captures, bound, counted):
    gpu.captures = captures
    monkeypatch.setattr(interference, "swapped_kib", lambda: None)
    timer = timer_of(pool_of(bound=bound))
    timer.refresh(last=False)
    monkeypatch.setitem(sys.modules, "imported_by_a_test", ModuleType("imported_by_a_test"))
    assert (timer.disturbance() is not None) == counted
    assert timer.disturbance() is None
    assert ("housekeeping" in timer.details()) == counted


def test_device_allocations_in_a_window_are_counted(gpu, monkeypatch):
    asked = iter(range(10**6))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_device_alloc": next(asked)})
    timer = timer_of(pool_of(bound="launch"))
    timer.refresh(last=False)
    timer.disturbance()
    assert timer.details()["housekeeping"]["allocations"] == 1


def test_a_slowdown_is_planted_in_the_second_side_only(gpu):
    timer = timer_of(pool_of(), known=("graph", [100, 100]), planted=(0.0, 0.02))
    assert [w.calls for w in timer.windows] == [100, 102]
    assert timer.details()["counted"] == [100, 100]


def test_check_times_reports_graph_nodes_and_l2_latency(gpu):
    assert timer_of(pool_of(), known=("graph", [CALLS, CALLS])).check_times() == {
        "l2_cycles": {"added": [270.0, 620.0, 620.0], "doubled": [270.0, 620.0, 620.0]},
        "graph_nodes": {"baseline": {"kernel": 1}, "optimized": {"kernel": 1}},
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("KERNEL HOST", "added: 4 of the 8 nodes in its graph call back to the CPU"),
        ("", "added: nothing computes in its graph of 0 nodes, so a replay does nothing"),
    ],
)
def test_a_graph_without_gpu_work_is_refused(gpu, words, message):
    gpu.nodes = words
    timer = timer_of(pool_of())
    with pytest.raises(SideError, match=message):
        timer.check_times()
    with without(["graph-nodes"]):
        assert timer.check_times()["graph_nodes"]


def test_nodes_are_counted_on_the_graph_clock_only(gpu):
    gpu.captures, gpu.nodes = False, "HOST"
    assert timer_of(pool_of()).check_times() == {}
    gpu.captures = True
    assert timer_of(pool_of(bound="launch")).check_times() == {}


def test_peak_memory_of_a_call_excludes_earlier_allocations(gpu):
    timer = timer_of(pool_of())
    gpu.allocated = 1000
    workspaces = {"added": 0, "doubled": 500}
    for side in timer.sides:

        def run(slot, side=side):
            gpu.peak = gpu.allocated + 64 + workspaces[side.name]

        side.run = run
    gpu.peak = 10**9  # of earlier work
    assert timer.memory() == {"peak_bytes": {"baseline": 64, "optimized": 564}}


@pytest.mark.parametrize("resets", [True, False])
def test_peak_memory_includes_the_memory_nodes_of_this_side_only(gpu, resets):
    gpu.driver = Driver(resets=resets)
    gpu.driver.keep_graph_memory(50)
    timer = timer_of(pool_of())
    nodes = {"added": 6000, "doubled": 2000}
    for side in timer.sides:
        side.run = lambda slot, side=side: gpu.driver.use_graph_memory(nodes[side.name])
    for side in timer.sides:
        side.run(0)  # both sides were timed before
    gpu.peak = gpu.allocated
    assert timer.memory() == {"peak_bytes": {"baseline": 6000, "optimized": 2000}}


def test_memory_held_by_preparation_is_counted_per_slot(gpu, monkeypatch):
    pool = pool_of()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def ahead(x):
        gpu.allocated += 4096
        yield lambda: doubled(x)

    side = pool.bind(ahead)
    gpu.peak = gpu.allocated
    assert side.held_bytes == 4096
    assert memory.peak_bytes(side) == 4096
    assert pool.bind(doubled).held_bytes == 0


def test_a_warm_l2_is_refused(gpu):
    timer = timer_of(pool_of())
    gpu.latency[:] = [270.0, 270.0, 270.0, 620.0] * 3
    found = "added: the L2 is not cold: a load takes 270 cycles .*, and 620 after a flush;"
    with pytest.raises(SideError, match=found):
        timer.check_times()
    with without(["cold-l2"]):
        assert "l2_cycles" not in timer.check_times()


def test_a_long_call_uses_two_slots_and_skips_the_l2_check(gpu, monkeypatch):
    monkeypatch.setattr(cuda_timer.CudaPairTimer, "_estimates", lambda self, windows: [0.014, 1e-4])
    timer = timer_of(pool_of())
    long, short = (window.counted for window in timer.windows)
    assert (long, short % 4) == (2, 0)
    assert short == pytest.approx(280, abs=4), "both windows last alike"
    monkeypatch.setattr(l2, "measure", lambda *given: l2.Latency(270.0, 270.0, 620.0))
    with pytest.raises(SideError, match="doubled: the L2 is not cold"):
        timer.check_times()


@pytest.mark.parametrize("make", ["graph", "queue", "host"])
@pytest.mark.parametrize(("warmth", "flushes"), [("cold", [16]), ("warm", [])])
def test_the_l2_is_flushed_before_a_window_that_uses_few_slots(
    gpu, monkeypatch, make, warmth, flushes
):
    flushed = []
    monkeypatch.setattr(l2, "flush_l2", flushed.append)
    timer = timer_of(pool_of(conditions=Conditions(l2=warmth)))
    timer._l2_bytes = 16
    few, many = timer._build(make, [2, 4])
    few(), many()
    assert flushed == flushes


@pytest.mark.parametrize("changes", [{"conditions": Conditions(l2="warm")}, {"bound": "pcie"}])
def test_pages_without_a_cold_l2_skip_the_l2_check(gpu, changes):
    gpu.latency.clear()
    assert timer_of(pool_of(**changes)).check_times().keys() == {"graph_nodes"}


def test_the_l2_check_needs_a_compiler(gpu, monkeypatch):
    monkeypatch.setattr(l2, "latency_reader", lambda: None)
    assert timer_of(pool_of()).check_times()["l2_cycles"] is None


@pytest.mark.parametrize("captures", [True, False])
def test_a_side_whose_clocks_disagree_is_refused_by_name(gpu, monkeypatch, captures):
    gpu.captures = captures
    timer = timer_of(pool_of())
    late = cross_check.Clocks(events=1e-3, host=None, counter=None, late=100.0)
    monkeypatch.setattr(type(timer.windows[1]), "clocks", lambda self, seconds: late)
    with pytest.raises(SideError, match="added: work continues for 1e\\+08 us after the last call"):
        timer.check_times()


@pytest.mark.parametrize("make", [cuda_graph.GraphWindow, cuda_timer.QueueWindow])
def test_windows_are_timed_by_every_clock(gpu, make):
    pool = pool_of()
    side = pool.bind(doubled)
    clocks = make(side, 8).clocks(1e-3)
    assert clocks.events > 0
    assert clocks.late >= 0
    assert clocks.counter is None  # no timestamp kernel
    assert (clocks.host is None) == (make is cuda_timer.QueueWindow)


def test_the_other_clock_is_reported_too(gpu):
    assert set(timer_of(pool_of()).other_clock()) == {"as_called"}
    assert set(timer_of(pool_of(bound="launch")).other_clock()) == {"gpu_only"}
    gpu.captures = False
    assert timer_of(pool_of(bound="launch")).other_clock() == {"no gpu_only": "a wait for the GPU"}


def test_kernels_that_run_longer_than_the_windows_are_refused(gpu, monkeypatch):
    timer = timer_of(pool_of())
    monkeypatch.setattr(
        cuda_timer,
        "profile_kernels",
        lambda work, calls: cross_check.KernelProfile({"k": 1.0}, 2e-5),
    )
    assert timer.profile([2e-5, 2e-5])["doubled"].launches == {"k": 1.0}
    with pytest.raises(SideError, match="doubled: kernels run for 20 us a call"):
        timer.profile([2e-5, 1e-6])


@pytest.mark.parametrize(
    ("replayed", "refused"),
    [
        pytest.param(cross_check.KernelProfile({"k": 4.0}, 1e-5), False, id="overlap"),
        pytest.param(cross_check.KernelProfile({"k": 2.0}, 1e-5), True, id="fewer kernels"),
        pytest.param(cross_check.KernelProfile({"other": 4.0}, 1e-5), True, id="other kernels"),
        pytest.param(cross_check.KernelProfile({}, 0.0), True, id="nothing"),
    ],
)
def test_kernels_may_overlap_in_a_graph_more_than_as_called(gpu, monkeypatch, replayed, refused):
    timer = timer_of(pool_of())
    profiles = {False: cross_check.KernelProfile({"k": 4.0}, 2e-5), True: replayed}
    monkeypatch.setattr(
        cuda_timer, "profile_kernels", lambda work, calls: profiles[work.__self__ in timer.windows]
    )
    if refused:
        with pytest.raises(SideError, match="added: kernels run for 20 us a call"):
            timer.profile([1e-5, 1e-5])
    else:
        timer.profile([1e-5, 1e-5])


def test_out_of_memory_on_the_other_clock_is_only_a_note(gpu, monkeypatch):
    timer = timer_of(pool_of(bound="launch"))

    def capture(run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(cuda_graph, "capture_graph", capture)
    assert timer.other_clock() == {"no gpu_only": "CUDA out of memory. Tried to allocate 2 GiB"}
