"""Coalescing a copy: neighbouring threads take neighbouring elements.

Problem    Copy n fp32 elements.
Baseline   chunked: a thread copies 32 neighbours, as each thread of a CPU takes a chunk of its own.
           The lanes of a warp lie 128 bytes apart: a load or store touches 32 lines, 4 bytes each.
Optimized  coalesced: the same threads, as many elements each, as many loads in flight; the lanes of
           a warp are neighbours, so a load or store touches one line.
           library: `Tensor.clone`, a memcpy of the driver.
Bound      DRAM: 8 bytes an element, 0.25 ms for 1 GiB at 4.24 TB/s. The bytes of chunked that reach
           DRAM are the same: what is left of a sector of 32 bytes waits in the L1 (2048 threads of
           an SM keep 64 KiB of sectors) and in the L2, where stores meet. But each 4-byte store
           takes the L2 as long as 32 bytes would, so 512 MiB of stores cost as much as 4 GiB, at an
           estimated 5.5 TB/s 0.8 ms, before any load: at least 3 times, 6 if the loads find their
           sectors gone from the L1.
Seen       An H200 gains 8.8x, more than predicted, since chunked is slower: it stores 57 G elements
           a second, which as sectors of 32 bytes are 1.9 TB/s and not 5.5. The naive side of
           transpose stores 67 G; what limits such stores is not explained. coalesced copies at 94 %
           of the copy rate. `clone` takes 1.5 times as long where it is timed, in a CUDA graph;
           called on a stream it takes no longer than coalesced.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Variant, Work, compare, cuda_module

kernels = cuda_module("copy_stride.cu")
BLOCK, EACH = 256, 32


def inputs(device, n):
    return (torch.randn(n, device=device),)


def reference(x):
    return x.double()


def launch(kernel, x):
    out = torch.empty_like(x)
    kernel[-(-x.numel() // (BLOCK * EACH)), BLOCK](x, out, x.numel())
    return out


def chunked(x):
    return launch(kernels.chunked, x)


def coalesced(x):
    return launch(kernels.coalesced, x)


def library(x):
    return x.clone()


@compare(
    baseline=chunked,
    optimized=[coalesced, Variant(library, at_least="yardstick")],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**27}],
    # A block copies 8192 elements, a thread of chunked 32.
    check_sizes=[{"n": 1023}, {"n": 8193}, {"n": st.integers(33, 20000)}],
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="dram",
    at_least={"sm90": 7.0},
)
def test_copy_stride(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
