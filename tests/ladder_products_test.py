"""The speedup of a whole ladder is the product of its rungs, in every stored result."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_aisp.results import store
from pytest_aisp.worker.loader import load_page, pair_of

ROOT = Path(__file__).parents[1]
LADDERS = {
    path.stem.removesuffix("_test"): path
    for path in sorted((ROOT / "suites").glob("ch20/*_ladder_test.py"))
}
STORED = sorted((ROOT / "baselines").glob("*/ch20.json"))
ALLOWED = 0.1
"""By how much the two may differ beyond `ERRORS` standard errors, because processes differ."""
ERRORS = 5


def steps_of(path):
    """Return the rungs and the wholes of a ladder: each has its first side, last side and key."""
    page = load_page(str(path), str(ROOT), f"ladders.{path.stem}")
    named = {name: pair_of(thing) for name, thing in vars(page).items() if callable(thing)}
    whole_name = f"test_{path.stem.removesuffix('_test')}"
    steps = {}
    for name, pair in named.items():
        for case in pair.cases() if pair else ():
            if dict(case.size) == dict(pair.sizes[0]):
                ends = pair.baseline.__name__, case.variant.name
                steps[name == whole_name, ends] = f"{path.name}::{name}[{case.id}]"
    rungs = {ends: key for (is_whole, ends), key in steps.items() if not is_whole}
    wholes = {ends: key for (is_whole, ends), key in steps.items() if is_whole}
    return rungs, wholes


def chain(rungs, ends):
    """Return the keys of the rungs that lead from the first side to the last."""
    first, last = ends
    if first == last:
        return []
    for (begin, end), key in rungs.items():
        if begin == first:
            rest = chain(rungs, (end, last))
            if rest is not None:
                return [key, *rest]
    return None


def difference(results, keys, whole):
    """Return how far the product is from the whole, and how far it may be, as logarithms."""
    off = sum(results[key].value for key in keys) - results[whole].value
    used = [results[key] for key in (*keys, whole)]
    errors = [(result.own_spread or 0.0) / math.sqrt(result.processes) for result in used]
    return off, ERRORS * math.hypot(*errors) + ALLOWED


@pytest.mark.parametrize("path", LADDERS.values(), ids=LADDERS.keys())
def test_rungs_lead_from_the_first_side_to_the_last(path):
    rungs, wholes = steps_of(path)
    assert wholes
    for ends in wholes:
        assert len(chain(rungs, ends) or []) >= 2


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.parent.name)
@pytest.mark.parametrize("path", LADDERS.values(), ids=LADDERS.keys())
def test_product_of_the_stored_rungs_is_the_stored_whole(path, file):
    rungs, wholes = steps_of(path)
    results, compared = store.load(file).results, 0
    for ends, whole in wholes.items():
        keys = chain(rungs, ends)
        if all(key in results and results[key].value is not None for key in (*keys, whole)):
            off, allowed = difference(results, keys, whole)
            assert abs(off) <= allowed
            compared += 1
    if not compared:
        pytest.skip("not all rungs are stored")


def test_a_whole_that_is_no_product_is_found():
    def stored(speedup):
        return SimpleNamespace(value=math.log(speedup), own_spread=0.01, processes=3)

    results = {"a": stored(2.0), "b": stored(3.0), "right": stored(6.1), "wrong": stored(7.0)}
    off, allowed = difference(results, ["a", "b"], "right")
    assert abs(off) <= allowed
    off, allowed = difference(results, ["a", "b"], "wrong")
    assert abs(off) > allowed
