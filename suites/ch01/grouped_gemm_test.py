"""Grouped GEMM: ragged groups of rows in one launch, without padding.

Problem    Multiply (tokens, k) bf16 rows in `groups` consecutive groups. Each group has its own (k,
           n) weights, as in a mixture of experts. Group sizes grow evenly from 0 to twice their
           mean. The offsets at which groups end are available on the GPU and on the host, so no
           side has to wait for them.
Baseline   looped: one `torch.mm` per group, which writes into the group's rows of a preallocated
           result.
Optimized  padded: the rows are scattered into a tensor (groups, longest, k), multiplied by one
           `torch.bmm`, and gathered again, which takes 11 launches and twice as many FLOPs as
           `looped`.
           grouped: `grouped_mm` reads the offsets on the GPU, and needs no padding.
Bound      The host limits `looped` and `padded`. `grouped` takes at least the time of reading all
           weights from DRAM.
Seen       `padded` takes somewhat longer than predicted. The time is the mean of two recordings,
           and only the later recording is close to the prediction. We cannot explain the
           difference. `grouped` takes longer than predicted from its bytes. We cannot explain why,
           because we did not time the kernel and the host separately. The speedup of `grouped` over
           `looped` differs by up to half between processes, which we cannot explain either.
Use when   There are many groups, and they differ in size. Pad when no grouped kernel supports the
           data type. A few large groups can stay in a loop.
"""

from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare


def row_counts(groups, tokens):
    ends = [tokens * g * g // groups**2 for g in range(groups + 1)]
    return tuple(end - start for start, end in pairwise(ends))


def inputs(device, groups, tokens, k, n):
    rows = row_counts(groups, tokens)
    x = torch.randn(tokens, k, device=device).bfloat16()
    w = torch.randn(groups, k, n, device=device).bfloat16()
    ends = torch.tensor(rows, device=device).cumsum(0).int()
    return x, w, ends, rows


def reference(x, w, ends, rows):
    parts = zip(x.double().split(rows), w.double(), strict=True)
    return torch.cat([part @ weight for part, weight in parts])


def looped(x, w, ends, rows):
    out = x.new_empty(len(x), w.shape[2])
    for part, weight, result in zip(x.split(rows), w, out.split(rows), strict=True):
        torch.mm(part, weight, out=result)
    return out


def padded(x, w, ends, rows):
    longest = max(rows)
    row = torch.arange(len(x), device=x.device)
    group = torch.bucketize(row, ends, right=True)
    place = torch.add(row - F.pad(ends, (1, 0))[group], group, alpha=longest)
    room = x.new_zeros(len(w) * longest, x.shape[1]).index_copy_(0, place, x)
    return torch.bmm(room.view(len(w), longest, -1), w).flatten(0, 1)[place]


def grouped(x, w, ends, rows):
    return F.grouped_mm(x, w, offs=ends)


def work(groups, tokens, k, n):
    used = sum(map(bool, row_counts(groups, tokens)))
    return Work(
        read=2 * (tokens * k + used * k * n),
        write=2 * tokens * n,
        flops={"bf16": 2 * tokens * k * n},
        terms=k,
    )


def products(groups, tokens, k, n, launches, host_steps):
    """Return the cost of the products without padding."""
    used = sum(map(bool, row_counts(groups, tokens)))
    return Cost(
        read=2 * (tokens * k + used * k * n),
        write=2 * tokens * n,
        ops={"bf16": 2 * tokens * k * n},
        launches=launches,
        host_steps=host_steps,
    )


def looping(groups, tokens, k, n):
    """Return the cost of the loop, which creates three views per group."""
    used = sum(map(bool, row_counts(groups, tokens)))
    return products(groups, tokens, k, n, launches=used, host_steps=3 * groups + 1)


def padding(groups, tokens, k, n):
    """Return the cost of scatter, product and gather. The padded rows stay in the L2."""
    rows = groups * max(row_counts(groups, tokens))
    product = Cost(
        read=2 * groups * k * n, ops={"bf16": 2 * rows * k * n}, launches=1, host_steps=2
    )
    scatter = Cost(read=2 * tokens * k, launches=9, host_steps=9)
    return scatter + product + Cost(write=2 * tokens * n, launches=1, host_steps=2)


eights = st.integers(1, 6).map(lambda count: 8 * count)  # grouped_mm needs rows of 16 * i bytes


@compare(
    baseline=looped,
    optimized=[Variant(padded, at_least={"sm90": 4.5}), grouped],
    inputs=inputs,
    reference=reference,
    sizes=[{"groups": 64, "tokens": 2048, "k": 1024, "n": 512}],
    check_sizes=[
        {"groups": 5, "tokens": 33, "k": 24, "n": 40},
        {"groups": 9, "tokens": 77, "k": 136, "n": 8},
        {"groups": st.integers(1, 9), "tokens": st.integers(9, 99), "k": eights, "n": eights},
    ],
    work=work,
    bound="launch",
    costs={
        looped: looping,
        padded: padding,
        grouped: lambda **size: products(**size, launches=2, host_steps=1),
    },
    at_least={"sm90": 9.0},
)
def test_grouped_gemm(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
