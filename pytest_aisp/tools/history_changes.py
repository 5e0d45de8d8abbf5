"""`aisp results history`: add runs to a history, and list changes in each case's speedup."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from ..results import history, run_reader
from ..results.case_history import CaseHistory, Change, change_text, of_lines
from ..results.change_points import LEAST
from ..results.history import HistoryLine
from ..results.messages import Json
from ..results.row import ratio
from ..util.cli_result import CliError, CliResult

MODES = ("measure", "record")
"""A run must have one of these modes to be added to a history."""
SCHEMA = 1
"""The version of the JSON format."""


def add_result(runs: Sequence[Path], folder: Path) -> CliResult:
    """Add the `runs` to the history in `folder`. The exit code is 1 if a line cannot be used.

    Raises:
        CliError: if a run cannot be read or is refused, or if the history cannot be written.
    """
    if (folder / run_reader.MANIFEST).exists():
        raise CliError(
            f"{folder}: is a run, not a history\nThe history comes last:\n"
            "    aisp results history --add RUN HISTORY"
        )
    read = [(run, *_read_run(run)) for run in runs]
    lines, problems = [], dict[str, None]()
    for run, found, warnings in read:
        try:
            done = history.add(folder, found)
        except OSError as error:
            raise CliError(
                f"{folder}: cannot be written: {error}\n"
                "Free space or make it writable, then run the same command again."
            ) from None
        there = f", {done.known} were there" if done.known else ""
        lines += [*warnings, f"{run}: {done.new} cases added to {folder}{there}"]
        lines += [f"repaired: {text}" for text in done.repaired]
        problems |= dict.fromkeys(done.problems)
    return CliResult([*lines, *(f"not used: {text}" for text in problems)], 1 if problems else 0)


def _read_run(folder: Path) -> tuple[list[HistoryLine], list[str]]:
    """Return a run's lines for the history, and warnings about missing data."""
    try:
        run = run_reader.load(folder)
        lines = list(history.lines_of(run))
    except run_reader.RunError as error:
        raise CliError(f"{error}\nNothing was added.") from None
    manifest = run.manifest
    if manifest.mode not in MODES:
        raise CliError(f"{folder}: is a run in the mode {manifest.mode}, which has no new speedups")
    if wrong := [canary.wrong for canary in run.canaries if canary.wrong]:
        raise CliError(f"{folder}: its speedups are invalid: canary: {wrong[0]}\nMeasure again.")
    if not lines:
        raise CliError(f"{folder}: no case was timed, so there is nothing to add")
    warnings = [f"{folder}: {why}" for why in run.lost]
    if not manifest.complete:
        warnings.append(f"{folder}: the run did not finish; cases may be missing")
    return lines, warnings


def history_result(folder: Path, *, case: str = "", as_json: bool = False) -> CliResult:
    """Return a line for each case, and a line for each change in its speedup.

    If the code gate can confirm a change, the last line is the command for it.

    The exit code is 1 if lines cannot be used, or if the last change of a case is a slowdown that
    the code gate confirmed.

    Args:
        case: a string. Only cases whose id, product or chapter contains it are listed.

    Raises:
        CliError: if the folder has no readable history, or no case contains the string.
    """
    cases, problems = read(folder)
    if not cases and not problems:
        raise CliError(
            f"{folder}: has no history\nAdd a run to it:\n"
            f"    aisp results history --add RUN {shlex.quote(str(folder))}"
        )
    shown = [one for one in cases if case in name_of(one)]
    if cases and not shown:
        raise CliError(f"{folder}: none of its {len(cases)} cases contains {case!r}")
    code = 1 if problems or any(one.is_lost for one in shown) else 0
    if as_json:
        plain = {"schema": SCHEMA, "cases": list(map(_plain, shown)), "problems": problems}
        return CliResult([json.dumps(plain, indent=1)], code)
    lines = [f"not used: {problem}" for problem in problems]
    for one in shown:
        lines += [_case_line(one), *(f"    {_change_line(change)}" for change in one.changes)]
    if to_confirm := unconfirmed(shown):
        products = ", ".join(sorted({change.after.product for change in to_confirm}))
        lines += [f"The code gate can confirm a change on {products}:"]
        lines += [f"    aisp results history {shlex.quote(str(folder))} --confirm"]
    return CliResult(lines, code)


def unconfirmed(cases: Sequence[CaseHistory]) -> list[Change]:
    """Return the changes that the code gate can confirm, and has not compared yet."""
    changes = [change for one in cases for change in one.changes]
    return [change for change in changes if change.state == "unconfirmed" and change.command]


def read(folder: Path) -> tuple[list[CaseHistory], list[str]]:
    """Return the cases of a history, and messages about lines that cannot be used.

    Raises:
        CliError: if the folder or a file cannot be read.
    """
    if not folder.is_dir():
        raise CliError(f"{folder}: there is no such folder")
    try:
        files = history.read(folder)
    except OSError as error:
        raise CliError(f"{folder}: cannot be read: {error}") from None
    found = [of_lines(lines) for file in files for lines in file.by_case().values()]
    return found, [problem for file in files for problem in file.all_problems]


def name_of(one: CaseHistory) -> str:
    last = one.lines[-1]
    return f"{last.product} {last.chapter}/{last.case}"


def _case_line(one: CaseHistory) -> str:
    count, changes = len(one.lines), sum(change.is_certain for change in one.changes)
    open_ = len(one.changes) - changes
    runs = "1 run" if count == 1 else f"{count} runs"
    if count < 2 * LEAST:
        found = f"too few runs for changes, which need {2 * LEAST}"
    else:
        found = {0: "no change", 1: "1 change"}.get(changes, f"{changes} changes")
        found += f", {open_} unconfirmed" if open_ else ""
    first, last = (one.lines[n].started[:10] for n in (0, -1))
    dates = first if first == last else f"{first} to {last}"
    return f"{name_of(one)}: {ratio(one.level)}, {runs}, {dates}, {found}"


def _change_line(change: Change) -> str:
    hopeless = change.state == "unconfirmed" and not change.command
    return change_text(change) + (NO_COMMITS if hopeless else "")


NO_COMMITS = ", because the commits of both runs are not known, equal, or not clean"


def _plain(one: CaseHistory) -> dict[str, Json]:
    last = one.lines[-1]
    runs = [
        {
            "started": line.started,
            "commit": line.commit,
            "speedup": math.exp(line.value),
            "error": line.error,
            "verdict": line.verdict,
        }
        for line in one.lines
    ]
    changes = [
        {
            "started": change.after.started,
            "commit": change.after.commit,
            "before": change.before.commit,
            "old": math.exp(change.old),
            "new": math.exp(change.old + change.size),
            "change": math.expm1(change.size),
            "low": math.expm1(change.low),
            "high": math.expm1(change.high),
            "differences": list(change.differences),
            "sides": list(change.sides),
            "state": change.state,
            "code_gate": math.exp(change.gate.effect) if change.gate else None,
            "command": change.command,
        }
        for change in one.changes
    ]
    names = {"product": last.product, "chapter": last.chapter, "case": last.case, "id": last.id}
    return {**names, "speedup": math.exp(one.level), "runs": runs, "changes": changes}
