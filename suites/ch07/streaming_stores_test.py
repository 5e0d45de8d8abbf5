"""Streaming stores: what is written once must not push out of the L2 what is read again.

Problem    Look up n rows of 32 fp32 values in a table that fits the L2, in random order.
Baseline   ordinary: plain stores. Each row that is written takes a place in the L2 like any other.
Optimized  streaming: the same kernel with `__stcs`: what it stores is the first to be evicted.
Bound      DRAM writes: 1 GiB of results at 4.66 TB/s and, read once, 24 MiB of table and 32 MiB of
           indices: 0.25 ms. The 1 GiB that is read from the table should come from the L2. If that
           evicts what was used longest ago and keeps 50 MB, then under ordinary stores a row of
           the table that was not asked for during 1.25 turns of the table is gone: 29 % of all
           lookups, 0.3 GB more from DRAM, 0.32 ms. So 1.3 times; more if both halves of the L2
           keep rows of their own, 1.0 if the L2 tells the two streams apart by itself. PyTorch's
           `table[index]` stores as ordinary does: the yardstick, no rung.
Seen       An H200 gains 1.08x, not 1.3x: the sides take 0.41 and 0.38 ms, not 0.32 and 0.25.
           *Bound* leaves out that 1 GiB is read from the L2 and 1 GiB written to it: streaming
           moves them at 5.8 TB/s, where stencil gets 5.5. An L2 at its limit would hide part of
           what evicted rows cost DRAM: they cost 0.03 ms, not 0.07.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Variant, Work, compare, cuda_module

kernels = cuda_module("streaming_stores.cu")
BLOCK, WIDTH = 256, 32
ROWS_A_BLOCK = 128


def inputs(device, n, rows):
    table = torch.randn(rows, WIDTH, device=device)
    return table, torch.randint(rows, (n,), device=device, dtype=torch.int32)


def reference(table, index):
    return table.double()[index.long()]


def launch(kernel, table, index):
    n = index.numel()
    out = torch.empty(n, WIDTH, device=table.device)
    kernel[-(-n // ROWS_A_BLOCK), BLOCK](table, index, out, n)
    return out


def ordinary(table, index):
    return launch(kernels.ordinary, table, index)


def streaming(table, index):
    return launch(kernels.streaming, table, index)


@compare(
    baseline=ordinary,
    optimized=[Variant(streaming, sass="STG.EF.128", at_least={"sm90": 1.04})],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**23, "rows": 3 * 2**16}],
    check_sizes=[
        {"n": 129, "rows": 65},
        {"n": 1023, "rows": 33},
        {"n": st.integers(33, 600), "rows": st.integers(2, 300)},
    ],
    work=lambda n, rows: Work(read=4 * n + 4 * WIDTH * rows, write=4 * WIDTH * n),
    bound="dram",
)
def test_streaming_stores(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
