"""The error bound that follows from the operations of a reference, and references without one."""

from __future__ import annotations

import math

import pytest
import torch
from honest import outside_pytorch
from mutants import MUTANTS, mutate, units_of

from pytest_aisp import Work, compare
from pytest_aisp.checking import check, numerics
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.checking.numerics import Rule, Wrong
from pytest_aisp.checking.reference import Reference
from pytest_aisp.page.pair import SideError
from pytest_aisp.worker.loader import pair_of


def reference_of(function, inputs, side=None, **work):
    """Return the reference `function` of a page with these inputs, for a float32 output."""

    def baseline(*values):
        return (side or function)(*values)

    @compare(
        baseline=baseline,
        optimized=[lambda *values: baseline(*values)],
        inputs=inputs,
        reference=function,
        sizes=[{"n": 33}],
        check_sizes=[{"n": 33}],
        work=lambda n: Work(read=1, **work),
        bound="dram",
    )
    def test(pair): ...

    return Reference(InputPool(pair_of(test), {"n": 33}, "cpu", 1, 2))


def normal(device, n):
    return (torch.randn(64, n, device=device),)


def sigma_of(function, inputs=normal, dtype=torch.float32, precision=None, **work):
    """Return the allowed deviations of the output of `function`, and the remarks."""
    reference = reference_of(function, inputs, **work)
    reference.learn_types([("output", dtype)])
    [leaf] = reference.leaves((0,), precision)
    return leaf.sigma, reference.bound.remarks


def in_bf16(device, n):
    return tuple(torch.randn(64, n, device=device).bfloat16() for _ in range(2))


def two_products(x, y):
    return (x.double() @ y.double().T) @ y.double()


def test_intermediate_values_of_cancelling_sums_count():
    """1 + x is rounded as 1 + x, however small the result of subtracting 1 again is."""
    tiny, _ = sigma_of(lambda x: (1 + x.double() * 1e-6) - 1)
    direct, _ = sigma_of(lambda x: x.double() * 1e-6)
    assert float(tiny.mean()) > 1e4 * float(direct.mean())
    assert float(tiny.mean()) == pytest.approx(2**-24 / 3**0.5, rel=0.1)


def test_operations_inside_autograd_and_transforms_are_traced():
    def by_autograd(x):
        x = x.double().requires_grad_()
        (1 + x * 1e-6).log().sum().backward()
        return x.grad

    def by_transform(x):
        return torch.func.vmap(torch.func.grad(lambda r: (1 + r * 1e-6).log().sum()))(x.double())

    for function in (by_autograd, by_transform):
        sigma, remarks = sigma_of(function)
        assert float(sigma.mean()) > 1e-6 * 2**-24
        assert not remarks


def test_a_page_with_fp32_outputs_promises_fp32_arithmetic_unless_it_declares_less():
    exact, _ = sigma_of(two_products, in_bf16)
    coarse, _ = sigma_of(two_products, in_bf16, precision="bf16")
    stored, _ = sigma_of(two_products, in_bf16, torch.bfloat16)
    assert float(coarse.mean()) > 1e3 * float(exact.mean())
    assert 0.3 < float(stored.mean() / coarse.mean()) < 3


def test_a_side_may_sum_more_and_round_more_often_than_the_reference():
    def total(x):
        return x.double().sum(1)

    def triple(x):
        return x.double() * 3

    once, _ = sigma_of(total)
    longer, _ = sigma_of(total, terms=33 * 100)
    assert 5 < float(longer.mean() / once.mean()) < 20
    once, _ = sigma_of(triple)
    often, _ = sigma_of(triple, roundings=16)
    assert 3 < float(often.mean() / once.mean()) < 5


@pytest.mark.parametrize(
    ("work", "remark"),
    [
        (
            {"terms": 2},
            "Work(terms=2) has no effect: the longest sum of the reference has 33 terms;"
            " leave terms out",
        ),
        (
            {"terms": 3300},
            "Work(terms=3300) makes the error bound about 10 times as wide: the longest sum of the"
            " reference has 33 terms; leave terms out, unless a side has more",
        ),
        (
            {"roundings": 1},
            "Work(roundings=1) has no effect: the reference rounds 21 times in a row;"
            " leave roundings out",
        ),
        (
            {"roundings": 1000},
            "Work(roundings=1000) makes the error bound about 5 times as wide: the reference rounds"
            " 21 times in a row; leave roundings out, unless a side has more",
        ),
    ],
)
def test_declared_numbers_that_contradict_the_traced_ones_are_named(work, remark):
    def total(x):
        return x.double().sum(1)

    def chain(x):
        for _ in range(20):
            x = x * 1.5
        return x.double().sum(1)

    _, remarks = sigma_of(total if "terms" in work else chain, **work)
    assert remarks == [remark]


@pytest.mark.parametrize(
    ("function", "inputs", "dtype", "work"),
    [
        # About as many as the reference has.
        (lambda x: x.double().sum(1), normal, torch.float32, {"terms": 20, "roundings": 4}),
        (lambda x: x.double().sum(1), normal, torch.float32, {"terms": 33 * 6}),
        # The fp32 accumulators of a longer sum are exact enough for an output in bf16.
        (two_products, in_bf16, torch.bfloat16, {"terms": 33 * 1000}),
        # A scan in parallel steps has no sums, but a side may sum one after another.
        (lambda x: x.double() * 3, normal, torch.float32, {"terms": 1000}),
        # Values that leave PyTorch are not traced.
        (lambda x: x.double() * float(x.sum()), normal, torch.float32, {"terms": 1000}),
    ],
)
def test_declared_numbers_that_hardly_widen_the_bound_are_not_named(function, inputs, dtype, work):
    _, remarks = sigma_of(function, inputs, dtype, **work)
    assert not remarks


def test_complex_inputs_are_traced():
    def inputs(device, n):
        return (torch.randn(n, dtype=torch.complex64, device=device),)

    sigma, remarks = sigma_of(lambda x: (x.to(torch.complex128) * (2 + 1j)).real, inputs)
    assert float(sigma.min()) > 0
    assert not remarks


def test_integers_without_floating_inputs_have_a_bound():
    def inputs(device, n):
        return (torch.randint(0, 9, (n, n), device=device),)

    sigma, remarks = sigma_of(lambda x: x.double().mean(1), inputs)
    assert float(sigma.min()) > 0
    assert not remarks


ASSUMED = (
    "allows for sums of {} terms and {} roundings in a row; declare others with Work(terms=,"
    " roundings=)"
)


@pytest.mark.parametrize("leave", [torch.Tensor.numpy, torch.Tensor.tolist])
def test_a_reference_outside_of_pytorch_is_bound_by_its_inputs(leave):
    sigma, remarks = sigma_of(lambda x: torch.tensor(leave(x.double())) * 3)
    assert float(sigma.min()) > 0
    assert remarks == [
        "the error bound comes from the inputs alone: the reference's values leave PyTorch"
        f" ({leave.__name__}); it {ASSUMED.format(1024, 8)}"
    ]


def test_a_sum_outside_of_pytorch_may_be_as_long_as_the_inputs():
    def total(x):
        return torch.from_numpy(x.double().numpy().sum(keepdims=True))

    def long(device, n):
        return (torch.randn(1024 * n, device=device),)

    _, remarks = sigma_of(total, long)
    assert remarks[0].endswith(ASSUMED.format(1024 * 33, 8))
    _, remarks = sigma_of(total, long, terms=64, roundings=2)
    assert remarks[0].endswith(ASSUMED.format(64, 2))


def sum_by_items(x):
    return torch.tensor([sum(v.item() for v in row) for row in x.double()], dtype=torch.float64)


def test_values_that_are_read_one_by_one_are_the_terms_of_a_sum():
    sigma, remarks = sigma_of(sum_by_items)
    traced, _ = sigma_of(lambda x: x.double().sum(1), terms=64 * 33)
    assert 0.5 < float(sigma.mean() / traced.mean()) < 2
    assert remarks == [
        "the reference reads 2112 values one by one (.item()): the error bound"
        f" {ASSUMED.format(2112, 8)}"
    ]
    declared, remarks = sigma_of(sum_by_items, terms=33, roundings=1)
    assert float(declared.mean()) < 0.3 * float(sigma.mean())
    assert remarks[0].endswith(ASSUMED.format(33, 1))


def test_integral_values_that_are_read_stay_as_they_are():
    """Lengths and indices may be stored as floats."""

    def inputs(device, n):
        return torch.randn(64, n, device=device), torch.arange(1.0, n, device=device)

    def heads(x, lengths):
        return torch.stack([x.double()[:, : int(n.item())].sum() for n in lengths])

    def listed(x, lengths):
        return torch.stack([x.double()[:, :n].sum() for n in lengths.long().tolist()])

    for reference in (heads, listed):
        sigma, remarks = sigma_of(reference, inputs)
        assert float(sigma.min()) > 0
        assert not remarks


@pytest.mark.parametrize("page", [n for n in vars(outside_pytorch) if n.startswith("test_")])
def test_a_reference_outside_of_pytorch_refuses_wrong_sides(page):
    pair = pair_of(getattr(outside_pytorch, page))
    reference = Reference(InputPool(pair, {"n": 9}, "cpu", 1, 2))
    controls = check.check_sides(reference, [(pair.baseline, None)] * 2, Rule()).controls
    assert {"zeros refused", "noise refused", "stale refused"} <= set(controls)
    for mutant in MUTANTS:
        side = mutate(mutant, pair.baseline, units_of(pair))
        with pytest.raises(Wrong, match="wrong is"):
            check.check_sides(reference, [(pair.baseline, None), (side, None)], Rule())


def test_a_reference_that_cannot_run_while_it_is_traced_is_bound_by_its_inputs():
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    def untraceable(x):
        if _get_current_dispatch_mode() is not None:
            raise RuntimeError("no modes")
        return x.double() * 3

    sigma, remarks = sigma_of(untraceable)
    assert float(sigma.min()) > 0
    assert remarks == [
        "the error bound comes from the inputs alone: RuntimeError is raised when it is traced; it"
        f" {ASSUMED.format(1024, 8)}"
    ]


def only_for(values):
    def reference(x):
        if not torch.equal(x.float(), values):
            raise ValueError("these are not the inputs")
        return x.double() * 3

    return reference


def test_a_reference_that_refuses_perturbed_inputs_is_bound_by_its_values():
    values = torch.randn(64, 33)
    sigma, remarks = sigma_of(
        lambda x: only_for(values)(x * 1), lambda device, n: (values.to(device),)
    )
    assert float(sigma.min()) > 0
    assert remarks == [
        "the error bound comes from the inputs alone: the reference raises ValueError on perturbed"
        f" values; it {ASSUMED.format(1024, 8)}",
        "the error bound is relative to each element: the reference raises ValueError on perturbed"
        " inputs",
    ]


@pytest.mark.parametrize(
    ("slow", "remarks"),
    [
        (-1.0, ["the reference takes 0 s: the error bound comes from one perturbed run"]),
        (numerics.SLOW, []),
    ],
    ids=["slow", "long"],
)
def test_a_long_reference_is_perturbed_once_at_first(monkeypatch, slow, remarks):
    monkeypatch.setattr(numerics, "LONG", -1.0)
    monkeypatch.setattr(numerics, "SLOW", slow)
    calls = []

    def counted(x):
        calls.append(x)
        return x.double() * 3

    assert sigma_of(counted)[1] == remarks
    assert len(calls) == 3


def test_a_reference_that_draws_random_numbers_is_refused():
    with pytest.raises(SideError, match=r"reference draws random numbers \(aten\.rand"):
        sigma_of(lambda x: x.double() + torch.rand(64, 33))


def test_random_numbers_that_do_not_matter_are_allowed():
    def reference(x):
        layer = torch.nn.Linear(33, 33, bias=False).double()  # draws weights
        layer.weight.data.copy_(torch.eye(33))
        return layer(x.double()).detach()

    sigma, _ = sigma_of(reference)
    assert float(sigma.mean()) > 0


@pytest.mark.parametrize(("long", "draws"), [(math.inf, numerics.DRAWS), (-1.0, 1)])
def test_more_runs_are_made_before_a_side_is_refused(monkeypatch, long, draws):
    monkeypatch.setattr(numerics, "LONG", long)
    calls = []

    def reference(x):
        calls.append(x)
        return x.double() * x.double().sum()

    def inputs(device, n):
        return (torch.rand(n, device=device) + 1,)

    def off(x):
        return reference(x).float() * (1 + 2.0**-19)

    made = reference_of(reference, inputs, lambda x: x * x.sum())
    sides = [(made.pool.pair.baseline, None), (off, None)]
    with pytest.raises(Wrong, match="off is wrong"):
        check.check_sides(made, sides, Rule(), controls=False)
    assert len(calls) > 3 + draws + numerics.MORE_DRAWS


def nearly(off, draws):
    """Return a sum of rows whose first element is `off` deviations away in its first `draws` runs.

    Each run gets other values, and a check has two of them for each draw of the inputs.
    """
    runs = []

    def rows(x):
        out = x.sum(1)
        runs.append(1)
        if len(runs) <= draws:
            sigma, _ = sigma_of(lambda x: x.double().sum(1))
            out[0] = x[0].double().sum() + off * float(sigma[0])
        return out

    return rows


@pytest.mark.parametrize("off", [11, -11])
def test_a_result_slightly_over_the_bound_is_right_if_it_is_right_on_other_values(off):
    """The rounding errors of an honest side exceed any bound by chance now and then."""
    made = reference_of(lambda x: x.double().sum(1), normal, lambda x: x.sum(1))
    sides = [(made.pool.pair.baseline, None), (nearly(off, draws=1), None)]
    check.check_sides(made, sides, Rule(), controls=False)
    assert any("but not on another" in remark for remark in made.bound.remarks)


@pytest.mark.parametrize(("off", "draws"), [(11, 99), (30, 1)])
def test_a_result_over_the_bound_on_all_values_or_far_over_it_is_wrong(off, draws):
    made = reference_of(lambda x: x.double().sum(1), normal, lambda x: x.sum(1))
    sides = [(made.pool.pair.baseline, None), (nearly(off, draws), None)]
    with pytest.raises(Wrong, match="rows is wrong"):
        check.check_sides(made, sides, Rule(), controls=False)


@pytest.mark.parametrize(("draws", "refused"), [(2, False), (99, True)])
def test_a_side_is_less_exact_than_its_baseline_only_if_it_is_on_all_values(draws, refused):
    runs = []

    def rows(x):
        runs.append(1)
        exact = x.double().sum(1)
        return (exact * (1 + 3e-7 * (len(runs) <= draws))).float()

    made = reference_of(lambda x: x.double().sum(1), normal, lambda x: x.double().sum(1).float())
    sides = [(made.pool.pair.baseline, None), (rows, None)]
    if refused:
        with pytest.raises(Wrong, match="rows is less exact than its baseline"):
            check.check_sides(made, sides, Rule(), controls=False)
    else:
        check.check_sides(made, sides, Rule(), controls=False)


def test_masked_scores_are_perturbed():
    """Negative infinity stays what it is, and the other elements are perturbed."""

    def attention(x):
        scores = x.double() @ x.double().T
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ x.double()

    sigma, _ = sigma_of(attention)
    unmasked, _ = sigma_of(lambda x: (x.double() @ x.double().T).softmax(-1) @ x.double())
    assert 0.2 < float(sigma.mean() / unmasked.mean()) < 5


def test_a_reference_may_build_tables_in_its_first_run():
    tables = []

    def reference(x):
        if not tables:
            tables.append(torch.randn(33, 33).double() @ torch.eye(33).double())
        return x.double() @ torch.ones(33, 3).double()

    lazy, remarks = sigma_of(reference)
    plain, _ = sigma_of(lambda x: x.double() @ torch.ones(33, 3).double())
    assert not remarks
    assert torch.allclose(lazy, plain, rtol=1e-3)


def test_results_that_change_when_they_are_traced_are_bound_by_the_inputs():
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    sigma, remarks = sigma_of(lambda x: x.double() * (1 if _get_current_dispatch_mode() else 3))
    assert float(sigma.min()) > 0
    assert remarks == [
        "the error bound comes from the inputs alone: its results change when it is traced; it"
        f" {ASSUMED.format(1024, 8)}"
    ]
