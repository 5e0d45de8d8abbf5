"""The message about a wrong output describes its errors, and says what to do."""

from __future__ import annotations

import pytest
import torch
from honest_test import honest_pages

from pytest_aisp import Work, compare
from pytest_aisp.checking import numerics
from pytest_aisp.checking.check import check_sides
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.checking.numerics import Rule, Wrong
from pytest_aisp.checking.reference import Reference
from pytest_aisp.isolation import monkeypatches
from pytest_aisp.page.pair import SideError
from pytest_aisp.worker.loader import pair_of

SIZE = {"n": 257}
STORED: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def unwatched(monkeypatch):
    """Forget the original functions, because these tests replace some on purpose."""
    monkeypatch.setattr(monkeypatches, "_originals", {})


def rows(device, n):
    return (torch.randn(n, 64, device=device),)


def sums(x):
    return x.sum(1)


def exact_sums(x):
    return x.double().sum(1)


def message(baseline, optimized=None, *, reference=exact_sums, inputs=rows, rule=None, terms=64):
    """Return the message about a page with these sides."""

    @compare(
        baseline=baseline,
        optimized=[optimized or twin(baseline)],
        inputs=inputs,
        reference=reference,
        sizes=[SIZE],
        check_sizes=[SIZE],
        work=lambda n: Work(read=4 * n, write=4 * n, terms=terms),
        bound="dram",
    )
    def test_page(pair):
        pair.assert_equivalent()
        pair.assert_speedup()

    pair = pair_of(test_page)
    sides = [(baseline, None), *((v.side, v.precision) for v in pair.variants)]
    STORED.clear()
    with pytest.raises(Wrong) as error:
        check_sides(Reference(InputPool(pair, SIZE, "cpu", 1, 2)), sides, rule or Rule())
    first, *cause = str(error.value).split("\n")
    assert f"{baseline.__name__ if optimized is None else optimized.__name__} is wrong at" in first
    return "\n".join(cause)


def twin(side):
    def other(*inputs):
        return side(*inputs)

    return other


def noisy(x):
    return x.sum(1) + torch.randn(len(x))


def noisy_reference(x):
    return noisy(x.double())


def stored(x):
    STORED.append(x.sum(1))
    return STORED[0].clone()


def constant(x):
    return torch.ones(len(x))


def halved(x):
    return x.sum(1) / 2


def turned(x):
    return x.sum(1).flip(0)


def in_bf16(x):
    return x.bfloat16().float().sum(1)


def rounded_to_bf16(x):
    return x.sum(1).bfloat16().float()


def in_fp16(x):
    return x.half().sum(1).float()


def in_tf32(x):
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).sum(1)


def unwritten(x):
    out = torch.full((len(x),), float("nan"))  # as after `empty`
    out[1:] = x[1:].sum(1)
    return out


def shifted(x):
    return x.sum(1) + x[:, 0] ** 2


RANDOM = "returns other values when it runs again on the same inputs"
IN_INPUTS = "draw random numbers in `inputs`, and pass them to the reference and the sides"
EITHER = {
    noisy: f"noisy {RANDOM}: it draws random numbers, or its threads race; {IN_INPUTS}",
    stored: "these are the right values for other inputs: stored returns a stored result;",
    constant: "constant returns the same values for other inputs; compute the output from the",
    halved: "every element is 0.5 times the expected one; compare halved and the reference for it",
    turned: "these are the expected values in another order; compare the axes and the index",
    unwritten: "so NaN is what an element that is never written contains; check that every element",
}
FORMATS = {in_bf16: "bf16", rounded_to_bf16: "bf16", in_fp16: "fp16", in_tf32: "tf32"}


@pytest.mark.parametrize("side", EITHER)
@pytest.mark.parametrize("is_baseline", [True, False])
def test_the_cause_is_named_for_either_side(side, is_baseline):
    text = message(side) if is_baseline else message(sums, side)
    assert EITHER[side] in text


@pytest.mark.parametrize("side", FORMATS)
def test_a_lower_precision_is_named_with_its_declaration(side):
    name = side.__name__
    declared = f"Variant({name}, precision={FORMATS[side]!r})"
    start = f"the errors look like {FORMATS[side]} arithmetic; declare "
    assert message(side).startswith(f"{start}baseline={declared} if that is on purpose")
    assert message(sums, side).startswith(f"{start}{declared} if that is on purpose")


def test_a_random_reference_is_named():
    with pytest.raises(SideError, match="reference draws random numbers"):
        message(sums, reference=noisy_reference)


def nudged(x):
    return x.sum(1) + 1e-7 * torch.cos(1e5 * x[:, 0])


def test_the_exact_probe_says_that_values_were_replaced():
    text = message(sums, nudged)
    assert text.startswith(
        "This is the exact probe: the values of the inputs were replaced by integers"
    )
    assert text.endswith("Look for terms that are left out or added twice")


def centered(x):
    return x - 0.7


def centered_reference(x):
    return x.double() - 0.7


def near(device, n):
    x = torch.randn(n, device=device)
    x[5] = 0.7
    return (x,)


def test_cancellation_is_named_for_the_baseline(monkeypatch):
    def of_the_value_alone(value, *args, **kwargs):
        return 2.0**-24 * value.abs()

    monkeypatch.setattr(numerics, "allowed", of_the_value_alone)
    text = message(centered, reference=centered_reference, inputs=near)
    assert text.startswith("the error there is no larger than elsewhere (rms ")
    assert "it is a small difference of large terms (cancellation); subtract before" in text
    assert "pair.assert_equivalent(rtol=0, atol=" in text


def test_a_tolerance_narrower_than_the_derived_bound_is_named():
    text = message(sums, rule=Rule(rtol=1e-12))
    assert text.startswith("the derived bound accepts these values, so rtol=1e-12, atol=0 is too")


def test_exact_sums_that_are_rounded_are_named():
    text = message(sums, rule=Rule(exact=True))
    assert text.startswith("the errors look like rounding (their rms is ")
    assert text.endswith("exact=True allows none: leave it out")


def chained(x):
    for _ in range(30):
        x = x * 1.1
    return x


def chained_reference(x):
    return x.double() * 1.1**30


@pytest.fixture
def narrow(monkeypatch):
    """Make the bounds of sides that declare no precision far too narrow."""
    allowed = numerics.allowed

    def narrowed(*args, precision, **kwargs):
        return allowed(*args, precision=precision, **kwargs) * (1e-3 if precision is None else 1)

    monkeypatch.setattr(numerics, "allowed", narrowed)


def test_a_bound_below_the_rounding_errors_is_named_for_the_baseline(narrow):
    text = message(chained, reference=chained_reference, terms=1)
    assert text.startswith("the errors look like rounding (their rms is ")
    assert "of the output's), so the bound, which they exceed " in text
    assert " times, is too narrow; widen it with Work(terms=, roundings=): the terms of" in text


def hundreds(device, n):
    return (100 + 0.01 * torch.randn(n, device=device),)


def rounded_mean(x):
    return x.mean(0, keepdim=True).bfloat16().float()


def exact_mean(x):
    return x.double().mean(0, keepdim=True)


def test_a_result_that_rounding_makes_the_same_is_not_called_constant():
    text = message(rounded_mean, reference=exact_mean, inputs=hundreds)
    assert text.startswith("the errors look like rounding (their rms is ")


def test_a_baseline_that_computes_something_else_is_named():
    text = message(shifted)
    assert text.startswith("shifted and the reference differ by ")
    assert text.endswith("compare both by hand on a small input")
    assert message(sums, shifted) == ""


@pytest.mark.parametrize(
    ("name", "pair"), [pytest.param(name, pair, id=name) for _, name, pair in honest_pages()]
)
def test_an_honest_baseline_that_fails_is_not_accused(name, pair, narrow):
    """The message must not call honest rounding errors a fault."""
    size = pair.sizes[0]
    reference = Reference(InputPool(pair, size, "cpu", 1, 2))
    wrong = ""
    try:
        check_sides(reference, [(pair.baseline, pair.baseline_precision)], Rule(), controls=False)
    except Wrong as error:
        wrong = str(error)
    innocent = ("the errors look like rounding", "the error there is no larger than elsewhere")
    assert not wrong or wrong.partition("\n")[2].startswith(innocent), wrong
