"""GEMV and small batches: decoding reads each weight once, whatever it computes with it.

Problem    x w^T with w (n, k), x (m, k) and results in bf16, sums in fp32. A layer does this when
           it decodes m tokens. test_gemv has one token. test_small_batch is a curve over 1 to 16.
Baseline   scalar: a warp per row of w, CUDA C++. A lane loads one element of 2 bytes at a time.
           one_by_one: a GEMV by `torch.mv` for each token.
Optimized  vectorized: of scalar. A lane loads eight elements of 16 bytes at a time.
           gemv_library: `torch.mv`.
           together: of one_by_one. One kernel that multiplies each weight it has loaded with all
           tokens, on the CUDA cores. With one token it is vectorized, and nothing is claimed.
           gemm_library: of one_by_one. `torch.nn.functional.linear` with all tokens.
Bound      DRAM, which has to deliver w once. one_by_one reads w again for each token, since it is
           larger than the L2. together needs m multiply-adds, and loads and conversions for them,
           for each weight. So from some batch on, the instructions of together take longer than the
           bytes of w. The tensor cores of gemm_library are idle most of the time at all these
           sizes.
Use when   You write a kernel for weights that no library knows, such as quantized ones: give each
           lane 16 bytes of weights per load, and keep one sum for each token. For bf16 weights call
           the library. And batch: the second token costs almost nothing. A layer after the other
           as one CUDA graph is `../ch12/decode_loop_test.py`.
"""

import torch
import torch.nn.functional as F

from pytest_aisp import Cost, Sweep, Variant, Work, compare, cuda_module

kernels = cuda_module("gemv.cu")
WARPS = 8  # of a block, and each has a row


def inputs(device, m, n, k):
    x = torch.randn(m, k, device=device).bfloat16()
    return x, (torch.randn(n, k, device=device) / k**0.5).bfloat16()


def reference(x, w):
    return x.double() @ w.double().mT


def launch(kernel, x, w):
    n, k = w.shape
    out = torch.empty(len(x), n, device=x.device, dtype=x.dtype)
    kernel[-(-n // WARPS), 32 * WARPS](w, x, out, n, k)
    return out


def scalar(x, w):
    return launch(kernels.scalar, x, w)


def vectorized(x, w):
    return launch(kernels.vectorized, x, w)


def gemv_library(x, w):
    return torch.mv(w, x[0])[None]


def one_by_one(x, w):
    return torch.stack([torch.mv(w, token) for token in x])


def together(x, w):
    found = {
        1: kernels.vectorized,
        2: kernels.together_2,
        4: kernels.together_4,
        8: kernels.together_8,
        16: kernels.together_16,
    }
    return launch(found[len(x)], x, w)


def gemm_library(x, w):
    return F.linear(x, w)


def gemv(n, k, instructions):
    """Return the cost of one token. A multiply-add needs this many instructions, itself included.

    Each takes the slot of a multiply-add.
    """
    ops = {"fp32": 2 * instructions * n * k}
    return Cost(read=2 * (n + 1) * k, write=2 * n, ops=ops, launches=1)


def together_cost(m, n, k):
    # Eight weights need a load and 8 conversions; with each token, as many again and 8 sums.
    ops = {"fp32": 2 * (9 + 17 * m) / 8 * n * k}
    return Cost(read=2 * (n + m) * k, write=2 * m * n, ops=ops, launches=1)


def one_by_one_cost(m, n, k):
    return m * Cost(read=2 * (n + 1) * k, write=2 * n, ops={"fp32": 2 * n * k}, launches=1) + Cost(
        read=2 * m * n, write=2 * m * n, launches=1
    )


def gemm_cost(m, n, k):
    ops = {"bf16": 2 * m * n * k}
    return Cost(read=2 * (n + m) * k, write=2 * m * n, ops=ops, launches=1)


def work(m, n, k):
    return Work(read=2 * (n + m) * k, write=2 * m * n, terms=k)


@compare(
    baseline=scalar,
    optimized=[
        Variant(vectorized, sass="LDG.E.128"),
        Variant(gemv_library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 1, "n": 16384, "k": 16384}],
    check_sizes=[{"m": 1, "n": 33, "k": 264}, {"m": 1, "n": 3, "k": 1032}],
    work=work,
    bound="dram",
    costs={
        scalar: lambda m, n, k: gemv(n, k, instructions=5),
        vectorized: lambda m, n, k: together_cost(1, n, k),
        gemv_library: lambda m, n, k: together_cost(1, n, k),
    },
)
def test_gemv(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=one_by_one,
    optimized=[together, Variant(gemm_library, at_least="yardstick")],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": m, "n": 16384, "k": 16384} for m in (1, 2, 4, 8, 16)],
    check_sizes=[{"m": m, "n": 9, "k": 264} for m in (1, 2, 4, 8, 16)],
    work=work,
    bound="dram",
    costs={one_by_one: one_by_one_cost, together: together_cost, gemm_library: gemm_cost},
    sweep=Sweep("m", judged=[2, 4, 8, 16]),
)
def test_small_batch(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
