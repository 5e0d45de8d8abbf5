"""Histogram: count where it costs little, and add up the counts once.

Problem    Count n int32 values from 0 to 255 in 256 bins: 4 bytes and one increment a value. At
           skew=0 all bins are alike, at skew=50 every second value is the same.
Baseline   global_atomics: each value increments its counter in global memory, which is to say in
           the L2. test_privatization holds privatized against it, at n = 2^24.
           privatized: a block counts in 1 KiB of shared memory and adds its 256 counts to the
           result at its end: 270336 atomics in the L2 instead of one a value. Nobody starts from
           less, so test_histogram holds the other rungs against this one, at n = 2^28.
           Blocks that fill the GPU once walk the values, four coalesced loads a thread in flight,
           on all rungs.
Optimized  per_warp: each of a block's 8 warps counts in 1 KiB of its own, so that warps do not wait
           for each other's increments.
           aggregated: as privatized, but the lanes of a warp that hold one value find each other
           (`__match_any_sync`) and one of them adds their number.
           library: `torch.histc`, which divides to find the bin. CUB's histogram is behind no
           operation of torch; benchmarks/cub_test.py holds privatized against it. `torch.bincount`
           waits on the host for a minimum and a maximum, so it is the reference and no variant.
Bound      DRAM: 1 GiB at the 4.53 TB/s that an H200 reads is 0.237 ms, where shared memory keeps
           up: 64k warps of values an SM, whose 32 increments fall 3.5 deep on one of 32 banks, are
           0.13 ms at one cycle a pass. An increment by one is ATOMS.POPC.INC in machine code: it
           counts equal lanes itself, so skew is to cost privatized little, and aggregated, which
           does that by instructions, is to gain nothing on it. In the L2 the 256 counters lie in 32
           sectors: at an update a cycle and sector 0.3 ms at skew=0, 20x, and up to 5 ms at
           skew=50, where 2^23 updates are of one counter, unless equal lanes are merged on their
           way.
Seen       At 2^24 an H200 gains 162x at skew=0 and 327x at skew=50, more than predicted: an update
           in the L2 takes 0.26 ns where 32 sectors at one a cycle would be 0.02, and one of the
           frequent counter 1 ns, so equal lanes are not merged on their way.
           At 2^28 an H200 reads 94 to 96 % of what it can on privatized, skewed or not; counters of
           each warp's own add nothing. aggregated is 8 and 5 times slower: matching lanes costs
           more than the increments that it saves, which the hardware counts together anyway.
           `torch.histc` takes five times as long.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Variant, Work, compare, cuda_module

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
)
def test_histogram(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
