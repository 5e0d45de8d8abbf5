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
           With 16 bytes per thread, they have 32 KiB. The faster the DRAM, the more bytes must be
           in flight for its full rate: 8 KiB cost `scalar` more on an H200 than on an H100. Wider
           accesses alone save only instructions, which are not the limit.
Seen       The bytes in flight explain most of the time of `scalar`. `scalar` still takes longer
           than predicted. It starts four times as many blocks as `unrolled`. At the rate `blocks`,
           these starts take almost as long as `scalar` is predicted to take on an H200. The cost
           leaves them out, as if they overlapped with the copy completely. `single` of
           `../ch06/ilp_test.py` has as many blocks and bytes in flight, and takes longer than
           predicted too. We did not measure how much of the starts overlaps.
Use when   A memory-bound kernel has few bytes in flight: load several elements per thread before
           using the first. Use 16-byte accesses if the data is aligned. More than 16 bytes per
           thread gain nothing.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("vector_width.cu")
BLOCK = 256
THREADS = 2048  # threads that an SM runs at once, for costs


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


def copied(n, each=0):
    """Return the cost with `each` floats in flight per thread.

    0 stands for enough floats to keep DRAM busy: `quads_unrolled` has 64 bytes per thread, and we
    do not know the library's number. The starts of blocks are left out, because they take less time
    than the copy on every side.
    """
    return Cost(read=4 * n, write=4 * n, in_flight=4 * THREADS * each, launches=1)


@compare(
    baseline=scalar,
    optimized=[
        unrolled,
        Variant(pairs, sass=("LDG.64", "STG.64")),
        Variant(quads, sass=("LDG.128", "STG.128")),
        Variant(quads_unrolled, sass=("LDG.128", "STG.128")),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**27}],
    # A block copies up to 4096 elements. At the end, 1 to 3 elements may not fill a vector.
    check_sizes=[{"n": 1023}, {"n": 4097}, {"n": st.integers(33, 9000)}],
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="dram",
    costs={
        scalar: lambda n: copied(n, each=1),
        **dict.fromkeys([unrolled, pairs, quads], lambda n: copied(n, each=4)),
        **dict.fromkeys([quads_unrolled, library], copied),
    },
    at_least={"sm90": 1.15},
)
def test_vector_width(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
