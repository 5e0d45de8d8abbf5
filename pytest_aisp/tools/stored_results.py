"""Read stored results: list products and chapters, and write README tables."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..page.gpu_specs import ARCHS, GPUS
from ..results import store
from ..results.export import table
from ..results.metric_limits import METRICS
from ..results.models import ROLES, Result, Stored, base_of, joined, session_sd
from ..results.row import bare, duration
from ..results.stats import interval
from ..results.store import StoreError
from ..results.verdict import DEFAULT_SPREAD
from ..timing import peaks
from ..timing.peaks import Peaks, PeaksError
from ..util.cli_result import CliError
from ..util.device import Machine
from .catalog import Catalog, CatalogCase, collect


class Chapter(NamedTuple):
    """The stored results of one chapter on one product."""

    name: str
    path: Path
    stored: Stored


def select_products(baselines: Path, product: str | None, machine: Machine) -> list[str]:
    """Return the stored products that have one or several GPUs of the type `product`.

    If `product` is None and results of only one product are stored, that product is used. If
    several products are stored, this machine's product is used.
    """
    stored = stored_products(baselines)
    bases = sorted({base_of(name) for name in stored})
    if product is None:
        product = bases[0] if len(bases) == 1 else machine.product
    if product not in (*stored, *bases):
        raise no_results(baselines, product)
    return [name for name in stored if name == product or base_of(name) == product]


def stored_products(baselines: Path) -> list[str]:
    """Return the products with stored results or peaks."""
    return sorted({file.parent.name for file in baselines.glob("*/*.json")})


def no_results(baselines: Path, product: str) -> CliError:
    """Return the error to raise for a product without stored results."""
    text = f"no results of {product} are stored in {baselines}"
    if others := stored_products(baselines):
        advice = f"only of {', '.join(others)}; choose with\n    --product={others[0]}"
        return CliError(f"{text}, {advice}")
    return CliError(f"{text}; record them on it\n    pytest --aisp-update-expectations")


def chapters(baselines: Path, product: str | None = None) -> Iterator[Chapter]:
    """Yield the stored chapters of `product`, or of every product."""
    if product is not None and product not in stored_products(baselines):
        raise no_results(baselines, product)
    for path in sorted(baselines.glob(f"{product or '*'}/*.json")):
        if path.name != "peaks.json":
            try:
                yield Chapter(path.stem, path, store.load(path))
            except StoreError as error:
                raise CliError(str(error)) from None


def listed_files(baselines: Path) -> dict[str, set[str]]:
    """Return the files that stored results list, keyed by the path of their page.

    All paths are relative to pytest's root folder.
    """
    found: dict[str, set[str]] = {}
    for chapter in chapters(baselines):
        for key, result in chapter.stored.results.items():
            page = key.partition("::")[0]
            for path in (name for name in result.files if Path(name).name == page):
                found.setdefault(path, set()).update(result.files)
    return found


def stored_peaks(baselines: Path, product: str) -> Peaks | None:
    """Return the stored peaks of `product`, or None.

    For a product with several GPUs, the result has the peaks of one GPU and of the links between
    GPUs.
    """
    names = dict.fromkeys((base_of(product), product))
    try:
        parts = [peaks.stored(peaks.path_of(baselines, name)) for name in names]
    except (PeaksError, OSError) as error:
        raise CliError(str(error)) from None
    return parts[0] if len(parts) == 1 else peaks.joined(*parts)


def known_peaks(baselines: Path, product: str) -> Peaks | None:
    """Return the stored peaks of `product` from which times are predicted."""
    found, base = stored_peaks(baselines, product), base_of(product)
    if not re.fullmatch(r"-x\d+", product[len(base) :]):  # one GPU, or several machines
        return found
    return peaks.with_peer(found, stored_peaks(baselines, joined(base, 2)))


def assumed_peer(baselines: Path, products: Iterable[str]) -> list[str]:
    """Return a line for each product whose rate `peer` is that of two GPUs."""
    every = [known_peaks(baselines, product) for product in products]
    facts = [each.facts.get("peer", "") for each in every if each is not None]
    return [fact for fact in facts if fact.startswith(peaks.ASSUMED)]


def arch_of(product: str, arch: str | None, machine: Machine) -> str:
    """Return the arch whose claims apply to `product`: `arch` if given, or the GPU's arch."""
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


START, END = "<!-- results -->", "<!-- end of results -->"
TABLE_HEADS = ("page", "case", "baseline", "optimized", "speedup [99 %]", "share of limit", "clock")


STALE = " (stale)"
WHY_STALE = f"{STALE.strip()}: the side's code has changed since it was timed: record it again"


def readme_table(chapter: str, catalog: Catalog) -> str:
    """Return the Markdown tables of all products with results of `chapter`."""
    cases = {case.key: case for case in catalog.cases if case.chapter == chapter}
    parts = []
    for path in sorted(catalog.baselines.glob(f"*/{chapter}.json")):
        stored = store.load(path)
        parts.append(f"**{stored.product}**, {_recorded(stored)}\n")
        rows = [_cells(key, stored, cases.get(key)) for key in sorted(stored.results)]
        parts.append("\n".join(table(TABLE_HEADS, rows)) + "\n")
        if any(cell.endswith(STALE) for row in rows for cell in row):
            parts.append(f"{WHY_STALE}\n")
    return "\n".join(parts) or "No results are stored yet.\n"


def _recorded(stored: Stored) -> str:
    """Return a line with the software versions and the dates of the stored results."""
    names = ("driver", "cuda", "torch", "triton")
    environments = [stored.environments[name] for name in sorted(stored.environments)]
    versions = {n: sorted({str(e[n]) for e in environments if e.get(n)}) for n in names}
    dates = sorted({str(e["date"]) for e in environments if e.get("date")})
    text = ", ".join(f"{n} {' / '.join(v)}" for n, v in versions.items() if v)
    return f"{text}; recorded {', '.join(dates)}"


def _cells(key: str, stored: Stored, now: CatalogCase | None) -> tuple[str, ...]:
    page, _, case = key.partition("::")
    result, ends = stored.results[key], interval_of(stored.results[key], stored)
    changed = now.stale_roles(result) if now is not None else ()
    amounts = [_amount(result, role) + STALE * (role in changed) for role in ROLES]
    speedup = "-"
    if result.value is not None and ends is not None:
        speedup = f"{bare(result.value)}x [{bare(ends[0])}, {bare(ends[1])}]"
    return (
        f"[{page.removesuffix('_test.py')}]({page})",
        case.partition("[")[2].rstrip("]"),
        *amounts,
        speedup,
        "" if result.share is None else f"{result.share:.0%} {result.limit}",
        result.clock or "-",
    )


def _amount(result: Result, side: str) -> str:
    """Return a side's time, or the metrics of a side that was not timed."""
    if side in result.seconds:
        return duration(result.seconds[side])
    return ", ".join(f"{name} {METRICS[name].unit(n[side])}" for name, n in result.goals.items())


def interval_of(result: Result, stored: Stored) -> tuple[float, float] | None:
    """Return the 99 % interval of a result's ln(speedup), or None for an untimed result.

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


def rewrite(readme: Path, catalog: Catalog) -> str:
    """Return the text of `readme` with tables of the current stored results."""
    text = readme.read_text()
    if START not in text or END not in text:
        raise ValueError(f"{readme} has no place for the table: add {START} and {END}")
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    return f"{before}{START}\n{readme_table(readme.parent.name, catalog)}{END}{after}"


def main(arguments: list[str]) -> int:
    """Rewrite a chapter's README, or only check the README (``--check``). Return the exit code."""
    check = "--check" in arguments
    [folder] = [Path(a) for a in arguments if a != "--check"]
    readme = folder / "README.md"
    text = rewrite(readme, collect([folder.name]))
    if check and text != readme.read_text():
        print(f"{readme} is out of date; python -m pytest_aisp.tools.stored_results {folder}")
        return 1
    if not check:
        readme.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
