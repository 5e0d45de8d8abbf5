"""The stored result of a case, and the version of the code that gave this result."""

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
from ..results.verdict import Cause
from ..util.git import GitSnapshot, SnapshotError
from .run_context import RunContext


@dataclass(frozen=True)
class Differences:
    """Differences, apart from the optimized side's code, that may explain a loss.

    Attributes:
        environment: a text for each fact of the environment that differs.
        other_baseline: whether the baseline is not the one that was stored.
        tuned: a text for each kernel that is tuned differently.
    """

    environment: Sequence[str] = ()
    other_baseline: bool = False
    tuned: Sequence[str] = ()

    @property
    def same_environment(self) -> bool:
        """Whether environment and baseline are those of the stored result."""
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
    """

    run: RunContext
    path: Path
    key: str
    case: Case

    @property
    def result(self) -> models.Result | None:
        """The case's stored result, or None."""
        return self.run.stored(self.path).results.get(self.key)

    @cached_property
    def text_sources(self) -> dict[str, str]:
        """Today's digests of text of both sides, if the stored result has such digests."""
        mine, root = self.result, str(self.run.settings.root)
        if mine is None or not mine.has_text_digests:
            return {}
        sides = self.case.pair.baseline, self.case.variant.side
        return {r: text_digest(side, root) for r, side in zip(models.ROLES, sides, strict=True)}

    def files(self, page: Path) -> dict[str, str]:
        """Return the git blobs of the page and of the files that both sides use."""
        sides, root = (self.case.pair.baseline, self.case.variant.side), str(self.run.settings.root)
        used = used_files(page, root, import_folders(root))
        return source_files(sides, page, root) | {n: git_blob(path) for n, path in used.items()}

    @cached_property
    def has_recorded_code(self) -> bool:
        """Whether every file that the stored result names is unchanged."""
        mine, root = self.result, self.run.settings.root
        files = mine.files.items() if mine is not None else ()
        return bool(files) and all(is_blob(root / name, blob) for name, blob in files)

    def recorded_tree(self, page: Path, sources: Mapping[str, str]) -> GitSnapshot | None:
        """Return the source tree with the recorded code, or None if its files are unchanged.

        Args:
            sources: today's digests of both sides.

        Raises:
            GitError: the recorded code cannot be found.
        """
        mine = self.result
        if mine is None or mine.value is None or self.has_recorded_code:
            return None
        if not mine.files:
            if mine.with_syntax(sources, self.text_sources).sources == sources:
                return None
            raise SnapshotError("the stored result does not name its files; record it again")
        return self.run.recorded_tree(mine.files, page, f"in {self.relative()}")

    def spread(self, clock: str) -> float:
        """Return the spread of one process's value: recorded, pooled, or a default."""
        others = models.pooled(list(self.run.stored(self.path).results.values()), clock)
        mine = self.result
        own = mine.own_spread if mine is not None and mine.clock == clock else None
        if own is not None and mine is not None:
            return stats.pooled_spread(own, mine.processes, others)
        return stats.rms(others) if len(others) >= 3 else verdict.DEFAULT_SPREAD[clock]

    def session_spread(self, clock: str) -> float:
        """Return the spread of this case from session to session on this product and clock."""
        return models.session_sd(self.run.stored(self.path).results.values(), clock, self.result)

    def differences(
        self,
        mine: models.Result,
        environment: Mapping[str, Json],
        sources: Mapping[str, str],
        clock: str,
        choices: Choices | None = None,
    ) -> Differences:
        """Return the differences from `mine` that may explain a loss, apart from changed code.

        Args:
            choices: today's choices of tuned kernels, if they are known.
        """
        then = self.run.stored(self.path).environments.get(mine.environments[-1], {})
        names = models.differences(then, environment, clock, several=self.case.gpus > 1)
        facts = [f"{n} was {then.get(n)} when stored, and is {environment.get(n)}" for n in names]
        known = mine.with_syntax(sources, self.text_sources).sources
        tuned = differing_choices(mine.choices, choices or {})
        return Differences(facts, known["baseline"] != sources["baseline"], tuned)

    def cause(self, found: Differences) -> Cause:
        """Return the cause of a loss against this result, as far as the differences show it."""
        if found.tuned:
            return "tuner"
        if found.environment:
            return "environment"
        if found.other_baseline:
            return "code"
        return "machine" if self.has_recorded_code else ""

    def relative(self, path: Path | None = None) -> str:
        """Return `path` relative to the root. By default, it is the file of stored results."""
        return path_below(str(path or self.path), str(self.run.settings.root))
