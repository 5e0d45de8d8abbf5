"""Arithmetic intensity: if the number of FLOPs is fixed, move fewer bytes to raise it.

Problem    y = relu(a * b + c) on n fp32 elements, which is 3 FLOPs per element on every side.
Baseline   three_passes: one kernel per step. Each kernel reads from DRAM and writes to DRAM. The
           three kernels move 32 bytes per element in total. A thread computes one element.
Optimized  unrolled: changes `three_passes`. A thread computes four elements, with a stride of the
           whole grid. The number of bytes stays the same.
           vectorized: changes `three_passes`. A thread computes four neighboring elements, 16 bytes
           per access. The number of bytes stays the same.
           fused: changes `three_passes`. One kernel keeps intermediate results in registers and
           moves 16 bytes per element.
           fused_vectorized: changes `fused`. Accesses are 16 bytes long, as in `vectorized`.
Bound      DRAM on every side. On an H200, fp32 arithmetic is the limit only above about 12 FLOPs
           per byte. Every side does less than 1 FLOP per byte. The arrays between two passes do not
           fit in the L2.
Seen       `three_passes` takes longer than its bytes predict. The reason is too few bytes in
           flight: `unrolled` and `vectorized` load 16 bytes per thread and array, and both take the
           predicted time. In `fused`, a thread loads one element from each of three arrays, and the
           time is closer to the prediction than in `three_passes`. `unrolled` and `vectorized` also
           start only a quarter of the blocks. We did not measure how much they gain from starting
           fewer blocks.
Use when   Several kernels in a row pass large arrays through DRAM: fuse them first. If a kernel
           that only moves data is slower than the copy rate, give each thread more loads. A kernel
           that is limited by arithmetic gains nothing from fusing or from more loads.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("arithmetic_intensity.cu")
BLOCK = 256


def inputs(device, n):
    return tuple(torch.randn(n, device=device) for _ in range(3))


def reference(a, b, c):
    return (a.double() * b.double() + c.double()).relu()


def launch(kernel, *inputs, each=1):
    out = torch.empty_like(inputs[0])
    kernel[-(-out.numel() // (each * BLOCK)), BLOCK](*inputs, out, out.numel())
    return out


def three_passes(a, b, c):
    x = launch(kernels.multiply, a, b)
    return launch(kernels.relu, launch(kernels.add, x, c))


def unrolled(a, b, c):
    x = launch(kernels.multiply_unrolled, a, b, each=4)
    return launch(kernels.relu_unrolled, launch(kernels.add_unrolled, x, c, each=4), each=4)


def vectorized(a, b, c):
    x = launch(kernels.multiply_vectorized, a, b, each=4)
    return launch(kernels.relu_vectorized, launch(kernels.add_vectorized, x, c, each=4), each=4)


def fused(a, b, c):
    return launch(kernels.fused, a, b, c)


def fused_vectorized(a, b, c):
    return launch(kernels.fused_vectorized, a, b, c, each=4)


def three_kernels(n):
    step = Cost(read=8 * n, write=4 * n, ops={"fp32": n}, launches=1)
    return 2 * step + Cost(read=4 * n, write=4 * n, ops={"fp32": n}, launches=1)


def one_kernel(n):
    return Cost(read=12 * n, write=4 * n, ops={"fp32": 3 * n}, launches=1)


@compare(
    baseline=three_passes,
    optimized=[
        Variant(unrolled, at_least={"sm90": 1.15}),
        Variant(vectorized, at_least={"sm90": 1.15}, sass=("LDG.128", "STG.128")),
        fused,
        Variant(fused_vectorized, sass=("LDG.128", "STG.128")),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**27}],
    check_sizes=[{"n": 1023}, {"n": 4097}, {"n": st.integers(33, 5000)}],
    work=lambda n: Work(read=12 * n, write=4 * n, flops={"fp32": 3 * n}, roundings=2),
    bound="dram",
    costs={
        **dict.fromkeys([three_passes, unrolled, vectorized], three_kernels),
        **dict.fromkeys([fused, fused_vectorized], one_kernel),
    },
    at_least={"sm90": 2.0},
)
def test_arithmetic_intensity(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
