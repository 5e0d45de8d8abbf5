"""A side that remembers answers is distinguished from one that gains from warm hardware."""

from __future__ import annotations

import random

import pytest
import torch

from pytest_aisp import Work, compare
from pytest_aisp.checking import memoization
from pytest_aisp.checking.inputs import InputPool
from pytest_aisp.checking.memoization import check_repeats
from pytest_aisp.page.pair import SideError
from pytest_aisp.worker.loader import pair_of

REMEMBERS = (
    r"takes 0\.0001 s on values that it has seen before, and at least 0\.0101 s if they are"
    " altered slightly: it remembers answers"
)


def floats(device, n):
    return (torch.randn(n),)


def halves(device, n):
    return (torch.randn(n, dtype=torch.bfloat16),)


def eighths(device, n):
    return (torch.randn(n).to(torch.float8_e4m3fn),)


def complexes(device, n):
    return (torch.randn(n, dtype=torch.complex64),)


def integers(device, n):
    return (torch.randint(1 << 40, (n,)),)


def bits(device, n):
    return (torch.randint(2, (n,), dtype=torch.uint8) > 0,)


def ids(device, n):
    return (torch.randint(100_000, (n,)),)


def floats_and_ids(device, n):
    return torch.randn(n), torch.randint(100_000, (n,))


def constant(device, n):
    return (torch.ones(n, dtype=torch.int64),)


ALL = [floats, halves, eighths, complexes, integers, bits, ids, floats_and_ids]


def unused(*args):
    raise AssertionError


def check(side, inputs, n=1000, state=None):
    @compare(
        baseline=side,
        optimized=[unused],
        inputs=inputs,
        reference=side,
        state=state,
        sizes=[{"n": n}],
        check_sizes=[{"n": 33}],
        work=lambda n: Work(read=n, write=n),
        bound="dram",
    )
    def test_page(pair):
        pass

    pool = InputPool(pair_of(test_page), {"n": n}, "cpu", 1, 2)
    pool.lay_slots(1)
    check_repeats(pool, [pool.bind(side)], lambda: None, 3)


class Machine:
    """A clock that only the sides advance."""

    def __init__(self):
        self.time = 0.0
        self.slowdown = lambda: 1.0

    def spend(self, seconds):
        self.time += seconds * self.slowdown()

    def now(self):
        return self.time


@pytest.fixture
def machine(monkeypatch):
    simulated = Machine()
    monkeypatch.setattr(memoization, "now", simulated.now)
    return simulated


def bytes_of(tensors):
    return tuple(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


def memo(machine, most=1000, key=bytes_of):
    """Return a side that keeps the answers to the last `most` values."""
    answers = {}

    def side(*tensors):
        machine.spend(1e-4)
        wanted = key(tensors)
        if wanted not in answers:
            machine.spend(0.01)
            answers[wanted] = sum(t.double().sum() for t in tensors if not t.is_complex())
            while len(answers) > most:
                del answers[next(iter(answers))]
        return answers[wanted] * torch.ones(1)

    return side


def admitted_late(machine):
    """Return a side that keeps an answer when it computes it for the twelfth time."""
    seen = {}

    def side(x):
        wanted = bytes_of([x])
        known = seen.setdefault(wanted, [])
        machine.spend(1e-4 if len(known) == 12 else 0.01)
        known += [x.sum()] * (len(known) < 12)
        return known[0].clone()

    return side


def unchanged(machine):
    """Return a side that computes only if its input differs from that of the last call."""
    last = [torch.empty(0)] * 2

    def side(x):
        machine.spend(1e-4)
        if not torch.equal(x, last[0]):
            machine.spend(0.01)
            last[:] = x.clone(), x + 1
        return last[1].clone()

    return side


def ranks_of(x):
    return bytes_of([torch.argsort(x.flatten().double(), stable=True)])


def branch_predictor(machine):
    """Return an honest side that takes half the time if the order of its values is known."""
    known = []

    def side(x):
        order = ranks_of(x)
        machine.spend(0.01 if order in known else 0.02)
        known.append(order)
        return x.sort().values

    return side


def cache_of_rows(machine):
    """Return an honest lookup that takes 100 ns for each row that it has not read before."""
    known = set()

    def side(*tensors):
        rows = set(tensors[-1].tolist())
        machine.spend(1e-4 + 1e-7 * len(rows - known))
        known.update(rows)
        return tensors[-1] + 1

    return side


def selective(share, overhead):
    """Return a function that makes an honest side whose work depends on its values.

    Args:
        share: returns how many of the values need work.
        overhead: seconds of a call with a count that is new, such as those of an allocation.
    """

    def side_of(machine):
        counts = set()

        def side(x):
            left = int(share(x.float()).sum())
            machine.spend(1e-6 * left + overhead * (left not in counts))
            counts.add(left)
            return x + 1

        return side

    return side_of


SELECTIVE = {
    "cascade": selective(lambda x: (x.abs() < 0.5) | (x.std() < 0.75), 0.01),
    "more": selective(lambda x: x.abs() < 0.5, 0.01),
    "fewer": selective(lambda x: x.abs() > 0.5, 0.01),
    "as many": selective(lambda x: x > 0, 0.01),
}


def cache_for_the_usual_scale(machine):
    """Return a side that keeps answers, but not for values whose scale shows that they changed."""
    known = memo(machine)

    def side(x):
        if x.std() > 0.75:
            return known(x)
        machine.spend(0.0101)
        return x.sum()

    return side


@pytest.mark.parametrize("inputs", ALL)
@pytest.mark.parametrize("most", [1000, 2])
def test_a_side_that_remembers_answers_is_refused(machine, inputs, most):
    with pytest.raises(SideError, match=REMEMBERS):
        check(memo(machine, most), inputs)


@pytest.mark.parametrize("keeps", [admitted_late, unchanged])
def test_a_side_that_waits_for_repeated_values_is_refused(machine, keeps):
    with pytest.raises(SideError, match=REMEMBERS.replace("101", r"\d+")):
        check(keeps(machine), floats)


def test_a_side_that_knows_values_by_their_beginning_is_refused(machine):
    with pytest.raises(SideError, match=REMEMBERS):
        check(memo(machine, key=lambda tensors: tensors[0][:4].tolist().__repr__()), floats)


@pytest.mark.parametrize("inputs", [floats, halves, eighths])
def test_a_cache_for_the_usual_scale_is_refused(machine, inputs):
    known = cache_for_the_usual_scale(machine)
    with pytest.raises(SideError, match=REMEMBERS):
        check(lambda x: known(x.float()), inputs)


@pytest.mark.parametrize("inputs", [floats, halves])
@pytest.mark.parametrize("side", SELECTIVE)
def test_work_that_depends_on_values_is_no_memory_of_answers(machine, side, inputs):
    check(SELECTIVE[side](machine), inputs, n=10_000)


@pytest.mark.parametrize("inputs", [floats, halves, integers, ids])
def test_a_trained_branch_predictor_is_no_memory_of_answers(machine, inputs):
    check(branch_predictor(machine), inputs)


@pytest.mark.parametrize("inputs", [ids, floats_and_ids])
def test_warm_rows_are_no_memory_of_answers(machine, inputs):
    check(cache_of_rows(machine), inputs)


def tokens_and_lengths(device, n):
    return torch.randint(256, (8, n)), torch.randint(1, n, (8,))


def batched(machine):
    """Return a side that prepares each new shape, as cuDNN does, and computes the rest anew."""
    plans = set()

    def side(tokens, lengths):
        longest = int(lengths.max())
        machine.spend(1e-4 if longest in plans else 0.0101)
        plans.add(longest)
        return sum(row[:length].sum() for row, length in zip(tokens, lengths, strict=True))

    return side


def test_plans_for_new_shapes_are_no_memory_of_answers(machine):
    check(batched(machine), tokens_and_lengths)


def test_answers_to_tokens_and_lengths_are_refused(machine):
    with pytest.raises(SideError, match=REMEMBERS):
        check(memo(machine), tokens_and_lengths)


def test_an_integer_without_influence_excuses_nobody(machine):
    known = memo(machine)
    with pytest.raises(SideError, match=REMEMBERS):
        check(lambda tokens, lengths: known(tokens), tokens_and_lengths)


def test_values_that_cannot_be_altered_accuse_nobody(machine):
    times = iter([1.0, 1.0, 0.01, 0.01] * 100)

    def side(x):
        machine.spend(next(times))
        return x + 1

    check(side, constant)


def test_a_side_that_refuses_altered_values_is_not_accused(machine):
    known = branch_predictor(machine)

    def side(x):
        assert bool((x == x.round()).all()), "these values are integers"
        return known(x)

    check(side, lambda device, n: (torch.randn(n).mul(50).round() * 2 + 1,))


def other_processes(seed):
    """Return a random slowdown between 1 and 20 times, different in each call."""
    rng = random.Random(seed)
    return lambda: rng.choice([1, 1, 1, 2, 5, 20]) * rng.uniform(1, 1.2)


@pytest.mark.parametrize("honest", [branch_predictor, cache_of_rows])
def test_no_honest_side_is_refused_on_a_busy_machine(machine, honest):
    for seed in range(30):
        machine.slowdown = other_processes(seed)
        check(honest(machine), ids, n=200)


def test_a_side_that_remembers_answers_is_refused_on_a_busy_machine(machine):
    for seed in range(10):
        machine.slowdown = other_processes(seed)
        with pytest.raises(SideError, match="remembers answers"):
            check(memo(machine), floats, n=200)


def test_a_machine_that_is_too_busy_to_tell_accuses_nobody(machine):
    rng = random.Random(0)
    machine.slowdown = lambda: rng.choice([1, 1000, 1000, 1000])
    check(memo(machine), floats, n=200)


# Real code on the real clock: what these sides gain on repeated values differs between CPUs.
TABLE = torch.randn(100_000, 64)


def stable_sort(x):
    return torch.sort(x, stable=True).values


def stable_argsort(x):
    return torch.argsort(x, stable=True)


def unique(x):
    return torch.unique(x)


def positives(x):
    return x[x > 0]


def lookup(ids):
    return TABLE[ids]


def lookup_in_state(table, ids):
    return table[ids]


def searched(x):
    return torch.searchsorted(TABLE[:, 0].sort().values, x)


def counted(x):
    counts = {}
    for value in x.tolist():
        counts[value] = counts.get(value, 0) + 1
    return torch.tensor(list(counts.values()))


def gathered(x, ids):
    return x[ids % len(x)].sum()


@pytest.mark.parametrize("n", [300, 1000, 3000])
@pytest.mark.parametrize(
    ("side", "inputs"),
    [
        (stable_sort, floats),
        (stable_sort, integers),
        (stable_sort, halves),
        (stable_argsort, floats),
        (unique, ids),
        (positives, floats),
        (lookup, ids),
        (searched, floats),
        (counted, ids),
        (gathered, floats_and_ids),
    ],
)
def test_everyday_code_does_not_remember_answers(side, inputs, n):
    check(side, inputs, n)


def test_a_lookup_in_a_table_of_the_state_does_not_remember_answers():
    check(lookup_in_state, ids, state=lambda device, n: TABLE.clone())
