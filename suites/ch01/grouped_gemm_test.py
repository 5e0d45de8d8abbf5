"""Grouped GEMM: ragged groups of rows in one launch, without padding them.

Problem    (tokens, k) bf16 rows in `groups` consecutive groups, each times its own (k, n) weights,
           as the experts of a mixture do. Group sizes grow evenly from 0 to twice their mean. Where
           groups end is known on the GPU and, so that no side has to wait for it, on the host.
Baseline   looped: one GEMM a group, into its rows of a preallocated result: 63 launches.
Optimized  padded: rows scattered into (groups, longest, k), one `torch.bmm`, results gathered: 11
           launches, twice the FLOPs, and 27 MB of traffic for padding, which stays in L2.
           grouped: `grouped_mm` reads on the GPU where each group ends: 2 launches, no padding.
Bound      Launch: looped 63 x 5 us = 315 us, padded 11 x 5 us = 55 us: 5.7x. Below grouped's own 2
           launches lie its 67 MB of weights, 16 us at 4.2 TB/s: 19x, if its kernel reaches that.
"""

from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from pytest_aisp import Variant, Work, compare


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


eights = st.integers(1, 6).map(lambda count: 8 * count)  # rows of 16 bytes, as grouped_mm needs


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
    at_least={"sm90": 9.0},
)
def test_grouped_gemm(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
