"""`aisp results compare OLD NEW`: compare two runs or stored results, metric by metric.

OLD and NEW are each a folder of artifacts, a folder of stored results, or a git ref. A git ref
means the stored results in that commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..results import diff, export, run_reader
from ..results.diff import Change, Comparison, Measured
from ..results.metric_limits import METRICS
from ..results.row import duration
from ..results.store import StoreError, parse
from ..util import git
from ..util.cli_result import CliError, CliResult, columns

BASELINES = "baselines"
PEAKS = "peaks.json"
"""A file with rates of the machine in the folders of stored results. It has no results."""
HEADS = ("", "case", "metric", "better", "old", "new", "change", "noise")
LABELS = {"worse": "WORSE", "better": "better", "same": ""}
CHANGED = diff.ORDER[:2]
"""The outcomes that are printed without ``--all``."""
SCHEMA = 1
"""The version of the JSON format."""


@dataclass(frozen=True)
class Side:
    """One side of the comparison: its description, its cases, and warnings about its numbers."""

    description: str
    cases: Sequence[Measured]
    warnings: Sequence[str] = ()


def compare_result(
    old: str, new: str, *, form: str = "text", every: bool = False, root: Path
) -> CliResult:
    """Return the comparison. The exit code is 1 if a metric or a verdict got worse.

    A change in a metric counts only if it exceeds the metric's noise.

    Args:
        old, new: folders relative to the working directory, or git refs of `root`'s repository.
        form: one of `FORMS`.
        every: True to also list changes within the noise. JSON always lists all changes.
    """
    sides = read(old, root), read(new, root)
    comparison = diff.compare(sides[0].cases, sides[1].cases)
    if not comparison.changes and not comparison.turned:
        raise CliError(_why_nothing(*sides, comparison))
    return CliResult(FORMS[form](sides, comparison, every), 1 if comparison.count("worse") else 0)


def read(name: str, root: Path) -> Side:
    """Return the side for `name`: a folder, or a git ref if the folder does not exist."""
    folder = run_reader.folder_of(Path(name))
    if folder.is_dir():
        if any((folder / file).exists() for file in (run_reader.MANIFEST, run_reader.JOURNAL)):
            return _run(name, folder)
        return _stored(name, folder)
    commit = git.try_git(
        root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
    )
    if commit is None:
        raise CliError(
            f"{name}: neither a folder nor a git ref of {root}\n"
            "Give a run's artifacts, a folder of stored results, or a commit:\n"
            f"    aisp results compare HEAD~1 {BASELINES}"
        )
    return _committed(name, commit.strip(), root)


def _run(name: str, folder: Path) -> Side:
    try:
        run = run_reader.load(folder)
    except run_reader.RunError as error:
        raise CliError(str(error)) from None
    manifest = run.manifest
    warnings = [f"{name}: the verdicts of this run do not count: {w}" for w in manifest.invalid]
    if not manifest.complete:
        warnings.append(f"{name}: the run did not finish; cases may be missing")
    warnings += [f"{name}: {why}" for why in run.lost]
    description = f"the run {name} of {manifest.started} on {manifest.machine.name}"
    return Side(description, tuple(diff.of_run(run.typed_cases())), tuple(warnings))


def _stored(name: str, folder: Path) -> Side:
    files = sorted({*folder.glob("*.json"), *folder.glob("*/*.json")})
    try:
        texts = {file: file.read_text(encoding="utf-8") for file in files if file.name != PEAKS}
    except (OSError, ValueError) as error:
        raise CliError(
            f"{name}: cannot be read as stored results: {error}\n    ls -l {name}"
        ) from None
    if not texts:
        raise CliError(
            f"{name}: contains neither a run nor stored results\n"
            "This option makes pytest write a run:\n    pytest --aisp-artifacts=DIR"
        )
    return Side(f"the stored results in {name}", _parse(texts))


def _committed(name: str, commit: str, root: Path) -> Side:
    listed = git.try_git(root, "ls-tree", "-r", "-z", "--name-only", commit, "--", BASELINES) or ""
    paths = [PurePosixPath(path) for path in listed.split("\0") if path.endswith(".json")]
    texts = {
        root / path: git.try_git(root, "show", f"{commit}:./{path}") or ""
        for path in paths
        if path.name != PEAKS
    }
    if not texts:
        raise CliError(
            f"{name}: no results are stored in {BASELINES}/ at {commit[:12]}\n"
            "Store results on a quiet machine:\n    pytest --aisp-update-expectations"
        )
    return Side(f"the stored results at {name} ({commit[:12]})", _parse(texts))


def _parse(texts: Mapping[Path, str]) -> tuple[Measured, ...]:
    cases: list[Measured] = []
    try:
        for path, text in texts.items():
            cases += diff.of_stored(parse(path, text), path.stem)
    except StoreError as error:
        raise CliError(str(error)) from None
    return tuple(cases)


def _why_nothing(old: Side, new: Side, comparison: Comparison) -> str:
    """Return the reason why the two sides have nothing to compare."""
    products = [sorted({case.product for case in side.cases}) for side in (old, new)]
    sides = f"OLD is {old.description}; NEW is {new.description}"
    if comparison.apart:
        case, why = comparison.apart[0]
        return f"nothing to compare: {_name(case)} is {why}\n{sides}"
    if all(products) and not set(products[0]) & set(products[1]):
        return (
            f"nothing to compare: OLD is from {', '.join(products[0])}, NEW from"
            f" {', '.join(products[1])}; times of different products cannot be compared\n"
            f"{sides}\nMeasure both on one product:\n    pytest --aisp-artifacts=DIR"
        )
    counts = f"{len(old.cases)} cases in OLD, {len(new.cases)} in NEW, none of them timed in both"
    advice = "Run the same pages for both:\n    pytest --aisp-artifacts=DIR"
    return f"nothing to compare: {counts}\n{sides}\n{advice}"


def text(sides: tuple[Side, Side], comparison: Comparison, every: bool) -> list[str]:
    rows = _rows(comparison, every)
    lines = [f"OLD is {sides[0].description}", f"NEW is {sides[1].description}"]
    lines += [f"warning: {warning}" for side in sides for warning in side.warnings]
    lines += ["", *(columns([HEADS, *rows]) if rows else []), *_other_cases(comparison, every)]
    return [*lines, "", _summary(comparison)]


def markdown(sides: tuple[Side, Side], comparison: Comparison, every: bool) -> list[str]:
    lines = [f"**{_summary(comparison)}**", ""]
    lines += [f"OLD is {sides[0].description}; NEW is {sides[1].description}.", ""]
    lines += [f"- warning: {warning}" for side in sides for warning in side.warnings]
    if rows := _rows(comparison, every):
        marked = [(f"**{row[0]}**" if row[0].isupper() else row[0], *row[1:]) for row in rows]
        lines += ["", *export.table(HEADS, marked), ""]
    return lines + [f"- {line}" for line in _other_cases(comparison, every)]


def _summary(comparison: Comparison) -> str:
    worse, better, same = map(comparison.count, diff.ORDER)
    return f"{worse} worse, {better} better, {same} within the noise"


def _rows(comparison: Comparison, every: bool) -> list[tuple[str, ...]]:
    """Return the table's rows, the worst outcomes first. With `every`, include unchanged rows."""
    rows: list[tuple[str, ...]] = []
    for outcome in diff.ORDER if every else CHANGED:
        for turned in comparison.turned:
            if turned.outcome == outcome:
                start = (LABELS[outcome], _name(turned.case), "verdict", "")
                rows.append((*start, turned.old, turned.new, "", ""))
        rows += [_change_row(change) for change in comparison.changes if change.outcome == outcome]
    return rows


def _change_row(change: Change) -> tuple[str, ...]:
    share = change.change
    return (
        LABELS[change.outcome],
        _name(change.case),
        change.metric,
        change.better,
        _amount(change.unit, change.old),
        _amount(change.unit, change.new),
        "" if share is None else f"{share:+.1%}",
        "counted" if change.noise is None else f"{change.noise:.1%}",
    )


def _amount(unit: str, value: float) -> str:
    if unit == "s":
        return duration(value)
    if unit in METRICS:
        return METRICS[unit].unit(value)
    return {"x": export.times_text(value), "share": f"{value:.0%}"}.get(unit, f"{value:g}")


def _name(case: Measured) -> str:
    name = f"{case.chapter}/{case.key} on {case.product}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def _other_cases(comparison: Comparison, every: bool) -> list[str]:
    """Return lines about the cases that are not in the table."""
    lines = []
    same = comparison.count("same")
    if same and not every:
        other = " other" if any(map(comparison.count, CHANGED)) else ""
        number = f"1{other} is" if same == 1 else f"{same}{other and ' others'} are"
        lines.append(f"{number} the same within the noise (--all)")
    lines += [f"not compared: {_name(case)}: {why}" for case, why in comparison.apart]
    lines += [f"only in OLD: {_name(case)}" for case in comparison.only_old]
    return lines + [f"only in NEW: {_name(case)}" for case in comparison.only_new]


def as_json(sides: tuple[Side, Side], comparison: Comparison, every: bool) -> list[str]:
    del every
    plain = {
        "schema": SCHEMA,
        "old": sides[0].description,
        "new": sides[1].description,
        "warnings": [warning for side in sides for warning in side.warnings],
        "counts": {outcome: comparison.count(outcome) for outcome in diff.ORDER},
        "verdicts": [
            {**_case(t.case), "old": t.old, "new": t.new, "outcome": t.outcome}
            for t in comparison.turned
        ],
        "metrics": [
            {**_case(c.case), **{name: getattr(c, name) for name in METRIC_FIELDS}}
            for c in comparison.changes
        ],
        "not_compared": [{**_case(case), "why": why} for case, why in comparison.apart],
        "only_old": [_case(case) for case in comparison.only_old],
        "only_new": [_case(case) for case in comparison.only_new],
    }
    return [json.dumps(plain, indent=1)]


METRIC_FIELDS = ("metric", "better", "unit", "old", "new", "change", "noise", "outcome")


def _case(case: Measured) -> dict[str, str]:
    return {"product": case.product, "chapter": case.chapter, "case": case.key}


Form = Callable[[tuple[Side, Side], Comparison, bool], list[str]]
FORMS: dict[str, Form] = {"text": text, "markdown": markdown, "json": as_json}
