"""Vector width: a copy needs bytes in flight, and wide accesses are one way to get them.

Problem    Copy n fp32 elements.
Baseline   scalar: one 4-byte load and store per thread.
Optimized  unrolled: changes `scalar`. A thread makes four 4-byte accesses, with all loads before
           the first store.
           pairs: changes `unrolled`. A thread copies the same 16 bytes in two 8-byte accesses.
           quads: changes `unrolled`. A thread copies the same 16 bytes in one 16-byte access.
           quads_unrolled: changes `quads`. A thread makes four 16-byte accesses.
           library: `x * 1`, PyTorch's elementwise kernel. `Tensor.clone` would be slower in a CUDA
           graph, in which sides are timed (see copy_stride).
Bound      DRAM. With 4 bytes per thread, the 2048 threads of an SM have 8 KiB of loads in flight.
           With 16 bytes per thread, they have 32 KiB. The longer a thread takes, the more bytes
           must be in flight for the full rate. According to the measured time of `scalar`, a thread
           takes about 0.8 us, so the full rate needs about 13 KiB. Wider accesses alone save only
           instructions, which are not the limit.
Seen       `scalar` takes longer than its bytes predict, because 8 KiB in flight are not enough. The
           0.8 us of a thread include the start of its block, not only the latency of DRAM, and
           `scalar` starts four times as many blocks as `unrolled`. We did not measure how long the
           start of a block takes.
Use when   A memory-bound kernel has few bytes in flight: load several elements per thread before
           using the first. Use 16-byte accesses if the data is aligned. More than 16 bytes per
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
    # A block copies up to 4096 elements. At the end, 1 to 3 elements may not fill a vector.
    check_sizes=[{"n": 1023}, {"n": 4097}, {"n": st.integers(33, 9000)}],
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="dram",
    costs=dict.fromkeys([scalar, unrolled, pairs, quads, quads_unrolled, library], copied),
    at_least={"sm90": 1.3},
)
def test_vector_width(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
