"""Compare the outputs of the timed calls with the reference.

A side that was right before may be wrong while it is timed: its graph may replay stale memory, or
it may compute only during checks. So the outputs of the last timed calls are compared, and then the
outputs of a few single calls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..checking import check, compare
from ..checking.inputs import VALUE_SETS, BoundSide, slot_order
from ..checking.numerics import NamedTensors, Rule, Wrong
from ..checking.reference import Reference, outputs_and_state
from ..isolation.protections import enabled
from ..page.pair import Precision, Side, size_words
from ..util import pytree
from ..util.device_state import synchronizer
from .schedule import Window
from .unseen_values import TimedCall, UnseenValues

if TYPE_CHECKING:
    import torch

FURTHER_CALLS = 4
"""Number of calls after the last window whose outputs are compared one by one.

If the outputs are large, there is only one call per value set, because the reference runs again for
every call.
"""


COMPARED_CALLS, COMPARE_SECONDS = 2, 0.15
"""The number of calls of each side that are compared as in a check, and the seconds spent searching
for more wrong calls. Both apply only on the CPU's clock.
"""
SHARE = 0.05
"""A call is compared again if more than this share of an output is wrong."""


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
        relative: the largest rms error of these outputs, as a share of the rms of the expected
            values.
        compared: number of outputs of timed calls that were compared.
    """

    reference: Reference
    sides: Sequence[tuple[Side, Precision | None]]
    rule: Rule
    device: str
    worst: dict[str, float] = field(default_factory=dict)
    relative: dict[str, float] = field(default_factory=dict)
    compared: int = 0

    def __post_init__(self) -> None:
        self.pool, self.pair = self.reference.pool, self.reference.pool.pair
        self.names = " or ".join(dict.fromkeys(side.__name__ for side, _ in self.sides))

    def verify_windows(self, timer: TimedSides) -> None:
        """Compare inputs, outputs and states of both sides after the last timed calls."""
        # Wait, so that no output is read before it is complete. Late work is reported by
        # `check_times`.
        synchronizer(self.device)()
        size = size_words(self.pool.size)
        for slot, turn in zip(self.pool.slots, self.pool.pattern, strict=True):
            compare.check_unchanged(self.names, slot, self.pool.value_set(turn), size)
        built = zip(timer.sides, self.sides, timer.windows, strict=True)
        for bound, (side, precision), window in built:
            compare.check_outputs(side.__name__, bound.outputs, self.pool.slots, size)
            self._verify_window(bound, side, precision, window)

    def verify_calls(self, timer: TimedSides, unseen: UnseenValues) -> None:
        """Compare the outputs of timed calls that were chosen at random.

        A few calls are compared as in a check. For the other calls, the reference runs without
        error bounds. If a large part of a call's output is wrong, that call is also compared as in
        a check.
        """
        if not enabled("timed-outputs"):
            return
        for bound, (side, precision) in zip(timer.sides, self.sides, strict=True):
            calls = unseen.calls(bound)
            for call in calls[:COMPARED_CALLS]:
                self._verify_call(call, side, precision)
            limits = self._limits(precision)
            started, suspects = time.monotonic(), 0
            for call in calls[COMPARED_CALLS:]:
                if time.monotonic() - started > COMPARE_SECONDS or suspects == COMPARED_CALLS:
                    break
                self.compared += 1
                if self._largely_wrong(call, limits):
                    suspects += 1
                    self._verify_call(call, side, precision)

    def _verify_call(self, call: TimedCall, side: Side, precision: Precision | None) -> None:
        with self.reference.added(call.values) as turn:
            self._compare(side, call.outputs, (turn,), precision)

    def _limits(self, precision: Precision | None) -> list[float | None]:
        """Return each output's largest allowed error on the first value set, or None."""
        leaves = self.reference.leaves((0,), precision)
        return [
            None if leaf.sigma is None else leaf.worst_limit * largest(leaf.sigma)
            for leaf in leaves
        ]

    def _largely_wrong(self, call: TimedCall, limits: Sequence[float | None]) -> bool:
        with self.reference.added(call.values) as turn:
            expected = self.reference.values((turn,))
        outputs = call.outputs
        if len(outputs) != len(expected):
            return True
        both = zip(outputs, expected, limits, strict=True)
        return any(wrong_share(own, value, limit) > SHARE for (_, own), (_, value), limit in both)

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
        for call in range(VALUE_SETS if self.reference.large else FURTHER_CALLS):
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
        share = max(self.relative.get(name, 0.0), *(r.relative for r in results))
        self.relative[name] = share


def largest(sigma: torch.Tensor) -> float:
    """Return the largest finite element, or 0 if there is none."""
    finite = sigma[sigma.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def wrong_share(got: torch.Tensor, want: torch.Tensor, limit: float | None) -> float:
    """Return the share of elements that are off by more than `limit`. None allows no error."""
    if got.shape != want.shape or not got.numel():
        return float(got.shape != want.shape)
    error = (got.double() - want.double()).abs()
    right = (error <= (limit or 0.0)) | (got == want) | (got.isnan() & want.isnan())
    return 1 - float(right.double().mean())
