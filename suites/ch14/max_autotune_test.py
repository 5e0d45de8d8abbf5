"""Max-autotune: let the compiler time several matmul kernels, and fuse the following operations.

Problem    Compute x + silu(h w), a matrix product, an activation and a residual, in bf16 with fp32
           sums. The inner dimension k is short in test_max_autotune and long in
           test_max_autotune_deeper. test_max_autotune_alone has only the matrix product h w.
Baseline   compiled: `torch.compile` with its default mode. cuBLAS computes the matrix product. Then
           one kernel reads the product and x, and writes the result.
           library: `torch.matmul`, in test_max_autotune_alone.
Optimized  autotuned: changes `compiled`. `mode="max-autotune-no-cudagraphs"` times Triton matmul
           kernels and cuBLAS. A Triton kernel can apply activation and residual in its epilogue, so
           it neither writes nor rounds the product. Inductor also times this fused kernel. If
           cuBLAS and a pointwise kernel are faster, Inductor keeps those two. The mode also tunes
           pointwise kernels.
           eager: like `compiled`, but without `torch.compile`.
           autotuned_alone: changes `library`. The same mode as in `autotuned` compiles a matrix
           product alone.
Bound      With a short k, DRAM is the limit: the epilogue saves writing and reading the product.
           With a long k and for the product alone, tensor cores are the limit. If Inductor chooses
           cuBLAS in a run, `autotuned` gains only what a tuned pointwise kernel saves. The costs of
           `autotuned` assume a Triton kernel with an epilogue. The costs of `autotuned_alone` hold
           for any kernel.
Seen       `autotuned` takes as long as `compiled`, with a short k on an H100 and with a long k on
           an H200. This is longer than predicted for a fused epilogue, and more than twice as long
           with the short k. `autotuned_alone` takes as long as `library` on an H200. So Inductor
           probably kept cuBLAS in all three tests. We did not record its choice.
Use when   Pointwise operations follow matrix products, or cuBLAS is slow for your shapes. If cuBLAS
           is already fast, this mode helps little, so compare the times before you keep the mode.
           Tuning takes a long time and is repeated for each shape, so keep the tuning cache, or
           deploy compiled code. On a GPU with fewer than 68 SMs, Inductor does not try Triton
           matmul kernels.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare

MODE = "max-autotune-no-cudagraphs"  # CUDA graphs are in reduce_overhead_test.py


def inputs(device, m, n, k):
    h = torch.randn(m, k, device=device)
    w = torch.randn(k, n, device=device) * k**-0.5
    return tuple(tensor.bfloat16() for tensor in (h, w, torch.randn(m, n, device=device)))


def gated(h, w, x):
    return x + F.silu(h @ w)


def reference(h, w, x):
    return gated(h.double(), w.double(), x.double())


def eager(h, w, x):
    yield lambda: gated(h, w, x)


def compiled(h, w, x):
    step = torch.compile(gated, dynamic=False)
    step(h, w, x)
    yield lambda: step(h, w, x)


def autotuned(h, w, x):
    step = torch.compile(gated, dynamic=False, mode=MODE)
    step(h, w, x)
    yield lambda: step(h, w, x)


def inputs_alone(device, m, n, k):
    return inputs(device, m, n, k)[:2]


def reference_alone(h, w):
    return h.double() @ w.double()


def library(h, w):
    yield lambda: torch.matmul(h, w)


def autotuned_alone(h, w):
    step = torch.compile(torch.matmul, dynamic=False, mode=MODE)
    step(h, w)
    yield lambda: step(h, w)


def product(m, n, k):
    return Cost(read=2 * (m + n) * k, write=2 * m * n, ops={"bf16": 2 * m * n * k}, launches=1)


def pointwise(m, n, operands):
    return Cost(read=2 * operands * m * n, write=2 * m * n, launches=1)


def fused(m, n, k):
    ops = {"bf16": 2 * m * n * k}
    return Cost(read=2 * ((m + n) * k + m * n), write=2 * m * n, ops=ops, launches=1)


def work(m, n, k):
    read = 2 * ((m + n) * k + m * n)
    flops = {"bf16": 2 * m * n * k}
    return Work(read=read, write=2 * m * n, flops=flops, terms=k, roundings=3)


def work_alone(m, n, k):
    flops = {"bf16": 2 * m * n * k}
    return Work(read=2 * (m + n) * k, write=2 * m * n, flops=flops, terms=k)


COSTS = {
    eager: lambda m, n, k: product(m, n, k) + pointwise(m, n, 1) + pointwise(m, n, 2),
    compiled: lambda m, n, k: product(m, n, k) + pointwise(m, n, 2),
    autotuned: fused,
}


@compare(
    baseline=compiled,
    optimized=[Variant(autotuned, at_least="neutral"), Variant(eager, at_least="yardstick")],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 16384, "n": 8192, "k": 256}],
    check_sizes=[{"m": 33, "n": 40, "k": 24}],
    work=work,
    bound="dram",
    costs=COSTS,
)
def test_max_autotune(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=compiled,
    optimized=[Variant(autotuned, at_least="neutral"), Variant(eager, at_least="yardstick")],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 8192, "k": 4096}],
    check_sizes=[{"m": 33, "n": 40, "k": 24}],
    work=work,
    bound="tensor",
    costs=COSTS,
)
def test_max_autotune_deeper(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=library,
    optimized=[Variant(autotuned_alone, at_least="neutral")],
    inputs=inputs_alone,
    reference=reference_alone,
    sizes=[{"m": 8192, "n": 8192, "k": 4096}],
    check_sizes=[{"m": 33, "n": 40, "k": 24}],
    work=work_alone,
    bound="tensor",
    costs={library: product, autotuned_alone: product},
)
def test_max_autotune_alone(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
