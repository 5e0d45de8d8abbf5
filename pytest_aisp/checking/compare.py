"""Compare outputs with the expected values, and explain mismatches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..isolation.protections import enabled
from ..page.pair import SideError, size_words
from ..util import pytree
from .numerics import BASELINE_FACTOR, BASELINE_FLOOR, RMS, WORST, Leaf, Rule
from .output_types import check_containers

if TYPE_CHECKING:
    import torch


SMALL = 1 << 18
"""Outputs with at most this many elements are compared together, to save kernel launches."""


def scatter(count: int) -> float:
    """Return the random variation of an rms over `count` elements: 3 standard deviations."""
    return 3 / math.sqrt(2 * count) if count else 0.0


@dataclass(frozen=True)
class Comparison:
    """The errors of one output, in allowed standard deviations.

    Attributes:
        rms, worst: the rms error over all elements, and the error of the worst element.
        index, got, want, bound: the worst element's index, its actual and expected values, and its
            allowed deviation.
        count: number of elements.
        step: number of the training step that was compared, or, for a page without a state, the
            number of the value set.
        worst_limit: allowed error of the worst element.
        relative: the rms error as a share of the rms of the expected values, or 0 if only equality
            is accepted.
    """

    path: str
    rms: float
    worst: float
    ok: bool
    index: tuple[int, ...] = ()
    got: float = 0.0
    want: float = 0.0
    bound: float = 0.0
    count: int = 0
    step: int = 1
    worst_limit: float = WORST
    relative: float = 0.0

    @property
    def scatter(self) -> float:
        """Relative random variation of `rms`."""
        return scatter(self.count)

    @property
    def score(self) -> float:
        """The error as a multiple of the derived bound. A score above 1 means a wrong output."""
        return max(self.rms / (RMS * (1 + self.scatter)), self.worst / self.worst_limit)

    def judged_by(self, rule: Rule) -> Comparison:
        """Return this comparison, as a failure if it exceeds the bound that `rule` derives."""
        return self if rule.given or self.score <= 1 else replace(self, ok=False)


def compare_all(
    got: Sequence[torch.Tensor], leaves: Sequence[Leaf], rule: Rule
) -> list[Comparison]:
    """Compare outputs with the expected ones, in order. The shapes must be equal.

    Small outputs are first compared as a group. Each output that fails is compared again by itself.
    """
    accepted: dict[int, Comparison] = {}
    if not rule.exact:
        for group in _small_by_device(got, leaves):
            results = _compare_together([got[i] for i in group], [leaves[i] for i in group], rule)
            accepted |= {i: result for i, result in zip(group, results, strict=True) if result.ok}
    return [
        accepted.get(i) or compare(tensor, leaf, rule)
        for i, (tensor, leaf) in enumerate(zip(got, leaves, strict=True))
    ]


def _small_by_device(got: Sequence[torch.Tensor], leaves: Sequence[Leaf]) -> list[list[int]]:
    groups: defaultdict[torch.device, list[int]] = defaultdict(list)
    for i, (tensor, leaf) in enumerate(zip(got, leaves, strict=True)):
        if leaf.sigma is not None and 0 < tensor.numel() <= SMALL:
            groups[tensor.device].append(i)
    return [group for group in groups.values() if len(group) > 1]


def _compare_together(
    got: Sequence[torch.Tensor], leaves: Sequence[Leaf], rule: Rule
) -> list[Comparison]:
    """Compare several small outputs at once, without locating the worst element of each."""
    import torch

    def joined(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([t.detach().reshape(-1).double() for t in tensors])

    counts = [t.numel() for t in got]
    lengths = torch.tensor(counts, device=got[0].device)
    sigma = joined(leaf.sigma for leaf in leaves if leaf.sigma is not None)
    value = joined(leaf.value for leaf in leaves)
    finite = bool(value.isfinite().all())
    error = _errors(joined(got), value, finite)
    within = _within(error, value, finite, rule)
    accepted = torch.segment_reduce(within, "min", lengths=lengths).tolist()
    squares = torch.segment_reduce(error.square(), "sum", lengths=lengths).tolist()
    scaled = _scaled(error, sigma, finite)
    worst = torch.segment_reduce(scaled, "max", lengths=lengths).tolist()
    results = []
    for i, each in enumerate(leaves):
        rms = math.sqrt(squares[i]) / max(each.total, 1e-300)
        result = Comparison(
            each.path,
            rms,
            worst[i],
            bool(accepted[i]),
            count=counts[i],
            worst_limit=each.worst_limit,
            relative=each.relative(rms),
        )
        results.append(result.judged_by(rule))
    return results


def compare(got: torch.Tensor, leaf: Leaf, rule: Rule) -> Comparison:
    """Compare one output with the expected one. The shapes must be equal.

    A large output is compared in pieces, to save memory.
    """
    import torch

    if rule.exact or leaf.sigma is None:
        return _compare_exact(got, leaf)
    if not got.numel():
        return Comparison(leaf.path, 0.0, 0.0, True)
    accepted, norms, worst, index = True, list[float](), -1.0, tuple[int, ...]()
    for at in pytree.pieces(got.shape):
        value = leaf.value[at]
        error = _errors(got[at], value, leaf.finite)
        if rule.given:
            accepted = accepted and bool(_within(error, value, leaf.finite, rule).all())
        norms.append(float(torch.linalg.vector_norm(error)))
        scaled = _scaled(error, leaf.sigma[at], leaf.finite).reshape(-1)
        flat = int(scaled.argmax())
        if (largest := float(scaled[flat])) > worst:
            worst, index = largest, _index(at, value.shape, flat)
    rms = math.hypot(*norms) / max(leaf.total, 1e-300)
    return _at_element(got, leaf, index, rms, worst, accepted).judged_by(rule)


def _errors(got: torch.Tensor, value: torch.Tensor, finite: bool) -> torch.Tensor:
    """Return absolute errors in float64. Where only one value is finite, the error is infinite."""
    import torch

    result = got.detach().to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    if finite:
        not_finite = math.inf if enabled("finite") else 0.0
        return result.sub_(value).abs_().nan_to_num_(not_finite, not_finite)
    expected = value.isfinite()
    agree = torch.where(expected, result.isfinite(), _same(result, value))
    error = torch.where(expected, result.sub_(value).abs_(), 0.0)
    return torch.where(agree, error, math.inf)


def _scaled(error: torch.Tensor, sigma: torch.Tensor, finite: bool) -> torch.Tensor:
    """Divide `error` by `sigma` in place, and return it.

    If an element's expected value is NaN, its `sigma` is NaN too. If the expected value is
    infinite, `sigma` may be infinite, but a wrong value still gets an infinite result.
    """
    if finite:
        return error.div_(sigma)
    return error.div_(sigma.nan_to_num(1.0, math.inf)).nan_to_num_(math.inf, math.inf)


def _within(error: torch.Tensor, value: torch.Tensor, finite: bool, rule: Rule) -> torch.Tensor:
    """Return 1.0 for each element that the page's own tolerance accepts, and 0.0 for the others."""
    if not rule.given:
        return error.new_ones(error.shape)
    bound = value.abs().mul_(rule.rtol or 0.0).add_(rule.atol or 0.0)
    if not finite:
        bound = bound.where(value.isfinite(), 0.0)
    return (error <= bound).to(error.dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _compare_exact(got: torch.Tensor, leaf: Leaf) -> Comparison:
    if not got.numel():
        return Comparison(leaf.path, 0.0, 0.0, True)
    for at in pytree.pieces(got.shape):
        part = got[at]
        want = leaf.value[at].to(got.dtype)
        if got.is_floating_point():
            part, want = part.double(), want.double()  # fp8 tensors cannot be compared directly
        different = ~_same(part, want)
        if bool(different.any()):
            first = int(different.reshape(-1).int().argmax())
            index = _index(at, part.shape, first)
            return _at_element(got, leaf, index, math.inf, math.inf, False)
    return _at_element(got, leaf, (0,) * got.dim(), 0.0, 0.0, True)


def _index(piece: pytree.Piece, shape: Sequence[int], flat: int) -> tuple[int, ...]:
    """Convert the index `flat` in a piece of this `shape` to an index in the whole tensor."""
    inside = []
    for length in reversed(shape):
        inside.append(flat % length)
        flat //= length
    inside.reverse()
    if piece and isinstance(piece[-1], slice):
        inside[0] += piece[-1].start
    return (*(number for number in piece if isinstance(number, int)), *inside)


def _at_element(
    got: torch.Tensor, leaf: Leaf, index: tuple[int, ...], rms: float, worst: float, ok: bool
) -> Comparison:
    """Return the comparison whose worst element is the element at `index`."""
    return Comparison(
        leaf.path,
        rms,
        worst,
        ok,
        index=index,
        got=float(got[index]),
        want=float(leaf.value[index]),
        bound=float(leaf.sigma[index]) if leaf.sigma is not None else 0.0,
        count=got.numel(),
        worst_limit=leaf.worst_limit,
        relative=leaf.relative(rms) if leaf.sigma is not None else 0.0,
    )


def explain(side: str, size: Mapping[str, object], result: Comparison, rule: Rule) -> str:
    """Return a description of a mismatch: output, index, both values, size, and violated bound."""
    where = f"{result.path}{list(result.index)}" if result.index else result.path
    text = (
        f"{side} is wrong at {size_words(size)}:"
        f" {where} is {result.got:.9g}, expected {result.want:.9g}"
    )
    if rule.exact or not math.isfinite(result.worst):
        return f"{text}; the rule is {rule}"
    limits = "" if rule.given else f" (rms {RMS:g}, worst {result.worst_limit:g})"
    return (
        f"{text}; off by {abs(result.got - result.want):.3g} = {result.worst:.3g} allowed"
        f" deviations of {result.bound:.3g} (rms {result.rms:.3g}); the rule is {rule}{limits}"
    )


def less_exact(
    name: str,
    size: Mapping[str, object],
    baseline: Sequence[Comparison],
    compared: Sequence[Comparison],
) -> str:
    """Return a message if the side `name` is less exact than the baseline at `size`, or ""."""
    by_output = {(c.path, c.step): c for c in baseline}
    for own in compared:
        base = by_output.get((own.path, own.step), own)  # the baseline may lack this tensor
        limit = max(BASELINE_FACTOR * base.rms, BASELINE_FLOOR)
        if own.rms > limit * (1 + own.scatter + base.scatter):
            return (
                f"{name} is less exact than its baseline at {size_words(size)}:"
                f" {own.path} has an rms error of {own.rms:.3g} allowed deviations, limit"
                f" {limit:.3g} (1.5 x the baseline's {base.rms:.3g}, at least 0.8);"
                " declare a lower Variant(precision=...) if that is on purpose"
            )
    return ""


def check_outputs(name: str, outputs: object, inputs: Iterable[object], size: str) -> None:
    """Refuse outputs of the side `name` that are lazy or are views of `inputs`."""
    check_containers(name, outputs, size)
    tensors = list(pytree.tensors(outputs))
    if enabled("plain-tensors"):
        for path, tensor in tensors:
            if kind := _lazy_kind(tensor):
                raise SideError(
                    f"{name} returned {path} as {kind} at {size}; an output must be a plain tensor"
                    " with all its values in memory"
                )
    if enabled("no-alias"):
        given = {t.untyped_storage().data_ptr() for slot in inputs for _, t in pytree.tensors(slot)}
        for path, tensor in tensors:
            if tensor.numel() and tensor.untyped_storage().data_ptr() in given:
                raise SideError(f"{name} returned {path} as a view of its input at {size}")


def _lazy_kind(tensor: torch.Tensor) -> str | None:
    """Return a description of the tensor if some of its elements are not in memory, or None."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_neg() or tensor.is_conj():
        return "a tensor whose sign is applied when it is read"
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    if any(length > 1 and stride == 0 for length, stride in dimensions):
        return "an expanded tensor"
    return None


def check_unchanged(name: str, slot: object, values: object, size: str) -> None:
    """Raise `SideError` if a side has changed any bit of an input."""
    import torch

    if not enabled("inputs-unchanged"):
        return
    after, before = list(pytree.leaves(slot)), list(pytree.leaves(values))
    if [path for path, _ in after] != [path for path, _ in before]:
        raise _changed(name, "inputs: one was added or removed", size)
    for (path, new), (_, old) in zip(after, before, strict=True):
        if isinstance(new, torch.Tensor) and isinstance(old, torch.Tensor):
            same = pytree.equal_bits(new, old)
        else:
            same = new is old or not isinstance(new, (int, float, str)) or new == old
        if not same:
            raise _changed(name, f"input {path}", size)


def _changed(name: str, what: str, size: str) -> SideError:
    return SideError(
        f"{name} changed its {what} at {size}; declare what a side may change with state="
    )
