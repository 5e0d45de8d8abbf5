"""The comparison: how far an output lies from what was expected, and the words for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..isolation.protections import enabled
from ..page.pair import SideError, size_words
from ..util import pytree
from .numerics import RMS, WORST, Leaf, Rule

if TYPE_CHECKING:
    import torch


SMALL = 1 << 18
"""Outputs of up to this many elements are compared together: a launch costs more than they do."""


def scatter(count: int) -> float:
    """Return how far an rms of `count` elements scatters by chance: three standard deviations."""
    return 3 / math.sqrt(2 * count) if count else 0.0


@dataclass(frozen=True)
class Comparison:
    """How far one output lies from what was expected, in allowed standard deviations."""

    path: str
    rms: float
    worst: float
    index: tuple[int, ...]
    got: float
    want: float
    bound: float
    ok: bool
    count: int = 0
    step: int = 1
    most: float = WORST

    @property
    def scatter(self) -> float:
        """Relative scatter of `rms` by chance."""
        return scatter(self.count)

    @property
    def score(self) -> float:
        """Multiples of the derived bound: above 1 the derived rule fails."""
        return max(self.rms / (RMS * (1 + self.scatter)), self.worst / self.most)


def compare_all(
    got: Sequence[torch.Tensor], leaves: Sequence[Leaf], rule: Rule
) -> list[Comparison]:
    """Compare outputs with what was expected, in order. Shapes must agree already.

    Small outputs are compared together; only one that does not fit is looked at by itself.
    """
    fits: dict[int, Comparison] = {}
    if not rule.exact:
        for members in _small(got, leaves):
            found = _compare_together([got[i] for i in members], [leaves[i] for i in members], rule)
            fits |= {i: fit for i, fit in zip(members, found, strict=True) if fit.ok}
    both = zip(got, leaves, strict=True)
    return [fits.get(i) or compare(tensor, leaf, rule) for i, (tensor, leaf) in enumerate(both)]


def _small(got: Sequence[torch.Tensor], leaves: Sequence[Leaf]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for i, (tensor, leaf) in enumerate(zip(got, leaves, strict=True)):
        if leaf.sigma is not None and 0 < tensor.numel() <= SMALL:
            groups.setdefault(tensor.device, []).append(i)
    return [members for members in groups.values() if len(members) > 1]


def _compare_together(
    got: Sequence[torch.Tensor], leaves: Sequence[Leaf], rule: Rule
) -> list[Comparison]:
    """Return a fit for each of several small outputs, without the place of its worst element."""
    import torch

    def joined(tensors: Sequence[Any]) -> torch.Tensor:
        return torch.cat([t.detach().reshape(-1) for t in tensors])

    counts = [t.numel() for t in got]
    lengths = torch.tensor(counts, device=got[0].device)
    leaf = Leaf("", joined([x.value for x in leaves]), joined([x.sigma for x in leaves]))
    error = _errors(joined(got), leaf)
    accepted = torch.segment_reduce(_within(error, leaf, rule), "min", lengths=lengths).tolist()
    squares = torch.segment_reduce(error.square(), "sum", lengths=lengths).tolist()
    scaled = error.div_(leaf.sigma) if leaf.sigma is not None else error
    worst = torch.segment_reduce(scaled, "max", lengths=lengths).tolist()
    fits: list[Comparison] = []
    for i, each in enumerate(leaves):
        rms = math.sqrt(squares[i]) / max(each.total, 1e-300)
        fit = Comparison(
            each.path,
            rms,
            worst[i],
            (),
            0.0,
            0.0,
            0.0,
            bool(accepted[i]),
            counts[i],
            most=each.most,
        )
        fits.append(fit if rule.given or fit.score <= 1 else replace(fit, ok=False))
    return fits


def compare(got: torch.Tensor, leaf: Leaf, rule: Rule) -> Comparison:
    """Compare one output with what was expected. Shapes must agree already."""
    import torch

    if rule.exact or leaf.sigma is None:
        return _compare_exact(got, leaf)
    if not got.numel():
        return Comparison(leaf.path, 0.0, 0.0, (), 0.0, 0.0, 0.0, True)
    error = _errors(got, leaf)
    accepted = bool(_within(error, leaf, rule).all()) if rule.given else True
    rms = float(torch.linalg.vector_norm(error)) / max(leaf.total, 1e-300)
    scaled = error.div_(leaf.sigma)
    flat = int(scaled.argmax())
    fit = _fit(got, leaf, flat, rms, float(scaled.view(-1)[flat]), accepted)
    return fit if rule.given or fit.score <= 1 else replace(fit, ok=False)


def _errors(got: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """Return the absolute errors in float64; infinite where one is finite and the other is not."""
    import torch

    result = got.detach().to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    if leaf.finite:
        wild = math.inf if enabled("finite") else 0.0
        return result.sub_(leaf.value).abs_().nan_to_num_(wild, wild)
    expected = leaf.value.isfinite()
    agree = torch.where(expected, result.isfinite(), _same(result, leaf.value))
    error = torch.where(expected, result.sub_(leaf.value).abs_(), 0.0)
    return torch.where(agree, error, math.inf)


def _within(error: torch.Tensor, leaf: Leaf, rule: Rule) -> torch.Tensor:
    """Return 1.0 where the page's own tolerance accepts the error, and everywhere without one."""
    if not rule.given:
        return error.new_ones(()).expand(error.shape).contiguous()
    bound = leaf.value.abs().mul_(rule.rtol or 0.0).add_(rule.atol or 0.0)
    if not leaf.finite:
        bound = bound.where(leaf.value.isfinite(), 0.0)
    return (error <= bound).to(error.dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _compare_exact(got: torch.Tensor, leaf: Leaf) -> Comparison:
    want = leaf.value.to(got.dtype)
    different = ~_same(got, want) if got.is_floating_point() else got != want
    flat = int(different.view(-1).int().argmax()) if different.numel() else 0
    bad = bool(different.any())
    far = math.inf if bad else 0.0
    return _fit(got, leaf, flat, far, far, not bad)


def _fit(
    got: torch.Tensor, leaf: Leaf, flat: int, rms: float, worst: float, ok: bool
) -> Comparison:
    if not got.numel():
        return Comparison(leaf.path, rms, worst, (), 0.0, 0.0, 0.0, ok)
    index, rest = [], flat
    for length in reversed(got.shape):
        index.append(rest % length)
        rest //= length
    at = tuple(reversed(index))
    sigma = float(leaf.sigma[at]) if leaf.sigma is not None else 0.0
    return Comparison(
        leaf.path,
        rms,
        worst,
        at,
        float(got[at]),
        float(leaf.value[at]),
        sigma,
        ok,
        got.numel(),
        most=leaf.most,
    )


def explain(side: str, size: Any, fit: Comparison, rule: Rule) -> str:
    """Return the message of a mismatch: output, coordinate, both values, size, broken bound."""
    where = f"{fit.path}{list(fit.index)}" if fit.index else fit.path
    text = (
        f"{side} is wrong at {size_words(size)}: {where} is {fit.got:.9g}, expected {fit.want:.9g}"
    )
    if rule.exact or not math.isfinite(fit.worst):
        return f"{text}; the rule is {rule}"
    limits = "" if rule.given else f" (rms {RMS:g}, worst {fit.most:g})"
    return (
        f"{text}; off by {abs(fit.got - fit.want):.3g} = {fit.worst:.3g} allowed deviations of"
        f" {fit.bound:.3g} (rms {fit.rms:.3g}); the rule is {rule}{limits}"
    )


def check_outputs(name: str, outputs: Any, inputs: Iterable[Any], size: str) -> None:
    """Refuse outputs of the side `name` that were not written: lazy ones, and views of `inputs`."""
    tensors = list(pytree.tensors(outputs))
    if enabled("plain-tensors"):
        for path, tensor in tensors:
            if how := _lazy(tensor):
                raise SideError(
                    f"{name} returned {path} as {how} at {size}; an output is a plain tensor, whose"
                    " values are there"
                )
    if enabled("no-alias"):
        given = {t.untyped_storage().data_ptr() for slot in inputs for _, t in pytree.tensors(slot)}
        for path, tensor in tensors:
            if tensor.numel() and tensor.untyped_storage().data_ptr() in given:
                raise SideError(f"{name} returned {path} as a view of its input at {size}")


def _lazy(tensor: torch.Tensor) -> str | None:
    """Return what `tensor` is if its elements are not all written in memory, else None."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_neg() or tensor.is_conj():
        return "a tensor whose sign is left to its reader"
    if any(stride == 0 < length - 1 for stride, length in zip(tensor.stride(), tensor.shape)):  # noqa: B905
        return "an expanded tensor"
    return None


def check_unchanged(name: str, slot: Any, values: Any, size: str) -> None:
    """Refuse a side that changed an input, by a single bit."""
    import torch

    if not enabled("inputs-unchanged"):
        return
    now, before = list(pytree.leaves(slot)), list(pytree.leaves(values))
    if [path for path, _ in now] != [path for path, _ in before]:
        raise _changed(name, "", size)
    for (path, leaf), (_, was) in zip(now, before, strict=True):
        if isinstance(leaf, torch.Tensor) and isinstance(was, torch.Tensor):
            same = torch.equal(_bits(leaf), _bits(was))
        else:
            same = leaf is was or not isinstance(leaf, (int, float, str)) or leaf == was
        if not same:
            raise _changed(name, path, size)


def _changed(name: str, path: str, size: str) -> SideError:
    what = f"input {path}" if path else "inputs: one is gone, or new"
    return SideError(
        f"{name} changed its {what} at {size}; what a side may change is declared with state="
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes, so that NaN equals itself."""
    import torch

    flat = tensor.detach().contiguous().view(-1)
    return flat if flat.dtype == torch.bool else flat.view(torch.uint8)
