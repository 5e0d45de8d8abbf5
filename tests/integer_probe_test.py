"""When sums of small integers over several ranks are exact."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pytest_aisp.checking.controls import _fits_types


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
def test_a_type_that_rounds_partial_sums_has_no_exact_sum(dtype, largest, exact):
    oracle = SimpleNamespace(types={"output": dtype})
    expected = [("output", torch.tensor([-largest, 1, 0]))]
    assert _fits_types(oracle, expected) is exact
    assert _fits_types(oracle, [("output", torch.empty(0))])
