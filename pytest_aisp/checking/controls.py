"""Negative controls: wrong answers that a page's tolerance must not accept.

Each control is a changed copy of the reference's outputs. A control applies if its error is more
than `APPLIES` times the derived bound. Pages cannot declare which controls apply. If the tolerance
accepts a control that applies, the tolerance is too loose. There are three kinds of controls:
noise, structure and freshness. At least one control of each kind must be clearly refused. If no
control of a kind is clearly refused, the inputs cannot distinguish right from wrong answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ..page.pair import PageError, Precision
from ..util import pytree
from ..util.process_group import current_group
from .compare import compare_all, scatter
from .input_remarks import nan_remarks
from .inputs import STEPS, VALUE_SETS, InputPool
from .numerics import Leaf, Rule
from .reference import Reference

if TYPE_CHECKING:
    import torch


APPLIES = 4.0
CLEARLY = 2.0
"""A refusal counts as clear if the control's error is more than this many times the derived bound.
Sides with smaller errors are checked again on other values (`check.BORDERLINE`)."""
NOISE = 3.0
"""Size of the noise control, in allowed deviations, for an output with many elements."""
CONTROLS = {
    "noise": ("noise", "the output plus noise of 2.4 times the error bound"),
    "zeros": ("structure", "zeros"),
    "rolled": ("structure", "the output shifted by one element"),
    "swapped": ("structure", "the output with its halves swapped"),
    "reversed": ("structure", "the output in reverse order"),
    "dropped": ("structure", "the output without a slice of the inputs"),
    "stale": ("freshness", "the output for other inputs"),
}
"""The kind of each control, and a description of its wrong answer."""
ADVICE = {
    "noise": "Return at least one finite element that depends on the inputs",
    "structure": "Choose inputs for which the elements of the output differ from each other and"
    " from zero",
    "freshness": "Choose inputs that change the output. Two draws of them have the same output, and"
    " so do inputs that are halved",
}
"""The advice to give if no control of a kind is clearly refused, by kind."""
DRAWS = 5
"""Number of draws of the input values. A page is refused if the controls fail for most draws."""
DRAW_SEEDS = 0x10001
"""Distance between the seeds of two draws."""


class TooLoose(PageError):
    """A wrong answer passes the page's tolerance."""

    code = "problem_error"


class CannotTell(PageError):
    """Right and wrong results cannot be distinguished with the page's inputs."""

    code = "problem_error"


@dataclass(frozen=True)
class Control:
    """The result of one control on one page.

    Attributes:
        moves: the control's error, as a multiple of the derived bound.
        applies: True if the rule must refuse the control.
        refused: True if the rule refused the control.
        clearly: True if the rule refused an output whose error is over `CLEARLY` times the bound.
    """

    name: str
    moves: float
    applies: bool
    refused: bool
    clearly: bool

    def __str__(self) -> str:
        if self.applies or self.clearly:
            return f"{self.name} {'refused' if self.refused else 'ACCEPTED'}"
        return f"{self.name} n/a: moves the reference by {self.moves:.2g} bounds"


def check_tolerance(
    reference: Reference, precisions: Iterable[Precision | None], rule: Rule
) -> list[Control]:
    """Apply the controls at each of `precisions`. Return the results for the last precision.

    Raises:
        TooLoose, CannotTell: the error of the first draw, if most draws of the inputs fail.
    """
    controls: list[Control] = []
    for precision in dict.fromkeys(precisions):
        key = (precision, rule, tuple(reference.types.items()))
        if key not in reference.controls:
            reference.controls[key] = _by_majority(reference, precision, rule)
        controls = reference.controls[key]
    return controls


def _by_majority(reference: Reference, precision: Precision | None, rule: Rule) -> list[Control]:
    """Apply the controls to the first draw of the values.

    If the first draw fails, apply the controls to more draws. The majority of the draws decides.
    """
    try:
        return _apply(reference, precision, rule)
    except (CannotTell, TooLoose) as error:
        first = error
    passed: list[list[Control]] = []
    failures = 1
    for draw in range(1, DRAWS):
        try:
            passed.append(_apply(redrawn(reference, draw), precision, rule))
        except (CannotTell, TooLoose):
            failures += 1
        if len(passed) > DRAWS // 2:
            return passed[0]
        if failures > DRAWS // 2:
            break
    message, advice = str(first).split("\n")
    count = f"{failures} of {failures + len(passed)}"
    lines = [f"{message} (in {count} draws of the inputs)", advice, *nan_remarks(reference.pool)]
    raise type(first)("\n".join(lines))


def redrawn(reference: Reference, draw: int) -> Reference:
    """Return the reference of the same page and size for another draw of the values."""
    pool = reference.pool
    seed = pool.seed + draw * DRAW_SEEDS
    other = InputPool(pool.pair, pool.size, pool.device, seed, pool.unseen_seed)
    other.scale(on=pool.scaled)
    return Reference(other, reference.watch, reference.exact, dict(reference.types))


def draws_differ(reference: Reference, precisions: Iterable[Precision | None]) -> bool:
    """Return whether the outputs for two draws of the inputs differ by more than the bound."""
    for precision in dict.fromkeys(precisions):
        # Large outputs are kept only for the last draw.
        last = int(reference.large and reference.pool.pair.state is None)
        expected, types, stale = _expected(reference, precision, last)
        candidates = [value.to(dtype) for value, dtype in zip(stale(), types, strict=True)]
        if current_group().max(not _judge("stale", candidates, expected, Rule()).clearly):
            return False
    return True


def _expected(
    reference: Reference, precision: Precision | None, first: int = 0
) -> tuple[list[Leaf], list[torch.dtype], Callable[[], list[torch.Tensor]]]:
    """Return the expected outputs for value set `first`, and the types of these outputs.

    The third result is a function that returns stale outputs, which are a wrong answer.
    """
    steps = STEPS if reference.pool.pair.state is not None else 1
    turns, other = (tuple((k + n) % VALUE_SETS for n in range(steps)) for k in (first, first + 1))
    leaves = reference.leaves(turns, precision)
    expected = [leaf for leaf in leaves if leaf.path in reference.types] or leaves
    types = [reference.types.get(leaf.path, leaf.value.dtype) for leaf in expected]

    def stale() -> list[torch.Tensor]:
        import torch

        by_path = dict(reference.values(other))
        if reference.state_changes and all(
            torch.equal(by_path[leaf.path], leaf.value) for leaf in expected
        ):  # for example, the page makes the same indexed writes in another order
            by_path = dict(reference.values((first,) * steps))
        return [by_path[leaf.path] for leaf in expected]

    return expected, types, stale


def _apply(reference: Reference, precision: Precision | None, rule: Rule) -> list[Control]:
    expected, types, stale = _expected(reference, precision)
    computed = {"stale": stale, "dropped": lambda: reference.without_slice(0)}
    return run_controls(expected, computed, types, rule)


Answers: TypeAlias = Callable[[], "Sequence[torch.Tensor] | None"]
"""A function that returns wrong answers, or None if there are none."""


def run_controls(
    expected: Sequence[Leaf],
    computed: Mapping[str, Answers],
    types: Sequence[torch.dtype],
    rule: Rule,
) -> list[Control]:
    """Apply every control and return the results. Keep only one wrong answer in memory at a time.

    Args:
        expected: the reference's outputs for these inputs.
        computed: the controls whose wrong answers the reference computes, by name.
        types: the type in which the sides return each output.
        rule: the rule of the page.

    Raises:
        TooLoose: if the rule accepts a control that applies.
        CannotTell: if no control of one kind is clearly refused.
    """
    controls = []
    for name, answers in (*_made(expected).items(), *computed.items()):
        values = answers()
        if values is not None:
            candidates = [value.to(dtype) for value, dtype in zip(values, types, strict=True)]
            del values  # wrong answers may be large
            controls.append(_judge(name, candidates, expected, rule))
            del candidates
    for control in controls:
        if control.applies and not control.refused:
            raise TooLoose(
                f"the tolerance ({rule}) is too loose: it accepts a wrong answer,"
                f" {CONTROLS[control.name][1]}, whose error is {control.moves:.3g} times the"
                " derived bound\nLower rtol and atol, or leave them out"
            )
    # Freshness comes before structure, because the advice also fits an output that never changes.
    for kind in ("noise", "freshness", "structure"):
        of_kind = [control for control in controls if CONTROLS[control.name][0] == kind]
        if not any(control.clearly for control in of_kind):
            close = "; ".join(
                f"{CONTROLS[c.name][1]} ({c.moves:.2g} error bounds)" for c in of_kind
            )
            raise CannotTell(
                "the inputs cannot tell a right output from a wrong one, because these wrong"
                f" answers are too close to it: {close}\n{ADVICE[kind]}"
            )
    return controls


def _made(expected: Sequence[Leaf]) -> dict[str, Answers]:
    """Return the controls whose wrong answers are made from the expected answers."""

    def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Answers:
        return lambda: [change(leaf.value) for leaf in expected]

    largest = max((leaf.value.numel() for leaf in expected), default=0)
    return {
        "noise": lambda: [_noisy(leaf, largest) for leaf in expected],
        "zeros": each(lambda v: v.new_zeros(()).expand(v.shape)),
        "rolled": each(lambda v: v.roll(1, _longest(v)) if v.dim() else v),
        "swapped": each(_swap_halves),
        "reversed": each(lambda v: v.flip(_longest(v)) if v.dim() else v),
    }


def _noisy(leaf: Leaf, largest: int) -> torch.Tensor:
    """Return the expected values with noise of 2.4 times the bound, or more if `largest` is small.

    The rms over a few elements varies by chance, so more noise is needed to exceed the bound. Only
    the largest outputs get this additional noise. With noise in smaller outputs too, a tolerance
    that all outputs share would seem too loose.
    """
    import torch

    if leaf.sigma is None:  # integers are off by one, booleans are inverted
        return ~leaf.value if leaf.value.dtype == torch.bool else leaf.value + 1
    generator = torch.Generator(device=leaf.value.device).manual_seed(7)
    more = scatter(largest) if leaf.value.numel() == largest else 0.0
    noisy = torch.empty_like(leaf.value)
    for at in pytree.pieces(noisy.shape):
        draws = torch.empty_like(leaf.value[at]).uniform_(-1, 1, generator=generator)
        noisy[at] = leaf.value[at] + draws.sign_().mul_(leaf.sigma[at]).mul_(NOISE * (1 + more))
    return noisy


def _longest(value: torch.Tensor) -> int:
    return max(range(value.dim()), key=lambda d: value.shape[d])


def _swap_halves(value: torch.Tensor) -> torch.Tensor:
    if not value.dim():
        return value
    longest = _longest(value)
    return value.roll(value.shape[longest] // 2, longest)


def _judge(
    name: str,
    values: Sequence[torch.Tensor],
    expected: Sequence[Leaf],
    rule: Rule,
) -> Control:
    # Compare each output alone, because a tolerance may be too loose for only one output.
    least = 1.0 if name == "noise" else APPLIES  # noise is 2.4 bounds by construction
    if any(v.shape != leaf.value.shape for v, leaf in zip(values, expected, strict=True)):
        return Control(name, math.inf, True, True, True)  # the wrong shape is always refused
    derived = compare_all(values, expected, Rule())
    by_rule = derived if rule.derived else compare_all(values, expected, rule)
    both = list(zip(derived, by_rule, strict=True))
    applying = [result for moved, result in both if moved.score > least]
    moves = max(result.score for result in derived)
    clearly = any(moved.score > min(least, CLEARLY) and not result.ok for moved, result in both)
    refused = not any(result.ok for result in applying)
    return Control(name, moves, bool(applying), refused, clearly)
