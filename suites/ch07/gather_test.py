"""Gather: read the table in the order of its addresses, where the order of the reads is free.

Problem    Bootstrap: the sums of four resamples of n fp32 values, each n draws with replacement.
           The draws are the page's state: made once and applied to variable after variable, so that
           what the variables have in common stays in common.
Baseline   unsorted: the draws as they were drawn: the lanes of a warp read 32 places of the table.
Optimized  sorted_once: the same kernel on the same draws, sorted. A sum does not ask for an order,
           so nothing need be put back. The sort is paid once, before what is timed; the row says
           after how many calls it has paid for itself. A gather whose results must come in the
           order of the draws would scatter them instead, and gain nothing.
Bound      DRAM: 4 bytes for each of 4 n draws and, since sorted draws sweep the table, 4 n bytes
           a resample: 2 GiB, 0.47 ms at 4.53 TB/s. Unsorted, a draw is a sector of 32 bytes for 4
           of use, and with a table of 256 MiB one in five is in an L2 of 50 MB: 6.9 GB of sectors
           and 1.1 GB of draws, 1.8 ms if DRAM gave random sectors at full rate, which it does not:
           at least 3.7 times. PyTorch's `values[index].sum(1)` gathers as unsorted does and moves
           2 GiB more, so it is no rung here.
Seen       An H200 gains 12x to 13x. sorted_once takes the predicted time, 99 % of the read rate;
           its share of the limit is less, since the limit counts the table once and not four times.
           unsorted draws 43 G a second, 1.3 TB/s from DRAM if one in five is in the L2. *Bound*
           expects less than full rate for random sectors; that it is under a third is not
           explained.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Work, compare, cuda_module

kernels = cuda_module("gather.cu")
BLOCK, EACH = 256, 32
RESAMPLES = 4


def state(device, n):
    return torch.randint(n, (RESAMPLES, n), device=device, dtype=torch.int32)


def inputs(device, n):
    return (torch.randn(n, device=device),)


def reference(index, values):
    return torch.stack([values.double()[drawn.long()].sum() for drawn in index])


def sums(index, values):
    blocks = -(-values.numel() // (BLOCK * EACH))
    partial = values.new_empty(RESAMPLES, blocks)
    kernels.gather_sum[(blocks, RESAMPLES), BLOCK](values, index, partial, values.numel())
    return partial.sum(1)


def unsorted(index, values):
    return sums(index, values)


def sorted_once(index, values):
    in_order = index.sort(dim=1).values
    yield lambda: sums(in_order, values)


@compare(
    baseline=unsorted,
    optimized=[sorted_once],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**26}],
    # A block takes 8192 draws.
    check_sizes=[{"n": 1023}, {"n": 8193}, {"n": st.integers(33, 20000)}],
    work=lambda n: Work(read=4 * RESAMPLES * n + 4 * n, terms=n, roundings=2),
    bound="dram",
    at_least={"sm90": 10.0},
)
def test_gather(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
