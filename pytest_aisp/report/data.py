"""Collect the data that a report embeds: cases, their code, their samples and their history."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Struct, ValidationError

from ..page.pair import ROLES
from ..results import run_reader
from ..results.messages import Json
from ..results.results_json import ProfileFiles, StoredPeaks
from ..results.row import SampleFile
from ..results.run_reader import SamplesError
from ..results.task_results import HierarchyResult
from ..results.verdict import LOOK
from ..worker.ncu_counters import Counters
from ..worker.timeline import MAX_BARS, Timeline
from .history_data import merged
from .run import VERDICTS, Process, ReportCase, ReportRun, cleaned, lenient, shortened
from .source_view import Page, diff

Positive = Annotated[float, msgspec.Meta(gt=0)]

MAX_CODE = 2_500_000
"""The maximum bytes of code and diffs in a report. Cases beyond this limit are shown without code.
"""
MAX_BLOCKS, MIN_BLOCKS_SHOWN, MAX_BLOCKS_SHOWN = 24_000, 6, 40
"""The target number of timing blocks in a report, and the limits per process."""
MIN_BARS, MAX_ALL_BARS = 40, 30_000
"""The minimum number of bars (kernels and copies) per side, and the target number per report."""
MAX_PROCESSES = 8
"""The maximum number of processes shown per case. Later processes are not shown."""
FIELDS: tuple[str, ...] = ("id", "page", "chapter", "function", "baseline", "variant", "size")
FIELDS += ("gpus", "sweep", "product", "arch", "bound", "clock", "verdict", "not_timed", "speedup")
FIELDS += ("seconds", "limit", "work", "claim", "stored", "spread", "detectable", "wall", "votes")
FIELDS += ("goals", "cause", "reasons", "notes", "remarks", "profile", "processes", "samples_error")
FIELDS += ("history", "command", "diff", "code_left_out", "predicted", "unexplained", "timeline")
FIELDS += ("counters", "errors", "precisions")
"""The fields of a case that the report's scripts use."""
FACTS: tuple[str, ...] = ("sm_mhz", "watts", "celsius", "as_called", "gpu_only", "peak_bytes")
FACTS += ("graph_nodes", "looks")
"""The details of a process that are shown. `looks` are readings of clock, power and temperature."""


class Timing(Struct):
    """The measurements of one process.

    Attributes:
        baseline, optimized: the seconds per call in each window of the side. A block has two
            windows of each side.
        orders: the order of each block's windows, in which ``A`` is the baseline.
        laps: one number per lap. The inputs and CUDA graphs of both sides are built again for each
            lap.
        dropped: the reason for each block that was measured again.
        dropped_at: the number of blocks before each dropped block.
    """

    baseline: list[Positive] = []
    optimized: list[Positive] = []
    orders: list[Literal["ABBA", "BAAB"]] = []
    laps: list[float] = []
    dropped: list[str] = []
    dropped_at: list[int] = []
    details: dict[str, Json] = {}


class ReportPage(Struct):
    """A page's title, its docstring, and the code of its sides, keyed by name."""

    title: str
    doc: str
    sides: dict[str, str]


class ReportData(Struct):
    """The data of a report. `runs` is the number of other runs in the history."""

    peaks: dict[str, StoredPeaks]
    pages: dict[str, ReportPage]
    cases: list[ReportCase]
    blocks: int
    runs: int
    hierarchy: HierarchyResult | None = None

    def json(self) -> str:
        """Return the data for the scripts, without fields that may contain secrets."""
        peaks = {
            product: {"rates": each.rates, "from": each.origin, "date": each.facts.get("date")}
            for product, each in self.peaks.items()
        }
        cases = [
            {n: value for n in FIELDS if (value := getattr(case, n)) or isinstance(value, str)}
            for case in self.cases
        ]
        data: dict[str, object] = {"peaks": peaks, "pages": self.pages, "cases": cases}
        data |= {"blocks": self.blocks, "runs": self.runs, "hierarchy": self.hierarchy}
        return msgspec.json.encode(data).decode()


def report_data(
    run: ReportRun,
    history: Sequence[ReportRun] = (),
    pages_root: Path | None = None,
    target: Path | None = None,
) -> ReportData:
    """Return the data for the report of `run`. The cases that need attention come first.

    Args:
        history: other runs. Their results for the same case and product are shown next to the
            result of `run`.
        pages_root: the folder that the pages' paths are relative to. The default is the root of the
            run, or the working directory.
        target: the report's folder. Links to profiles are relative to it.
    """
    most = blocks_for(len(run.cases))
    histories = merged(run, history)
    roots = [Path(run.manifest.root), Path(".")] if pages_root is None else [pages_root]
    pages = {case.page for case in run.cases if case.page}
    code = _CodeBudget(_read_pages(pages, roots), MAX_CODE)
    runs = len(history) + len({entry.started for past in run.past.values() for entry in past})
    cases = []
    for case in sorted(run.cases, key=_order):
        profiled = _profile_folder(case, run.folder)
        entry = msgspec.structs.replace(
            case,
            profile=_profile(case, run.folder, target),
            timeline=profiled and Timeline.read(profiled, bars_for(len(run.cases))),
            counters=_counters(profiled),
            history=histories.get((case.id, case.product), []),
            command=f"pytest {shlex.quote(case.id)}",
        )
        try:
            entry.processes = thinned(read_timings(run, case), most)
        except SamplesError as error:
            # write a command on the line of the previous sentence
            text = str(error).replace(":\n    ", ": ")
            entry.samples_error = shortened(f"{'. '.join(text.splitlines())}.")
        code.add_to(entry)
        cases.append(entry)
    return ReportData(run.manifest.peaks, code.pages(), cases, most, runs, run.hierarchy)


def _order(case: ReportCase) -> tuple[int, str, str]:
    # the first `len(LOOK)` verdicts need attention
    severity = min(VERDICTS.index(case.verdict), len(LOOK))
    return severity, case.chapter, case.page


def _profile(case: ReportCase, folder: Path | None, target: Path | None) -> ProfileFiles | None:
    """Return the profile of a case with paths relative to `target`, or None."""
    if case.profile is None or folder is None:
        return None
    place = Path() if target is None else Path(os.path.relpath(folder, target))
    files = [str(place / name) for name in case.profile.files]
    return ProfileFiles(case.profile.tool, str(place), files)


def _profile_folder(case: ReportCase, folder: Path | None) -> Path | None:
    """Return the folder of the profile, or None if it is not below the `folder` of the run."""
    if case.profile is None or folder is None:
        return None
    try:
        place = (folder / case.profile.folder).resolve()
    except (OSError, ValueError):  # an invalid file name
        return None
    return place if place.is_relative_to(folder.resolve()) else None


def _counters(folder: Path | None) -> dict[str, Counters]:
    """Return the counters that ncu left in the folder of the profile, keyed by side."""
    found = {role: Counters.read(folder, role) for role in ROLES} if folder else {}
    return {role: counters for role, counters in found.items() if counters is not None}


def _read_pages(paths: Iterable[str], roots: Sequence[Path]) -> dict[str, Page]:
    pages: dict[str, Page] = {}
    for path in paths:
        for root in roots:
            try:
                pages[path] = Page.read(root / path)
                break
            except (OSError, SyntaxError, ValueError):
                continue
    return pages


@cache
def _code(page: Page, side: str) -> str:
    """Return the code of a side. The result is cached, because many cases share their sides."""
    return str(cleaned(page.side(side)))


@dataclass
class _CodeBudget:
    """Adds code to the cases until it has added `left` bytes."""

    sources: dict[str, Page]
    left: int
    sides: dict[str, dict[str, str]] = field(default_factory=dict)

    def add_to(self, case: ReportCase) -> None:
        """Add the diff of the sides to `case`, and their code to its page."""
        source = self.sources.get(case.page)
        if source is None:
            return
        case.baseline = case.baseline or source.sides(case.function)[0]
        names = (case.baseline, case.variant)
        baseline, optimized = (_code(source, name) for name in names)
        changes = diff(baseline, optimized, names) if baseline and optimized else ""
        listed = self.sides.setdefault(case.page, {})
        texts = dict(zip(names, (baseline, optimized), strict=True))
        new = {name: text for name, text in texts.items() if text and name not in listed}
        needed = sum(len(text.encode()) for text in (changes, *new.values()))
        if needed > self.left:
            case.code_left_out = True
            return
        self.left -= needed
        listed.update(new)
        case.diff = changes

    def pages(self) -> dict[str, ReportPage]:
        return {
            path: ReportPage(cleaned(page.title), cleaned(page.doc), self.sides.get(path, {}))
            for path, page in self.sources.items()
        }


def read_timings(run: ReportRun, case: ReportCase) -> list[Timing]:
    """Return the measurements of each process of `case`, or none if the case was not timed.

    Raises:
        SamplesError: if the file is missing or malformed, or another run wrote the file. The
            message does not name the folder, because users share reports.
    """
    if case.samples is None:
        if case.speedup is not None:
            raise SamplesError(run_reader.UNWRITTEN)
        return []
    if run.folder is None:
        raise SamplesError("only its results are here, not its samples")
    try:
        file = msgspec.convert(case.samples, SampleFile)
    except ValidationError:
        raise SamplesError("the run does not say which file holds its samples") from None
    try:
        samples = run_reader.read(run.folder, file)
    except SamplesError as error:
        raise SamplesError(str(error).replace(f"{run.folder}{os.sep}", "")) from None
    return [lenient(Timing, timing) for timing in cleaned(samples["timings"])]


def blocks_for(cases: int) -> int:
    """Return the number of blocks per process that a report of `cases` cases shows."""
    return max(MIN_BLOCKS_SHOWN, min(MAX_BLOCKS_SHOWN, MAX_BLOCKS // max(cases, 1)))


def bars_for(cases: int) -> int:
    """Return the number of bars per side and timeline that a report of `cases` cases shows."""
    return max(MIN_BARS, min(MAX_BARS, MAX_ALL_BARS // max(2 * cases, 1)))


def thinned(timings: Sequence[Timing], most: int) -> list[Process]:
    """Return the windows of each process, but at most `most` blocks per process.

    If a process has more blocks, the result has the blocks with each side's shortest and longest
    window, and evenly spaced other blocks.
    """
    timed = [t for t in timings[:MAX_PROCESSES] if t.baseline and t.optimized]
    return [_process(timing, most, of=len(timings)) for timing in timed]


def _process(timing: Timing, most: int, *, of: int) -> Process:
    blocks = _blocks(timing)
    shown = _select_blocks(blocks, most)
    windows = [window for index in shown for window in blocks[index]]
    laps = len(timing.laps)
    whole_laps = laps > 0 and len(blocks) % laps == 0  # all laps have the same length
    places: Sequence[int | None] = timing.dropped_at
    if len(places) != len(timing.dropped):
        places = [None] * len(timing.dropped)
    return Process(
        sides="".join(side for side, _ in windows),
        us=[float(f"{seconds * 1e6:.5g}") for _, seconds in windows],
        blocks=len(blocks),
        shown=shown if len(shown) < len(blocks) else None,
        laps=[n * len(blocks) // laps for n in range(1, laps)] if whole_laps else [],
        dropped=list(zip(timing.dropped, places, strict=True)),
        facts={name: timing.details[name] for name in FACTS if name in timing.details},
        of=of,
    )


def _blocks(timing: Timing) -> list[list[tuple[str, float]]]:
    """Return the windows of each block in the order of measurement.

    A window is ``b`` (baseline) or ``o`` (optimized), with its seconds.
    """
    baseline, optimized, orders = timing.baseline, timing.optimized, timing.orders
    if not 2 * len(orders) == len(baseline) == len(optimized):  # the order is unknown
        return [[("b", b), ("o", o)] for b, o in zip(baseline, optimized, strict=False)]
    sides = {"A": ("b", iter(baseline)), "B": ("o", iter(optimized))}
    return [[(sides[w][0], next(sides[w][1])) for w in order] for order in orders]


def _select_blocks(blocks: Sequence[Sequence[tuple[str, float]]], most: int) -> list[int]:
    """Return the indices of the blocks to show, in order."""
    count = len(blocks)
    if count <= most:
        return list(range(count))
    shown = set()
    for side in "bo":
        by_time = sorted((s, i) for i, block in enumerate(blocks) for w, s in block if w == side)
        shown |= {by_time[0][1], by_time[-1][1]}
    free = most - len(shown)
    shown |= {round(i * (count - 1) / max(free - 1, 1)) for i in range(free)}
    return sorted(shown)
