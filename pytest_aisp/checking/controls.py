"""Negative controls, which are wrong answers that a page must refuse, and the exact probe.

Each control is a changed copy of the reference's outputs. A control applies if its error is more
than `APPLIES` times the derived bound. This is computed and cannot be declared. If the page's
tolerance accepts a control that applies, the tolerance is too loose. There are three kinds: noise,
structure and freshness. If no control of some kind applies, right and wrong answers cannot be
distinguished with these inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..page.pair import PageError, Precision, Side
from ..util import pytree
from ..util.device_state import synchronizer
from ..util.process_group import current_group
from . import numerics
from .compare import compare_all, explain, scatter
from .inputs import STEPS, VALUE_SETS, BoundSide, InputPool, Inputs
from .numerics import Leaf, NamedTensors, Rule, Wrong
from .reference import Reference, outputs_and_state, refusals

if TYPE_CHECKING:
    import torch


APPLIES = 4.0
NOISE = 3.0
"""Size of the noise control, in allowed deviations, for an output with many elements."""
KINDS = {"noise": "noise", "zeros": "structure", "rolled": "structure", "swapped": "structure"}
KINDS |= {"reversed": "structure", "dropped": "structure", "stale": "freshness"}
DRAWS = 5
"""Number of draws of the values. A page is refused if the controls fail for most draws."""
QUANTILES = 0.75, 0.9
"""Quantiles of the magnitudes between which the exact probe rounds them to 0, 1, and 2."""
SAMPLE = 1 << 16
"""Number of elements from which these quantiles are computed."""
DRAW_SEEDS = 0x10001
"""Distance between the seeds of two draws."""


class TooLoose(PageError):
    """A wrong answer passes the page's tolerance."""


class CannotTell(PageError):
    """Right and wrong results cannot be distinguished with the page's inputs."""


@dataclass(frozen=True)
class Control:
    """The result of one control on one page.

    Attributes:
        moves: size of its error, in derived bounds.
        applies: True if the rule must refuse it.
        refused: True if the rule refused it.
    """

    name: str
    moves: float
    applies: bool
    refused: bool

    def __str__(self) -> str:
        if self.applies:
            return f"{self.name} {'refused' if self.refused else 'ACCEPTED'}"
        return f"{self.name} n/a: moves the reference by {self.moves:.2g} bounds"


def check_tolerance(
    reference: Reference, precisions: Iterable[Precision | None], rule: Rule
) -> list[Control]:
    """Apply the controls at each precision that a side declares, and return the last results.

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
    """Apply the controls to the first draw of the values. If they fail, use a majority of draws."""
    try:
        return _apply(reference, precision, rule)
    except (CannotTell, TooLoose) as error:
        first = error
    passed: list[list[Control]] = []
    failures = 1
    for draw in range(1, DRAWS):
        try:
            passed.append(_apply(_redrawn(reference, draw), precision, rule))
        except (CannotTell, TooLoose):
            failures += 1
        if len(passed) > DRAWS // 2:
            return passed[0]
        if failures > DRAWS // 2:
            break
    draws = failures + len(passed)
    raise type(first)(f"{first} ({failures} of {draws} draws of the values say so)")


def _redrawn(reference: Reference, draw: int) -> Reference:
    """Return the reference of the same page and size, but for other values."""
    pool = reference.pool
    seed = pool.seed + draw * DRAW_SEEDS
    other = InputPool(pool.pair, pool.size, pool.device, seed, pool.unseen_seed)
    return Reference(other, reference.watch, reference.exact, dict(reference.types))


def _apply(reference: Reference, precision: Precision | None, rule: Rule) -> list[Control]:
    has_state = reference.pool.pair.state is not None
    turns = (0, 1, 0)[:STEPS] if has_state else (0,)
    other = (1, 0, 1)[:STEPS] if has_state else (1 % VALUE_SETS,)
    leaves = reference.leaves(turns, precision)
    expected = [leaf for leaf in leaves if leaf.path in reference.types] or leaves
    stale_by_path = {leaf.path: leaf for leaf in reference.leaves(other, precision)}
    stale = [stale_by_path[leaf.path] for leaf in expected]
    types = [reference.types.get(leaf.path, leaf.value.dtype) for leaf in expected]
    return run_controls(expected, stale, reference.without_slice(0), types, rule)


def run_controls(
    expected: Sequence[Leaf],
    stale: Sequence[Leaf],
    dropped: Sequence[Leaf] | None,
    types: Sequence[torch.dtype],
    rule: Rule,
) -> list[Control]:
    """Apply every control and return the results.

    Args:
        expected: the reference's outputs for these inputs.
        stale: the reference's outputs for other inputs.
        dropped: the reference's outputs with a slice of one input set to zero, or None.
        types: the type in which the sides return each output.
        rule: the rule of the page.

    Raises:
        TooLoose: if the rule accepts a control that applies.
        CannotTell: if no control of one kind applies.
    """
    wrong = dict(_wrong_answers(expected))
    wrong["stale"] = [leaf.value for leaf in stale]
    if dropped is not None:
        wrong["dropped"] = [leaf.value for leaf in dropped]
    controls = [_judge(name, values, expected, types, rule) for name, values in wrong.items()]
    for control in controls:
        if control.applies and not control.refused:
            raise TooLoose(
                f"the tolerance ({rule}) accepts a wrong answer: {control.name} moves the result"
                f" by {control.moves:.3g} derived bounds and passes"
            )
    for kind in ("noise", "structure", "freshness"):
        of_kind = [control for control in controls if KINDS[control.name] == kind]
        if not any(control.applies for control in of_kind):
            raise CannotTell(
                f"no {kind} control applies, so these inputs cannot tell right from wrong: "
                + "; ".join(map(str, of_kind))
            )
    return controls


def _wrong_answers(expected: Sequence[Leaf]) -> Iterator[tuple[str, list[torch.Tensor]]]:
    import torch

    def each(change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        return [change(leaf.value) for leaf in expected]

    largest = max((leaf.value.numel() for leaf in expected), default=0)
    yield "noise", [_noisy(leaf, largest) for leaf in expected]
    yield "zeros", each(torch.zeros_like)
    yield "rolled", each(lambda v: v.roll(1, _longest(v)) if v.dim() else v)
    yield "swapped", each(_swap_halves)
    yield "reversed", each(lambda v: v.flip(_longest(v)) if v.dim() else v)


def _noisy(leaf: Leaf, largest: int) -> torch.Tensor:
    """Return the expected values with noise of 2.4 times the bound, or more if `largest` is small.

    The rms of few elements varies by chance, so more noise is needed to exceed its bound. Only
    outputs of the largest size get this additional noise. With more noise in a smaller output, a
    tolerance that is shared by all outputs would seem too loose.
    """
    import torch

    if leaf.sigma is None:  # integers are off by one, booleans are inverted
        return ~leaf.value if leaf.value.dtype == torch.bool else leaf.value + 1
    generator = torch.Generator(device=leaf.value.device).manual_seed(7)
    draws = torch.empty_like(leaf.value).uniform_(-1, 1, generator=generator)
    more = scatter(largest) if draws.numel() == largest else 0.0
    return leaf.value + NOISE * (1 + more) * leaf.sigma * draws.sign()


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
    types: Sequence[torch.dtype],
    rule: Rule,
) -> Control:
    # Compare each output alone, because a tolerance may be too loose for only one of them.
    least = 1.0 if name == "noise" else APPLIES  # noise is 2.4 bounds by construction
    if any(v.shape != leaf.value.shape for v, leaf in zip(values, expected, strict=True)):
        return Control(name, math.inf, True, True)  # the wrong shape is always refused
    candidates = [value.to(dtype) for value, dtype in zip(values, types, strict=True)]
    derived = compare_all(candidates, expected, Rule())
    by_rule = derived if rule.derived else compare_all(candidates, expected, rule)
    both = zip(derived, by_rule, strict=True)
    applying = [result for moved, result in both if moved.score > least]
    moves = max(result.score for result in derived)
    return Control(name, moves, bool(applying), not any(result.ok for result in applying))


def exact_probe(reference: Reference, sides: Sequence[Side]) -> str:
    """Run every side on small integers, where a linear operation has exactly one right answer.

    If inputs were rounded to integers, only floating-point outputs are compared. Rounding makes
    elements equal, so more than one order of the elements is right.

    Returns:
        a note on how exact the sides are, or on why the probe does not apply.
    """
    import torch

    pool, group = reference.pool, current_group()
    if pool.pair.state is not None:
        return "n/a: the page has a state"
    ranks = [_integers(values, rank) for rank, values in enumerate(pool.all_ranks(0))]
    try:
        expected = outputs_and_state(reference.evaluate(pytree.clone(ranks), []), None)
    except refusals() as error:
        return f"n/a: the reference raises {type(error).__name__} on small integers"
    if group.max(any(not _is_exact(value) for _, value in expected)):
        return "n/a: not exact on small integers"
    if pool.pair.multi_rank and group.max(not _fits_types(reference, expected)):
        return "n/a: ranks round what they add"
    floating = [torch.is_floating_point(value) for _, value in expected]
    replaced = any(t.is_floating_point() for _, t in pytree.tensors(ranks[group.rank]))
    if replaced and not any(floating):
        return "n/a: no output is floating point"
    compared = [i for i, is_float in enumerate(floating) if is_float or not replaced]
    leaves = [Leaf(path, value.double(), None) for path, value in expected]
    rule = Rule(exact=True)
    for side in sides:
        bound = BoundSide(side, [pytree.clone(ranks[group.rank])])
        try:
            outputs = numerics.as_leaves(bound.run(0))
            synchronizer(pool.device)()
        except refusals() as error:
            if group.world > 1:
                raise  # the other ranks continue with the probe
            return f"n/a: {bound.name} raises {type(error).__name__} on small integers"
        finally:
            bound.close()
        tensors = [outputs[i][1] for i in compared]
        for result in compare_all(tensors, [leaves[i] for i in compared], rule):
            if not result.ok:
                message = explain(bound.name, pool.size, result, rule)
                raise Wrong(f"{message}, on inputs replaced by small integers")
    return "bit for bit" if any(floating) else "integers"


def _is_exact(value: torch.Tensor) -> bool:
    scaled = value.double() * 16
    return bool(((scaled == scaled.round()) & (scaled.abs() < 2**24)).all())


def _fits_types(reference: Reference, expected: NamedTensors) -> bool:
    """Return whether the outputs' types can represent the largest expected integer.

    If they can, the partial sum of each rank is also exact.
    """
    for path, value in expected:
        unit = numerics.UNIT.get(str(reference.types.get(path)).removeprefix("torch."), 2.0**-24)
        if value.numel() and float(value.double().abs().amax()) > 1 / unit:
            return False
    return True


def _integers(values: Inputs, rank: int) -> Inputs:
    """Round the `values` of `rank` to integers from -2 to 2, about three quarters of them zero.

    Sides may rely on the order, the equality, and the symmetry of elements, so the rounding
    preserves all three. If all elements of a tensor have the same magnitude, it gets random
    integers.
    """

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        integers = pytree.clone(tensor.detach())
        if tensor.numel():
            integers.copy_(_rounded(tensor.detach().float(), rank))
        return integers.requires_grad_(tensor.requires_grad)

    return pytree.map_tensors(replaced, values)


def _rounded(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    import torch

    magnitude = tensor.abs()
    sample = magnitude.reshape(-1)[:: max(1, magnitude.numel() // SAMPLE)]
    if bool(sample.isfinite().all()) and bool((magnitude != sample[0]).any()):
        one, two = sample.quantile(sample.new_tensor(QUANTILES))
        steps = (magnitude >= one).float().add_(magnitude >= two)
        rounded: torch.Tensor = tensor.sign() * steps
        return rounded
    generator = torch.Generator(device=tensor.device).manual_seed(11 + rank)
    draws = torch.randint(-8, 9, tensor.shape, generator=generator, device=tensor.device)
    return torch.where(draws.abs() <= 2, draws, 0).float()
