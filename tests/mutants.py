"""Lies that no page may accept: zeros, an answer remembered, by address too, one nearly right."""

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
"""Units by which a lie is off that is nearly right: what an output has been rounded to many times
on its way may differ by more."""
MANY = 4


def units_of(pair):
    """Return by how many units a lie about `pair` is off."""
    size = next(s for s in (*pair.check_sizes, *pair.cpu_sizes, *pair.sizes) if is_plain(s))
    return DEEP if pair.work_at(size, 2).roundings > MANY else SHALLOW


def told(lie, honest, units):
    """Return the side that tells `lie` about the honest one, prepared where that is."""

    def about(*inputs):
        return honest(*inputs)

    about.units = units
    return _prepared(lie, honest, units) if inspect.isgeneratorfunction(honest) else lie(about)


def plain(side):
    return getattr(side, "side", side)


def zeros(honest):
    """Do nothing; return zeros in the right shape."""

    def lazy(*inputs):
        # What a state page changes is copied first: only the shape of its outputs is needed.
        return pytree.map_tensors(torch.zeros_like, honest(*_copied(inputs)))

    return lazy


def remembered(honest):
    """Compute once; return that forever."""
    kept = []

    def lazy(*inputs):
        if not kept:
            kept.append(honest(*inputs))
        return kept[0]

    return lazy


def by_address(honest):
    """Compute once an address; return that for every later value there."""
    kept = {}

    def lazy(*inputs):
        key = tuple(t.data_ptr() for _, t in pytree.tensors(inputs))
        if key not in kept:
            kept[key] = honest(*inputs)
        return kept[key]

    return lazy


def nearly(honest):
    """Return the right answer, 0.1 % off, or by a few units where its type is coarser than that."""

    def lazy(*inputs):
        def off(t):
            if not t.is_floating_point():
                return t + 1
            return t * (1 + max(1e-3, units * torch.finfo(t.dtype).eps))

        return pytree.map_tensors(off, honest(*inputs))

    units = getattr(honest, "units", SHALLOW)
    return lazy


def _copied(inputs):
    return copy.deepcopy(inputs)


LIES = [zeros, remembered, by_address, nearly]


def lying_page(path: str, root: str) -> dict[str, Any]:
    """Return the tests of a page by name, with a variant for each lie about its baseline."""
    page = load_page(path, root, f"lies_about_{Path(path).parent.name}.{Path(path).stem}")
    return {
        name: _declared(replace(pair, variants=tuple(_variants(pair))))
        for name, pair in ((name, pair_of(thing)) for name, thing in vars(page).items())
        if pair is not None
    }


def _declared(pair):
    def test(pair): ...

    test.pytestmark = [SimpleNamespace(name=MARK, kwargs={"pair": pair})]
    return test


def _variants(pair):
    honest = plain(pair.baseline)
    for lie in LIES:
        side = told(lie, honest, units_of(pair))
        side.__name__ = lie.__name__
        yield Variant(side)


def _prepared(lie, honest, units):
    def side(*inputs):
        made = honest(*inputs)
        run = next(made)

        def about(*_):
            return run()

        about.units = units
        lied = lie(about)
        yield lambda: lied(*inputs)
        next(made, None)

    return side
