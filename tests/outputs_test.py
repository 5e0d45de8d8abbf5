"""Outputs of every form are compared: of one element, of none, and complex ones."""

from __future__ import annotations

import pytest
import torch

from pytest_aisp import Work, compare
from pytest_aisp.checking.check import check_sides
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.checking.numerics import Rule, Wrong
from pytest_aisp.checking.reference import Reference
from pytest_aisp.worker.loader import pair_of

SIZE = {"n": 330}


def checked(side, rule=Rule(), *, baseline, reference):  # noqa: B008 - frozen
    """Return the result of checking `side`."""

    def base(x):
        return baseline(x)

    @compare(
        baseline=base,
        optimized=[side],
        inputs=lambda device, n: (torch.randn(n, device=device),),
        reference=lambda x: reference(x.double()),
        sizes=[SIZE],
        check_sizes=[SIZE],
        work=lambda n: Work(read=4 * n, write=4 * n, terms=n),
        bound="dram",
    )
    def test_it(pair):
        """Only the declaration is used."""

    pool = InputPool(pair_of(test_it), SIZE, "cpu", 1, 2)
    return check_sides(Reference(pool), [(base, None), (side, None)], rule)


FORMS = {
    "one": (torch.sum, lambda x: x.reshape(-1, 11).sum(1).sum()),
    "two": (lambda x: x.reshape(2, -1).sum(1), lambda x: x.reshape(2, -1, 11).sum(2).sum(1)),
    "none": (lambda x: (x + x, x[:0].clone()), lambda x: (2 * x, x[:0].clone())),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_right_output_of_few_elements_passes(form):
    baseline, side = FORMS[form]
    result = checked(side, baseline=baseline, reference=baseline)
    assert "noise refused" in result.controls
    assert result.exact == "bit for bit"


@pytest.mark.parametrize("form", ["one", "two"])
def test_a_wrong_output_of_few_elements_is_refused(form):
    baseline, side = FORMS[form]

    def wrong(x):
        return side(x) * (1 + 1e-4)

    with pytest.raises(Wrong, match=r"wrong is wrong at n=330: output.* the rule is derived bound"):
        checked(wrong, baseline=baseline, reference=baseline)


def transformed(x):
    return torch.fft.rfft(x)


def in_double(x):
    return torch.fft.rfft(x.double()).to(torch.complex64)


@pytest.mark.parametrize("rule", [Rule(), Rule(rtol=2e-6, atol=2e-5)])
def test_the_bound_applies_to_both_parts_of_a_complex_output(rule):
    result = checked(in_double, rule, baseline=transformed, reference=transformed)
    assert "noise refused" in result.controls


def test_the_wrong_part_of_a_complex_output_is_named():
    def shifted(x):
        out = torch.fft.rfft(x)
        out[7] += 0.5j
        return out

    with pytest.raises(
        Wrong, match=r"shifted is wrong at n=330: view_as_real\(output\)\[7, 1\] is"
    ):
        checked(shifted, baseline=transformed, reference=transformed)


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (
            lambda x: torch.fft.rfft(x.double()),
            r"as torch.float64 at n=330, the baseline as torch.f",
        ),
        (
            lambda x: torch.view_as_real(torch.fft.rfft(x)),
            r"returned output at n=330, the reference view_as_real\(output\)",
        ),
    ],
)
def test_another_type_than_complex_is_wrong(side, message):
    with pytest.raises(Wrong, match=message):
        checked(side, baseline=transformed, reference=transformed)
