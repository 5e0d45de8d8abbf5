"""Expert parallelism: send tokens to their experts' ranks and back, with one exchange each way.

Problem    Every rank has `tokens` tokens of `hidden` bf16 values and two experts. The routed expert
           of a rank serves tokens of all ranks, and the shared expert serves the rank's own tokens.
           An expert is a linear layer and GELU. The routing is given: each rank sends tokens /
           world tokens to each rank. The splits are equal, as if every expert's fixed capacity were
           full, so the ranks do not have to exchange counts first. For each of its tokens, a rank
           returns the sum of both experts' results, in the original order.
Baseline   listed: calls `all_to_all` with lists of new tensors, which are concatenated for the
           expert. The results return in the same way.
Optimized  single: changes `listed`. `all_to_all_single` exchanges tokens between two buffers that
           are allocated once. Nothing is concatenated.
           overlapped: changes `single`. The first exchange has `async_op=True`, and the shared
           expert computes during that exchange.
Bound      Tensor cores for the two matrix products, then NVLink: each rank sends (world - 1) /
           world of its tokens, each way. DRAM limits gathering, scattering, GELU and the sum.
Seen       All sides are slower than predicted, by about the same factors on two H200s and on four.
           `overlapped` should hide one exchange. But it saves only about 20 % of the time of that
           exchange on two GPUs, and 40 % on four. NCCL's kernels occupy SMs during the exchange, so
           the shared expert may take longer then. We did not time each kernel.
Use when   Experts are on several GPUs. Reuse the buffers between calls, which costs nothing. If
           some computation does not depend on the exchange, overlap it with the exchange, but
           expect little gain. `expert_puts` in chapter 15 writes uneven splits into the memory of
           the other ranks, without NCCL.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pytest_aisp import Conditions, Cost, Variant, Work, compare

LISTS = "all_to_all of lists before torch 2.13" if torch.__version__ < (2, 13) else ""
"""What Gloo, the backend of ranks on CPUs, cannot do in the named version."""


def inputs(device, tokens, hidden):
    """Return tokens, their order by target rank, and weights of the routed and shared expert."""
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    order = torch.randperm(tokens, device=device)
    own, shared = (torch.randn(hidden, hidden, device=device) / hidden**0.5 for _ in range(2))
    return x, order, own.bfloat16(), shared.bfloat16()


def reference(ranks):
    world, found = len(ranks), []
    for x, order, _, shared in ranks:
        out = F.gelu(x.double() @ shared.double())
        for (_, _, expert, _), chosen in zip(ranks, order.chunk(world), strict=True):
            out[chosen] += F.gelu(x[chosen].double() @ expert.double())
        found.append(out)
    return found


def expert(x, weight):
    return F.gelu(x @ weight)


def together(order, routed, shared):
    """Return the sum of both experts' results, with the routed rows in the original order."""
    out = torch.empty_like(routed)
    out[order] = routed
    return out.add_(shared)


def exchanged(x):
    """Send each rank its part of `x`. Return the parts that this rank receives, concatenated."""
    sent = list(x.chunk(dist.get_world_size()))
    got = [torch.empty_like(part) for part in sent]
    dist.all_to_all(got, sent)
    return torch.cat(got)


def listed(x, order, own, shared):
    routed = exchanged(expert(exchanged(torch.index_select(x, 0, order)), own))
    return together(order, routed, expert(x, shared))


def single(x, order, own, shared):
    there, here = torch.empty_like(x), torch.empty_like(x)

    def run():
        torch.index_select(x, 0, order, out=there)
        dist.all_to_all_single(here, there)
        dist.all_to_all_single(there, expert(here, own))
        return together(order, there, expert(x, shared))

    yield run


def overlapped(x, order, own, shared):
    there, here = torch.empty_like(x), torch.empty_like(x)

    def run():
        torch.index_select(x, 0, order, out=there)
        arrival = dist.all_to_all_single(here, there, async_op=True)
        common = expert(x, shared)
        arrival.wait()
        dist.all_to_all_single(there, expert(here, own))
        return together(order, there, common)

    yield run


def moved(tokens, hidden):
    return Cost(read=2 * tokens * hidden, write=2 * tokens * hidden, launches=1)


def exchange(tokens, hidden, world):
    sent = 2 * (world - 1) / world * tokens * hidden
    return Cost(nccl=sent, launches=1, collectives=1)


def product(tokens, hidden):
    return Cost(
        read=2 * (tokens * hidden + hidden**2),
        write=2 * tokens * hidden,
        ops={"bf16": 2 * tokens * hidden**2},
        launches=1,
    )


def ending(tokens, hidden):
    """Return the cost of `together`: scatter the rows, and add."""
    added = Cost(read=4 * tokens * hidden, write=2 * tokens * hidden, launches=1)
    return moved(tokens, hidden) + added


def single_cost(tokens, hidden, world):
    experts = 2 * (product(tokens, hidden) + moved(tokens, hidden))
    exchanges = 2 * exchange(tokens, hidden, world)
    return moved(tokens, hidden) + exchanges + experts + ending(tokens, hidden)


def listed_cost(tokens, hidden, world):
    return single_cost(tokens, hidden, world) + 2 * moved(tokens, hidden)


def overlapped_cost(tokens, hidden, world):
    one = product(tokens, hidden) + moved(tokens, hidden)
    meanwhile = replace(product(tokens, hidden), nccl=exchange(tokens, hidden, world).nccl)
    hidden_exchange = meanwhile + moved(tokens, hidden) + Cost(launches=1, collectives=1)
    shown = exchange(tokens, hidden, world)
    return moved(tokens, hidden) + hidden_exchange + one + shown + ending(tokens, hidden)


@compare(
    baseline=listed,
    optimized=[
        Variant(side, gpu_only=LISTS, at_least={"sm90": 1.0, "sm90-x4": 1.0})
        for side in (single, overlapped)
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"tokens": 16384, "hidden": 2048}],
    check_sizes=[{"tokens": 36, "hidden": 17}, {"tokens": 4, "hidden": 65}],
    work=lambda tokens, hidden, world: Work(
        read=2 * (tokens * hidden + 2 * hidden**2),
        write=2 * tokens * hidden,
        flops={"bf16": 4 * tokens * hidden**2},
        wire=2 * 2 * (world - 1) / world * tokens * hidden,
        terms=hidden,
        roundings=5,
    ),
    bound="tensor",
    costs={listed: listed_cost, single: single_cost, overlapped: overlapped_cost},
    conditions=Conditions(gpus=(2, 4)),
)
def test_expert_exchange(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
