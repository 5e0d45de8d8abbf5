"""`aisp results history --confirm`: run the code gate over the two commits of a change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..results import history
from ..results.case_history import HASH, Change
from ..results.history import HistoryLine
from ..results.models import base_of
from ..results.run_reader import RecordedRun, RunError
from ..util.cli_result import CliError, with_progress
from ..util.device import Machine
from ..util.git import GitError
from . import catalog
from .commit_runs import CommitRuns
from .commits import find_commit, worktree
from .history_changes import name_of, read, unconfirmed

Say = Callable[[str], None]


def confirm(folder: Path, case: str, *, tell: Say, say: Say) -> int:
    """Measure the commits of each unconfirmed change, and add the runs to the history.

    Changes on another product than this machine's are left out.

    Args:
        case: a string. Only changes of cases whose id, product or chapter contains it are measured.
        tell: a function that shows the current step.
        say: prints a line about each change that could not be measured.

    Returns:
        the number of changes that could not be measured.

    Raises:
        CliError: if the history cannot be read, or if pytest cannot collect the pages.
    """
    here = Machine.here().product
    changes = unconfirmed([one for one in read(folder)[0] if case in name_of(one)])
    changes = [change for change in changes if base_of(change.after.product) == here]
    if not changes:
        return 0
    pages = catalog.collect((), tell=tell)
    failed = 0
    for number, change in enumerate(changes):
        tell(with_progress("run the code gate", number, len(changes)))
        try:
            problem = _compare(folder, change, pages)
        except (CliError, GitError, RunError, OSError) as error:
            problem = str(error)
        if problem:
            commits = " and ".join(line.commit[:HASH] for line in (change.before, change.after))
            say(f"{change.after.id}: {commits} were not compared: {problem}")
            failed += 1
    return failed


def _compare(folder: Path, change: Change, pages: catalog.Catalog) -> str:
    """Compare the two commits of a change. Return the reason if there is no result."""
    before, after = change.before, change.after
    old, new = (find_commit(pages.root, line.commit, line.commit) for line in (before, after))
    page, _, case = after.id.partition("::")
    names = {old.sha: before.id.partition("::")[0], new.sha: page}
    lines: list[HistoryLine] = []

    def use(run: RecordedRun) -> None:
        lines.extend(history.lines_of(run))

    with worktree(pages.root, new) as tree:
        runs = CommitRuns(pages, tree, case, names)
        runs.require_case(new)
        found = runs.measure(new, old, use)
    if found.unclear or found.broken:
        return found.unclear or found.broken
    if found.product != after.product:
        return f"here it runs on {found.product}, not on {after.product}"
    if history.code_gate_between(lines, before, after) is None:
        return "the code gate sees no changed side"
    history.add(folder, lines)
    return ""
