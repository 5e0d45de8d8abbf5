"""Many small GEMMs: one launch instead of a loop.

Problem    Compute `count` independent (n, n) fp32 products.
Baseline   looped: one `torch.mm` per product, which writes into a slice of a preallocated result.
Optimized  batched: all products in one `torch.bmm`.
Bound      The host limits looped: `count` products take at least the time of `count` launches.
           Arithmetic limits `batched`.
Seen       `looped` takes longer than predicted from one launch and three views per product. There
           are two possible causes, and either one would explain the time. If cuBLAS splits the
           inner dimension, it launches two kernels per product. Or the GPU is the limit: a single
           product has only 4 tiles of 128 x 128, and an SM takes longer for one tile than the host
           takes for a launch. No profile was stored, so we do not know the cause. `batched` takes
           longer than its FLOPs predict at the fp32 rate. If cuBLAS uses tiles of 128 x 128, there
           are 160 tiles on 132 SMs, so some SMs compute two tiles, which would explain the measured
           time. We did not record which tiles cuBLAS uses.
Use when   Many products have the same shape, and each product is too small to fill the GPU. When
           the shapes differ, see `grouped_gemm_test.py`. When each product fills the GPU, a loop is
           as fast as one launch.
"""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Work, compare


def inputs(device, count, n):
    return torch.randn(count, n, n, device=device), torch.randn(count, n, n, device=device)


def reference(a, b):
    return a.double() @ b.double()


def looped(a, b):
    out = torch.empty_like(a)
    for x, y, z in zip(a, b, out, strict=True):
        torch.mm(x, y, out=z)
    return out


def batched(a, b):
    return torch.bmm(a, b)


def products(count, n):
    matrices = 4 * count * n * n
    return Cost(read=2 * matrices, write=matrices, ops={"fp32": 2 * count * n**3})


@compare(
    baseline=looped,
    optimized=[batched],
    inputs=inputs,
    reference=reference,
    sizes=[{"count": 40, "n": 256}],
    check_sizes=[{"count": 3, "n": 33}, {"count": st.integers(1, 9), "n": st.integers(1, 40)}],
    cpu_sizes=[{"count": 256, "n": 16}],
    work=lambda count, n: Work(
        read=8 * count * n * n,
        write=4 * count * n * n,
        flops={"fp32": 2 * count * n**3},
        terms=n,
    ),
    bound="launch",
    costs={
        # The loop creates three views per product.
        looped: lambda count, n: replace(products(count, n), launches=count, host_steps=3 * count),
        batched: lambda count, n: replace(products(count, n), launches=1, host_steps=1),
    },
    at_least={"sm90": 10.0, "cpu": 1.5},
)
def test_batched_gemm(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
