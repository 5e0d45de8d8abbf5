"""Coalescing a copy: neighboring threads take neighboring elements.

Problem    Copy n fp32 elements.
Baseline   chunked: each thread copies 32 consecutive elements, as a CPU thread would copy a chunk.
           The lanes of a warp are 128 bytes apart, so each load or store touches 32 lines.
Optimized  coalesced: each thread copies as many elements as in `chunked`, with as many loads in
           flight. Neighboring lanes copy neighboring elements, so each load or store touches one
           line.
           library: `x * 1`, PyTorch's elementwise kernel. Sides are timed in a CUDA graph, where
           `Tensor.clone` becomes a memcpy node, which is slower than a kernel.
Bound      DRAM limits `coalesced`. `chunked` moves the same bytes to and from DRAM, because L1 and
           L2 keep a sector until its 32 bytes are used. But each 4-byte store goes to the L2 as a
           separate sector, so the stores of `chunked` move eight times as many bytes to the L2 as
           they write.
Seen       `chunked` takes several times as long as its sectors would take at the L2 rate. naive of
           `transpose_test.py` also stores 4 bytes to each line, and writes about as many elements
           per second. The loads of `chunked` need a lookup in the L1 for each element. The L1 does
           one lookup per cycle (row_mapping of chapter 8). These lookups take about a fifth of the
           time. The stores take the rest, about four cycles of an SM per store, as in
           `transpose_test.py`. We did not measure which part of the path to the L2 needs these
           cycles.
Use when   A thread handles several elements: always let neighboring threads take neighboring
           elements. If an algorithm needs a chunk per thread, as a scan does, load the chunks
           through shared memory or 16 bytes at a time.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

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
    return x * 1


def moved(n, **more):
    return Cost(read=4 * n, write=4 * n, launches=1, **more)


@compare(
    baseline=chunked,
    optimized=[coalesced, Variant(library, at_least="yardstick")],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**27}],
    # A block copies 8192 elements, and a thread copies 32.
    check_sizes=[{"n": 1023}, {"n": 8193}, {"n": st.integers(33, 20000)}],
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="dram",
    costs={
        # Eight successive loads of a thread share a sector. Each store sends a sector.
        chunked: lambda n: moved(n, l2=(4 + 32) * n),
        coalesced: moved,
        library: moved,
    },
    at_least={"sm90": 7.0},
)
def test_copy_stride(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
