"""Paged cache: store only the tokens that each request has, in pages listed in a table.

Problem    Decode `steps` given tokens of `requests` requests with a decoder in bf16
           (`suites/decoder.py`) and return all logits. The requests have different lengths, spread
           evenly from `shortest` to `longest` tokens, in a mixed order. The keys and values of
           these tokens are in the cache when a call begins.
Baseline   masked: every request has a row with room for the longest request. PyTorch's attention
           reads all rows to their ends, and a mask hides all positions after a request's last
           token.
Optimized  triton_rows: changes `masked`. Each program of a Triton kernel computes the attention of
           one request and one group of heads. `triton_rows` still reads all rows to their ends, so
           it shows the effect of the kernel alone.
           bounded: changes `triton_rows`. The kernel stops at the request's last token.
           paged: changes `bounded`. Keys and values are in pages of 64 tokens that all requests
           share (PagedAttention, arXiv:2309.06180). The same kernel looks up each page's number in
           a table.
Bound      DRAM. `masked` and `triton_rows` read all rows to their ends. `bounded` and `paged` read
           only the tokens that exist. For each page, which holds thousands of numbers, `paged`
           loads one additional number from the table. All sides also read the weights and start
           many small kernels, so the speedup of the whole step is smaller than the speedup of
           attention.
Seen       On an H200, `triton_rows` is clearly faster than `masked`, although both read the same
           bytes. So the kernel alone helps. `bounded` reads only about half as many keys as
           `triton_rows`, but takes only a little less time in a separate run. The costs predict a
           quarter less. So most of the gain over `masked` comes from the kernel. A program reads
           all tokens of its request, 64 at a time. So attention lasts at least as long as the
           program of the longest request. We did not measure whether this is the limit. `paged`
           takes as long as `bounded`, so the table costs no measurable time. The speedup of
           `bounded` is larger only because `masked` took longer in the case of `bounded` than in
           the case of `paged`. We do not know why. `masked` takes about twice as long as predicted,
           and the other sides also take longer than predicted. The costs count only the start of
           each small kernel, and assume that attention reads at the DRAM rate. We did not time the
           kernels alone. Without a CUDA graph, all sides take four to six times as long, because
           the host's launches are the limit. Then `triton_rows` and `paged` lose most of their
           gain, and `bounded` loses less.
Use when   Requests have different lengths. Stopping at the last token saves some time, and even a
           kernel over contiguous rows can stop there. Pages save memory: a request takes what it
           needs, 64 tokens at a time, so more requests fit on the GPU. Many requests can share the
           pages of a common beginning (`prefix_cache_test.py`). If requests are equally long,
           contiguous rows are simpler and as fast (`kv_cache_test.py` in chapter 13).
"""

import functools

import pytest
import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare
from suites.decoder import Cache, Decoder, cached_numbers, exact_logits, matrix_weights
from suites.rounding import to_even
from suites.serving import config_of, forward_cost, kernels_of

PAGE = 64  # tokens
ROWS = 16  # fewest rows of a tensor-core product: a group's queries, padded with zeros


@triton.jit
def row_attention_kernel(
    q,
    keys,
    values,
    table,
    lengths,
    ends,
    out,
    scale,
    pages,
    request_stride,
    kv_stride,
    PAGED: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Compute attention for the query heads of one request that share a key head.

    The kernel reads the keys before the end of the request, and masks the keys after its length.
    Without a table, page `k` of a request begins `PAGE * HEAD` numbers after page `k - 1`.
    """
    kv_head, request, kv_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    rows, lanes, tokens = tl.arange(0, ROWS), tl.arange(0, HEAD), tl.arange(0, PAGE)
    length, end = tl.load(lengths + request), tl.load(ends + request)
    at = ((request * kv_heads + kv_head) * GROUPS + rows)[:, None] * HEAD + lanes[None, :]
    own = (rows < GROUPS)[:, None]
    query = tl.load(q + at, mask=own, other=0.0).to(PRODUCT)
    within = tokens[:, None] * HEAD + lanes[None, :]
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS, HEAD), tl.float32)
    for start in tl.range(0, end, PAGE):
        if PAGED:
            page = tl.load(table + request * pages + start // PAGE).to(tl.int64)
            first = page * request_stride + kv_head * kv_stride
        else:
            first = request.to(tl.int64) * request_stride + kv_head * kv_stride + start * HEAD
        there, counts = start + tokens < end, start + tokens < length
        k = tl.load(keys + first + within, mask=there[:, None], other=0.0).to(PRODUCT)
        v = tl.load(values + first + within, mask=there[:, None], other=0.0).to(PRODUCT)
        scores = tl.where(counts[None, :], tl.dot(query, k.T) * scale, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, axis=1))
        weights = tl.exp(scores - larger[:, None])
        kept = tl.exp(most - larger)
        total = total * kept + tl.sum(weights, axis=1)
        mean = tl.dot(weights.to(PRODUCT), v, mean * kept[:, None])
        most = larger
    result = to_even(mean / total[:, None], DROPPED=16).to(tl.bfloat16)
    tl.store(out + at, result, mask=own)


def row_attention(q, keys, values, lengths, ends, table=None):
    """Return attention of one query per request and head, of shape (requests, heads, 1, head).

    Args:
        q: of the same shape.
        keys, values: of shape (requests, kv_heads, length, head), or (pages, kv_heads, PAGE, head)
            with a table.
        lengths: how many tokens each request has.
        ends: how many tokens of each request are read, at least the request's length.
        table: the pages of each request, of shape (requests, pages).
    """
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    requests, heads, _, head = q.shape
    kv_heads = keys.shape[1]
    row_attention_kernel[kv_heads, requests](
        q,
        keys,
        values,
        lengths if table is None else table,
        lengths,
        ends,
        out,
        head**-0.5,
        0 if table is None else table.shape[1],
        keys.stride(0),
        keys.stride(1),
        PAGED=table is not None,
        GROUPS=heads // kv_heads,
        HEAD=head,
        PAGE=PAGE,
        ROWS=ROWS,
        # Triton 3.9's interpreter takes bf16 for integers. In fp32, the products are the same.
        PRODUCT=tl.bfloat16 if q.is_cuda else tl.float32,
        num_stages=4,
    )
    return out


class KernelCache(Cache):
    """A cache whose `attention` reads each row up to its end, or up to its last token.

    Attributes:
        bounded: whether to stop at the last token.
        attention: a function with the arguments of `row_attention`.
    """

    def plan(self, positions, n, device):
        row = torch.arange(len(positions), device=device)[:, None]
        lengths = positions[:, 0] + 1
        ends = lengths if self.bounded else torch.full_like(lengths, self.keys.shape[3])
        return (row, positions), lengths, ends

    def attend(self, layer, q, plan):
        return self.attention(q, self.keys[layer], self.values[layer], *plan[1:])


class PagedCache:
    """Pages of keys and values that all requests share. A page belongs to one request at a time.

    Attributes:
        keys, values: tensors of shape (layers, pages, kv_heads, PAGE, head).
        table: a tensor with the page numbers of each request, from `upload`.
        free: a list of the page numbers that no request has.
        attention: a function with the arguments of `row_attention`.
    """

    def __init__(self, config, pages, requests, device):
        shape = config.layers, pages, config.kv_heads, PAGE, config.head
        self.keys = torch.zeros(shape, device=device, dtype=torch.bfloat16)
        self.values = torch.zeros_like(self.keys)
        self.free = list(range(pages))
        self.taken = [[] for _ in range(requests)]

    def reserve(self, request, tokens):
        """Reserve pages for `tokens` tokens in total. Return False if the pool is too full."""
        own = self.taken[request]
        missing = triton.cdiv(tokens, PAGE) - len(own)
        if missing > len(self.free):
            return False
        own += [self.free.pop() for _ in range(missing)]
        return True

    def upload(self):
        """Copy the page table to the device, padded with zeros. Call `reserve` first."""
        most = max(len(own) for own in self.taken)
        table = [own + [0] * (most - len(own)) for own in self.taken]
        self.table = torch.tensor(table, dtype=torch.int32, device=self.keys.device)

    def release(self, request):
        """Free the pages of a request that has ended or was cancelled."""
        self.free += self.taken[request]
        self.taken[request] = []

    def plan(self, positions, n, device):
        page = self.table.gather(1, positions // PAGE).long()
        return (page, positions % PAGE), positions[:, 0] + 1

    def append(self, layer, k, v, plan):
        self.keys[layer].transpose(1, 2)[plan[0]] = k.transpose(1, 2)
        self.values[layer].transpose(1, 2)[plan[0]] = v.transpose(1, 2)

    def attend(self, layer, q, plan):
        return self.attention(q, self.keys[layer], self.values[layer], plan[1], plan[1], self.table)


def lengths_of(requests, shortest, longest):
    """Return each request's number of tokens, spread evenly and in a mixed order."""
    step = (longest - shortest) / max(1, requests - 1)
    stride = next(s for s in range(requests // 2 + 1, 2 * requests + 2) if coprime(s, requests))
    return [round(shortest + step * (k * stride % requests)) for k in range(requests)]


def coprime(a, b):
    while b:
        a, b = b, a % b
    return a == 1


def size_of(layers, width, requests, shortest, longest, steps):
    return config_of(layers, width, -(-(longest + steps) // PAGE) * PAGE)


def state(device, layers, width, requests, shortest, longest, steps):
    """Return a decoder that also holds prompts of `longest` tokens and a cache with all of them."""
    config = size_of(layers, width, requests, shortest, longest, steps)
    model = Decoder(config, device=device)
    shape = requests, longest
    model.register_buffer("prompts", torch.randint(config.vocabulary, shape, device=device))
    cache = Cache(config, requests, config.length, device)
    for row in range(0, requests, 16):  # all rows at once would need much memory
        model.states(model.prompts[row : row + 16], 0, cache.rows(row, row + 16))
    model.register_buffer("keys", cache.keys)
    model.register_buffer("values", cache.values)
    return model


def inputs(device, layers, width, requests, shortest, longest, steps):
    config = size_of(layers, width, requests, shortest, longest, steps)
    tokens = torch.randint(config.vocabulary, (steps, requests), device=device)
    return tokens, lengths_of(requests, shortest, longest)


def reference(model, tokens, lengths):
    """Return the logits of each request's new tokens, after its first `length` prompt tokens."""
    found = []
    for row, length in enumerate(lengths):
        whole = torch.cat([model.prompts[row, :length], tokens[:, row]])
        found.append(exact_logits(model, whole[None])[0, length:])
    return torch.stack(found, 1)


def decoded(model, cache, tokens, lengths):
    first = torch.tensor(lengths, device=tokens.device)
    yield lambda: torch.stack(
        [model.step(now, first + step, cache) for step, now in enumerate(tokens)]
    )


def with_rows(kind, model, tokens):
    cache = kind(model.config, tokens.shape[1], model.config.length, tokens.device)
    cache.keys.copy_(model.keys)
    cache.values.copy_(model.values)
    return cache


def masked(model, tokens, lengths):
    yield from decoded(model, with_rows(Cache, model, tokens), tokens, lengths)


def kernel_rows(model, tokens, *, stops):
    cache = with_rows(KernelCache, model, tokens)
    cache.attention, cache.bounded = row_attention, stops
    return cache


def triton_rows(model, tokens, lengths):
    yield from decoded(model, kernel_rows(model, tokens, stops=False), tokens, lengths)


def bounded(model, tokens, lengths):
    yield from decoded(model, kernel_rows(model, tokens, stops=True), tokens, lengths)


def pages_of(lengths, steps):
    return sum(triton.cdiv(length + steps, PAGE) for length in lengths)


def paged(model, tokens, lengths):
    cache = PagedCache(model.config, pages_of(lengths, len(tokens)), len(lengths), tokens.device)
    cache.attention = row_attention
    # All requests grow in turn, so the pages of one request are scattered in memory.
    for end in range(PAGE, max(lengths) + len(tokens) + PAGE, PAGE):
        for request, length in enumerate(lengths):
            cache.reserve(request, min(end, length + len(tokens)))
    cache.upload()
    own = [(row, k, page) for row, pages in enumerate(cache.taken) for k, page in enumerate(pages)]
    row, k, page = torch.tensor(own, device=tokens.device).T
    for pool, rows in ((cache.keys, model.keys), (cache.values, model.values)):
        pool[:, page] = rows.unflatten(3, (-1, PAGE)).transpose(2, 3)[:, row, k]
    yield from decoded(model, cache, tokens, lengths)


def work(layers, width, requests, shortest, longest, steps):
    config = size_of(layers, width, requests, shortest, longest, steps)
    tokens = sum(lengths_of(requests, shortest, longest))
    return Work(
        read=2 * matrix_weights(config) + 2 * cached_numbers(config) * steps * tokens,
        roundings=20 * layers,
    )


def steps_cost(keys, layers, width, requests, shortest, longest, steps):
    """Return the cost of all steps. Each step reads `keys` keys of the cache."""
    config = size_of(layers, width, requests, shortest, longest, steps)
    each = forward_cost(config, requests, keys, keys, launches=kernels_of(config) + 1)
    logits = steps * requests * config.vocabulary
    return steps * each + Cost(read=2 * logits, write=2 * logits, launches=1)


def rooms_cost(**size):
    return steps_cost(size["requests"] * size_of(**size).length, **size)


def tokens_cost(**size):
    lengths = lengths_of(size["requests"], size["shortest"], size["longest"])
    return steps_cost(sum(lengths) + len(lengths) * (size["steps"] + 1) / 2, **size)


judged = functools.partial(
    compare,
    baseline=masked,
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[
        {
            "layers": 4,
            "width": 2048,
            "requests": 64,
            "shortest": 128,
            "longest": 2040,
            "steps": 2,
        }
    ],
    check_sizes=[
        {"layers": 1, "width": 256, "requests": 3, "shortest": 5, "longest": 90, "steps": 2},
    ],
    work=work,
    bound="dram",
)


@judged(
    optimized=[
        Variant(triton_rows, at_least={"sm90": 1.1}),
        Variant(bounded, at_least={"sm90": 1.2}),
        Variant(paged, at_least={"sm90": 1.2}),
    ],
    costs={
        masked: rooms_cost,
        triton_rows: rooms_cost,
        bounded: tokens_cost,
        paged: tokens_cost,
    },
)
def test_paged_cache(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@judged(
    optimized=[Variant(paged, at_least="yardstick")],
    costs={masked: rooms_cost, paged: tokens_cost},
)
def test_paged_cache_memory(pair):
    pair.assert_equivalent()
    pair.assert_memory(at_most=0.7)


class TestBadInput:
    """A full pool, and a request that is cancelled."""

    @pytest.fixture
    def cache(self):
        return PagedCache(config_of(1, 64, 4 * PAGE), 4, 3, "cpu")

    def test_a_request_waits_while_the_pool_is_full_and_gets_its_pages_later(self, cache):
        assert cache.reserve(0, 3 * PAGE)
        assert not cache.reserve(1, PAGE + 1)
        assert cache.taken[1] == []  # a waiting request keeps no pages, so others can go on
        cache.release(0)
        assert cache.reserve(1, PAGE + 1)

    def test_a_cancelled_request_returns_all_pages_once(self, cache):
        cache.reserve(0, 2 * PAGE)
        cache.release(0)
        cache.release(0)
        assert sorted(cache.free) == [0, 1, 2, 3]

    def test_no_two_requests_share_a_page(self, cache):
        cache.reserve(0, 1)
        cache.reserve(1, PAGE + 1)
        cache.reserve(0, PAGE + 1)
        assert sorted(cache.taken[0] + cache.taken[1]) == [0, 1, 2, 3]
        assert not cache.reserve(2, 1)
