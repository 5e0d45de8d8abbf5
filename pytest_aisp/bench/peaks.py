"""Peaks: what this machine does at best, and the limit that sets for a page's work.

Each direction has its own ceiling: an H200 reads at 4.3, copies at 4.2 and fills at 4.6 TB/s, so
one "bandwidth" would call an honest fill a lie. A rate is that of the fastest of several kernels,
by the median of its windows; data sheets are not asked.
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

from ..common.device import Machine, Telemetry, cpu_machine
from ..common.quiet import no_gc
from ..pages.pair import PRECISIONS, Work
from ..pages.skus import product_of
from ..proof.sides import Subject
from ..results.timing import Window, calls_for
from .windows import WINDOW, GraphWindow, QueueWindow, host_window

if TYPE_CHECKING:
    import torch

    Run = Callable[[], object]
    MakeWindow = Callable[[Subject, int], Window]

SCHEMA = 1
WINDOWS = 12
TOLERANCE = 1.05
"""A share of the limit above this is no measurement of the declared work."""
PCIE = ("h2d", "d2h")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32"}
"""Types of the matrix products, the longest last: a hot chip lowers its clocks."""
LINKS = ("peer", "busbw")
"""What a rank of several GPUs sends at: a copy to a peer, and the largest all-reduce's busbw."""
SECONDS = ("launch", "graph_node", "all_reduce")
RATES = ("copy", "read", "write", *DTYPES, "fp8", *PCIE, *LINKS, "peer_both", *SECONDS)
ARITHMETIC = ("fp64", "fp32", *PRECISIONS)
"""Legal keys of ``Work(flops=)``; a type without a measured rate has no limit."""


class PeaksError(ValueError):
    """Peaks or a work that cannot be used; the message says why and what is legal."""


@dataclass(frozen=True)
class Peaks:
    """The best rates of one product; a rate that the machine does not have is absent.

    Attributes:
        product: as in `device.Machine`.
        rates: ``copy`` (read plus written), ``read``, ``write``: bytes/s through DRAM; ``fp32``,
            ``tf32``, ``bf16``, ``fp16``, ``fp8``: FLOP/s of matrix products; ``h2d``, ``d2h``:
            bytes/s from and to pinned memory; ``launch``, ``graph_node``: seconds that a tiny
            kernel costs the host, and takes inside a graph. Of several GPUs (``nvidia-h200-x2``)
            ``peer``: bytes/s of the best copy to another GPU, ``peer_both``: of both directions
            together (`bandwidth`); ``busbw``: bytes/s of the largest all-reduce, ``all_reduce``:
            seconds of the smallest (`nccl`).
        facts: which kernel was fastest, and GPU, versions, clocks and date.
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
    """The least seconds that the declared work takes, and the rate that sets them."""

    name: str
    seconds: float


def limit_of(work: Work, bound: str, peaks: Peaks) -> Limit | None:
    """Return the limit of `work`, or None where nothing is declared or a rate is not measured.

    It is the slowest of three resources that work at the same time. Memory: what is both read and
    written at the copy rate, the surplus at its own, ``2 min(r, w) / copy + |r - w| / read`` or
    ``/ write``. Arithmetic: the sum over types. The wire, where it is the bound: PCIe at its faster
    direction, since `Work` does not say which, and links between GPUs (``nvlink``, ``latency``) at
    the faster of a copy and an all-reduce. L2 is not measured, so pages bound by it have no limit;
    launches and latencies are no resource, so pages bound by them have a small share.

    Raises:
        PeaksError: when ``work.flops`` has a key that is no type of arithmetic.
    """
    for key in work.flops:
        if key not in ARITHMETIC:
            raise PeaksError(f"unknown type {key!r} in flops=; legal: {', '.join(ARITHMETIC)}")
    resources = (_traffic(work, bound), work.flops, _wire(work, bound, peaks))
    used = [{k: amount for k, amount in r.items() if amount} for r in resources]
    if not any(used) or any(k not in peaks.rates for r in used for k in r):
        return None
    times = [{k: amount / peaks.rates[k] for k, amount in r.items()} for r in used]
    slowest = max(times, key=lambda parts: sum(parts.values()))
    return Limit(max(slowest, key=lambda k: slowest[k]), sum(slowest.values()))


def share(limit: Limit, seconds: float) -> float:
    """Return the reached part of the limit's speed: 0.5 means twice the least time."""
    return limit.seconds / seconds if seconds > 0 else math.inf


def implausible(limit: Limit, seconds: float) -> bool:
    """Say whether `seconds` is less than the declared work can take on this machine.

    Only for cold buffers: what stays in a cache is faster than DRAM and no lie. Nor does a link
    accuse anyone: a switch that reduces sends less than is counted, and a GPU has other links yet.
    """
    return limit.name not in LINKS and share(limit, seconds) > TOLERANCE


def _traffic(work: Work, bound: str) -> dict[str, float]:
    if bound == "l2":
        return {"l2": work.read + work.write}
    both = min(work.read, work.write)
    return {"copy": 2 * both, "read": work.read - both, "write": work.write - both}


def _wire(work: Work, bound: str, peaks: Peaks) -> dict[str, float]:
    wires = {"pcie": PCIE, "nvlink": LINKS, "latency": LINKS}.get(bound)
    if wires is None:
        return {}
    return {max(wires, key=lambda k: peaks.rates.get(k, 0.0)): work.wire}


def joined(one: Peaks | None, several: Peaks | None) -> Peaks | None:
    """Return the peaks of one GPU together with the link rates of several, where they are known."""
    if one is None or several is None:
        return one or several
    links = {key: rate for key, rate in several.rates.items() if key in LINKS}
    return Peaks(several.product, {**one.rates, **links}, one.facts)


def add(
    path: str | Path, product: str, rates: Mapping[str, float], facts: Mapping[str, str]
) -> None:
    """Put `rates` and `facts` among the peaks in `path`; what else is there stays.

    Raises:
        PeaksError: as `save` does.
    """
    before = load(path) if Path(path).exists() else Peaks(product, {})
    save(path, Peaks(product, {**before.rates, **rates}, {**before.facts, **facts}))


def path_of(baselines: Path, product: str) -> Path:
    """Return the file of a product's peaks."""
    return baselines / product / "peaks.json"


def stored(path: Path) -> Peaks | None:
    """Return the peaks stored in `path`, or None where there is no such file; raises as `load`."""
    return load(path) if path.exists() else None


def load(path: str | Path) -> Peaks:
    """Return the peaks stored in `path`.

    Raises:
        FileNotFoundError: when there are none.
        PeaksError: when the file is damaged or is something else.
    """
    try:
        stored = json.loads(Path(path).read_bytes())
        if stored["schema"] != SCHEMA:
            raise PeaksError(f"schema {stored['schema']!r}")
        return Peaks(str(stored["product"]), dict(stored["rates"]), dict(stored["facts"]))
    except (ValueError, KeyError, TypeError) as error:
        raise PeaksError(
            f"{path} is no peaks file of schema {SCHEMA} ({type(error).__name__}: {error});"
            f" restore it, or remove it to measure again:\n  git checkout -- {path}"
        ) from error


def save(path: str | Path, peaks: Peaks) -> None:
    """Write `peaks` to `path` at once or not at all, one rate a line, four significant digits.

    Raises:
        PeaksError: when `path` holds anything but peaks of the same product; it stays as it is.
    """
    path = Path(path)
    if path.exists() and (before := load(path).product) != peaks.product:
        raise PeaksError(f"{path} holds the peaks of {before}, not of {peaks.product}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(_text(peaks))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _text(peaks: Peaks) -> str:
    stored = {"schema": SCHEMA, "product": peaks.product, "facts": dict(peaks.facts)}
    stored["rates"] = {key: float(rate) for key, rate in peaks.rates.items()}
    text = json.dumps(stored, indent=1, sort_keys=True) + "\n"
    return re.sub(r"(?<=: )[\d.e+-]+(?=,?\n)", lambda number: f"{float(number[0]):.4g}", text)


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
        survey.facts[key] = "-".join(map(str, seen or ["?"]))
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
    subject = Subject(run, [()])
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
