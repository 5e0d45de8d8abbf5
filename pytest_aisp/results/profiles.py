"""What a profiler has seen of both sides: tables, differences, and the words for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .row import duration

SHOWN, CUT = 4, 60
"""Names in one line of words, and characters of each; the files have all of them."""


@dataclass(frozen=True)
class Seen:
    """How often a call of a side runs one kernel or operator, and its seconds in that call."""

    count: float
    seconds: float


def gathered(events: Iterable[tuple[str, float]], calls: int) -> dict[str, Seen]:
    """Return by name what ``(name, seconds)`` events of `calls` calls are in one, longest first."""
    found: dict[str, Seen] = {}
    for name, seconds in events:
        before = found.get(name, Seen(0.0, 0.0))
        found[name] = Seen(before.count + 1 / calls, before.seconds + seconds / calls)
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def table(what: str, seen: Mapping[str, Seen]) -> list[str]:
    """Return the lines of a side's table: count and time a call, share of all time, full name."""
    total = sum(one.seconds for one in seen.values())
    lines = [f"{'a call':>8}  {'time a call':>12}  {'share':>6}  {what}"]
    for name, one in seen.items():
        share = one.seconds / total if total else 0.0
        lines.append(f"{one.count:8.4g}  {duration(one.seconds):>12}  {share:6.1%}  {name}")
    return lines


@dataclass(frozen=True)
class Differences:
    """What differs between the sides, by name, a call.

    Attributes:
        what: ``kernels`` or ``operators``.
        new, gone: what only the optimized side runs, and only the baseline; how often.
        counts: what both run, but not as often: the baseline's count, the optimized side's.
    """

    what: str
    new: dict[str, float]
    gone: dict[str, float]
    counts: dict[str, tuple[float, float]]

    @classmethod
    def between(
        cls, what: str, baseline: Mapping[str, Seen], optimized: Mapping[str, Seen]
    ) -> Differences:
        """Return the differences of two sides' tables; counts within 1e-6 are the same."""
        both = {n: (baseline[n].count, optimized[n].count) for n in baseline if n in optimized}
        return cls(
            what,
            {n: one.count for n, one in optimized.items() if n not in baseline},
            {n: one.count for n, one in baseline.items() if n not in optimized},
            {n: pair for n, pair in both.items() if abs(pair[0] - pair[1]) > 1e-6},
        )

    def words(self) -> str:
        """Return one line: the first names of each kind, cut."""
        parts = [_named("new", self.new), _named("gone", self.gone)]
        changed = {n: f"{a:g} -> {b:g}" for n, (a, b) in self.counts.items()}
        parts.append(_named("other counts", changed))
        said = "; ".join(filter(None, parts))
        return said or f"both sides run the same {self.what}, as often"

    def lines(self) -> list[str]:
        """Return the lines of the file: everything, full names."""
        lines = [f"{self.what} a call: baseline -> optimized"]
        lines += [f"new    0 -> {count:g}  {name}" for name, count in self.new.items()]
        lines += [f"gone   {count:g} -> 0  {name}" for name, count in self.gone.items()]
        lines += [f"count  {a:g} -> {b:g}  {name}" for name, (a, b) in self.counts.items()]
        return lines if len(lines) > 1 else [*lines, self.words()]


def _named(kind: str, found: Mapping[str, object]) -> str:
    if not found:
        return ""
    names = [f"{name[:CUT]} ({_count(count)})" for name, count in list(found.items())[:SHOWN]]
    more = [f"{len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return f"{kind}: {', '.join([*names, *more])}"


def _count(count: object) -> str:
    return f"{count:g}" if isinstance(count, float) else str(count)
