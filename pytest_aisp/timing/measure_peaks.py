"""Measure a machine's peaks: each rate is that of the fastest of several kernels.

What counts of a kernel is the median of its windows.
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
from .peaks import DTYPES, Peaks
from .schedule import Window, calls_for
from .windows import WINDOW, GraphWindow, QueueWindow, host_window

if TYPE_CHECKING:
    import torch

    Run = Callable[[], object]
    MakeWindow = Callable[[BoundSide, int], Window]

WINDOWS = 12


def measure(device: str) -> Peaks:
    """Measure the peaks of `device` in a few seconds: ``cpu``, ``cuda`` or ``cuda:1``."""
    import torch

    with torch.no_grad(), no_gc():
        if torch.device(device).type == "cpu":
            return _measure_cpu()
        with torch.cuda.device(device):
            peaks = _measure_gpu()
    torch.cuda.empty_cache()
    return peaks


def _measure_cpu() -> Peaks:
    machine, caches = cpu_machine(), _last_level_caches()
    survey = _Survey(machine.name, partial(host_window, device="cpu"), WINDOW["host"])
    survey.memory(max(256 << 20, 8 * caches), "cpu")
    survey.product("fp32", 1024, "cpu")
    return Peaks(machine.product, survey.rates, survey.facts)


def _measure_gpu() -> Peaks:
    import torch

    gpu = torch.cuda.get_device_properties()
    survey = _Survey(gpu.name, GraphWindow, WINDOW["graph"])
    survey.facts.update(Machine.here().versions)
    end, x = time.perf_counter() + 0.3, torch.randn(1 << 26, device="cuda")
    while time.perf_counter() < end:  # the clocks leave idle (345 MHz on an H200) only under load
        x.sum().item()
    telemetry = Telemetry(torch.cuda.current_device())
    telemetry.EVERY = 1  # asked twice in all
    survey.memory(max(1 << 30, 8 * gpu.L2_cache_size), "cuda")
    survey.launches_and_transfers()
    if fp8 := survey.where_it_runs("fp8", _fp8_product):
        survey.take("fp8", 2 * 8192**3, fp8)
    for key in DTYPES:
        survey.product(key, 8192, "cuda")
    survey.facts["throttled"] = telemetry.look() or "no"
    for key, seen in telemetry.summary().items():
        survey.facts[key] = "-".join(map(str, seen)) if seen else "?"
    return Peaks(product_of(gpu.name), survey.rates, survey.facts)


class _Survey:
    """Rates, and which kernels reached them, as they are taken."""

    def __init__(self, name: str, window: MakeWindow, least: float) -> None:
        import torch

        self._clock = partial(_seconds, window, least)
        self.rates: dict[str, float] = {}
        self.facts = {"name": name, "torch": torch.__version__, "windows": f"median of {WINDOWS}"}
        self.facts["date"] = datetime.now(timezone.utc).date().isoformat()

    def take(self, key: str, amount: float, runs: Mapping[str, Run]) -> None:
        """Keep the rate of the fastest of `runs`, at `amount` a run."""
        seconds = {name: self._clock(run) for name, run in runs.items()}
        self.facts[key] = min(seconds, key=lambda name: seconds[name])
        self.rates[key] = amount / min(seconds.values())

    def where_it_runs(self, name: str, make: Callable[[], Run]) -> dict[str, Run]:
        """Return what `make` makes under `name`, or nothing, with the reason among the facts."""
        import torch

        try:
            run = make()
            run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # no triton, no C compiler, no fp8: each has a class of its own
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
        for key in ("read", "write"):  # a copy does both: neither is slower than half of it
            self.rates[key] = max(self.rates[key], self.rates["copy"] / 2)

    def launches_and_transfers(self) -> None:
        import torch

        tiny = partial(torch.zeros(1, device="cuda").add_, 1)
        self.rates["launch"] = _seconds(host_window, 0, tiny, calls=2000)
        self.rates["graph_node"] = _seconds(GraphWindow, 0, tiny, calls=2000)
        gpu = torch.empty(64 << 20, device="cuda")
        host = torch.empty(64 << 20, pin_memory=True)
        for key, to, source in (("d2h", host, gpu), ("h2d", gpu, host)):
            copy = partial(to.copy_, source, non_blocking=True)
            self.rates[key] = host.nbytes / _seconds(QueueWindow, WINDOW["queue"], copy)

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


def _seconds(make: MakeWindow, least: float, run: Run, *, calls: int = 0) -> float:
    """Return seconds per run, the median of windows of `calls` runs or of `least` seconds."""
    subject = BoundSide(run, [()])
    subject.run(0)  # compiles and loads what must not happen inside a capture
    if not calls:
        probe = make(subject, 1)
        calls = calls_for(min(probe() for _ in range(3)), least, 1)
    window = make(subject, calls)
    window()
    return median(window() for _ in range(WINDOWS))


def _last_level_caches() -> int:
    """Return the bytes of all last-level caches, 0 where Linux does not say."""
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
