"""What both sides get: slots, values, states, one GPU. And the length of a window."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from pytest_aisp import Conditions, Work, compare
from pytest_aisp.checking import check
from pytest_aisp.checking.inputs import COLD_FOOTPRINT, UNSEEN, InputPool, NotCold
from pytest_aisp.page.pair import SideError
from pytest_aisp.session.placement import COMPILER
from pytest_aisp.session.run_context import RunContext
from pytest_aisp.timing.schedule import calls_for, settle
from pytest_aisp.util import pytree
from pytest_aisp.util.device import Machine
from pytest_aisp.worker.loader import pair_of

MIB = 1 << 20


def doubled(x):
    return 2 * x


def added(x):
    return x + x


def pool_of(*, n=1000, seed=1, unseen=2, l2="cold"):
    @compare(
        baseline=added,
        optimized=[doubled],
        inputs=lambda device, n: (torch.randn(n, device=device),),
        reference=lambda x: 2 * x.double(),
        sizes=[{"n": n}],
        check_sizes=[{"n": 33}],
        work=lambda n: Work(read=4 * n, write=4 * n),
        bound="dram",
        conditions=Conditions(l2=l2),
    )
    def test_doubling(pair):
        pair.assert_speedup()

    return InputPool(pair_of(test_doubling), {"n": n}, "cpu", seed, unseen)


def test_inputs_whose_shapes_depend_on_the_seed_are_refused():
    def inputs(device, n):
        return (torch.zeros(1 + int(torch.randint(1000, ())), device=device),)

    pair = dataclasses.replace(pool_of().pair, inputs=inputs)
    with pytest.raises(SideError, match=r"inputs returned .*shapes may depend on the size only"):
        InputPool(pair, {"n": 33}, "cpu", 1, 2)


def test_slots_cover_five_caches_and_share_no_memory():
    pool = pool_of(n=MIB)
    count = pool.slots_for(4 * MIB, l2_bytes=50 * MIB, free_bytes=1 << 40)
    assert count * 8 * MIB >= COLD_FOOTPRINT * 50 * MIB
    pool.lay_slots(7)
    assert len({x.data_ptr() for (x,) in pool.slots}) == 7


def test_a_small_working_set_is_refused_unless_the_page_declares_a_warm_l2():
    with pytest.raises(NotCold, match="declare l2='warm' or a larger size"):
        pool_of(n=64).slots_for(256, l2_bytes=50 * MIB, free_bytes=1 << 40)
    assert pool_of(n=64, l2="warm").slots_for(256, 50 * MIB, 1 << 40) == 2


@pytest.mark.parametrize("slots", [1, 2, 7])
@pytest.mark.parametrize("seconds", [1e-6, 3.3e-5, 4e-3])
def test_every_window_runs_through_all_slots(slots, seconds):
    assert calls_for(seconds, 1e-3, slots) % slots == 0


def test_a_long_call_need_not_run_through_all_slots():
    assert calls_for(0.014, 1e-3, 9) == 2
    assert calls_for(0.014, 0.1, 9) == 8
    assert calls_for(0.014, 1e-3, 1) == 1


def test_values_depend_only_on_their_seed():
    before = pool_of()
    torch.manual_seed(99)
    again, other = pool_of(), pool_of(seed=5, unseen=6)
    for k in (0, 1, UNSEEN):
        assert torch.equal(before.value_set(k)[0], again.value_set(k)[0])
        assert not torch.equal(before.value_set(k)[0], other.value_set(k)[0])


def test_the_unseen_values_do_not_exist_before_the_last_rewrite():
    pool = pool_of()
    pool.lay_slots(2)
    pool.rewrite([])
    assert UNSEEN not in pool.values
    pool.rewrite([], last=True)
    assert UNSEEN in pool.pattern
    assert UNSEEN in pool.values


def test_free_memory_is_filled_with_nan(monkeypatch):
    poisoned = []
    monkeypatch.setattr(pytree, "poison", lambda tree, real=pytree.poison: poisoned.append(tree))
    check._poison_free_memory((torch.zeros(3), torch.zeros(2, dtype=torch.int64)))
    monkeypatch.undo()
    pytree.poison(poisoned)
    floats, integers = poisoned[0][:2], poisoned[0][2:]
    assert all(t.isnan().all() for t in floats)
    assert all((t == -1).all() for t in integers)


def test_every_run_checks_other_values():
    settings = SimpleNamespace(reproducible=False, seed=None)
    seeds = {RunContext(settings, Machine("cpu", "cpu", "cpu")).seed for _ in range(8)}
    assert len(seeds) == 8


def test_a_worker_process_sees_one_gpu():
    settings = SimpleNamespace(reproducible=False, seed=None, cold_start=False)
    machine = Machine("sm90", "nvidia-h200", "NVIDIA H200", ("GPU-a", "GPU-b"))
    for worker, gpu in ((0, "GPU-a"), (1, "GPU-b"), (2, "GPU-a")):
        run = RunContext(settings, machine, xdist_worker=worker)
        assert run.environment("cuda")["CUDA_VISIBLE_DEVICES"] == gpu
        assert run.environment("cpu")["CUDA_VISIBLE_DEVICES"] == ""


def test_a_worker_process_interprets_triton_or_compiles():
    run = RunContext(
        SimpleNamespace(reproducible=False, seed=None, cold_start=False),
        Machine("cpu", "cpu", "cpu"),
    )
    interprets = {d: run.environment(d)["TRITON_INTERPRET"] for d in ("cpu", "cuda", COMPILER)}
    assert interprets == {"cpu": "1", "cuda": None, COMPILER: None}


def test_the_warmup_lasts_while_memory_grows_or_times_fall():
    growing = iter([True] * 9)
    rounds = settle(
        [lambda: 1.0],
        lambda: next(growing, False),
        least=3,
        seconds=1e9,
    )
    assert rounds == 10
    falling = iter([2.0**-k for k in range(8)])
    rounds = settle([lambda: next(falling, 2.0**-8)], lambda: False, least=3, seconds=1e9)
    assert rounds > 8


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str = "x"


@pytest.mark.parametrize(
    "tree",
    [
        Record(torch.zeros(3)),
        SimpleNamespace(x=torch.zeros(3)),
        {"x": [torch.zeros(3)]},
        (torch.zeros(3), 1, "x"),
    ],
    ids=["dataclass", "namespace", "mapping", "tuple"],
)
def test_a_copy_of_inputs_shares_no_memory_with_them(tree):
    [(path, before)] = pytree.tensors(tree)
    [(same, after)] = pytree.tensors(pytree.clone(tree))
    assert same == path
    assert after.data_ptr() != before.data_ptr()
    assert type(pytree.clone(tree)) is type(tree)


def test_state_and_inputs_have_different_numbers():
    @compare(
        baseline=lambda state, x: x @ state,
        optimized=[doubled],
        state=lambda device, n: torch.randn(n, n, device=device),
        inputs=lambda device, n: (torch.randn(n, n, device=device),),
        reference=lambda state, x: x.double() @ state.double(),
        sizes=[{"n": 9}],
        check_sizes=[{"n": 9}],
        work=lambda n: Work(read=n),
        bound="dram",
    )
    def test(pair): ...

    pool = InputPool(pair_of(test), {"n": 9}, "cpu", 1, 2)
    states = [pool.new_state(), *pool.all_states()]
    for number in range(3):
        (x,) = pool.value_set(number)
        assert not any(torch.equal(x, state) for state in states)
    assert all(torch.equal(states[0], state) for state in states)
