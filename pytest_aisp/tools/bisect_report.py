"""The report of a search as text: commits, losses, and differences in source code and SASS."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from ..util.git import run_git, try_git
from .commit_runs import SideChange
from .commits import Commit, Version


class Finding(Struct):
    """Two versions of a case, between which a side became slower.

    Attributes:
        before, after: the indices of the two versions. No version between them can be measured.
        change: the side at `after` compared with `before`, or None if the search is undecided.
        why: the reason why the search is undecided.
    """

    before: int
    after: int
    change: SideChange | None = None
    why: str = ""


SassDiff = Callable[[str, Commit, str], list[str]]
"""A function that returns a SASS diff, given a side's role, a commit and an older commit."""


def loss_text(change: SideChange) -> str:
    """Return the loss with its 99 % interval, such as ``a loss of 4.8 % (4.6 % to 5.0 %)``."""
    low, high = change.interval()
    value, least, most = (f"{-math.expm1(x):.2%}" for x in (change.value, high, low))
    return f"a loss of {value} (99 % interval {least} to {most})"


def finding_lines(
    finding: Finding, role: str, name: str, versions: Sequence[Version], root: Path, sass: SassDiff
) -> Iterator[str]:
    """Yield the lines about one place where a side became slower, with the diff of its code.

    Args:
        role, name: the role of the side, and the name of its function.
        root: the root of the pages.
    """
    before, after = versions[finding.before], versions[finding.after]
    inner = [version.commit for version in versions[finding.before + 1 : finding.after]]
    yield ""
    if finding.change is None:
        yield f"{name}: undecided between {before.commit.short} and {after.commit.short}:"
        yield f"    {finding.why}"
        yield from (f"    {commit}" for commit in (*inner, after.commit))
        yield "The same command measures again and continues."
        return
    one = (
        "this commit" if not inner else "one of these commits, of which only the last was measured"
    )
    yield f"{name}: {loss_text(finding.change)} in {one}:"
    yield from (f"    {commit}" for commit in (*inner, after.commit))
    parent = before.commit.sha if inner else after.commit.parents[0]
    if after.commit.is_merge:
        branch = after.commit.parents[1]
        base = try_git(root, "merge-base", parent, branch) or parent
        yield f"To search its branch: --good={base[:8]} --bad={branch[:8]}"
    names = before.files.keys() | after.files.keys()
    changed = sorted(n for n in names if before.files.get(n) != after.files.get(n))
    words = ("diff", "--relative", "--find-renames", parent, after.commit.sha, "--")
    diff = run_git(root, *words, *changed)
    yield from diff.decode(errors="replace").splitlines()
    first, *rest = sass(role, after.commit, parent)
    yield from ("", f"SASS of {name}: {first}") if not rest else ("", f"SASS of {name}:", first)
    yield from rest
