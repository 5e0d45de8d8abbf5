"""What a task asks for, as the page says it: the pair, its two sides, the sizes, what they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from ..kernels.standin import interpreting
from ..pages.pair import Pair, Precision, Side, is_plain
from ..results.messages import Task
from .loader import MixedTreesError, leads_to, load_page, load_past, pair_of
from .nodes import ROLES

Declared: TypeAlias = tuple[Side, Precision | None]
"""A side and the lower precision that it declares."""
FIXED_SIZES = 3
"""Most of a page's listed check sizes that are checked before a case is timed."""


class PageError(Exception):
    """A page that cannot be run as declared; the message says what to change."""


@dataclass(frozen=True)
class Asked:
    """One task's part of a page; a page is imported when something of it is asked for."""

    task: Task

    @cached_property
    def pair(self) -> Pair:
        """The pair of the page as it is."""
        page = load_page(self.task.page, self.task.root, self.task.module)
        pair = pair_of(getattr(page, self.task.function, None))
        if pair is None:
            raise PageError(f"{self.task.page} has no test {self.task.function!r} with @compare")
        return pair

    @property
    def sides(self) -> tuple[Declared, Declared]:
        """Baseline and variant."""
        variant = self.pair.variant(self.task.variant)
        return (self.pair.baseline, None), (variant.side, variant.precision)

    @property
    def side(self) -> Declared:
        """The side that the task names by its role."""
        return self.sides[ROLES.index(self.task.side)]

    @property
    def sizes(self) -> list[Mapping[str, Any]]:
        """The sizes at which the task's sides are shown right; the last is the case's own."""
        listed = [s for s in self.pair.check_sizes if is_plain(s)]
        if self.task.at == "check":
            return listed or [*self.pair.cpu_sizes, dict(self.task.size)][:1]
        return [*listed[:FIXED_SIZES], dict(self.task.size)]

    def sources(self) -> dict[str, str]:
        """Return by role the digest of each side's source."""
        from ..pages.sources import digest

        sides = (side for side, _ in self.sides)
        return {r: digest(s, self.task.root) for r, s in zip(ROLES, sides, strict=True)}

    def need_interpreter(self) -> None:
        """Refuse Triton kernels on a CPU without its interpreter; bench processes are given it."""
        from ..pages.sources import triton_kernels

        sides, on_cpu = [side for side, _ in self.sides], self.task.device == "cpu"
        if on_cpu and not interpreting() and triton_kernels(sides, self.task.root):
            raise PageError(
                f"{self.task.variant} launches Triton kernels, which without a GPU run in Triton's"
                " interpreter; it must be chosen before pytest starts when sides run inside pytest"
                "\n    TRITON_INTERPRET=1 pytest --pdb ..."
            )

    @cached_property
    def old(self) -> Pair | None:
        """The pair of the page as it was at the commit of `task.past`, or None."""
        past = self.task.past
        page = load_past(past["page"], past["root"], past["module"], self.task.root)
        return pair_of(getattr(page, self.task.function, None))

    def old_pair(self) -> Pair:
        """Return the pair as it was, where there must be one."""
        if self.old is None:
            raise PageError(f"{self.task.function} has no pair in the old page")
        return self.old

    def old_side(self) -> Side:
        """Return the side that the task names by its role, as it was."""
        then = self._then(self.pair, self.old_pair())
        return next(old for role, _, old in then if role == self.task.side)

    def changed(self) -> dict[str, Any]:
        """Return which sides of the case are not as they were.

        An old page that cannot be imported today, or only with files of today's, has no sides to
        compare with, nor has a side that would import today's when it is called: `why` says so.
        """
        from ..pages.sources import digest, imported_late

        pair = self.pair  # before the old page, which is imported past what is there
        found: dict[str, Any] = {"baseline": False, "optimized": False, "why": ""}
        try:
            old = self.old
        except MixedTreesError as error:
            return {**found, "why": str(error)}
        except Exception as error:
            why = f"the old page cannot be imported: {type(error).__name__}: {error}"
            return {**found, "why": why}
        root = self.task.root
        for role, now, then in () if old is None else self._then(pair, old):
            late = imported_late(then, self.task.past["root"])
            if late := [name for name in late if leads_to(name, root)]:
                found["why"] = f"{then.__name__} imports {', '.join(late)} when it is called"
                continue
            before = digest(then, self.task.past["root"], constants=True)
            found[role] = digest(now, root, constants=True) != before
        return found

    def _then(self, pair: Pair, old: Pair) -> Iterator[tuple[str, Side, Side]]:
        """Yield role, side now and side then, where there were such sides."""
        yield "baseline", pair.baseline, old.baseline
        name = self.task.variant
        if name in [variant.name for variant in old.variants]:
            yield "optimized", pair.variant(name).side, old.variant(name).side
