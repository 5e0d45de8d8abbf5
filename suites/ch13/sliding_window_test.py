"""Sliding-window attention: fuse the passes over the scores, and skip masked tiles.

Problem    Run the forward pass of attention in bf16 with a head dimension of 128. A token attends
           to itself and the previous `window` - 1 tokens. Every side builds its mask before the
           timed part.
Baseline   dense: computes all scores by `matmul`, applies the mask, computes the softmax in fp32,
           rounds to bf16, and multiplies by the values.
Optimized  fused: changes `dense`. `scaled_dot_product_attention` gets the mask of `dense` as a
           bias. PyTorch chooses the kernel.
           banded: changes `dense`. The queries are processed in blocks of `window`. Each block
           attends to two blocks of keys, so there are 2 * `window` scores per token instead of
           `tokens`.
           flex: changes `fused`. Compiled FlexAttention gets a block mask and, as in `banded`,
           skips all tiles of 128 x 128 outside the band.
Bound      DRAM limits `dense` and `banded`, because every step reads and writes all scores. Tensor
           cores limit the fused kernel, which also computes the masked scores. DRAM and tensor
           cores limit `flex` about equally: `flex` moves q, k, v and the output once, and computes
           3 tiles of keys per tile of queries.
Seen       On an H200, `dense` and `banded` take almost twice as long as predicted, fused more than
           twice, and `flex` about three times. The costs assume the full rates of DRAM and of the
           tensor cores. We did not time the steps of `dense` and `banded` one by one, or the phases
           of the fused kernels, so the causes are not known. The speedups of `fused` and `banded`
           are close to the predicted speedups. The speedup of `flex` is about 60 % of its
           prediction.
Use when   A model attends within a window that is much shorter than the sequence. `flex` is about
           eleven times as fast as `banded`. Without FlexAttention, blocks of `window` queries are
           only somewhat faster than the fused kernel with a mask. If the window is about as long as
           the sequence, hardly any tiles can be skipped, so use the fused kernel.
"""

import functools

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pytest_aisp import Cost, Variant, Work, compare

from . import attention_cost
from .attention_cost import attended

WIDTH = 128  # elements per head


def inputs(device, heads, tokens, window):
    q, k = torch.randn(2, 1, heads, tokens, WIDTH, device=device)
    v = torch.rand(1, heads, tokens, WIDTH, device=device) * 2 - 1
    return (2 * q).bfloat16(), k.bfloat16(), v.bfloat16(), window


def reference(q, k, v, window):
    """Loop over the distance between query and key, from 0 to `window` - 1."""
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
    """Return a (tokens, tokens) bool mask: True where a query (row) attends to a key (column)."""
    row = torch.arange(tokens, device=device)
    back = row[:, None] - row
    return (back >= 0) & (back < window)


def attend(q, k, v, hidden):
    scores = (q * WIDTH**-0.5) @ k.mT  # scale q, which is smaller than the scores
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1, dtype=torch.float32)
    return weights.to(v.dtype) @ v


def dense(q, k, v, window):
    hidden = ~seen(q.shape[2], window, q.device)
    yield lambda: attend(q, k, v, hidden)


def fused(q, k, v, window):
    tokens = q.shape[2]
    hidden = ~seen(tokens, window, q.device)
    # PyTorch would convert a Boolean mask to this bias in every call.
    bias = q.new_zeros(tokens, tokens).masked_fill_(hidden, -torch.inf)
    yield lambda: F.scaled_dot_product_attention(q, k, v, bias)


def banded(q, k, v, window):
    tokens = q.shape[2]
    more = -tokens % window  # fills the last block
    hidden = ~seen(2 * window, window, q.device)[window:].repeat((tokens + more) // window, 1, 1)
    hidden[0, :, :window] = True  # there are no keys before the first block

    def call():
        blocks = F.pad(q, (0, 0, 0, more)).unflatten(2, (-1, window))
        # Block i of keys is two windows long, and begins one window before block i of queries.
        keys, values = (
            F.pad(x, (0, 0, window, more)).unfold(2, 2 * window, window).mT for x in (k, v)
        )
        return attend(blocks, keys, values, hidden).flatten(2, 3)[:, :, :tokens]

    yield call


@functools.cache
def compiled_attention():
    return torch.compile(flex_attention, dynamic=False)


@functools.cache  # one function per window, so that FlexAttention compiles once per window
def band(window):
    def sees(batch, head, query, key):
        return (query >= key) & (query - key < window)

    return sees


def flex(q, k, v, window):
    tokens, run = q.shape[2], compiled_attention()
    mask = create_block_mask(band(window), None, None, tokens, tokens, device=q.device)
    yield lambda: run(q, k, v, block_mask=mask)


def dense_cost(heads, tokens, window):
    scores = heads * tokens**2
    # The mask does not fit in the L2, so it is read from DRAM for each head.
    return attended(heads * tokens * WIDTH, scores, WIDTH, mask=scores)


def fused_cost(heads, tokens, window):
    scores = heads * tokens**2
    return attention_cost.fused(heads * tokens * WIDTH, scores, WIDTH, bias=2 * scores)


def banded_cost(heads, tokens, window):
    elements = heads * tokens * WIDTH
    return (
        Cost(read=2 * elements, write=2 * elements, launches=1)  # pad copies q, even by 0 rows
        + 2 * Cost(write=2 * elements, launches=1)  # pad keys and values: fill with zeros,
        + 2 * Cost(read=2 * elements, write=2 * elements, launches=1)  # and copy
        # Blocks of keys overlap, and so do blocks of values. matmul copies both, to twice the size.
        + 2 * Cost(read=2 * elements, write=4 * elements, launches=1)
        + attended(elements, 2 * window * heads * tokens, WIDTH, mask=2 * window * tokens)
    )


TILE = 128  # queries and keys per tile in FlexAttention


def flex_cost(heads, tokens, window):
    scores = heads * tokens * (window // TILE + 1) * TILE
    return attention_cost.fused(heads * tokens * WIDTH, scores, WIDTH)


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
        # Counted as in long_attention_test.py: 3 roundings, and the rounding of the scores. The
        # largest scores are about 9. The error from rounding q and k is 2 * 2**0.5 (about 2.8)
        # roundings, so rounding a score counts as (9 / 2.8)**2, about 10 roundings.
        roundings=13,
    ),
    bound="dram",
    costs={dense: dense_cost, fused: fused_cost, banded: banded_cost, flex: flex_cost},
)
def test_sliding_window(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
