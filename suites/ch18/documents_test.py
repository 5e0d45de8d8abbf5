"""Document mask: describe the mask by a function, and skip the tiles that are masked completely.

Problem    Documents are packed into one sequence for training. A token attends only to itself and
           to earlier tokens of its own document. Compute the forward pass in bf16, with 8 heads of
           128. The lengths of the documents are between one token and about twice the mean.
           `biased` and `flex` make their masks before the timed part.
Baseline   biased: `scaled_dot_product_attention` with an additive bf16 mask. PyTorch chooses the
           kernel.
Optimized  looped: changes `biased`. There is one causal call per document, on a view of its tokens.
           flex: changes `biased`. In compiled FlexAttention, a Python function compares the
           documents of query and key. A block mask tells the kernel which tiles of 128 x 128 the
           function hides completely, and the kernel skips them.
Bound      Tensor cores limit `flex`, for the tiles that have at least one visible score. Tiles that
           the function hides in part take extra instructions. `biased` computes all tiles and also
           reads two bytes of the mask for every score and head. `looped` computes about the same
           number of tiles as `flex`, in small calls that do not fill the GPU. A call takes at least
           as long as its last tile of queries, which attends to the whole document.
Seen       On an H100, all sides take longer than predicted. We did not record which kernel PyTorch
           chose for `biased` and `looped`. `flex` has programs of different lengths, and its partly
           hidden tiles take extra instructions. We did not measure the cost of these two effects. A
           call of `looped` has few tiles if its document is short, so starting and ending the call
           probably takes longer than its products.
Use when   Training packs short documents into long sequences. All layers of a step can share one
           block mask, but each batch needs a new mask. `varlen_test.py` has the same problem
           without a causal mask. Its kernels take a list of the sequences' starts. Long causal
           attention and a sliding window are in `../ch13/long_attention_test.py` and
           `../ch13/sliding_window_test.py`.
"""

import functools

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pytest_aisp import Cost, Variant, Work, compare

WIDTH = 128  # numbers of a head
TILE = 128  # queries and keys of a tile in FlexAttention
SMS = 132  # of an H200, for costs


def lengths_of(tokens, documents):
    """Return each document's number of tokens. Raise `ValueError` if a document would be empty."""
    if not 0 < documents <= tokens:
        raise ValueError(f"{tokens} tokens cannot be {documents} documents of at least one token")
    # The lengths grow from one token to about twice the mean, twice along the sequence.
    weights = list(range(documents))
    rest, total = tokens - documents, max(sum(weights), 1)
    more = [rest * weight // total for weight in weights]
    more[-1] += rest - sum(more)
    return [1 + each for each in [*more[::2], *more[1::2]]]


def documents_of(tokens, documents):
    """Return the document number of each token."""
    lengths = torch.tensor(lengths_of(tokens, documents))
    return torch.arange(documents).repeat_interleave(lengths)


def inputs(device, heads, tokens, documents):
    q, k = torch.randn(2, 1, heads, tokens, WIDTH, device=device)
    v = torch.rand(1, heads, tokens, WIDTH, device=device) * 2 - 1
    return (2 * q).bfloat16(), k.bfloat16(), v.bfloat16(), documents


def reference(q, k, v, documents):
    results, begin = [], 0
    for length in lengths_of(q.shape[2], documents):
        own = slice(begin, begin + length)
        heads = []
        for head in range(q.shape[1]):
            queries, keys, values = (x[0, head, own].double() for x in (q, k, v))
            scores = queries @ keys.T / WIDTH**0.5
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ values)
        results.append(torch.stack(heads))
        begin += length
    return torch.cat(results, dim=1)[None]


def biased(q, k, v, documents):
    owner = documents_of(q.shape[2], documents).to(q.device)
    seen = (owner[:, None] == owner).tril()
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)
    yield lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def looped(q, k, v, documents):
    lengths = lengths_of(q.shape[2], documents)
    parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*x, is_causal=True) for x in parts], dim=2)


@functools.cache
def compiled_attention():
    return torch.compile(flex_attention, dynamic=False)


def flex(q, k, v, documents):
    tokens = q.shape[2]
    owner = documents_of(tokens, documents).to(q.device)

    def sees(batch, head, query, key):
        return (owner[query] == owner[key]) & (query >= key)

    mask = create_block_mask(sees, None, None, tokens, tokens, device=q.device)
    run = compiled_attention()
    yield lambda: run(q, k, v, block_mask=mask)


def visible(tokens, documents):
    """Return the number of visible query-key pairs of a head."""
    return sum(n * (n + 1) // 2 for n in lengths_of(tokens, documents))


@functools.cache
def visible_tiles(tokens, documents):
    """Return the number of tiles with at least one visible score."""
    tiles, begin = set(), 0
    for length in lengths_of(tokens, documents):
        first, last = begin // TILE, (begin + length - 1) // TILE
        tiles |= {(q, k) for q in range(first, last + 1) for k in range(first, q + 1)}
        begin += length
    return len(tiles)


def attending(heads, tokens, scores, extra=0, longest=0):
    """Return the cost of one kernel that keeps its `scores` of each head on the chip.

    An SM computes one tile of queries at a time. The longest tile has `longest` scores.
    """
    # SMs without a tile are idle, and so are SMs that wait for the longest tile.
    idle = max(1, SMS / (heads * -(-tokens // TILE)))
    counted = max(heads * scores * idle, SMS * longest)
    return Cost(
        read=6 * heads * tokens * WIDTH + extra,
        write=2 * heads * tokens * WIDTH,
        sfu=counted,
        ops={"bf16": 4 * counted * WIDTH},
        launches=1,
    )


def biased_cost(heads, tokens, documents):
    # The mask is larger than the L2, so each head reads it from DRAM.
    return attending(heads, tokens, tokens**2, extra=2 * heads * tokens**2)


def looped_cost(heads, tokens, documents):
    moved = 2 * heads * tokens * WIDTH
    cost = Cost(read=moved, write=moved, launches=1)  # cat
    for length in lengths_of(tokens, documents):
        last = TILE * length  # its queries attend to all keys
        cost += attending(heads, length, length * (length + 1) / 2, longest=last)
    return cost


def flex_cost(heads, tokens, documents):
    return attending(heads, tokens, visible_tiles(tokens, documents) * TILE**2)


@compare(
    baseline=biased,
    optimized=[
        Variant(looped, at_least={"sm90": 4.1}),
        Variant(flex, gpu_only="FlexAttention's Triton kernel", at_least={"sm90": 8.7}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[
        {"heads": 8, "tokens": 16384, "documents": 8},
        {"heads": 8, "tokens": 16384, "documents": 64},
    ],
    check_sizes=[
        {"heads": 2, "tokens": 70, "documents": 3},
        {"heads": 1, "tokens": 9, "documents": 1},
    ],
    work=lambda heads, tokens, documents: Work(
        read=6 * heads * tokens * WIDTH,
        write=2 * heads * tokens * WIDTH,
        flops={"bf16": 4 * heads * visible(tokens, documents) * WIDTH},
        terms=tokens,
        # As in ../ch09/attention_test.py: a head's weights and outputs are rounded.
        roundings=16,
    ),
    bound="tensor",
    costs={biased: biased_cost, looped: looped_cost, flex: flex_cost},
)
def test_documents(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestRefused:
    """Making a mask for an empty document is an error."""

    @pytest.mark.parametrize(("tokens", "documents"), [(3, 4), (3, 0), (0, 1)])
    def test_lengths(self, tokens, documents):
        with pytest.raises(ValueError, match=f"{tokens} tokens cannot be {documents} documents"):
            documents_of(tokens, documents)
