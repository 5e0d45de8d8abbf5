"""Block-sparse attention: visit only the tiles in a list.

Problem    Compute bf16 attention of 16384 tokens, with 8 heads of 128. Tokens are in blocks of 64.
           A block of queries attends to `kept` blocks of keys: its own, the first block, and others
           that are spread over the sequence (the pattern of BigBird, arXiv:2007.14062). The pattern
           is the same in every call, and differs from head to head. Every side prepares its mask or
           list before the timed part.
Baseline   biased: `scaled_dot_product_attention` with an additive bf16 mask for every head. PyTorch
           chooses the kernel.
Optimized  tiled: changes `biased`. A Triton kernel reads one byte per tile instead of a mask value
           per score. The kernel computes all tiles, and masks the scores of tiles that are not
           kept.
           listed: like `tiled`, but the kernel loops over a list of the kept tiles.
           flex: changes `biased`. Compiled FlexAttention gets a block mask. By default, tiles have
           128 queries and 128 keys. So `flex` computes more scores than `listed`, and masks parts
           of its tiles.
Bound      The L2 limits `listed`, because each program of 64 queries reads its kept tiles of keys
           and values. The tensor cores take nearly as long as the L2. The L2 also limits `tiled`,
           for all tiles. Tensor cores limit `biased`, for all tiles. `biased` also reads two bytes
           of its mask for every score.
Seen       On an H100, `biased` and `flex` take much longer than predicted. We did not record which
           kernel PyTorch chose for `biased`. Nearly every tile of `flex` is kept only in part. In
           those tiles, `flex` loads a flag for each score, and the cost leaves out these loads. The
           times of `listed` at both sizes suggest that the start and end of a program take about as
           long as two tiles. The cost leaves out the start and the end, too.
Use when   A pattern is known before the call and leaves out most blocks. The saving depends on the
           tiles, not on the scores: a pattern that keeps one score in every tile saves nothing. Use
           flex if its tiles fit the pattern. For a sliding window, see
           `../ch13/sliding_window_test.py`.
"""

import functools

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pytest_aisp import Cost, Variant, Work, compare
from suites.rounding import to_even

from .split_kv import LOG2_E, product_operand, product_type, refuse

WIDTH = 128  # numbers of a head
TILE = 64  # queries and keys of a block
FLEX_TILE = 128


@triton.jit
def attend_kernel(
    q, k, v, out, entries, blocks, count, factor,
    LISTED: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Compute attention for a block of queries. `entries` lists or flags key blocks."""
    block, head = tl.program_id(0), tl.program_id(1)
    lane, within = tl.arange(0, WIDTH), tl.arange(0, TILE)
    first = head.to(tl.int64) * blocks * TILE
    queries = (first + block * TILE + within)[:, None] * WIDTH + lane[None, :]
    query = tl.load(q + queries).to(PRODUCT)
    row = entries + (head * blocks + block) * count
    top = tl.full((TILE,), float("-inf"), tl.float32)
    weight = tl.zeros((TILE,), tl.float32)
    total = tl.zeros((TILE, WIDTH), tl.float32)
    for i in range(0, count):
        entry = tl.load(row + i).to(tl.int32)
        other = entry if LISTED else i
        at = (first + other * TILE + within)[:, None] * WIDTH + lane[None, :]
        keys = product_operand(tl.load(k + at), PRODUCT)
        values = product_operand(tl.load(v + at), PRODUCT)
        scores = tl.dot(query, keys.T) * factor
        if not LISTED:
            scores = tl.where(entry != 0, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        # Before the first kept tile, a row's maximum is -inf.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(top - finite)
        p = tl.exp2(scores - finite[:, None])
        weight = weight * kept + tl.sum(p, axis=1)
        total = tl.dot(product_operand(p, PRODUCT), values, total * kept[:, None])
        top = higher
    result = to_even(total / weight[:, None], DROPPED=16).to(tl.bfloat16)
    tl.store(out + queries, result)


def pattern(heads, blocks, kept):
    """Return the key blocks of each query block, of shape (heads, blocks, kept)."""
    rows = []
    for head in range(heads):
        for block in range(blocks):
            seen = {0, block}
            step = 0
            while len(seen) < kept:
                seen.add((block * 7919 + head * 104729 + step * 31 + step * step) % blocks)
                step += 1
                if step > blocks:  # squares may repeat
                    seen.add(next(i for i in range(blocks) if i not in seen))
            rows.append(sorted(seen)[:kept])
    return torch.tensor(rows, dtype=torch.int32).view(heads, blocks, kept)


def checked(listed, blocks):
    """Return the list of key blocks. Raise `ValueError` if it names a block that does not exist."""
    if listed.shape[-1] == 0:
        raise ValueError("a block of queries sees 0 blocks of keys")
    if listed.min() < 0 or listed.max() >= blocks:
        raise ValueError(
            f"the list has blocks {listed.min()} to {listed.max()}, but there are {blocks}"
        )
    return listed


def flags(listed):
    """Return a uint8 flag for each tile: 1 if it is kept."""
    heads, blocks, _ = listed.shape
    return torch.zeros(heads, blocks, blocks, dtype=torch.uint8).scatter_(2, listed.long(), 1)


def inputs(device, heads, tokens, kept):
    q, k = torch.randn(2, 1, heads, tokens, WIDTH, device=device)
    v = torch.rand(1, heads, tokens, WIDTH, device=device) * 2 - 1
    return (2 * q).bfloat16(), k.bfloat16(), v.bfloat16(), kept


def reference(q, k, v, kept):
    heads, tokens = q.shape[1:3]
    listed = pattern(heads, tokens // TILE, kept).to(q.device).long()
    results = []
    for head in range(heads):
        queries, keys, values = (x[0, head].double().unflatten(0, (-1, TILE)) for x in (q, k, v))
        seen, meant = (x[listed[head]].flatten(1, 2) for x in (keys, values))
        weights = (queries @ seen.mT / WIDTH**0.5).softmax(dim=-1)
        results.append((weights @ meant).flatten(0, 1))
    return torch.stack(results)[None]


def biased(q, k, v, kept):
    heads, tokens = q.shape[1:3]
    seen = flags(pattern(heads, tokens // TILE, kept)).to(q.device).bool()
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)
    bias = bias.repeat_interleave(TILE, dim=1).repeat_interleave(TILE, dim=2)[None]
    yield lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def attended(q, k, v, entries, *, listed):
    _, heads, tokens, _ = q.shape
    if tokens % TILE:
        raise ValueError(f"{tokens} tokens are no multiple of the block of {TILE}")
    refuse("q", q, (1, heads, tokens, WIDTH))
    refuse("k", k, q.shape)
    refuse("v", v, q.shape)
    blocks, count = tokens // TILE, entries.shape[2]
    if entries.dtype != (torch.int32 if listed else torch.uint8):
        raise ValueError(f"entries are {entries.dtype}; a list is int32, and flags are uint8")
    if entries.shape[:2] != (heads, blocks) or not (listed or count == blocks):
        raise ValueError(f"entries are {tuple(entries.shape)} for {heads} heads, {blocks} blocks")
    out = torch.empty_like(q)
    attend_kernel[blocks, heads](
        q, k, v, out, entries, blocks, count, LOG2_E / WIDTH**0.5,
        LISTED=listed, TILE=TILE, WIDTH=WIDTH, PRODUCT=product_type(q),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def tiled(q, k, v, kept):
    heads, tokens = q.shape[1:3]
    all_flags = flags(pattern(heads, tokens // TILE, kept)).to(q.device)
    yield lambda: attended(q, k, v, all_flags, listed=False)


def listed(q, k, v, kept):
    heads, tokens = q.shape[1:3]
    numbers = checked(pattern(heads, tokens // TILE, kept), tokens // TILE).to(q.device)
    yield lambda: attended(q, k, v, numbers, listed=True)


@functools.cache
def compiled_attention():
    return torch.compile(flex_attention, dynamic=False)


def flex(q, k, v, kept):
    heads, tokens = q.shape[1:3]
    kept_tiles = flags(pattern(heads, tokens // TILE, kept)).to(q.device).bool()

    def sees(batch, head, query, key):
        return kept_tiles[head, query // TILE, key // TILE]

    mask = create_block_mask(sees, None, heads, tokens, tokens, device=q.device)
    run = compiled_attention()
    yield lambda: run(q, k, v, block_mask=mask)


@functools.cache
def flex_tiles(heads, tokens, kept):
    """Return how many tiles of 128 x 128 have a kept block."""
    ratio = FLEX_TILE // TILE
    tiles = flags(pattern(heads, tokens // TILE, kept)).float()[:, None]
    return int(F.max_pool2d(tiles, ratio, ceil_mode=True).sum())


def attending(heads, tokens, scores, extra, queries=FLEX_TILE):
    elements = heads * tokens * WIDTH
    return Cost(
        read=6 * elements + extra,
        write=2 * elements,
        l2=4 * scores * WIDTH / queries,  # each tile of queries reads keys and values
        sfu=scores,
        ops={"bf16": 4 * scores * WIDTH},
        launches=1,
    )


def biased_cost(heads, tokens, kept):
    scores = heads * tokens**2
    return attending(heads, tokens, scores, extra=2 * scores)


def tiled_cost(heads, tokens, kept):
    scores = heads * tokens**2
    return attending(heads, tokens, scores, scores / TILE**2, queries=TILE)


def listed_cost(heads, tokens, kept):
    rows = heads * tokens // TILE
    return attending(heads, tokens, rows * kept * TILE**2, 4 * rows * kept, queries=TILE)


def flex_cost(heads, tokens, kept):
    scores = flex_tiles(heads, tokens, kept) * FLEX_TILE**2
    return attending(heads, tokens, scores, extra=scores / TILE**2)


@compare(
    baseline=biased,
    optimized=[
        Variant(tiled, at_least="yardstick"),  # shows the kernel's effect without the list
        Variant(listed, at_least={"sm90": 4.6}),
        Variant(flex, gpu_only="FlexAttention's Triton kernel", at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"heads": 8, "tokens": 16384, "kept": 16}, {"heads": 8, "tokens": 16384, "kept": 64}],
    check_sizes=[
        {"heads": 2, "tokens": 4 * TILE, "kept": 2},
        {"heads": 1, "tokens": TILE, "kept": 1},
    ],
    work=lambda heads, tokens, kept: Work(
        read=6 * heads * tokens * WIDTH,
        write=2 * heads * tokens * WIDTH,
        flops={"bf16": 4 * heads * tokens * kept * TILE * WIDTH},
        terms=kept * TILE,
        # As in ../ch09/attention_test.py: a head's weights and outputs are rounded.
        roundings=16,
    ),
    bound="tensor",
    costs={biased: biased_cost, tiled: tiled_cost, listed: listed_cost, flex: flex_cost},
)
def test_block_sparse(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestRefused:
    """Making a wrong list is an error, and the launching helper rejects wrong inputs."""

    @pytest.mark.parametrize(
        ("blocks", "words"),
        [([0, 4], "blocks 0 to 4, but there are 4"), ([-1, 0], "blocks -1"), ([], "sees 0")],
    )
    def test_list(self, blocks, words):
        with pytest.raises(ValueError, match=words):
            checked(torch.tensor(blocks, dtype=torch.int32).view(1, 1, -1), 4)

    @pytest.mark.parametrize(
        ("shape", "words"),
        [
            ((1, 1, TILE, 64), r"q is \(1, 1, 64, 64\); .* takes \(1, 1, 64, 128\)"),
            ((1, 1, TILE + 1, WIDTH), "65 tokens are no multiple of the block of 64"),
            ((1, 1, 0, WIDTH), "it is empty"),
            ((1, 1, 2 * TILE, WIDTH), r"entries are \(1, 1, 1\) for 1 heads, 2 blocks"),
        ],
    )
    def test_shape(self, shape, words):
        q = torch.ones(shape).bfloat16()
        with pytest.raises(ValueError, match=words):
            attended(q, q, q, torch.zeros(1, 1, 1, dtype=torch.int32), listed=True)
