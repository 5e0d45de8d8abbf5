"""Shared code of the pages on forward attention: inputs, reference, work, costs, some sides."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytest_aisp import Cost, Work, cuda_module

WIDTH = 128  # of a head
SCALE = WIDTH**-0.5 * math.log2(math.e)  # of scores. Kernels use base-2 exponentials
AT_ONCE = 2**26  # scores that the reference holds at once
STAGED = 128 * 256 + 2 * 2 * 64 * 256 + 1024
"""Bytes of shared memory with mma.sync: queries, two stages of keys and values, alignment."""
tensor = cuda_module("cuda_attention_mma.cu")

# Part of one tile, one tile and part of a second, two tiles and part of a third.
CHECKED = [
    {"total": 66, "tokens": 33, "causal": False},
    {"total": 70, "tokens": 70, "causal": True},
    {"total": 131, "tokens": 131, "causal": False},
]
# Shape and type of queries that the kernels reject, and part of the error message.
REFUSED = [
    ((1, 2, 0, WIDTH), torch.bfloat16, "at least one token"),
    ((1, 2, 8, 64), torch.bfloat16, "heads of 128"),
    ((2, 2, 8, WIDTH), torch.bfloat16, "one shape"),
    ((1, 2, 8, WIDTH), torch.float32, "needs one type"),
]


def queries_keys_values(device, total, tokens, causal):
    """Return q, k and v of shape (1, heads, tokens, 128), and whether the mask is causal."""
    shape = (1, total // tokens, tokens, WIDTH)
    q, k = torch.randn(2, *shape, device=device)
    v = torch.rand(*shape, device=device) * 2 - 1
    return (3 * q).bfloat16(), k.bfloat16(), v.bfloat16(), causal


def in_float64(q, k, v, causal):
    """Return attention in float64. To save memory, only a part of a head is computed at a time."""
    out = torch.empty_like(q, dtype=torch.float64)
    heads, tokens = q.shape[1:3]
    rows = max(AT_ONCE // tokens, 1)
    for head in range(heads):
        queries, keys, values = (x[0, head].double() for x in (q, k, v))
        for start in range(0, tokens, rows):
            some = queries[start : start + rows]
            seen = start + len(some) if causal else tokens
            scores = some @ keys[:seen].mT / WIDTH**0.5
            if causal:
                future = torch.ones_like(scores, dtype=torch.bool).triu(start + 1)
                scores = scores.masked_fill(future, -torch.inf)
            out[0, head, start : start + len(some)] = scores.softmax(dim=-1) @ values[:seen]
    return out


def shape_of(q, k, v, types=(torch.bfloat16,)):
    """Return the numbers of heads and tokens.

    Raises:
        ValueError: if the kernels do not take these tensors.
    """
    if not q.shape == k.shape == v.shape or q.dim() != 4 or q.shape[0] != 1:
        raise ValueError(f"q, k and v need one shape (1, heads, tokens, {WIDTH}): {q.shape}")
    if q.shape[-1] != WIDTH or not q.numel():
        raise ValueError(f"needs heads of {WIDTH} and at least one token, not {tuple(q.shape)}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in types:
        raise ValueError(f"needs one type of {types}, not {q.dtype}, {k.dtype} and {v.dtype}")
    return q.shape[1], q.shape[2]


def scores_of(total, tokens, causal, tile):
    """Return how many scores are computed if causal kernels skip the tiles above the diagonal."""
    return total * (tokens + tile) / 2 if causal else total * tokens


def fused(total, scores, **more):
    """Return the cost of one kernel whose scores stay on the chip."""
    elements = total * WIDTH
    return Cost(
        read=6 * elements,
        write=2 * elements,
        sfu=scores,
        ops={"bf16": 4 * scores * WIDTH},
        launches=1,
        **more,
    )


def work_of(total, tokens, causal):
    seen = (tokens + 1) / 2 if causal else tokens
    return Work(
        read=6 * total * WIDTH,
        write=2 * total * WIDTH,
        flops={"bf16": 4 * total * seen * WIDTH},
        terms=tokens,
        # As in ch13/long_attention_test.py: rounding a score counts about 13 times.
        roundings=16,
    )


def sizes(*lengths):
    return [
        {"total": 2**17, "tokens": tokens, "causal": causal}
        for causal in (False, True)
        for tokens in lengths
    ]


def mma_sync(q, k, v, causal):
    heads, tokens = shape_of(q, k, v)
    out = torch.empty_like(q)
    launch = tensor.mma_sync[(-(-tokens // 128), heads), 128, STAGED]
    launch(q, k, v, out, tokens, SCALE, int(causal))
    return out


def flash(q, k, v, causal):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def cudnn(q, k, v, causal):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def mma_cost(total, tokens, causal):
    """Return the cost of a kernel with `mma.sync`, whose exponentials do not overlap products.

    The kernel computes tiles of 128 x 64 scores, 32 x 64 per warp.

    On Hopper, `mma.sync` reaches 63 % of the tensor cores' rate (arXiv 2501.12084), so the cost
    divides operations by that share.
    """
    scores = scores_of(total, tokens, causal, 64)
    matrices = 8 * (2 + 4) + 4 * 8  # of 512 bytes each, read by a warp
    per_score = (4 * matrices * 512 + 2 * 64 * 256) / (128 * 64)
    cost = fused(total, scores, shared=per_score * scores, l2=4 * WIDTH * scores / 128)
    products = {"bf16": cost.ops["bf16"] / 0.63}
    return replace(cost, ops=products, sfu=0) + Cost(sfu=cost.sfu)


def library_cost(total, tokens, causal):
    return fused(total, scores_of(total, tokens, causal, 128))
