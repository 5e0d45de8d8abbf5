"""Compare the outputs of the timed calls with the reference.

A side that was right before may be wrong while it is timed: its graph may replay stale memory, or
it may compute only during checks. So the outputs of the last timed calls are compared, and then the
outputs of a few single calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..checking import check, compare
from ..checking.inputs import VALUE_SETS, BoundSide, slot_order
from ..checking.numerics import NamedTensors, Rule, Wrong
from ..checking.reference import Reference, outputs_and_state
from ..isolation.protections import enabled
from ..page.pair import Precision, Side, size_words
from ..util import pytree
from ..util.device_state import synchronizer
from .schedule import Window

FURTHER_CALLS = 4
"""Number of calls after the last window whose outputs are compared one by one."""


class TimedSides(Protocol):
    """The parts of a pair timer that the verifier needs."""

    sides: tuple[BoundSide, BoundSide]

    @property
    def windows(self) -> Sequence[Window]:
        """The windows of both sides."""


@dataclass
class OutputVerifier:
    """Compare the outputs of timed calls.

    Attributes:
        sides: the baseline and the optimized side, each with its declared precision.
        worst: the largest error in the timed outputs of each side, in units of the allowed error.
        compared: number of outputs of timed calls that were compared.
    """

    reference: Reference
    sides: Sequence[tuple[Side, Precision | None]]
    rule: Rule
    device: str
    worst: dict[str, float] = field(default_factory=dict)
    compared: int = 0

    def __post_init__(self) -> None:
        self.pool, self.pair = self.reference.pool, self.reference.pool.pair
        self.names = " or ".join(dict.fromkeys(side.__name__ for side, _ in self.sides))

    def verify_windows(self, timer: TimedSides) -> None:
        """Compare inputs, outputs and states of both sides after the last timed calls."""
        # Wait, so that no output is read while it is still being written. Late work is reported by
        # `check_times`.
        synchronizer(self.device)()
        size = size_words(self.pool.size)
        for slot, turn in zip(self.pool.slots, self.pool.pattern, strict=True):
            compare.check_unchanged(self.names, slot, self.pool.value_set(turn), size)
        built = zip(timer.sides, self.sides, timer.windows, strict=True)
        for bound, (side, precision), window in built:
            compare.check_outputs(side.__name__, bound.outputs, self.pool.slots, size)
            self._verify_window(bound, side, precision, window)

    def _verify_window(
        self, bound: BoundSide, side: Side, precision: Precision | None, window: Window
    ) -> None:
        """Compare the outputs of the last timed calls, in every slot, with the reference."""
        if not enabled("timed-outputs"):
            return
        pattern = self.pool.pattern
        order = slot_order(window.counted, len(pattern), window.calls - window.counted)
        if self.pair.state is not None:
            turns = tuple(pattern[slot] for slot in order)
            outputs = outputs_and_state(bound.outputs[order[-1]], bound.state)
            self._compare(side, outputs, turns, precision)
            return
        for slot in sorted(set(order)):
            outputs = outputs_and_state(bound.outputs[slot], None)
            self._compare(side, outputs, (pattern[slot],), precision)

    def verify_each_call(self, bound: BoundSide) -> None:
        """Call the second side a few more times, on new values each time, and compare each output.

        Values do not change within a window. So a side that computes only in every second call
        would still have the right outputs at the end of a window.
        """
        if self.pair.state is not None or not enabled("every-call"):
            return
        side, precision = self.sides[1]
        wait = synchronizer(self.device)
        for call in range(FURTHER_CALLS):
            turn = call % VALUE_SETS
            pytree.copy_into(self.pool.slots[0], self.pool.value_set(turn))
            outputs = outputs_and_state(bound.run(0), None)
            wait()
            self._compare(side, outputs, (turn,), precision)

    def _compare(
        self, side: Side, outputs: NamedTensors, turns: tuple[int, ...], precision: Precision | None
    ) -> None:
        try:
            results = check.judge(self.reference, side, outputs, turns, precision, self.rule)
        except Wrong as error:
            raise Wrong(f"{error}\nThis is the output of a timed call.") from None
        self.compared += 1
        name = side.__name__
        self.worst[name] = max(self.worst.get(name, 0.0), *(r.worst for r in results))
