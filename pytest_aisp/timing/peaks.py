"""Peaks are the best rates measured on this machine. They limit how fast a page's work can be.

Each direction has its own rate: an H200 reads at 4.3, copies at 4.2 and fills at 4.6 TB/s. With a
single "bandwidth" for all directions, a correct fill could look too fast.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ..checking.inputs import BoundSide
from ..page.cost import memory_rates
from ..page.gpu_specs import product_of
from ..page.pair import Work
from ..util.device import Machine, cpu_machine
from ..util.device_state import Telemetry, no_gc
from .cpu_timer import HostWindow
from .cuda_graph import GraphWindow
from .cuda_timer import WINDOW, QueueWindow
from .schedule import Window, calls_for

if TYPE_CHECKING:
    import torch

    Run = Callable[[], object]
    MakeWindow = Callable[[BoundSide, int], Window]

SCHEMA = 1
TOLERANCE = 1.05
"""A side that is faster than the limit by more than this factor skips declared work."""
PCIE = ("h2d", "d2h")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32"}
"""Types of the matrix products. The longest is last, because a hot GPU lowers its clocks."""
LINKS = ("peer", "busbw")
"""Rates at which a rank sends: in a copy to a peer, and in the largest all-reduce (busbw)."""
SECONDS = ("launch", "graph_node", "all_reduce")
WINDOWS = 12
RATES = ("copy", "read", "write", *DTYPES, "fp8", *PCIE, *LINKS, "peer_both", *SECONDS)


class PeaksError(ValueError):
    """The peaks cannot be used. The message says why, and what is allowed."""


@dataclass(frozen=True)
class Peaks:
    """The best rates of one GPU or CPU model. Rates that do not apply to the machine are missing.

    Attributes:
        product: name of the model, as in `device.Machine`.
        rates: In bytes/s: DRAM ``copy`` (read plus written), ``read`` and ``write``, and ``h2d``
            and ``d2h`` with pinned memory. In FLOP/s: matrix products by type. In seconds: a tiny
            kernel's cost on the host (``launch``) and in a graph (``graph_node``). With several
            GPUs, also copies to a ``peer`` or in both directions (``peer_both``) and the largest
            all-reduce (``busbw``) in bytes/s, and the smallest ``all_reduce`` in seconds.
        facts: the fastest kernel of each rate, and the GPU, versions, clocks and date.
    """

    product: str
    rates: Mapping[str, float]
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, rate in self.rates.items():
            if key not in RATES:
                raise PeaksError(f"unknown rate {key!r}; legal: {', '.join(RATES)}")
            if not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
                raise PeaksError(f"{key}={rate!r} must be a number > 0")


@dataclass(frozen=True)
class Limit:
    """The least time that the declared work can take, and the rate that determines it."""

    name: str
    seconds: float


def limit_of(work: Work, bound: str, peaks: Peaks) -> Limit | None:
    """Return the limit of `work`, or None if nothing is declared or a rate was not measured.

    The limit is the time of the slowest of three resources, which work at the same time. The time
    of memory uses the copy rate for equal bytes read and written, and the read or write rate for
    the rest. The time of arithmetic is the sum over types. The third resource is the link, at its
    faster rate, if the page is bound by one. The L2 rate is not measured, so there is no limit for
    pages bound by the L2.
    """
    memory, wire = memory_rates(work.read, work.write), dict[str, float]()
    if bound == "l2":
        memory = {"l2": work.read + work.write}
    if links := {"pcie": PCIE, "nvlink": LINKS, "latency": LINKS}.get(bound):
        wire = {max(links, key=lambda k: peaks.rates.get(k, 0.0)): work.wire}
    resources = (memory, work.flops, wire)
    used = [{k: amount for k, amount in r.items() if amount} for r in resources]
    if not any(used) or any(k not in peaks.rates for r in used for k in r):
        return None
    times = [{k: amount / peaks.rates[k] for k, amount in r.items()} for r in used]
    slowest = max(times, key=lambda parts: sum(parts.values()))
    return Limit(max(slowest, key=lambda k: slowest[k]), sum(slowest.values()))


def share(limit: Limit, seconds: float) -> float:
    """Return the limit's time divided by `seconds`: 0.5 means twice the least time."""
    return limit.seconds / seconds if seconds > 0 else math.inf


def implausible(limit: Limit, seconds: float) -> bool:
    """Return whether `seconds` is too short for the declared work with cold buffers.

    A link's time is never too short, because a switch may reduce and a GPU has several links.
    """
    return limit.name not in LINKS and share(limit, seconds) > TOLERANCE


def joined(one: Peaks | None, several: Peaks | None) -> Peaks | None:
    """Return the peaks of one GPU, plus those of the links if they are known."""
    if one is None or several is None:
        return one or several
    links = {key: rate for key, rate in several.rates.items() if key in (*LINKS, "all_reduce")}
    return Peaks(several.product, {**one.rates, **links}, one.facts)


def add(path: Path, product: str, rates: Mapping[str, float], facts: Mapping[str, str]) -> None:
    """Add `rates` and `facts` to the peaks in `path`. Raises the errors of `save`."""
    before = stored(path) or Peaks(product, {})
    save(path, Peaks(product, {**before.rates, **rates}, {**before.facts, **facts}))


def path_of(baselines: Path, product: str) -> Path:
    """Return the file that holds a product's peaks."""
    return baselines / product / "peaks.json"


def stored(path: Path) -> Peaks | None:
    """Return the peaks in `path`, or None if there is no such file. May raise `PeaksError`."""
    return load(path) if path.exists() else None


def load(path: Path) -> Peaks:
    """Return the peaks stored in `path`.

    Raises:
        FileNotFoundError: if there is no such file.
        PeaksError: if the file is damaged or is not a peaks file.
    """
    try:
        stored = json.loads(path.read_bytes())
        if stored["schema"] != SCHEMA:
            raise PeaksError(f"schema {stored['schema']!r}")
        return Peaks(str(stored["product"]), dict(stored["rates"]), dict(stored["facts"]))
    except (ValueError, KeyError, TypeError) as error:
        raise PeaksError(
            f"{path} is not a peaks file of schema {SCHEMA} ({type(error).__name__}: {error});"
            f" restore it, or remove it to measure again:\n  git checkout -- {path}"
        ) from error


def save(path: Path, peaks: Peaks) -> None:
    """Write `peaks` to `path` atomically, one rate per line, with four significant digits.

    Raises:
        PeaksError: if `path` exists but has no peaks of this product. It is not changed.
    """
    if path.exists() and (before := load(path).product) != peaks.product:
        raise PeaksError(f"{path} holds the peaks of {before}, not of {peaks.product}")
    rates = {key: float(rate) for key, rate in peaks.rates.items()}
    content = {"schema": SCHEMA, "product": peaks.product, "facts": peaks.facts, "rates": rates}
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    text = re.sub(r"(?<=: )[\d.e+-]+(?=,?\n)", lambda number: f"{float(number[0]):.4g}", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
    if fp8 := survey.where_it_runs("fp8", _fp8_product):
        survey.take("fp8", 2 * 8192**3, fp8)
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

        self._clock = partial(_seconds, window, least)
        self.rates: dict[str, float] = {}
        self.facts = {"name": name, "torch": torch.__version__, "windows": f"median of {WINDOWS}"}
        self.facts["date"] = datetime.now(timezone.utc).date().isoformat()

    def take(self, key: str, amount: float, runs: Mapping[str, Run]) -> None:
        """Store the rate of the fastest of `runs`; each run processes `amount`."""
        seconds = {name: self._clock(run) for name, run in runs.items()}
        self.facts[key] = min(seconds, key=lambda name: seconds[name])
        self.rates[key] = amount / min(seconds.values())

    def where_it_runs(self, name: str, make: Callable[[], Run]) -> dict[str, Run]:
        """Return the run of `make` by name. If it fails, return nothing and note the reason."""
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
        self.rates["launch"] = _seconds(HostWindow, 0, tiny, calls=2000)
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
