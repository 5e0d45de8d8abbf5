"""Controls over several draws of the inputs: one unlucky draw condemns no page. Exact sums."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pytest_aisp import Work, compare
from pytest_aisp.checking.controls import (
    DRAW_SEEDS,
    DRAWS,
    CannotTell,
    TooLoose,
    _fits_types,
    check_tolerance,
)
from pytest_aisp.checking.inputs import RANK_SEEDS, InputPool
from pytest_aisp.checking.numerics import Rule
from pytest_aisp.checking.reference import Reference
from pytest_aisp.util.process_group import current_group
from pytest_aisp.worker.loader import pair_of

SEED = 3
LOOSE = Rule(atol=3e-8)
"""It refuses noise, but not the noise of inputs that are a thousandth."""


def reference_of(constant, small=()):
    """Return a reference, and the list of draws that it records.

    Inputs are constant in the draws `constant`, a thousandth in the draws `small`, and random in
    the others.
    """

    def inputs(device, n):
        draw = (torch.initial_seed() - SEED - RANK_SEEDS * current_group().rank) // DRAW_SEEDS
        draws.append(draw)
        values = torch.ones(n) if draw in constant else torch.randn(n)
        return (values / (1000 if draw in small else 1),)

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

    draws: list[int] = []
    pool = InputPool(pair_of(test_doubling), {"n": 33}, "cpu", SEED, SEED + 1)
    return Reference(pool, types={"output": torch.float32}), draws


def test_one_draw_suffices_if_it_can_tell():
    reference, draws = reference_of(constant={1, 2, 3, 4})
    controls = check_tolerance(reference, [None], Rule())
    assert {c.name for c in controls if c.applies} >= {"noise", "zeros", "rolled", "stale"}
    assert set(draws) == {0}


@pytest.mark.parametrize("constant", [{0}, {0, 1}, {0, 4}])
def test_inputs_pass_if_most_draws_can_tell(constant):
    reference, draws = reference_of(constant)
    controls = check_tolerance(reference, [None], Rule())
    assert all(c.refused for c in controls if c.applies)
    assert len(set(draws) - constant) == DRAWS // 2 + 1
    draws.clear()
    assert check_tolerance(reference, [None], Rule()) == controls
    assert not draws, "the result is cached"


@pytest.mark.parametrize(
    ("constant", "count"), [({0, 1, 2}, "3 of 3"), ({0, 2, 4}, "3 of 5"), ({0, 3, 4}, "3 of 5")]
)
def test_inputs_fail_if_most_draws_cannot_tell(constant, count):
    reference, _ = reference_of(constant)
    with pytest.raises(CannotTell, match=rf"no \w+ control applies.*\({count} draws of the values"):
        check_tolerance(reference, [None], Rule())


@pytest.mark.parametrize("small", [{0}, {0, 1}, {0, 4}])
def test_a_tolerance_passes_if_it_is_tight_enough_in_most_draws(small):
    reference, draws = reference_of(set(), small)
    assert all(c.refused for c in check_tolerance(reference, [None], LOOSE) if c.applies)
    assert len(set(draws) - small) == DRAWS // 2 + 1


@pytest.mark.parametrize(
    ("constant", "small", "count"),
    [
        (set(), {0, 1, 2}, "3 of 3"),
        (set(), {0, 2, 4}, "3 of 5"),
        ({1, 4}, {0}, "3 of 5"),
    ],
)
def test_a_tolerance_fails_if_it_is_too_loose_in_most_draws(constant, small, count):
    reference, _ = reference_of(constant, small)
    message = (
        rf"\(rtol=0, atol=3e-08\) accepts a wrong.* passes \({count} draws of the values say so\)"
    )
    with pytest.raises(TooLoose, match=message):
        check_tolerance(reference, [None], LOOSE)


@pytest.mark.parametrize(
    ("dtype", "largest", "exact"),
    [
        (torch.bfloat16, 256, True),
        (torch.bfloat16, 257, False),
        (torch.float16, 2048, True),
        (torch.float16, 2049, False),
        (torch.float32, 1 << 24, True),
        (torch.int64, 1 << 20, True),
    ],
)
def test_sums_over_ranks_are_exact_if_the_type_holds_every_partial_sum(dtype, largest, exact):
    reference = SimpleNamespace(types={"output": dtype})
    expected = [("output", torch.tensor([-largest, 1, 0]))]
    assert _fits_types(reference, expected) is exact
    assert _fits_types(reference, [("output", torch.empty(0))])
