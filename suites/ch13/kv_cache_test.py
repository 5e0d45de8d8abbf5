"""KV cache: where the keys and values of the next token go.

Problem    Decode `steps` tokens of `batch` sequences with one attention layer, bf16: project the
           token to query, key and value, append key and value to the sequence's cache, attend to
           all of it. What comes out is added to the next token, so no step can begin before the one
           ahead has ended. The cache begins with `prompt` tokens. Queries have twice the usual
           size, so that some 40 keys take most of the weight. Every step's output counts.
Baseline   grown: `torch.cat` of cache and token, as caches without a fixed size do.
Optimized  by_words: the same `cat`, its bytes taken for int64. PyTorch copies into a part of a
           tensor number by number, whatever their size, and in bf16 a warp moves 64 bytes at a
           time.
           preallocated: room for all tokens, made once; a token is written in its place. It takes
           the prompt by words.
           paged: one pool of pages of 64 tokens for all sequences, handed out as they grow, and a
           table that says where each one's pages are (PagedAttention, arXiv:2309.06180). PyTorch's
           attention takes no table without a package of its own, so a kernel of this page reads
           through it, one program a sequence and head, on tensor cores: their products have 16
           rows, which all hold the one query.
Bound      DRAM. At 32 sequences and 2048 tokens, keys and values are 268 MB. Every side reads them
           each step, 61 us at 4.4 TB/s; `cat` also copies them, 537 MB, 127 us at 4.24. Projection
           and small kernels are some 15 us: 203 us against 76. The others copy the prompt into
           their room once, at least 127 us or 4 us a step: 2.5 times between by_words and
           preallocated, and as much for paged if its 256 programs, each with 1 MB to read, draw as
           much as the library's kernel. What grown loses besides is PyTorch's copy, not the idea.
           Memory is what paging is for: room is taken 64 tokens at a time, not for the longest
           answer that may come. Here all sequences are as long, so that it holds what preallocated
           does, one cache, and grown two.
Seen       An H200: grown 390 us a step, of which its copy takes 308; by_words 1.8x, 221 us, by a
           copy of 140. preallocated 4.8x, 82 us, 2.7 times as fast as by_words for predicted 2.5.
           paged 4.7x, 83 us: its kernel takes 65 us, as the library's does, and its table next to
           nothing. It was 3.1x when the kernel multiplied in fp32, in 82 us alone and 99 among the
           others, and took the prompt number by number.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Variant, Work, compare

from .rounding import to_even

WIDTH, PAGE = 128, 64  # numbers of a head, tokens of a page
ROWS = 16  # of the tensor cores' smallest product
WORD = torch.int64  # PyTorch copies a strided tensor number by number: four of bf16 at once


@triton.jit
def paged_attention_kernel(
    q,
    pool,
    table,
    out,
    scale,
    length,
    pages,
    offset,
    stride,
    PRODUCT: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Attend from the token of one sequence and head; values lie `offset` behind keys."""
    heads, head, sequence = tl.num_programs(0), tl.program_id(0), tl.program_id(1)
    rows, lanes, tokens = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, PAGE)
    # Tensor cores take no fewer rows: all are the one query, and the first is kept.
    row = (rows * 0)[:, None] + head * WIDTH + lanes[None, :]
    query = tl.load(q + sequence * stride + row).to(PRODUCT)
    within = (tokens[:, None] * heads + head) * WIDTH + lanes[None, :]
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in tl.range(0, length, PAGE):
        page = tl.load(table + sequence * pages + start // PAGE).to(tl.int64)
        at = pool + page * PAGE * heads * WIDTH + within
        there = start + tokens < length
        keys = tl.load(at, mask=there[:, None], other=0).to(PRODUCT)
        values = tl.load(at + offset, mask=there[:, None], other=0).to(PRODUCT)
        scores = tl.where(there[None, :], tl.dot(query, keys.T) * scale, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, axis=1))
        weights = tl.exp(scores - larger[:, None])
        kept = tl.exp(most - larger)
        total = total * kept + tl.sum(weights, axis=1)
        mean = tl.dot(weights.to(PRODUCT), values, mean * kept[:, None])
        most = larger
    result = to_even(mean / total[:, None], DROPPED=16).to(tl.bfloat16)
    tl.store(out + sequence * heads * WIDTH + row, result, mask=(rows == 0)[:, None])


def inputs(device, batch, heads, prompt, steps):
    model = heads * WIDTH
    tokens = torch.randn(steps, batch, model, device=device)
    cache = torch.randn(2, batch, prompt, heads, WIDTH, device=device)
    to_heads = torch.randn(model, 3 * model, device=device) / model**0.5
    to_heads[:, :model] *= 2  # queries
    return tokens.bfloat16(), cache.bfloat16(), to_heads.bfloat16()


def reference(tokens, cache, to_heads):
    batch, _, heads = cache.shape[1:4]
    keys, values = cache.double()
    x, outputs = torch.zeros_like(tokens[0], dtype=torch.float64), []
    for token in tokens.double():
        x = token + x
        query, key, value = (x @ to_heads.double()).view(batch, 3, 1, heads, WIDTH).unbind(1)
        keys, values = torch.cat([keys, key], dim=1), torch.cat([values, value], dim=1)
        weights = torch.einsum("bqhd,bthd->bht", query, keys).div_(WIDTH**0.5).softmax(dim=-1)
        x = torch.einsum("bht,bthd->bhd", weights, values).flatten(1)
        outputs.append(x)
    return torch.stack(outputs)


def decode(tokens, to_heads, shape, attend):
    """Decode with `attend`, which takes a query and what to append, of (2, batch, heads, WIDTH)."""
    x, outputs = torch.zeros_like(tokens[0]), []
    for token in tokens:
        query, *entry = ((token + x) @ to_heads).chunk(3, dim=1)
        x = attend(query.view(shape), torch.stack(entry).view(2, *shape)).flatten(1)
        outputs.append(x)
    return torch.stack(outputs)


def attention(query, cache):
    keys, values = cache.transpose(2, 3)
    return F.scaled_dot_product_attention(query[:, :, None], keys, values)[:, :, 0]


def grown(tokens, cache, to_heads):
    def attend(query, entry):
        nonlocal cache
        cache = torch.cat([cache, entry[:, :, None]], dim=2)
        return attention(query, cache)

    return decode(tokens, to_heads, cache[0, :, 0].shape, attend)


def by_words(tokens, cache, to_heads):
    def attend(query, entry):
        nonlocal cache
        joined = torch.cat([cache.view(WORD), entry[:, :, None].view(WORD)], dim=2)
        cache = joined.view(cache.dtype)
        return attention(query, cache)

    return decode(tokens, to_heads, cache[0, :, 0].shape, attend)


def preallocated(tokens, cache, to_heads):
    _, batch, prompt, heads, _ = cache.shape
    room = cache.new_empty(2, batch, prompt + len(tokens), heads, WIDTH)
    room.view(WORD)[:, :, :prompt] = cache.view(WORD)
    length = prompt

    def attend(query, entry):
        nonlocal length
        room[:, :, length] = entry
        length += 1
        return attention(query, room[:, :, :length])

    return decode(tokens, to_heads, (batch, heads, WIDTH), attend)


def paged(tokens, cache, to_heads):
    _, batch, length, heads, _ = cache.shape
    pages = triton.cdiv(length + len(tokens), PAGE)
    pool = cache.new_empty(2, pages * batch, PAGE, heads, WIDTH)
    # Sequences take their next page in turn, so that one's pages are no neighbours.
    numbers = torch.arange(pages * batch, dtype=torch.int32, device=cache.device)
    table = numbers.view(pages, batch).T.contiguous()
    ahead = torch.arange(length, length + len(tokens), device=cache.device)
    slots = iter((table[:, ahead // PAGE] * PAGE + ahead % PAGE).T)  # of each step's tokens
    full, rest = divmod(length, PAGE)
    whole, last = cache.split([full * PAGE, rest], dim=2)
    whole = whole.unflatten(2, (full, PAGE)).flatten(1, 2)
    pool.view(WORD).index_copy_(1, table[:, :full].flatten().long(), whole.view(WORD))
    pool[:, table[:, full], :rest] = last
    # Triton 3.9's interpreter multiplies the bits of bf16; of fp32 it computes the same products.
    product = tl.bfloat16 if cache.is_cuda else tl.float32

    def attend(query, entry):
        nonlocal length
        pool.flatten(1, 2).index_copy_(1, next(slots), entry)
        length += 1
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        scale, offset = WIDTH**-0.5, pool[0].numel()
        paged_attention_kernel[heads, batch](
            query,
            pool,
            table,
            out,
            scale,
            length,
            pages,
            offset,
            query.stride(0),
            PRODUCT=product,
            WIDTH=WIDTH,
            PAGE=PAGE,
            ROWS=ROWS,
            num_stages=5,  # one page is used while one is loaded, and its number ahead of it
        )
        return out

    return decode(tokens, to_heads, (batch, heads, WIDTH), attend)


def work(batch, heads, prompt, steps):
    entry = 2 * 2 * batch * heads * WIDTH  # bytes of keys and values of a token
    return Work(
        read=entry * (steps * prompt + steps * (steps + 1) / 2),
        write=entry * steps * 3 / 2,
        terms=prompt + steps,
        roundings=5,  # output, weights, projection, sum, and the output that went into it
    )


against_grown = functools.partial(
    compare,
    baseline=grown,
    inputs=inputs,
    reference=reference,
    sizes=[{"batch": 32, "heads": 8, "prompt": 2048, "steps": 32}],
    check_sizes=[
        {"batch": 3, "heads": 1, "prompt": 61, "steps": 5},
        {"batch": 1, "heads": 2, "prompt": 129, "steps": 2},
    ],
    work=work,
    bound="dram",
)


@against_grown(optimized=[Variant(by_words, at_least={"sm90": 1.5})])
def test_kv_cache_still_grown(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@against_grown(
    optimized=[
        Variant(preallocated, at_least={"sm90": 4.0}),
        Variant(paged, at_least={"sm90": 4.0}),
    ]
)
def test_kv_cache(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=0.7)
