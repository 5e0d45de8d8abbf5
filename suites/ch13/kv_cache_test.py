"""KV cache: write a token's keys and values in place instead of copying the cache.

Problem    Decode `steps` tokens of `batch` sequences with one attention layer in bf16. Each step
           projects the token to query, key and value, appends key and value to the cache, and
           attends to the whole cache. The output is added to the next token, so the steps run one
           after another. The cache starts with `prompt` tokens. Queries are twice as large as
           usual, so that about 40 keys get most of the weight. The check compares the outputs of
           all steps.
Baseline   grown: `torch.cat` joins the cache and the new entry, as in caches without a fixed size.
Optimized  by_words: changes `grown`. `cat` gets views of the bytes as int64. When PyTorch copies
           into part of a tensor, each thread copies one element at a time, so with bf16 elements, a
           warp moves only 64 bytes at a time.
           preallocated: changes `by_words`. Memory for all tokens is allocated once, and each token
           is written to its place. The prompt is copied as int64.
           paged: changes `preallocated`. All sequences share a pool of pages of 64 tokens. A table
           says where the pages of each sequence are (PagedAttention, arXiv:2309.06180). PyTorch's
           attention cannot use such a table without another package. So this page has its own
           kernel, with one program per sequence and head. A tensor core product needs 16 rows, so
           all 16 rows hold the same query.
Bound      DRAM. Every step reads all keys and values, which do not fit in the L2. In `grown` and
           `by_words`, every step also copies all keys and values. `preallocated` and `paged` copy
           the prompt once per call.
Seen       `grown` takes longer than its memory traffic alone. `by_words` moves the same bytes in
           the same number of kernels and comes close to its prediction. So copying single bf16
           elements explains the extra time of `grown`.
Use when   Preallocate if the maximum length is known and fits in memory. Use pages when sequences
           end at different lengths, because pages allocate memory for 64 tokens at a time. On this
           page, all sequences have the same length, so `paged` needs about as much memory as
           `preallocated`. `grown` needs twice as much.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare

from .rounding import to_even

WIDTH, PAGE = 128, 64  # elements per head, tokens per page
ROWS = 16  # rows of the smallest tensor core product
WORD = torch.int64  # 4 bf16 values: PyTorch copies a strided tensor one element at a time


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
    """Compute attention for one sequence and head. Values begin `offset` elements after keys."""
    heads, head, sequence = tl.num_programs(0), tl.program_id(0), tl.program_id(1)
    rows, lanes, tokens = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, PAGE)
    # All rows of the product hold the same query. Only the first row is stored.
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
    """Decode all tokens. Return their outputs, stacked.

    Args:
        tokens: tensor of (steps, batch, heads * WIDTH).
        to_heads: weights of the projection to queries, keys and values.
        shape: shape of a query: (batch, heads, WIDTH).
        attend: function of two tensors: the query, and key and value stacked as (2, batch, heads,
            WIDTH).
    """
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
    # Sequences get pages in turn, so the pages of one sequence are not adjacent.
    numbers = torch.arange(pages * batch, dtype=torch.int32, device=cache.device)
    table = numbers.view(pages, batch).T.contiguous()
    ahead = torch.arange(length, length + len(tokens), device=cache.device)
    slots = iter((table[:, ahead // PAGE] * PAGE + ahead % PAGE).T)  # where to write each token
    full, rest = divmod(length, PAGE)
    whole, last = cache.split([full * PAGE, rest], dim=2)
    whole = whole.unflatten(2, (full, PAGE)).flatten(1, 2)
    pool.view(WORD).index_copy_(1, table[:, :full].flatten().long(), whole.view(WORD))
    pool[:, table[:, full], :rest] = last
    # Triton 3.9's interpreter multiplies bf16 as if its bits were integers, so use fp32 there.
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
            num_stages=5,  # prefetches pages and their numbers
        )
        return out

    return decode(tokens, to_heads, (batch, heads, WIDTH), attend)


def work(batch, heads, prompt, steps):
    entry = 2 * 2 * batch * heads * WIDTH  # bytes of a token's keys and values
    return Work(
        read=entry * (steps * prompt + steps * (steps + 1) / 2),
        write=entry * steps * 3 / 2,
        terms=prompt + steps,
        roundings=5,  # output, weights, projection, sum, and the output that is added
    )


def decoded(batch, heads, prompt, steps, appended):
    """Return the cost of all steps.

    Args:
        batch, heads, prompt, steps: the size.
        appended: function of the bytes of the cache and of a token; returns the append's cost.
    """
    model, entry = heads * WIDTH, 4 * batch * heads * WIDTH
    weights = 6 * model**2
    project = Cost(read=entry, write=entry / 2, launches=1)  # add the previous output
    project += Cost(
        read=weights + entry / 2, write=1.5 * entry, ops={"bf16": batch * weights}, launches=1
    )
    project += Cost(read=entry, write=entry, launches=1)  # stack key and value
    total = Cost(launches=1)  # zeros
    for length in range(prompt, prompt + steps):
        attend = Cost(read=(length + 1.5) * entry, write=entry / 2, launches=1)
        total += project + appended(length * entry, entry) + attend
    return total + Cost(read=steps * entry / 2, write=steps * entry / 2, launches=1)  # stack


def copied(cache, entry):
    return Cost(read=cache + entry, write=cache + entry, launches=1)


def written(cache, entry):
    return Cost(read=entry, write=entry, launches=1)


def growing(batch, heads, prompt, steps):
    return decoded(batch, heads, prompt, steps, copied)


def in_place(batch, heads, prompt, steps):
    return copied(4 * prompt * batch * heads * WIDTH, 0) + decoded(
        batch, heads, prompt, steps, written
    )


def in_pages(batch, heads, prompt, steps):
    return Cost(launches=12) + in_place(batch, heads, prompt, steps)  # make the table and the slots


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


@against_grown(
    optimized=[Variant(by_words, at_least={"sm90": 1.5})],
    costs={grown: growing, by_words: growing},
)
def test_kv_cache_still_grown(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@against_grown(
    optimized=[
        Variant(preallocated, at_least={"sm90": 4.0}),
        Variant(paged, at_least={"sm90": 4.0}),
    ],
    costs={grown: growing, preallocated: in_place, paged: in_pages},
)
def test_kv_cache(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=0.7)
