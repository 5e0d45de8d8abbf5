"""Histogram: count in shared memory, and add up the blocks' counts once.

Problem    Count n int32 values from 0 to 255 in 256 bins. At skew=0, all bins are equally likely.
           At skew=50, every second value is the same.
Baseline   global_atomics: each value increments its counter in global memory, by an atomic in the
           L2. test_privatization compares `global_atomics` with `privatized` at n = 2^24.
           privatized: a block counts in 1 KiB of shared memory, and adds its 256 counts to the
           result at the end. Engineers would start from this version, so test_histogram compares
           the other variants with `privatized`, at n = 2^28. Every kernel starts as many blocks as
           fit on the GPU at once. The blocks loop over the values, and each thread has four
           coalesced loads in flight.
Optimized  per_warp: changes `privatized`. Each of a block's 8 warps has its own 1 KiB of counters,
           so no warp waits for another warp's increments.
           aggregated: changes `privatized`. `__match_any_sync` finds the lanes that have the same
           value, and one of these lanes adds their number to the counter.
           library: `torch.histc`, which does more work per value. To find the bin, `torch.histc`
           checks the range, and multiplies and divides 64-bit integers. The other sides use the
           value as the index of the bin. torch does not expose CUB's histogram.
           benchmarks/cub_test.py compares `privatized` with CUB's HistogramEven. For each 32-bit
           value, HistogramEven also checks the range, multiplies and divides. `torch.bincount`
           makes the host wait for a minimum and a maximum, so it is the reference, not a variant.
Bound      DRAM: the values are read once. Shared memory is fast enough: the busiest of the 32 banks
           gets 3.5 of a warp's 32 random increments on average. The compiler turns an increment by
           one into ATOMS.POPC.INC, which counts lanes with equal values at once, so skew does not
           slow the kernel down.
Seen       global_atomics: the rate `atomics` was measured with 2^18 different counters. At skew=50,
           the measured time is 1 ns per update of the frequent counter, as if the L2 did not merge
           the updates of equal lanes. At skew=0, the 256 counters together get only four times as
           many updates per second. Perhaps a slice of the L2 makes about one update per ns, and the
           1 KiB of counters lies in only three or four slices. NVIDIA does not document how
           addresses spread over slices, so this is a guess. The rate `atomics` was measured with
           counters in all slices, and the 32 counters of a warp were neighbors in 4 sectors.
           privatized: the kernel takes about 10 us longer than predicted at both values of n. 10 us
           is a large share of the time at n = 2^24, and a small share at n = 2^28. At its end,
           every block adds its 256 counts to the same 256 numbers: 1056 blocks update 32 sectors
           each. If the guess above is right, these updates take about 10 us. We did not measure the
           updates alone.
           aggregated: the time is proportional to the number of different values in a warp, which
           is 30 at skew=0 and 17 at skew=50. Each different value takes two cycles of an SM. The
           likely reason is that the MATCH instruction handles one value after another. We did not
           confirm this with a profiler.
           library: the loop of `torch.histc` loads one value at a time, and computes the value's
           index and bin with 64-bit integers. We did not measure which part takes the time.
Use when   Many values fall into few bins: count in shared memory. Do not aggregate by hand when the
           increment is one, because the hardware already does. If shared memory cannot hold all
           bins, sort first or count in several passes.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("histogram.cu")
BLOCK = 256
EACH = 4
BINS = 256
FREQUENT = 137


def inputs(device, n, skew):
    values = torch.randint(0, BINS, (n,), device=device, dtype=torch.int32)
    same = torch.randint(0, 100, (n,), device=device, dtype=torch.int8) < skew
    return (values.masked_fill_(same, FREQUENT),)


def reference(x):
    return torch.bincount(x, minlength=BINS)


def count(kernel, x):
    gpu = torch.cuda.get_device_properties(x.device)
    resident = gpu.max_threads_per_multi_processor // BLOCK * gpu.multi_processor_count
    out = torch.zeros(BINS, dtype=torch.int32, device=x.device)
    kernel[min(resident, -(-x.numel() // (EACH * BLOCK))), BLOCK](x, out, x.numel())
    return out


def global_atomics(x):
    return count(kernels.global_atomics, x)


def privatized(x):
    return count(kernels.privatized, x)


def per_warp(x):
    return count(kernels.per_warp, x)


def aggregated(x):
    return count(kernels.aggregated, x)


def library(x):
    return torch.histc(x, bins=BINS, min=0, max=BINS)


def work(n, skew):
    return Work(read=4 * n, write=4 * BINS)


def counted(n, atomics=0):
    fill = Cost(launches=1)
    return fill + Cost(read=4 * n, write=4 * BINS, atomics=atomics, launches=1)


def in_global(n, skew):
    return counted(n, atomics=n)


def in_shared(n, skew):
    return counted(n, atomics=8 * 132 * BINS)  # 8 blocks on each of an H200's 132 SMs


CHECK_SIZES = [
    {"n": 1023, "skew": 0},
    {"n": 5001, "skew": 50},
    {"n": 2049, "skew": 99},
    {"n": st.integers(1, 5000), "skew": st.integers(0, 100)},
]


@compare(
    baseline=global_atomics,
    optimized=[Variant(privatized, sass="ATOMS", at_least={"sm90": 100})],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**24, "skew": 0}, {"n": 2**24, "skew": 50}],
    check_sizes=CHECK_SIZES,
    work=work,
    bound="dram",
    costs={global_atomics: in_global, privatized: in_shared},
)
def test_privatization(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()


@compare(
    baseline=privatized,
    optimized=[
        Variant(per_warp, sass="ATOMS", at_least="neutral"),
        Variant(aggregated, sass=("MATCH", "ATOMS"), at_least="yardstick"),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**28, "skew": 0}, {"n": 2**28, "skew": 50}],
    check_sizes=CHECK_SIZES,
    work=work,
    bound="dram",
    costs={
        **dict.fromkeys([privatized, per_warp, aggregated], in_shared),
        library: lambda n, skew: counted(n),
    },
)
def test_histogram(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
