"""Sequences of different lengths: pack the tokens instead of padding them.

Problem    Compute bf16 attention without a mask over a batch of sequences, as in an encoder, with
           16 heads of 128. The lengths are between a sixteenth of `tokens` and `tokens`, so about
           half of a padded batch is padding. Queries, keys and values are packed: the tokens of all
           sequences are contiguous, and a list gives the sequences' starts (`cu_seqlens`). The
           results are packed too.
Baseline   padded: copy the tokens to a batch as long as the longest sequence. Then call
           `scaled_dot_product_attention` with a mask for the padding, and copy the tokens back. The
           mask and indices are made before the timed part.
Optimized  looped: changes `padded`. There is one call per sequence, on a view of its tokens.
           Nothing is padded.
           packed: changes `looped`. One Triton kernel computes all sequences. A program takes 64
           queries of a head. A list, made before the timed part, gives the sequence of each
           program's queries.
           nested: changes `looped`. `scaled_dot_product_attention` gets a nested tensor of jagged
           layout, which PyTorch's flash kernel handles as packed tokens.
           varlen: changes `looped`. `torch.nn.attention.varlen.varlen_attn` passes the list of
           starts to the kernel of `nested`.
Bound      Tensor cores, except for short sequences. `padded` also computes the scores of the
           padding. `looped` leaves SMs idle when a sequence has fewer tiles of queries than there
           are SMs, and each call ends before the next one begins. In `packed`, a program has only
           64 queries, so reading keys and values from the L2 takes longer than the products. A
           program's exponentials come after its products.
Seen       On an H100 with sequences of up to 512 tokens, all sides take about twice as long as
           predicted, and `looped` takes even longer. In `packed`, `nested` and `varlen`, a program
           has only a few tiles of keys, so its start and end probably take as long as its products.
           A call of `looped` has few programs, which do not fill the GPU. We did not record which
           kernel PyTorch chose for `padded`, which has a mask. `packed`, `nested` and `varlen` take
           the same time. With up to 4096 tokens, `looped` is the fastest side: it takes a third
           less time than `packed`, `nested` and `varlen`, which again take the same time. `nested`
           and `varlen` take more than twice as long as predicted, and reach the same share of the
           tensor cores' peak as FlashAttention-2 in `triton_attention_test.py`. `looped` reaches a
           larger share, which only cuDNN reaches on that page. So PyTorch probably chose cuDNN for
           `looped`, but we did not record the kernel. `packed` takes almost one and a half times as
           long as predicted, and padded almost twice as long.
Use when   The sequences of a batch differ in length. The gain depends on how many scores belong to
           padding, and the number of scores grows with the square of the length. If each sequence
           fills the GPU, a call per sequence is enough, and may be faster, because it can use a
           better kernel. If all lengths are nearly equal, padding is simpler. With enough requests,
           sorting them by length also reduces the padding.
"""

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare
from suites.rounding import to_even

from .split_kv import LOG2_E, product_operand, product_type, refuse

WIDTH = 128  # numbers of a head
QUERIES, KEYS = 64, 64  # of a tile of scores
LIBRARY = 128  # queries of a tile in PyTorch's flash kernel, for costs
SMS = 132  # of an H200, for costs


@triton.jit
def attend_kernel(
    q, k, v, out, begins, owners, starts, factor,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Compute attention of QUERIES tokens of one head over all tokens of their sequence."""
    head, block = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0)
    sequence, first = tl.load(owners + block), tl.load(starts + block)
    begin, end = tl.load(begins + sequence), tl.load(begins + sequence + 1)
    lane = tl.arange(0, WIDTH)
    token = first + tl.arange(0, QUERIES)
    own = token < end
    queries = (token.to(tl.int64) * heads + head)[:, None] * WIDTH + lane[None, :]
    query = tl.load(q + queries, mask=own[:, None], other=0.0).to(PRODUCT)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    total = tl.zeros((QUERIES, WIDTH), tl.float32)
    for start in range(begin, end, KEYS):
        other = start + tl.arange(0, KEYS)
        inside = other < end
        at = (other.to(tl.int64) * heads + head)[:, None] * WIDTH + lane[None, :]
        keys = product_operand(tl.load(k + at, mask=inside[:, None], other=0.0), PRODUCT)
        values = product_operand(tl.load(v + at, mask=inside[:, None], other=0.0), PRODUCT)
        scores = tl.where(inside[None, :], tl.dot(query, keys.T) * factor, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        kept = tl.exp2(top - higher)
        p = tl.exp2(scores - higher[:, None])
        weight = weight * kept + tl.sum(p, axis=1)
        total = tl.dot(product_operand(p, PRODUCT), values, total * kept[:, None])
        top = higher
    result = to_even(total / weight[:, None], DROPPED=16).to(tl.bfloat16)
    tl.store(out + queries, result, mask=own[:, None])


def lengths_of(batch, tokens):
    """Return the length of each sequence, from a sixteenth of `tokens` to `tokens`."""
    least = -(-tokens // 16)
    return [least + (tokens - least) * i // max(batch - 1, 1) for i in range(batch)]


def begins_of(lengths):
    """Return the start of each sequence, and the end of the last sequence."""
    for sequence, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {sequence} has {length} tokens: nothing to attend to")
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def blocks_of(begins):
    """Return the sequence and the first token of each block of queries, long sequences first."""
    order = sorted(range(len(begins) - 1), key=lambda i: begins[i] - begins[i + 1])
    blocks = [(i, at) for i in order for at in range(begins[i], begins[i + 1], QUERIES)]
    return torch.tensor(blocks, dtype=torch.int32).T.contiguous()


def inputs(device, heads, batch, tokens):
    total = sum(lengths_of(batch, tokens))
    q, k = torch.randn(2, total, heads, WIDTH, device=device)
    v = torch.rand(total, heads, WIDTH, device=device) * 2 - 1
    return (2 * q).bfloat16(), k.bfloat16(), v.bfloat16(), batch, tokens


def reference(q, k, v, batch, tokens):
    results, begin = [], 0
    for length in lengths_of(batch, tokens):
        own = slice(begin, begin + length)
        heads = []
        for head in range(q.shape[1]):
            queries, keys, values = (x[own, head].double() for x in (q, k, v))
            heads.append((queries @ keys.T / WIDTH**0.5).softmax(dim=-1) @ values)
        results.append(torch.stack(heads, dim=1))
        begin += length
    return torch.cat(results)


def padded(q, k, v, batch, tokens):
    lengths = lengths_of(batch, tokens)
    at = torch.cat([i * tokens + torch.arange(n) for i, n in enumerate(lengths)]).to(q.device)
    seen = torch.arange(tokens) < torch.tensor(lengths)[:, None]
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf).to(q.device)
    bias = bias[:, None, None]

    def call():
        batches = []
        for x in (q, k, v):
            wide = x.new_zeros(batch * tokens, *x.shape[1:]).index_copy_(0, at, x)
            batches.append(wide.unflatten(0, (batch, tokens)).transpose(1, 2))
        out = F.scaled_dot_product_attention(*batches, attn_mask=bias)
        return out.transpose(1, 2).flatten(0, 1)[at]

    yield call


def looped(q, k, v, batch, tokens):
    def attend(*heads):
        return F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in heads))[0]

    lengths = lengths_of(batch, tokens)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([attend(*heads).transpose(0, 1) for heads in parts])


def attended(q, k, v, begins, blocks):
    """Compute attention with one kernel. `blocks` is the output of `blocks_of`, on the GPU."""
    refuse("q", q, (q.shape[0], q.shape[1], WIDTH))
    refuse("k", k, q.shape)
    refuse("v", v, q.shape)
    if begins.dtype != torch.int32 or blocks.dtype != torch.int32:
        raise ValueError(f"begins and blocks are {begins.dtype}, {blocks.dtype}; use int32")
    out = torch.empty_like(q)
    owners, starts = blocks
    attend_kernel[q.shape[1], len(owners)](
        q, k, v, out, begins, owners, starts, LOG2_E / WIDTH**0.5,
        QUERIES=QUERIES, KEYS=KEYS, WIDTH=WIDTH, PRODUCT=product_type(q),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def packed(q, k, v, batch, tokens):
    begins = begins_of(lengths_of(batch, tokens))
    blocks = blocks_of(begins).to(q.device)
    ends = torch.tensor(begins, dtype=torch.int32).to(q.device)
    yield lambda: attended(q, k, v, ends, blocks)


def nested(q, k, v, batch, tokens):
    lengths = lengths_of(batch, tokens)
    ends = torch.tensor(begins_of(lengths)).to(q.device)

    def call():
        jagged = (
            torch.nested.nested_tensor_from_jagged(
                x, ends, min_seqlen=min(lengths), max_seqlen=max(lengths)
            ).transpose(1, 2)
            for x in (q, k, v)
        )
        return F.scaled_dot_product_attention(*jagged).transpose(1, 2).values()

    yield call


def varlen(q, k, v, batch, tokens):
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor(begins_of(lengths_of(batch, tokens)), dtype=torch.int32).to(q.device)
    yield lambda: varlen_attn(q, k, v, ends, ends, tokens, tokens)


def attending(total, scores, heads, queries=LIBRARY):
    """Return the cost of one kernel that keeps its `scores` of each head on the chip."""
    # SMs without a tile of queries are idle.
    idle = max(1, SMS / (heads * -(-total // queries)))
    return Cost(
        read=6 * total * heads * WIDTH,
        write=2 * total * heads * WIDTH,
        l2=4 * scores * heads * WIDTH / queries,  # each tile of queries reads keys and values
        sfu=scores * heads * idle,
        ops={"bf16": 4 * scores * heads * WIDTH * idle},
        launches=1,
    )


def padded_cost(heads, batch, tokens):
    total, whole = sum(lengths_of(batch, tokens)), batch * tokens
    small, large = (2 * many * heads * WIDTH for many in (total, whole))
    pad = Cost(write=large, launches=1) + Cost(read=small, write=small, launches=1)
    back = Cost(read=small, write=small, launches=1)
    return 3 * pad + attending(whole, whole * tokens, heads) + back


def looped_cost(heads, batch, tokens):
    lengths = lengths_of(batch, tokens)
    cost = Cost(read=2 * sum(lengths) * heads * WIDTH, write=2 * sum(lengths) * heads * WIDTH)
    for length in lengths:
        cost += attending(length, length**2, heads)
    return cost + Cost(launches=1)  # cat


def library_cost(heads, batch, tokens, queries=LIBRARY):
    lengths = lengths_of(batch, tokens)
    return attending(sum(lengths), sum(n**2 for n in lengths), heads, queries)


def packed_cost(heads, batch, tokens):
    return library_cost(heads, batch, tokens, QUERIES)


@compare(
    baseline=padded,
    optimized=[
        looped,
        packed,
        Variant(nested, gpu_only="PyTorch's flash kernel", at_least="yardstick"),
        Variant(varlen, gpu_only="PyTorch's flash kernel", at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[
        {"heads": 16, "batch": 64, "tokens": 512},
        {"heads": 16, "batch": 16, "tokens": 4096},
    ],
    check_sizes=[
        {"heads": 2, "batch": 3, "tokens": 70},
        {"heads": 1, "batch": 1, "tokens": 33},
    ],
    work=lambda heads, batch, tokens: Work(
        read=6 * sum(lengths_of(batch, tokens)) * heads * WIDTH,
        write=2 * sum(lengths_of(batch, tokens)) * heads * WIDTH,
        flops={"bf16": 4 * heads * WIDTH * sum(n**2 for n in lengths_of(batch, tokens))},
        terms=tokens,
        # As in ../ch09/attention_test.py: a head's weights and outputs are rounded.
        roundings=16,
    ),
    bound="tensor",
    costs={
        padded: padded_cost,
        looped: looped_cost,
        packed: packed_cost,
        nested: library_cost,
        varlen: library_cost,
    },
)
def test_varlen(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestRefused:
    """Making a list of wrong lengths is an error. The launching helper rejects the rest."""

    @pytest.mark.parametrize(("lengths", "sequence"), [([3, 0], 1), ([-1, 3], 0)])
    def test_length(self, lengths, sequence):
        with pytest.raises(ValueError, match=f"sequence {sequence} has {min(lengths)} tokens"):
            begins_of(lengths)

    @pytest.mark.parametrize(
        ("shape", "dtype", "words"),
        [
            ((3, 2, 64), torch.bfloat16, r"q is \(3, 2, 64\); .* takes \(3, 2, 128\)"),
            ((3, 2, WIDTH), torch.float16, r"q is torch.float16"),
            ((0, 2, WIDTH), torch.bfloat16, "it is empty"),
        ],
    )
    def test_tokens(self, shape, dtype, words):
        q, begins = torch.ones(shape, dtype=dtype), [0, 3]
        with pytest.raises(ValueError, match=words):
            attended(q, q, q, torch.tensor(begins, dtype=torch.int32), blocks_of(begins))
