"""Paged decode: read the pages where they are instead of gathering them first.

Problem    Compute bf16 attention of one new token per sequence, with 64 query heads in 8 groups and
           128 numbers per head. Keys and values are in pages of `page` tokens. All sequences share
           one pool of pages, and a table lists the pages of each sequence. The lengths of sequences
           are between half of `tokens` and `tokens`. Pool, table and lengths are the page's state.
Baseline   gathered: index the pool by the table, so every sequence gets a contiguous copy, padded
           to the longest sequence. Then call `scaled_dot_product_attention`. The heads of a group
           become queries of one head, because PyTorch's fast kernels do not support grouped heads
           together with a mask. The mask is made before the timed part.
Optimized  copied: like `gathered`, but a Triton kernel computes attention over the copy. There is
           one program per sequence, group, and `chunk` tokens. A second kernel joins the chunks'
           results.
           paged: like `copied`, without the copy. The kernel looks up each page in the table one
           step before it reads the page. So Triton can prefetch keys and values, as it does in
           `copied`.
           contiguous: changes `paged`. The cache is contiguous, and is made before the timed part.
           `contiguous` only shows what the table costs, because a server that uses pages has no
           contiguous cache.
Bound      DRAM limits `paged`, because each page is read once. The numbers of a token and group are
           256 contiguous bytes. The table adds 4 bytes per page. `gathered` reads the pool, writes
           the padded copy, and reads the copy again.
Use when   Always, when the cache has pages. The fused attention kernels of inference servers also
           look up pages in the table. Gather only if a kernel does not support a table, for example
           in a prefill, where the copy takes little time compared with the products.
           `../ch13/kv_cache_test.py` shows how pages are filled. A wrong table entry would read the
           cache of another user. So check a table on the host when you make it. After a check on
           the GPU, the host would have to wait for the result.
"""

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare

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


@triton.jit
def attend_kernel(
    q, k, v, table, lengths, out, sums, largest, weights, pages, factor,
    PAGED: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Compute attention over a chunk. Keys and values of a token have shape (groups, WIDTH)."""
    group, sequence, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    groups = tl.num_programs(0)
    item = sequence * groups + group
    row, lane = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    here = row[:, None] < SHARE
    queries = (item * SHARE + row[:, None]) * WIDTH + lane[None, :]
    query = tl.load(q + queries, mask=here, other=0.0).to(PRODUCT)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    end = tl.minimum(chunk * CHUNK + CHUNK, tl.load(lengths + sequence))
    # Page numbers are loaded a step ahead, so Triton can prefetch keys and values.
    token = chunk * CHUNK + tl.arange(0, BLOCK)
    numbers = table + sequence * pages
    if PAGED:
        page = tl.load(numbers + token // PAGE, mask=token < end, other=0)
    for start in range(chunk * CHUNK, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < end
        if PAGED:
            at = page.to(tl.int64) * PAGE + token % PAGE
            page = tl.load(numbers + (token + BLOCK) // PAGE, mask=token + BLOCK < end, other=0)
        else:
            at = sequence.to(tl.int64) * pages * PAGE + token
        at = (at * groups + group)[:, None] * WIDTH + lane[None, :]
        keys = product_operand(tl.load(k + at, mask=inside[:, None], other=0.0), PRODUCT)
        values = product_operand(tl.load(v + at, mask=inside[:, None], other=0.0), PRODUCT)
        scores = tl.where(inside[None, :], tl.dot(query, keys.T) * factor, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        kept = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        weight = weight * kept + tl.sum(p, axis=1)
        total = tl.dot(product_operand(p, PRODUCT), values, total * kept[:, None])
        top = higher
    # A chunk after the end of its sequence has no weight, and its largest score is -inf.
    part = (item * tl.num_programs(2) + chunk) * SHARE + row
    tl.store(largest + part, top, mask=row < SHARE)
    tl.store(weights + part, weight, mask=row < SHARE)
    tl.store(sums + part[:, None] * WIDTH + lane[None, :], total, mask=here)


def lengths_of(batch, tokens):
    """Return the length of each sequence, from half of `tokens` to `tokens`."""
    return [tokens - tokens // 2 * i // max(batch - 1, 1) for i in range(batch)]


def page_table(rows, pages, lengths, page):
    """Return the page table as a tensor. Raise `ValueError` if a row is invalid.

    Args:
        rows: the page numbers of each sequence.
        pages: how many pages the pool has.
        lengths: how many tokens each sequence has.
        page: how many tokens a page has.
    """
    for sequence, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if length < 1:
            raise ValueError(f"sequence {sequence} has {length} tokens: nothing to attend to")
        if len(row) * page < length:
            raise ValueError(
                f"sequence {sequence} has {length} tokens, but only {len(row)} pages of {page}"
            )
        outside = [number for number in row if not 0 <= number < pages]
        if outside:
            raise ValueError(
                f"sequence {sequence} has page {outside[0]}, but the pool has {pages} pages"
            )
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int32)


def state(device, batch, groups, share, tokens, page, chunk):
    lengths = lengths_of(batch, tokens)
    counts = [-(-length // page) for length in lengths]
    free = iter(torch.randperm(sum(counts)).tolist())
    rows = [[next(free) for _ in range(count)] for count in counts]
    table = page_table(rows, sum(counts), lengths, page)
    shape = (sum(counts), page, groups, WIDTH)
    return {
        "k": torch.randn(shape, device=device, dtype=torch.bfloat16),
        "v": torch.randn(shape, device=device, dtype=torch.bfloat16),
        "table": table.to(device),
        "lengths": torch.tensor(lengths, dtype=torch.int32).to(device),
    }


def inputs(device, batch, groups, share, tokens, page, chunk):
    # Larger queries give some tokens much more weight than others.
    q = 2 * torch.randn(batch, groups * share, 1, WIDTH, device=device)
    return q.bfloat16(), chunk


def reference(cache, q, chunk):
    results = []
    for queries, row, length in zip(q, cache["table"], cache["lengths"], strict=True):
        keys, values = (
            cache[name][row.long()].double().flatten(0, 1)[:length].transpose(0, 1)
            for name in ("k", "v")
        )
        rows = queries.double().view(len(keys), -1, WIDTH)
        p = torch.softmax(rows @ keys.mT / WIDTH**0.5, dim=-1)
        results.append((p @ values).view(queries.shape))
    return torch.stack(results)


def copies(cache):
    """Return keys and values as (batch, tokens, groups, WIDTH), padded to whole pages."""
    return [cache[name][cache["table"]].flatten(1, 2) for name in ("k", "v")]


def attended(q, k, v, table, lengths, page, chunk, *, paged):
    batch, pages = table.shape
    groups = k.shape[2]
    pool = (k.shape[0], page, groups, WIDTH)
    refuse("k", k, pool if paged else (batch, pages * page, groups, WIDTH))
    refuse("v", v, k.shape)
    refuse("q", q, (batch, q.shape[1], 1, WIDTH))
    if q.shape[1] % groups:
        raise ValueError(f"{q.shape[1]} query heads cannot share {groups} groups of keys")
    if table.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise ValueError(f"table and lengths are {table.dtype}, {lengths.dtype}; use int32")
    share, chunks = q.shape[1] // groups, triton.cdiv(pages * page, chunk)
    out = torch.empty_like(q)
    parts = part_buffers(batch * groups, chunks, share, WIDTH, q.device)
    attend_kernel[groups, batch, chunks](
        q, k, v, table, lengths, out, *parts, pages, LOG2_E / WIDTH**0.5,
        PAGED=paged, SHARE=share, ROWS=max(ROWS, triton.next_power_of_2(share)), WIDTH=WIDTH,
        PAGE=page, CHUNK=chunk, BLOCK=BLOCK, PRODUCT=product_type(q), num_warps=4, num_stages=3,
    )  # fmt: skip
    join_parts(parts, out, batch * groups, chunks, share, WIDTH)
    return out


def gathered(cache, q, chunk):
    tokens = torch.arange(cache["table"].shape[1] * cache["k"].shape[1], device=q.device)
    seen = (tokens < cache["lengths"][:, None])[:, None, None]

    def call():
        k, v = (x.transpose(1, 2) for x in copies(cache))
        rows = q.view(len(q), k.shape[1], -1, WIDTH)
        return F.scaled_dot_product_attention(rows, k, v, seen).view(q.shape)

    yield call


def copied(cache, q, chunk):
    table, lengths, page = cache["table"], cache["lengths"], cache["k"].shape[1]
    return attended(q, *copies(cache), table, lengths, page, chunk, paged=False)


def paged(cache, q, chunk):
    table, lengths, page = cache["table"], cache["lengths"], cache["k"].shape[1]
    return attended(q, cache["k"], cache["v"], table, lengths, page, chunk, paged=True)


def contiguous(cache, q, chunk):
    table, lengths, page = cache["table"], cache["lengths"], cache["k"].shape[1]
    k, v = copies(cache)
    yield lambda: attended(q, k, v, table, lengths, page, chunk, paged=False)


def cache_bytes(batch, groups, tokens):
    return 4 * sum(lengths_of(batch, tokens)) * groups * WIDTH


def padded_bytes(batch, groups, tokens, page):
    return 4 * batch * -(-tokens // page) * page * groups * WIDTH


def gathering(batch, groups, tokens, page):
    """Return the cost of `copies`, for keys and values."""
    some, all_of = cache_bytes(batch, groups, tokens), padded_bytes(batch, groups, tokens, page)
    return 2 * Cost(read=some / 2, write=all_of / 2, launches=1)


def split_cost(batch, groups, share, tokens, page, chunk):
    cache, vectors = cache_bytes(batch, groups, tokens), 2 * batch * groups * share * WIDTH
    parts = part_bytes(batch * groups, -(-tokens // chunk), share, WIDTH)
    return Cost(
        read=cache + vectors,
        write=vectors + parts,
        ops={"bf16": cache * max(ROWS, share)},
        launches=1,
    ) + Cost(read=parts, launches=1)


def gathered_cost(batch, groups, share, tokens, page, chunk):
    cache, vectors = padded_bytes(batch, groups, tokens, page), 2 * batch * groups * share * WIDTH
    attend = Cost(
        read=cache + vectors, write=vectors, ops={"bf16": cache * max(ROWS, share)}, launches=1
    )
    return gathering(batch, groups, tokens, page) + attend


def copied_cost(batch, groups, share, tokens, page, chunk):
    attend = split_cost(batch, groups, share, tokens, page, chunk)
    return gathering(batch, groups, tokens, page) + attend


def size(page):
    return {"batch": 32, "groups": 8, "share": 8, "tokens": 8192, "page": page, "chunk": 1024}


@compare(
    baseline=gathered,
    optimized=[
        Variant(copied, at_least="yardstick"),  # shows the kernel's effect with the copy
        Variant(paged, at_least={"sm90": 3.1}),
        Variant(contiguous, at_least="yardstick"),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[size(page=16), size(page=64)],
    check_sizes=[
        {"batch": 2, "groups": 2, "share": 2, "tokens": 67, "page": 16, "chunk": 64},
        {"batch": 1, "groups": 1, "share": 3, "tokens": 129, "page": 64, "chunk": 64},
    ],
    # As in ../ch09/attention_test.py: a head's weights and outputs are rounded.
    work=lambda batch, groups, share, tokens, page, chunk: Work(
        read=cache_bytes(batch, groups, tokens), terms=tokens, roundings=16
    ),
    bound="dram",
    costs={
        gathered: gathered_cost,
        copied: copied_cost,
        paged: split_cost,
        contiguous: split_cost,
    },
)
def test_paged_decode(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestRefused:
    """Making a wrong table is an error. The launching helper rejects other wrong inputs."""

    @pytest.mark.parametrize(
        ("rows", "lengths", "words"),
        [
            ([[0, 4]], [20], "sequence 0 has page 4, but the pool has 4 pages"),
            ([[0, -1]], [20], "sequence 0 has page -1"),
            ([[0], [1]], [16, 17], "sequence 1 has 17 tokens, but only 1 pages of 16"),
            ([[0], []], [16, 0], "sequence 1 has 0 tokens"),
        ],
    )
    def test_table(self, rows, lengths, words):
        with pytest.raises(ValueError, match=words):
            page_table(rows, 4, lengths, 16)

    @pytest.mark.parametrize(
        ("q", "pool", "words"),
        [
            ((1, 8, 1, 64), (4, 16, 8, WIDTH), r"q is \(1, 8, 1, 64\); .* takes \(1, 8, 1, 128\)"),
            ((1, 8, 1, WIDTH), (4, 32, 8, WIDTH), r"k is \(4, 32, 8, 128\)"),
            ((1, 9, 1, WIDTH), (4, 16, 8, WIDTH), "9 query heads cannot share 8 groups"),
        ],
    )
    def test_shape(self, q, pool, words):
        table, lengths = page_table([[3, 1]], 4, [20], 16), torch.tensor([20], dtype=torch.int32)
        k = torch.ones(pool).bfloat16()
        with pytest.raises(ValueError, match=words):
            attended(torch.ones(q).bfloat16(), k, k, table, lengths, 16, 64, paged=True)
