"""Compute the error that each element of an output may have. `compare` applies these bounds.

The reference is computed in float64 from the same inputs that the sides get. The allowed error of
each element is a standard deviation. It depends on the types, the longest sum, and the reference's
sensitivity to its operands (docs/explanation/checking.md has the derivation). An output must pass
two tests: one for the rms of the error over all elements, and one for the worst element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..page.pair import Work
from ..util import pytree

if TYPE_CHECKING:
    import torch

RMS, WORST = 1.25, 8.0
"""The derived rule's limits of the rms and the worst error, in allowed standard deviations."""
BASELINE_FACTOR, BASELINE_FLOOR = 1.5, 0.8
"""A variant's rms may be at most this factor times the baseline's rms, or the floor if larger."""
PROBES = 3
STEP = 2.0**-10
"""Relative perturbation of the operands that measures the reference's sensitivity."""
SIGNS = 1048573
"""Number of random signs per perturbed tensor: the largest prime below 2^20."""

BLOCKED, WORST_BLOCK = ("int8", "int4", "w4a16", "mxfp8", "nvfp4"), 16.0
"""Formats in which a block shares one scale, and the limit of their worst element.

`UNIT` assumes that the largest value of a block is four times the rms, but the largest of 10^8
normal values is six times their rms. Rounding the scale to a power of two may also double the step
of that block.
"""

# Unit roundoff by name of type, and the depth of one tensor-core instruction (K elements).
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
UNIT |= {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3, "tf32": 2.0**-11, "fp16": 2.0**-11}
UNIT |= {"bf16": 2.0**-8, "fp8": 2.0**-4, "mxfp8": 2.0**-4, "nvfp4": 2.0**-2}
# The step of these formats is a share of the largest value in the block, which is about four times
# the block's rms.
UNIT |= {"int8": 2.0**-6, "int4": 2.0**-2, "w4a16": 2.0**-2}
_ONE_OPERAND = ("w4a16",)  # only the weights have four bits
_OPERANDS_ONLY = ("tf32", *_ONE_OPERAND)  # results are never rounded to these
_DEPTH = {"tf32": 8, "bf16": 16, "fp16": 16, "bfloat16": 16, "float16": 16}

NamedTensors = list[tuple[str, "torch.Tensor"]]


class Wrong(AssertionError):
    """A side's result differs from the reference. The message shows where and by how much."""


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
            Zeros are replaced by 1e-300.
        worst_limit: allowed error of the worst element, in allowed standard deviations.
    """

    path: str
    value: torch.Tensor
    sigma: torch.Tensor | None
    worst_limit: float = WORST

    def __post_init__(self) -> None:
        if self.sigma is not None:
            self.sigma.clamp_min_(1e-300)

    @functools.cached_property
    def finite(self) -> bool:
        """True if every expected element is finite."""
        return bool(self.value.isfinite().all())

    @functools.cached_property
    def total(self) -> float:
        """Root of the sum of the squares of `sigma` over the elements with finite values."""
        import torch

        if self.sigma is None:
            return 0.0
        counted = self.sigma if self.finite else self.sigma.where(self.value.isfinite(), 0.0)
        return float(torch.linalg.vector_norm(counted))


class Expected(NamedTuple):
    """One output of the reference: its value and the squares of its sensitivities."""

    path: str
    value: torch.Tensor
    squares: torch.Tensor | None


def sensitivity(run: Callable[[int | None], NamedTensors], probes: int = PROBES) -> list[Expected]:
    """Return the reference's outputs and the squares of their sensitivities.

    Args:
        run: computes the reference's outputs. If its argument is a number, it perturbs the operands
            by `STEP`, with random signs from that seed.
        probes: number of perturbed runs. If it is 0, the sensitivities are None.
    """
    import torch

    base = run(None)
    squares = [
        torch.zeros_like(value, dtype=torch.float64)
        if probes and value.is_floating_point()
        else None
        for _, value in base
    ]
    for probe in range(probes):
        for total, (_, moved), (_, value) in zip(squares, run(probe), base, strict=True):
            if total is not None:
                difference = (moved.double() - value.double()).div_(STEP)
                total += difference.square_().nan_to_num_(0.0, 0.0, 0.0).div_(probes)
    for total in squares:
        # Three probes vary by chance, so a sensitivity is raised to at least 0.7 of the output's
        # rms. Otherwise the worst of 10^8 correct elements could exceed the limit.
        if total is not None and total.numel():
            total.clamp_min_(0.5 * float(total.mean()))
    return [
        Expected(path, value.double() if value.is_floating_point() else value, total)
        for (path, value), total in zip(base, squares, strict=True)
    ]


def perturb(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Multiply each element of `tensor` by 1 + STEP or 1 - STEP, in place.

    The signs repeat after a prime number of elements, so they do not align with any dimension.
    """
    import torch

    count = tensor.numel()
    period = max(1, min(count, SIGNS))
    signs = torch.randint(
        0, 2, (period,), generator=generator, device=tensor.device, dtype=torch.int8
    )
    factors = signs.to(tensor.dtype).mul_(2).sub_(1).mul_(STEP).add_(1)
    if tensor.is_contiguous():
        flat, whole = tensor.view(-1), count - count % period
        flat[:whole].view(-1, period).mul_(factors)
        flat[whole:].mul_(factors[: count - whole])
    else:
        tensor.mul_(factors.repeat(-(-count // period))[:count].view(tensor.shape))


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
        value: the reference's output in float64.
        squares: for each element, the sum of the squares of its terms.
        dtype: type in which the sides return it, such as ``float32``.
        precision: the lower precision that a side declares, or None.
        work: the work that the page declares: its longest sum and number of roundings.
        steps: number of steps, each of which starts from the result of the previous step.
    """
    u_out = UNIT[dtype]
    low = precision if precision and UNIT[precision] > u_out else None
    each = 1 if low in _ONE_OPERAND else 2
    operands = each * work.roundings * steps if low else work.roundings * steps - 1
    u_in = UNIT[low] if low else u_out
    rounding = (u_out**2 * value.square() + operands * u_in**2 * squares) / 3
    if low and low not in _OPERANDS_ONLY:  # results of short sums may exceed `squares`
        more = (value.square() - squares).clamp_min_(0)
        rounding += more.mul_(work.roundings * steps * u_in**2 / 3)
    return (rounding + steps * _accumulation(value, squares, dtype, precision, work.terms)).sqrt_()


def _accumulation(
    value: torch.Tensor, squares: torch.Tensor, dtype: str, precision: str | None, terms: int
) -> torch.Tensor:
    """Return the variance from summing `terms` products in the accumulator."""
    arithmetic = precision or dtype
    if arithmetic == "float64":
        return UNIT["float64"] ** 2 * terms * (squares / 6 + value.square() / 9)
    depth = _DEPTH.get(arithmetic, 32 if UNIT.get(arithmetic, 0) >= 2.0**-4 else None)
    if depth is None or terms == 1:  # CUDA cores round to nearest: a random walk
        return UNIT["float32"] ** 2 * terms * (squares / 6 + value.square() / 9)
    length = max(1.0, terms / depth)  # tensor cores truncate: the error grows linearly
    return (UNIT["float32"] * length / 2) ** 2 * (squares + value.square())


def as_leaves(outputs: object) -> NamedTensors:
    """Return the outputs as real tensors. Python numbers become float32 or int64 scalars.

    A complex tensor is replaced by its real and imaginary parts, which is noted in its path.

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
