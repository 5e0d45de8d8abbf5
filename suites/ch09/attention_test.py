"""Attention: PyTorch's fused kernels keep the scores on the chip.

Problem    Compute attention without a mask, in bf16, with heads of 64 elements and 256 to 4096
           tokens. Heads times tokens is the same at each size, so the queries always take 32 MiB.
           The scores have a standard deviation of 3, which is typical of trained models.
Baseline   math: `matmul` computes the scores. The softmax of the scores is computed in fp32 and
           rounded to bf16. A second `matmul` multiplies the result by the values.
Optimized  Each variant calls `scaled_dot_product_attention` and selects one of its kernels.
           efficient: changes `math`. `SDPBackend.EFFICIENT_ATTENTION`, the kernel of xFormers,
           keeps tiles of scores on the chip.
           flash: changes `math`. `SDPBackend.FLASH_ATTENTION`, which is FlashAttention-2, also
           keeps tiles of scores on the chip. Its warps exchange less data through shared memory.
           cudnn: changes `math`. `SDPBackend.CUDNN_ATTENTION`, which on Hopper uses wgmma and TMA.
Bound      DRAM limits `math`: each step reads and writes all scores, so the time grows with heads
           times tokens squared. Tensor cores and exponentials limit the variants, and both times
           also grow with heads times tokens squared. With 64 elements per head, the tensor cores do
           256 operations for each exponential. On an H200, the exponentials alone take almost as
           long as the products alone, so a fast kernel has to overlap the two. The costs assume
           that the tensor cores run at their full rate. `efficient` and `flash` use `mma.sync`,
           which does not reach the full rate on Hopper (`../ch10/gemm_test.py`).
Seen       With 1024 tokens on an H100, `cudnn` takes about the time of its products plus the time
           of its exponentials, so the two hardly overlap. `efficient` and `flash` take longer than
           `cudnn`. The lower rate of `mma.sync` explains only part of the extra time of
           `efficient`. With 4096 tokens on an H200, all sides take longer than predicted, and
           `efficient` has the largest gap. With 256 tokens, `cudnn` comes close to the time of its
           DRAM traffic, but `efficient` and `flash` do not. With so few tokens, a block has few
           tiles of keys, so it probably cannot hide the start and the end of its loop. We did not
           profile these kernels.
Use when   Always call `scaled_dot_product_attention`, and let it choose the kernel. For 16-bit
           inputs, PyTorch's math backend computes in fp32, so it is slower than the baseline of
           this page. A causal mask, FlexAttention and longer contexts are in
           `../ch13/long_attention_test.py`.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_aisp import Cost, Sweep, Variant, Work, compare

WIDTH = 64  # elements of a head
TOTAL = 2**18  # heads times tokens
AT_ONCE = 2**26  # scores that the reference computes at a time


def inputs(device, heads, tokens):
    q, k = torch.randn(2, 1, heads, tokens, WIDTH, device=device)
    v = torch.rand(1, heads, tokens, WIDTH, device=device) * 2 - 1
    return (3 * q).bfloat16(), k.bfloat16(), v.bfloat16()


def reference(q, k, v):
    heads, tokens = q.shape[1:3]
    size = max(AT_ONCE // tokens**2, 1)
    results = []
    for start in range(0, heads, size):
        some = slice(start, start + size)
        queries, keys, values = (x[:, some].double() for x in (q, k, v))
        scores = queries @ keys.mT / WIDTH**0.5
        results.append(scores.softmax(dim=-1) @ values)
    return torch.cat(results, dim=1)


def math(q, k, v):
    scores = (q * WIDTH**-0.5) @ k.mT
    return scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v


def efficient(q, k, v):
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def flash(q, k, v):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def cudnn(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def in_steps(heads, tokens):
    elements, scores = heads * tokens * WIDTH, heads * tokens**2
    product = {"bf16": 2 * scores * WIDTH}
    return (
        Cost(read=2 * elements, write=2 * elements, launches=1)
        + Cost(read=4 * elements, write=2 * scores, ops=product, launches=1)
        + Cost(read=2 * scores, write=4 * scores, launches=1)  # to fp32
        + Cost(read=4 * scores, write=4 * scores, sfu=scores, launches=1)
        + Cost(read=4 * scores, write=2 * scores, launches=1)  # to bf16
        + Cost(read=2 * scores + 2 * elements, write=2 * elements, ops=product, launches=1)
    )


def on_chip(heads, tokens):
    elements, scores = heads * tokens * WIDTH, heads * tokens**2
    return Cost(
        read=6 * elements,
        write=2 * elements,
        sfu=scores,
        ops={"bf16": 4 * scores * WIDTH},
        launches=1,
    )


@compare(
    baseline=math,
    optimized=[
        Variant(efficient, gpu_only="memory-efficient attention"),
        flash,
        Variant(cudnn, gpu_only="cuDNN"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"heads": TOTAL // tokens, "tokens": tokens} for tokens in (256, 1024, 4096)],
    check_sizes=[{"heads": 3, "tokens": 33}, {"heads": 2, "tokens": 129}],
    work=lambda heads, tokens: Work(
        read=6 * heads * tokens * WIDTH,
        write=2 * heads * tokens * WIDTH,
        flops={"bf16": 4 * heads * tokens**2 * WIDTH},
        terms=tokens,
        # As in ch13/long_attention_test.py: rounding a score counts about 13 times.
        roundings=16,
    ),
    bound="tensor",
    costs={math: in_steps, **dict.fromkeys([efficient, flash, cudnn], on_chip)},
    sweep=Sweep("tokens"),
)
def test_attention(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=0.15)
