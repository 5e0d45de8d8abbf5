"""Convert a run to the cases of `results.json`, to Markdown, and to CSV."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from msgspec import UNSET

from .metric_limits import METRICS
from .results_json import (
    Case,
    Claim,
    Goal,
    Limit,
    Manifest,
    ProfileFiles,
    Seconds,
    Speedup,
    StoredSpeedup,
    Trial,
)
from .row import JournalLine, Profile, claim_text, digits, duration, size_text
from .verdict import ORDER, RED


def case(line: JournalLine, root: str) -> Case:
    """Convert a line of the journal to a case of `results.json`, with paths relative to `root`."""
    origins, times = line.origins, list(line.seconds.values())
    predicted = list(line.predicted.values())
    speedup, limit, claim, stored = None, None, None, None
    if line.value is not None and line.low is not None and line.high is not None:
        speedup = Speedup(math.exp(line.value), math.exp(line.low), math.exp(line.high))
    if line.share is not None and math.isfinite(line.share):
        limit = Limit(line.limit, line.share, origins.get("limit", ""))
    if line.claim is not None:
        claim = Claim(line.claim, origins.get("claim", ""), line.versus)
    if line.stored is not None:
        stored = StoredSpeedup(math.exp(line.stored), origins.get("stored", ""))
    return Case(
        id=line.nodeid,
        key=line.key,
        page=path_below(line.page, root),
        chapter=PurePath(line.file).stem,
        function=line.function,
        baseline=line.baseline,
        variant=line.variant,
        size=line.size,
        gpus=line.gpus,
        sweep=line.sweep,
        product=line.product,
        arch=line.arch,
        bound=line.bound,
        clock=line.clock,
        verdict=line.verdict,
        not_timed=line.need,
        speedup=speedup,
        seconds=Seconds(times[0], times[-1]) if times else None,
        predicted=Seconds(predicted[0], predicted[-1]) if predicted else None,
        unexplained=line.unexplained,
        errors=line.errors,
        precisions=line.precisions,
        work=line.work,
        spread=line.spread,
        session=line.session,
        detectable=None if line.detectable is None else 1 - math.exp(-line.detectable),
        suspect=line.suspect,
        votes=[math.exp(vote) for vote in line.votes],
        trials=[Trial(math.exp(value), verdict) for value, verdict in line.trials],
        limit=limit,
        claim=claim,
        stored=stored,
        goals={name: _goal(line, name) for name in line.goals},
        profile=_profile(line.profile),
        cause=line.cause,
        reasons=line.reasons,
        notes=line.notes,
        remarks=line.remarks,
        launch_bound=line.launch_bound,
        environment=line.environment,
        sources=line.sources,
        unchanged=line.unchanged,
        wall=line.wall,
        samples=line.samples,
    )


def _goal(line: JournalLine, name: str) -> Goal:
    amounts, metric = line.goals[name], METRICS[name]
    return Goal(
        baseline=amounts["baseline"],
        optimized=amounts["optimized"],
        noise=amounts.get("noise", UNSET),
        limit=line.limits.get(name),
        stored=line.held.get(name),
        margin=metric.margin,
        slack=metric.slack,
    )


def _profile(profile: Profile) -> ProfileFiles | None:
    if not profile:
        return None
    where = PurePath(profile.folder)
    files = [str(where / name) for names in profile.files.values() for name in names]
    return ProfileFiles(profile.tool, str(where), files)


def path_below(path: str, folder: str) -> str:
    """Return `path` relative to `folder` if it is inside that folder, else unchanged."""
    inside = folder and PurePath(path).is_relative_to(folder)
    return str(PurePath(path).relative_to(folder)) if inside else path


HEADS: tuple[str, ...] = ("verdict", "page", "case", "baseline", "optimized", "speedup [99 %]")
HEADS += ("limit", "claim", "stored", "why")


def markdown(run: Manifest, cases: Sequence[Case]) -> str:
    """Return a run's summary and its table of cases as Markdown."""
    lines = [f"**{_counted(cases)}** on {run.machine.name}, {_when(run)}", ""]
    lines += [f"**Invalid**: {_cell(why)}\n" for why in run.invalid]
    if cases:
        labels = page_labels((case.page, case.function) for case in cases)
        ordered = in_order(cases)
        lines += table(HEADS, [_row(case, labels[case.page, case.function]) for case in ordered])
    return "\n".join(lines) + "\n"


def page_labels(tests: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return a label for each test. A test is given as its page's path and its function's name.

    The label is the page's name. If the page has several tests, the function's name is added.
    """
    unique = set(tests)
    counts = Counter(page for page, _ in unique)

    def label(page: str, function: str) -> str:
        stem = PurePath(page).name.removesuffix("_test.py")
        return stem if counts[page] == 1 else f"{stem}::{function}"

    return {test: label(*test) for test in unique}


def in_order(cases: Iterable[Case]) -> list[Case]:
    """Return the cases sorted by verdict, red ones first. The sort is stable."""
    places = {verdict: place for place, verdict in enumerate(ORDER)}
    return sorted(cases, key=lambda case: places.get(case.verdict, -1))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, with the text of each cell escaped."""
    every = [heads, ["---"] * len(heads), *([_cell(c) for c in row] for row in rows)]
    return ["| " + " | ".join(row) + " |" for row in every]


def _cell(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return " ".join(escaped.split())


def _counted(cases: Iterable[Case]) -> str:
    counts = Counter(case.verdict for case in in_order(cases))
    return ", ".join(f"{n} {verdict or 'without a verdict'}" for verdict, n in counts.items()) or (
        "no cases"
    )


def _when(run: Manifest) -> str:
    text = run.started
    if run.git is not None and run.git.commit:
        text += f" at {run.git.commit[:12]}" + " with uncommitted changes" * bool(run.git.dirty)
    return text if run.complete else f"{text}; the run did not finish"


def _row(case: Case, page: str) -> tuple[str, ...]:
    times, limit, claim, stored = case.seconds, case.limit, case.claim, case.stored
    why = case.reasons or ([case.not_timed] if case.not_timed else [])
    return (
        f"**{case.verdict}**" if case.verdict in RED else case.verdict,
        page,
        label(case),
        duration(times.baseline) if times else "",
        duration(times.optimized) if times else "",
        speed(case.speedup),
        f"{limit.share:.0%} {limit.name}" if limit else "",
        claim_text(claim.at_least, claim.versus) if claim else "",
        times_text(stored.speedup) if stored else "",
        "; ".join([f"{case.cause}: {why[0]}", *why[1:]] if case.cause and why else why),
    )


def label(case: Case) -> str:
    """Return the label of a case, such as ``tiled, n=4096``."""
    size = size_text(case.gpus, case.size)
    return f"{case.variant}, {size}" if size else case.variant


def speed(speedup: Speedup | None) -> str:
    """Return a string such as ``3.530x [3.510, 3.550]``, or an empty string without a speedup."""
    if speedup is None:
        return ""
    return f"{times_text(speedup.value)} [{digits(speedup.low)}, {digits(speedup.high)}]"


def times_text(speedup: float) -> str:
    """Return a speedup with three or four digits, such as ``3.530x``."""
    return f"{digits(speedup)}x"


COLUMNS: tuple[str, ...] = (
    "id",
    "page",
    "chapter",
    "function",
    "baseline",
    "variant",
    "size",
    "gpus",
    "product",
    "arch",
)
COLUMNS += ("bound", "clock", "verdict", "not_timed", "speedup", "low", "high", "baseline_s")
COLUMNS += ("optimized_s", "share", "limit", "claim", "stored", "spread", "detectable", "votes")
COLUMNS += tuple(f"{goal}_{side}" for goal in METRICS for side in ("baseline", "optimized"))
COLUMNS += ("reasons", "wall", "samples")


def csv_text(cases: Iterable[Case]) -> str:
    """Return CSV with one line per case. Several values in one cell are separated by ``; ``."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_flat(case) for case in cases)
    return file.getvalue()


def _flat(case: Case) -> dict[str, object]:
    speedup, seconds, limit = case.speedup, case.seconds, case.limit
    flat = {name: getattr(case, name, None) for name in COLUMNS}
    flat |= {
        "size": "; ".join(f"{name}={value}" for name, value in case.size.items()),
        "speedup": speedup and speedup.value,
        "low": speedup and speedup.low,
        "high": speedup and speedup.high,
        "baseline_s": seconds and seconds.baseline,
        "optimized_s": seconds and seconds.optimized,
        "share": limit and limit.share,
        "limit": limit and limit.name,
        "claim": case.claim and case.claim.at_least,
        "stored": case.stored and case.stored.speedup,
        "votes": "; ".join(map(str, case.votes)),
        "reasons": "; ".join(case.reasons),
        "samples": case.samples and case.samples.path,
    }
    for name, goal in case.goals.items():
        flat |= {f"{name}_baseline": goal.baseline, f"{name}_optimized": goal.optimized}
    return flat
