"""What is expected of a page: how far its reference moves with what it is given."""

from __future__ import annotations

import pytest
import torch

from pytest_aisp import Work, compare
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.checking.reference import Reference
from pytest_aisp.worker.loader import pair_of


def oracle_of(dtype, shares_storage):
    def state(device, n):
        made = torch.randn(2, n, device=device, dtype=dtype)
        parameters = list(made) if shares_storage else [row.clone() for row in made]
        weight = torch.nn.Parameter(parameters[0])
        weight.grad = parameters[1]
        return [weight]

    def reference(held, x):
        return held[0].detach().double() * held[0].grad.double() * x.double()

    def product(held, x):
        return held[0].detach() * held[0].grad * x

    def again(held, x):
        return product(held, x)

    @compare(
        baseline=product,
        optimized=[again],
        state=state,
        inputs=lambda device, n: (torch.ones(n, device=device, dtype=dtype),),
        reference=reference,
        sizes=[{"n": 1000}],
        check_sizes=[{"n": 1000}],
        work=lambda n: Work(read=n, roundings=2),
        bound="dram",
    )
    def test_product(pair):
        pair.assert_speedup()

    return Reference(InputPool(pair_of(test_product), {"n": 1000}, "cpu", 1, 2))


# Views of one bf16 storage stay views, and are not perturbed.
KEPT = [
    (torch.bfloat16, False),
    (torch.float16, False),
    (torch.float16, True),
    (torch.float32, False),
    (torch.float32, True),
]


@pytest.mark.parametrize(("dtype", "shares_storage"), KEPT)
def test_a_state_is_perturbed_in_whatever_type_it_is_kept(dtype, shares_storage):
    path, value, squares = oracle_of(dtype, shares_storage).expected((0,))[0]
    # Weight, gradient and input move the product by as much each; floors add up to a half.
    expected = 3 * value.square().mean()
    assert path == "output"
    assert 0.7 < float(squares.mean() / expected) < 1.6
