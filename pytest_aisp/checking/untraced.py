"""References whose values leave PyTorch. Operations outside of PyTorch are not traced.

A page may declare the terms and roundings of such operations. `contradictions` compares these
numbers with the traced operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch  # noqa: TID253 - imported only in worker processes
from torch.overrides import TorchFunctionMode  # noqa: TID253

from ..page.pair import Precision, Work
from . import numerics
from .operations import has_error

if TYPE_CHECKING:
    from .rounding import Structure

WIDE = 3.0
"""A number is named if it makes the error bound this many times as wide, or would make it this many
times as narrow."""


class Outside(NamedTuple):
    """Assumptions about the arithmetic outside of PyTorch.

    Attributes:
        terms: the number of terms in the longest sum.
        roundings: the number of times in a row that values are rounded.
    """

    terms: int = 1
    roundings: int = numerics.UNTRACED_ROUNDINGS

    @property
    def assumption(self) -> str:
        """What the error bound assumes, and how a page says otherwise."""
        return (
            f"allows for sums of {self.terms} terms and {self.roundings} roundings in a row;"
            " declare others with Work(terms=, roundings=)"
        )

    def errors(self, arithmetic: str, rounding: float) -> tuple[float, float]:
        """Return the relative errors of a sum's terms and of its result.

        Args:
            arithmetic: the number format of the operands.
            rounding: the relative error of one rounding.
        """
        of_terms, of_result = numerics.accumulation_error(arithmetic, self.terms)
        return math.hypot(of_terms, rounding * math.sqrt(self.roundings)), of_result


class SeesOutside(TorchFunctionMode):
    """A mode that records whether whole tensors leave PyTorch."""

    def __init__(self, structure: Structure) -> None:
        super().__init__()
        self.structure = structure

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in _LEAVING and isinstance(args[0], torch.Tensor) and args[0].numel() > 1:
            name = func.__name__.strip("_")
            if name != "tolist" or has_error(args[0]):  # integers of a list are lengths or indices
                self.structure.untraced = f"the reference's values leave PyTorch ({name})"
        return func(*args, **(kwargs or {}))


_LEAVING = (
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.tolist,
    torch.Tensor.__dlpack__,
)


def contradictions(
    work: Work, structure: Structure, types: Sequence[str], precision: Precision | None, steps: int
) -> Iterator[str]:
    """Yield a remark for each number of `work` that differs much from the traced number.

    Args:
        types: the dtypes of the outputs, such as ``float32``.
        precision: the lower precision that a side declares, or None.
        steps: how often the reference ran when it was traced.
    """
    coarsest = max(types, key=lambda name: numerics.UNIT.get(name, 0.0), default="")
    if coarsest not in numerics.UNIT or structure.read:
        return
    unit = max(numerics.UNIT[name] for name in (coarsest, precision) if name)
    low_operands = structure.products and structure.unit > numerics.UNIT["float32"]
    arithmetic = precision or ("bf16" if low_operands else coarsest)

    def error(terms: int, roundings: int) -> float:
        of_terms, _ = numerics.accumulation_error(arithmetic, terms)
        return math.hypot(of_terms, unit * math.sqrt(roundings / 3))

    traced = {"terms": structure.longest, "roundings": max(1, structure.depth // steps)}
    found = {
        "terms": f"the longest sum of the reference has {traced['terms']} terms",
        "roundings": f"the reference rounds {traced['roundings']} times in a row",
    }
    for name, count in traced.items():
        declared = getattr(work, name)
        if declared is None:
            continue
        wider = error(**{**traced, name: declared}) / error(**traced)
        if declared * WIDE**2 <= count:
            yield f"Work({name}={declared}) has no effect: {found[name]}; leave {name} out"
        elif wider >= WIDE and (name == "roundings" or count > 1):  # it may have no sums
            yield (
                f"Work({name}={declared}) makes the error bound about {wider:.0f} times as wide:"
                f" {found[name]}; leave {name} out, unless a side has more"
            )
