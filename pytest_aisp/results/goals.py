"""Goals beyond time: what a page may claim of memory and launches, and when a stored one is passed.

Both are counted, not timed: they do not scatter, so nothing is voted on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .remarks import amount

Found = Mapping[str, float]
"""What a call of ``baseline`` and of ``optimized`` takes."""


@dataclass(frozen=True)
class Goal:
    """One thing that is counted.

    Attributes:
        what: what is counted, in words.
        asked: how a page asks for it, as the report names it.
        unit: writes one amount.
        relative: whether the limit is a share of the baseline's, else an amount of its own.
        times, slack: a stored amount is passed beyond this many times itself and so much more.
    """

    what: str
    asked: str
    unit: Callable[[float], str]
    relative: bool
    times: float
    slack: float

    def said(self, found: Found, at_most: float) -> str:
        """Return both amounts in words, beside the limit."""
        both = f"{self.unit(found['baseline'])} / {self.unit(found['optimized'])} {self.what}"
        if not self.relative:
            return f"{both}, against {self.unit(at_most)}"
        share = found["optimized"] / max(found["baseline"], 1)
        return f"{both}, {share:.3g} of the baseline's against {at_most:g}"

    def missed(self, found: Found, at_most: float) -> bool:
        """Return whether the optimized side takes more than `at_most` allows."""
        return found["optimized"] > at_most * (found["baseline"] if self.relative else 1)

    def grew(self, before: float, now: float) -> bool:
        """Return whether `now` is more than what was stored, beyond rounding."""
        return now > before * self.times + self.slack


GOALS = {
    # Blocks are cut from segments of 2 MiB, and a library may choose another workspace.
    "memory": Goal("beyond the inputs", "assert_memory", amount, True, 1.01, 1 << 20),
    "launches": Goal("launches a call", "assert_count", "{:g}".format, False, 1.0, 0.0),
}
