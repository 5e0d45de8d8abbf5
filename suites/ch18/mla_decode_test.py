"""MLA decode: attend to the latent cache directly, without expanding keys and values.

Problem    Compute bf16 multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) for one new
           token per sequence. A cached token has 512 latent numbers and 64 numbers with a rotary
           position, which all heads share. For each head, two weight matrices expand the latent
           numbers to a key of 128 numbers and a value of 128 numbers. The whole model has 128
           heads. With 8 GPUs, each GPU has 16 heads. Cache and weights are the page's state.
Baseline   expanded: the cache holds keys and values of all heads, made before the timed part.
           `scaled_dot_product_attention` attends to them.
Optimized  absorbed: changes `expanded`. The weights are applied to queries and outputs instead of
           to the cache. The key weights multiply each query, and the value weights multiply each
           weighted mean of latent numbers. So the cache holds only latent numbers. Scores, softmax
           and mean are `matmul`, `softmax` in fp32, and `matmul`.
           fused: changes `absorbed`. A Triton kernel computes scores, softmax and mean, with a
           program for up to 64 heads and 1024 tokens. Each token is read once, for both the scores
           and the mean.
           library: like `absorbed`, with `scaled_dot_product_attention` for scores, softmax and
           mean. All heads become queries of a single head. PyTorch chooses the kernel.
Bound      DRAM limits `fused` with 16 heads, because the latent cache is read once. With 128 heads,
           each byte takes 8 times as many operations, so the tensor cores take about as long as
           DRAM. DRAM limits `expanded`, which reads 320 numbers per token for each head. `fused`
           reads 576 per token for all heads together. The L2 limits `library`. Only PyTorch's
           memory-efficient kernel supports this head dimension. The sums do not fit into this
           kernel's registers, so it writes and reads them once per 128 tokens.
Seen       On an H100, `fused` with 128 heads takes more than twice as long as predicted. The sums
           of fused fill so many registers that an SM holds only one program. So copies, products
           and exponentials probably wait for one another. `absorbed` with 128 heads and `library`
           also take longer than predicted, which we cannot explain.
Use when   Always absorb in decode. Expand in prefill, where many queries use each key: with
           expanded keys and values, a score costs 192 + 128 multiplications instead of 576 + 512. A
           latent cache also holds many times more tokens in the same memory.
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

LATENT, ROTARY, WIDTH = 512, 64, 128  # numbers of a token, and of a head's key and value
SCALE = (WIDTH + ROTARY) ** -0.5
BLOCK = 32  # tokens of one step of a loop
SMS = 132  # of an H200, for costs


@triton.jit
def attend_kernel(
    q, cache, sums, largest, weights, heads, tokens, factor,
    ROWS: tl.constexpr, LATENT: tl.constexpr, ROTARY: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Compute attention of up to ROWS heads of a sequence over a chunk of its latent cache."""
    block, sequence, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = block * ROWS + tl.arange(0, ROWS)
    lane, turn = tl.arange(0, LATENT), LATENT + tl.arange(0, ROTARY)
    here = row[:, None] < heads
    queries = q + (sequence * heads + row[:, None]) * (LATENT + ROTARY)
    query = tl.load(queries + lane[None, :], mask=here, other=0.0).to(PRODUCT)
    turned = tl.load(queries + turn[None, :], mask=here, other=0.0).to(PRODUCT)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, LATENT), tl.float32)
    end = tl.minimum(chunk * CHUNK + CHUNK, tokens)
    for start in range(chunk * CHUNK, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < end
        at = cache + (sequence.to(tl.int64) * tokens + token)[:, None] * (LATENT + ROTARY)
        latent = tl.load(at + lane[None, :], mask=inside[:, None], other=0.0)
        rotary = tl.load(at + turn[None, :], mask=inside[:, None], other=0.0)
        latent = product_operand(latent, PRODUCT)
        scores = tl.dot(query, latent.T)
        scores = tl.dot(turned, product_operand(rotary, PRODUCT).T, scores) * factor
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        kept = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        weight = weight * kept + tl.sum(p, axis=1)
        total = tl.dot(product_operand(p, PRODUCT), latent, total * kept[:, None])
        top = higher
    part = (sequence * tl.num_programs(2) + chunk) * heads + row
    tl.store(largest + part, top, mask=row < heads)
    tl.store(weights + part, weight, mask=row < heads)
    tl.store(sums + part.to(tl.int64)[:, None] * LATENT + lane[None, :], total, mask=here)


def state(device, batch, heads, tokens, chunk):
    shapes = {
        "cache": (batch, tokens, LATENT + ROTARY),
        "to_keys": (heads, WIDTH, LATENT),
        "to_values": (heads, LATENT, WIDTH),
    }
    drawn = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    for name in ("to_keys", "to_values"):
        drawn[name] /= LATENT**0.5
    return {name: x.bfloat16() for name, x in drawn.items()}


def inputs(device, batch, heads, tokens, chunk):
    # Larger queries give some tokens much more weight than others.
    q = 2 * torch.randn(batch, heads, WIDTH + ROTARY, device=device)
    return q.bfloat16(), chunk


def reference(model, q, chunk):
    to_keys, to_values = model["to_keys"].double(), model["to_values"].double()
    results = []
    for token, tokens in zip(q.double(), model["cache"].double(), strict=True):
        latent, rotary = tokens.split([LATENT, ROTARY], dim=-1)
        straight, turned = token[:, None].split([WIDTH, ROTARY], dim=-1)
        keys, values = latent @ to_keys.mT, latent @ to_values
        p = torch.softmax((straight @ keys.mT + turned @ rotary.T) * SCALE, dim=-1)
        results.append((p @ values)[:, 0])
    return torch.stack(results)


def expanded(model, q, chunk):
    latent, rotary = model["cache"][:, None].split([LATENT, ROTARY], dim=-1)
    heads = q.shape[1]
    keys = torch.cat([latent @ model["to_keys"].mT, rotary.expand(-1, heads, -1, -1)], dim=-1)
    values = latent @ model["to_values"]
    yield lambda: F.scaled_dot_product_attention(q[:, :, None], keys, values)[:, :, 0]


def with_absorbed(model, q, attend):
    """Absorb the weights before and after `attend`, whose queries are (batch, heads, 576)."""
    straight, turned = q.split([WIDTH, ROTARY], dim=-1)
    latent = (straight.transpose(0, 1) @ model["to_keys"]).transpose(0, 1)
    mean = attend(torch.cat([latent, turned], dim=-1))
    return (mean.transpose(0, 1) @ model["to_values"]).transpose(0, 1).contiguous()


def absorbed(model, q, chunk):
    tokens = model["cache"]

    def attend(query):
        scores = (query * SCALE) @ tokens.mT
        weights = scores.softmax(dim=-1, dtype=torch.float32)
        return weights.to(q.dtype) @ tokens[:, :, :LATENT]

    return with_absorbed(model, q, attend)


def most_rows(tensor):
    """Return how many heads a program can take: their queries must fit into shared memory."""
    if not tensor.is_cuda or triton.runtime.driver.active.get_current_target().arch < 120:
        return 64
    return 16


def attended(query, cache, chunk):
    batch, heads, _ = query.shape
    tokens = cache.shape[1]
    if tokens == 0:
        raise ValueError("the context has 0 tokens, so there is nothing to attend to")
    refuse("the query", query, (batch, heads, LATENT + ROTARY))
    refuse("the latent cache", cache, (batch, tokens, LATENT + ROTARY))
    rows = min(most_rows(query), max(16, triton.next_power_of_2(heads)))
    chunks = triton.cdiv(tokens, chunk)
    out = query.new_empty(batch, heads, LATENT)
    parts = part_buffers(batch, chunks, heads, LATENT, query.device)
    attend_kernel[triton.cdiv(heads, rows), batch, chunks](
        query, cache, *parts, heads, tokens, SCALE * LOG2_E,
        ROWS=rows, LATENT=LATENT, ROTARY=ROTARY, CHUNK=chunk, BLOCK=BLOCK,
        PRODUCT=product_type(query), num_warps=8 if rows == 64 else 4, num_stages=2,
    )  # fmt: skip
    join_parts(parts, out, batch, chunks, heads, LATENT)
    return out


def fused(model, q, chunk):
    return with_absorbed(model, q, lambda query: attended(query, model["cache"], chunk))


def library(model, q, chunk):
    tokens = model["cache"][:, None]

    def attend(query):
        latent = tokens[..., :LATENT]
        return F.scaled_dot_product_attention(query[:, None], tokens, latent, scale=SCALE)[:, 0]

    return with_absorbed(model, q, attend)


def expanded_cost(batch, heads, tokens, chunk):
    numbers = batch * heads * tokens * (WIDTH + ROTARY + WIDTH)
    vectors = 2 * batch * heads * WIDTH
    return Cost(
        read=2 * numbers + 1.5 * vectors, write=vectors, ops={"bf16": 2 * numbers}, launches=1
    )


def around(batch, heads):
    """Return the cost of the products with absorbed weights, and of the copies around them."""
    weights, latent = 2 * heads * WIDTH * LATENT, 2 * batch * heads * LATENT
    small = latent * WIDTH / LATENT
    product = {"bf16": batch * weights}
    query = 2 * batch * heads * (LATENT + ROTARY)
    return (
        Cost(read=weights + small, write=latent, ops=product, launches=1)
        + Cost(read=query, write=query, launches=1)
        + Cost(read=weights + latent, write=small, ops=product, launches=1)
        + Cost(read=small, write=small, launches=1)
    )


def cache_bytes(batch, tokens):
    return 2 * batch * tokens * (LATENT + ROTARY)


def absorbed_cost(batch, heads, tokens, chunk):
    scores, cache = batch * heads * tokens, cache_bytes(batch, tokens)
    query, mean = 2 * batch * heads * (LATENT + ROTARY), 2 * batch * heads * LATENT
    latent = 2 * batch * tokens * LATENT
    to_scores = {"bf16": 2 * scores * (LATENT + ROTARY)}
    return (
        around(batch, heads)
        + Cost(read=query, write=query, launches=1)
        + Cost(read=cache + query, write=2 * scores, ops=to_scores, launches=1)
        + Cost(read=2 * scores, write=4 * scores, launches=1)  # to fp32
        + Cost(read=4 * scores, write=4 * scores, sfu=scores, launches=1)
        + Cost(read=4 * scores, write=2 * scores, launches=1)  # to bf16
        + Cost(read=2 * scores + latent, write=mean, ops={"bf16": 2 * scores * LATENT}, launches=1)
    )


def in_one(batch, heads, tokens, parts):
    scores, cache = batch * heads * tokens, cache_bytes(batch, tokens)
    blocks = -(-heads // 64)  # of heads. Each block reads the cache, the second block from the L2
    return Cost(
        read=cache + 2 * batch * heads * (LATENT + ROTARY),
        write=parts,
        l2=cache * blocks,
        sfu=scores,
        ops={"bf16": 2 * scores * (2 * LATENT + ROTARY)},
        launches=1,
    )


def fused_cost(batch, heads, tokens, chunk):
    parts = part_bytes(batch, -(-tokens // chunk), heads, LATENT)
    join = Cost(read=parts, write=2 * batch * heads * LATENT, launches=1)
    return around(batch, heads) + in_one(batch, heads, tokens, parts) + join


def library_cost(batch, heads, tokens, chunk):
    """Return the cost of PyTorch's `fmha_cutlassF_bf16_aligned_32x128_gmem_sm80`.

    A thread block takes 32 queries, and 128 tokens at a time, and multiplies with `mma.sync`, which
    reaches 63 % of the tensor cores' rate on Hopper (arXiv 2501.12084).
    """
    rows = -(-heads // 32) * 32
    programs = batch * rows // 32
    # Each SM gets an equal share of each rate, so shares of idle SMs are lost.
    idle = max(1, SMS / programs)
    tiles = 2 * (LATENT + ROTARY) + 2 * LATENT  # bytes of a token: its key, and then its value
    sums = 2 * 4 * 32 * LATENT / 128  # read and written, per token
    attend = Cost(
        read=cache_bytes(batch, tokens) + 2 * batch * heads * (LATENT + ROTARY),
        write=2 * batch * heads * LATENT,
        l2=programs * tokens * (tiles + sums) * idle,
        sfu=batch * rows * tokens * idle,
        ops={"bf16": 2 * batch * rows * tokens * (2 * LATENT + ROTARY) * idle / 0.63},
        launches=1,
    )
    return around(batch, heads) + attend


@compare(
    baseline=expanded,
    optimized=[
        Variant(absorbed, at_least={"sm90": 2.9}),
        Variant(fused, at_least={"sm90": 5.8}),
        Variant(library, at_least="yardstick"),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[
        {"batch": 64, "heads": 16, "tokens": 4096, "chunk": 1024},
        {"batch": 32, "heads": 128, "tokens": 4096, "chunk": 1024},
    ],
    check_sizes=[
        {"batch": 2, "heads": 2, "tokens": 35, "chunk": 32},
        {"batch": 1, "heads": 1, "tokens": 9, "chunk": 32},
    ],
    work=lambda batch, heads, tokens, chunk: Work(
        read=cache_bytes(batch, tokens),
        flops={"bf16": 2 * batch * heads * tokens * (WIDTH + ROTARY + WIDTH)},
        terms=tokens,
        # As in ../ch13/long_attention_test.py, plus one more rounding of the query or the keys.
        roundings=16,
    ),
    bound="dram",
    costs={
        expanded: expanded_cost,
        absorbed: absorbed_cost,
        fused: fused_cost,
        library: library_cost,
    },
)
def test_mla_decode(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestRefused:
    """The launching helper rejects wrong inputs before the launch."""

    @pytest.mark.parametrize(
        ("query", "cache", "words"),
        [
            ((1, 4, 512), (1, 5, 576), r"the query is \(1, 4, 512\); .* takes \(1, 4, 576\)"),
            ((1, 4, 576), (1, 5, 640), r"the latent cache is \(1, 5, 640\)"),
            ((1, 4, 576), (1, 0, 576), "0 tokens"),
            ((1, 0, 576), (1, 5, 576), "it is empty"),
        ],
    )
    def test_shape(self, query, cache, words):
        with pytest.raises(ValueError, match=words):
            attended(torch.ones(query).bfloat16(), torch.ones(cache).bfloat16(), 64)

    def test_type(self):
        with pytest.raises(ValueError, match=r"the query is torch.float16"):
            attended(torch.ones(1, 4, 576).half(), torch.ones(1, 5, 576).bfloat16(), 64)
