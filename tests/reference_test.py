"""The reference after several steps: all of them count, or only the last; its sensitivity."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from pytest_aisp import Conditions, Work, compare
from pytest_aisp.checking import check, numerics
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.checking.numerics import Rule, Wrong
from pytest_aisp.checking.reference import Reference
from pytest_aisp.worker.loader import pair_of


def inputs(device, n):
    return (torch.randn(3, n, device=device),)


def weights(device, n):
    return SimpleNamespace(w=torch.randn(n, n, device=device), seen=0)


def read(state, x):
    return x.double() @ state.w.double()


def converting(state, x):
    state.w = state.w.double()
    return x.double() @ state.w


def updating(state, x):
    state.w = state.w.double() + x.double().mean()
    return x.double() @ state.w


def counting(state, x):
    state.seen += 1
    return x.double() @ state.w.double() * state.seen


def side(state, x):
    return x @ state.w


def reference_of(function, state=weights, gpus=1):
    @compare(
        baseline=side,
        optimized=[lambda state, x: side(state, x)],
        state=state,
        inputs=inputs,
        reference=function,
        sizes=[{"n": 33}],
        check_sizes=[{"n": 33}],
        work=lambda n: Work(read=4 * n * n, terms=n),
        bound="dram",
        conditions=Conditions(gpus=gpus),
    )
    def test(pair):
        pass

    return Reference(InputPool(pair_of(test), {"n": 33}, "cpu", 1, 2))


@pytest.mark.parametrize("function", [read, converting])
def test_only_the_last_step_counts_if_the_state_is_only_read(function):
    reference = reference_of(function)
    assert not reference.state_changes
    three, one = reference.leaves((0, 1, 0), "int4"), reference.leaves((0,), "int4")
    assert [leaf.path for leaf in three] == ["output", "state.w"]
    assert torch.equal(three[0].sigma, one[0].sigma)
    assert torch.equal(three[0].value, one[0].value)


@pytest.mark.parametrize("function", [updating, counting])
def test_every_step_counts_if_the_state_changes(function):
    reference = reference_of(function)
    assert reference.state_changes
    three, one = reference.leaves((0, 1, 0), None), reference.leaves((0,), None)
    assert not torch.equal(three[0].value, one[0].value)


def stepped(state, x):
    """Change the state in place, and return a view of it."""
    state.w += x.to(state.w.dtype).mean()
    return state.w[:2]


def of_all_ranks(function):
    return lambda states, ranks: [function(s, *i) for s, i in zip(states, ranks, strict=True)]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("function", [updating, counting, stepped])
def test_one_pass_computes_the_same_after_each_step_as_separate_passes(function, ranks, exact):
    calls = []

    def counted(state, x):
        calls.append(x)
        return function(state, x)

    made = of_all_ranks(counted) if ranks > 1 else counted
    together, separate = reference_of(made, gpus=ranks), reference_of(made, gpus=ranks)
    together.exact = separate.exact = exact
    assert together.state_changes
    assert separate.state_changes
    calls.clear()
    together.expected((0, 1, 0), every=True)
    runs = len(calls)
    assert runs == (3 if exact else 6)
    for count in (1, 2, 3):
        turns = (0, 1, 0)[:count]
        for one, other in zip(together.expected(turns), separate.expected(turns), strict=True):
            assert one.path == other.path
            assert torch.equal(one.value, other.value)
        for one, other in zip(
            together.leaves(turns, None), separate.leaves(turns, None), strict=True
        ):
            assert exact or torch.allclose(one.sigma, other.sigma, rtol=0.2)


def test_each_step_is_run_alone_if_the_gpu_is_too_small(monkeypatch):
    reference = reference_of(updating)
    state = reference.pool.new_state()
    monkeypatch.setattr(reference.pool, "new_state", lambda: state)
    reference.pool.device = "cuda"
    bytes_of_33_by_33 = 8 * 2 * 33 * 33 * (3 * 3 + 1)
    for more, fits in ((0, True), (-1, False)):
        free = 2 * bytes_of_33_by_33 + more - 700
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, free))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1000)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 300)
        assert reference._fits_memory(3) is fits


@pytest.mark.parametrize(("function", "changes"), [(read, False), (updating, True)])
def test_a_state_change_on_any_rank_counts(function, changes):
    reference = reference_of(of_all_ranks(function), gpus=2)
    assert reference.state_changes is changes
    three, one = reference.leaves((0, 1, 0), None), reference.leaves((0,), None)
    assert torch.equal(three[0].sigma, one[0].sigma) is not changes


def test_a_side_that_changes_a_state_which_the_reference_only_reads_is_wrong():
    def writing(state, x):
        out = x @ state.w
        state.w.mul_(1.01)
        return out

    with pytest.raises(Wrong, match=r"writing is wrong at n=33: state\.w"):
        check.check_sides(
            reference_of(read), [(side, None), (writing, None)], Rule(), controls=False
        )


def product_reference(dtype, shares_storage):
    def state(device, n):
        made = torch.randn(2, n, device=device, dtype=dtype)
        parameters = list(made) if shares_storage else [row.clone() for row in made]
        weight = torch.nn.Parameter(parameters[0])
        weight.grad = parameters[1]
        return [weight]

    def product(state, x):
        return state[0].detach() * state[0].grad * x

    @compare(
        baseline=product,
        optimized=[lambda state, x: product(state, x)],
        state=state,
        inputs=lambda device, n: (torch.ones(n, device=device, dtype=dtype),),
        reference=lambda state, x: state[0].detach().double() * state[0].grad.double() * x.double(),
        sizes=[{"n": 1000}],
        check_sizes=[{"n": 1000}],
        work=lambda n: Work(read=n),
        bound="dram",
    )
    def test(pair): ...

    return Reference(InputPool(pair_of(test), {"n": 1000}, "cpu", 1, 2))


@pytest.mark.parametrize(
    ("dtype", "shares_storage"),
    [
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.float16, True),
        (torch.float32, False),
        (torch.float32, True),
    ],
)
def test_products_of_a_state_of_any_type_are_rounded_once_per_product(dtype, shares_storage):
    reference = product_reference(dtype, shares_storage)
    reference.learn_types([("output", dtype)])
    [leaf, *_] = reference.leaves((0,), None)
    # Two products, and the rounding of the output.
    unit = numerics.UNIT[str(dtype).removeprefix("torch.")]
    expected = 3 * unit**2 / 3 * leaf.value.square().mean()
    assert leaf.path == "output"
    assert 0.7 < float(leaf.sigma.square().mean() / expected) < 1.6


def test_a_reference_is_freed_with_its_last_user():
    """The collector skips older objects, so a reference cycle would keep the outputs in memory."""
    made = reference_of(updating)
    made.leaves((0,), None)
    alive = weakref.ref(made)
    del made
    assert alive() is None


def test_a_baseline_is_checked_once_for_all_variants():
    calls = []

    def base(x):
        calls.append("base")
        return x + 1

    def doubled(x):
        return 2 * x

    @compare(
        baseline=base,
        optimized=[doubled],
        inputs=lambda device, n: (torch.randn(n, device=device),),
        reference=lambda x: x + 1,
        sizes=[{"n": 100}],
        check_sizes=[{"n": 33}],
        work=lambda n: Work(read=4 * n, write=4 * n),
        bound="dram",
    )
    def test_page(pair):
        pass

    made = Reference(InputPool(pair_of(test_page), {"n": 100}, "cpu", 1, 2))
    sides = [(base, None), (lambda x: x + 1, None)]
    first = check.check_sides(made, sides, Rule(), controls=False)
    runs = len(calls)
    calls.clear()
    second = check.check_sides(made, sides, Rule(), controls=False)
    assert second.errors == first.errors
    assert len(calls) == 1 < runs  # only the exact probe runs the baseline again
    with pytest.raises(Wrong):
        check.check_sides(made, [(base, None), (doubled, None)], Rule(), controls=False)
    for _ in range(2):  # a failed check is not kept
        with pytest.raises(Wrong):
            check.check_sides(made, [(doubled, None), (base, None)], Rule(), controls=False)
