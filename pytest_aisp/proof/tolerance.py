"""Whether a page could tell a wrong answer from a right one: its tolerance, and its inputs.

How far a control moves a result depends on the values drawn, and each run draws its own. One draw
in which a control falls short says little; what most of several say is a property of the page.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..pages.pair import Precision
from .controls import CannotTell, Control, TooLoose, run_controls
from .numerics import Rule
from .oracle import Oracle
from .workbench import STEPS, VALUE_SETS, Workbench

DRAWS = 5
"""Draws of a page's values of which most decide whether it can tell right from wrong."""
APART = 0x10001
"""How far apart the seeds of two draws lie."""


def check_tolerance(
    oracle: Oracle, precisions: Iterable[Precision | None], rule: Rule
) -> list[Control]:
    """Apply the controls at each precision that a side declares; return those at the last.

    Raises:
        TooLoose, CannotTell: what the first draw of the inputs says, when most complain: the rule
            accepts a control that applies, or no control of a kind applies.
    """
    seen: list[Control] = []
    for precision in dict.fromkeys(precisions):
        key = (precision, rule, tuple(oracle.types.items()))
        if key not in oracle.controls:
            oracle.controls[key] = _by_most_draws(oracle, precision, rule)
        seen = oracle.controls[key]
    return seen


def _by_most_draws(oracle: Oracle, precision: Precision | None, rule: Rule) -> list[Control]:
    """Apply the controls to the values at hand; where those complain, most draws decide."""
    first: CannotTell | TooLoose
    try:
        return _apply(oracle, precision, rule)
    except (CannotTell, TooLoose) as error:
        first = error
    told: list[list[Control]] = []
    short = 1
    for draw in range(1, DRAWS):
        try:
            told.append(_apply(_drawn(oracle, draw), precision, rule))
        except (CannotTell, TooLoose):
            short += 1
        if len(told) > DRAWS // 2:
            return told[0]
        if short > DRAWS // 2:
            break
    raise type(first)(f"{first} ({short} of {short + len(told)} draws of the values say so)")


def _drawn(oracle: Oracle, draw: int) -> Oracle:
    """Return what is expected of other values of the same page and size."""
    bench = oracle.bench
    seed = bench.seed + draw * APART
    other = Workbench(bench.pair, bench.size, bench.device, seed, bench.unseen_seed)
    return Oracle(other, oracle.watch, oracle.exact, dict(oracle.types))


def _apply(oracle: Oracle, precision: Precision | None, rule: Rule) -> list[Control]:
    has_state = oracle.bench.pair.state is not None
    turns = (0, 1, 0)[:STEPS] if has_state else (0,)
    other = (1, 0, 1)[:STEPS] if has_state else (1 % VALUE_SETS,)
    leaves = oracle.leaves(turns, precision)
    expected = [leaf for leaf in leaves if leaf.path in oracle.types] or leaves
    stale_by_path = {leaf.path: leaf for leaf in oracle.leaves(other, precision)}
    stale = [stale_by_path[leaf.path] for leaf in expected]
    types = [oracle.types.get(leaf.path, leaf.value.dtype) for leaf in expected]
    return run_controls(expected, stale, oracle.dropped(0, precision), types, rule)
