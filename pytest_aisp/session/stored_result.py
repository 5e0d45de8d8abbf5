"""The stored result that a case is held against, and the spreads of its chapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..page.pair import Case
from ..results import models, stats, verdict
from ..results.export import path_below
from .run_context import RunContext


@dataclass
class StoredResult:
    """The stored result of a case, among those of its chapter.

    Attributes:
        path: the chapter's file of this product.
        key: the case's name in it.
    """

    run: RunContext
    path: Path
    key: str
    case: Case

    @property
    def result(self) -> models.Result | None:
        """The case's stored result."""
        return self.run.stored(self.path).results.get(self.key)

    def spread(self, clock: str) -> float:
        """Return the spread of one process's value: recorded, pooled, or the clock's default."""
        others = models.pooled(list(self.run.stored(self.path).results.values()), clock)
        mine = self.result
        own = mine.own_spread if mine is not None and mine.clock == clock else None
        if own is not None and mine is not None:
            return stats.pooled_spread(own, mine.processes, others)
        return stats.rms(others) if len(others) >= 3 else verdict.DEFAULT_SPREAD[clock]

    def session_spread(self, clock: str) -> float:
        """Return the spread from session to session of this product and clock."""
        return models.session_sd(self.run.stored(self.path).results.values(), clock)

    def environment_differences(
        self,
        mine: models.Result,
        environment: Mapping[str, Any],
        sources: Mapping[str, str],
        clock: str,
    ) -> list[str]:
        """Return the reasons for which a loss against `mine` need not be the code's fault."""
        then = self.run.stored(self.path).environments.get(mine.environments[-1], {})
        names = models.differences(then, environment, clock, several=self.case.gpus > 1)
        found = [f"{n} was {then.get(n)} when stored, and is {environment.get(n)}" for n in names]
        if mine.sources.get("baseline") != sources["baseline"]:
            found.append("the baseline is not the one that was stored")
        return found

    def relative(self, path: Path | None = None) -> str:
        """Return `path`, or that of the stored results, relative to the root."""
        return path_below(str(path or self.path), str(self.run.settings.root))
