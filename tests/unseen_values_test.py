"""On the CPU's clock, every timed call gets values that no side has seen."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from exploits.common import COLUMNS, against, honest, inputs
from worker_processes import alive_workers, wait_for

from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.checking.numerics import Rule, Wrong
from pytest_aisp.checking.reference import Reference
from pytest_aisp.page.pair import PageError, SideError
from pytest_aisp.results.messages import TimeTask
from pytest_aisp.timing import unseen_values, verify_outputs
from pytest_aisp.timing.cpu_timer import UnseenWindow
from pytest_aisp.timing.schedule import extra_calls
from pytest_aisp.timing.unseen_values import UnseenValues, supports, window_calls
from pytest_aisp.timing.verify_outputs import OutputVerifier
from pytest_aisp.util import cpu_load, pytree
from pytest_aisp.worker import input_process
from pytest_aisp.worker.client import WorkerProcess
from pytest_aisp.worker.engine import Engine
from pytest_aisp.worker.loader import pair_of

SIZE = {"n": 33}


class Source:
    """Draws values in this process."""

    def __init__(self):
        self.seeds = itertools.count(1)

    def draw(self, count, like):
        return [self.one(next(self.seeds)) for _ in range(count)]

    def one(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return (torch.randn(SIZE["n"], COLUMNS, generator=generator),)


@pytest.fixture
def window():
    """Return a window of `calls` calls of a side, with the values that it gets."""

    def make(side, calls, slots=None):
        pool = InputPool(pair_of(against(side)), SIZE, "cpu", 1, 2)
        pool.lay_slots(slots or calls)
        unseen = UnseenValues(pool, Source())
        return UnseenWindow(pool.bind(side), calls, 0, unseen), unseen

    return make


def right(x):
    return honest(x)


def verify(window, unseen, side):
    """Compare the kept calls of a window's side."""
    reference = Reference(unseen.pool)
    verifier = OutputVerifier(reference, [(honest, None), (side, None)], Rule(), "cpu")
    verifier.sides = [(side, None)]
    verifier.verify_calls(SimpleNamespace(sides=[window.side]), unseen)
    return verifier


def test_every_call_gets_new_values_and_no_write_counts(window):
    seen, versions = [], set()

    def side(x):
        seen.append(x.numpy().tobytes())
        versions.add(x._version)
        return honest(x)

    timed, _ = window(side, 5, slots=8)
    for _ in range(20):
        timed()
    calls = [seen[at : at + 6] for at in range(0, 120, 6)]
    values = [value for _, *timed_calls in calls for value in timed_calls]
    assert len(values) == len(set(values)) == 100
    untimed = [first for first, *_ in calls]
    assert untimed[1:] == [value for _, value, *_ in calls[:-1]], "earlier values of the first slot"
    assert len(versions) == 1


def test_no_call_runs_between_the_draw_and_the_timed_calls(window):
    events = []

    def side(x):
        events.append("call")
        return honest(x)

    timed, unseen = window(side, 3)
    draw = unseen._source.draw

    def drawn(count, like):
        events.append("draw")
        return draw(count, like)

    unseen._source.draw = drawn
    timed()
    assert events == ["call", "draw", "call", "call", "call"]


def test_the_time_to_draw_is_not_timed(window):
    timed, unseen = window(right, 2)
    draw = unseen._source.draw

    def slow_draw(count, like):
        time.sleep(0.05)
        return draw(count, like)

    unseen._source.draw = slow_draw
    assert min(timed() for _ in range(5)) < 0.05 / 2


def test_the_cpu_time_of_windows_is_counted(window):
    timed, _ = window(right, 4)
    timed()
    assert 0 < timed.cpu < 10 * timed.wall


def test_scaled_inputs_are_scaled_at_random(window):
    timed, unseen = window(right, 64)
    unseen.pool.scaled = True
    timed()
    sizes = [float(values[0].abs().mean()) for values in unseen.pool.slots]
    assert {round(math.log2(0.8 / size)) for size in sizes} == {0, 1, 2}


def test_each_call_is_kept_with_the_same_probability(window, monkeypatch):
    monkeypatch.setattr(unseen_values, "KEPT_CALLS", 8)
    counts = torch.zeros(4)
    timed, unseen = window(right, 10)
    for _ in range(200):
        firsts = []
        for _ in range(4):
            timed()
            firsts.append({float(values[0][0, 0]) for values in unseen.pool.slots})
        kept = unseen.calls(timed.side)
        assert len(kept) == 8
        for call in kept:
            first = float(call.values[0][0, 0])
            counts += torch.tensor([first in window for window in firsts])
    assert counts.sum() == 1600
    assert counts.min() > 300  # 400 are expected, with a standard deviation of 16


def test_kept_calls_share_no_memory_with_later_ones(window):
    buffers = {}

    def side(x):
        return buffers.setdefault(x.data_ptr(), torch.empty(len(x))).copy_(honest(x))

    timed, unseen = window(side, 4)
    for _ in range(10):
        timed()
    calls = unseen.calls(timed.side)
    assert len(calls) == 40
    for call in calls:
        [(_, output)] = call.outputs
        assert torch.equal(output, honest(*call.values))


def test_a_buffer_that_all_calls_share_is_found(window):
    buffer = torch.empty(SIZE["n"])

    def side(x):
        return buffer.copy_(honest(x))

    timed, unseen = window(side, 8)
    timed()
    with pytest.raises(Wrong, match="side is wrong"):
        verify(timed, unseen, side)


def test_right_calls_pass(window):
    timed, unseen = window(right, 16)
    for _ in range(10):
        timed()
    verifier = verify(timed, unseen, right)
    assert verifier.compared > verify_outputs.COMPARED_CALLS


def test_few_wrong_calls_are_found(window, monkeypatch):
    monkeypatch.setattr(verify_outputs, "COMPARE_SECONDS", 60)
    monkeypatch.setattr(unseen_values, "KEPT_OF_WINDOW", 50)
    numbers = itertools.count()

    def side(x):
        return honest(x) * (1 + (next(numbers) == 300))

    timed, unseen = window(side, 50)
    for _ in range(10):
        timed()
    with pytest.raises(Wrong, match=r"side is wrong at n=33: (.|\n)*output of a timed call"):
        verify(timed, unseen, side)


def test_work_in_the_last_calls_of_a_window_is_not_enough(window):
    numbers, answers = itertools.count(), {}

    def side(x):
        if next(numbers) % 16 in (0, 15):
            answers["last"] = honest(x)
        return answers["last"].clone()

    timed, unseen = window(side, 16)
    timed()
    with pytest.raises(Wrong, match="side is wrong"):
        verify(timed, unseen, side)


def test_a_few_elements_near_a_tie_accuse_nobody(window):
    """One wrong element of 33 is no sign of a wrong call; a check decides about elements."""

    def side(x):
        out = honest(x)
        out[7] += 1
        return out

    timed, unseen = window(side, 16)
    timed()
    calls = unseen.calls(timed.side)
    reference = Reference(unseen.pool)
    verifier = OutputVerifier(reference, [(honest, None)], Rule(), "cpu")
    limits = verifier._limits(None)
    assert not any(verifier._largely_wrong(call, limits) for call in calls)


def test_changed_inputs_of_a_timed_call_are_found(window):
    def side(x):
        out = honest(x)
        x[0, 0] += 1
        return out

    timed, _ = window(side, 4)
    with pytest.raises(SideError, match=r"side changed its input \[0\] at n=33"):
        timed()


@pytest.mark.parametrize(
    ("seconds", "slots", "draw_seconds", "planted", "calls"),
    [
        (1e-5, 128, 1e-5, 0.0, 128),
        (1e-5, 128, 1e-3, 0.0, 100),  # 1 ms
        (1e-3, 128, 1e-3, 0.0, 10),  # 10 ms
        (1e-3, 128, 1e-2, 0.0, 1),
        (1.0, 128, 1e-3, 0.0, 2),
        (1e-6, 128, 1e-5, 0.0, 128),
        (1e-5, 20, 5e-3, 0.0, 20),
        (1e-5, 128, 1e-5, 0.01, 100),
        (1e-5, 128, 1e-5, 0.02, 50),
        (1e-3, 2, 1e-3, 0.01, 1),
    ],
)
def test_the_calls_of_a_window_fit_the_slots(seconds, slots, draw_seconds, planted, calls):
    found = window_calls(seconds, 0.01, slots, draw_seconds, planted)
    assert found == calls
    assert found + extra_calls(found, planted) <= slots


def test_the_slots_fit_the_memory_and_the_time_to_draw(window, monkeypatch):
    _, unseen = window(right, 1)
    assert unseen.slot_count(unseen_values.SLOT_BYTES, 0.0) == 1
    assert unseen.slot_count(unseen_values.SLOT_BYTES, 0.01) == 2
    monkeypatch.setattr(unseen, "_seconds_to_draw", lambda like, count: 1e-3)
    assert unseen.slot_count(0, 0.0) == 100
    monkeypatch.setattr(unseen, "_seconds_to_draw", lambda like, count: 1e-5)
    assert unseen.slot_count(0, 0.0) == 128
    monkeypatch.setattr(unseen, "_seconds_to_draw", lambda like, count: 0.6)
    assert unseen.slot_count(0, 0.0) == 0, "windows repeat their values"


def prepared(x):
    yield lambda: honest(x)


@pytest.mark.parametrize(
    ("side", "page", "supported"),
    [
        (right, {}, True),
        (prepared, {}, False),
        (right, {"state": lambda device, n: torch.ones(1)}, False),
        (right, {"inputs": lambda device, n: (torch.nn.Parameter(torch.ones(n)),)}, False),
        (right, {"inputs": lambda device, n: (3,)}, False),
        (right, {"inputs": lambda device, n: (torch.zeros((4 << 20) // 4),)}, True),
        (right, {"inputs": lambda device, n: (torch.zeros((4 << 20) // 4 + 1),)}, False),
    ],
)
def test_some_pages_repeat_their_values(side, page, supported):
    pool = InputPool(pair_of(against(side, **page)), SIZE, "cpu", 1, 2)
    assert supports(pool) == supported


PAGE = """
import os
import time

import torch
from exploits.common import against, honest


def inputs(device, n):
    {inputs}
    return torch.randn(n, 64), 3, [torch.arange(n) > 2, torch.randn(2, 2, dtype=torch.complex64)]


def run(x, number, more):
    return honest(x)


side = against(run, inputs=inputs)
"""
numbers = itertools.count()


@pytest.fixture
def drawn(tmp_path):
    """Draw two value sets of a page with these lines in its `inputs`."""

    def draw(lines="", limit=600.0):
        path = tmp_path / "page.py"
        path.write_text(PAGE.format(inputs=lines))
        task = TimeTask(
            page=str(path),
            root=str(__file__).rpartition("/")[0],
            module=f"drawn_page{next(numbers)}",
            function="side",
            variant="run",
            size=SIZE,
            limit=limit,
        )
        like = torch.zeros(33, 64), 3, [torch.zeros(33) > 2, torch.zeros(2, 2) * 1j]
        with input_process.values_for(task) as source:
            return source.draw(2, like)

    return draw


def test_another_process_draws_values_of_all_types(drawn):
    first, second = drawn()
    assert first[1] == 3
    assert torch.equal(first[2][0], torch.arange(33) > 2)
    for one, other in ((first[0], second[0]), (first[2][1], second[2][1])):
        assert one.shape == other.shape
        assert not torch.equal(one, other)
        assert 0.05 < float(one.abs().mean()) < 4  # the mean of as few as four elements
    again, _ = drawn()
    assert not torch.equal(first[0], again[0])


FAULTS = {
    "raise ValueError('no file')": "ValueError: no file",
    "os.abort()": "ended by SIGABRT",
    "time.sleep(60)": r"no answer within 0\.8 s",
    "n = n + 1": r"33, 64\]', .* here\nShapes and types may depend on the size only",
}


@pytest.mark.parametrize("lines", FAULTS)
def test_a_fault_in_the_other_process_is_an_error_of_the_page(drawn, lines):
    drawn()  # it runs already, so the limit is not extended
    with pytest.raises(PageError, match=FAULTS[lines]):
        drawn(lines, limit=1.0 if "sleep" in lines else 600.0)
    assert len(drawn()) == 2


# Honest sides that keep something from call to call.
SCRATCH = {}


def with_plans(x):
    plan = SCRATCH.setdefault(("plan", x.shape), torch.full((x.shape[1],), 2.0))
    return x @ plan


@functools.lru_cache
def factor(columns):
    return 2.0 * columns / COLUMNS


def with_cached_sizes(x):
    return factor(x.shape[1]) * x.sum(1)


def with_scratch_buffer(x):
    buffer = SCRATCH.setdefault(("buffer", x.shape), torch.empty_like(x))
    return torch.mul(x, 2, out=buffer).sum(1)


def autotuned(x):
    if "best" not in SCRATCH:
        ways = [lambda x: 2 * x.sum(1), lambda x: (2 * x).sum(1)]
        SCRATCH["best"] = random.choice(ways)
        time.sleep(0.05)
    return SCRATCH["best"](x)


def same_as_before(x):
    last = SCRATCH.get("last")
    if last is None or last[0].shape != x.shape or not torch.equal(last[0], x):
        SCRATCH["last"] = x.clone(), honest(x)
    return SCRATCH["last"][1].clone()


PLANS = against(with_plans)
SIZES = against(with_cached_sizes)
BUFFER = against(with_scratch_buffer)
TUNED = against(autotuned)
SAME = against(same_as_before)


def task_of(page, planted=0.0):
    """Return the task that times a page of this module."""
    return TimeTask(
        page=__file__,
        root=__file__.rpartition("/")[0],
        module="unseen_values_test",
        function=page,
        variant=pair_of(globals()[page]).variants[0].name,
        size={"n": 257},
        budget={"blocks": 4, "least": 2, "seconds": 0.01, "window": 2e-4},
        planted=planted,
    )


@pytest.mark.parametrize("page", ["PLANS", "SIZES", "BUFFER", "TUNED", "SAME"])
@pytest.mark.parametrize("planted", [0.0, 0.01])
def test_an_honest_side_that_keeps_something_passes(monkeypatch, page, planted):
    monkeypatch.setattr(unseen_values, "SLOWEST_DRAW", math.inf)  # however slow drawing is here
    monkeypatch.setattr(cpu_load, "STOLEN", math.inf)  # a busy machine is not their fault
    SCRATCH.clear()
    result = Engine().time(task_of(page, planted))
    assert result.outputs_checked >= 2 * verify_outputs.COMPARED_CALLS
    assert max(result.details["calls"]) <= result.details["slots"]


@pytest.mark.parametrize("limit", [{"SLOWEST_DRAW": 0.0}, {"LARGEST_SET": 1}], ids=repr)
def test_windows_repeat_values_if_it_is_slow_to_draw_new_ones(monkeypatch, limit):
    monkeypatch.setattr(cpu_load, "STOLEN", math.inf)
    for name, value in limit.items():
        monkeypatch.setattr(unseen_values, name, value)
    result = Engine().time(task_of("PLANS"))
    slots = result.details["slots"]
    assert slots == 2
    assert result.outputs_checked == 2 * slots + verify_outputs.FURTHER_CALLS


def test_the_process_that_draws_is_forked_before_a_page_is_imported():
    worker = WorkerProcess()
    try:
        reply = worker.ask(task_of("PLANS"), 120, lambda text: None)
        assert reply.error in (None, "disturbed"), reply.message
        home = Path(f"/proc/{worker.pid}")
        [child] = (home / "task" / str(worker.pid) / "children").read_text().split()
        assert Path(f"/proc/{child}/cmdline").read_bytes() == (home / "cmdline").read_bytes()
    finally:
        worker.close()
    wait_for(lambda: int(child) not in alive_workers(Path.cwd()))


def test_the_bytes_of_a_value_set_are_aligned():
    values = inputs("cpu", 3)[0].double(), torch.ones(3, dtype=torch.bool), torch.tensor(1.0)
    assert input_process.set_bytes(values) == 3 * COLUMNS * 8 + 64 + 64
    assert pytree.nbytes(values) < input_process.set_bytes(values)
