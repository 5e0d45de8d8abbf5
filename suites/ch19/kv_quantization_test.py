"""KV cache in 8 bits: a decode step reads the whole cache, so make the cache smaller.

Problem    Compute attention of one new token per sequence, with 64 heads of 128 numbers. Each of 8
           groups of heads shares keys and values. Queries, cache and outputs are in bf16. The cache
           is the page's state.
Baseline   library: `torch.nn.functional.scaled_dot_product_attention`.
Optimized  streamed: two Triton kernels. The first attends to 1024 tokens per program and the second
           joins the results. `streamed` reads as many bytes as `library`, so it shows the effect of
           the kernels alone.
           int8_cache: changes `streamed`. Keys and values have one byte per number, and one fp32
           scale per token and group.
           fp8_cache: like `int8_cache`, with e4m3 instead of integers. `int8_cache` and `fp8_cache`
           quantize the cache before the timed part, because a real decode step quantizes only its
           own token.
Bound      DRAM, because the cache is read once. `int8_cache` and `fp8_cache` read about half of the
           bytes, and instructions turn each byte into bf16 for the tensor cores. In the code for
           sm90, the loop of `streamed` has 2.7 instructions per number of the cache, and the loops
           of `int8_cache` and `fp8_cache` have about 6.5. At 6.5, an H200 takes about as long to
           issue the instructions as to read the bytes. `fp8_cache` converts each number with an
           instruction (F2F) whose rate we did not measure. The scales cost little: the scales of
           keys multiply the scores, and the scales of values multiply the probabilities.
Seen       On an H100, `int8_cache` is more than half again as fast as `library`, and `fp8_cache` is
           two fifths faster. `streamed` is a little slower than `library`, so the gain comes from
           fewer bytes and not from the kernels. On an H200, little of this gain is left:
           `int8_cache` is about 6 % faster than `library`, and `fp8_cache` is 5 % slower. `library`
           and `streamed` gain from the faster DRAM of the H200. `int8_cache` and `fp8_cache` take
           as long as on the H100, so their instructions limit them and not the DRAM. Both take
           longer than predicted, and `fp8_cache` exceeds its prediction by more. The main
           difference between their loops is fp8_cache's F2F conversion, so F2F is the likely
           reason.
Use when   Contexts are long, or there are many sequences, so the cache takes more memory and time
           than the weights. On a GPU with fast DRAM, measure first: the conversion can cost the
           whole gain. Eight bits also double the number of tokens that fit into memory. The
           check accepts the error that rounding q, k, p and v to the declared format would cause:
           2^-4 of each value for fp8, and 2^-6 for int8, where the largest of 128 numbers sets the
           step. So int8 is more accurate than fp8 for values without outliers. In real models, some
           channels of the keys have outliers. A scale per channel of the keys, which this page does
           not show, helps against them.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare
from suites.rounding import to_even

GROUPS, GROUP, DIM = 8, 8, 128  # heads that share keys, and numbers of a head
ROWS = 16  # rows of the smallest tensor-core product
CHUNK, BLOCK = 1024, 64  # tokens of a program, and of one step of its loop
LOG2_E = 1.4426950408889634
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
READING, CONVERTING = 2.7, 3.9  # instructions per number of the cache, counted for sm90


@triton.jit
def product_operand(values, PRODUCT: tl.constexpr):
    """Return `values` as PRODUCT: bf16, or in the interpreter fp32 that is rounded to bf16."""
    if tl.bfloat16 == PRODUCT:
        return values.to(tl.bfloat16)
    else:
        return to_even(values.to(tl.float32), DROPPED=16)


@triton.jit
def attend_kernel(
    q, k, v, k_scales, v_scales, sums, largest, weights, tokens, factor,
    SCALED: tl.constexpr, PRODUCT: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, chunk = tl.program_id(0), tl.program_id(1)
    row, lane = tl.arange(0, ROWS), tl.arange(0, DIM)
    here = row[:, None] < GROUP
    query = tl.load(q + (head * GROUP + row[:, None]) * DIM + lane[None, :], mask=here, other=0.0)
    query = query.to(PRODUCT)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, DIM), tl.float32)
    end = tl.minimum(chunk * CHUNK + CHUNK, tokens)
    for start in range(chunk * CHUNK, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < end
        at = head.to(tl.int64) * tokens + token
        keys = tl.load(k + at[:, None] * DIM + lane[None, :], mask=inside[:, None], other=0.0)
        values = tl.load(v + at[:, None] * DIM + lane[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(query, product_operand(keys, PRODUCT).T) * factor
        if SCALED:
            scores *= tl.load(k_scales + at, mask=inside, other=0.0)[None, :]
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        kept = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        weight = weight * kept + tl.sum(p, axis=1)
        if SCALED:
            p *= tl.load(v_scales + at, mask=inside, other=0.0)[None, :]
        p = product_operand(p, PRODUCT)
        total = tl.dot(p, product_operand(values, PRODUCT), total * kept[:, None])
        top = higher
    part = (head * tl.num_programs(1) + chunk) * GROUP + row
    tl.store(largest + part, top, mask=row < GROUP)
    tl.store(weights + part, weight, mask=row < GROUP)
    tl.store(sums + part[:, None] * DIM + lane[None, :], total, mask=here)


@triton.jit
def join_kernel(
    sums, largest, weights, out, chunks,
    GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row, lane = tl.arange(0, GROUP), tl.arange(0, DIM)
    top = tl.full((GROUP,), float("-inf"), tl.float32)
    weight = tl.zeros((GROUP,), tl.float32)
    total = tl.zeros((GROUP, DIM), tl.float32)
    for chunk in range(chunks):
        part = (head * chunks + chunk) * GROUP + row
        other = tl.load(largest + part)
        higher = tl.maximum(top, other)
        kept, added = tl.exp2(top - higher), tl.exp2(other - higher)
        weight = weight * kept + tl.load(weights + part) * added
        more = tl.load(sums + part[:, None] * DIM + lane[None, :])
        total = total * kept[:, None] + more * added[:, None]
        top = higher
    result = to_even(total / weight[:, None], DROPPED=16).to(tl.bfloat16)
    tl.store(out + (head * GROUP + row[:, None]) * DIM + lane[None, :], result)


def state(device, batch, tokens):
    shape = (batch, GROUPS, tokens, DIM)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]


def inputs(device, batch, tokens):
    # With larger queries, some tokens get much more weight than others.
    q = 2 * torch.randn(batch, GROUPS * GROUP, 1, DIM, device=device)
    return (q.bfloat16(),)


def reference(cache, q):
    k, v = (x.double() for x in cache)
    grouped = q.double().view(len(q), GROUPS, GROUP, DIM)
    p = torch.softmax(grouped @ k.mT / DIM**0.5, dim=-1)
    return (p @ v).view(q.shape)


def library(cache, q):
    return F.scaled_dot_product_attention(q, *cache, enable_gqa=True)


def attended(q, k, v, k_scales=None, v_scales=None):
    tokens, heads = k.shape[2], len(q) * GROUPS
    if not tokens:
        raise ValueError("the cache has no tokens, so there is nothing to attend to")
    chunks = triton.cdiv(tokens, CHUNK)
    parts = torch.empty(heads, chunks, GROUP, DIM + 2, device=q.device)
    sums, largest, weights = (
        x.view(-1) for x in parts.view(-1).split([heads * chunks * GROUP * n for n in (DIM, 1, 1)])
    )
    scaled = k_scales is not None
    attend_kernel[heads, chunks](
        q, k, v, k_scales if scaled else k, v_scales if scaled else v,
        sums, largest, weights, tokens, LOG2_E / DIM**0.5,
        SCALED=scaled, PRODUCT=tl.bfloat16 if q.is_cuda else tl.float32,
        GROUP=GROUP, ROWS=ROWS, DIM=DIM, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=4, num_stages=3,
    )  # fmt: skip
    out = torch.empty_like(q)
    join_kernel[(heads,)](sums, largest, weights, out, chunks, GROUP=GROUP, DIM=DIM)
    return out


def streamed(cache, q):
    return attended(q, *cache)


def bytes_and_scales(x, dtype):
    scales = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / LARGEST[dtype]
    scaled = x.float() / scales
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales.squeeze(-1)


def quantized(cache, q, dtype):
    (k, k_scales), (v, v_scales) = (bytes_and_scales(x, dtype) for x in cache)
    yield lambda: attended(q, k, v, k_scales, v_scales)


def int8_cache(cache, q):
    yield from quantized(cache, q, torch.int8)


def fp8_cache(cache, q):
    yield from quantized(cache, q, torch.float8_e4m3fn)


def elements(batch, tokens):
    return 2 * batch * GROUPS * tokens * DIM


def attending(batch, tokens, cache, instructions=0):
    """Return the cost of attending to a cache of `cache` bytes."""
    heads, many = batch * GROUPS * GROUP, elements(batch, tokens)
    return Cost(
        read=cache + 2 * heads * DIM,
        write=2 * heads * DIM,
        ops={"bf16": 2 * ROWS * many, "fp32": 2 * instructions * many},
        launches=1,
    )


def library_cost(batch, tokens):
    return attending(batch, tokens, 2 * elements(batch, tokens))


def joined(batch, tokens, cache, instructions):
    parts = 4 * (DIM + 2) * batch * GROUPS * GROUP * -(-tokens // CHUNK)
    attended = attending(batch, tokens, cache, instructions) + Cost(write=parts)
    return attended + Cost(read=parts, launches=1)


def streamed_cost(batch, tokens):
    return joined(batch, tokens, 2 * elements(batch, tokens), READING)


def in_bytes(batch, tokens):
    return elements(batch, tokens) * (1 + 4 / DIM)


def quantized_cost(batch, tokens):
    return joined(batch, tokens, in_bytes(batch, tokens), READING + CONVERTING)


@compare(
    baseline=library,
    optimized=[
        Variant(streamed, at_least="yardstick"),
        Variant(int8_cache, precision="int8", at_least={"sm90": 1.03}),
        Variant(fp8_cache, precision="fp8", needs="fp8", at_least="yardstick"),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"batch": 32, "tokens": 8192}],
    check_sizes=[{"batch": 2, "tokens": 67}, {"batch": 1, "tokens": 1061}],
    # As in ../ch09/attention_test.py: the weights of a head are rounded, and so are its outputs.
    work=lambda batch, tokens: Work(read=in_bytes(batch, tokens), terms=tokens, roundings=16),
    bound="dram",
    costs={
        library: library_cost,
        streamed: streamed_cost,
        int8_cache: quantized_cost,
        fp8_cache: quantized_cost,
    },
)
def test_kv_quantization(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
