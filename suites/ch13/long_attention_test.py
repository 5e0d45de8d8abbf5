"""Causal attention over a long context: do not write the scores to memory.

Problem    Run the forward pass of causal attention in bf16, with a head dimension of 128, for 16384
           and 32768 tokens. The scores have a standard deviation of 3, which is typical of trained
           models. So each query gives most of its weight to a few keys, and outputs are nearly as
           large as values.
Baseline   eager: computes the scores by `matmul`, applies the mask, computes the softmax in fp32,
           rounds to bf16, and multiplies by the values.
Optimized  flash: changes `eager`. One kernel does all steps: the FlashAttention-2 that comes with
           PyTorch. Tiles of scores stay in registers. Tiles above the diagonal are not computed.
           cudnn: changes `flash`. The kernel is cuDNN's kernel for Hopper, which uses wgmma and
           TMA.
           flex: changes `flash`. The kernel is compiled FlexAttention. The mask is a Python
           function. A block mask, built before the timed part, lists the tiles to skip.
Bound      DRAM limits `eager`: every step reads and writes all scores. The softmax also converts
           the scores to fp32 in a separate step. Tensor cores limit the variants, for the causal
           half of the matrix products. The exponentials take about a third of the time of these
           products.
Seen       `flash`, `cudnn` and `flex` take longer than their matrix products alone. `flash` uses
           `mma.sync`, which does not reach the rate of wgmma on Hopper (ch10/gemm_test.py). If
           exponentials and matrix products do not overlap, their sum explains the time of `cudnn`.
           We did not measure the overlap, or the steps of `eager` one by one. We cannot fully
           explain the times of `flash`, `flex` and `eager`.
Use when   Always with a long context, even in training: the memory of `eager` grows with the square
           of the length. On Hopper, choose `cudnn`. Use flex when no library kernel supports the
           mask. The page leaves out FlashAttention-3, which had no wheel in November 2026.
"""

import functools

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pytest_aisp import Cost, Variant, Work, compare

from . import attention_cost

WIDTH = 128  # elements per head
ROWS = 4096  # queries that the reference processes at a time, with up to 1 GB of float64 scores
TILE = 128  # queries and keys per tile of scores


def inputs(device, heads, tokens):
    q, k = torch.randn(2, 1, heads, tokens, WIDTH, device=device)
    v = torch.rand(1, heads, tokens, WIDTH, device=device) * 2 - 1
    return (3 * q).bfloat16(), k.bfloat16(), v.bfloat16()


def reference(q, k, v):
    out = torch.empty_like(q, dtype=torch.float64)
    for head in range(q.shape[1]):
        queries, keys, values = (x[0, head].double() for x in (q, k, v))
        for start in range(0, len(queries), ROWS):
            rows = queries[start : start + ROWS]
            seen = start + len(rows)
            scores = rows @ keys[:seen].mT / WIDTH**0.5
            future = torch.ones_like(scores, dtype=torch.bool).triu(start + 1)
            weights = scores.masked_fill_(future, -torch.inf).softmax(dim=-1)
            out[0, head, start:seen] = weights @ values[:seen]
    return out


def eager(q, k, v):
    tokens = q.shape[2]
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    scores = (q * WIDTH**-0.5) @ k.mT  # scale q, which is smaller than the scores
    weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1, dtype=torch.float32)
    return weights.to(v.dtype) @ v


def flash(q, k, v):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def cudnn(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@functools.cache
def compiled_attention():
    return torch.compile(flex_attention, dynamic=False)


def no_future(batch, head, query, key):
    return query >= key


def flex(q, k, v):
    tokens = q.shape[2]
    mask = create_block_mask(no_future, None, None, tokens, tokens, device=q.device)
    attend = compiled_attention()
    yield lambda: attend(q, k, v, block_mask=mask)


def eager_cost(heads, tokens):
    elements, scores = heads * tokens * WIDTH, heads * tokens**2
    mask = Cost(write=tokens**2, launches=1)
    mask += Cost(read=tokens**2, write=tokens**2, launches=1)
    # The mask does not fit in the L2, so it is read from DRAM for each head.
    return mask + attention_cost.attended(elements, scores, WIDTH, mask=scores)


def causal(heads, tokens):
    """Return the cost of a fused kernel that skips the tiles above the diagonal."""
    scores = heads * tokens * (tokens + TILE) / 2
    return attention_cost.fused(heads * tokens * WIDTH, scores, WIDTH)


@compare(
    baseline=eager,
    optimized=[
        Variant(flash, at_least={"sm90": 9.5}),
        Variant(cudnn, gpu_only="cuDNN", at_least={"sm90": 20.0}),
        Variant(flex, gpu_only="FlexAttention's Triton kernel", at_least={"sm90": 14.0}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"heads": 4, "tokens": 16384}, {"heads": 1, "tokens": 32768}],
    check_sizes=[{"heads": 3, "tokens": 33}, {"heads": 1, "tokens": 513}],
    work=lambda heads, tokens: Work(
        read=3 * 2 * heads * tokens * WIDTH,
        write=2 * heads * tokens * WIDTH,
        flops={"bf16": 2 * heads * tokens * (tokens + 1) * WIDTH},
        terms=tokens,
        # Each side rounds the scaled queries, the weights and the outputs, which is 3 roundings,
        # and also the scores. The largest scores are about 16, so this error is larger than the
        # error from rounding q and k, which is 3 * 2**0.5 (about 4.2) roundings. Rounding a score
        # counts as (16 / 4.2)**2, about 13 roundings.
        roundings=16,
    ),
    bound="tensor",
    costs={eager: eager_cost, flash: causal, cudnn: causal, flex: causal},
)
def test_long_attention(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=0.1)
