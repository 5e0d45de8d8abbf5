"""`aisp results roofline`: list each stored result's limiting rate and measured share of it.

The share is computed from the work that the current page declares and from the stored times and
peaks. If the page is gone or declares no work, the stored share is listed. `aisp machine peak`
measures the peaks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from ..page.pair import Work
from ..results.messages import PeaksTask, Reply
from ..results.models import Result
from ..results.row import amount, digits, duration
from ..results.task_results import HierarchyResult, PeaksResult
from ..timing import data_sheets, peaks
from ..timing.peaks import PCIE, SECONDS, Peaks, PeaksError
from ..util.cli_result import CliError, CliResult, columns
from ..util.device import Machine
from ..util.gpu_lease import lease, lease_gpus
from ..worker.client import WorkerProcess
from .catalog import Catalog, CatalogCase, target_of
from .stored_results import chapters, stored_peaks

VERSIONS = ("driver", "cuda", "torch")
"""Facts of stored peaks that must be equal for a stored rate to be kept."""
HEADS = ("product", "target", "case", "bound", "speedup", "time", "attained", "share", "limit")
BYTES = (*peaks.MEMORY, *PCIE, "pcie_both", *peaks.LINKS, "peer_both")
"""The rates whose unit is bytes/s. The other rates are in FLOP/s, operations/s or seconds."""


@dataclass(frozen=True)
class Point:
    """One stored result and its limit.

    Attributes:
        limit: the name of the rate that limits the result, or None if the work or the rate is
            unknown.
        share: the share of the peak that the optimized side reaches, or None if unknown.
        attained: the rate that the optimized side reaches, or None if unknown.
        peak: the stored peak of the limiting rate, or None if unknown.
    """

    product: str
    target: str
    case: str
    bound: str | None
    speedup: float
    seconds: float
    limit: str | None = None
    share: float | None = None
    attained: float | None = None
    peak: float | None = None

    def row(self) -> tuple[str, ...]:
        limit = "-" if self.limit is None else f"{self.limit} {rate_text(self.limit, self.peak)}"
        return (
            self.product,
            self.target,
            self.case,
            self.bound or "-",
            f"{digits(self.speedup)}x",
            duration(self.seconds),
            rate_text(self.limit, self.attained),
            "-" if self.share is None else f"{self.share:.0%}",
            limit.rstrip(" -"),
        )


def rate_text(name: str | None, rate: float | None) -> str:
    """Return a rate with its unit, or ``-`` if the rate is unknown."""
    if name is None or rate is None:
        return "-"
    if name in SECONDS:
        return duration(rate)
    if name == peaks.LATENCY:
        return f"{rate / 1e6:.4g} MB/s per byte in flight on each SM"
    scale, letter = (1e12, "T") if rate >= 1e12 else (1e9, "G")
    unit = "B" if name in BYTES else "op" if name in peaks.UNITS else "FLOP"
    return f"{rate / scale:.4g} {letter}{unit}/s"


def roofline_result(
    catalog: Catalog, products: Sequence[str], targets: Sequence[str], *, as_json: bool
) -> CliResult:
    """Return a table of the results of `products` and `targets`.

    Within a chapter, results are sorted by the share of the roofline limit, with the largest last.
    """
    limits = {name: stored_peaks(catalog.baselines, name) for name in products}
    rows = [p for name in products for p in points(catalog, name, targets, limits[name])]
    if as_json:
        return CliResult([json.dumps([asdict(point) for point in rows], indent=1)])
    rows.sort(key=lambda p: (p.product, p.target.partition(":")[0], p.share or 0.0))
    lines = columns([HEADS, *(p.row() for p in rows)]) if rows else ["no result is stored"]
    missing = [name for name in products if limits[name] is None]
    lines += [f"no peaks of {n} are stored\n    aisp machine peak --store" for n in missing]
    return CliResult(lines)


def points(
    catalog: Catalog, product: str, targets: Sequence[str], limits: Peaks | None
) -> Iterator[Point]:
    """Yield each timed result of `product` and its limit."""
    cases = {(case.chapter, case.key): case for case in catalog.cases}
    for chapter in chapters(catalog.baselines, product):
        for key, result in sorted(chapter.stored.results.items()):
            page, _, name = key.partition("::")
            target = target_of(chapter.name, page)
            selected = not targets or target in targets or chapter.name in targets
            if not selected or result.speedup is None:
                continue
            case = cases.get((chapter.name, key))
            bound = None if case is None else case.bound
            limit, share = _limit(case, result, limits)
            peak = None
            if limits is not None and limit is not None and limit not in SECONDS:
                peak = limits.rates.get(limit)
            attained = None if peak is None or share is None else share * peak
            seconds = result.seconds["optimized"]
            yield Point(
                *(product, target, name, bound, result.speedup, seconds),
                *(limit, share, attained, peak),
            )


def _limit(
    case: CatalogCase | None, result: Result, limits: Peaks | None
) -> tuple[str | None, float | None]:
    """Return the rate that limits a case, and the share of that rate that the case reaches."""
    limit = None
    if case is not None and case.work is not None and limits is not None:
        with contextlib.suppress(PeaksError):  # not reported here, because a run of the page does
            limit = peaks.limit_of(msgspec.convert(case.work, Work), case.bound, limits)
    if limit is None:
        return result.limit, result.share
    return limit.name, peaks.share(limit, result.seconds["optimized"])


TIMEOUT = 120.0
"""Maximum seconds until the worker process replies. The reply comes after all measurements."""


def measure_peaks(machine: Machine, tell: Callable[[str], None]) -> Peaks:
    """Return the peaks of the first GPU, or else of the CPU. Another process measures."""
    device = "cuda" if machine.gpus else "cpu"
    measured = _ask(machine, PeaksTask(device=device), "peaks", tell).read(PeaksResult)
    return Peaks(machine.product, measured.rates, measured.facts)


def measure_hierarchy(machine: Machine, tell: Callable[[str], None]) -> HierarchyResult:
    """Return the memory hierarchy of the machine's first GPU. Another process measures it."""
    if not machine.gpus:
        raise CliError("the memory hierarchy is measured on a GPU, and there is none here")
    reply = _ask(machine, PeaksTask(device="cuda", hierarchy=True), "memory hierarchy", tell)
    return reply.read(HierarchyResult)


def _ask(machine: Machine, task: PeaksTask, what: str, tell: Callable[[str], None]) -> Reply:
    """Lease the device, and return the reply of a new process to `task`.

    Raises:
        CliError: the process replied with an error.
    """
    gpu, interpret = next(iter(machine.gpus), ""), None if machine.gpus else "1"
    environment = {"CUDA_VISIBLE_DEVICES": gpu, "TRITON_INTERPRET": interpret}
    leased = lease_gpus(machine.gpus[:1], tell) if machine.gpus else lease("host", waiting=tell)
    with leased, contextlib.closing(WorkerProcess(environment)) as worker:
        tell(f"measure the {what} of {machine.product}")
        reply = worker.ask(task, TIMEOUT, tell)
    if reply.error is not None:
        trace = f"{reply.trace}\n" if reply.trace else ""
        raise CliError(
            f"{trace}the {what} of {machine.product} could not be measured: {reply.message}\n"
            "Find out what is wrong with the machine:\n    aisp machine doctor",
            code=1,
        )
    return reply


LEVEL_HEADS = ("level", "working set", "bandwidth", "latency", "data sheet")


def hierarchy_result(
    product: str, measured: HierarchyResult, *, stored: Peaks | None, as_json: bool
) -> CliResult:
    """Return a table of the levels of the memory hierarchy, and of the links in `stored`.

    If the product's data sheet lists a bandwidth, the table shows the share that was measured.
    """
    if as_json:
        return CliResult([msgspec.json.format(msgspec.json.encode(measured), indent=1).decode()], 0)
    rows = [
        (
            level.name,
            amount(level.working_set) if level.working_set else "-",
            rate_text("read", level.bandwidth),
            duration(level.latency),
            _of_data_sheet(product, "read", level.bandwidth) if level.name == "DRAM" else "-",
        )
        for level in measured.levels
    ]
    for name in ("h2d", "d2h", "peer"):
        if stored is not None and name in stored.rates:
            rate = stored.rates[name]
            share = _of_data_sheet(product, name, rate)
            rows.append((f"{name} (stored)", "-", rate_text(name, rate), "-", share))
    near, far = f"{measured.near:.0f}", f"{measured.far:.0f}"
    said = f"a load from the L2 takes {near} cycles in the fastest tenth of the lines, {far} in the"
    said += " slowest"
    return CliResult([*columns([LEVEL_HEADS, *rows]), said], 0)


def _of_data_sheet(product: str, name: str, rate: float) -> str:
    """Return `rate` as a share of the data sheet's rate, such as ``92 % of 4.8 TB/s``."""
    full = data_sheets.full_rate(product, name)
    return "-" if full is None else f"{rate / full:.0%} of {rate_text(name, full)}"


def peak_result(measured: Peaks, *, as_json: bool) -> CliResult:
    """Return a table of the rates, each with the fastest kernel.

    The exit code is 1 if the clocks were low.
    """
    throttled = _throttled(measured)
    if as_json:
        return CliResult([json.dumps(asdict(measured), indent=1)], 1 if throttled else 0)
    rows = [
        (name, rate_text(name, rate), measured.facts.get(name, ""))
        for name, rate in _in_order(measured)
    ]
    lines = [f"{measured.product}: {measured.facts.get('name', '')}", *columns(rows)]
    if throttled:
        lines.append(f"the GPU was slower than it should be: {throttled}\n    aisp machine doctor")
    return CliResult(lines, 1 if throttled else 0)


def _in_order(measured: Peaks) -> list[tuple[str, float]]:
    return sorted(measured.rates.items(), key=lambda rate: peaks.RATES.index(rate[0]))


def _throttled(measured: Peaks) -> str:
    """Return the reason why the clocks were low, or an empty string."""
    reason = measured.facts.get("throttled", "no")
    return "" if reason == "no" else reason


def store_peaks(measured: Peaks, baselines: Path) -> list[str]:
    """Store the peaks. Return a line for each rate with its old and new values.

    If the machine is busy, the measured rates are too low. So with the same versions, the better
    rate is kept: the stored one or the measured one. With other versions, all rates are replaced.
    """
    path = peaks.path_of(baselines, measured.product)
    if throttled := _throttled(measured):
        raise CliError(f"nothing is stored: {throttled}\n    aisp machine doctor", code=1)
    try:
        before = peaks.load(path) if path.exists() else Peaks(measured.product, {})
        kept = _better(before, measured)
        facts = {name: before.facts[name] for name in kept if name in before.facts}
        best = Peaks(before.product, {**measured.rates, **kept}, {**measured.facts, **facts})
        peaks.save(path, best)
    except (PeaksError, OSError) as error:
        raise CliError(f"nothing is stored: {error}") from None
    old, new = (
        {name: rate_text(name, rate) for name, rate in each.rates.items()}
        for each in (before, measured)
    )
    return [
        f"kept in {path}: {name} {old[name]}, now {new.get(name, 'not measured')}"
        if name in kept
        else f"stored in {path}: {name} {f'{old[name]} -> ' if name in old else ''}{new[name]}"
        for name, _ in _in_order(best)
    ]


def _better(before: Peaks, measured: Peaks) -> dict[str, float]:
    """Return the rates of `before` that are better than the measured ones, with equal versions."""
    if any(before.facts.get(name) != measured.facts.get(name) for name in VERSIONS):
        return {}
    return {
        name: rate
        for name, rate in before.rates.items()
        if name not in measured.rates
        or (rate < measured.rates[name] if name in SECONDS else rate > measured.rates[name])
    }
