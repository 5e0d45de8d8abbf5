"""Inputs on which a wrong side may look right get a remark. Inputs of honest pages get none."""

from __future__ import annotations

import pytest
import torch
from honest.common import honest

from pytest_aisp.checking.input_remarks import input_remarks
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.worker.loader import pair_of

N = 96
ALWAYS_EQUAL, LOW = "all elements are equal in every draw", "the rank is at most 4"
TABLE = torch.randn(N, N, generator=torch.Generator().manual_seed(1))


def added(x, y):
    return x + y


def added_back(x, y):
    return y + x


def remarks_of(inputs):
    pair = pair_of(honest(added, added_back, inputs=inputs))
    return input_remarks(InputPool(pair, {"n": N}, "cpu", 1, 2))


def rank_two(n):
    return torch.randn(n, 2) @ torch.randn(2, n)


@pytest.mark.parametrize(
    ("second", "remark"),
    [
        (lambda n: torch.ones(n), ALWAYS_EQUAL),  # a norm's weight
        (lambda n: torch.zeros(n), ALWAYS_EQUAL),  # a norm's bias
        (lambda n: torch.ones(n, n, dtype=torch.bool), ALWAYS_EQUAL),
        (lambda n: torch.full((n,), 7), ALWAYS_EQUAL),
        (
            lambda n: torch.ones(n, n).to(torch.float8_e4m3fn),
            ALWAYS_EQUAL,
        ),
        (lambda n: torch.randn(1).expand(n), "all elements are equal"),
        (lambda n: torch.cat([TABLE, TABLE]), "the values are the same in every draw"),
        (lambda n: torch.randn(n, 1).expand(n, n), LOW),
        (rank_two, LOW),
        (lambda n: rank_two(n).bfloat16(), LOW),
        (lambda n: torch.stack([rank_two(n)] * 3), LOW),
    ],
)
def test_an_input_that_hides_mistakes_is_remarked(second, remark):
    assert remarks_of(lambda device, n: (torch.randn(n, n), second(n))) == [f"inputs[1]: {remark}"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_nan_in_the_inputs_is_counted(dtype):
    def inputs(device, n):
        x = torch.randn(n, n)
        x[3, 5:8] = float("nan")
        return torch.randn(n, n), x.to(getattr(torch, dtype))

    assert remarks_of(inputs) == ["inputs[1]: 3 of 9216 elements are NaN"]


NAN = """
def inputs(device, n):
    x = torch.randn(n, device=device)
    x[{where}] = float("{value}")
    return (x,)
"""


def test_nan_in_the_inputs_is_a_remark_and_no_wrong_side_hides_behind_it(page, pytester):
    page(defs=NAN.format(where=5, value="nan"))
    page("torch.nan_to_num(2 * x)", name="lost_test.py", defs=NAN.format(where=5, value="nan"))
    page("2 * x + (x - x).sum()", name="more_test.py", defs=NAN.format(where=5, value="nan"))
    result = pytester.runpytest_subprocess("--aisp-check", "-v")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines_random(
        [
            "*doubling_test.py*CHECKED*",
            "*inputs[[]0[]]: 1 of 33 elements are NaN*",
            "*doubled is wrong at n=33: output[[]5[]] is 0, expected nan*",
            "*doubled is wrong at n=33: output[[]0[]] is nan, expected *",
        ]
    )


def test_inputs_that_make_every_output_nan_are_refused_with_the_cause(page, pytester):
    page(defs=NAN.format(where=":", value="nan"))
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(
        [
            "*the inputs cannot tell a right output from a wrong one*",
            "*Return at least one finite element that depends on the inputs",
            "*inputs[[]0[]]: 33 of 33 elements are NaN",
        ]
    )


def test_an_infinite_input_is_checked_like_others(page, pytester):
    page(defs=NAN.format(where=5, value="inf"))
    page("torch.nan_to_num(2 * x)", name="lost_test.py", defs=NAN.format(where=5, value="inf"))
    result = pytester.runpytest_subprocess("--aisp-check", "-v")
    result.stdout.fnmatch_lines_random(
        ["*doubling_test.py*CHECKED*", "*doubled is wrong at n=33: output[[]5[]] is *expected inf*"]
    )


def test_paths_name_a_tensor_in_a_dictionary():
    found = remarks_of(lambda device, n: ({"x": torch.randn(n, n), "mask": torch.ones(n, n)},))
    assert found == [f"inputs[0]['mask']: {ALWAYS_EQUAL}"]


@pytest.mark.parametrize(
    "second",
    [
        lambda n: torch.ones(()),  # a scale, an eps
        lambda n: torch.full((8,), 1e-5),
        lambda n: torch.arange(n),
        lambda n: torch.arange(0, n * 8, 8, dtype=torch.int32),  # offsets
        lambda n: torch.ones(n, n, dtype=torch.bool).tril(),  # a causal mask
        lambda n: torch.full((n, n), -torch.inf).triu(1),
        lambda n: torch.rand(n, n) < 0.5,
        lambda n: torch.randint(0, 9, (n,)),
        lambda n: torch.outer(torch.arange(n), torch.ones(n)).cos(),  # a table of positions
        lambda n: TABLE[: n // 2],  # less than half of the floats
        lambda n: torch.randn(n, 4),  # the factor of a product of low rank
        lambda n: torch.randn(n, n).exp() * torch.randn(n).exp().square(),  # outlier columns
        lambda n: 1000 + torch.randn(n, n),
        lambda n: torch.randn(n, n).sort(dim=-1).values,
        lambda n: torch.randn(n, n).cumsum(-1),
        lambda n: torch.randn(n, n).softmax(-1),
        lambda n: torch.randn(n, n).to(torch.float8_e4m3fn),
        lambda n: torch.randn(n, n, dtype=torch.complex64),
        lambda n: torch.randn(n, n).relu(),
        lambda n: torch.randn(n, n) * (torch.rand(n, n) < 0.02),  # mostly zeros
        lambda n: torch.nn.functional.one_hot(torch.randint(0, n, (n,)), n).float(),
        lambda n: torch.eye(n),
        lambda n: torch.randn(0, n),
        lambda n: torch.randn(n, n).triu(),
        lambda n: torch.randn(n, n, requires_grad=True),
    ],
)
def test_an_input_of_an_honest_page_is_not_remarked(second):
    assert remarks_of(lambda device, n: (torch.randn(n, n), second(n))) == []


def test_the_remark_is_shown_and_a_page_without_one_shows_none(page, gpu, pytester):
    gpu(added=2e-5, doubled=1e-5)
    weights = """
        def inputs(device, n):
            return (torch.randn(n, device=device), torch.ones(n, device=device))

        def reference(x, weight):
            return 2 * x.double() * weight

        def added(x, weight):
            return (x + x) * weight

        def doubled(x, weight):
            return 2 * x * weight
    """
    page(defs=weights)
    page(name="other_test.py")
    result = pytester.runpytest_subprocess()
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"*doubling_test.py::*: inputs[[]1[]]: {ALWAYS_EQUAL}"])
    result.stdout.no_fnmatch_line("*other_test.py::*: inputs*")
