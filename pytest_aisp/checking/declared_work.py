"""Compare the terms and roundings that a page declares with the operations of its reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..page.pair import Precision, Work
from . import numerics

if TYPE_CHECKING:
    from .rounding import Structure

WIDE = 3.0
"""A number is named if it makes the error bound this many times as wide, or would make it this many
times as narrow."""


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
