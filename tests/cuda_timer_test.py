"""The timer of a GPU on one that is only told of: which windows are built, sized, cross-checked.

Its events read the host's clock, its graphs call what they captured again; no speed is tested.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from drivers import Driver, graph
from drivers import nodes as kinds

from pytest_aisp import Conditions, Work, compare
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.isolation import interference
from pytest_aisp.isolation.protections import without
from pytest_aisp.page.pair import SideError
from pytest_aisp.timing import cross_check, cuda_graph, cuda_timer, l2, memory, schedule
from pytest_aisp.timing.schedule import Budget
from pytest_aisp.util import device
from pytest_aisp.worker.loader import pair_of

CALLS = 4
"""Calls that a captured graph's nodes are of."""
BUDGET = Budget(blocks=4, least=2, seconds=0.01, window=2e-4, warmup=2)


class Event:
    """An event that happens when it is recorded."""

    def __init__(self, enable_timing=False):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        """It has happened."""

    def query(self):
        return False

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


@pytest.fixture
def gpu(monkeypatch):
    """Stand in for torch's CUDA; `gpu.captures` says whether sides can be captured."""
    state = SimpleNamespace(captures=True, latency=[270.0, 270.0, 620.0] * 99, nodes="KERNEL")
    state.allocated = state.most = 0

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
        "max_memory_allocated": lambda: state.most,
        "reset_peak_memory_stats": lambda: setattr(state, "most", state.allocated),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graph, "capture_graph", capture)
    monkeypatch.setattr(cuda_graph, "import_module", lambda name: Driver())
    monkeypatch.setattr(l2, "flush_l2", lambda l2_bytes: None)
    monkeypatch.setattr(device, "load_nvml", lambda: None)
    monkeypatch.setattr(cross_check, "gpu_timestamps", lambda: None)
    monkeypatch.setattr(l2, "latency_reader", lambda: lambda: state.latency.pop(0))
    # Sides run on the CPU while they are called, so nothing is under way when they return; but the
    # host, which Python slows down, is no witness of so short a time.
    monkeypatch.setattr(cross_check, "HOST", 1.0)
    return state


def added(x):
    return x + x


def doubled(x):
    return 2 * x


def bench_of(**changes):
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
        """Nothing: only its declaration is used."""

    bench = InputPool(pair_of(test_it), {"n": 4096}, "cpu", 1, 2)
    bench.lay_slots(4)
    return bench


def bout_of(bench, **options):
    subjects = bench.bind(added), bench.bind(doubled)
    return cuda_timer.CudaPairTimer(bench, subjects, BUDGET, **options)


@pytest.mark.parametrize(
    ("captures", "bound", "clock"),
    [(True, "dram", "graph"), (False, "dram", "queue"), (True, "launch", "host")],
)
def test_the_timer_uses_the_best_clock_for_both_sides(gpu, captures, bound, clock):
    gpu.captures = captures
    bout = bout_of(bench_of(bound=bound))
    assert bout.clock == clock
    samples = schedule.measure(bout, BUDGET, random.Random(1))
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
    bout = bout_of(bench_of(bound=bound, conditions=Conditions(owns=["threads"])))
    assert bout.clock == clock
    assert {**bout.notes, **bout.other_clock()}[note] == cuda_timer.THREADS


@pytest.mark.parametrize(
    ("captures", "bound", "counted"),
    [(True, "dram", False), (False, "dram", True), (True, "launch", True)],
)
def test_interference_is_counted_on_clocks_that_run_python(
    gpu, monkeypatch, captures, bound, counted
):
    gpu.captures = captures
    monkeypatch.setattr(interference, "swapped_kib", lambda: None)
    bout = bout_of(bench_of(bound=bound))
    bout.refresh(last=False)
    monkeypatch.setitem(sys.modules, "imported_by_a_test", ModuleType("imported_by_a_test"))
    assert (bout.disturbance() is not None) == counted
    assert bout.disturbance() is None
    assert ("housekeeping" in bout.details()) == counted


def test_device_allocations_in_a_window_are_counted(gpu, monkeypatch):
    asked = iter(range(10**6))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_device_alloc": next(asked)})
    bout = bout_of(bench_of(bound="launch"))
    bout.refresh(last=False)
    bout.disturbance()
    assert bout.details()["housekeeping"]["allocations"] == 1


def test_a_slowdown_is_planted_in_the_second_side_only(gpu):
    bout = bout_of(bench_of(), known=("graph", [100, 100]), planted=0.02)
    assert [w.calls for w in bout.windows] == [100, 102]
    assert bout.details()["counted"] == [100, 100]


def test_check_times_reports_graph_nodes_and_l2_latency(gpu):
    found = bout_of(bench_of(), known=("graph", [CALLS, CALLS])).check_times()
    assert found == {
        "l2_cycles": {"added": [270.0, 620.0], "doubled": [270.0, 620.0]},
        "graph_nodes": {"baseline": {"kernel": 1}, "optimized": {"kernel": 1}},
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("KERNEL HOST", "added: 4 of the 8 nodes of its graph call the CPU back"),
        ("", "added: nothing computes in its graph of 0 nodes, so a replay does nothing"),
    ],
)
def test_a_graph_without_gpu_work_is_refused(gpu, words, says):
    gpu.nodes = words
    bout = bout_of(bench_of())
    with pytest.raises(SideError, match=says):
        bout.check_times()
    with without(["graph-nodes"]):
        assert bout.check_times()["graph_nodes"]


def test_nodes_are_counted_on_the_graph_clock_only(gpu):
    gpu.captures, gpu.nodes = False, "HOST"
    assert bout_of(bench_of()).check_times() == {}
    gpu.captures = True
    assert bout_of(bench_of(bound="launch")).check_times() == {}


def test_peak_memory_of_a_call_excludes_earlier_allocations(gpu):
    bout = bout_of(bench_of())
    gpu.allocated = 1000
    workspaces = {"added": 0, "doubled": 500}
    for subject in bout.sides:

        def run(slot, subject=subject):
            gpu.most = gpu.allocated + 64 + workspaces[subject.name]

        subject.run = run
    gpu.most = 10**9  # of somebody before
    assert bout.memory() == {"peak_bytes": {"baseline": 64, "optimized": 564}}


def test_memory_held_by_preparation_is_counted_per_slot(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def ahead(x):
        gpu.allocated += 4096
        yield lambda: doubled(x)

    subject = bench_of().bind(ahead)
    gpu.most = gpu.allocated
    assert subject.held_bytes == 4096
    assert memory.peak_bytes(subject) == 4096
    assert bench_of().bind(doubled).held_bytes == 0


def test_a_warm_l2_is_refused(gpu):
    bout = bout_of(bench_of())
    gpu.latency[:] = [270.0] * 99
    with pytest.raises(SideError, match="added: the L2 is not cold: a load takes 270 cycles when"):
        bout.check_times()
    with without(["cold-l2"]):
        assert "l2_cycles" not in bout.check_times()


def test_a_long_call_uses_two_slots_and_skips_the_l2_check(gpu, monkeypatch):
    monkeypatch.setattr(cuda_timer.CudaPairTimer, "_estimates", lambda self, windows: [0.014, 1e-4])
    bout = bout_of(bench_of())
    long, short = (window.counted for window in bout.windows)
    assert (long, short % 4) == (2, 0)
    assert short == pytest.approx(280, abs=4), "both windows last alike"
    monkeypatch.setattr(l2, "measure", lambda window, read: l2.Latency(270.0, 270.0))
    with pytest.raises(SideError, match="doubled: the L2 is not cold"):
        bout.check_times()


@pytest.mark.parametrize("changes", [{"conditions": Conditions(l2="warm")}, {"bound": "pcie"}])
def test_pages_without_a_cold_l2_skip_the_l2_check(gpu, changes):
    gpu.latency.clear()
    assert bout_of(bench_of(**changes)).check_times().keys() == {"graph_nodes"}


def test_the_l2_check_needs_a_compiler(gpu, monkeypatch):
    monkeypatch.setattr(l2, "latency_reader", lambda: None)
    assert bout_of(bench_of()).check_times()["l2_cycles"] is None


@pytest.mark.parametrize("captures", [True, False])
def test_a_side_whose_clocks_disagree_is_refused_by_name(gpu, monkeypatch, captures):
    gpu.captures = captures
    bout = bout_of(bench_of())
    late = cross_check.Clocks(events=1e-3, host=None, counter=None, late=1e-2)
    monkeypatch.setattr(type(bout.windows[1]), "clocks", lambda self, seconds: late)
    with pytest.raises(SideError, match="added: work goes on for 1e\\+04 us after the last call"):
        bout.check_times()


@pytest.mark.parametrize("make", [cuda_graph.GraphWindow, cuda_timer.QueueWindow])
def test_windows_are_timed_by_every_clock(gpu, make):
    bench = bench_of()
    subject = bench.bind(doubled)
    found = make(subject, 8).clocks(1e-3)
    assert found.events > 0
    assert found.late >= 0
    assert found.counter is None  # nothing here compiles a stamp
    assert (found.host is None) == (make is cuda_timer.QueueWindow)


def test_the_other_clock_is_reported_too(gpu):
    assert set(bout_of(bench_of()).other_clock()) == {"as_called"}
    assert set(bout_of(bench_of(bound="launch")).other_clock()) == {"gpu_only"}
    gpu.captures = False
    assert bout_of(bench_of(bound="launch")).other_clock() == {"no gpu_only": "a wait for the GPU"}


def test_kernels_that_run_longer_than_the_windows_are_refused(gpu, monkeypatch):
    bout = bout_of(bench_of())
    monkeypatch.setattr(
        cuda_timer,
        "profile_kernels",
        lambda work, calls: cross_check.KernelProfile({"k": 1.0}, 2e-5),
    )
    assert bout.profile([2e-5, 2e-5])["doubled"].launches == {"k": 1.0}
    with pytest.raises(SideError, match="doubled: kernels are at work for 20 us a call"):
        bout.profile([2e-5, 1e-6])


class Recorded:
    """A CUDA graph that writes down what is asked of it."""

    asked: ClassVar[list[str]] = []

    def __init__(self, keep_graph=False):
        self.asked.append(f"keep={keep_graph}")

    def capture_begin(self, capture_error_mode, pool=None):
        self.asked.append("begin")

    def capture_end(self):
        self.asked.append("end")

    def instantiate(self):
        self.asked.append("instantiate")


@pytest.fixture
def recorded(monkeypatch):
    """Let torch capture into `Recorded`, and return what was asked of it."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "CUDAGraph": Recorded,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda given: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "current_device": lambda: 0,
        "graph_pool_handle": lambda: (0, 7),
        "mem_get_info": lambda: (100, 140),
        "empty_cache": lambda: Recorded.asked.append("cache emptied"),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda_graph, "abandoned", [])
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    Recorded.asked.clear()
    return Recorded.asked


def test_a_captured_graph_keeps_its_nodes_and_is_instantiated(recorded):
    cuda_graph.capture_graph(lambda: recorded.append("run"))
    assert recorded == ["run", "keep=True", "begin", "run", "end", "instantiate"]


def test_scarce_memory_is_released_before_a_capture(recorded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 140))
    cuda_graph.capture_graph(lambda: None)
    assert recorded == ["keep=True", "cache emptied", "begin", "end", "instantiate"]


def test_a_graph_that_cannot_be_instantiated_is_uncapturable(recorded, monkeypatch):
    def refused(self):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Recorded, "instantiate", refused)
    allocator(monkeypatch, recorded, told=True)
    with pytest.raises(cuda_graph.Uncapturable, match="out of memory"):
        cuda_graph.capture_graph(lambda: None)
    assert recorded[3:] == ["end", "keep=False", "begin", "end"]
    assert cuda_graph.abandoned == [(0, 7)]


def allocator(monkeypatch, recorded, told):
    """Put an allocator in torch's place that writes down what it hears, or was `told` before."""

    def heard(what):
        def hear(device, pool):
            if told:
                raise RuntimeError("not currently recording to mempool_id")
            recorded.append(f"{what} {pool}")

        return hear

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", heard("stop"), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", heard("release"), raising=False)


def test_a_failed_capture_is_reported_to_the_allocator(recorded, monkeypatch):
    allocator(monkeypatch, recorded, told=False)

    def side():
        if recorded[-1:] == ["begin"]:
            raise ValueError("not while it is captured")

    with pytest.raises(cuda_graph.Uncapturable, match="not while it is captured"):
        cuda_graph.capture_graph(side)
    told = ["begin", "end", "stop (0, 7)", "release (0, 7)", "keep=False", "begin", "end"]
    assert recorded == ["keep=True", *told]


@pytest.mark.parametrize("short", ["run", "begin"])
def test_a_side_that_runs_out_of_memory_fails_on_every_clock(recorded, monkeypatch, short):
    allocator(monkeypatch, recorded, told=True)

    def side():
        recorded.append("run")
        if short in recorded:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        cuda_graph.capture_graph(side)
    assert cuda_graph.abandoned == ([(0, 7)] if short == "begin" else [])


def test_out_of_memory_on_the_other_clock_is_only_a_note(gpu, monkeypatch):
    bout = bout_of(bench_of(bound="launch"))

    def capture(run):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(cuda_graph, "capture_graph", capture)
    assert bout.other_clock() == {"no gpu_only": "CUDA out of memory. Tried to allocate 2 GiB"}
