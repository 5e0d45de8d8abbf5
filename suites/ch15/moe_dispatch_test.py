"""MoE dispatch: sort the tokens by expert, and compute all experts in one product.

Problem    Compute a mixture-of-experts layer for inference, in bf16. Each of `tokens` tokens goes
           to 2 of `experts` experts, which are SwiGLU MLPs. The two experts of a token and their
           shares (their weights in the sum) are inputs, as if a router had chosen them. Some
           experts are more popular: the probability of an expert falls with its number, and the
           first is 4 times as likely as the last. Return the weighted sum for each token.
Baseline   masked: for each expert, find its tokens, gather them, compute the MLP, and add to the
           result. Early models in public libraries did the same.
           grouped: the baseline of `fused` in the second test, and a variant of `masked` in the
           first test (see below).
Optimized  sorted_slices: changes `masked`. The (token, expert) pairs are sorted by expert once.
           Each expert then computes one slice of the pairs. The host waits once to read where all
           slices end.
           grouped: changes `sorted_slices`. `grouped_mm` computes all experts in two products and
           reads the ends of the slices on the GPU.
           fused: changes `grouped`. A Triton kernel gathers the tokens of an expert as it loads
           them, multiplies them by the gate and up weights, and applies SwiGLU. A second kernel
           multiplies by the down weights and by the shares. The sorted tokens and the gate and up
           products are never written to memory. The results stay in fp32 until a token's two
           results are added.
Bound      The host limits `masked` and `sorted_slices`: it launches many kernels, and it waits for
           the GPU. `grouped` and `fused` do little arithmetic with each weight that they read, so
           DRAM limits them when they run in a CUDA graph. The first test uses no graph, and there
           the host takes longer to launch `grouped` than the GPU takes to run it.
Seen       In the first test, on an H100, the two recorded times of masked differ by a factor of
           two, so the host's times are rough. `sorted_slices` and `grouped` take longer than
           predicted from their launches. The predicted time of a launch was measured with an
           addition, and the host probably takes longer to launch a sort or a product. The cost of
           `sorted_slices` also leaves out the views that the host creates for each expert. We did
           not time these parts. In the second test, in a graph, `grouped` and `fused` take about
           one and a half times the predicted time. The costs count only the starts of the kernels
           that sort and gather, and assume that the products read weights at the DRAM rate. We did
           not measure which assumption is wrong.
Use when   A mixture of experts serves requests. For `grouped`, you do not have to write a kernel.
           Serving engines use kernels like `fused`. `fused` saves some launches, and the traffic of
           sorted tokens, which matters if there are few tokens per expert. See also chapter 13:
           `moe_step_test.py` trains the layer, and `expert_exchange_test.py` has experts on several
           GPUs.
"""

import functools

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare
from suites.rounding import to_even

CHOSEN = 2
POPULAR = 4.0
"""The first expert is this many times as likely to be chosen as the last one."""
BLOCK = 16  # tokens of one expert per program: the rows of one tensor-core product


@triton.jit
def tile_of(tile, ends, EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Return the expert of a tile, its first sorted row, and the end of the expert's rows."""
    number = tl.arange(0, PADDED)
    end = tl.load(ends + number, mask=number < EXPERTS, other=0)
    begin = tl.load(ends + number - 1, mask=(number > 0) & (number < EXPERTS), other=0)
    tiles = tl.where(number < EXPERTS, (end - begin + BLOCK - 1) // BLOCK, 0)
    behind = tl.cumsum(tiles, 0)
    expert = tl.sum(((behind <= tile) & (number < EXPERTS)).to(tl.int32), 0)
    own = number == expert
    first = tl.sum(tl.where(own, begin + (tile - behind + tiles) * BLOCK, 0), 0)
    return expert, first, tl.sum(tl.where(own, end, 0), 0)


@triton.jit
def up_kernel(
    x,
    up,
    order,
    ends,
    out,
    width,
    hidden,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Gather tokens of one expert, multiply them by gate and up weights, and apply SwiGLU."""
    expert, first, end = tile_of(tl.program_id(1), ends, EXPERTS, PADDED, BLOCK)
    if expert >= EXPERTS:
        return
    row, column, inner = tl.arange(0, BLOCK), tl.arange(0, N), tl.arange(0, K)
    here = first + row < end
    pair = tl.load(order + first + row, mask=here, other=0)
    column += tl.program_id(0) * N
    left = x + (pair // CHOSEN)[:, None] * width + inner[None, :]
    right = up + expert.to(tl.int64) * width * 2 * hidden + inner[:, None] * 2 * hidden + column
    gate, value = tl.zeros((BLOCK, N), tl.float32), tl.zeros((BLOCK, N), tl.float32)
    inside = column[None, :] < hidden
    for k in range(0, width, K):
        there = inner + k < width
        part = tl.load(left + k, mask=here[:, None] & there[None, :], other=0.0).to(PRODUCT)
        both = right + k * 2 * hidden
        mask = there[:, None] & inside
        gate = tl.dot(part, tl.load(both, mask=mask, other=0.0).to(PRODUCT), gate)
        value = tl.dot(part, tl.load(both + hidden, mask=mask, other=0.0).to(PRODUCT), value)
    result = to_even(gate / (1 + tl.exp(-gate)) * value, DROPPED=16).to(tl.bfloat16)
    at = (first + row)[:, None] * hidden + column[None, :]
    tl.store(out + at, result, mask=here[:, None] & inside)


@triton.jit
def down_kernel(
    gated,
    down,
    order,
    ends,
    shares,
    out,
    width,
    hidden,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Multiply by one expert's down weights and the shares. Store in the order of the pairs."""
    expert, first, end = tile_of(tl.program_id(1), ends, EXPERTS, PADDED, BLOCK)
    if expert >= EXPERTS:
        return
    row, column, inner = tl.arange(0, BLOCK), tl.arange(0, N), tl.arange(0, K)
    here = first + row < end
    pair = tl.load(order + first + row, mask=here, other=0)
    column += tl.program_id(0) * N
    left = gated + (first + row)[:, None] * hidden + inner[None, :]
    right = down + expert.to(tl.int64) * hidden * width + inner[:, None] * width + column
    total = tl.zeros((BLOCK, N), tl.float32)
    inside = column[None, :] < width
    for k in range(0, hidden, K):
        there = inner + k < hidden
        part = tl.load(left + k, mask=here[:, None] & there[None, :], other=0.0).to(PRODUCT)
        weights = tl.load(right + k * width, mask=there[:, None] & inside, other=0.0).to(PRODUCT)
        total = tl.dot(part, weights, total)
    total *= tl.load(shares + pair, mask=here, other=0.0).to(tl.float32)[:, None]
    at = pair[:, None] * width + column[None, :]
    tl.store(out + at, total, mask=here[:, None] & inside)


def state(device, tokens, width, hidden, experts):
    up = torch.randn(experts, width, 2 * hidden, device=device) / width**0.5
    down = torch.randn(experts, hidden, width, device=device) / hidden**0.5
    return {"up": up.bfloat16(), "down": down.bfloat16()}


def inputs(device, tokens, width, hidden, experts):
    chances = torch.linspace(POPULAR, 1.0, experts, device=device).expand(tokens, -1)
    chosen = torch.multinomial(chances, CHOSEN)
    shares = torch.randn(tokens, CHOSEN, device=device).softmax(1).bfloat16()
    return torch.randn(tokens, width, device=device).bfloat16(), chosen, shares


def reference(weights, x, chosen, shares):
    """Compute every expert for every token. An expert that was not chosen has a share of 0."""
    experts = len(weights["up"])
    share = torch.zeros(len(x), experts, dtype=torch.float64, device=x.device)
    share.scatter_(1, chosen, shares.double())
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(experts):
        gate, value = (x.double() @ weights["up"][expert].double()).chunk(2, 1)
        result = (F.silu(gate) * value) @ weights["down"][expert].double()
        out = out + share[:, expert, None] * result
    return out


def swiglu(both):
    gate, value = both.chunk(2, -1)
    return F.silu(gate) * value


def masked(weights, x, chosen, shares):
    out = torch.zeros_like(x)
    for expert, (up, down) in enumerate(zip(weights["up"], weights["down"], strict=True)):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        result = swiglu(x[token] @ up) @ down
        out.index_add_(0, token, result * shares[token, place, None])
    return out


def ends_of(chosen, experts):
    """Return where each expert's slice of the sorted pairs ends, without waiting for the GPU."""
    numbers = torch.arange(experts, device=chosen.device)
    return (chosen.flatten() == numbers[:, None]).sum(1).cumsum(0).int()


def mixed(results, order, shares):
    """Undo the sort, and return the weighted sum of the two results of each token."""
    back = torch.empty_like(results)
    back[order] = results
    return (back.unflatten(0, shares.shape) * shares[..., None]).sum(1)


def sorted_slices(weights, x, chosen, shares):
    order = chosen.flatten().argsort()
    ends = [0, *ends_of(chosen, len(weights["up"])).tolist()]
    ordered, results = x[order // CHOSEN], []
    for expert, (up, down) in enumerate(zip(weights["up"], weights["down"], strict=True)):
        if ends[expert] < ends[expert + 1]:
            results.append(swiglu(ordered[ends[expert] : ends[expert + 1]] @ up) @ down)
    return mixed(torch.cat(results), order, shares)


def grouped(weights, x, chosen, shares):
    order = chosen.flatten().argsort()
    ends = ends_of(chosen, len(weights["up"]))
    both = F.grouped_mm(x[order // CHOSEN], weights["up"], offs=ends)
    return mixed(F.grouped_mm(swiglu(both), weights["down"], offs=ends), order, shares)


def fused(weights, x, chosen, shares):
    up, down = weights["up"], weights["down"]
    experts, hidden, width = down.shape
    pairs = chosen.numel()
    order = chosen.flatten().argsort()
    ends = ends_of(chosen, experts)
    gated = x.new_empty(pairs, hidden)
    parts = torch.empty(pairs, width, device=x.device)
    # An upper bound, because the host does not know how many tiles each expert fills.
    tiles = triton.cdiv(pairs, BLOCK) + min(experts, pairs)
    # Triton 3.9's interpreter treats bf16 as integers. In fp32, the products are the same.
    kind = {"PRODUCT": tl.bfloat16 if x.is_cuda else tl.float32, "N": 64, "K": 64}
    kind |= {"EXPERTS": experts, "PADDED": triton.next_power_of_2(experts), "BLOCK": BLOCK}
    up_kernel[triton.cdiv(hidden, 64), tiles](
        x, up, order, ends, gated, width, hidden, CHOSEN=CHOSEN, num_stages=4, **kind
    )
    down_kernel[triton.cdiv(width, 64), tiles](
        gated, down, order, ends, shares, parts, width, hidden, num_stages=4, **kind
    )
    return parts.unflatten(0, (-1, CHOSEN)).sum(1).bfloat16()


def work(tokens, width, hidden, experts):
    used = min(experts, tokens * CHOSEN)  # weights of an expert that no token chose are not needed
    return Work(
        read=2 * used * 3 * width * hidden + 2 * tokens * width,
        write=2 * tokens * width,
        flops={"bf16": 2 * CHOSEN * tokens * 3 * width * hidden},
        terms=max(width, hidden),
        roundings=8,
    )


def layer_cost(tokens, width, hidden, experts, **starts):
    return Cost(
        read=2 * experts * 3 * width * hidden + 2 * tokens * width,
        write=2 * tokens * width,
        ops={"bf16": 2 * CHOSEN * tokens * 3 * width * hidden},
        **starts,
    )


def masked_cost(tokens, width, hidden, experts):
    """Return the cost of `masked`.

    For each expert, `nonzero` takes five kernels and copies, and waits for the GPU. Nine more
    kernels compare, gather tokens and shares, multiply twice, apply SwiGLU (two kernels), scale by
    the shares, and add.
    """
    each = Cost(launches=5 + 9, host_steps=6, syncs=1)
    return layer_cost(tokens, width, hidden, experts, launches=1) + experts * each


SORTING = 3 + 6
"""The launches of the sort and of the ends of the slices."""
GATHERING = 2 + 3
"""The launches that gather sorted tokens, and that undo the sort, scale and add the results."""


def sorted_cost(tokens, width, hidden, experts):
    sort = Cost(launches=SORTING + GATHERING + 1, syncs=1)  # and one that joins the results
    return sort + layer_cost(tokens, width, hidden, experts, launches=4 * experts)


def grouped_cost(tokens, width, hidden, experts):
    """Return the cost of `grouped`. Each grouped product has a second kernel for its pointers."""
    launches = SORTING + GATHERING + 2 * 2 + 2
    return layer_cost(tokens, width, hidden, experts, launches=launches)


def fused_cost(tokens, width, hidden, experts):
    return layer_cost(tokens, width, hidden, experts, launches=SORTING + 2 + 2)


judged = functools.partial(
    compare,
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"tokens": 256, "width": 2048, "hidden": 1024, "experts": 32}],
    check_sizes=[
        {"tokens": 21, "width": 72, "hidden": 40, "experts": 3},  # expert 0 fills two tiles
        {"tokens": 2, "width": 64, "hidden": 24, "experts": 6},  # some have no token
    ],
    work=work,
)


@judged(
    baseline=masked,
    optimized=[
        Variant(sorted_slices, at_least={"sm90": 1.6}),
        Variant(grouped, at_least={"sm90": 13}),
    ],
    bound="launch",
    costs={masked: masked_cost, sorted_slices: sorted_cost, grouped: grouped_cost},
)
def test_moe_dispatch(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@judged(
    baseline=grouped,
    optimized=[fused],
    bound="dram",
    costs={grouped: grouped_cost, fused: fused_cost},
)
def test_moe_dispatch_in_kernels(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
