"""When is a result right: expected values, the error they allow, and the comparison.

The reference is computed in float64 from the inputs as the sides get them. The allowed error of
each element is a standard deviation derived from the types, the longest sum and the reference's own
sensitivity to its operands; `docs/checking.md` derives it. Two tests must hold: the rms of the
error over all elements, and the worst element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import trees
from .pair import Work, size_words

if TYPE_CHECKING:
    import torch

RMS, WORST = 1.25, 8.0
"""The derived rule: rms error and worst element, in allowed standard deviations."""
BASELINE_FACTOR, BASELINE_FLOOR = 1.5, 0.8
"""A variant's rms may be this many times the baseline's, and is never held below the floor."""
PROBES = 3
STEP = 2.0**-10
"""Relative perturbation of the operands that measures the reference's sensitivity."""

# Unit roundoff by name of type, and the depth of one tensor-core instruction (K elements).
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
UNIT |= {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3, "tf32": 2.0**-11, "fp16": 2.0**-11}
UNIT |= {"bf16": 2.0**-8, "fp8": 2.0**-4, "mxfp8": 2.0**-4, "nvfp4": 2.0**-2}
UNIT |= {"int8": 2.0**-8, "int4": 2.0**-4}
_DEPTH = {"tf32": 8, "bf16": 16, "fp16": 16, "bfloat16": 16, "float16": 16}


class Wrong(AssertionError):
    """A side's result is not what the reference says; the message shows where and by how much."""


@dataclass(frozen=True)
class Rule:
    """How equal is equal. With neither `exact` nor a tolerance the bound is derived."""

    exact: bool = False
    rtol: float | None = None
    atol: float | None = None

    @property
    def given(self) -> bool:
        """Whether the page chose a tolerance of its own."""
        return self.rtol is not None or self.atol is not None

    def __str__(self) -> str:
        if self.exact:
            return "exact"
        if self.given:
            return f"rtol={self.rtol or 0:g}, atol={self.atol or 0:g}"
        return f"derived bound (rms {RMS:g}, worst {WORST:g})"


@dataclass(frozen=True)
class Leaf:
    """One expected output: its value in float64 and the error it allows, element by element."""

    path: str
    value: torch.Tensor
    sigma: torch.Tensor | None


@dataclass(frozen=True)
class Fit:
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

    @property
    def scatter(self) -> float:
        """Relative scatter of `rms` by chance: three standard deviations at `count` elements."""
        return 3 / math.sqrt(2 * self.count) if self.count else 0.0

    @property
    def score(self) -> float:
        """Multiples of the derived bound: above 1 the derived rule fails."""
        return max(self.rms / (RMS * (1 + self.scatter)), self.worst / WORST)


def sensitivity(
    run: Callable[[int | None], list[tuple[str, torch.Tensor]]],
) -> list[tuple[str, torch.Tensor, torch.Tensor | None]]:
    """Return the reference's outputs and the squares of their sensitivities.

    Args:
        run: computes the reference's leaves; with a number, on operands perturbed by `STEP` with
            random signs seeded by it.
    """
    base = run(None)
    squares: list[torch.Tensor | None] = [_zeros(value) for _, value in base]
    for probe in range(PROBES):
        for total, (_, moved), (_, value) in zip(squares, run(probe), base, strict=True):
            if total is not None:
                difference = (moved.double() - value.double()).div_(STEP)
                total += difference.square_().nan_to_num_(0.0, 0.0, 0.0) / PROBES
    return [
        (path, v.double() if _floating(v) else v, _floored(s) if s is not None else None)
        for (path, v), s in zip(base, squares, strict=True)
    ]


def _zeros(value: torch.Tensor) -> torch.Tensor | None:
    import torch

    return torch.zeros_like(value, dtype=torch.float64) if _floating(value) else None


def _floored(squares: torch.Tensor) -> torch.Tensor:
    # Three probes scatter: no element's sensitivity is believed below 0.7 of the output's rms one,
    # else the worst of 10^8 honest elements would pass the limit by an unlucky estimate.
    return squares.clamp_min_(0.5 * float(squares.mean())) if squares.numel() else squares


def _floating(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point())


def allowed(
    value: torch.Tensor,
    squares: torch.Tensor,
    *,
    dtype: str,
    precision: str | None,
    work: Work,
    steps: int = 1,
) -> torch.Tensor:
    """Return the allowed standard deviation of each element (float64, shape of `value`).

    Args:
        value: what the reference says, float64.
        squares: sum of squares of the terms that make each element.
        dtype: type in which the sides return it, ``float32``.
        precision: lower arithmetic that a side uses on purpose, or None.
        work: the page's work: longest sum and number of roundings.
        steps: how often the whole computation ran one after the other.
    """
    u_out = UNIT[dtype]
    low = precision if precision and UNIT[precision] > u_out else None
    operands = 2 * work.roundings * steps if low else work.roundings * steps - 1
    u_in = UNIT[low] if low else u_out
    rounding = (u_out**2 * value.square() + operands * u_in**2 * squares) / 3
    return (rounding + steps * _accumulation(value, squares, dtype, precision, work.terms)).sqrt_()


def _accumulation(
    value: torch.Tensor, squares: torch.Tensor, dtype: str, precision: str | None, terms: int
) -> torch.Tensor:
    """Return the variance that summing `terms` products in the accumulator may cost."""
    arithmetic = precision or dtype
    if arithmetic == "float64":
        return UNIT["float64"] ** 2 * terms * (squares / 6 + value.square() / 9)
    depth = _DEPTH.get(arithmetic, 32 if UNIT.get(arithmetic, 0) >= 2.0**-4 else None)
    if depth is None or terms == 1:  # CUDA cores round to nearest: the error grows like a root
        return UNIT["float32"] ** 2 * terms * (squares / 6 + value.square() / 9)
    length = max(1.0, terms / depth)  # tensor cores truncate: it grows linearly
    return (UNIT["float32"] * length / 2) ** 2 * (squares + value.square())


def compare(got: torch.Tensor, leaf: Leaf, rule: Rule) -> Fit:
    """Compare one output with what was expected. Shapes must agree already."""
    import torch

    want = leaf.value
    if rule.exact or leaf.sigma is None:
        return _compare_exact(got, leaf)
    result = got.detach().double()
    error = result - want
    agree = torch.where(want.isfinite(), result.isfinite(), _same(result, want))
    error = torch.where(want.isfinite(), error, 0.0).abs_()
    error = torch.where(agree, error, math.inf)
    scaled = error / leaf.sigma.clamp_min(1e-300)
    flat = int(scaled.argmax()) if scaled.numel() else 0
    worst = float(scaled.view(-1)[flat]) if scaled.numel() else 0.0
    total = float(leaf.sigma.square().sum())
    spread = float(error.square().sum()) / max(total, 1e-300) if math.isfinite(worst) else math.inf
    rms = math.sqrt(spread)
    if rule.given:
        bound = (rule.atol or 0.0) + (rule.rtol or 0.0) * want.abs()
        ok = bool((error <= torch.where(want.isfinite(), bound, 0.0)).all())
    else:
        fit = _fit(got, leaf, flat, rms, worst, False)
        ok = fit.score <= 1
    return _fit(got, leaf, flat, rms, worst, ok)


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _compare_exact(got: torch.Tensor, leaf: Leaf) -> Fit:
    want = leaf.value.to(got.dtype)
    different = ~_same(got, want) if got.is_floating_point() else got != want
    flat = int(different.view(-1).int().argmax()) if different.numel() else 0
    bad = bool(different.any())
    far = math.inf if bad else 0.0
    return _fit(got, leaf, flat, far, far, not bad)


def _fit(got: torch.Tensor, leaf: Leaf, flat: int, rms: float, worst: float, ok: bool) -> Fit:
    if not got.numel():
        return Fit(leaf.path, rms, worst, (), 0.0, 0.0, 0.0, ok)
    index, rest = [], flat
    for length in reversed(got.shape):
        index.append(rest % length)
        rest //= length
    at = tuple(reversed(index))
    sigma = float(leaf.sigma[at]) if leaf.sigma is not None else 0.0
    return Fit(
        leaf.path, rms, worst, at, float(got[at]), float(leaf.value[at]), sigma, ok, got.numel()
    )


def explain(side: str, size: Any, fit: Fit, rule: Rule) -> str:
    """Return the message of a mismatch: output, coordinate, both values, size, broken bound."""
    where = f"{fit.path}{list(fit.index)}" if fit.index else fit.path
    text = (
        f"{side} is wrong at {size_words(size)}: {where} is {fit.got:.9g}, expected {fit.want:.9g}"
    )
    if rule.exact or not math.isfinite(fit.worst):
        return f"{text}; the rule is {rule}"
    return (
        f"{text}; off by {abs(fit.got - fit.want):.3g} = {fit.worst:.3g} allowed deviations of"
        f" {fit.bound:.3g} (rms {fit.rms:.3g}); the rule is {rule}"
    )


def as_leaves(outputs: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the outputs as tensors; Python numbers become float32 or int64 scalars.

    Raises:
        trees.TreeError: for a leaf that cannot be compared.
    """
    import torch

    found = []
    for path, leaf in trees.leaves(outputs):
        if type(leaf) in (bool, int):
            leaf = torch.tensor(leaf)
        elif type(leaf) is float:
            leaf = torch.tensor(leaf, dtype=torch.float32)
        if not isinstance(leaf, torch.Tensor):
            raise trees.TreeError(f"{path} is a {type(leaf).__name__}, not a tensor or a number")
        found.append((path, leaf.detach()))
    return found


def type_name(tensor: torch.Tensor) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def rms_over(fits: Sequence[Fit]) -> float:
    """Return the worst rms among outputs."""
    return max((f.rms for f in fits), default=0.0)
