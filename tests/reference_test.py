"""What is expected after several steps: all of them count, or the last alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pytest_aisp import Conditions, Work, compare
from pytest_aisp.checking import check
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


def oracle_of(reference, state=weights, gpus=1):
    @compare(
        baseline=side,
        optimized=[lambda state, x: side(state, x)],
        state=state,
        inputs=inputs,
        reference=reference,
        sizes=[{"n": 33}],
        check_sizes=[{"n": 33}],
        work=lambda n: Work(read=4 * n * n, terms=n),
        bound="dram",
        conditions=Conditions(gpus=gpus),
    )
    def test(pair):
        pass

    return Reference(InputPool(pair_of(test), {"n": 33}, "cpu", 1, 2))


@pytest.mark.parametrize("reference", [read, converting])
def test_of_a_state_that_is_only_read_the_last_step_alone_counts(reference):
    oracle = oracle_of(reference)
    assert not oracle.state_changes
    three, one = oracle.leaves((0, 1, 0), "int4"), oracle.leaves((0,), "int4")
    assert [leaf.path for leaf in three] == ["output", "state.w"]
    assert torch.equal(three[0].sigma, one[0].sigma)
    assert torch.equal(three[0].value, one[0].value)


@pytest.mark.parametrize("reference", [updating, counting])
def test_of_a_state_that_changes_every_step_counts(reference):
    oracle = oracle_of(reference)
    assert oracle.state_changes
    three, one = oracle.leaves((0, 1, 0), None), oracle.leaves((0,), None)
    assert not torch.equal(three[0].value, one[0].value)


def stepped(state, x):
    """Change the state where it is, and return a view of it."""
    state.w += x.to(state.w.dtype).mean()
    return state.w[:2]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("reference", [updating, counting, stepped])
def test_what_is_foreseen_is_what_each_step_alone_leaves(reference, ranks, exact):
    calls = []

    def counted(state, x):
        calls.append(x)
        return reference(state, x)

    def of_all(states, ranks):
        return [counted(s, *inputs) for s, inputs in zip(states, ranks, strict=True)]

    made = of_all if ranks > 1 else counted
    foreseen, alone = oracle_of(made, gpus=ranks), oracle_of(made, gpus=ranks)
    foreseen.exact = alone.exact = exact
    assert foreseen.state_changes
    assert alone.state_changes
    calls.clear()
    foreseen.precompute((0, 1, 0))
    runs = len(calls)
    assert runs == (3 if exact else 12)
    for count in (1, 2, 3):
        for one, other in zip(
            foreseen.expected((0, 1, 0)[:count]), alone.expected((0, 1, 0)[:count]), strict=True
        ):
            assert one[0] == other[0]
            assert torch.equal(one[1], other[1])
            assert exact or torch.equal(one[2], other[2])
    assert len(calls) == runs + (6 if exact else 24)


def test_nothing_is_foreseen_where_the_last_step_alone_counts():
    oracle = oracle_of(read)
    oracle.precompute((0, 1, 0))
    assert not oracle._expected


def test_on_a_gpu_that_is_too_small_each_step_is_run_alone(monkeypatch):
    oracle = oracle_of(updating)
    state = oracle.pool.new_state()
    monkeypatch.setattr(oracle.pool, "new_state", lambda: state)
    oracle.pool.device = "cuda"
    bytes_of_33_by_33 = 8 * 2 * 33 * 33 * (3 * 3 + 1)
    for more, room in ((0, True), (-1, False)):
        free = 2 * bytes_of_33_by_33 + more - 700
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, free))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1000)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 300)
        assert oracle._fits_memory(3) is room


@pytest.mark.parametrize(("reference", "carries"), [(read, False), (updating, True)])
def test_ranks_carry_what_their_reference_leaves_changed(reference, carries):
    def of_all(states, ranks):
        return [reference(s, *inputs) for s, inputs in zip(states, ranks, strict=True)]

    oracle = oracle_of(of_all, gpus=2)
    assert oracle.state_changes is carries
    three, one = oracle.leaves((0, 1, 0), None), oracle.leaves((0,), None)
    assert torch.equal(three[0].sigma, one[0].sigma) is not carries


def test_a_side_that_changes_what_the_reference_only_reads_is_wrong():
    def writing(state, x):
        out = x @ state.w
        state.w.mul_(1.01)
        return out

    oracle = oracle_of(read)
    with pytest.raises(Wrong, match=r"writing is wrong at n=33: state\.w"):
        check.check_sides(oracle, [(side, None), (writing, None)], Rule(), controls=False)
