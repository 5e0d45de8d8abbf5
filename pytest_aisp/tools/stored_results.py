"""Report on stored results: list products, compare results with claims, write README tables.

`aisp results expectations` compares each stored ln(speedup) with the current claim, and the stored
sources with the current pages. It also checks whether there are enough processes and sessions to
estimate a spread.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from ..page.gpu_specs import ARCHS, GPUS
from ..results import store
from ..results.export import table
from ..results.metric_limits import METRICS
from ..results.models import Result, Stored, base_of, session_sd
from ..results.row import bare, claim_text, duration
from ..results.stats import interval
from ..results.store import StoreError
from ..results.verdict import DEFAULT_SPREAD, NEUTRAL_FLOOR
from ..timing import peaks
from ..timing.peaks import Peaks, PeaksError
from ..util.cli_result import CliError, CliResult, columns
from ..util.device import Machine
from .catalog import Catalog, CatalogCase


class Chapter(NamedTuple):
    """The stored results of one chapter on one product."""

    name: str
    path: Path
    stored: Stored


def select_products(baselines: Path, product: str | None, machine: Machine) -> list[str]:
    """Return the stored products that consist of one or several GPUs of `product`.

    If `product` is None, it is the only product with stored results, or else the machine's.
    """
    stored = _products(baselines)
    bases = sorted({base_of(name) for name in stored})
    if product is None:
        product = bases[0] if len(bases) == 1 else machine.product
    if product not in (*stored, *bases):
        raise no_results(baselines, product)
    return [name for name in stored if name == product or base_of(name) == product]


def _products(baselines: Path) -> list[str]:
    return sorted({file.parent.name for file in baselines.glob("*/*.json")})


def no_results(baselines: Path, product: str) -> CliError:
    """Return the error to raise for a product without stored results."""
    text = f"no results of {product} are stored in {baselines}"
    if others := _products(baselines):
        advice = f"only of {', '.join(others)}; choose with\n    --product={others[0]}"
        return CliError(f"{text}, {advice}")
    return CliError(f"{text}; record them on it\n    pytest --aisp-update-expectations")


def chapters(baselines: Path, product: str | None = None) -> Iterator[Chapter]:
    """Yield the stored chapters of `product`, or of every product."""
    if product is not None and product not in _products(baselines):
        raise no_results(baselines, product)
    for path in sorted(baselines.glob(f"{product or '*'}/*.json")):
        if path.name != "peaks.json":
            try:
                yield Chapter(path.stem, path, store.load(path))
            except StoreError as error:
                raise CliError(str(error)) from None


def stored_peaks(baselines: Path, product: str) -> Peaks | None:
    """Return the stored peaks of `product`, or None.

    For a product with several GPUs, they are the peaks of one GPU and of the links between GPUs.
    """
    names = dict.fromkeys((base_of(product), product))
    try:
        parts = [peaks.stored(peaks.path_of(baselines, name)) for name in names]
    except (PeaksError, OSError) as error:
        raise CliError(str(error)) from None
    return parts[0] if len(parts) == 1 else peaks.joined(*parts)


def arch_of(product: str, arch: str | None, machine: Machine) -> str:
    """Return the arch whose claims apply to `product`: `arch`, or the arch of its GPU."""
    legal = f"legal are {', '.join(ARCHS)}"
    if arch is not None and arch not in ARCHS:
        raise CliError(f"--arch={arch}: unknown arch; {legal}")
    base = base_of(product)
    if arch or machine.product == base:
        return arch or machine.arch
    if base.startswith("cpu-"):
        return "cpu"
    for known, names in GPUS.items():
        if set(names.lower().split(", ")) & set(base.split("-")):
            return known
    raise CliError(f"the arch of {product} is unknown; {legal}\n    --arch={ARCHS[1]}")


MIN_PROCESSES, MIN_SESSIONS = 8, 2
"""The minimum numbers of processes and sessions that are needed to estimate a spread."""
STATES = {
    "below": "the stored speedup is below the claim",
    "neutral": "a speedup is claimed, but the 99 % interval includes 1",
    "stale": "the sources of the sides have changed: record again",
    "few": f"fewer than {MIN_PROCESSES} processes or {MIN_SESSIONS} sessions",
    "gone": "no page here has the case",
    "unread": "its page cannot be imported here, so its claim is unknown",
}
HEADS = ("product", "chapter", "case", "claim", "stored [99 %]", "processes", "sessions", "states")


@dataclass(frozen=True)
class Expectation:
    """A stored result and its claim. `states` lists its problems."""

    product: str
    chapter: str
    case: str
    claim: float | str | None
    speedup: float | None
    low: float | None
    high: float | None
    processes: int
    sessions: int
    states: tuple[str, ...]
    versus: str

    def row(self) -> tuple[str, ...]:
        speed = "-"
        if self.speedup is not None:
            speed = f"{self.speedup:.3f}x [{self.low:.3f}, {self.high:.3f}]"
        claim = claim_text(self.claim, self.versus)
        counts = (str(self.processes), str(self.sessions))
        return self.product, self.chapter, self.case, claim, speed, *counts, ", ".join(self.states)


def expectations_result(catalog: Catalog, archs: Mapping[str, str], *, form: str) -> CliResult:
    """Return the results of all products with their claims.

    The exit code is 1 if a result is below its claim.

    Args:
        archs: the arch whose claims apply, keyed by product.
    """
    entries = [e for product, arch in archs.items() for e in expectations(catalog, product, arch)]
    code = 1 if any("below" in one.states for one in entries) else 0
    if form == "json":
        return CliResult([json.dumps([asdict(one) for one in entries], indent=1)], code)
    return CliResult(_csv(entries) if form == "csv" else _text(entries), code)


def expectations(catalog: Catalog, product: str, arch: str) -> Iterator[Expectation]:
    """Yield each stored result of `product` with its claim."""
    cases = {(case.chapter, case.key): case for case in catalog.cases}
    unread = {Path(page.path).name for page in catalog.unread}
    for chapter in chapters(catalog.baselines, product):
        for key, result in sorted(chapter.stored.results.items()):
            case = cases.get((chapter.name, key))
            ends = interval_of(result, chapter.stored)
            # A claim is about a speedup, so it does not apply to a result that has only metrics.
            claim = None if case is None or ends is None else case.claims[arch]
            states = _states(result, case, claim, ends[0] if ends else 0.0)
            if case is None and key.partition("::")[0] in unread:
                states = ["unread", *states[1:]]
            low, high = (None, None) if ends is None else map(math.exp, ends)
            yield Expectation(
                *(product, chapter.name, key, claim, result.speedup),
                *(low, high, result.processes, result.sessions),
                tuple(states),
                case.versus if case is not None else "",
            )


def _states(
    result: Result, case: CatalogCase | None, claim: float | str | None, low: float
) -> list[str]:
    timed = result.value is not None  # counted metrics have no spread
    few = timed and (result.processes < MIN_PROCESSES or result.sessions < MIN_SESSIONS)
    if case is None:
        return ["gone", *(["few"] if few else [])]
    states = {
        "below": _is_below(result, claim),
        "neutral": isinstance(claim, int | float) and claim >= 1 and low <= 0,
        "stale": _is_stale(result, case),
        "few": few,
    }
    return [state for state, holds in states.items() if holds]


def _is_stale(result: Result, case: CatalogCase) -> bool:
    now = result.with_syntax(case.sources, case.text_sources)
    return dict(now.sources) != dict(case.sources)


def _is_below(result: Result, claim: float | str | None) -> bool:
    """Return True if a result is below its claim.

    If the claim is `neutral`, a slowdown up to the clock's floor is allowed.
    """
    if result.value is None or result.clock is None:
        return False
    if claim == "neutral":
        return result.value < -NEUTRAL_FLOOR[result.clock]
    # There is no margin, because the claim was chosen from this value, a mean over processes.
    return isinstance(claim, int | float) and result.value < math.log(claim)


def _csv(entries: Sequence[Expectation]) -> list[str]:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Expectation)])
    for one in entries:
        plain = {**asdict(one), "states": " ".join(one.states)}
        writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in plain.values())
    return text.getvalue().splitlines()


def _text(entries: Sequence[Expectation]) -> list[str]:
    """Return a table of the results that have a problem, and the number of each problem."""
    problems = [one for one in entries if one.states]
    lines = columns([HEADS, *(one.row() for one in problems)]) if problems else []
    lines.append(f"{len(entries)} stored results, {len(entries) - len(problems)} without a problem")
    counts = {state: sum(state in one.states for one in problems) for state in STATES}
    return lines + [f"{state} {n}: {STATES[state]}" for state, n in counts.items() if n]


START, END = "<!-- results -->", "<!-- end of results -->"
TABLE_HEADS = ("page", "case", "baseline", "optimized", "speedup [99 %]", "share of limit", "clock")


def readme_table(chapter: str, baselines: Path) -> str:
    """Return the Markdown tables of all products with results of `chapter`."""
    parts = []
    for path in sorted(baselines.glob(f"*/{chapter}.json")):
        stored = store.load(path)
        parts.append(f"**{stored.product}**, {_recorded(stored)}\n")
        rows = [_cells(key, stored) for key in sorted(stored.results)]
        parts.append("\n".join(table(TABLE_HEADS, rows)) + "\n")
    return "\n".join(parts) or "No results are stored yet.\n"


def _recorded(stored: Stored) -> str:
    """Return the versions and the dates of the recordings."""
    names = ("driver", "cuda", "torch", "triton")
    environments = [stored.environments[name] for name in sorted(stored.environments)]
    versions = {n: sorted({str(e[n]) for e in environments if e.get(n)}) for n in names}
    dates = sorted({str(e["date"]) for e in environments if e.get("date")})
    text = ", ".join(f"{n} {' / '.join(v)}" for n, v in versions.items() if v)
    return f"{text}; recorded {', '.join(dates)}"


def _cells(key: str, stored: Stored) -> tuple[str, ...]:
    page, _, case = key.partition("::")
    result, ends = stored.results[key], interval_of(stored.results[key], stored)
    speedup = "-"
    if result.value is not None and ends is not None:
        speedup = f"{bare(result.value)}x [{bare(ends[0])}, {bare(ends[1])}]"
    return (
        f"[{page.removesuffix('_test.py')}]({page})",
        case.partition("[")[2].rstrip("]"),
        _amount(result, "baseline"),
        _amount(result, "optimized"),
        speedup,
        "" if result.share is None else f"{result.share:.0%} {result.limit}",
        result.clock or "-",
    )


def _amount(result: Result, side: str) -> str:
    """Return a side's time, or the side's metrics if it was not timed."""
    if side in result.seconds:
        return duration(result.seconds[side])
    return ", ".join(f"{name} {METRICS[name].unit(n[side])}" for name, n in result.goals.items())


def interval_of(result: Result, stored: Stored) -> tuple[float, float] | None:
    """Return the 99 % interval of a result's ln(speedup), or None if it was not timed.

    The interval includes the spread between sessions.
    """
    if result.value is None or result.clock is None:
        return None
    return interval(
        result.value,
        result.own_spread or DEFAULT_SPREAD[result.clock],
        result.processes,
        session=session_sd(stored.results.values(), result.clock),
        sessions=result.sessions,
    )


def rewrite(readme: Path, baselines: Path) -> str:
    """Return the text of `readme` with tables of the current stored results."""
    text = readme.read_text()
    if START not in text or END not in text:
        raise ValueError(f"{readme} has no place for the table: add {START} and {END}")
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    return f"{before}{START}\n{readme_table(readme.parent.name, baselines)}{END}{after}"


def main(arguments: list[str]) -> int:
    """Rewrite or check the README of a chapter's folder, and return the exit code."""
    check = "--check" in arguments
    folders = [Path(a) for a in arguments if a != "--check"]
    readme = folders[0] / "README.md"
    baselines = folders[1] if len(folders) > 1 else Path("baselines")
    text = rewrite(readme, baselines)
    if check and text != readme.read_text():
        print(f"{readme} is out of date; python -m pytest_aisp.tools.stored_results {folders[0]}")
        return 1
    if not check:
        readme.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
