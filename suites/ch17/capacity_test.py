"""Capacity factor: padding keeps shapes fixed, but computes rows that hold no token.

Problem    A mixture of experts keeps at most `factor` times the mean number of tokens per expert.
           Each token goes to one expert. A token whose expert is full is dropped, and its result is
           zero. The most popular expert is chosen four times as often as the least popular expert.
           Compute each expert's gated MLP in bf16 for the kept tokens. The results are in the order
           of the tokens.
Baseline   padded: each expert has a buffer, whose number of rows is `factor` times the mean. Tokens
           are copied into the buffers, `bmm` multiplies all buffers, and results are copied back.
           No shape depends on the tokens. Rows without a token are computed too.
Optimized  grouped: changes `padded`. The kept tokens lie one after another, sorted by expert, and
           `grouped_mm` reads from the GPU where each expert's tokens begin and end. `grouped`
           computes no empty row, and drops the same tokens as `padded`. The page is a curve over
           `factor`. The most popular expert gets 1.6 times the mean. So tokens are dropped at
           factors up to 1.5.
Bound      At a large factor, tensor cores are the limit. `padded` has `factor` times as many rows
           as tokens. `grouped` multiplies only the kept tokens. At a small factor, the sort, the
           copies and the gate together take about as long as the products, and DRAM limits them.
Seen       On an H100, both sides take longer than predicted at every factor. The time of `padded`
           has a fixed part and a part that grows with `factor`. The fixed part, a sort and five
           copies of tokens, takes more than twice as long as predicted. A sort of so few numbers is
           a chain of short kernels, and a copy by index probably does not reach the copy rate. The
           growing part, the products and the gate, takes about a quarter longer than predicted. We
           did not time the two parts alone. `grouped` gains nothing at a factor of 1, where
           `padded` has few empty rows.
Use when   All experts are on one GPU. With grouped products, a large factor costs little, so there
           is no reason to lose quality by dropping tokens. Fixed-size buffers are useful if other
           GPUs write into them, but make the factor a trade-off: near 1, few rows are empty, but
           many tokens are dropped.
"""

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Sweep, Variant, Work, compare

MEAN = 1.25  # mean weight in `popularity`, whose weights lie between 0.5 and 2


def popularity(experts, device):
    """Return how often each expert is chosen, relative to the others."""
    return 0.5 + 1.5 * torch.arange(experts, device=device) / max(experts - 1, 1)


def state(device, tokens, experts, width, hidden, factor):
    def weight(*shape):
        return (torch.randn(shape, device=device) / shape[-2] ** 0.5).bfloat16()

    return {
        "up": weight(experts, width, 2 * hidden),
        "down": weight(experts, hidden, width),
        "room": rows_of(tokens, experts, factor),
    }


def rows_of(tokens, experts, factor):
    """Return the capacity of an expert, rounded up to a multiple of 8 for the tensor cores."""
    return max(8, round(factor * tokens / experts / 8) * 8)


def inputs(device, tokens, experts, width, hidden, factor):
    x = torch.randn(tokens, width, device=device).bfloat16()
    return x, popularity(experts, device).multinomial(tokens, replacement=True)


def reference(state, x, expert):
    up, down = state["up"].double(), state["down"].double()
    before = (expert[:, None] == torch.arange(len(up), device=x.device)).long().cumsum(dim=0)
    kept = before.gather(1, expert[:, None]).squeeze(1) <= state["room"]
    out = torch.zeros_like(x, dtype=torch.float64)
    for number in range(len(up)):
        mine = (kept & (expert == number)).nonzero().squeeze(1)
        gate, value = (x[mine].double() @ up[number]).chunk(2, dim=-1)
        out[mine] = (gate * gate.sigmoid() * value) @ down[number]
    return out


def gated(pair):
    gate, value = pair.chunk(2, dim=-1)
    return F.silu(gate) * value


def sorted_by_expert(expert, experts):
    """Return the order of tokens by expert, their experts, and the first place of each expert."""
    ordered, order = expert.sort(stable=True)  # stable: earlier tokens are kept
    return ordered, order, torch.searchsorted(ordered, torch.arange(experts, device=expert.device))


def padded(state, x, expert):
    experts, room = len(state["up"]), state["room"]
    ordered, order, first = sorted_by_expert(expert, experts)
    rank = torch.arange(len(order), device=x.device) - first[ordered]
    fits = rank < room
    # A dropped token goes to the row after the last buffer, which is not multiplied.
    place = torch.where(fits, ordered * room + rank, experts * room)
    buffers = x.new_zeros(experts * room + 1, x.shape[1])
    buffers[place] = x[order]
    inside = buffers[:-1].unflatten(0, (experts, room))
    results = (gated(inside @ state["up"]) @ state["down"]).flatten(0, 1)
    return in_order(results[torch.where(fits, place, 0)], fits, order)


def grouped(state, x, expert):
    experts, room, tokens = len(state["up"]), state["room"], len(x)
    ordered, order, first = sorted_by_expert(expert, experts)
    rank = torch.arange(tokens, device=x.device) - first[ordered]
    ends = torch.cat([first[1:], first.new_full((1,), tokens)])
    kept = (ends - first).clamp(max=room)
    last = kept.cumsum(0)
    fits = rank < room
    # A dropped token goes to the last row, after all groups. The products leave the rows after the
    # last group unwritten. The gate still processes those rows, but nothing uses the results.
    place = torch.where(fits, (last - kept)[ordered] + rank, tokens)
    rows = x.new_zeros(tokens + 1, x.shape[1])
    rows[place] = x[order]
    offsets = last.int()
    inside = gated(F.grouped_mm(rows, state["up"], offs=offsets))
    results = F.grouped_mm(inside, state["down"], offs=offsets)
    return in_order(results[torch.where(fits, place, 0)], fits, order)


def in_order(results, fits, order):
    """Return the results in the order of the tokens, with zeros for those that do not fit."""
    return torch.empty_like(results).index_copy_(0, order, results.where(fits[:, None], 0.0))


def products(rows, gated_rows, experts, width, hidden):
    """Return the cost of both products for `rows` rows, and of the gate for `gated_rows` rows."""
    moved = 2 * gated_rows * hidden
    weights = experts * width * hidden
    up = Cost(
        read=2 * (rows * width + 2 * weights),
        write=4 * rows * hidden,
        ops={"bf16": 4 * rows * width * hidden},
        launches=1,
    )
    silu = Cost(read=moved, write=moved, launches=1)
    times = Cost(read=2 * moved, write=moved, launches=1)
    down = Cost(
        read=2 * (rows * hidden + weights),
        write=2 * rows * width,
        ops={"bf16": 2 * rows * width * hidden},
        launches=1,
    )
    return up + silu + times + down


def moving(rows, tokens, width):
    """Return the cost of sorting, of zeroing the buffers, and of two copies in and three out."""
    line = 2 * tokens * width
    sort = Cost(read=64 * tokens, write=64 * tokens, launches=16)
    zeroed = Cost(write=2 * rows * width, launches=1)
    return sort + zeroed + 5 * Cost(read=line, write=line, launches=1)


def kept_of(tokens, experts, factor):
    """Return the expected number of kept tokens."""
    room = rows_of(tokens, experts, factor)
    weights = (popularity(experts, "cpu") / (MEAN * experts)).tolist()
    return sum(min(weight * tokens, room) for weight in weights)


def padded_cost(tokens, experts, width, hidden, factor):
    rows = rows_of(tokens, experts, factor) * experts
    return moving(rows, tokens, width) + products(rows, rows, experts, width, hidden)


def grouped_cost(tokens, experts, width, hidden, factor):
    rows = round(kept_of(tokens, experts, factor))
    return moving(tokens, tokens, width) + products(rows, tokens, experts, width, hidden)


def work(tokens, experts, width, hidden, factor):
    # A draw may keep slightly fewer tokens than the expected number.
    rows = 0.95 * kept_of(tokens, experts, factor)
    return Work(
        read=2 * (tokens * width + 3 * experts * width * hidden) * 0.95,
        write=2 * tokens * width,
        flops={"bf16": 6 * rows * width * hidden},
        terms=max(width, hidden),
        roundings=6,
    )


@compare(
    baseline=padded,
    optimized=[Variant(grouped, at_least={"sm90": 1.3})],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[
        {"tokens": 32768, "experts": 32, "width": 1024, "hidden": 2048, "factor": factor}
        for factor in (1.0, 1.25, 1.5, 2.0, 4.0)
    ],
    check_sizes=[
        {"tokens": 77, "experts": 5, "width": 40, "hidden": 24, "factor": 1.0},
        {"tokens": 33, "experts": 3, "width": 16, "hidden": 8, "factor": 4.0},
    ],
    work=work,
    bound="tensor",
    costs={padded: padded_cost, grouped: grouped_cost},
    sweep=Sweep("factor", judged=[2.0]),
)
def test_capacity(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
