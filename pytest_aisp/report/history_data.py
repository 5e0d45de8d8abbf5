"""The history of each case in a report, from other runs and from folders of histories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ..results import history
from ..results.case_history import CaseHistory, change_text, of_lines
from ..results.results_json import Speedup
from ..results.stats import INTERVAL
from ..util.cli_result import CliError
from .run import HistoryEntry, ReportRun

MOST = 100
"""The maximum number of history entries per case. The latest entries are kept."""
Past = dict[tuple[str, str], list[HistoryEntry]]
"""History entries, keyed by case id and product."""


def read_history(folders: Sequence[Path]) -> tuple[list[ReportRun], Past]:
    """Return the runs and the history entries in `folders`. Each folder is a run or a history.

    Raises:
        CliError: if a folder is not a run or a history, or if a history has invalid lines.
    """
    runs, past = list[ReportRun](), Past()
    for folder in folders:
        if not history.is_history(folder):
            runs.append(ReportRun.read(folder))
            continue
        try:
            files = history.read(folder)
        except OSError as error:
            raise CliError(f"{folder}: cannot be read: {error}") from None
        if problems := [problem for file in files for problem in file.all_problems]:
            raise CliError(
                f"{problems[0]}\nTo see all such lines:\n    aisp results history {folder}"
            )
        for file in files:
            for lines in file.by_case().values():
                past.setdefault((lines[-1].id, lines[-1].product), []).extend(
                    _entries(of_lines(lines))
                )
    return runs, past


def _entries(one: CaseHistory) -> list[HistoryEntry]:
    changes = {change.after.run: change_text(change) for change in one.changes}
    return [
        HistoryEntry(
            started=line.started,
            commit=line.commit[:10],
            speedup=Speedup(
                *(math.exp(line.value + n * line.error) for n in (0, -INTERVAL, INTERVAL))
            ),
            verdict=line.verdict,
            current=False,
            change=changes.get(line.run, ""),
        )
        for line in one.lines[-MOST:]
    ]


def merged(run: ReportRun, others: Sequence[ReportRun]) -> Past:
    """For each case, return the results of all runs and of the history, the oldest first.

    A run that is also in the history is shown once. Cases with a single result are left out.
    """
    found = Past()
    for each in [*others, run] if others or run.past else ():
        git = each.manifest.git
        started, commit = each.manifest.started, ((git and git.commit) or "")[:10]
        for case in each.cases:
            if case.speedup is not None:
                entry = HistoryEntry(started, commit, case.speedup, case.verdict, each is run)
                found.setdefault((case.id, case.product), []).append(entry)
    for key, entries in run.past.items():
        mine = found.setdefault(key, [])
        shown = {entry.started: entry for entry in mine}
        for entry in entries:
            if entry.started in shown:
                shown[entry.started].change = entry.change
            else:
                mine.append(entry)
    return {
        key: sorted(entries, key=lambda entry: entry.started)
        for key, entries in found.items()
        if len(entries) > 1
    }
