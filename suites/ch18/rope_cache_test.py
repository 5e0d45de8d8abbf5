"""Rotary positions: rotate queries and keys and fill the cache in one kernel.

Problem    Compute the step between the projection and the attention of a bf16 layer, with 32 query
           heads and 8 groups of keys and values, 128 numbers each. The step rotates queries and
           keys in fp32 by the positions of their tokens (RoPE, arXiv:2104.09864), writes keys and
           values to their slots of the cache, and returns the rotated queries. The cache and the
           table of cosines and sines are the page's state. 64 tokens are a decode step, and 16384
           tokens are a prefill.
Baseline   eager: look up cosines and sines, rotate queries and keys as whole tensors, and write
           keys and values with `index_copy_`.
Optimized  compiled: changes `eager`. The step runs through `torch.compile`.
           fused: changes `eager`. One Triton kernel, with a program per token and 8 heads, reads
           the projection once, and writes each number directly to its final place.
Bound      DRAM limits `fused` at 16384 tokens, because it reads the projection once, and writes
           queries and cache once. `eager` reads and writes fp32 copies of the queries several
           times. At 64 tokens, the number of kernels is the limit. All sides are timed in CUDA
           graphs, but even in a graph the GPU needs time to start each kernel.
Seen       On an H100, `eager` with 64 tokens takes longer than predicted from the starts of its
           kernels, which read and write little. Each kernel probably takes somewhat longer than its
           start. `compiled` takes as long as the starts of its three kernels. `fused` is one kernel
           and takes a third longer than its start.
Use when   Every layer of a decoder has this step. Use compiled if the model is compiled anyway, and
           check that the cache is written in place. The kernel does not check slots, because they
           are on the GPU. Check slots on the host when you make them, as `paged_decode_test.py`
           checks its table.
"""

import functools
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare
from suites.rounding import to_even

from .split_kv import refuse

HEADS, GROUPS, WIDTH = 32, 8, 128
HALF = WIDTH // 2
ALL = HEADS + 2 * GROUPS  # heads of the projection of a token
BLOCK = 8  # heads per program; divides the numbers of query, key and value heads
POSITIONS = 4096  # rows of the table


@triton.jit
def turn_kernel(
    projected, positions, slots, table, queries, k, v,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate BLOCK heads of a token, except values, and store them."""
    token, first = tl.program_id(0), tl.program_id(1) * BLOCK
    head, lane = tl.arange(0, BLOCK), tl.arange(0, HALF)
    at = (token.to(tl.int64) * (HEADS + 2 * GROUPS) + first + head)[:, None] * 2 * HALF
    left = tl.load(projected + at + lane[None, :]).to(tl.float32)
    right = tl.load(projected + at + HALF + lane[None, :]).to(tl.float32)
    slot = tl.load(slots + token)
    if first >= HEADS + GROUPS:
        to = v + (slot * GROUPS + first - HEADS - GROUPS + head)[:, None] * 2 * HALF
    else:
        row = table + tl.load(positions + token) * 2 * HALF + lane
        cosine, sine = tl.load(row)[None, :], tl.load(row + HALF)[None, :]
        low = to_even(left * cosine - right * sine, DROPPED=16)
        right = to_even(right * cosine + left * sine, DROPPED=16)
        left = low
        if first >= HEADS:
            to = k + (slot * GROUPS + first - HEADS + head)[:, None] * 2 * HALF
        else:
            to = queries + (token.to(tl.int64) * HEADS + first + head)[:, None] * 2 * HALF
    tl.store(to + lane[None, :], left.to(tl.bfloat16))
    tl.store(to + HALF + lane[None, :], right.to(tl.bfloat16))


def state(device, tokens, slots):
    turns = torch.arange(HALF, dtype=torch.float64) / HALF
    angles = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * 10000.0**-turns
    return {
        "k": torch.randn(slots, GROUPS, WIDTH, device=device).bfloat16(),
        "v": torch.randn(slots, GROUPS, WIDTH, device=device).bfloat16(),
        "table": torch.cat([angles.cos(), angles.sin()], dim=1).float().to(device),
    }


def inputs(device, tokens, slots):
    projected = torch.randn(tokens, ALL, WIDTH, device=device)
    positions = torch.randint(POSITIONS, (tokens,), device=device)
    return projected.bfloat16(), positions, torch.randperm(slots, device=device)[:tokens]


def reference(cache, projected, positions, slots):
    for name in ("k", "v"):
        cache[name] = cache[name].double()
    query, key, value = projected.double().split([HEADS, GROUPS, GROUPS], dim=1)
    pairs = torch.complex(*cache["table"].double()[positions].split(HALF, dim=1))[:, None]

    def around(heads):
        turned = torch.complex(*heads.split(HALF, dim=2)) * pairs
        return torch.cat([turned.real, turned.imag], dim=2)

    cache["k"][slots], cache["v"][slots] = around(key), value
    return around(query)


def turned(heads, cosines, sines):
    left, right = heads.float().split(HALF, dim=2)
    return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=2).to(
        heads.dtype
    )


def eager(cache, projected, positions, slots):
    query, key, value = projected.split([HEADS, GROUPS, GROUPS], dim=1)
    cosines, sines = cache["table"][positions][:, None].split(HALF, dim=2)
    cache["k"].index_copy_(0, slots, turned(key, cosines, sines))
    cache["v"].index_copy_(0, slots, value)
    return turned(query, cosines, sines)


@functools.cache
def compiled_eager():
    return torch.compile(eager, dynamic=False)


def compiled(cache, projected, positions, slots):
    return compiled_eager()(cache, projected, positions, slots)


def launched(cache, projected, positions, slots):
    tokens = len(projected)
    if tokens == 0:
        raise ValueError("there are 0 tokens to write")
    refuse("the projection", projected, (tokens, ALL, WIDTH))
    refuse("the cache of keys", cache["k"], (len(cache["k"]), GROUPS, WIDTH))
    refuse("the cache of values", cache["v"], cache["k"].shape)
    for name, numbers in (("positions", positions), ("slots", slots)):
        if numbers.dtype != torch.int64 or numbers.shape != (tokens,):
            raise ValueError(
                f"{name} is {numbers.dtype} {tuple(numbers.shape)}; use int64 ({tokens},)"
            )
    queries = projected.new_empty(tokens, HEADS, WIDTH)
    turn_kernel[tokens, ALL // BLOCK](
        projected, positions, slots, cache["table"], queries, cache["k"], cache["v"],
        HEADS=HEADS, GROUPS=GROUPS, HALF=HALF, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return queries


def fused(cache, projected, positions, slots):
    return launched(cache, projected, positions, slots)


def heads_bytes(tokens, heads):
    return 2 * tokens * heads * WIDTH


def turning(tokens, heads):
    """Return the cost of `turned`, one kernel at a time."""
    small = heads_bytes(tokens, heads)
    half = small  # in fp32
    return (
        Cost(read=small, write=2 * half, launches=1)  # to fp32
        + 4 * Cost(read=half, write=half, launches=1)
        + 2 * Cost(read=2 * half, write=half, launches=1)
        + Cost(read=2 * half, write=2 * half, launches=1)  # cat
        + Cost(read=2 * half, write=small, launches=1)  # to bf16
    )


def eager_cost(tokens, slots):
    entry = heads_bytes(tokens, GROUPS)
    rows = 4 * tokens * WIDTH  # of the table
    return (
        Cost(read=min(rows, 4 * POSITIONS * WIDTH), write=rows, launches=1)
        + turning(tokens, GROUPS)
        + 2 * Cost(read=entry, write=entry, launches=1)
        + turning(tokens, HEADS)
    )


def once(tokens, slots, launches=1):
    rows = 4 * min(tokens, POSITIONS) * WIDTH
    return Cost(
        read=heads_bytes(tokens, ALL) + rows, write=heads_bytes(tokens, ALL), launches=launches
    )


def fused_cost(tokens, slots):
    return replace(once(tokens, slots), blocks=tokens * ALL // BLOCK)


def compiled_cost(tokens, slots):
    return once(tokens, slots, launches=3)  # queries, keys, values


@compare(
    baseline=eager,
    optimized=[Variant(compiled, gpu_only="a compiler run takes seconds"), fused],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"tokens": 64, "slots": 1 << 16}, {"tokens": 16384, "slots": 1 << 16}],
    check_sizes=[{"tokens": 3, "slots": 7}, {"tokens": 1, "slots": 4}],
    work=lambda tokens, slots: Work(
        read=heads_bytes(tokens, ALL), write=heads_bytes(tokens, ALL), terms=2, roundings=2
    ),
    bound="dram",
    costs={eager: eager_cost, compiled: compiled_cost, fused: fused_cost},
)
def test_rope_cache(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestRefused:
    """The launching helper rejects wrong inputs before the launch."""

    @pytest.mark.parametrize(
        ("tokens", "heads", "width", "slots", "words"),
        [
            (0, ALL, WIDTH, 0, "there are 0 tokens"),
            (2, ALL, 64, 2, r"the projection is \(2, 48, 64\); .* takes \(2, 48, 128\)"),
            (2, ALL + 8, WIDTH, 2, r"the projection is \(2, 56, 128\)"),
            (2, ALL, WIDTH, 3, r"slots is torch.int64 \(3,\); use int64 \(2,\)"),
        ],
    )
    def test_shape(self, tokens, heads, width, slots, words):
        cache = {name: torch.ones(4, GROUPS, WIDTH).bfloat16() for name in ("k", "v")}
        projected = torch.ones(tokens, heads, width).bfloat16()
        with pytest.raises(ValueError, match=words):
            launched(cache, projected, torch.arange(tokens), torch.arange(slots))
