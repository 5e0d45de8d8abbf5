"""GQA and MQA decode: read the cache once per group of heads, with enough programs for every SM.

Problem    Compute bf16 attention of one new token per sequence, with 64 query heads and 128 numbers
           per head. With `groups=8`, 8 query heads share keys and values (GQA). With `groups=1`,
           all 64 query heads share keys and values (MQA). Two of the sizes have few sequences with
           long contexts. The cache is the page's state.
Baseline   per_head: a Triton kernel with one program per sequence and query head. Each program
           reads all keys and values of its group. A tensor-core product has at least 16 rows, so 15
           rows are empty.
Optimized  grouped: changes `per_head`. One program computes all query heads of a group as rows of
           one product, so the cache is read once.
           split: changes `grouped`. There is one program per `chunk` tokens of the context, and a
           second kernel joins the chunks' results (split-KV, also called Flash-Decoding).
           library: `scaled_dot_product_attention` with `enable_gqa=True`. PyTorch chooses the
           kernel.
Bound      DRAM limits `split`, because the cache is read once. The L2 limits `per_head`, because
           the programs of a group run at about the same time and read the same tiles. `grouped` has
           one program per sequence and group. If there are fewer programs than SMs, the rate at
           which an SM can read is the limit.
Seen       On an H100, `library` takes one and a half times as long as predicted with one group of
           heads and 16 sequences. In the same case, `split` reads at four fifths of the rate that
           DRAM allows. With few sequences, `grouped` takes longer than predicted from each SM's
           share of the L2 rate. An SM has only one program of 4 warps, which probably cannot keep
           enough bytes in flight to use that share.
Use when   Always group the heads. Split the context if the number of sequences times groups is
           smaller than the number of SMs. Choose the number of splits by the batch size, because
           the result of every chunk is written and read again. The same kernel on a cache of 8 bits
           is in `../ch19/kv_quantization_test.py`.
"""

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare
from suites.rounding import to_even

from .split_kv import (
    LOG2_E,
    join_parts,
    part_buffers,
    part_bytes,
    product_operand,
    product_type,
    refuse,
)

WIDTH = 128  # numbers of a head
ROWS = 16  # fewest rows of a tensor-core product
BLOCK = 64  # tokens of one step of a loop
SMS = 132  # of an H200, for costs


@triton.jit
def attend_kernel(
    q, k, v, out, sums, largest, weights, tokens, chunk_tokens, factor,
    SHARE: tl.constexpr, TAKEN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Compute attention of TAKEN query heads over a chunk of the cache that SHARE heads share."""
    item, chunk = tl.program_id(0), tl.program_id(1)
    row, lane = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    here = row[:, None] < TAKEN
    queries = (item * TAKEN + row[:, None]) * WIDTH + lane[None, :]
    query = tl.load(q + queries, mask=here, other=0.0).to(PRODUCT)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    first = (item * TAKEN // SHARE).to(tl.int64) * tokens
    end = tl.minimum(chunk * chunk_tokens + chunk_tokens, tokens)
    for start in range(chunk * chunk_tokens, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < end
        at = (first + token)[:, None] * WIDTH + lane[None, :]
        keys = product_operand(tl.load(k + at, mask=inside[:, None], other=0.0), PRODUCT)
        values = product_operand(tl.load(v + at, mask=inside[:, None], other=0.0), PRODUCT)
        scores = tl.where(inside[None, :], tl.dot(query, keys.T) * factor, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        kept = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        weight = weight * kept + tl.sum(p, axis=1)
        total = tl.dot(product_operand(p, PRODUCT), values, total * kept[:, None])
        top = higher
    if WHOLE:
        result = to_even(total / weight[:, None], DROPPED=16).to(tl.bfloat16)
        tl.store(out + queries, result, mask=here)
    else:
        part = (item * tl.num_programs(1) + chunk) * TAKEN + row
        tl.store(largest + part, top, mask=row < TAKEN)
        tl.store(weights + part, weight, mask=row < TAKEN)
        tl.store(sums + part[:, None] * WIDTH + lane[None, :], total, mask=here)


def state(device, batch, heads, groups, tokens, chunk):
    shape = (batch, groups, tokens, WIDTH)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]


def inputs(device, batch, heads, groups, tokens, chunk):
    # Larger queries give some tokens much more weight than others.
    return (2 * torch.randn(batch, heads, 1, WIDTH, device=device)).bfloat16(), chunk


def reference(cache, q, chunk):
    results = []
    for queries, keys, values in zip(q, *cache, strict=True):
        rows = queries.double().view(len(keys), -1, WIDTH)
        p = torch.softmax(rows @ keys.double().mT / WIDTH**0.5, dim=-1)
        results.append((p @ values.double()).view(queries.shape))
    return torch.stack(results)


def attended(q, k, v, taken, chunk_tokens):
    """Compute attention, with `taken` query heads and `chunk_tokens` tokens per program."""
    batch, groups, tokens = k.shape[:3]
    heads = q.shape[1]
    if tokens == 0:
        raise ValueError("the context has 0 tokens, so there is nothing to attend to")
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} query heads cannot share {groups} groups of keys")
    refuse("q", q, (batch, heads, 1, WIDTH))
    refuse("k", k, (batch, groups, tokens, WIDTH))
    refuse("v", v, k.shape)
    items, chunks = batch * heads // taken, triton.cdiv(tokens, chunk_tokens)
    out = torch.empty_like(q)
    whole = chunks == 1
    parts = [out] * 3 if whole else part_buffers(items, chunks, taken, WIDTH, q.device)
    attend_kernel[items, chunks](
        q, k, v, out, *parts, tokens, chunk_tokens, LOG2_E / WIDTH**0.5,
        SHARE=heads // groups, TAKEN=taken, ROWS=max(ROWS, triton.next_power_of_2(taken)),
        WIDTH=WIDTH, BLOCK=BLOCK, WHOLE=whole, PRODUCT=product_type(q), num_warps=4, num_stages=3,
    )  # fmt: skip
    if not whole:
        join_parts(parts, out, items, chunks, taken, WIDTH)
    return out


def per_head(cache, q, chunk):
    return attended(q, *cache, taken=1, chunk_tokens=cache[0].shape[2])


def grouped(cache, q, chunk):
    groups, tokens = cache[0].shape[1:3]
    return attended(q, *cache, taken=q.shape[1] // groups, chunk_tokens=tokens)


def split(cache, q, chunk):
    return attended(q, *cache, taken=q.shape[1] // cache[0].shape[1], chunk_tokens=chunk)


def library(cache, q, chunk):
    return F.scaled_dot_product_attention(q, *cache, enable_gqa=True)


def cache_bytes(batch, groups, tokens):
    return 4 * batch * groups * tokens * WIDTH


def attending(batch, heads, groups, tokens, programs, taken):
    cache, vectors = cache_bytes(batch, groups, tokens), 2 * batch * heads * WIDTH
    rounds = heads // groups // taken  # how often the L2 delivers the cache
    # Each SM gets an equal share of the L2 rate, so shares of idle SMs are lost.
    idle = max(1, SMS / programs)
    products = cache * rounds * max(ROWS, taken) * idle
    return Cost(
        read=cache + vectors,
        write=vectors,
        l2=cache * rounds * idle,
        sfu=products / (4 * WIDTH),  # empty rows too
        ops={"bf16": products},
        launches=1,
    )


def per_head_cost(batch, heads, groups, tokens, chunk):
    return attending(batch, heads, groups, tokens, batch * heads, taken=1)


def grouped_cost(batch, heads, groups, tokens, chunk):
    return attending(batch, heads, groups, tokens, batch * groups, taken=heads // groups)


def split_cost(batch, heads, groups, tokens, chunk):
    items, chunks, share = batch * groups, -(-tokens // chunk), heads // groups
    parts = part_bytes(items, chunks, share, WIDTH)
    attend = attending(batch, heads, groups, tokens, items * chunks, taken=share)
    return attend + Cost(write=parts) + Cost(read=parts, launches=1)


def library_cost(batch, heads, groups, tokens, chunk):
    return attending(batch, heads, groups, tokens, SMS, taken=heads // groups)


@compare(
    baseline=per_head,
    optimized=[grouped, split, Variant(library, at_least="yardstick")],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[
        {"batch": 32, "heads": 64, "groups": 8, "tokens": 8192, "chunk": 1024},
        {"batch": 4, "heads": 64, "groups": 8, "tokens": 65536, "chunk": 1024},
        {"batch": 16, "heads": 64, "groups": 1, "tokens": 65536, "chunk": 1024},
    ],
    check_sizes=[
        {"batch": 2, "heads": 4, "groups": 2, "tokens": 67, "chunk": 33},
        {"batch": 1, "heads": 3, "groups": 1, "tokens": 129, "chunk": 64},
    ],
    # As in ../ch09/attention_test.py: a head's weights and outputs are rounded.
    work=lambda batch, heads, groups, tokens, chunk: Work(
        read=cache_bytes(batch, groups, tokens), terms=tokens, roundings=16
    ),
    bound="dram",
    costs={
        per_head: per_head_cost,
        grouped: grouped_cost,
        split: split_cost,
        library: library_cost,
    },
)
def test_gqa_decode(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestRefused:
    """The launching helper rejects wrong inputs before the launch."""

    @pytest.mark.parametrize(
        ("q", "cache", "words"),
        [
            ((1, 64, 1, 64), (1, 8, 5, 64), r"q is \(1, 64, 1, 64\)"),
            ((1, 64, 1, WIDTH), (1, 8, 0, WIDTH), "0 tokens"),
            ((1, 64, 1, WIDTH), (1, 7, 5, WIDTH), "64 query heads cannot share 7 groups"),
            ((2, 64, 1, WIDTH), (1, 8, 5, WIDTH), r"takes \(1, 64, 1, 128\)"),
        ],
    )
    def test_shape(self, q, cache, words):
        with pytest.raises(ValueError, match=words):
            attended(torch.ones(q).bfloat16(), *[torch.ones(cache).bfloat16()] * 2, 1, 1024)

    def test_type(self):
        q, cache = torch.ones(1, 64, 1, WIDTH), torch.ones(1, 8, 5, WIDTH).bfloat16()
        with pytest.raises(ValueError, match=r"q is torch.float32; .* takes torch.bfloat16"):
            attended(q, cache, cache, 1, 1024)
