"""Sliding-window attention: what comes from fusing, what from leaving tiles out.

Problem    Forward of attention in which a token sees itself and the `window` - 1 before it, bf16,
           heads of 128.
Baseline   dense: scores by `matmul`, mask, softmax in fp32, rounded to bf16, `matmul`.
Optimized  fused: the same mask given to `scaled_dot_product_attention`; PyTorch chooses the kernel.
           banded: as dense, but in blocks of `window` queries, each with the two blocks of keys it
           can see: 2 `window` scores a token instead of `tokens`.
           flex: both. FlexAttention, compiled, with a block mask, made before: tiles of 128 x 128
           outside the band are never visited.
Bound      dense: DRAM, 21 bytes a score as in long_attention_test.py: 8 heads of 8192^2 scores are
           11.3 GB, 2.7 ms at 4.24 TB/s.
           fused: tensor cores, with nothing skipped: 275 GFLOP. Kernels that take a mask are said
           to reach 200 to 350 TFLOP/s: 0.8 to 1.4 ms and 2x to 3.4x. The mask becomes a bias of
           bf16, 134 MB.
           banded: 16 times fewer scores than dense, 0.7 GB. Keys and values are padded, and copied
           because blocks overlap, 0.2 GB: 0.21 ms, 12x.
           flex: 3 tiles of keys for each tile of queries, 13 GFLOP, 0.05 ms at 250 TFLOP/s, and
           67 MB, 0.016 ms: 50x. So 3x is fusing, and the rest is what is left out. What any side
           must do is 8.6 GFLOP.
Seen       An H200: dense 8.5 ms, slower than predicted as in long_attention_test.py; fused 5.8x
           (1.45 ms, cuDNN's kernel), banded 12.8x, flex 148x (57 us). So 6x is fusing, and the rest
           is what is left out.
"""

import functools

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pytest_aisp import Variant, Work, compare

WIDTH = 128  # of a head


def inputs(device, heads, tokens, window):
    q, k = torch.randn(2, 1, heads, tokens, WIDTH, device=device)
    v = torch.rand(1, heads, tokens, WIDTH, device=device) * 2 - 1
    return (2 * q).bfloat16(), k.bfloat16(), v.bfloat16(), window


def reference(q, k, v, window):
    """Take every distance between query and key in turn."""
    heads, tokens = q.shape[1:3]
    scores = q.new_full((heads, tokens, window), -torch.inf, dtype=torch.float64)
    queries, keys, values = (x[0].double() for x in (q, k, v))
    for back in range(min(window, tokens)):
        products = queries[:, back:] * keys[:, : tokens - back]
        scores[:, back:, back] = products.sum(dim=-1) / WIDTH**0.5
    weights = scores.softmax(dim=-1)
    out = torch.zeros_like(queries)
    for back in range(min(window, tokens)):
        out[:, back:] += weights[:, back:, back, None] * values[:, : tokens - back]
    return out[None]


def seen(tokens, window, device):
    """Return which keys (columns) the queries (rows) see."""
    row = torch.arange(tokens, device=device)
    back = row[:, None] - row
    return (back >= 0) & (back < window)


def attend(q, k, v, mask):
    scores = (q * WIDTH**-0.5) @ k.mT  # q is smaller than the scores
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1, dtype=torch.float32)
    return weights.to(v.dtype) @ v


def dense(q, k, v, window):
    return attend(q, k, v, seen(q.shape[2], window, q.device))


def fused(q, k, v, window):
    return F.scaled_dot_product_attention(q, k, v, seen(q.shape[2], window, q.device))


def banded(q, k, v, window):
    tokens = q.shape[2]
    more = -tokens % window  # whole blocks
    blocks = F.pad(q, (0, 0, 0, more)).unflatten(2, (-1, window))
    # Block i of two windows of keys begins a window before block i of queries.
    keys, values = (F.pad(x, (0, 0, window, more)).unfold(2, 2 * window, window).mT for x in (k, v))
    mask = seen(2 * window, window, q.device)[window:].repeat(blocks.shape[2], 1, 1)
    mask[0, :, :window] = False  # nothing was before the first block
    return attend(blocks, keys, values, mask).flatten(2, 3)[:, :, :tokens]


@functools.cache
def compiled_attention():
    return torch.compile(flex_attention, dynamic=False)


@functools.cache  # one function a window: another would be compiled anew
def band(window):
    def sees(batch, head, query, key):
        return (query >= key) & (query - key < window)

    return sees


def flex(q, k, v, window):
    tokens, run = q.shape[2], compiled_attention()
    mask = create_block_mask(band(window), None, None, tokens, tokens, device=q.device)
    yield lambda: run(q, k, v, block_mask=mask)


def scores(tokens, window):
    full = min(tokens, window)
    return full * (full + 1) // 2 + (tokens - full) * full


@compare(
    baseline=dense,
    optimized=[
        Variant(fused, at_least={"sm90": 4.8}),
        Variant(banded, at_least={"sm90": 10.5}),
        Variant(flex, gpu_only="FlexAttention's Triton kernel", at_least={"sm90": 115.0}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"heads": 8, "tokens": 8192, "window": 256}],
    check_sizes=[
        {"heads": 3, "tokens": 77, "window": 16},
        {"heads": 2, "tokens": 99, "window": 33},
        {"heads": 1, "tokens": 9, "window": 33},
    ],
    work=lambda heads, tokens, window: Work(
        read=3 * 2 * heads * tokens * WIDTH,
        write=2 * heads * tokens * WIDTH,
        flops={"bf16": 4 * heads * scores(tokens, window) * WIDTH},
        terms=window,
        # As in long_attention_test.py: scores that win reach 9, and moved operands move them by
        # 2 * 2**0.5, so that rounding one counts for (9 / 2.8)**2, some 10.
        roundings=13,
    ),
    bound="dram",
)
def test_sliding_window(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
