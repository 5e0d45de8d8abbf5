"""Explain a wrong output: describe its errors, and advise what to do.

`explain_cause` tries several causes and returns the first one that fits. The order matters: random
numbers come before a constant output, and a wrong factor before a low precision. If no cause fits,
a variant gets no explanation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..page.pair import Precision, Side, side_name
from ..util import pytree
from ..util.device_state import synchronizer
from ..util.process_group import current_group
from . import numerics
from .compare import Comparison, compare
from .inputs import BoundSide
from .numerics import Leaf, Rule, Wrong
from .reference import Reference, outputs_and_state

if TYPE_CHECKING:
    import torch

SAMPLE = 1 << 20
"""Number of elements whose errors are inspected. Larger outputs are sampled evenly."""
FORMATS: tuple[Precision, ...] = ("tf32", "fp16", "bf16")
"""The formats that errors are compared with. `tf32` is skipped if all values fit into fp16."""
LEAST_RMS = 0.1
"""Errors match a format only if the rms of the errors is at least this share of the format's
deviation."""
ROUNDOFFS, MOST_ROUNDING = 256, 0.03
"""Errors look like rounding if the rms of the errors is at most this many unit roundoffs of the
type, and at most this share of the output's rms."""
TINY = 0.05
"""An element is tiny if it is below this share of the output's rms."""


class Mismatch(Wrong):
    """An output differs from the expected one.

    Attributes:
        got, leaf: the output and the expected output.
        result: the comparison of the two outputs.
        turns: indices of the value sets that the side ran on.
    """

    def __init__(
        self,
        message: str,
        got: torch.Tensor,
        leaf: Leaf,
        result: Comparison,
        turns: tuple[int, ...],
    ) -> None:
        super().__init__(message)
        self.got, self.leaf, self.result, self.turns = got, leaf, result, turns


def explain_cause(
    error: Mismatch,
    reference: Reference,
    side: Side,
    precision: Precision | None,
    rule: Rule,
    *,
    is_baseline: bool,
) -> str:
    """Return a line about the likely cause of `error`, or an empty string if it is unknown."""
    causes = _Causes(error, reference, side, precision, rule, is_baseline)
    try:
        return next(causes.that_fit(), "")
    except Exception:  # an explanation must not hide the error that it explains
        return ""


@dataclass(frozen=True)
class _Causes:
    error: Mismatch
    reference: Reference
    side: Side
    precision: Precision | None
    rule: Rule
    is_baseline: bool

    def that_fit(self) -> Iterator[str]:
        """Yield a message for each cause that fits, the most certain first."""
        causes: list[Callable[[], str]] = [self._not_written]
        if current_group().world == 1:  # other ranks do not run the side again
            causes += [self._random, self._remembered, self._constant]
        causes += [self._factor, self._order, self._tolerance, self._format]
        if self.is_baseline:
            causes += [self._cancelling, self._rounding, self._different]
        yield from filter(None, (cause() for cause in causes))

    @property
    def name(self) -> str:
        return side_name(self.side)

    @cached_property
    def got(self) -> torch.Tensor:
        return _sample(self.error.got)

    @cached_property
    def want(self) -> torch.Tensor:
        return _sample(self.error.leaf.value)

    @cached_property
    def errors(self) -> torch.Tensor:
        return (self.got - self.want).abs_()

    @property
    def _is_numeric(self) -> bool:
        """Whether both outputs are floating point, and all inspected elements are finite."""
        finite = bool(self.got.isfinite().all() and self.want.isfinite().all())
        return finite and self.error.got.is_floating_point() and self.got.numel() > 0

    @cached_property
    def _relative(self) -> float:
        """The rms of the errors as a share of the output's rms."""
        return _rms(self.errors) / max(_rms(self.want), 1e-300)

    def _not_written(self) -> str:
        result = self.error.result
        if not (math.isnan(result.got) and math.isfinite(result.want)):
            return ""
        return (
            f"the memory that `torch.empty` returns to {self.name} is filled with NaN, so NaN is"
            " what an element that is never written contains; check that every element is written,"
            " and that no operation returns NaN"
        )

    def _random(self) -> str:
        turns = self.error.turns
        if self.reference.pool.pair.state is None:
            ranks = self.reference.pool.all_ranks(turns[-1])
            runs = [self.reference.evaluate(pytree.clone(ranks), []) for _ in range(2)]
            first, second = (dict(outputs_and_state(run, None)) for run in runs)
            if self._differ(first[self.error.leaf.path], second[self.error.leaf.path]):
                return (
                    "the reference returns other values when it runs again on the same inputs;"
                    " draw random numbers in `inputs`, and pass them to the reference and the sides"
                )
        if not self._differ(self._run(turns), self._run(turns)):
            return ""
        return (
            f"{self.name} returns other values when it runs again on the same inputs: it draws"
            " random numbers, or its threads race; draw random numbers in `inputs`, and pass them"
            " to the reference and the sides"
        )

    def _differ(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether two runs differ by at least a tenth of the output's error."""
        difference = (_sample(one) - _sample(other)).abs_()
        return float(difference.max()) > 0.1 * float(self.errors.nan_to_num(0.0).max())

    def _remembered(self) -> str:
        other = self._other_turns()
        if other is None:
            return ""
        leaf = self._expected(other, self.precision)
        moved = float((self.want - _sample(leaf.value)).abs_().max()) > 0
        if not (moved and compare(self.error.got, leaf, Rule(self.rule.exact)).ok):
            return ""
        return (
            f"these are the right values for other inputs: {self.name} returns a stored result;"
            " compute the output from the arguments in every call"
        )

    def _constant(self) -> str:
        import torch

        other = self._other_turns()
        if self._relative < MOST_ROUNDING:  # two right outputs may round to the same values
            return ""
        if other is None or not torch.equal(self._run(self.error.turns), self._run(other)):
            return ""
        if float((self.want - _sample(self._expected(other, None).value)).abs_().max()) == 0:
            return ""  # the expected values do not change either
        return (
            f"{self.name} returns the same values for other inputs; compute the output from the"
            " arguments"
        )

    def _other_turns(self) -> tuple[int, ...] | None:
        """Return the other value set, or None for a page with a state."""
        has_state = self.reference.pool.pair.state is not None
        return None if has_state else (1 - self.error.turns[-1],)

    def _expected(self, turns: tuple[int, ...], precision: Precision | None) -> Leaf:
        leaves = self.reference.leaves(turns, precision)
        return next(leaf for leaf in leaves if leaf.path == self.error.leaf.path)

    def _run(self, turns: tuple[int, ...]) -> torch.Tensor:
        """Run the side on `turns` in new memory, and return a copy of the output."""
        pool = self.reference.pool
        slot = pytree.clone(pool.value_set(turns[0]))
        bound = BoundSide(self.side, [slot], pool.new_state())
        try:
            for turn in turns:
                pytree.copy_into(slot, pool.value_set(turn))
                outputs = bound.run(0)
            synchronizer(pool.device)()
            return dict(outputs_and_state(outputs, bound.state))[self.error.leaf.path].clone()
        finally:
            bound.close()

    def _factor(self) -> str:
        if not self._is_numeric or self.got.numel() < 8:
            return ""
        factor = float((self.got * self.want).sum() / self.want.square().sum())
        rest = _rms(self.got - factor * self.want)
        if not (abs(factor) > 1e-3 and rest < 0.02 * _rms(self.errors)):
            return ""
        return f"every element is {factor:.6g} times the expected one; compare {self._both} for it"

    def _order(self) -> str:
        got, leaf = self.error.got, self.error.leaf
        if not 8 <= got.numel() <= SAMPLE or self._relative < MOST_ROUNDING:
            return ""
        sigma = None
        if leaf.sigma is not None:
            sigma = leaf.sigma.new_full((got.numel(),), _rms(leaf.sigma.reshape(-1)))
        values = (leaf.value.reshape(-1).sort().values, sigma)
        if not compare(self.got.sort().values.to(got.dtype), Leaf(leaf.path, *values), Rule()).ok:
            return ""
        return (
            "these are the expected values in another order; compare the axes and the index"
            f" arithmetic of {self._both}"
        )

    @property
    def _both(self) -> str:
        return f"{self.name} and the reference"

    def _tolerance(self) -> str:
        rule, leaf = self.rule, self.error.leaf
        if rule.given and leaf.sigma is not None and compare(self.error.got, leaf, Rule()).ok:
            return (
                f"the derived bound accepts these values, so {rule} is too narrow;"
                " leave rtol and atol out"
            )
        return ""

    def _format(self) -> str:
        if not self._is_numeric or self.error.leaf.sigma is None:
            return ""
        for precision in self._formats():
            result = compare(self.error.got, self._expected(self.error.turns, precision), Rule())
            if result.ok and result.rms >= LEAST_RMS:
                declared = "baseline=" * self.is_baseline
                declared += f"Variant({self.name}, precision={precision!r})"
                return (
                    f"the errors look like {precision} arithmetic; declare {declared} if that is"
                    f" on purpose, or compute in {_dtype_name(self.error.got)}"
                )
        return ""

    def _formats(self) -> list[Precision]:
        """Return the formats less exact than the side's own, from the most exact to the least."""
        import torch

        own = numerics.UNIT.get(self.precision or _dtype_name(self.error.got), 1.0)
        if bool((self.error.got == self.error.got.to(torch.bfloat16)).all()):
            return ["bf16"] if numerics.UNIT["bf16"] > own else []
        fits = bool((self.error.got == self.error.got.to(torch.float16)).all())
        formats = [p for p in FORMATS if numerics.UNIT[p] > own and not (fits and p == "tf32")]
        return formats if fits else [p for p in formats if p != "fp16"]

    def _cancelling(self) -> str:
        result, typical = self.error.result, _rms(self.errors) if self._is_numeric else 0.0
        tiny = abs(result.want) < TINY * _rms(self.want)
        error = abs(result.got - result.want)
        if not (typical and tiny and result.worst > result.worst_limit and error < 8 * typical):
            return ""
        return (
            f"the error there is no larger than elsewhere (rms {typical:.2g}), but the element is"
            " tiny: it is a small difference of large terms (cancellation); subtract before"
            f" rounding, or allow the error: pair.assert_equivalent(rtol=0, atol={8 * typical:.1g})"
        )

    def _rounding(self) -> str:
        unit = numerics.UNIT.get(_dtype_name(self.error.got))
        if unit is None or not self._is_numeric:
            return ""
        if self._relative > min(ROUNDOFFS * unit, MOST_ROUNDING):
            return ""
        like = f"the errors look like rounding (their rms is {self._relative:.2g} of the output's)"
        if self.rule.exact:
            return f"{like}; exact=True allows none: leave it out"
        if self.rule.given:
            return f"{like}; {self.rule} allows less: leave rtol and atol out"
        return (
            f"{like}, so the bound, which they exceed {self.error.result.score:.3g} times, is too"
            " narrow; widen it with Work(terms=, roundings=): the terms of the longest sum, and the"
            " number of roundings in a row"
        )

    def _different(self) -> str:
        share = f" by {self._relative:.2g} of its rms" if self._is_numeric else ""
        return (
            f"{self.name} and the reference differ{share}, so one of them is wrong, or they compute"
            " different things; compare both by hand on a small input"
        )


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return at most `SAMPLE` elements in float64."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE))].double()


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
