"""Inputs that cannot tell right from wrong are a page's fault, an unlucky draw of them is not."""

from __future__ import annotations

import pytest
import torch

from pytest_aisp import Work, compare
from pytest_aisp.checking.controls import DRAW_SEEDS, DRAWS, CannotTell, TooLoose, check_tolerance
from pytest_aisp.checking.inputs import RANK_SEEDS, InputPool
from pytest_aisp.checking.numerics import Rule
from pytest_aisp.checking.reference import Reference
from pytest_aisp.util.process_group import current_group
from pytest_aisp.worker.loader import pair_of

SEED = 3


def oracle_of(flat, small=()):
    """Return an oracle whose inputs are constant in the draws `flat` and random in the others.

    In the draws `small` they are a thousandth.
    """

    def inputs(device, n):
        draw = (torch.initial_seed() - SEED - RANK_SEEDS * current_group().rank) // DRAW_SEEDS
        drawn.append(draw)
        return (torch.ones(n) if draw in flat else torch.randn(n) / (1000 if draw in small else 1),)

    def doubled(x):
        return 2 * x

    @compare(
        baseline=lambda x: x + x,
        optimized=[doubled],
        inputs=inputs,
        reference=lambda x: 2 * x.double(),
        sizes=[{"n": 33}],
        check_sizes=[{"n": 33}],
        work=lambda n: Work(read=4 * n, write=4 * n),
        bound="dram",
    )
    def test_doubling(pair):
        pair.assert_equivalent()

    drawn: list[int] = []
    bench = InputPool(pair_of(test_doubling), {"n": 33}, "cpu", SEED, SEED + 1)
    return Reference(bench, types={"output": torch.float32}), drawn


def test_a_draw_that_can_tell_is_the_only_one():
    oracle, drawn = oracle_of(flat={1, 2, 3, 4})
    found = check_tolerance(oracle, [None], Rule())
    assert {c.name for c in found if c.applies} >= {"noise", "zeros", "rolled", "stale"}
    assert set(drawn) == {0}


@pytest.mark.parametrize("flat", [{0}, {0, 1}, {0, 4}])
def test_an_unlucky_draw_condemns_no_page(flat):
    oracle, drawn = oracle_of(flat)
    found = check_tolerance(oracle, [None], Rule())
    assert all(c.refused for c in found if c.applies)
    assert len(set(drawn) - flat) == DRAWS // 2 + 1
    drawn.clear()
    assert check_tolerance(oracle, [None], Rule()) == found
    assert not drawn, "what was found is kept"


@pytest.mark.parametrize(
    ("flat", "said"), [({0, 1, 2}, "3 of 3"), ({0, 2, 4}, "3 of 5"), ({0, 3, 4}, "3 of 5")]
)
def test_inputs_that_cannot_tell_in_most_draws_condemn_it(flat, said):
    oracle, _ = oracle_of(flat)
    with pytest.raises(CannotTell, match=rf"no \w+ control applies.*\({said} draws of the values"):
        check_tolerance(oracle, [None], Rule())


LOOSE = Rule(atol=3e-8)
"""It refuses noise, but not that of a thousandth."""


@pytest.mark.parametrize("small", [{0}, {0, 1}, {0, 4}])
def test_an_unlucky_draw_condemns_no_tolerance(small):
    oracle, drawn = oracle_of(set(), small)
    assert all(c.refused for c in check_tolerance(oracle, [None], LOOSE) if c.applies)
    assert len(set(drawn) - small) == DRAWS // 2 + 1


@pytest.mark.parametrize(
    ("flat", "small", "said"),
    [
        (set(), {0, 1, 2}, "3 of 3"),
        (set(), {0, 2, 4}, "3 of 5"),
        ({1, 4}, {0}, "3 of 5"),
    ],
)
def test_a_tolerance_that_is_too_loose_in_most_draws_is_condemned(flat, small, said):
    oracle, _ = oracle_of(flat, small)
    message = (
        rf"\(rtol=0, atol=3e-08\) accepts a wrong.* passes \({said} draws of the values say so\)"
    )
    with pytest.raises(TooLoose, match=message):
        check_tolerance(oracle, [None], LOOSE)
