"""`aisp results roofline`: which rate limits each stored result, and the share reached of it.

A result of goals alone has no time to hold against a limit, and no line.
The work is the page's of today, the seconds and the peaks are stored. Of a case whose page is gone
or declares no work, what was stored with it is shown.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..page.pair import Work
from ..results.messages import PeaksTask
from ..results.models import Result
from ..results.row import digits, duration
from ..timing import peaks
from ..timing.peaks import PCIE, SECONDS, Peaks, PeaksError
from ..util.cli_result import CliError, CliResult, columns
from ..util.device import Machine, lease, lease_gpus
from ..worker.client import WorkerProcess
from . import stored_results
from .catalog import Catalog, target_of

HEADS = ("product", "target", "case", "bound", "speedup", "time", "attained", "share", "limit")
BYTES = ("copy", "read", "write", *PCIE, *peaks.LINKS, "peer_both")
"""Rates that are bytes/s; the others are FLOP/s, or seconds."""


@dataclass(frozen=True)
class Point:
    """One stored result against its limit.

    Attributes:
        limit: the rate that sets it, or None where no work or no rate is known.
        attained: what the optimized side reaches of that rate; peak: the rate itself.
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
        """Return its line of the table."""
        share = "-" if self.share is None else f"{self.share:.0%}"
        limit = "-" if self.limit is None else f"{self.limit} {rate_text(self.limit, self.peak)}"
        return (
            self.product,
            self.target,
            self.case,
            self.bound or "-",
            f"{digits(self.speedup)}x",
            duration(self.seconds),
            rate_text(self.limit, self.attained),
            share,
            limit.rstrip(" -"),
        )


def rate_text(limit: str | None, rate: float | None) -> str:
    """Return what is reached of the rate `limit`, in its unit; ``-`` where nobody knows."""
    if limit is None or rate is None:
        return "-"
    scale, letter = (1e12, "T") if rate >= 1e12 else (1e9, "G")
    return f"{rate / scale:.4g} {letter}{'B' if limit in BYTES else 'FLOP'}/s"


def roofline_result(
    found: Catalog, names: Sequence[str], targets: Sequence[str], *, as_json: bool
) -> CliResult:
    """Return the results of the products `names` of `targets`, the largest share last."""
    limits = {name: stored_results.peaks_of(found.baselines, name) for name in names}
    points = [p for name in names for p in points_of(found, name, targets, limits[name])]
    if as_json:
        return CliResult([json.dumps([asdict(point) for point in points], indent=1)])
    points.sort(key=lambda p: (p.product, p.target.partition(":")[0], p.share or 0.0))
    lacking = [name for name in names if limits[name] is None]
    notes = [f"no peaks of {name} are stored\n    aisp machine peak --store" for name in lacking]
    lines = columns([HEADS, *(p.row() for p in points)]) if points else ["no result is stored"]
    return CliResult([*lines, *notes])


def points_of(
    found: Catalog, product: str, targets: Sequence[str], limits: Peaks | None
) -> Iterator[Point]:
    """Yield each stored result of `product` against the one of its `limits` that holds it."""
    cases = {(case["chapter"], case["key"]): case for case in found.cases}
    for chapter in stored_results.chapters(found.baselines, product):
        for key, result in sorted(chapter.stored.results.items()):
            page, _, name = key.partition("::")
            target = target_of(chapter.name, page)
            asked = not targets or target in targets or chapter.name in targets
            if asked and result.speedup is not None:
                case = cases.get((chapter.name, key), {})
                plain = (product, target, name, case.get("bound"), result.speedup)
                yield _point(plain, case, result, limits)


def _point(
    plain: tuple[str, str, str, str | None, float],
    case: Mapping[str, Any],
    result: Result,
    limits: Peaks | None,
) -> Point:
    seconds = result.seconds["optimized"]
    limit, share = _limit(case, result, limits)
    peak = None if limits is None or limit is None else limits.rates.get(limit)
    if limit in SECONDS or peak is None or share is None:
        return Point(*plain, seconds, limit, share)
    return Point(*plain, seconds, limit, share, share * peak, peak)


def _limit(
    case: Mapping[str, Any], result: Result, limits: Peaks | None
) -> tuple[str | None, float | None]:
    """Return the rate that limits a case, and its share: of today's work, or as it was stored."""
    work = case.get("work")
    if work is None or limits is None:
        return result.limit, result.share
    try:
        limit = peaks.limit_of(Work(**work), case["bound"], limits)
    except PeaksError:  # a type without a rate: the page's run says so
        limit = None
    if limit is None:
        return result.limit, result.share
    return limit.name, peaks.share(limit, result.seconds["optimized"])


TIMEOUT = 120.0
"""Seconds a worker process may be silent: it says nothing until all is measured."""


def measure_peaks(machine: Machine, tell: Callable[[str], None]) -> Peaks:
    """Return the peaks of `machine`'s first GPU, or of its CPU, from a process of its own.

    Raises:
        Unanswerable: where they cannot be measured; exit code 1.
    """
    device = "cuda" if machine.gpus else "cpu"
    gpu, interpret = next(iter(machine.gpus), ""), None if machine.gpus else "1"
    environment = {"CUDA_VISIBLE_DEVICES": gpu, "TRITON_INTERPRET": interpret}
    with _leased(machine, tell), contextlib.closing(WorkerProcess(environment)) as worker:
        tell(f"measure the peaks of {machine.product}")
        reply = worker.ask(PeaksTask(device=device), TIMEOUT, tell)
    if reply.error is not None:
        said = f"{reply.trace}\n" if reply.trace else ""
        raise CliError(
            f"{said}the peaks of {machine.product} could not be measured: {reply.message}\n"
            "See what is wrong with the machine:\n    aisp machine doctor",
            code=1,
        )
    return Peaks(machine.product, reply.result["rates"], dict(reply.result["facts"]))


@contextlib.contextmanager
def _leased(machine: Machine, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold the GPU alone, or the host where it is what is measured."""
    if machine.gpus:
        with lease_gpus(machine.gpus[:1], tell):
            yield
        return
    with lease("host", waiting=tell):
        yield


def peak_result(measured: Peaks, *, as_json: bool) -> CliResult:
    """Return the rates with the kernel that reached each; exit code 1 where the clocks were low."""
    code = 1 if _throttled(measured) else 0
    if as_json:
        plain = {"product": measured.product, "rates": measured.rates, "facts": measured.facts}
        return CliResult([json.dumps(plain, indent=1)], code)
    rows = [(key, amount(key, rate), measured.facts.get(key, "")) for key, rate in _rates(measured)]
    lines = [f"{measured.product}: {measured.facts.get('name', '')}", *columns(rows)]
    if (why := _throttled(measured)) is not None:
        lines.append(f"the GPU was slower than it should be: {why}\n    aisp machine doctor")
    return CliResult(lines, code)


def _rates(measured: Peaks) -> list[tuple[str, float]]:
    return sorted(measured.rates.items(), key=lambda rate: peaks.RATES.index(rate[0]))


def amount(key: str, rate: float) -> str:
    """Return a rate in its unit."""
    return duration(rate) if key in SECONDS else rate_text(key, rate)


def _throttled(measured: Peaks) -> str | None:
    why = measured.facts.get("throttled", "no")
    return None if why == "no" else why


def keep(measured: Peaks, baselines: Path) -> list[str]:
    """Store what was measured in the place of what was; return each rate, old and new, in words.

    Raises:
        Unanswerable: where the clocks were low, or the file is something else or cannot be written.
    """
    path = peaks.path_of(baselines, measured.product)
    if (why := _throttled(measured)) is not None:
        raise CliError(f"nothing is stored: {why}\n    aisp machine doctor", code=1)
    try:
        before = peaks.load(path).rates if path.exists() else {}
        peaks.save(path, measured)
    except (PeaksError, OSError) as error:
        raise CliError(f"nothing is stored: {error}") from None
    was = {key: f"{amount(key, rate)} -> " for key, rate in before.items()}
    return [f"stored in {path}: {k} {was.get(k, '')}{amount(k, r)}" for k, r in _rates(measured)]
