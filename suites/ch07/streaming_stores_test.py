"""Streaming stores: data that is only written should not evict data that is read again from the L2.

Problem    Look up n rows of 32 fp32 values in a table that fits the L2, in random order.
Baseline   ordinary: plain stores. A written row takes up space in the L2 like any other row.
Optimized  streaming: changes `ordinary`. `__stcs` stores the rows and marks them as first to evict.
           There is no library variant, because PyTorch's `table[index]` uses plain stores, like
           `ordinary`.
Bound      DRAM writes. The table should stay in the L2. With `ordinary` stores, the L2 evicts part
           of the table, and the evicted rows are read from DRAM again. The costs assume that the L2
           evicts the least recently used data.
Seen       Both sides take longer than predicted, and `streaming` gains less than predicted. At the
           measured rate of the L2, the bytes between SMs and L2 cannot explain the gap. But this
           rate was measured with reads only, and half of the bytes here are writes. According to
           NVIDIA, the L2 of the A100 has two partitions, and each caches what its own SMs read. If
           the L2 of an H200 does the same, it keeps the table twice and has little room for
           anything else. We did not try a smaller table, which would show whether this is the
           cause.
Use when   A kernel writes far more than the L2 holds, nothing reads the results soon, and other
           data in the L2 is read again. Expect a small gain. If no data in the L2 is read again,
           there is no gain.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("streaming_stores.cu")
BLOCK, WIDTH = 256, 32
ROWS_A_BLOCK = 128
ROW = 4 * WIDTH  # bytes


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


def looked_up(n, rows, evicted):
    """Return the cost if a share `evicted` of the look-ups misses the L2."""
    return Cost(
        read=4 * n + ROW * rows + evicted * ROW * n,
        write=ROW * n,
        l2=4 * n + 2 * ROW * n,
        launches=1,
    )


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
    costs={
        # 1.25 * rows look-ups write and read 50 MB, which fills the L2. In a share of exp(-1.25) of
        # all look-ups, the row was last used before that.
        ordinary: lambda n, rows: looked_up(n, rows, evicted=0.29),
        streaming: lambda n, rows: looked_up(n, rows, evicted=0),
    },
)
def test_streaming_stores(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
