"""The same kernels timed by other tools: `triton.testing.do_bench` and pytest-benchmark's fixture.

A worker process runs `measure` as its timer. Both tools time one CUDA graph of `CALLS` calls, so
neither tool times Python. This favors the tools, because they usually time a single call, and most
of a 2 us call is its launch. The slow graph has a few more calls, which are not counted.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from statistics import fmean, median
from typing import Any, Protocol

from pytest_aisp.timing.schedule import Budget, Samples, extra_calls

CALLS = 100
"""Counted calls in a graph."""
MAX_TIME, MIN_ROUNDS = 0.15, 5
"""pytest-benchmark's ``--benchmark-max-time`` (its default is 1.0) and ``--benchmark-min-rounds``.

https://pytest-benchmark.readthedocs.io/en/latest/usage.html
"""
GRAPHS = ("old", "same", "slow")
"""The old side, an unchanged copy of it, and one with a planted slowdown."""


class Ways(Protocol):
    """The two tools. Each returns the seconds of every round of one of the `GRAPHS`."""

    def do_bench(self, graph: str) -> list[float]: ...

    def rounds(self, graph: str) -> list[float]: ...


def measure(
    baseline: str, optimized: str, options: Mapping[str, Any], budget: Budget, seed: str
) -> Samples:
    """Time one kernel with both tools. This is the target of a `TimeTask`'s timer.

    Args:
        options: ``planted``, and either the kernel (``page``, ``root``, ``module``, ``function``,
            ``size``) or, if simulated, its ``seconds``.

    Returns:
        Samples without blocks, whose ``details["found"]`` has a row for each measurement.
    """
    simulated = "seconds" in options
    ways: Ways = Simulated(options, f"{optimized}{seed}") if simulated else Graphs(options)
    rows = [_row("do_bench", graph, ways.do_bench(graph)) for graph in GRAPHS]
    rows += [_row("pytest-benchmark", graph, ways.rounds(graph)) for graph in ("old", "slow")]
    share = extra_calls(CALLS, options["planted"]) / CALLS
    return Samples("others", [0.0], [], [], [], [], {"found": rows, "planted": share})


def _row(way: str, graph: str, seconds: list[float]) -> dict[str, Any]:
    return {
        "way": way,
        "graph": graph,
        "rounds": len(seconds),
        "min": min(seconds) / CALLS,
        "mean": fmean(seconds) / CALLS,
        "median": median(seconds) / CALLS,
    }


class Graphs:
    """The graphs of one kernel on the GPU, with inputs that rotate as its page says."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from pytest_aisp.checking.inputs import InputPool
        from pytest_aisp.worker.loader import load_page, pair_of

        page = load_page(options["page"], options["root"], options["module"])
        pair = pair_of(getattr(page, options["function"]))
        if pair is None:
            raise ValueError(f"{options['function']} has no pair")
        self._side = pair.variants[0].side
        self._pool = InputPool(pair, dict(options["size"]), "cuda", 1, 2)
        self._pool.lay_slots(self._slots())
        extra = extra_calls(CALLS, options["planted"])
        self._graphs = {name: self._capture(extra if name == "slow" else 0) for name in GRAPHS}

    def _slots(self) -> int:
        import torch

        from pytest_aisp.checking.inputs import BoundSide
        from pytest_aisp.util import pytree

        probe = BoundSide(self._side, [self._pool.value_set(0)])
        output_bytes = pytree.nbytes(probe.run(0))
        probe.close()
        l2 = torch.cuda.get_device_properties().L2_cache_size
        return int(self._pool.slots_for(output_bytes, l2, torch.cuda.mem_get_info()[0]))

    def _capture(self, extra: int) -> tuple[Any, Any]:
        """Return a graph of `CALLS` + `extra` calls, and the bound side whose buffers it uses."""
        from pytest_aisp.timing.cuda_graph import capture_graph

        side, slots = self._pool.bind(self._side), len(self._pool.slots)

        def run() -> None:
            for call in range(CALLS + extra):
                side.run(call % slots)

        return capture_graph(run), side

    def do_bench(self, graph: str) -> list[float]:
        """Return every time that `do_bench` measures, with its defaults."""
        from triton.testing import do_bench

        times = do_bench(self._graphs[graph][0].replay, warmup=25, rep=100, return_mode="all")
        return [1e-3 * t for t in times]

    def rounds(self, graph: str) -> list[float]:
        """Return the rounds of pytest-benchmark's fixture. The GPU idles between rounds."""
        import torch

        def call() -> None:
            self._graphs[graph][0].replay()
            torch.cuda.synchronize()

        call()
        return fixture_rounds(call)


def fixture_rounds(
    call: Callable[[], None], clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the seconds of each round as pytest-benchmark's fixture takes them.

    A call longer than its ``--benchmark-min-time`` (5 us) is a round by itself. The first call
    decides how many rounds fit `MAX_TIME`.
    """

    def once() -> float:
        start = clock()
        call()
        return clock() - start

    count = max(MIN_ROUNDS, math.ceil(MAX_TIME / once()))
    return [once() for _ in range(count)]


class Simulated:
    """Both tools on a simulated device, with a bias per graph and noise per round."""

    BIAS, NOISE, ROUNDS = 0.005, 0.01, 40

    def __init__(self, options: Mapping[str, Any], seed: str) -> None:
        self._rng = random.Random(f"{options.get('seed', 0)}{seed}")
        calls = {"slow": CALLS + extra_calls(CALLS, options["planted"])}
        (seconds,) = options["seconds"].values()
        self._seconds = {name: seconds * calls.get(name, CALLS) for name in GRAPHS}

    def do_bench(self, graph: str) -> list[float]:
        """Return drawn times."""
        bias = self._rng.gauss(0, self.BIAS)
        noises = (self._rng.gauss(0, self.NOISE) for _ in range(self.ROUNDS))
        return [self._seconds[graph] * math.exp(bias + noise) for noise in noises]

    rounds = do_bench
