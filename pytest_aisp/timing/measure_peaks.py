"""Measure the peaks of a GPU or of a CPU: the fastest of several kernels sets each rate.

The rates of single units of a GPU (L2, shared memory, atomics, special functions) come from the
kernels of `unit_probes.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ..checking.inputs import BoundSide
from ..page.gpu_specs import product_of
from ..util.device import Machine, cpu_machine
from ..util.device_state import Telemetry, no_gc
from .cpu_timer import HostWindow
from .cuda_graph import GraphWindow
from .cuda_timer import WINDOW, QueueWindow
from .peaks import DTYPES, LATENCY, Peaks
from .schedule import Window, calls_for
from .unit_probes import (
    atomics,
    both_ways,
    empty_blocks,
    l2_reads,
    loads_in_flight,
    multiply_adds,
    shared_read,
    special_functions,
)

if TYPE_CHECKING:
    import torch

    Run = Callable[[], object]
    MakeWindow = Callable[[BoundSide, int], Window]

WINDOWS = 12
L2_SHARE = 4
"""The L2's rate is measured with a working set of 1/4 of the L2's size."""


def measure(device: str) -> Peaks:
    """Measure the peaks of `device` (``cuda:1``). The fastest of several kernels sets each rate."""
    import torch

    with torch.no_grad(), no_gc():
        if torch.device(device).type == "cpu":
            machine = cpu_machine()
            survey = _Survey(machine.name, partial(HostWindow, device="cpu"), WINDOW["host"])
            survey.memory(max(256 << 20, 8 * _last_level_caches()), "cpu")
            survey.product("fp32", 1024, "cpu")
            return Peaks(machine.product, survey.rates, survey.facts)
        with torch.cuda.device(device):
            survey = _survey_gpu()
    torch.cuda.empty_cache()
    return Peaks(product_of(survey.facts["name"]), survey.rates, survey.facts)


def _survey_gpu() -> _Survey:
    import torch

    gpu = torch.cuda.get_device_properties()
    survey = _Survey(gpu.name, GraphWindow, WINDOW["graph"])
    survey.facts.update(Machine.here().versions)
    end, x = time.perf_counter() + 0.3, torch.randn(1 << 26, device="cuda")
    while time.perf_counter() < end:  # the clocks rise from idle only under load
        x.sum().item()
    telemetry = Telemetry(torch.cuda.current_device())
    telemetry.EVERY = 1  # it is read only twice
    survey.memory(max(1 << 30, 8 * gpu.L2_cache_size), "cuda")
    survey.launches_and_transfers()
    survey.units(gpu.L2_cache_size)
    if fp8 := survey.where_it_runs("fp8", _fp8_product):
        survey.take("fp8", 2 * 8192**3, fp8)
    if int8 := survey.where_it_runs("int8", _int8_product):
        survey.take("int8", 2 * 8192**3, int8)
    for key in DTYPES:
        survey.product(key, 8192, "cuda")
    survey.facts["throttled"] = telemetry.look() or "no"
    for key, seen in telemetry.summary().items():
        survey.facts[key] = "-".join(map(str, seen)) if seen else "?"
    return survey


class _Survey:
    """The rates and facts measured so far."""

    def __init__(self, name: str, window: MakeWindow, least: float) -> None:
        import torch

        self._clock = partial(seconds_per_run, window, least)
        self.rates: dict[str, float] = {}
        self.facts = {"name": name, "torch": torch.__version__, "windows": f"median of {WINDOWS}"}
        self.facts["date"] = datetime.now(timezone.utc).date().isoformat()

    def take(self, key: str, amount: float, runs: Mapping[str, Run]) -> None:
        """Store the rate of the fastest of `runs` if that rate exceeds the stored one.

        Each run processes `amount`.
        """
        seconds = {name: self._clock(run) for name, run in runs.items()}
        fastest = min(seconds, key=lambda name: seconds[name])
        if (rate := amount / seconds[fastest]) > self.rates.get(key, 0.0):
            self.facts[key], self.rates[key] = fastest, rate

    def where_it_runs(self, name: str, make: Callable[[], Run]) -> dict[str, Run]:
        """Return the function that `make` returns, keyed by `name`. Note a failure in `facts`."""
        import torch

        try:
            run = make()
            run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no triton, no C compiler, no fp8
            self.facts[f"no {name}"] = (str(error) or type(error).__name__).splitlines()[0]
            return {}
        return {name: run}

    def memory(self, nbytes: int, device: str) -> None:
        import torch

        source, target = torch.randn(2, nbytes >> 18, 65536, device=device)
        reads = {"sum": source.sum, "sum of rows": partial(source.sum, 1)}
        reads |= {"amax": source.amax, "amax of rows": partial(source.view(-1, 4096).amax, 1)}
        if source.is_cuda:
            reads |= self.where_it_runs("triton", partial(_triton_read, source))
        copies = {"copy_": partial(target.copy_, source)}
        copies["neg"] = partial(torch.neg, source, out=target)
        self.facts["buffer"] = f"{source.nbytes >> 20} MiB"
        self.take("read", source.nbytes, reads)
        self.take("write", source.nbytes, {"fill_": partial(target.fill_, 1.0)})
        self.take("copy", 2 * source.nbytes, copies)
        for key in ("read", "write"):  # a copy reads and writes, so neither can be slower
            self.rates[key] = max(self.rates[key], self.rates["copy"] / 2)

    def launches_and_transfers(self) -> None:
        import torch

        tiny = partial(torch.zeros(1, device="cuda").add_, 1)
        self.rates["launch"] = seconds_per_run(HostWindow, 0, tiny, calls=2000)
        self.rates["graph_node"] = seconds_per_run(GraphWindow, 0, tiny, calls=2000)
        number = torch.zeros(1, device="cuda")
        view = partial(number.view, 1)
        self.rates["host_step"] = seconds_per_run(HostWindow, 0, view, calls=2000)
        self.rates["sync"] = seconds_per_run(HostWindow, 0, number.item, calls=200)
        gpu = torch.empty(64 << 20, device="cuda")
        host = torch.empty(64 << 20, pin_memory=True)
        for key, to, source in (("d2h", host, gpu), ("h2d", gpu, host)):
            copy = partial(to.copy_, source, non_blocking=True)
            self.rates[key] = host.nbytes / seconds_per_run(QueueWindow, WINDOW["queue"], copy)
        both = both_ways(32 << 20)
        lasts = seconds_per_run(QueueWindow, WINDOW["queue"], both.run)
        self.rates["pcie_both"] = both.amount / lasts

    def units(self, l2_bytes: int) -> None:
        """Measure `LATENCY` and the rates of `UNITS`. Without a compiler, they are missing."""
        from ..kernels.nvrtc import NoCompiler

        try:
            probes = {
                "shared": shared_read(),
                "atomics": atomics(),
                "sfu": special_functions(),
                "fp32": multiply_adds(),
                "blocks": empty_blocks(),
                LATENCY: loads_in_flight(8 * l2_bytes),
            }
            by_size = l2_reads(l2_bytes)
        except NoCompiler as error:
            self.facts["no units"] = str(error).splitlines()[0]
            return
        for key, (run, amount) in probes.items():
            self.rates[key] = amount / self._clock(run)
        self.facts["fp32"] = "multiply-adds"
        rates = {size: amount / self._clock(run) for size, (run, amount) in by_size.items()}
        each = (f"{size / 2**20:g} MiB {rate / 1e12:.2f}" for size, rate in rates.items())
        self.facts["l2"] = f"{', '.join(each)} TB/s"
        self.rates["l2"] = rates[max(s for s in rates if s <= l2_bytes // L2_SHARE)]

    def product(self, key: str, n: int, device: str) -> None:
        import torch

        a, b = torch.randn(2, n, n, device=device, dtype=getattr(torch, DTYPES[key]))
        runs = {"a @ b": partial(torch.mm, a, b), "a @ b.T": partial(torch.mm, a, b.T)}
        matmul = torch.backends.cuda.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "tf32" if key == "tf32" else "ieee"
        try:
            self.take(key, 2 * n**3, runs)
        finally:
            matmul.fp32_precision = before


def seconds_per_run(make: MakeWindow, least: float, run: Run, *, calls: int = 0) -> float:
    """Return the seconds per run in the median window of `calls` runs, or of `least` seconds."""
    side = BoundSide(run, [()])
    side.run(0)  # compile and load before the capture
    if not calls:
        probe = make(side, 1)
        calls = calls_for(min(probe() for _ in range(3)), least, 1)
    window = make(side, calls)
    window()
    return median(window() for _ in range(WINDOWS))


def _last_level_caches() -> int:
    """Return the size of all last-level caches in bytes, or 0 if unknown."""
    sizes: dict[tuple[int, str], int] = {}
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        level, cores, size = ((index / f).read_text() for f in ("level", "shared_cpu_list", "size"))
        sizes[int(level), cores] = int(size.strip().rstrip("K")) << 10
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


def _fp8_product() -> Run:
    import torch

    a, b = torch.randn(2, 8192, 8192, device="cuda").to(torch.float8_e4m3fn)
    one, bf16 = torch.ones((), device="cuda"), torch.bfloat16
    return lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=bf16, use_fast_accum=True)


def _int8_product() -> Run:
    import torch

    a, b = torch.randint(-9, 10, (2, 8192, 8192), device="cuda", dtype=torch.int8)
    return partial(torch._int_mm, a, b.T)


def _triton_read(source: torch.Tensor) -> Run:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

    def read_kernel(source, sums, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        first = tl.program_id(0).to(tl.int64) * ROUNDS * BLOCK
        total = tl.zeros((BLOCK,), tl.float32)
        for turn in tl.static_range(ROUNDS):
            total += tl.load(source + first + turn * BLOCK + tl.arange(0, BLOCK))
        tl.store(sums + tl.program_id(0), tl.sum(total))

    block, rounds = 4096, 4
    sums = source.new_empty(source.numel() // (rounds * block))
    launch = triton.jit(read_kernel)[(sums.numel(),)]
    return partial(launch, source, sums, rounds, block, num_warps=8)
