"""GEMV and small batches: decoding reads each weight once, whatever it computes with it.

Problem    x w^T with w (n, k), x (m, k) and results in bf16, sums in fp32. A layer does this when
           it decodes m tokens. test_gemv has one token. test_small_batch is a curve over 2 to 16.
Baseline   scalar: a warp per row of w, CUDA C++. A lane loads one element of 2 bytes at a time.
           one_by_one: a GEMV by `torch.mv` for each token.
Optimized  vectorized: of scalar. A lane loads eight elements of 16 bytes at a time.
           gemv_library: `torch.mv`.
           together: of one_by_one. One kernel that multiplies each weight it has loaded with all
           tokens, on the CUDA cores. With one token it would be vectorized.
           gemm_library: of one_by_one. `torch.nn.functional.linear` with all tokens.
Bound      DRAM, which has to deliver w once. In test_gemv scalar has too few bytes in flight.
           The compiler unrolls its loop, but keeps a test between the loads. So a thread waits for
           each of its weights. 2048 threads of an SM with one load of 2 bytes have 4 KiB, and about
           13 KiB are needed. vectorized has eight times as many bytes per load.
           In test_small_batch one_by_one reads w again for each token, since w is larger than the
           L2. together needs m multiply-adds, and conversions for them, for each weight. From about
           6 tokens on, these instructions take longer than the bytes of w. x of 16 tokens has
           512 KiB, which is more than an L1 holds, so each block reads it from the L2 again. This
           takes less time than the instructions, if the warps of a block share what they read. The
           tensor cores of gemm_library are idle most of the time at all these sizes.
Seen       From 4 tokens on, together takes longer than its cost, and gemm_library is faster. Its
           times are near to those of a kernel in which each warp reads all tokens from the L2
           again. So probably the warps of a block share little of what they read. No counter has
           shown that yet. gemm_library takes the same time for 2 tokens as for 16.
Use when   You write a kernel for weights that no library knows, such as quantized ones: give each
           lane 16 bytes of weights per load, and keep one sum for each token. For bf16 weights call
           the library, which is faster from 4 tokens on. And batch: while the bytes of w are the
           limit, another token is almost free. `../ch12/decode_loop_test.py` runs one layer after
           another as a CUDA graph.
"""

import torch
import torch.nn.functional as F

from pytest_aisp import Cost, Sweep, Variant, Work, compare, cuda_module

kernels = cuda_module("gemv.cu")
WARPS = 8  # of a block, and each has a row
SMS = 132  # of an H200
L1 = 256 * 2**10  # of an SM
THREADS = 2048  # of an SM
# A load takes about 0.4 us: 0.34 us for an idle DRAM, and the rest for the instructions around it.
# In that time, the GPU could do this many operations at its fp32 rate.
WAIT = 2.4e7


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
        2: kernels.together_2,
        4: kernels.together_4,
        8: kernels.together_8,
        16: kernels.together_16,
    }
    return launch(found[len(x)], x, w)


def gemm_library(x, w):
    return F.linear(x, w)


def scalar_cost(m, n, k):
    # The threads of all SMs wait for one weight each, and then for the next one.
    ops = {"fp32": WAIT * n * k / (SMS * THREADS)}
    return Cost(read=2 * (n + m) * k, write=2 * m * n, ops=ops, launches=1)


def together_cost(m, n, k):
    # Eight weights need a load and 8 conversions; with each token, as many again and 8 sums.
    # Each instruction takes the slot of a multiply-add.
    ops = {"fp32": 2 * (9 + 17 * m) / 8 * n * k}
    # Every block of 8 rows reads all tokens. An L1 of 256 KiB keeps them if they are few.
    tokens = 2 * m * k * (n // WARPS if 2 * m * k >= L1 else SMS)
    return Cost(read=2 * (n + m) * k, write=2 * m * n, l2=2 * n * k + tokens, ops=ops, launches=1)


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
        Variant(vectorized, sass="LDG.E.128", at_least={"sm90": 2.1}),
        Variant(gemv_library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 1, "n": 16384, "k": 16384}],
    check_sizes=[{"m": 1, "n": 33, "k": 264}, {"m": 1, "n": 3, "k": 1032}],
    work=work,
    bound="dram",
    costs={
        scalar: scalar_cost,
        **dict.fromkeys([vectorized, gemv_library], together_cost),
    },
)
def test_gemv(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=one_by_one,
    optimized=[
        Variant(together, at_least={"sm90": 1.7}),
        Variant(gemm_library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": m, "n": 16384, "k": 16384} for m in (2, 4, 8, 16)],
    check_sizes=[{"m": m, "n": 9, "k": 264} for m in (2, 4, 8, 16)],
    work=work,
    bound="dram",
    costs={one_by_one: one_by_one_cost, together: together_cost, gemm_library: gemm_cost},
    sweep=Sweep("m"),
)
def test_small_batch(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
