"""`aisp results compare OLD NEW`: two runs, or two states of the stored results, metric by metric.

Each side is a folder of artifacts, a folder of stored results, or a git ref, which means the stored
results that were committed there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..results import diff, export, run_reader
from ..results.diff import Change, Comparison, Measured, Turned
from ..results.metric_limits import METRICS
from ..results.row import duration
from ..results.store import StoreError, parse
from ..util import git
from ..util.cli_result import CliError, CliResult, columns

FORMS = ("text", "markdown", "json")
BASELINES = "baselines"
PEAKS = "peaks.json"
"""Beside the stored results, and none of them."""
HEADS = ("", "case", "metric", "better", "old", "new", "change", "noise")
WORDS = {"worse": "WORSE", "better": "better", "same": ""}
CHANGED = diff.ORDER[:2]
"""The outcomes of which rows are printed without ``--all``."""
SCHEMA = 1
"""Version of the JSON."""


@dataclass(frozen=True)
class Side:
    """One side: what it is, in words, its cases, and what to know before its numbers are used."""

    words: str
    cases: Sequence[Measured]
    warnings: Sequence[str] = ()


def compare_result(
    old: str, new: str, *, form: str = "text", every: bool = False, root: Path
) -> CliResult:
    """Return what `aisp results compare` prints; 1 where something got worse beyond its noise.

    Args:
        old, new: folders, as seen from here, or git refs of the repository that `root` is in.
        form: one of `FORMS`.
        every: whether what is within its noise is listed, too; as JSON it always is.

    Raises:
        Unanswerable: where a side cannot be read, or there is nothing in common.
    """
    sides = read(old, root), read(new, root)
    found = diff.compare(sides[0].cases, sides[1].cases)
    if not found.changes and not found.turned:
        raise CliError(_nothing(*sides, found))
    write = {"text": _text, "markdown": _markdown}.get(form)
    lines = write(sides, found, every) if write else _json(sides, found)
    return CliResult(lines, 1 if found.count("worse") else 0)


def read(name: str, root: Path) -> Side:
    """Return the side that `name` means: a folder where there is one, else a git ref."""
    path = Path(name)
    if run_reader.folder_of(path).is_dir():
        folder = run_reader.folder_of(path)
        if any((folder / sign).exists() for sign in (run_reader.MANIFEST, run_reader.JOURNAL)):
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
    warnings = [f"{name}: no verdict of this run counts: {why}" for why in manifest["invalid"]]
    if not manifest["complete"]:
        warnings.append(f"{name}: the run did not come to its end; cases may be lacking")
    warnings += [f"{name}: {why}" for why in run.lost]
    words = f"the run {name} of {manifest['started']} on {manifest['machine']['name']}"
    return Side(words, tuple(diff.of_run(run.cases)), tuple(warnings))


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
            f"{name}: holds neither a run nor stored results\n"
            "A run writes one where it is asked to:\n    pytest --aisp-artifacts=DIR"
        )
    return Side(f"the stored results in {name}", _parsed(texts))


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
            "Results are stored on a quiet machine:\n    pytest --aisp-update-expectations"
        )
    return Side(f"the stored results at {name} ({commit[:12]})", _parsed(texts))


def _parsed(texts: Mapping[Path, str]) -> tuple[Measured, ...]:
    try:
        return tuple(
            case
            for path, text in texts.items()
            for case in diff.of_stored(parse(path, text), path.stem)
        )
    except StoreError as error:
        raise CliError(str(error)) from None


def _nothing(old: Side, new: Side, found: Comparison) -> str:
    """Return why two sides cannot be compared."""
    products = [sorted({case.product for case in side.cases}) for side in (old, new)]
    said = f"OLD is {old.words}; NEW is {new.words}"
    if found.apart:
        case, why = found.apart[0]
        return f"nothing to compare: {_name(case)} is {why}\n{said}"
    if all(products) and not set(products[0]) & set(products[1]):
        return (
            f"nothing to compare: OLD is of {', '.join(products[0])}, NEW of"
            f" {', '.join(products[1])}; times of different products say nothing of the code\n"
            f"{said}\nMeasure both on one product:\n    pytest --aisp-artifacts=DIR"
        )
    counts = f"{len(old.cases)} cases in OLD, {len(new.cases)} in NEW, none of them timed in both"
    way_out = "Run the same pages for both:\n    pytest --aisp-artifacts=DIR"
    return f"nothing to compare: {counts}\n{said}\n{way_out}"


# Words


def _text(sides: tuple[Side, Side], found: Comparison, every: bool) -> list[str]:
    rows = _rows(found, every)
    lines = [f"OLD is {sides[0].words}", f"NEW is {sides[1].words}"]
    lines += [f"warning: {warning}" for side in sides for warning in side.warnings]
    lines += ["", *(columns([HEADS, *rows]) if rows else []), *_rest(found, every)]
    return [*lines, "", _summary(found)]


def _markdown(sides: tuple[Side, Side], found: Comparison, every: bool) -> list[str]:
    lines = [f"**{_summary(found)}**", ""]
    lines += [f"OLD is {sides[0].words}; NEW is {sides[1].words}.", ""]
    lines += [f"- warning: {warning}" for side in sides for warning in side.warnings]
    if rows := _rows(found, every):
        marked = [(f"**{row[0]}**" if row[0].isupper() else row[0], *row[1:]) for row in rows]
        lines += ["", *export.table(HEADS, marked), ""]
    return lines + [f"- {line}" for line in _rest(found, every)]


def _summary(found: Comparison) -> str:
    worse, better, same = map(found.count, diff.ORDER)
    return f"{worse} worse, {better} better, {same} within the noise"


def _rows(found: Comparison, every: bool) -> list[tuple[str, ...]]:
    """Return the table: first what got worse; what is the same only with `every`."""
    rows = []
    for which in diff.ORDER if every else CHANGED:
        rows += [_turned(turned) for turned in found.turned if turned.outcome == which]
        rows += [_changed(change) for change in found.changes if change.outcome == which]
    return rows


def _turned(turned: Turned) -> tuple[str, ...]:
    word = WORDS[turned.outcome]
    return (word, _name(turned.case), "verdict", "", turned.old, turned.new, "", "")


def _changed(change: Change) -> tuple[str, ...]:
    share = change.change
    return (
        WORDS[change.outcome],
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


def _rest(found: Comparison, every: bool) -> list[str]:
    same, others = found.count("same"), any(map(found.count, CHANGED))
    one = "1 other is" if others else "1 is"
    are = one if same == 1 else f"{same} {'others ' * others}are"
    lines = [f"{are} the same within the noise (--all)"] * bool(same and not every)
    lines += [f"not compared: {_name(case)}: {why}" for case, why in found.apart]
    lines += [f"only in OLD: {_name(case)}" for case in found.only_old]
    return lines + [f"only in NEW: {_name(case)}" for case in found.only_new]


def _json(sides: tuple[Side, Side], found: Comparison) -> list[str]:
    plain = {
        "schema": SCHEMA,
        "old": sides[0].words,
        "new": sides[1].words,
        "warnings": [warning for side in sides for warning in side.warnings],
        "counts": {which: found.count(which) for which in diff.ORDER},
        "verdicts": [
            {**_case(t.case), "old": t.old, "new": t.new, "outcome": t.outcome}
            for t in found.turned
        ],
        "metrics": [_metric(change) for change in found.changes],
        "not_compared": [{**_case(case), "why": why} for case, why in found.apart],
        "only_old": _cases(found.only_old),
        "only_new": _cases(found.only_new),
    }
    return [json.dumps(plain, indent=1)]


def _metric(change: Change) -> dict[str, Any]:
    names = ("metric", "better", "unit", "old", "new", "change", "noise", "outcome")
    return {**_case(change.case), **{name: getattr(change, name) for name in names}}


def _case(case: Measured) -> dict[str, Any]:
    return {"product": case.product, "chapter": case.chapter, "case": case.key}


def _cases(cases: Iterable[Measured]) -> list[dict[str, Any]]:
    return [_case(case) for case in cases]
