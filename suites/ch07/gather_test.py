"""Gather: sort the indices once if the order of the reads does not matter.

Problem    Compute the sums of four bootstrap resamples of n fp32 values. A resample is n draws with
           replacement, which are the page's state. In practice, the same draws are applied to one
           variable after another, so that correlations between variables are kept.
Baseline   unsorted: the draws in the order in which they were drawn. The lanes of a warp read 32
           scattered places of the table.
Optimized  sorted_once: the same kernel on the same draws, sorted. A sum does not depend on the
           order of its terms. The sort runs once, before the timed part. The result line says after
           how many calls the sort pays off. Both sides read 4 n indices and gather 4 n values, so
           the order of the draws is the only difference. A better implementation would count how
           often each value was drawn. With one-byte counts, one pass over the table gives all four
           sums from a quarter of the bytes, but has no gather to measure. There is no library
           variant, because `values[index].sum(1)` first writes all 4 n gathered values.
Bound      DRAM: sorted draws read the table once from beginning to end per resample, so each
           resample reads 4 n bytes of indices and 4 n bytes of values. An unsorted draw reads a
           sector of 32 bytes and uses 4 of them. The table has 268 MB and the L2 has 50 MB, so four
           of five draws miss the L2.
Seen       `unsorted` takes several times as long as its sectors would take at the read rate. The
           read rate was measured with sequential reads. DRAM may be slower with scattered sectors,
           but we did not measure their rate. The L2 may also fetch more than the missing sector
           (`cudaLimitMaxL2FetchGranularity`). We neither read nor changed this setting. If each
           miss fetched a whole line of 128 bytes, the bytes would take as long as the measured
           time. With 64 bytes per miss, they would take about half as long. So fetches of whole
           lines are the likely cause.
Use when   Many calls use the same indices, and the result does not depend on the order of the
           indices. If each draw has its own result, sorting the reads scatters the writes instead.
           For a real bootstrap, use counts.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Work, compare, cuda_module

kernels = cuda_module("gather.cu")
BLOCK, EACH = 256, 32
RESAMPLES = 4
MISSING = 0.8  # share of random reads that miss: the L2 holds 50 MB of a table of 268 MB


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


def reading(n, table):
    """Return the cost of sums that read `table` bytes of values from DRAM."""
    sums_of_blocks = Cost(read=4 * RESAMPLES * n + table, launches=1)
    return sums_of_blocks + Cost(launches=1)  # the second kernel adds up partial sums from the L2


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
    costs={
        unsorted: lambda n: reading(n, table=MISSING * 32 * RESAMPLES * n),
        sorted_once: lambda n: reading(n, table=4 * RESAMPLES * n),
    },
    at_least={"sm90": 10.0},
)
def test_gather(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
