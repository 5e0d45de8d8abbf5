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
    "This is the exact probe: the values of the inputs were replaced by integers from -2 to 2 or by"
    " halves. The reference has no rounding error on them, so every side must return exactly its"
    " values. Look for terms that are left out or added twice"
)
NUDGE, JUMP = 2.0**-30, 1 / 32
"""Inputs change by at most half of `NUDGE`. An output that changes by `JUMP` or more jumps."""
SAMPLE = 1 << 16
"""Number of elements from which the quantiles are computed."""
NORMS = {1: "magnitudes sum to 1", 2: "rows have norm 1"}
"""Properties of rows that sides may rely on, by the order of the norm."""
NORM_ERROR = 1e-5
"""A norm may differ from 1 by this much, or by the unit roundoff if that is larger."""
FEW = 8
"""Norms of this many rows per dimension are computed before the norms of all rows."""


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
    both = [_integers(values, rank) for rank, values in enumerate(pool.all_ranks(0))]
    ranks, remarks = [integers for integers, _ in both], both[group.rank][1]
    for remark in remarks:
        reference.bound.remark(remark)
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
                raise Wrong("\n".join([message, PROBE, *remarks]))
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


def _integers(values: Inputs, rank: int) -> tuple[Inputs, list[str]]:
    """Return the `values` of `rank` with floats rounded to integers, and remarks about exceptions.

    Sides may rely on properties of the inputs, so rounding preserves several of them:

    - the order, the equality, and the symmetry of elements;
    - a range: if no magnitude is above 1, none is above 1 afterwards. If the largest one is at
      least 1/2 and below 1, it is 1/2 afterwards;
    - tensors of integers from -2 to 2, which stay as they are;
    - the norm of rows (see `_one_hot`).
    """
    integers = pytree.map_tensors(lambda tensor: pytree.clone(tensor.detach()), values)
    remarks = []
    tensors = zip(pytree.tensors(integers), pytree.tensors(values), strict=True)
    for (path, new), (_, old) in tensors:
        if new.is_floating_point() and new.numel() and (exception := _round(new, rank)):
            remarks.append(f"exact probe: inputs{path} {exception}")
        new.requires_grad_(old.requires_grad)
    return integers, remarks


def _round(tensor: torch.Tensor, rank: int) -> str:
    """Round `tensor` in place to few integers, about three quarters of them zero.

    A tensor whose elements are all equal gets random integers. Return a remark if elements are
    kept, or if rows become one-hot.
    """
    import torch

    parts = [tensor[at] for at in pytree.pieces(tensor.shape)]
    sample = tensor.reshape(-1)[:: max(1, tensor.numel() // SAMPLE)].float()
    finite = bool(sample.isfinite().all())
    if finite and any(bool((part.float() != sample[0]).any()) for part in parts):
        if all(_are_small_integers(part.float()) for part in parts):
            return "is kept: its elements are integers from -2 to 2"
        if remark := _one_hot(tensor):
            return remark
        largest = max(float(part.float().abs().amax()) for part in parts)
        one, two = sample.abs().quantile(sample.new_tensor(QUANTILES)).tolist()
        for part in parts:
            magnitude = part.float().abs()
            steps = (magnitude >= one).float()
            if largest > 1:
                steps += magnitude >= two
            elif 0.5 <= largest < 1:
                steps *= 0.5
            part.copy_(steps.mul_(part.float().sign()))
        return ""
    generator = torch.Generator(device=tensor.device).manual_seed(11 + rank)
    for part in parts:
        draws = torch.randint(-8, 9, part.shape, generator=generator, device=part.device)
        part.copy_(torch.where(draws.abs() <= 2, draws, 0))
    return ""


def _are_small_integers(part: torch.Tensor) -> bool:
    return bool(((part.abs() <= 2) & (part == part.round())).all())


def _one_hot(tensor: torch.Tensor) -> str:
    """Make rows one-hot, in place, if the magnitudes of each row sum to 1, or if its norm is 1.

    Rows may lie along any dimension. The largest element of a row becomes 1 or -1. The tensor is
    not changed if rows along several dimensions have such a sum or norm, or if a row has several
    largest elements. Return a remark, or an empty string if no rows have such a sum or norm.
    """
    for order, words in NORMS.items():
        dims = [dim for dim in range(tensor.dim()) if _rows_have_norm_one(tensor, order, dim)]
        if dims:
            along = f"its {words} along dimension {' and '.join(map(str, dims))}"
            magnitude = tensor.abs()
            hot = (magnitude == magnitude.amax(dims[0], keepdim=True)) & (magnitude > 0)
            if len(dims) > 1 or bool((hot.sum(dims[0]) > 1).any()):
                return f"is kept: {along}"
            tensor.sign_().mul_(hot)
            return f"has one-hot rows: {along}"
    return ""


def _rows_have_norm_one(tensor: torch.Tensor, order: int, dim: int) -> bool:
    """Return whether all rows along `dim`, except rows of zeros, have norm 1 within rounding."""
    import torch

    if tensor.shape[dim] == 1 or tensor.element_size() == 1:
        return False  # 8-bit floats are too coarse
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    limit = max(numerics.UNIT[str(tensor.dtype).removeprefix("torch.")], NORM_ERROR)
    few = tensor[tuple(slice(None if d == dim else FEW) for d in range(tensor.dim()))]
    for part in (few, tensor):
        norms = torch.linalg.vector_norm(part, order, dim=dim, dtype=dtype)
        if not bool((((norms - 1).abs() <= limit) | (norms == 0)).all()):
            return False
    return True
