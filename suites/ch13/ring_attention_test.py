"""Ring attention: pass keys and values on while the last ones are used.

Problem    Causal attention over a sequence of which every rank has `rows` rows, rank 0 the first:
           q, k and v of (rows, heads, dim) in bf16, as the projections leave them. Every rank
           returns the attention of its own rows.
Baseline   gathered: all ranks' keys and values are gathered, then attention of the own rows over
           those of the ranks before and its own.
Optimized  ring: each rank sends the block it has to the next rank, receives another from the one
           before, and meanwhile computes with it; the parts are joined by their log-sum-exp, an
           online softmax over blocks (Liu et al., arXiv:2310.01889). Blocks that lie in the future
           are passed on and not computed.
           zigzag: as ring, but rows are dealt out so that all ranks have as much to compute: of
           2 * world chunks rank r has numbers r and 2 * world - 1 - r. The rows are exchanged for
           that and the result back, inside the time; a trainer whose loader deals them out so
           saves both.
Bound      Tensor cores of the last rank: its block over itself is half masked, the others are full.
           A full block of 8192 x 8192 rows, 8 heads of 128, is 275 GFLOP, 1.18 ms at the 233
           TFLOP/s that [long attention](long_attention_test.py) saw of torch's flash attention,
           which tells the log-sum-exp that joining needs. On two ranks gathered takes
           0.09 + 1.5 x 1.18 = 1.86 ms: 32 MiB at 370 GB/s. ring hides the 0.09, and pays 0.08 for
           each block joined, 350 MB, and 0.02 to begin and end: 1.88 ms; on four
           0.27 + 3.5 x 1.18 = 4.4 ms against 4.4. It is neutral over NVLink; what it is for is
           memory, two blocks beside its own however many ranks there are, and slower links. zigzag
           computes world / 2 blocks everywhere: 1.18 + 0.1 + 0.15 for its exchanges on two ranks,
           1.3 times, and 2.36 + 0.27 + 0.25 on four, 1.5 times.
Seen       Two H200s: gathered 1.65 ms, as flash attention of such blocks reaches more than those
           233 TFLOP/s; ring 1.08x, zigzag 1.15x to 1.18x: exchanging rows and joining parts take
           more of what is left.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from pytest_aisp import Conditions, Variant, Work, compare


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
        for head in range(q.shape[1]):  # the scores of all heads would not fit
            scores = q[:, head].double() @ k[:seen, head].t() / q.shape[2] ** 0.5
            heads.append(scores.masked_fill_(future, float("-inf")).softmax(-1) @ v[:seen, head])
        found.append(torch.stack(heads, dim=1))
    return found


def by_head(x):
    """Return (rows, heads, dim) as attention takes it."""
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
    """Return fp32 attention of (rows, heads, dim), and its log-sum-exp of (rows, heads, 1)."""
    ops = torch.ops.aten
    gpu, cpu = (
        ops._scaled_dot_product_flash_attention,
        ops._scaled_dot_product_flash_attention_for_cpu,
    )
    out, lse, *_ = (gpu if q.is_cuda else cpu)(by_head(q), by_head(k), by_head(v), 0.0, causal)
    return out[0].transpose(0, 1).float(), lse[0].t()[..., None]


def join(out, lse, rows, part, part_lse):
    """Join a part of the softmax into `out` and `lse`, at `rows` of them."""
    both = torch.logaddexp(lse[rows], part_lse)
    out[rows] = out[rows] * (lse[rows] - both).exp() + part * (part_lse - both).exp()
    lse[rows] = both


def passed_on(blocks):
    """Start to send `blocks` to the next rank; return what will come from the one before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    coming = [torch.empty_like(block) for block in blocks]
    sends = [dist.P2POp(dist.isend, block, (rank + 1) % world) for block in blocks]
    receives = [dist.P2POp(dist.irecv, block, (rank - 1) % world) for block in coming]
    return coming, dist.batch_isend_irecv(sends + receives)


def around(q, k, v, meet):
    """Return attention of `q`, to whose softmax `meet` adds the block of each other rank."""
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
    """Return rows dealt out in zigzag: chunks r and 2 * world - 1 - r; or put `back` in order."""
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
        if source < dist.get_rank():  # its early chunk is before all of ours, its late one after
            join(out, lse, slice(None), *attention(q, keys[early], values[early], causal=False))
        else:  # both of its chunks lie between ours
            join(out, lse, late, *attention(q[late], keys, values, causal=False))

    return exchanged(around(q, k, v, meet), back=True)


@compare(
    baseline=gathered,
    optimized=[Variant(ring, at_least="yardstick"), Variant(zigzag, at_least={"sm90": 1.05})],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 8192, "heads": 8, "dim": 128}],
    check_sizes=[{"rows": 34, "heads": 3, "dim": 16}, {"rows": 130, "heads": 1, "dim": 8}],
    work=lambda rows, heads, dim, world: Work(
        flops={"bf16": 2 * rows**2 * heads * dim * world},  # half is masked, and all have as much
        wire=2 * 2 * (world - 1) * rows * heads * dim,
        terms=world * rows,
        roundings=4,
    ),
    bound="tensor",
    conditions=Conditions(gpus=(2, 4)),
)
def test_ring_attention(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
