"""Find the commits that made a case slower.

The code gate compares each commit with the good one, by timing both versions in one process. The
search divides every range of commits whose ends differ by more than the noise. So if several
commits cause a loss, the search finds all these commits. Finally, each of these commits is compared
with the version just before it.

All measurements are kept in the git folder until the search ends. The keys are hashes of the
compared code, so an interrupted search can continue even after the history was rewritten.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from ..results.row import bare, ratio
from ..results.run_reader import replace
from ..results.verdict import VOTE
from ..util.cli_result import CliError, CliResult
from ..util.git import GitError, run_git
from . import catalog
from .bisect_report import Finding, SassDiff, finding_lines, loss_text
from .commit_runs import CommitRuns, Measurement
from .commits import Commit, Version, commits_between, page_names, versions, worktree
from .stored_results import listed_files

Say = Callable[[str], None]
Measure = Callable[[Commit, Commit], Measurement]


class Unclear(Exception):
    """A measurement was invalid twice in a row. The message says why."""


class NoLoss(CliError):
    """The case is not slower at the bad commit."""


class SearchState(Struct):
    """The state of a search, which is kept in a file until the search ends.

    Attributes:
        case: the case's id.
        product, arch: the product name and the arch of the machine.
        measured: the measurements, keyed by the code hashes of two versions.
    """

    case: str
    product: str = ""
    arch: str = ""
    measured: dict[str, Measurement] = {}


@dataclass
class Bisection:
    """A search for the versions that made a case slower.

    Attributes:
        versions: the good version, and all later versions up to the bad one.
        measure: a function that compares one commit with an older one.
        state: the finished measurements.
        save: a function that stores `state`.
        say: a function that prints a line about each measurement.
    """

    versions: Sequence[Version]
    measure: Measure
    state: SearchState
    save: Callable[[], None]
    say: Say
    runs: int = 0

    def compared(self, index: int, before: int = 0, *, again: bool = False) -> Measurement:
        """Return the comparison of version `index` with version `before`.

        Return a kept measurement if there is one. If not, measure the versions now.

        Args:
            again: True to measure once more and combine the kept and the new measurement.

        Raises:
            Unclear: the measurement was invalid twice in a row.
            CliError: the kept measurements come from another product.
        """
        new, old = self.versions[index], self.versions[before]
        if new.code == old.code:
            return Measurement()
        key = f"{old.code}..{new.code}"
        known = self.state.measured.get(key)
        if known is not None and not again:
            return known
        found = self._measure_twice(new.commit, old.commit)
        if found.product and self.state.product and found.product != self.state.product:
            raise CliError(
                f"the measurements so far are of {self.state.product}; this is {found.product}\n"
                "Continue there, or remove the file that is named above"
            )
        if known is not None:
            for role, side in found.sides.items():
                if role in known.sides:
                    found.sides[role] = known.sides[role].merged(side)
        self.state.product = found.product or self.state.product
        self.state.arch = found.arch or self.state.arch
        self.state.measured[key] = found
        self.save()
        than = f", against {old.commit.short}" if before else ""
        self.say(f"{new.commit}{than}: {_summary(found)}")
        return found

    def _measure_twice(self, commit: Commit, against: Commit) -> Measurement:
        for _ in range(2):
            self.runs += 1
            found = self.measure(commit, against)
            if not found.unclear:
                return found
            self.say(f"{commit}: measured without a result: {found.unclear}")
        raise Unclear(f"{commit.short} was measured twice without a result: {found.unclear}")

    def slower_sides(self) -> list[str]:
        """Return the roles of the sides that are slower at the bad version.

        Raises:
            NoLoss: no side is slower.
            CliError: the bad version cannot be measured.
        """
        last = len(self.versions) - 1
        bad = self.versions[last].commit
        try:
            found = self.compared(last)
            if not _slower(found) and not found.broken:
                found = self.compared(last, again=True)
        except Unclear as error:
            raise CliError(str(error)) from None
        if found.broken:
            raise CliError(f"{bad.short} cannot be measured: {found.broken}")
        if not _slower(found):
            good = self.versions[0].commit
            raise NoLoss(
                f"there is nothing to search: between {good.short} and {bad.short}, the code gate"
                f" sees no loss: {_summary(found)}"
            )
        return _slower(found)

    def losses(self, role: str, before: int, after: int) -> Iterator[Finding]:
        """Yield each place between the versions `before` and `after` where a side became slower."""
        inner = [i for i in range(before + 1, after) if not self._is_broken(i)]
        if not inner:
            yield self._last(role, before, after)
            return
        middle = inner[len(inner) // 2]
        try:
            if self.compared(middle).broken:
                halves = [(before, after)]
            else:
                halves = self._slower_halves(role, before, middle, after)
            if not halves:
                self.compared(middle, again=True)
                halves = self._slower_halves(role, before, middle, after)
        except Unclear as error:
            yield Finding(before, after, why=str(error))
            return
        if not halves:
            why = f"at {self.versions[middle].commit.short}, the noise is too large to divide it"
            yield Finding(before, after, why=why)
        for half in halves:
            yield from self.losses(role, *half)

    def _is_broken(self, index: int) -> bool:
        """Return whether an earlier attempt showed that a version cannot be measured."""
        known = self.state.measured.get(f"{self.versions[0].code}..{self.versions[index].code}")
        return known is not None and bool(known.broken)

    def _slower_halves(self, role: str, *points: int) -> list[tuple[int, int]]:
        """Return the ranges in which a side becomes slower by more than the noise.

        Args:
            points: the indices of three versions, which bound two adjacent ranges.
        """
        sides = [self.compared(point).sides.get(role) for point in points]
        values = [side.value if side else 0.0 for side in sides]
        errors = [side.error if side else 0.0 for side in sides]
        return [
            (points[i], points[i + 1])
            for i in range(2)
            if values[i] - values[i + 1] > VOTE * math.hypot(errors[i], errors[i + 1])
        ]

    def _last(self, role: str, before: int, after: int) -> Finding:
        """Compare two versions directly. No version between them can be measured."""
        try:
            found = self.compared(after, before)
            if role not in _slower(found):
                found = self.compared(after, before, again=True)
        except Unclear as error:
            return Finding(before, after, why=str(error))
        if role in _slower(found):
            return Finding(before, after, found.sides[role])
        return Finding(before, after, why=f"compared with each other: {_summary(found)}")


def _slower(found: Measurement) -> list[str]:
    return [role for role, side in found.sides.items() if side.outcome == "red"]


def _summary(found: Measurement) -> str:
    """Return a string with the speedup of each changed side, such as ``doubled 0.952x``."""
    if found.broken:
        return f"skipped, it cannot be measured: {found.broken}"
    texts = []
    for side in found.sides.values():
        low, high = side.interval()
        texts.append(f"{side.name} {ratio(side.value)} [{bare(low)}, {bare(high)}]")
    return ", ".join(texts) or "neither side differs"


def bisect_result(case: str, good: str, bad: str, *, tell: Say, say: Say) -> CliResult:
    """Search between `good` and `bad` for the commits that made `case` slower.

    The exit code is 1 if the search is undecided.

    Args:
        case: a pytest id, relative to the working directory.
        tell: a function that shows the current step.
        say: prints a line about each measurement.

    Raises:
        CliError: the search cannot begin, or the user interrupted it.
    """
    path, colons, name = case.partition("::")
    if not colons:
        raise CliError(
            f"{case} is no case; list those of a page:\n    pytest --collect-only -q {case}"
        )
    first, line = commits_between(Path.cwd(), good, bad)
    pages = catalog.collect((), tell=tell)
    page = Path(os.path.relpath(path, pages.root)).as_posix()
    file = _file(pages.root, f"{page}::{name}")
    state = _read(file, f"{page}::{name}")
    if state.measured:
        say(f"continue with {len(state.measured)} measurements of an interrupted search: {file}")
    try:
        with worktree(pages.root, first) as tree:
            names = page_names(tree.root, page, [first, *line])
            runs = CommitRuns(pages, tree, name, names)
            tell("collect the case at the good commit")
            at_good = runs.require_case(first)
            opened = listed_files(pages.baselines).get(page, ())
            found = versions(tree, names, pages.imports, [first, *line], tell, opened)
            say(f"{len(line)} commits, {len(found) - 1} of them change files of the case")

            def save() -> None:
                replace(file, msgspec.json.encode(state))

            bisection = Bisection(found, runs.measure, state, save, say)

            def sass(role: str, commit: Commit, against: str) -> list[str]:
                tell("compare the SASS")
                return runs.sass_diff(at_good, role, commit, against, state.arch)

            result = CliResult(*_search(bisection, pages.root, sass))
    except KeyboardInterrupt:
        raise CliError(
            f"interrupted; {len(state.measured)} measurements are kept in {file}\n"
            "The same command continues the search"
        ) from None
    except NoLoss:
        file.unlink(missing_ok=True)
        raise
    except GitError as error:
        raise CliError(f"git failed: {error}") from None
    if not result.code:
        file.unlink(missing_ok=True)
    return result


def _file(root: Path, case: str) -> Path:
    """Return the file in the git folder that keeps the measurements of a case."""
    folder = run_git(root, "rev-parse", "--git-path", "aisp-bisect").decode().strip()
    name = hashlib.sha256(case.encode()).hexdigest()[:12]
    return (root / folder / f"{name}.json").resolve()


def _read(file: Path, case: str) -> SearchState:
    """Return the saved state of a search, without the measurements that failed."""
    if not file.exists():
        return SearchState(case)
    try:
        state = msgspec.json.decode(file.read_bytes(), type=SearchState)
    except (OSError, ValueError) as error:
        raise CliError(
            f"{file}: the measurements cannot be read: {error}\nTo begin again:\n    rm {file}"
        ) from None
    state.measured = {key: each for key, each in state.measured.items() if not each.broken}
    return state


def _search(bisection: Bisection, root: Path, sass: SassDiff) -> tuple[list[str], int]:
    """Search all slower sides. Return the lines of the report, and the exit code."""
    versions, last = bisection.versions, len(bisection.versions) - 1
    if not last:
        raise NoLoss("there is nothing to search: no commit changes a file that the case uses")
    lines, undecided = [], False
    for role in bisection.slower_sides():
        whole = bisection.compared(last).sides[role]
        lines.append(f"{whole.name}: {loss_text(whole)} in all")
        for finding in bisection.losses(role, 0, last):
            undecided |= finding.change is None
            lines += finding_lines(finding, role, whole.name, versions, root, sass)
    lines += ["", f"{bisection.runs} runs of pytest"]
    return lines, int(undecided)
