"""How one process times a case: build order, checks, and the memory it keeps."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from validity import TESTS

from pytest_aisp.checking import check, exact_probe
from pytest_aisp.checking.inputs import slot_order
from pytest_aisp.results.messages import CheckTask, PageSource, TimeTask
from pytest_aisp.timing import cpu_timer, trial, verify_outputs
from pytest_aisp.timing.trial import Trial
from pytest_aisp.util import cpu_load
from pytest_aisp.util.device_state import Stopwatch
from pytest_aisp.worker.engine import Engine
from pytest_aisp.worker.loader import Cache

SHORT = {"blocks": 8, "least": 8, "seconds": 0.01, "window": 2e-4, "warmup": 3}


@pytest.fixture
def built(monkeypatch):
    """Return which side was built first at each build. Every lap rebuilds."""
    firsts = []
    build = Trial._build

    def watched(self, sides, budget, first):
        firsts.append(first)
        return build(self, sides, budget, first)

    monkeypatch.setattr(cpu_load, "STOLEN", math.inf)  # a busy machine must not drop blocks,
    monkeypatch.setattr(trial, "LONG_ROUND", math.inf)  # and a slow call must not drop laps
    monkeypatch.setattr(Trial, "_build", watched)
    monkeypatch.setattr(Trial, "_rebuilds", lambda self: True)
    return firsts


COMMON = {
    "page": str(TESTS / "exploits" / "common.py"),
    "root": str(TESTS),
    "module": "honest_page",
    "function": "honest_side",
    "variant": "honest_side",
    "seed": 1,
    "rule": {},
    "device": "cpu",
    "size": {"n": 257},
    # The fixture replaces watched functions, and the laps are those of a GPU.
    "without": ("own-clock", "new-values"),
}


def timed(replicate=0, task=COMMON, **budget):
    return Engine().time(TimeTask(budget={**SHORT, **budget}, replicate=replicate, **task))


def test_laps_alternate_the_build_order_after_an_untimed_build(built):
    result = timed()
    assert built == [0, 0, 1, 0, 1]
    assert result.firsts == [0, 0, 1, 1, 0, 0, 1, 1]
    assert len(result.blocks) == len(result.orders) == 8
    assert len(result.laps) == 4


def test_every_lap_has_as_many_blocks_as_the_first(built):
    result = timed(blocks=40, least=4)
    assert len(result.blocks) % 4 == 0
    assert sorted(result.firsts).index(1) == len(result.firsts) / 2


def test_the_error_of_timed_outputs_is_kept_for_each_side(built):
    relative = timed().relative
    assert set(relative) == {"honest", "honest_side"}
    assert all(1e-8 < share < 1e-6 for share in relative.values()), "one fp32 rounding"


def test_outputs_of_called_slots_are_compared(built, monkeypatch):
    monkeypatch.setattr(Trial, "_slot_count", lambda self: 4)
    compared = timed().outputs_checked
    monkeypatch.setattr(cpu_timer, "calls_for", lambda seconds, window, slots: 2)
    monkeypatch.setattr(cpu_timer, "calls_to_plant", lambda calls, slots, planted: calls)
    assert compared - timed().outputs_checked == 4 * 2 * 2, "laps, sides, slots not called"


@pytest.mark.parametrize(("replicate", "count"), [(0, 1), (1, 0), (1000, 0)])
def test_memory_is_measured_once_and_after_the_windows(built, monkeypatch, replicate, count):
    calls = []

    def memory(self):
        calls.append(f"memory after {len(built)} builds")
        return {"peak_bytes": {"baseline": 1, "optimized": 2}}

    monkeypatch.setattr(cpu_timer.CpuPairTimer, "memory", memory)
    monkeypatch.setattr(cpu_timer.CpuPairTimer, "other_clock", lambda self: calls.clear() or {})
    details = timed(replicate=replicate).details
    assert calls == ["memory after 2 builds"] * count  # the untimed build and the first lap
    assert ("peak_bytes" in details) == bool(count)


def test_old_code_is_timed_without_measuring_what_the_case_has_shown(built, monkeypatch):
    calls = []
    monkeypatch.setattr(cpu_timer.CpuPairTimer, "check_times", lambda self: calls.append(0) or {})
    for name in ("memory", "other_clock"):
        monkeypatch.setattr(cpu_timer.CpuPairTimer, name, lambda self: calls.append(1) or {})
    past = PageSource(page=COMMON["page"], root=COMMON["root"], module="aisp_past_page")
    old = {"versus": "old", "side": "optimized", "past": past}
    assert timed(task=COMMON | old).blocks
    assert calls == [0], "but the clocks are compared"


PENDING = []
LATE = """
import torch
import trial_test
from exploits.common import against, honest


def late(x):
    out = torch.full_like(x[:, 0], float("nan"))
    trial_test.PENDING.append((out, honest(x)))
    return out


def also_late(x):
    return late(x)


test_late = against(also_late, baseline=late)
"""


def test_no_output_is_read_before_the_device_is_idle(built, monkeypatch, tmp_path):
    """A copy to pinned memory is complete only after its stream has run the copy."""

    def wait():
        for out, answer in PENDING:
            out.copy_(answer)
        PENDING.clear()

    for module in (
        check,
        exact_probe,
        trial,
        verify_outputs,
    ):  # a window waits only for its own stream
        monkeypatch.setattr(module, "synchronizer", lambda device: wait)
    monkeypatch.setitem(sys.modules, "trial_test", sys.modules[__name__])
    page = tmp_path / "late.py"
    page.write_text(LATE)
    off = ("own-clock", "new-values")
    where = {"page": str(page), "root": str(tmp_path), "module": "late", "without": off}
    engine = Engine()
    common = COMMON | where | {"function": "test_late", "variant": "also_late"}
    found = engine.check(CheckTask(**common))
    assert {size.exact for size in found.sizes.values()} == {"bit for bit"}
    result = engine.time(TimeTask(budget=SHORT, **common))
    assert result.outputs_checked > 0


ROUNDED = """
from exploits.common import against, honest

from pytest_aisp import Variant


def rounded(x):
    return honest(x.bfloat16()).float()


def exact(x):
    return honest(x)


test_rounded = against(exact, baseline=Variant(rounded, precision="bf16"))
"""


def test_a_baseline_that_declares_its_precision_is_timed(built, tmp_path):
    page = tmp_path / "rounded.py"
    page.write_text(ROUNDED)
    case = {"page": str(page), "root": str(tmp_path), "module": "rounded"}
    case |= {"function": "test_rounded", "variant": "exact"}
    result = Engine().time(TimeTask(budget=SHORT, **COMMON | case))
    assert result.outputs_checked > 0


@pytest.mark.parametrize(
    ("slots", "calls", "extra"), [(1, 3, 2), (2, 100, 1), (7, 98, 1), (9, 18, 3)]
)
def test_extra_calls_use_slots_that_are_cold(slots, calls, extra):
    order = slot_order(calls, slots, extra)
    assert order[:calls] == tuple(k % slots for k in range(calls))
    assert len(order) == calls + extra
    window = [*order, *order]  # the next one follows
    last = {}
    for at, slot in enumerate(window):
        assert at - last.get(slot, -calls) >= slots // 2
        last[slot] = at


@pytest.mark.parametrize(
    ("reserved", "forgotten", "exhausted"),
    [([10], False, False), ([30, 10], True, False), ([30, 30], True, True)],
    ids=["its share", "too much expected", "cannot be given back"],
)
def test_a_process_keeps_at_most_its_share_of_gpu_memory(
    monkeypatch, reserved, forgotten, exhausted
):
    kept, gib = Cache(Stopwatch(), {"page": object()}), iter(reserved)
    monkeypatch.setattr("pytest_aisp.worker.loader.release", lambda device, **how: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: next(gib) << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 140 << 30))
    kept.release_memory("cpu")
    assert kept.references
    kept.release_memory("cuda")
    assert (not kept.references, kept.exhausted) == (forgotten, exhausted)


@pytest.mark.parametrize(("still", "exhausted"), [(10, False), (30, True)])
def test_a_rank_keeps_an_eighth_of_that_share(monkeypatch, still, exhausted):
    ranks, gib = SimpleNamespace(world=2, max=lambda value: value), iter([10, still])
    monkeypatch.setattr("pytest_aisp.worker.loader.current_group", lambda: ranks)
    monkeypatch.setattr("pytest_aisp.worker.loader.release", lambda device, **how: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: next(gib) << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 140 << 30))
    kept = Cache(Stopwatch(), {"page": object()})
    kept.release_memory("cuda")
    assert not kept.references
    assert kept.exhausted is exhausted


def test_a_process_in_which_a_capture_failed_is_exhausted(monkeypatch):
    monkeypatch.setattr("pytest_aisp.worker.loader.release", lambda device, **how: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 140 << 30))
    monkeypatch.setattr("pytest_aisp.timing.cuda_graph.abandoned", [(0, 1)])
    kept = Cache(Stopwatch())
    kept.release_memory("cuda")
    assert kept.exhausted
