"""The exact probe keeps the properties of the inputs that honest sides rely on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from honest import structured_inputs as pages
from honest.common import honest

from pytest_aisp.checking import exact_probe
from pytest_aisp.checking.check import check_sides
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.checking.numerics import Rule, Wrong
from pytest_aisp.checking.reference import Reference
from pytest_aisp.worker.loader import pair_of

N = 33
SMALL = "is kept: its elements are integers from -2 to 2"
SUMS, NORMS = "its magnitudes sum to 1 along dimension", "its rows have norm 1 along dimension"


def values(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def probed(tensor):
    """Return the values that the probe makes of `tensor`, and the remark about them."""
    (integers,), remarks = exact_probe._integers((tensor,), 0)
    assert integers.dtype == tensor.dtype
    return integers, remarks[0].removeprefix("exact probe: inputs[0] ") if remarks else ""


@pytest.mark.parametrize(
    ("tensor", "levels"),
    [
        (values(N, 16), [-2, -1, 0, 1, 2]),
        (values(N, 16).abs(), [0, 1, 2]),
        (values(N, 16).sigmoid(), [0, 0.5]),  # also below 1, such as the share of an index
        (values(N, 16).tanh(), [-0.5, 0, 0.5]),
        (values(N, 16).clamp(-1, 1), [-1, 0, 1]),
        (0.01 * values(N, 16), [-1, 0, 1]),
        (0.3 * values(N, 16).sign(), [-1, 1]),
        (torch.full((N, 16), 0.25), [-2, -1, 0, 1, 2]),  # a constant would hide a wrong side
    ],
)
def test_rounding_keeps_the_signs_and_the_range(tensor, levels):
    integers, remark = probed(tensor)
    assert integers.unique().tolist() == levels
    assert remark == ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("order", "words"), [(1, SUMS), (2, NORMS)])
def test_rows_of_norm_one_become_one_hot(order, words, dim, dtype):
    rows = values(9, 10, 11).movedim(dim, 2)
    largest = torch.arange(rows[..., 0].numel()).view(rows.shape[:2]) % rows.shape[2]
    rows.scatter_(2, largest[:, :, None], 10 * (-1.0) ** largest[:, :, None])
    rows[0, 0] = 0  # padding
    rows = F.normalize(rows, p=order, dim=2).movedim(2, dim).to(dtype)
    integers, remark = probed(rows)
    assert remark == f"has one-hot rows: {words} {dim}"
    integers = integers.movedim(dim, 2)
    assert not integers[0, 0].any()
    integers[0, 0, 0] = 1
    assert torch.equal(integers.abs().argmax(2), largest)
    assert torch.equal(integers, F.one_hot(largest, integers.shape[2]) * integers.sum(2, True))
    assert bool((integers.sum(2).abs() == 1).all())


@pytest.mark.parametrize(
    ("tensor", "remark"),
    [
        ((values(N, 16) > 0).float(), SMALL),
        (values(N, 16).sign(), SMALL),
        (values(N, 16).clamp(-2, 2).round().to(torch.float8_e4m3fn), SMALL),
        (torch.tensor([[0.4, 0.4, 0.2], [0.1, 0.3, 0.6]]), f"is kept: {SUMS} 1"),  # equal ones
        (torch.linalg.qr(values(N, N)).Q, f"is kept: {NORMS} 0 and 1"),
    ],
)
def test_values_are_kept_if_integers_would_break_a_property(tensor, remark):
    kept, said = probed(tensor)
    assert torch.equal(kept, tensor)
    assert said == remark


@pytest.mark.parametrize(
    "tensor",
    [
        F.normalize(values(N, 16), dim=1) * 1.001,
        torch.cat([F.normalize(values(N, 16), dim=1), values(1, 16)]),  # the last row only
        torch.rand(N, 1),
        torch.rand(N, 16).to(torch.float8_e4m3fn),
        torch.full((N, 16), 1 / 16),
    ],
)
def test_rows_of_other_norms_are_rounded(tensor):
    integers, remark = probed(tensor)
    assert remark == ""
    assert not torch.equal(integers, tensor)


def with_gradients():
    return values(N, 16).requires_grad_(), values(N).long()


def test_rounded_inputs_require_gradients_as_before():
    before = with_gradients()
    after, _ = exact_probe._integers(before, 0)
    assert [tensor.requires_grad for tensor in after] == [True, False]
    assert after[0].is_leaf
    assert torch.equal(after[1], before[1])


PAIRS = {
    name.removeprefix("test_"): thing.pytestmark[0].kwargs["pair"]
    for name, thing in vars(pages).items()
    if name.startswith("test_")
}
KEPT = {
    "saturation_of_fractions": [],
    "brightness_of_an_image": [],
    "distance_of_unit_rows": [f"inputs[{i}] has one-hot rows: {NORMS} 1" for i in (0, 1)],
    "mean_of_probabilities": [f"inputs[0] has one-hot rows: {SUMS} 1"],
    "rows_of_a_one_hot_table": [f"inputs[0] {SMALL}"],
}


def checked(name, side=None):
    """Check the honest page `name` with `side`, or with its own."""
    pair = PAIRS[name]
    size = dict(pair.check_sizes[0])
    sides = [(pair.baseline, None), (side or pair.variants[0].side, None)]
    return check_sides(Reference(InputPool(pair, size, "cpu", 1, 2)), sides, Rule())


@pytest.mark.parametrize("name", KEPT)
def test_the_probe_runs_where_inputs_have_properties_and_a_remark_says_what_was_kept(name):
    result = checked(name)
    assert result.exact == "bit for bit"
    assert result.remarks == [f"exact probe: {remark}" for remark in KEPT[name]]


@pytest.mark.parametrize("name", [name for name in KEPT if name != "saturation_of_fractions"])
def test_a_side_below_the_bound_is_refused_where_inputs_have_properties(name):
    def nearly(*inputs):
        out = PAIRS[name].baseline(*inputs)
        return out + 2e-8 * torch.cos(1e5 * (inputs[0].sum() + out))

    with pytest.raises(Wrong) as error:
        checked(name, nearly)
    lines = str(error.value).splitlines()
    assert lines[1].startswith("This is the exact probe: the values of the inputs were replaced by")
    assert lines[2:] == [f"exact probe: {remark}" for remark in KEPT[name]]


def test_a_side_that_is_wrong_at_zero_alone_is_refused_where_inputs_are_fractions():
    def nearly(x):
        return torch.where(x == 0, 1e-8, 2 * x)

    with pytest.raises(Wrong, match="This is the exact probe"):
        checked("saturation_of_fractions", nearly)


def hadamard(device, n):
    matrix = torch.ones(1, 1, device=device)
    for _ in range(6):
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=device))
    signs = torch.randn(64, 1, device=device).sign()
    return signs * matrix / 8, torch.randn(64, n, device=device)


def rotated_back(q, x):
    return q.T @ (q @ x)


def untouched(q, x):
    return x.clone()


def test_a_side_that_relies_on_an_orthogonal_matrix_is_accepted():
    pair = pair_of(honest(rotated_back, untouched, inputs=hadamard))
    reference = Reference(InputPool(pair, {"n": N}, "cpu", 1, 2))
    result = check_sides(reference, [(rotated_back, None), (untouched, None)], Rule())
    assert result.exact == "bit for bit"
    assert result.remarks == [f"exact probe: inputs[0] is kept: {NORMS} 0 and 1"]


def test_the_remark_is_shown_with_vv(page, gpu, pytester):
    gpu(added=2e-5, doubled=1e-5)
    mask = """
        def inputs(device, n):
            return (torch.randn(n, device=device), (torch.rand(n, device=device) < 0.5).float())

        def reference(x, mask):
            return 2 * x.double() * mask

        def added(x, mask):
            return (x + x) * mask

        def doubled(x, mask):
            return 2 * x * mask
    """
    page(defs=mask)
    result = pytester.runpytest_subprocess("-vv")
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"*at n=*: exact probe: inputs[[]1[]] {SMALL}*"])
