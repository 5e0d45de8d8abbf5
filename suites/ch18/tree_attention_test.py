"""Tree attention: verify all branches of a draft in one pass over the cache.

Problem    Speculative decoding verifies a tree of drafted tokens (SpecInfer, arXiv:2305.09781). A
           node attends to the context of its sequence, to its ancestors, and to itself. The tree
           has `branches` branches of 4 nodes each. All branches share the first node. There are 32
           bf16 query heads and 8 groups of keys and values, 128 numbers each. The context is the
           page's state. Before the timed part, every side copies the context to a cache with room
           for the nodes. In the timed part, each side writes the nodes' keys and values to that
           cache. The result is the attention of all nodes.
Baseline   per_branch: for each branch, write the keys and values of its nodes after the context.
           Then call `scaled_dot_product_attention` with a causal mask for the last 4 tokens.
Optimized  masked: changes `per_branch`. Write all nodes at once, and make one call. A mask hides
           all nodes from a node except its ancestors and itself. The mask is made before the timed
           part. The heads of a group become queries of one head, because PyTorch's fast kernels do
           not support grouped heads together with a mask.
           fused: changes `masked`. A Triton kernel has one program per sequence, group, and `chunk`
           tokens. A second kernel joins the chunks' results. For each node, the kernel reads a
           32-bit word instead of a mask value per score.
Bound      DRAM limits `fused`, because the context is read once. `per_branch` reads the context
           once per branch, but the tensor cores take longer than these reads: for each head,
           FlashAttention-2 computes a tile of 128 queries, and only 4 of these queries exist. With
           2 sequences, `masked` has 16 programs, so most SMs are idle.
Seen       `masked` takes two to three times as long as predicted, on an H100 and on an H200. We did
           not record which kernel PyTorch chose. If it does not split the context, an SM has at
           most one program, which probably keeps too few bytes in flight. With 2 sequences on an
           H100, `masked` gains about a third over `per_branch`. `fused` splits the context, and is
           many times as fast as `per_branch`. In the same case, `per_branch` takes a third longer
           than predicted. We did not measure why. `fused` is within about a fifth of its
           prediction.
Use when   A draft has several candidates for a token, and the context is much longer than the tree.
           The gain of a tree also depends on how many drafted tokens are accepted, which this page
           does not measure.
"""

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from pytest_aisp import Cost, Work, compare

from .split_kv import (
    LOG2_E,
    join_parts,
    part_buffers,
    part_bytes,
    product_operand,
    product_type,
    refuse,
)

GROUPS, SHARE, WIDTH = 8, 4, 128
HEADS = GROUPS * SHARE
DEPTH = 4  # nodes of a branch
BLOCK = 64  # tokens of one step of a loop
SMS = 132  # of an H200, for costs
WORD = 32  # bits of a node's word: the most nodes of a tree


@triton.jit
def attend_kernel(
    q, k, v, ancestors, sums, largest, weights, context, factor,
    NODES: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr,
):  # fmt: skip
    """Compute attention of a group's nodes and heads over a chunk of context and nodes."""
    item, chunk = tl.program_id(0), tl.program_id(1)
    row, lane = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    here = row[:, None] < SHARE * NODES
    queries = (item * SHARE * NODES + row[:, None]) * WIDTH + lane[None, :]
    query = tl.load(q + queries, mask=here, other=0.0).to(PRODUCT)
    word = tl.load(ancestors + row % NODES)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    tokens = context + NODES
    end = tl.minimum(chunk * CHUNK + CHUNK, tokens)
    for start in range(chunk * CHUNK, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < end
        at = (item.to(tl.int64) * tokens + token)[:, None] * WIDTH + lane[None, :]
        keys = product_operand(tl.load(k + at, mask=inside[:, None], other=0.0), PRODUCT)
        values = product_operand(tl.load(v + at, mask=inside[:, None], other=0.0), PRODUCT)
        node = tl.minimum(tl.maximum(token - context, 0), 31)  # a shift by 32 is undefined
        related = (word[:, None] >> node[None, :]) & 1
        seen = inside[None, :] & ((token < context)[None, :] | (related == 1))
        scores = tl.where(seen, tl.dot(query, keys.T) * factor, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        # If the last chunk holds only nodes, a row's first visible key may come late.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(top - finite)
        p = tl.exp2(scores - finite[:, None])
        weight = weight * kept + tl.sum(p, axis=1)
        total = tl.dot(product_operand(p, PRODUCT), values, total * kept[:, None])
        top = higher
    part = (item * tl.num_programs(1) + chunk) * SHARE * NODES + row
    tl.store(largest + part, top, mask=row < SHARE * NODES)
    tl.store(weights + part, weight, mask=row < SHARE * NODES)
    tl.store(sums + part[:, None] * WIDTH + lane[None, :], total, mask=here)


def tree(branches):
    """Return the nodes of each branch, in order from the root. All branches share node 0."""
    return [[0, *(1 + (DEPTH - 1) * b + i for i in range(DEPTH - 1))] for b in range(branches)]


def nodes_of(branches):
    return 1 + (DEPTH - 1) * branches


def words_of(paths, nodes):
    """Return a word per node, with a bit for each visible node. Raise `ValueError` if wrong."""
    if nodes < 1:
        raise ValueError("the tree has 0 nodes")
    if nodes > WORD:
        raise ValueError(f"the tree has {nodes} nodes; a word holds {WORD}")
    words = [0] * nodes
    for path in paths:
        for i, node in enumerate(path):
            if not 0 <= node < nodes:
                raise ValueError(f"node {node} of a branch is not one of the {nodes} nodes")
            words[node] |= sum(1 << above for above in path[: i + 1])
    return words


def on_device(words, device):
    return torch.tensor([w - (w >> 31 << 32) for w in words], dtype=torch.int32).to(device)


def state(device, batch, branches, context, chunk):
    shape = (batch, GROUPS, context, WIDTH)
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]


def inputs(device, batch, branches, context, chunk):
    nodes = nodes_of(branches)
    q = 2 * torch.randn(batch, HEADS, nodes, WIDTH, device=device)
    drafted = torch.randn(2, batch, GROUPS, nodes, WIDTH, device=device)
    return q.bfloat16(), drafted.bfloat16(), branches, chunk


def reference(cache, q, drafted, branches, chunk):
    """Compute attention of one node at a time, over only its visible tokens."""
    out = torch.zeros_like(q, dtype=torch.float64)
    for sequence, queries in enumerate(q):
        rows = queries.double().view(GROUPS, SHARE, -1, WIDTH)
        context, added = [x[sequence].double() for x in cache], drafted[:, sequence].double()
        for path in tree(branches):
            for i, node in enumerate(path):
                above = path[: i + 1]
                keys, values = (
                    torch.cat([old, new[:, above]], dim=1)
                    for old, new in zip(context, added, strict=True)
                )
                p = torch.softmax(rows[:, :, node] @ keys.mT / WIDTH**0.5, dim=-1)
                out[sequence, :, node] = (p @ values).flatten(0, 1)
    return out


def room_for(cache, nodes):
    """Return the context with room for `nodes` more tokens after it."""
    return [F.pad(x, (0, 0, 0, nodes)) for x in cache]


def per_branch(cache, q, drafted, branches, chunk):
    rooms, context = room_for(cache, DEPTH), cache[0].shape[2]
    paths = [torch.tensor(path).to(q.device) for path in tree(branches)]
    mask = causal_lower_right(DEPTH, context + DEPTH)

    def call():
        out = torch.empty_like(q)
        for path in paths:
            for room, nodes in zip(rooms, drafted, strict=True):
                room[:, :, context:] = nodes[:, :, path]
            queries = q[:, :, path]
            out[:, :, path] = F.scaled_dot_product_attention(
                queries, *rooms, attn_mask=mask, enable_gqa=True
            )
        return out

    yield call


def masked(cache, q, drafted, branches, chunk):
    nodes, context = nodes_of(branches), cache[0].shape[2]
    rooms = room_for(cache, nodes)
    words = words_of(tree(branches), nodes)
    seen = torch.tensor([[bool(word >> node & 1) for node in range(nodes)] for word in words])
    seen = F.pad(seen, (context, 0), value=True).repeat(SHARE, 1)
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -torch.inf).to(q.device)

    def call():
        for room, each in zip(rooms, drafted, strict=True):
            room[:, :, context:] = each
        rows = q.view(len(q), GROUPS, SHARE * nodes, WIDTH)
        return F.scaled_dot_product_attention(rows, *rooms, attn_mask=bias).view(q.shape)

    yield call


def attended(q, k, v, ancestors, chunk):
    batch, _, nodes, _ = q.shape
    context = k.shape[2] - nodes
    refuse("q", q, (batch, HEADS, nodes, WIDTH))
    if context < 1:
        raise ValueError(f"{k.shape[2]} tokens are no more than the {nodes} nodes: no context")
    refuse("k", k, (batch, GROUPS, context + nodes, WIDTH))
    refuse("v", v, k.shape)
    if ancestors.dtype != torch.int32 or ancestors.shape != (nodes,):
        raise ValueError(f"{nodes} nodes need {nodes} words of int32")
    items, chunks, rows = batch * GROUPS, triton.cdiv(context + nodes, chunk), SHARE * nodes
    out = torch.empty_like(q)
    parts = part_buffers(items, chunks, rows, WIDTH, q.device)
    attend_kernel[items, chunks](
        q, k, v, ancestors, *parts, context, LOG2_E / WIDTH**0.5,
        NODES=nodes, SHARE=SHARE, ROWS=max(16, triton.next_power_of_2(rows)), WIDTH=WIDTH,
        CHUNK=chunk, BLOCK=BLOCK, PRODUCT=product_type(q), num_warps=4, num_stages=2,
    )  # fmt: skip
    join_parts(parts, out, items, chunks, rows, WIDTH)
    return out


def fused(cache, q, drafted, branches, chunk):
    nodes, context = nodes_of(branches), cache[0].shape[2]
    rooms = room_for(cache, nodes)
    ancestors = on_device(words_of(tree(branches), nodes), q.device)

    def call():
        for room, each in zip(rooms, drafted, strict=True):
            room[:, :, context:] = each
        return attended(q, *rooms, ancestors, chunk)

    yield call


def tokens_bytes(batch, tokens):
    return 4 * batch * GROUPS * tokens * WIDTH


def heads_bytes(batch, nodes):
    return 2 * batch * HEADS * nodes * WIDTH


def written(batch, nodes):
    entry = tokens_bytes(batch, nodes)
    return 2 * Cost(read=entry / 2, write=entry / 2, launches=1)


def attending(batch, context, nodes, rows, programs=SMS, rounds=1):
    cache, vectors = tokens_bytes(batch, context + nodes), heads_bytes(batch, nodes)
    # Each SM gets an equal share of the L2 rate, so shares of idle SMs are lost.
    idle = max(1, SMS / programs)
    return Cost(
        read=cache + vectors,
        write=vectors,
        l2=cache * rounds * idle,  # how often the L2 delivers the cache
        ops={"bf16": cache * rows * idle},
        launches=1,
    )


def per_branch_cost(batch, branches, context, chunk):
    vectors = heads_bytes(batch, DEPTH)
    select = Cost(read=vectors, write=vectors, launches=1)
    # Keys and values are selected before they are written. Each query head has its own tile and
    # reads the cache. The first head of a group reads it from DRAM. `causal_lower_right` calls
    # FlashAttention-2. FlashAttention-2 has tiles of 128 queries, or 64 if it splits the context to
    # fill the GPU. `mma.sync` reaches 63 % of the tensor cores' rate on Hopper (arXiv 2501.12084).
    # Exponentials come after the products.
    tile = 128 if batch * HEADS >= 0.8 * 2 * SMS else 64
    attend = attending(batch, context, DEPTH, rows=tile * SHARE / 0.63, rounds=SHARE)
    attend += Cost(sfu=tile * batch * HEADS * (context + DEPTH))
    return branches * (2 * written(batch, DEPTH) + 2 * select + attend)


def masked_cost(batch, branches, context, chunk):
    nodes = nodes_of(branches)
    rows = -(-SHARE * nodes // 64) * 64  # in tiles of 64 queries
    return written(batch, nodes) + attending(batch, context, nodes, rows, batch * GROUPS)


def fused_cost(batch, branches, context, chunk):
    nodes = nodes_of(branches)
    rows = SHARE * nodes
    parts = part_bytes(batch * GROUPS, -(-(context + nodes) // chunk), rows, WIDTH)
    attend = attending(batch, context, nodes, triton.next_power_of_2(rows))
    return written(batch, nodes) + attend + Cost(write=parts) + Cost(read=parts, launches=1)


@compare(
    baseline=per_branch,
    optimized=[masked, fused],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[
        {"batch": 16, "branches": 5, "context": 8192, "chunk": 1024},
        {"batch": 2, "branches": 5, "context": 65536, "chunk": 1024},
    ],
    check_sizes=[{"batch": 1, "branches": 2, "context": 58, "chunk": 64}],
    # As in ../ch09/attention_test.py: a head's weights and outputs are rounded.
    work=lambda batch, branches, context, chunk: Work(
        read=tokens_bytes(batch, context),
        write=heads_bytes(batch, nodes_of(branches)),
        terms=context,
        roundings=16,
    ),
    bound="dram",
    costs={per_branch: per_branch_cost, masked: masked_cost, fused: fused_cost},
)
def test_tree_attention(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestRefused:
    """Making words for a wrong tree is an error. The launching helper rejects the rest."""

    @pytest.mark.parametrize(
        ("paths", "nodes", "words"),
        [
            ([[0, 3]], 3, "node 3 of a branch is not one of the 3 nodes"),
            ([], 0, "0 nodes"),
            ([[0]], 33, "33 nodes; a word holds 32"),
        ],
    )
    def test_tree(self, paths, nodes, words):
        with pytest.raises(ValueError, match=words):
            words_of(paths, nodes)

    @pytest.mark.parametrize(
        ("q", "tokens", "words"),
        [
            ((1, HEADS, 3, 64), 9, r"q is \(1, 32, 3, 64\); .* takes \(1, 32, 3, 128\)"),
            ((1, HEADS, 0, WIDTH), 9, "it is empty"),
            ((1, HEADS, 3, WIDTH), 3, "no context"),
        ],
    )
    def test_shape(self, q, tokens, words):
        k = torch.ones(1, GROUPS, tokens, WIDTH).bfloat16()
        with pytest.raises(ValueError, match=words):
            attended(torch.ones(q).bfloat16(), k, k, torch.zeros(3, dtype=torch.int32), 64)
