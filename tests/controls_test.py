"""Controls over several draws of the inputs: one unlucky draw does not fail a page. Exact sums."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pytest_aisp import Work, compare
from pytest_aisp.checking import check
from pytest_aisp.checking.compare import scatter
from pytest_aisp.checking.controls import (
    DRAW_SEEDS,
    DRAWS,
    CannotTell,
    TooLoose,
    check_tolerance,
    run_controls,
)
from pytest_aisp.checking.exact_probe import _fits_types
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.checking.numerics import RMS, Leaf, Rule
from pytest_aisp.checking.page_values import RANK_SEEDS, scaled_down
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
    message = (
        rf"too close to it: .* bounds\) \(in {count} draws of the inputs\)\n"
        "Choose inputs "
    )
    with pytest.raises(CannotTell, match=message):
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
        rf"\(rtol=0, atol=3e-08\) is too loose: .* \(in {count} draws of the inputs\)\n"
        "Lower rtol and atol, or leave them out"
    )
    with pytest.raises(TooLoose, match=message):
        check_tolerance(reference, [None], LOOSE)


@pytest.mark.parametrize(("bounds", "tells"), [(1.8, False), (2.2, True), (3.8, True)])
def test_inputs_can_tell_if_an_answer_for_others_is_clearly_refused(bounds, tells):
    """Less than four bounds are enough: such an answer is wrong on any values."""
    value = 100 * torch.randn(1000, dtype=torch.float64)
    leaf = Leaf("output", value, torch.ones_like(value))
    stale = {"stale": lambda: [value + bounds * RMS * (1 + scatter(1000))]}
    if tells:
        controls = run_controls([leaf], stale, [torch.float64], Rule())
        assert str(controls[-1]) == "stale refused"
    else:
        with pytest.raises(CannotTell, match=r"the output for other inputs \(1.8 error bounds\)"):
            run_controls([leaf], stale, [torch.float64], Rule())


def mean(x):
    return x.square().mean().bfloat16()


def mean_of_rows(x):
    return x.square().mean(1).mean().bfloat16()


def mean_of_large(x):
    """Assume that every element is at least 0.9."""
    return x.clamp(min=0.9).square().mean().bfloat16()


def constant(x):
    return (x / x).mean().bfloat16()


def checked(side, other, expected):
    """Check two sides on inputs whose mean is nearly the same in each draw."""

    @compare(
        baseline=side,
        optimized=[other],
        inputs=lambda device, n: (torch.rand(n, 9, device=device) / 100 + 1,),
        reference=expected,
        sizes=[{"n": 999}],
        check_sizes=[{"n": 999}],
        work=lambda n: Work(read=36 * n, terms=9 * n, roundings=2),
        bound="dram",
    )
    def test_mean(pair):
        pair.assert_equivalent()

    reference = Reference(InputPool(pair_of(test_mean), {"n": 999}, "cpu", SEED, SEED + 1))
    return reference, check.check_sides(reference, [(side, None), (other, None)], Rule())


def test_inputs_are_scaled_if_two_draws_have_nearly_the_same_outputs():
    reference, result = checked(mean, mean_of_rows, lambda x: x.double().square().mean())
    assert "stale refused" in result.controls
    assert result.controls[-1] == "inputs scaled: two draws have nearly the same outputs"
    first, second, last = (reference.pool.value_set(k)[0] for k in range(3))
    assert float(first.min()) >= 1
    assert 0.5 <= float(second.min()) <= float(second.max()) < 0.51
    assert 0.25 <= float(last.min()) <= float(last.max()) < 0.26


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        (mean_of_large, lambda x: x.double().square().mean()),
        (constant, lambda x: (x.double() / x.double()).mean()),
    ],
    ids=["baseline wrong on scaled inputs", "constant output"],
)
def test_a_page_is_refused_if_scaled_inputs_do_not_help(side, expected):
    with pytest.raises(CannotTell, match=r"the output for other inputs \(.*\n.*that are halved"):
        checked(side, lambda x: side(x), expected)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int32]
)
def test_scaled_values_keep_their_type_and_signs(dtype):
    values = torch.tensor([-4, 0, 8]).to(dtype)
    halved = scaled_down(1, values)
    assert halved.dtype == dtype
    expected = [-4, 0, 8] if dtype == torch.int32 else [-2, 0, 4]
    assert halved.to(torch.complex64).tolist() == expected


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
