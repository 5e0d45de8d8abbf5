"""The exact probe: on small integers, linear operations have the same result in any order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..page.pair import Side
from ..util import pytree
from ..util.device_state import synchronizer
from ..util.process_group import current_group
from . import numerics
from .compare import compare_all, explain
from .inputs import BoundSide
from .numerics import Leaf, NamedTensors, Rule, Wrong
from .page_values import Inputs
from .reference import Reference, outputs_and_state, refusals

if TYPE_CHECKING:
    import torch

QUANTILES = 0.75, 0.9
"""Two quantiles of the elements' magnitudes. The exact probe replaces magnitudes below the first
quantile with 0, magnitudes between the quantiles with 1, and larger magnitudes with 2."""
PROBE = (
    "This is the exact probe: the values of the inputs were replaced by integers from -2 to 2. The"
    " reference has no rounding error on them, so every side must return exactly its values. Look"
    " for terms that are left out or added twice"
)
NUDGE, JUMP = 2.0**-30, 1 / 32
"""Inputs change by at most half of `NUDGE`. An output that changes by `JUMP` or more jumps."""
SAMPLE = 1 << 16
"""Number of elements from which the quantiles are computed."""


def exact_probe(reference: Reference, sides: Sequence[Side]) -> str:
    """Run every side on small integers, where a linear operation has exactly one right answer.

    If inputs had to be rounded to integers, only floating-point outputs are compared. Rounding
    makes elements equal, and equal elements may be sorted in any order, so indices may differ.

    Returns:
        ``bit for bit``, ``integers``, or ``n/a:`` and the reason why the probe does not apply.
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
                raise  # the other ranks would wait for this one
            return f"n/a: {bound.name} raises {type(error).__name__} on small integers"
        finally:
            bound.close()
        tensors = [outputs[i][1] for i in compared]
        results = compare_all(tensors, [leaves[i] for i in compared], rule)
        del outputs, tensors  # before the next side runs, because they may be large
        if replaced and not all(result.ok for result in results) and _jumps(reference, ranks):
            return "n/a: the reference is not continuous at small integers"
        for result in results:
            if not result.ok:
                message = explain(bound.name, pool.size, result, rule)
                raise Wrong(f"{message}\n{PROBE}")
    return "bit for bit" if any(floating) else "integers"


def _jumps(reference: Reference, ranks: Sequence[Inputs]) -> bool:
    """Return whether an output of the reference jumps if its inputs change a little.

    Rounding to integers makes elements equal, or moves them onto a threshold. More than one result
    may then be right, such as either order of two equal keys. The inputs are changed in two
    opposite directions. At least one direction reverses the order of equal keys.
    """
    outputs: list[NamedTensors] = []
    for change in (NUDGE, 0.0, -NUDGE):
        nudged = [_nudged(values, change) for values in ranks]
        try:
            outputs.append(outputs_and_state(reference.evaluate(nudged, []), None))
        except refusals():
            return True
    return any(
        a.shape != b.shape or not bool(((a.double() - b.double()).abs() < JUMP).all())
        for first, second in itertools.pairwise(outputs)
        for (_, a), (_, b) in zip(first, second, strict=True)
        if a.is_floating_point()
    )


def _nudged(values: Inputs, size: float) -> Inputs:
    """Return a copy of `values` with all floats in float64 and small random numbers added."""
    import torch

    generator = torch.Generator().manual_seed(13)

    def nudged(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        draws = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
        return tensor.detach().double() + size * (draws.to(tensor.device) - 0.5)

    return pytree.map_tensors(nudged, values)


def _is_exact(value: torch.Tensor) -> bool:
    def is_exact(piece: torch.Tensor) -> bool:
        scaled = piece.double() * 16
        return bool(((scaled == scaled.round()) & (scaled.abs() < 2**24)).all())

    return all(is_exact(value[at]) for at in pytree.pieces(value.shape))


def _fits_types(reference: Reference, expected: NamedTensors) -> bool:
    """Return whether the outputs' types can represent the largest expected integer.

    If the types can represent that integer, the partial sum of each rank is exact too.
    """
    for path, value in expected:
        unit = numerics.UNIT.get(str(reference.types.get(path)).removeprefix("torch."), 2.0**-24)
        if value.numel() and float(value.double().abs().amax()) > 1 / unit:
            return False
    return True


def _integers(values: Inputs, rank: int) -> Inputs:
    """Round the `values` of `rank` to integers from -2 to 2, about three quarters of them zero.

    Rounding preserves the order, the equality, and the symmetry of elements, because sides may rely
    on these properties. A tensor whose elements all have the same magnitude gets random integers.
    """

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        integers = pytree.clone(tensor.detach())
        if tensor.numel():
            _round(integers, rank)
        return integers.requires_grad_(tensor.requires_grad)

    return pytree.map_tensors(replaced, values)


def _round(tensor: torch.Tensor, rank: int) -> None:
    import torch

    parts = [tensor[at] for at in pytree.pieces(tensor.shape)]
    sample = tensor.reshape(-1)[:: max(1, tensor.numel() // SAMPLE)].float().abs()
    finite = bool(sample.isfinite().all())
    if finite and any(bool((part.float().abs() != sample[0]).any()) for part in parts):
        one, two = sample.quantile(sample.new_tensor(QUANTILES)).tolist()
        for part in parts:
            magnitude = part.float().abs()
            steps = (magnitude >= one).float().add_(magnitude >= two)
            part.copy_(steps.mul_(part.float().sign()))
        return
    generator = torch.Generator(device=tensor.device).manual_seed(11 + rank)
    for part in parts:
        draws = torch.randint(-8, 9, part.shape, generator=generator, device=part.device)
        part.copy_(torch.where(draws.abs() <= 2, draws, 0))
