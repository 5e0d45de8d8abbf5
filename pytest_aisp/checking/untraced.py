"""References whose values leave PyTorch. Operations outside of PyTorch are not traced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch  # noqa: TID253 - imported only in worker processes
from torch.overrides import TorchFunctionMode  # noqa: TID253

from . import numerics
from .operations import has_error

if TYPE_CHECKING:
    from .rounding import Structure


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
