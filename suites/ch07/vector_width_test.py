"""Vector width: what 16-byte accesses give a copy, and what is the bytes in flight.

Problem    Copy n fp32 elements.
Baseline   scalar: one 4-byte load and store a thread.
Optimized  unrolled: four 4-byte accesses a thread, all loads before the first store.
           pairs: two 8-byte accesses a thread: the same 16 bytes, half the instructions.
           quads: one 16-byte access a thread: the same 16 bytes, a quarter of the instructions.
           quads_unrolled: four 16-byte accesses a thread.
           library: `Tensor.clone`, a memcpy of the driver.
Bound      DRAM: 8 bytes an element, 0.25 ms for 1 GiB at 4.24 TB/s. What a copy lacks is bytes in
           flight: at some 0.8 us a load, 2.1 TB/s of reads want 13 KiB on the way in each of the
           132 SMs at all times. 2048 resident threads ask for 8 KiB as scalar, which also start
           and end without any, and for 32 KiB on the next three rungs. So these predict the same,
           1.3 times (arithmetic_intensity in ch01 gained 1.34 from either), and among them width
           alone 1.0: SMs that copy at the full rate issue 4-byte accesses in 13 % of their
           cycles. quads should reach 97 % of the copy rate, and quads_unrolled no more.
Seen       An H200 gains 1.6x from 16 bytes a thread, whatever their width: unrolled, pairs and
           quads copy at the full rate and differ by 0.3 %. That is more than 1.3x because scalar
           stops at 65 % of the rate, about what 8 of 13 KiB in flight allow. quads_unrolled is 5 %
           slower than quads, which is not explained. `clone` takes as long as scalar where it is
           timed, in a CUDA graph; called on a stream it takes as long as quads.
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
    return x.clone()


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
    # A block copies up to 4096 elements; 1 to 3 fill no vector.
    check_sizes=[{"n": 1023}, {"n": 4097}, {"n": st.integers(33, 9000)}],
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="dram",
    costs=dict.fromkeys([scalar, unrolled, pairs, quads, quads_unrolled, library], copied),
    at_least={"sm90": 1.3},
)
def test_vector_width(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
