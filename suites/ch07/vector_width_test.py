"""Vector width: a copy needs bytes in flight, and wide accesses are one way to get them.

Problem    Copy n fp32 elements.
Baseline   scalar: one 4-byte load and store per thread.
Optimized  unrolled: changes scalar. Four 4-byte accesses per thread, all loads before the first
           store.
           pairs: changes unrolled. The same 16 bytes in two 8-byte accesses.
           quads: changes unrolled. The same 16 bytes in one 16-byte access.
           quads_unrolled: changes quads. Four 16-byte accesses per thread.
           library: `x * 1`, PyTorch's elementwise kernel. `Tensor.clone` is slower in the CUDA
           graph in which sides are timed (copy_stride).
Bound      DRAM. The 2048 threads of an SM have 8 KiB of loads in flight with 4 bytes each, and 32
           KiB with 16 bytes. How many bytes the full rate needs in flight depends on how long a
           thread takes. The stored time of scalar means about 0.8 us, and then the full rate needs
           about 13 KiB. Width alone saves only instructions, which are not the limit.
Seen       scalar takes longer than its bytes predict, because 8 KiB in flight are not enough. Its
           0.8 us are not only the latency of DRAM: scalar starts four times as many blocks as
           unrolled, and the start of a block is part of them. We did not measure how large that
           part is.
Use when   A memory-bound kernel has few bytes in flight: load several elements per thread before
           using the first. Use 16-byte accesses if alignment allows it. More than 16 bytes per
           thread gain nothing.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("vector_width.cu")
BLOCK = 256


def inputs(device, n):
    return (torch.randn(n, device=device),)


def reference(x):
    return x.double()


def launch(kernel, x, each):
    out = torch.empty_like(x)
    kernel[-(-x.numel() // (each * BLOCK)), BLOCK](x, out, x.numel())
    return out


def scalar(x):
    return launch(kernels.scalar, x, each=1)


def unrolled(x):
    return launch(kernels.unrolled, x, each=4)


def pairs(x):
    return launch(kernels.pairs, x, each=4)


def quads(x):
    return launch(kernels.quads, x, each=4)


def quads_unrolled(x):
    return launch(kernels.quads_unrolled, x, each=16)


def library(x):
    return x * 1


def copied(n):
    return Cost(read=4 * n, write=4 * n, launches=1)


@compare(
    baseline=scalar,
    optimized=[
        unrolled,
        Variant(pairs, sass=("LDG.64", "STG.64")),
        Variant(quads, sass=("LDG.128", "STG.128")),
        Variant(quads_unrolled, sass=("LDG.128", "STG.128"), at_least={"sm90": 1.25}),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**27}],
    # A block copies up to 4096 elements. The last 1 to 3 elements may fill no vector.
    check_sizes=[{"n": 1023}, {"n": 4097}, {"n": st.integers(33, 9000)}],
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="dram",
    costs=dict.fromkeys([scalar, unrolled, pairs, quads, quads_unrolled, library], copied),
    at_least={"sm90": 1.3},
)
def test_vector_width(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
