"""Expert puts: write tokens into the expert's rank instead of exchanging them with NCCL.

Problem    Exchange the tokens of expert parallelism, for a decode step (few tokens) up to a prefill
           (many tokens). Each rank has `tokens` bf16 rows of `width` values, sorted by target rank.
           `counts`, a tensor on the GPU, says how many rows go to each rank. The split is uneven:
           rank 0 is twice as likely to get a row as the last rank. Only the sender knows its
           counts, so a call must also send them. The target multiplies each row by its own vector,
           which stands for an expert, and sends the row back. The results have the order of `x`.
Baseline   all_to_all: `all_to_all_single` exchanges the counts, the host reads them, and two more
           calls exchange the rows and the results.
           gathered: the baseline of the second test, and a variant in the first (see below).
Optimized  gathered: NCCL without counts on the host. Every rank gathers all rows and all counts,
           sets the results of other ranks' rows to zero, and a reduce-scatter returns the sums. The
           host never waits, but a rank receives rows that it does not need. With many tokens,
           judge the writes by the first test, because nobody would gather that many rows.
           puts: one-sided writes in symmetric memory. A kernel writes rows and counts into the
           buffers of their targets. After a barrier, a second kernel multiplies the rows and writes
           the results into the buffers of their senders. A second barrier ends the call. The host
           never waits, and only needed rows are sent. Part of the gain comes from fusion: the
           product needs no separate kernel. With a real expert, whose matrix products are separate
           kernels, that part is lost.
           signalled: changes `puts`. There is no barrier. Each kernel adds to a signal on the
           target after its writes, and the second kernel waits for the signals of its source. A
           third kernel waits until all results have arrived. The buffers of `puts` and `signalled`
           are allocated once, for the largest batch. Each call overwrites the results of the call
           before.
Bound      With few tokens, the host limits the first test, where all sides are timed as ordinary
           calls because `all_to_all` cannot be captured. In the second test, everything runs in a
           CUDA graph, and latency is the limit: launches, and the collectives, barriers or signals.
           With many tokens, NVLink is the limit. The link into rank 0 is the busiest on the way
           there, and the link out of rank 0 on the way back. The rows stay in the L2 if they fit,
           as right after a layer has computed them. We record with NVLink multicast off (see the
           README of chapter 4). The writes do not use multicast, but `gathered` may be faster with
           it.
Seen       On two H200s with up to 1024 tokens, the host limits the first test: the times hardly
           change with the number of tokens. `puts` and `signalled` gain about the same, more than
           three times. `all_to_all` and `gathered` take two to seven times as long as predicted,
           `puts` up to 2.5 times, and `signalled` 1.5 to over 4 times. The costs count a call of
           torch.distributed as one launch, but the call probably keeps the host busy for longer. We
           did not measure how long. A side's time also varies from case to
           case: with 128 tokens, `all_to_all` takes three quarters longer in one case than in
           another. So compare only times of the same case. `gathered` is slower than `all_to_all`
           at every size, although its host never waits. With 16384 tokens, NVLink is the limit, and
           `puts` and `signalled` gain less than two times. They take about a tenth longer than
           predicted. `all_to_all` takes a third longer than predicted, and `gathered` over 1.5
           times as long. By the profiler, kernels run nearly all of the time, so the host is not
           the cause. The prediction uses NCCL's rate for an all-reduce of 512 MiB. We did not
           compare this rate with the rate of each kernel. In graphs, `puts` and `signalled` gain
           five to six times on two GPUs, and five to eight times on four. On two GPUs, both take
           about as long as predicted. `puts` takes 1 to 2 us longer than `signalled` there. On four
           GPUs, `puts` is 2 us faster than `signalled`. We do not know why. `gathered` takes one
           and a half to two times as long as predicted, probably because NCCL is slower with
           smaller messages (see the plot in the README of chapter 4). On four GPUs without graphs,
           `puts` and `signalled` gain a little more than on two with up to 1024 tokens, and a
           little less with 16384. `gathered` loses more, because every rank receives the rows of
           three others. peaks.json lacks the rate of a peer copy for four GPUs, so `puts` and
           `signalled` have no prediction there.
Use when   Experts are on GPUs that reach each other's memory, and the steps are short, as in
           decoding. DeepEP and other libraries for expert parallelism have such kernels. A rank
           must reserve memory for all rows that all ranks may send. See also `expert_exchange` in
           chapter 13, which overlaps NCCL's exchange with the shared expert, and
           `symmetric_all_reduce` in chapter 4.
"""

import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import triton
import triton.language as tl

from pytest_aisp import Conditions, Cost, Sweep, Variant, Work, compare
from suites.rounding import to_even

POPULAR = 2.0
"""A row goes to rank 0 this many times as often as to the last rank."""
CAPACITY = 16384  # the most rows of one rank for which the symmetric buffers have room
PROGRAMS = 64  # programs that write to one rank


def inputs(device, tokens, width, world):
    """Return rows sorted by target rank, rows per target, and the vector of this rank's expert."""
    x = torch.randn(tokens, width, device=device).bfloat16()
    chances = torch.linspace(POPULAR, 1.0, world, device=device)
    targets = torch.multinomial(chances, tokens, replacement=True)
    counts = (targets == torch.arange(world, device=device)[:, None]).sum(1)
    return x, counts, torch.randn(width, device=device).bfloat16()


def reference(ranks):
    experts = torch.stack([own.double() for _, _, own in ranks])
    return [x.double() * experts.repeat_interleave(counts, 0) for x, counts, _ in ranks]


def on_host(numbers):
    """Wait for the GPU, and return the numbers."""
    if numbers.is_cuda and not torch.cuda.is_available():
        return [[0] * len(row) for row in numbers]  # with --aisp-compile, tensors have no values
    return numbers.tolist()


def all_to_all(x, counts, own):
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    there, here = on_host(torch.stack([counts, received]))
    rows = x.new_empty(sum(here), x.shape[1])
    dist.all_to_all_single(rows, x, here, there)
    out = torch.empty_like(x)
    dist.all_to_all_single(out, rows * own, there, here)
    return out


def gathered(x, counts, own):
    rank, world = dist.get_rank(), dist.get_world_size()
    splits, rows = counts.new_empty(world * world), x.new_empty(world * len(x), x.shape[1])
    dist.all_gather_into_tensor(splits, counts)
    dist.all_gather_into_tensor(rows, x)
    splits, number = splits.view(world, world), torch.arange(len(x), device=x.device)
    ends = splits.cumsum(1)[:, rank, None]
    mine = (number >= ends - splits[:, rank, None]) & (number < ends)
    out = torch.empty_like(x)
    dist.reduce_scatter_tensor(out, torch.where(mine.view(-1, 1), rows * own, 0))
    return out


@triton.jit
def buffer_of(addresses, rank, TYPE: tl.constexpr):
    """Return the pointer to the buffer of `rank`, which the allocator aligns to 16 bytes."""
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def signal(at):
    """Add 1 to a signal on another rank, after all writes of this program."""
    tl.debug_barrier()
    tl.atomic_add(at, 1, sem="release", scope="sys")


@triton.jit
def wait(at, value):
    """Wait until a signal has `value`. What its senders wrote before is then visible."""
    while tl.atomic_cas(at, value, value, sem="acquire", scope="sys") != value:
        pass
    tl.debug_barrier()


@triton.jit
def put_kernel(
    x,
    counts,
    rows,
    notes,
    rank,
    tokens,
    width,
    capacity,
    WORLD: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGNALS: tl.constexpr,
):
    """Write the rows for one rank into its buffer, and where they begin and how many they are."""
    target, part = tl.program_id(0), tl.program_id(1)
    number, column = tl.arange(0, PADDED), tl.arange(0, BLOCK)
    every = tl.load(counts + number, mask=number < WORLD, other=0)
    begin = tl.sum(tl.where(number < target, every, 0), 0)
    count = tl.sum(tl.where(number == target, every, 0), 0)
    count = tl.minimum(count, tokens - begin)  # wrong counts must not write beyond a buffer
    into = buffer_of(rows, target, tl.bfloat16)
    for row in range(part.to(tl.int64), count, tl.num_programs(1)):
        value = tl.load(x + (begin + row) * width + column, mask=column < width)
        tl.store(into + (rank * capacity + row) * width + column, value, mask=column < width)
    note = buffer_of(notes, target, tl.int32) + 4 * rank
    if part == 0:
        tl.store(note, begin.to(tl.int32))
        tl.store(note + 1, count.to(tl.int32))
    if SIGNALS:
        signal(note + 2)


@triton.jit
def return_kernel(
    rows,
    own,
    received,
    results,
    notes,
    turn,
    rank,
    width,
    capacity,
    BLOCK: tl.constexpr,
    SIGNALS: tl.constexpr,
):
    """Multiply the rows of one rank, and write the results into its buffer in its order."""
    source, part = tl.program_id(0), tl.program_id(1)
    column, note = tl.arange(0, BLOCK), received + 4 * source
    scale = tl.load(own + column, mask=column < width).to(tl.float32)
    if SIGNALS:
        wait(note + 2, (tl.load(turn) + 1) * tl.num_programs(1))
    begin, count = tl.load(note).to(tl.int64), tl.load(note + 1).to(tl.int64)
    into = buffer_of(results, source, tl.bfloat16)
    for row in range(part.to(tl.int64), count, tl.num_programs(1)):
        at = rows + (source * capacity + row) * width + column
        value = tl.load(at, mask=column < width).to(tl.float32) * scale
        value = to_even(value, DROPPED=16).to(tl.bfloat16)
        tl.store(into + (begin + row) * width + column, value, mask=column < width)
    if SIGNALS:
        signal(buffer_of(notes, source, tl.int32) + 4 * rank + 3)


@triton.jit
def end_kernel(received, turn, programs, WORLD: tl.constexpr):
    """Wait for the results of all ranks, and count the call."""
    calls = tl.load(turn) + 1
    for source in range(WORLD):
        wait(received + 4 * source + 3, calls * programs)
    tl.store(turn, calls)


class Shared(NamedTuple):
    """Symmetric memory of this rank.

    Attributes:
        memory: this rank's tensor.
        addresses: the address of each rank's tensor, int64 on the GPU.
        handle: torch's handle, which has the barrier.
    """

    memory: torch.Tensor
    addresses: torch.Tensor
    handle: Any


def shared(shape, dtype, device):
    memory = symmetric.empty(shape, dtype=dtype, device=device)
    handle = symmetric.rendezvous(memory, dist.group.WORLD)
    everyone = range(dist.get_world_size())
    addresses = [handle.get_buffer(rank, shape, dtype).data_ptr() for rank in everyone]
    return Shared(memory, torch.tensor(addresses, dtype=torch.int64, device=device), handle)


def require_room(x, counts, world, capacity):
    """Raise ValueError if the buffers have no room for `x`, or `counts` has a wrong form."""
    if len(x) > capacity:
        raise ValueError(f"{len(x)} tokens, but the buffers have room for {capacity} of each rank")
    if x.dtype != torch.bfloat16 or not x.is_contiguous():
        raise ValueError(f"x is {x.dtype}, strides {x.stride()}; use contiguous bf16")
    if counts.dtype != torch.int64 or counts.shape != (world,):
        raise ValueError(f"counts is {counts.dtype} {tuple(counts.shape)}; use int64 ({world},)")


def one_sided(x, counts, own, signals):
    """Return the call of puts or signalled.

    A rank may overwrite its rows in other ranks' buffers in its next call: the call before has
    waited for the results, which are written after the rows have been read. Other ranks overwrite
    this rank's results only after they have received its rows of the next call.
    """
    rank, world, (tokens, width) = dist.get_rank(), dist.get_world_size(), x.shape
    require_room(x, counts, world, CAPACITY)
    rows = shared((world, CAPACITY, width), torch.bfloat16, x.device)
    results = shared((CAPACITY, width), torch.bfloat16, x.device)
    # For each source: where its rows begin, how many they are, and its signals on both ways.
    notes = shared((world, 4), torch.int32, x.device)
    notes.memory.zero_()
    notes.handle.barrier(channel=0)  # now the signals of all ranks are zero
    turn = torch.zeros(1, dtype=torch.int32, device=x.device)
    grid, padded = (world, PROGRAMS), triton.next_power_of_2(world)
    kind = {"BLOCK": triton.next_power_of_2(width), "SIGNALS": signals, "num_warps": 8}

    def run():
        put_kernel[grid](
            *(x, counts, rows.addresses, notes.addresses, rank, tokens, width, CAPACITY),
            **{"WORLD": world, "PADDED": padded, **kind},
        )
        if not signals:
            notes.handle.barrier(channel=0)  # now all rows have arrived
        return_kernel[grid](
            *(rows.memory, own, notes.memory, results.addresses, notes.addresses, turn),
            *(rank, width, CAPACITY),
            **kind,
        )
        if signals:
            end_kernel[(1,)](notes.memory, turn, PROGRAMS, WORLD=world)
        else:
            notes.handle.barrier(channel=0)  # now all results have arrived
        return results.memory[:tokens]

    return run


def puts(x, counts, own):
    yield one_sided(x, counts, own, signals=False)


def signalled(x, counts, own):
    yield one_sided(x, counts, own, signals=True)


def popular(world):
    """Return the chance that a row goes to rank 0."""
    return 2 * POPULAR / (world * (POPULAR + 1))


def busiest(tokens, width, world):
    """Return the expected bytes that cross the busiest link on one way: those of rank 0."""
    return 2 * width * tokens * (world - 1) * popular(world)


def needed(tokens, width, world):
    """Return the expected bytes that rank 0 sends: rows for the others, and their results."""
    return 2 * width * tokens * (1 - popular(world)) + busiest(tokens, width, world)


def all_to_all_cost(tokens, width, world):
    numbers = Cost(nccl=8 * (world - 1), launches=1, collectives=1)
    read = Cost(launches=1, syncs=1)
    way = Cost(nccl=busiest(tokens, width, world), launches=1, collectives=1)
    received = busiest(tokens, width, world) * world / (world - 1)  # with rank 0's own rows
    return numbers + read + way + Cost(read=received, write=received, launches=1) + way


def gathered_cost(tokens, width, world):
    """Return the cost of `gathered`.

    Six launches find this rank's rows in the others' counts, and a seventh makes the zero of
    `where`.
    """
    numbers = Cost(nccl=8 * world * (world - 1), launches=1, collectives=1)
    way = Cost(nccl=2 * (world - 1) * tokens * width, launches=1, collectives=1)
    every = 2 * world * tokens * width
    return numbers + way + Cost(launches=7) + 2 * Cost(read=every, write=every, launches=1) + way


def puts_cost(tokens, width, world):
    way = Cost(sent=busiest(tokens, width, world), launches=1)
    return 2 * (way + Cost(launches=1, barriers=1))


def signalled_cost(tokens, width, world):
    """Return the cost of `signalled`. The second and the third kernel wait for signals."""
    there = Cost(sent=busiest(tokens, width, world), launches=1)
    back = Cost(sent=busiest(tokens, width, world), launches=1, barriers=1)
    return there + back + Cost(launches=1, barriers=1)


judged = functools.partial(
    compare,
    inputs=inputs,
    reference=reference,
    check_sizes=[{"tokens": 37, "width": 33}, {"tokens": 1, "width": 8}],
    work=lambda tokens, width, world: Work(wire=needed(tokens, width, world)),
    bound="nvlink",
    conditions=Conditions(gpus=(2, 4), l2="warm"),
)


def of(*tokens):
    return [{"tokens": number, "width": 7168} for number in tokens]


@judged(
    baseline=all_to_all,
    optimized=[
        Variant(gathered, at_least="yardstick"),
        Variant(puts, gpu_only="symmetric memory", at_least={"sm90": 2.5}),
        Variant(signalled, gpu_only="symmetric memory", at_least={"sm90": 2.5}),
    ],
    sizes=of(16, 128, 1024, CAPACITY),
    sweep=Sweep("tokens", judged=[16, 128, 1024]),  # with more tokens, the gain is smaller
    costs={
        all_to_all: all_to_all_cost,
        gathered: gathered_cost,
        puts: puts_cost,
        signalled: signalled_cost,
    },
)
def test_expert_puts(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@judged(
    baseline=gathered,
    optimized=[
        Variant(puts, gpu_only="symmetric memory", at_least={"sm90": 4.0}),
        Variant(signalled, gpu_only="symmetric memory", at_least={"sm90": 4.5}),
    ],
    sizes=of(16, 64, 256),  # with many tokens, gathered sends far more than is needed
    sweep=Sweep("tokens"),
    costs={gathered: gathered_cost, puts: puts_cost, signalled: signalled_cost},
)
def test_expert_puts_in_graphs(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestRefused:
    """The one-sided variants reject wrong inputs before they allocate buffers."""

    @pytest.mark.parametrize(
        ("x", "counts", "words"),
        [
            (torch.ones(5, 8).bfloat16(), torch.tensor([2, 3]), "5 tokens, .* room for 4"),
            (torch.ones(4, 8), torch.tensor([2, 2]), "x is torch.float32"),
            (torch.ones(8, 4).bfloat16().t()[:4], torch.tensor([2, 2]), r"strides \(1, 4\)"),
            (torch.ones(4, 8).bfloat16(), torch.tensor([2, 2]).int(), "counts is torch.int32"),
            (torch.ones(4, 8).bfloat16(), torch.tensor([4]), r"\(1,\); use int64 \(2,\)"),
        ],
        ids=["too many tokens", "fp32", "transposed", "int32", "one rank"],
    )
    def test_tensors(self, x, counts, words):
        with pytest.raises(ValueError, match=words):
            require_room(x, counts, 2, 4)


class TestSplit:
    @pytest.mark.parametrize("world", [2, 4])
    def test_is_drawn_and_uneven(self, world):
        """The counts of all rows are as uneven as the costs assume."""
        tokens = 1 << 16
        _, counts, _ = inputs("cpu", tokens=tokens, width=1, world=world)
        assert int(counts.sum()) == tokens
        assert 1.8 < int(counts[0]) / int(counts[-1]) < 2.2
        expected = busiest(tokens, 1, world) / (2 * (world - 1))
        assert abs(int(counts[0]) / expected - 1) < 0.05
