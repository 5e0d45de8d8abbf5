"""GEMV and small batches: decoding has to read each weight once, for one token or for several.

Problem    Compute x w^T, where w is (n, k) and x is (m, k). Inputs and results are bf16, and sums
           are fp32. A linear layer computes this product to decode m tokens. test_gemv has one
           token. test_small_batch has 2, 4, 8 and 16 tokens.
Baseline   scalar: a CUDA C++ kernel with one warp per row of w. A lane loads one element of 2 bytes
           at a time.
           one_by_one: calls `torch.mv` once per token.
Optimized  vectorized: changes `scalar`. A lane loads 16 bytes at a time, which are eight elements.
           gemv_library: `torch.mv`.
           together: changes `one_by_one`. One kernel loads each weight once and multiplies it with
           all tokens, on the CUDA cores. With one token, this kernel would be the same as
           `vectorized`.
           gemm_library: changes `one_by_one`. One call of `torch.nn.functional.linear` computes all
           tokens.
Bound      DRAM, because w has to be read once. In test_gemv, `scalar` has too few bytes in flight.
           The compiler unrolls the loop, but keeps a branch between the loads. So a thread waits
           for each weight before it loads the next one. With one 2-byte load for each of 2048
           threads, an SM has 4 KiB in flight, but needs about 13 KiB to use all of the DRAM
           bandwidth. `vectorized` loads eight times as many bytes at a time. In test_small_batch,
           `one_by_one` reads w again for each token, because w is larger than the L2. For each
           weight, `together` needs m multiply-adds and the conversions to fp32. With about 6 tokens
           or more, these instructions take longer than loading w. With 16 tokens, x is 512 KiB. An
           L1 cannot hold that much, so each block reads x from the L2 again. If the warps of a
           block share these reads, the reads take less time than the instructions. `gemm_library`
           uses tensor cores, which are idle most of the time at all these sizes.
Seen       From 4 tokens on, `together` takes longer than its cost, and `gemm_library` is faster.
           The times of `together` are about what a kernel would take if each warp read all tokens
           from the L2 again. So the warps of a block probably share few of their reads. We have not
           confirmed this with hardware counters. `gemm_library` takes the same time for 2 tokens
           and for 16 tokens.
Use when   You write a kernel for weights that no library supports, such as quantized weights. Let
           each lane load 16 bytes of weights at a time, and keep one sum for each token. For bf16
           weights, call the library, which is faster than `together` from 4 tokens on. Process
           tokens in batches: as long as loading w is the limit, an additional token takes almost no
           time. `../ch12/decode_loop_test.py` captures a decode loop in a CUDA graph.
"""

import torch
import torch.nn.functional as F

from pytest_aisp import Cost, Sweep, Variant, Work, compare, cuda_module

kernels = cuda_module("gemv.cu")
WARPS = 8  # of a block; each warp processes one row of w
SMS = 132  # of an H200
L1 = 256 * 2**10  # of an SM
THREADS = 2048  # of an SM
# A load takes about 0.4 us: 0.34 us from an idle DRAM, and the rest for the instructions around the
# load. WAIT is the number of fp32 operations that the GPU could do in 0.4 us.
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
    # Each thread waits for one weight, and only then loads the next one.
    ops = {"fp32": WAIT * n * k / (SMS * THREADS)}
    return Cost(read=2 * (n + m) * k, write=2 * m * n, ops=ops, launches=1)


def together_cost(m, n, k):
    # Eight weights need one load and 8 conversions. Each token adds one load, 8 conversions and 8
    # multiply-adds. Each instruction counts as a multiply-add.
    ops = {"fp32": 2 * (9 + 17 * m) / 8 * n * k}
    # Every block of 8 rows reads all tokens, from the L1 if they fit in its 256 KiB.
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
