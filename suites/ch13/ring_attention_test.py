"""Ring attention: send keys and values to the next rank while computing with them.

Problem    Compute causal attention over a sequence. The rows of the sequence are split over the
           ranks, in order. Each rank has q, k and v of shape (rows, heads, dim) in bf16, the layout
           that projections return. Each rank returns the attention output for its own rows.
Baseline   gathered: each rank gathers the keys and values of all ranks, and computes the attention
           of its own rows over all rows up to its last row.
Optimized  ring: changes `gathered`. Attention is computed in blocks. While a rank computes with one
           block of keys and values, it sends this block to the next rank and receives another
           block. The partial results are merged by their log-sum-exp, as in an online softmax (Liu
           et al., arXiv:2310.01889). A rank forwards blocks of later rows without computing with
           them.
           zigzag: changes `ring`. The rows are distributed so that all ranks have the same work.
           The rows are cut into 2 * world chunks, and rank r gets chunks r and 2 * world - 1 - r.
           The timed part includes moving the rows into this order, and moving the result back. If
           the data loader already uses this order, neither move is needed.
Bound      The tensor cores of the last rank limit `gathered` and `ring`: the mask removes half of
           that rank's own block, and nothing of the earlier blocks. `ring` hides the transfer, but
           merging the partial results takes time. On many ranks, `zigzag` gives the last rank about
           half as many matrix products.
Seen       All sides take longer than predicted, because the cost assumes that attention multiplies
           as fast as `a @ b`. PyTorch's flash attention is far slower, as `long_attention_test.py`
           shows for the same kernel alone. On two H200s, `ring` and `zigzag` gain more than
           predicted. We do not know why. On four H200s, `ring` takes a little longer than
           `gathered`, and `zigzag` gains about as much as on two. If copies between four GPUs are
           as fast as between two, the costs predict both of these ratios.
Use when   One GPU cannot hold the keys and values of the whole sequence, or the link is slow. With
           `ring`, a rank holds only its own block and two more, no matter how many ranks there are.
           Use `zigzag` for causal attention. When the keys and values fit and the link is NVLink,
           `gathered` is simpler and about as fast as `ring`.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from pytest_aisp import Conditions, Cost, Variant, Work, compare


def inputs(device, rows, heads, dim):
    return tuple(torch.randn(rows, heads, dim, device=device).bfloat16() for _ in range(3))


def reference(ranks):
    rows = len(ranks[0][0])
    k, v = (torch.cat([one[i] for one in ranks]).double() for i in (1, 2))
    found = []
    for rank, (q, _, _) in enumerate(ranks):
        seen = (rank + 1) * rows
        future = torch.ones(rows, seen, dtype=torch.bool, device=q.device).triu(seen - rows + 1)
        heads = []
        for head in range(q.shape[1]):  # the scores of all heads would not fit in memory
            scores = q[:, head].double() @ k[:seen, head].t() / q.shape[2] ** 0.5
            heads.append(scores.masked_fill_(future, float("-inf")).softmax(-1) @ v[:seen, head])
        found.append(torch.stack(heads, dim=1))
    return found


def by_head(x):
    """Return (rows, heads, dim) as a view of (1, heads, rows, dim)."""
    return x.transpose(0, 1)[None]


def gathered(q, k, v):
    rows, rank, world = len(q), dist.get_rank(), dist.get_world_size()
    seen = (rank + 1) * rows
    all_k, all_v = (x.new_empty(world * rows, *x.shape[1:]) for x in (k, v))
    dist.all_gather_into_tensor(all_k, k)
    dist.all_gather_into_tensor(all_v, v)
    own, keys, values = by_head(q), by_head(all_k[:seen]), by_head(all_v[:seen])
    mask = causal_lower_right(rows, seen)
    return F.scaled_dot_product_attention(own, keys, values, mask)[0].transpose(0, 1).contiguous()


def attention(q, k, v, causal):
    """Return the fp32 output, (rows, heads, dim), and its log-sum-exp, (rows, heads, 1)."""
    ops = torch.ops.aten
    gpu, cpu = (
        ops._scaled_dot_product_flash_attention,
        ops._scaled_dot_product_flash_attention_for_cpu,
    )
    out, lse, *_ = (gpu if q.is_cuda else cpu)(by_head(q), by_head(k), by_head(v), 0.0, causal)
    return out[0].transpose(0, 1).float(), lse[0].t()[..., None]


def join(out, lse, rows, part, part_lse):
    """Merge a partial result and its log-sum-exp into `rows` of `out` and `lse`, in place."""
    both = torch.logaddexp(lse[rows], part_lse)
    out[rows] = out[rows] * (lse[rows] - both).exp() + part * (part_lse - both).exp()
    lse[rows] = both


def passed_on(blocks):
    """Start sending `blocks` to the next rank. Return incoming blocks and pending operations."""
    rank, world = dist.get_rank(), dist.get_world_size()
    coming = [torch.empty_like(block) for block in blocks]
    sends = [dist.P2POp(dist.isend, block, (rank + 1) % world) for block in blocks]
    receives = [dist.P2POp(dist.irecv, block, (rank - 1) % world) for block in coming]
    return coming, dist.batch_isend_irecv(sends + receives)


def around(q, k, v, meet):
    """Return the attention of `q`. `meet` merges each other rank's block into the result."""
    rank, world = dist.get_rank(), dist.get_world_size()
    blocks = k, v
    for turn in range(world):
        coming, works = passed_on(blocks) if turn < world - 1 else (None, [])
        if turn == 0:
            out, lse = attention(q, k, v, causal=True)
        else:
            meet(out, lse, (rank - turn) % world, *blocks)
        for work in works:
            work.wait()
        blocks = coming
    return out.to(q.dtype)


def ring(q, k, v):
    def meet(out, lse, source, keys, values):
        if source < dist.get_rank():
            join(out, lse, slice(None), *attention(q, keys, values, causal=False))

    return around(q, k, v, meet)


def dealt(x, back=False):
    """Start moving rows to zigzag order, or back. Return incoming rows and pending operations.

    In zigzag order, rank r has chunks r and 2 * world - 1 - r of the 2 * world chunks.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = [(2 * r, 2 * r + 1) for r in range(world)]
    zigzag = [(r, 2 * world - 1 - r) for r in range(world)]
    before, after = (zigzag, plain) if back else (plain, zigzag)
    out = torch.empty_like(x)
    have = dict(zip(before[rank], x.chunk(2), strict=True))
    want = dict(zip(after[rank], out.chunk(2), strict=True))
    operations = []
    for number in range(2 * world):
        source = next(r for r in range(world) if number in before[r])
        target = next(r for r in range(world) if number in after[r])
        if source == target == rank:
            want[number].copy_(have[number])
        elif source == rank:
            operations.append(dist.P2POp(dist.isend, have[number], target))
        elif target == rank:
            operations.append(dist.P2POp(dist.irecv, want[number], source))
    return out, dist.batch_isend_irecv(operations)


def exchanged(x, back=False):
    out, works = dealt(x, back)
    for work in works:
        work.wait()
    return out


def zigzag(q, k, v):
    q, k, v = exchanged(torch.stack([q, k, v], dim=1)).unbind(1)
    half = len(q) // 2
    early, late = slice(half), slice(half, None)
    k, v = k.contiguous(), v.contiguous()

    def meet(out, lse, source, keys, values):
        if source < dist.get_rank():  # our two chunks attend only to the source's early chunk
            join(out, lse, slice(None), *attention(q, keys[early], values[early], causal=False))
        else:  # only our late chunk attends to the source, to both chunks
            join(out, lse, late, *attention(q[late], keys, values, causal=False))

    return exchanged(around(q, k, v, meet), back=True)


# The costs are those of the rank with the most work: the last one.


def attended(rows, heads, dim, share, sent=0):
    """Return the cost of attention over a `share` of a block, while `sent` bytes are sent."""
    elements = rows * heads * dim
    return Cost(
        read=6 * elements,
        write=2 * elements,
        ops={"bf16": 4 * share * rows * elements},
        sfu=share * rows**2 * heads,
        sent=sent,
        launches=2 if sent else 1,
        collectives=1 if sent else 0,
    )


def in_fp32(elements):
    return Cost(read=2 * elements, write=4 * elements, launches=1)


def joined(elements):
    """Return the cost of `join`, without the log-sum-exps, which are `dim` times smaller."""
    scaled = Cost(read=4 * elements, write=4 * elements, launches=3)
    added = Cost(read=8 * elements, write=4 * elements, launches=1)
    return 2 * scaled + added + Cost(read=4 * elements, write=4 * elements, launches=3)


def gathered_cost(rows, heads, dim, world):
    moved = Cost(sent=2 * (world - 1) * rows * heads * dim, launches=1, collectives=1)
    return 2 * moved + attended(rows, heads, dim, share=world - 0.5)


def around_cost(rows, heads, dim, world, share):
    """Return the cost of `around`, which computes a `share` of each other rank's block."""
    elements = rows * heads * dim
    total = attended(rows, heads, dim, share=0.5, sent=4 * elements) + in_fp32(elements)
    for turn in range(1, world):
        sent = 4 * elements if turn < world - 1 else 0
        total += attended(rows, heads, dim, share, sent) + in_fp32(elements) + joined(elements)
    return total + Cost(read=4 * elements, write=2 * elements, launches=1)


def zigzag_cost(rows, heads, dim, world):
    elements = rows * heads * dim
    chunks = 1 if world == 2 else 2  # how many of its two chunks a rank sends
    stacked = Cost(read=6 * elements, write=6 * elements, launches=1)
    dealt_out = Cost(sent=3 * chunks * elements, launches=2, collectives=1)
    contiguous = 2 * Cost(read=2 * elements, write=2 * elements, launches=1)
    back = Cost(sent=chunks * elements, launches=2, collectives=1)
    around = around_cost(rows, heads, dim, world, share=0.5)
    return stacked + dealt_out + contiguous + around + back


@compare(
    baseline=gathered,
    optimized=[
        Variant(ring, at_least="yardstick"),
        Variant(zigzag, at_least={"sm90": 1.05, "sm90-x4": 1.05}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 8192, "heads": 8, "dim": 128}],
    check_sizes=[{"rows": 34, "heads": 3, "dim": 16}, {"rows": 130, "heads": 1, "dim": 8}],
    work=lambda rows, heads, dim, world: Work(
        flops={
            "bf16": 2 * rows**2 * heads * dim * world
        },  # the mask removes half, and the ranks share the rest evenly
        wire=2 * 2 * (world - 1) * rows * heads * dim,
        terms=world * rows,
        roundings=4,
    ),
    bound="tensor",
    costs={
        gathered: gathered_cost,
        ring: lambda rows, heads, dim, world: around_cost(rows, heads, dim, world, share=1),
        zigzag: zigzag_cost,
    },
    conditions=Conditions(gpus=(2, 4)),
)
def test_ring_attention(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
