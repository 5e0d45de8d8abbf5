"""The stored result of a case, and the version of the code that was measured for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..kernels.capture_launches import Choices, differing_choices
from ..page.imports import import_folders, used_files
from ..page.pair import Case
from ..page.sources import git_blob, is_blob, source_files, text_digest
from ..results import models, stats, verdict
from ..results.export import path_below
from ..results.messages import Json
from ..results.verdict import NOT_KNOWN, Cause
from ..util.git import GitSnapshot, SnapshotError, not_ignored
from .run_context import RunContext

SHOWN_FILES = 3
"""The number of files that a remark names."""


@dataclass(frozen=True)
class Differences:
    """Differences from a stored result that may explain a slowdown.

    The optimized side's code is compared elsewhere.

    Attributes:
        environment: a message for each fact of the environment that differs.
        other_baseline: whether the baseline's code differs.
        tuned: a message for each kernel whose tuner now makes other choices.
    """

    environment: Sequence[str] = ()
    other_baseline: bool = False
    tuned: Sequence[str] = ()

    @property
    def same_environment(self) -> bool:
        """Whether the environment and the baseline match the stored result."""
        return not self.environment and not self.other_baseline

    def lines(self) -> list[str]:
        """Return all differences as texts."""
        baseline = ["the baseline is not the one that was stored"] * self.other_baseline
        return [*self.environment, *baseline, *self.tuned]


@dataclass
class StoredResult:
    """The stored result of a case, together with the other stored results of its chapter.

    Attributes:
        path: the file with the chapter's results for this product.
        key: the case's key in that file.
        opened, lent: files that the page opened and whose names are not in its code, as
            `task_results.CheckResult` has them.
    """

    run: RunContext
    path: Path
    key: str
    case: Case
    opened: Sequence[str] = ()
    lent: Sequence[str] = ()

    @property
    def result(self) -> models.Result | None:
        """The case's stored result, or None."""
        return self.run.stored(self.path).results.get(self.key)

    @cached_property
    def text_sources(self) -> dict[str, str]:
        """The current text digest of each side by role. Empty if the stored result has none."""
        mine, root = self.result, str(self.run.settings.root)
        if mine is None or not mine.has_text_digests:
            return {}
        sides = self.case.pair.baseline, self.case.variant.side
        return {r: text_digest(side, root) for r, side in zip(models.ROLES, sides, strict=True)}

    def files(self, page: Path) -> dict[str, str]:
        """Return the git blob hashes of the page and of the files that it uses, keyed by path.

        Files that git ignores are output or caches, so they are left out if the code does not
        name them.
        """
        sides, root = (self.case.pair.baseline, self.case.variant.side), self.run.settings.root
        used = used_files(page, str(root), import_folders(str(root)))
        used |= {name: root / name for name in not_ignored(root, [*self.opened, *self.lent])}
        blobs = {name: git_blob(path) for name, path in used.items() if path.is_file()}
        return source_files(sides, page, str(root)) | blobs

    @cached_property
    def unlisted(self) -> list[str]:
        """The files that the page opened, but that the stored result does not list."""
        listed = self.result.files if self.result is not None else {}
        return not_ignored(self.run.settings.root, [n for n in self.opened if n not in listed])

    def unlisted_remark(self) -> list[str]:
        """Return a remark about `unlisted` files, if there are any."""
        if self.result is None or self.result.value is None or not self.unlisted:
            return []
        names = ", ".join(self.unlisted[:SHOWN_FILES])
        more = len(self.unlisted) - SHOWN_FILES
        names += f" and {more} more" if more > 0 else ""
        return [
            f"the page opens {names}, not listed in {self.relative()}: whether the case has changed"
            f" there {NOT_KNOWN}; record it again"
        ]

    @cached_property
    def has_listed_files(self) -> bool:
        """Whether all files that the stored result lists are unchanged."""
        mine, root = self.result, self.run.settings.root
        files = mine.files.items() if mine is not None else ()
        return bool(files) and all(is_blob(root / name, blob) for name, blob in files)

    @property
    def has_recorded_code(self) -> bool:
        """Whether all files that the case uses are listed in the stored result and unchanged."""
        return self.has_listed_files and not self.unlisted

    def recorded_tree(self, page: Path, sources: Mapping[str, str]) -> GitSnapshot | None:
        """Return a source tree with the recorded code, or None if the code has not changed.

        Args:
            sources: the current digest of each side's code, keyed by role.

        Raises:
            GitError: the recorded code cannot be found.
        """
        mine = self.result
        if mine is None or mine.value is None or self.has_listed_files:
            return None
        if not mine.files:
            if mine.with_syntax(sources, self.text_sources).sources == sources:
                return None
            raise SnapshotError("the stored result does not name its files; record it again")
        return self.run.recorded_tree(mine.files, page, f"in {self.relative()}")

    def spread(self, clock: str) -> float:
        """Return the spread of one process's value.

        The spread is estimated from this result and the other results of its chapter. If there are
        too few results, the spread is the clock's default.
        """
        others = models.pooled(list(self.run.stored(self.path).results.values()), clock)
        mine = self.result
        own = mine.own_spread if mine is not None and mine.clock == clock else None
        if own is not None and mine is not None:
            return stats.pooled_spread(own, mine.processes, others)
        known = len(others) >= 3
        return max(stats.FLOOR, stats.rms(others)) if known else verdict.DEFAULT_SPREAD[clock]

    def session_spread(self, clock: str) -> float:
        """Return the spread of this case's value from session to session on a clock."""
        return models.session_sd(self.run.stored(self.path).results.values(), clock, self.result)

    def differences(
        self,
        mine: models.Result,
        environment: Mapping[str, Json],
        sources: Mapping[str, str],
        clock: str,
        choices: Choices | None = None,
    ) -> Differences:
        """Return the differences from the stored result `mine` that may explain a slowdown.

        Args:
            sources: the current digest of each side's code, keyed by role.
            choices: the tuner's current choice for each kernel, if known.
        """
        then = self.run.stored(self.path).environments.get(mine.environments[-1], {})
        names = models.differences(then, environment, clock, several=self.case.gpus > 1)
        facts = [f"{n} was {then.get(n)} when stored, and is {environment.get(n)}" for n in names]
        known = mine.with_syntax(sources, self.text_sources).sources
        tuned = differing_choices(mine.choices, choices or {})
        return Differences(facts, known["baseline"] != sources["baseline"], tuned)

    def cause(self, found: Differences) -> Cause:
        """Return the likely cause of a slowdown, or an empty string if `found` does not show it."""
        if found.tuned:
            return "tuner"
        if found.environment:
            return "environment"
        if found.other_baseline:
            return "code"
        return "machine" if self.has_recorded_code else ""

    def relative(self, path: Path | None = None) -> str:
        """Return `path` relative to the root. It defaults to the file of stored results."""
        return path_below(str(path or self.path), str(self.run.settings.root))
