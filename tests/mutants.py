"""Mutants: wrong sides, made from a page's honest side. Every page must refuse them."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pytest_aisp.page.pair import MARK, Variant, is_plain
from pytest_aisp.util import pytree
from pytest_aisp.worker.loader import load_page, pair_of

SHALLOW, DEEP = 2, 8
"""Units in the last place by which `nearly` is off. An output that was rounded many times on its
way may be off by more."""
MANY_ROUNDINGS = 4


def units_of(pair):
    """Return the error of `nearly` on the page of `pair`, in units."""
    size = next(s for s in (*pair.check_sizes, *pair.cpu_sizes, *pair.sizes) if is_plain(s))
    return DEEP if (pair.work_at(size, 2).roundings or 1) > MANY_ROUNDINGS else SHALLOW


def mutate(mutant, honest, units):
    """Return the wrong side that `mutant` makes from the honest side, prepared if that one is."""

    def unmarked(*inputs):
        return honest(*inputs)

    unmarked.units = units
    if inspect.isgeneratorfunction(honest):
        return _mutate_prepared(mutant, honest, units)
    return mutant(unmarked)


def _mutate_prepared(mutant, honest, units):
    def side(*inputs):
        preparing = honest(*inputs)
        run = next(preparing)

        def unmarked(*_):
            return run()

        unmarked.units = units
        wrong = mutant(unmarked)
        yield lambda: wrong(*inputs)
        next(preparing, None)

    return side


def plain(side):
    return getattr(side, "side", side)


def zeros(honest):
    """Return zeros of the right shape."""

    def wrong(*inputs):
        # Inputs are copied, because a page with a state changes them to compute its shapes.
        return pytree.map_tensors(torch.zeros_like, honest(*copy.deepcopy(inputs)))

    return wrong


def remembered(honest):
    """Compute once and return that answer forever."""
    answers = []

    def wrong(*inputs):
        if not answers:
            answers.append(honest(*inputs))
        return answers[0]

    return wrong


def by_address(honest):
    """Compute once for each address and return that answer for every later value there."""
    answers = {}

    def wrong(*inputs):
        key = tuple(t.data_ptr() for _, t in pytree.tensors(inputs))
        if key not in answers:
            answers[key] = honest(*inputs)
        return answers[key]

    return wrong


def nearly(honest):
    """Return the right answer with an error of 0.1 %, or of a few units if its type is coarser."""

    def wrong(*inputs):
        def off(t):
            if not t.is_floating_point():
                return t + 1
            return t * (1 + max(1e-3, units * torch.finfo(t.dtype).eps))

        return pytree.map_tensors(off, honest(*inputs))

    units = getattr(honest, "units", SHALLOW)
    return wrong


MUTANTS = [zeros, remembered, by_address, nearly]


def mutant_page(path: str, root: str) -> dict[str, Any]:
    """Return the tests of a page by name, with each mutant of its baseline as a variant."""
    page = load_page(path, root, f"mutants_of_{Path(path).parent.name}.{Path(path).stem}")
    pairs = {name: pair_of(thing) for name, thing in vars(page).items()}
    return {name: _test_of(pair) for name, pair in pairs.items() if pair is not None}


def _test_of(pair):
    def test(pair): ...

    honest = plain(pair.baseline)
    sides = [mutate(mutant, honest, units_of(pair)) for mutant in MUTANTS]
    for side, mutant in zip(sides, MUTANTS, strict=True):
        side.__name__ = mutant.__name__
    mutated = replace(pair, variants=tuple(Variant(side) for side in sides))
    test.pytestmark = [SimpleNamespace(name=MARK, kwargs={"pair": mutated})]
    return test
