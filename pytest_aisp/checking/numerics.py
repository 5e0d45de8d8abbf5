"""Compute the allowed error of each output element.

The reference is computed in float64 from the same inputs that the sides get. The allowed error of
each element is a standard deviation. The standard deviation depends on the number formats, and on
how far the rounding of intermediate values moves the reference. docs/explanation/checking.md has
the derivation. Two errors are limited: the rms error over all elements of an output, and the error
of the output's worst element.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..util import pytree

if TYPE_CHECKING:
    import torch

RMS, WORST = 1.25, 8.0
"""Limits of the rms error and of the worst element's error, in allowed standard deviations."""
BASELINE_FACTOR, BASELINE_FLOOR = 1.5, 0.8
"""Limit of a variant's rms error: `BASELINE_FACTOR` times the baseline's rms error, but at least
`BASELINE_FLOOR`, in allowed standard deviations."""
LEAST_SIGMA = {8: 1e-300, 4: 1e-45}
"""Smallest allowed standard deviation, keyed by the size in bytes of the type that stores it. 1e-45
is the smallest float32."""
DRAWS, MORE_DRAWS = 3, 12
"""Number of perturbed runs of the reference, and number of further runs before a side is
refused."""
LONG, SLOW = 0.5, 10.0
"""Limits in seconds for a traced run of the reference. If a run takes longer than `LONG`, the
reference is perturbed only once at first. If a run takes longer than `SLOW`, a side is refused
after `DRAWS` more runs instead of `MORE_DRAWS`."""
STEP = 2.0**-10
"""Relative perturbation of the inputs of a reference that cannot be traced."""
TRACED = 1e-3
"""A reference is not traced if tracing changes its results by more than this share."""
UNTRACED_TERMS, UNTRACED_ROUNDINGS = 1024, 8
"""For an untraced reference: default number of terms in the longest sum, and roundings in a row."""

BLOCKED, WORST_BLOCK = ("int8", "int4", "w4a16", "mxfp8", "nvfp4"), 16.0
"""Formats in which the values of a block share one scale, and the limit for the worst element.

`UNIT` assumes that the largest value of a block is four times the rms. But the largest of 10^8
normally distributed values is six times the rms. Also, a scale that is rounded to a power of two
may double the distance between representable values.
"""

# UNIT: unit roundoff by format. DEPTH: the K elements that one tensor-core instruction sums.
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
UNIT |= {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3, "tf32": 2.0**-11, "fp16": 2.0**-11}
UNIT |= {"bf16": 2.0**-8, "fp8": 2.0**-4, "mxfp8": 2.0**-4, "nvfp4": 2.0**-2}
# In these formats, the unit is relative to the largest value in the block, which is about four
# times the block's rms.
UNIT |= {"int8": 2.0**-6, "int4": 2.0**-2, "w4a16": 2.0**-2}
ONE_OPERAND = ("w4a16",)  # only the weights have four bits
OPERANDS_ONLY = ("tf32", *ONE_OPERAND)  # results are never rounded to these formats
EIGHT_BITS = (*BLOCKED, "fp8")  # only inputs, outputs and operands of products have these formats
DEPTH = {"tf32": 8, "bf16": 16, "fp16": 16, "bfloat16": 16, "float16": 16}

NamedTensors = list[tuple[str, "torch.Tensor"]]


class Wrong(AssertionError):
    """A side's result differs from the reference. The message shows where and by how much."""


class WrongForm(Wrong):
    """The number, shape, type or device of a side's outputs differs from the reference's."""

    code = "wrong_structure"


@dataclass(frozen=True)
class Rule:
    """The rule of a comparison. The bound is derived if neither `exact` nor a tolerance is set."""

    exact: bool = False
    rtol: float | None = None
    atol: float | None = None

    @property
    def given(self) -> bool:
        """True if the page sets its own tolerance."""
        return self.rtol is not None or self.atol is not None

    @property
    def derived(self) -> bool:
        """True if the error bound is derived."""
        return not (self.exact or self.given)

    def __str__(self) -> str:
        if self.exact:
            return "exact"
        if self.given:
            return f"rtol={self.rtol or 0:g}, atol={self.atol or 0:g}"
        return "derived bound"


@dataclass(frozen=True)
class Leaf:
    """One expected output: its value in float64 and the allowed error of each element.

    Attributes:
        sigma: allowed standard deviation of each element, or None if only equality is accepted.
            The dtype is float64 if the side's output is in float64, and float32 if not. Zeros are
            replaced by `LEAST_SIGMA`.
        worst_limit: allowed error of the worst element, in allowed standard deviations.
    """

    path: str
    value: torch.Tensor
    sigma: torch.Tensor | None
    worst_limit: float = WORST

    def __post_init__(self) -> None:
        if self.sigma is not None:
            self.sigma.clamp_min_(LEAST_SIGMA[self.sigma.element_size()])

    @functools.cached_property
    def finite(self) -> bool:
        """True if every expected element is finite."""
        return all(bool(self.value[at].isfinite().all()) for at in pytree.pieces(self.value.shape))

    @functools.cached_property
    def total(self) -> float:
        """Root of the sum of the squares of `sigma` over elements with finite expected values."""
        import torch

        if self.sigma is None:
            return 0.0
        norms = []
        for at in pytree.pieces(self.value.shape):
            counted = self.sigma[at].double()
            if not self.finite:
                counted = counted.where(self.value[at].isfinite(), 0.0)
            norms.append(float(torch.linalg.vector_norm(counted)))
        return math.hypot(*norms)

    @functools.cached_property
    def norm(self) -> float:
        """Root of the sum of the squares of the finite expected values."""
        import torch

        norms = []
        for at in pytree.pieces(self.value.shape):
            value = self.value[at].double()
            value = value if self.finite else value.where(value.isfinite(), 0.0)
            norms.append(float(torch.linalg.vector_norm(value)))
        return math.hypot(*norms)

    def relative(self, rms: float) -> float:
        """Convert an rms error from allowed deviations to a share of the rms of the values."""
        return rms * self.total / self.norm if self.norm else 0.0


class Expected(NamedTuple):
    """One output of the reference, in float64 if it is floating point."""

    path: str
    value: torch.Tensor


def as_expected(path: str, value: torch.Tensor, *, copy: bool) -> Expected:
    """Return one output of the reference, in float64 if it is floating point."""
    import torch

    dtype = torch.float64 if value.is_floating_point() else value.dtype
    return Expected(path, value.to(dtype, copy=copy))


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both tensors have the same shape and elements."""
    import torch

    return one.shape == other.shape and torch.equal(one, other.to(one.dtype))


def nearly_same(one: Expected, named: tuple[str, torch.Tensor]) -> bool:
    """Return whether two runs of the same operations had nearly the same result."""
    import torch

    value = named[1]
    if not value.is_floating_point() or value.shape != one.value.shape:
        return same_values(one.value, value)
    difference = torch.linalg.vector_norm((value.double() - one.value).nan_to_num_(0.0, 0.0, 0.0))
    size = torch.linalg.vector_norm(one.value.nan_to_num(0.0, 0.0, 0.0))
    return bool(difference <= TRACED * size)


def add_differences(
    totals: list[torch.Tensor | None],
    moved: NamedTensors,
    expected: Sequence[Expected],
    step: float,
) -> None:
    """Add the squared differences between a perturbed run and `expected` to `totals`, in place.

    Args:
        totals: the root of the sum of all earlier squares of each output, or None for an output
            that is not floating point. The root is stored because squares may underflow in float32.
        moved: the outputs of the perturbed run. The list is emptied to free memory.
        step: the factor by which the perturbation was scaled up.
    """
    import torch

    moved.reverse()
    for total, one in zip(totals, expected, strict=True):
        _, changed = moved.pop()
        if total is not None:
            for at in pytree.pieces(one.value.shape):
                difference = changed[at].double().sub(one.value[at]).div_(step)
                difference = difference.nan_to_num_(0.0, 0.0, 0.0).to(total.dtype)
                total[at] = torch.hypot(total[at], difference)


def allowed(
    value: torch.Tensor, variance: torch.Tensor, *, dtype: str, precision: str | None
) -> torch.Tensor:
    """Return the allowed standard deviation of each element (float64, shape of `value`).

    Args:
        value: the reference's output in float64.
        variance: variance of each element from the rounding of intermediate values.
        dtype: type in which the sides return this output, such as ``float32``.
        precision: the lower precision that a side declares, or None.
    """
    unit = UNIT[dtype] ** 2
    if precision and precision not in OPERANDS_ONLY and UNIT[precision] > UNIT[dtype]:
        unit += UNIT[precision] ** 2
    return (unit / 3 * value.square()).add_(variance).sqrt_()


def untraced(
    value: torch.Tensor,
    squares: torch.Tensor,
    *,
    dtype: str,
    precision: str | None,
    terms: int,
    roundings: int,
) -> torch.Tensor:
    """Return the variance of each element for a reference whose operations are not known.

    Args:
        value: the reference's output in float64.
        squares: for each element, the sum of the squares of its terms. The root of this sum is the
            sensitivity of the element to relative changes of the inputs.
        dtype, precision: as in `allowed`.
        terms: the number of terms in the longest sum.
        roundings: the number of successive roundings of a value.
    """
    u_out = UNIT[dtype]
    low = precision if precision and UNIT[precision] > u_out else None
    each = 1 if low in ONE_OPERAND else 2
    operands = each * roundings if low else roundings
    u_in = UNIT[low] if low else u_out
    of_terms, of_result = accumulation_error(precision or dtype, terms)
    of_terms = math.hypot(of_terms, u_in * math.sqrt(operands / 3))
    return of_terms**2 * squares + of_result**2 * value.square()


def accumulation_error(arithmetic: str, terms: float) -> tuple[float, float]:
    """Return the relative errors of the terms and of the result of a sum of products.

    Args:
        arithmetic: the number format of the operands.
        terms: the number of products.
    """
    if arithmetic == "float64":
        unit = UNIT["float64"]
    else:
        unit = UNIT["float32"]
        depth = DEPTH.get(arithmetic, 32 if UNIT.get(arithmetic, 0) >= 2.0**-4 else None)
        if depth is not None and terms > 1:  # tensor cores truncate: the error grows linearly
            error = unit * max(1.0, terms / depth) / 2
            return error, error
    return random_walk(unit, terms)  # CUDA cores round to nearest


def random_walk(unit: float, terms: float) -> tuple[float, float]:
    """Return the relative errors of the terms and of the result of a sum that rounds to nearest.

    Args:
        unit: unit roundoff of the accumulator.
        terms: the number of terms.
    """
    return unit * math.sqrt(terms / 6), unit * math.sqrt(terms / 9)


def as_leaves(outputs: object) -> NamedTensors:
    """Return the outputs as real tensors. Python numbers become float32 or int64 scalars.

    A complex tensor is replaced by its real and imaginary parts, and its path contains
    ``view_as_real``.

    Raises:
        pytree.TreeError: if an output cannot be compared.
    """
    import torch

    tensors = []
    for path, leaf in pytree.leaves(outputs):
        if type(leaf) in (bool, int):
            leaf = torch.tensor(leaf)
        elif type(leaf) is float:
            leaf = torch.tensor(leaf, dtype=torch.float32)
        if not isinstance(leaf, torch.Tensor):
            raise pytree.TreeError(f"{path} is a {type(leaf).__name__}, not a tensor or a number")
        leaf = leaf.detach()
        if leaf.is_complex():
            path, leaf = f"view_as_real({path})", torch.view_as_real(leaf.resolve_conj())
        tensors.append((path, leaf))
    return tensors
