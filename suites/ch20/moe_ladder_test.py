"""An MoE block from end to end: group the tokens, compute all experts at once, launch once.

Problem    Compute one mixture-of-experts block in inference, in bf16. After an RMS norm, a router
           chooses the 2 best of `experts` experts for each of `tokens` tokens. The experts are
           SwiGLU MLPs. A softmax over the 2 best scores of a token gives the weights of the two
           results. The weighted sum is added to the block's input. Some experts are popular: the
           first is 4 times as likely as the last. The router's score of an expert depends mostly on
           one coordinate of the token. In each token, the coordinates of 2 experts are made large,
           so that rounding cannot change the choice. Each rung has its own test, and the last test
           compares the first rung with the last.
Baseline   masked: for each expert, find its tokens, gather them, compute, and add to the result.
           Early MoE models in public libraries did the same.
           sorted_slices: the baseline of `grouped`.
           grouped: the baseline of `captured`.
Optimized  sorted_slices: changes `masked`. The pairs (token, expert) are sorted by expert once.
           Each expert then computes one slice of the pairs. The host waits once to read where all
           slices end.
           grouped: changes `sorted_slices`. `grouped_mm` computes all experts in two products and
           reads the ends of the slices on the GPU. The host never waits.
           captured: changes `grouped`. The whole block is a CUDA graph. Code that waits for the GPU
           cannot be captured, so this rung needs `grouped`.
Bound      The host limits `masked` and `sorted_slices`: it launches kernels for each expert and
           waits for the GPU. The number of launches of `grouped` does not depend on the number of
           experts. Two things limit captured: DRAM, because each expert's weights are read for only
           a few tokens, and the starts of about thirty graph nodes.
Seen       On an H100 machine, `masked` takes about twice as long as predicted. `sorted_slices` and
           `grouped` take three to four times as long as predicted. The costs count launches, but
           not the time of the Python code between them. `captured` takes three quarters longer than
           predicted from its bytes and graph nodes. We did not time its kernels one by one.
           `moe_dispatch_test.py` in chapter 15 measures the same layers.
Use when   A model with experts serves few tokens at a time, as in decode. Take the rungs in this
           order: sorting makes a grouped product possible, and the grouped product makes a graph
           possible. With thousands of tokens, products take longer than launches, and all rungs
           gain less. The next rung would be a kernel that gathers and multiplies, as `fused` of
           `moe_dispatch_test.py` in chapter 15 does without a norm or a router.
"""

import functools

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Work, capture, compare
from suites.ch15.moe_dispatch_test import CHOSEN
from suites.ch15.moe_dispatch_test import grouped as in_groups
from suites.ch15.moe_dispatch_test import masked as by_mask
from suites.ch15.moe_dispatch_test import sorted_slices as in_slices

POPULAR = 4.0
"""The first expert is this many times as likely to be chosen as the last one."""


def state(device, tokens, width, hidden, experts):
    def weight(*shape):
        return (torch.randn(shape, device=device) / shape[-2] ** 0.5).bfloat16()

    router = torch.eye(width, experts, device=device) + weight(width, experts) / 10
    return {
        "router": router.bfloat16(),
        "up": weight(experts, width, 2 * hidden),
        "down": weight(experts, hidden, width),
    }


def inputs(device, tokens, width, hidden, experts):
    x = torch.randn(tokens, width, device=device)
    x[:, :experts] /= 4
    chances = torch.linspace(POPULAR, 1.0, experts, device=device).expand(tokens, -1)
    raised = torch.multinomial(chances, CHOSEN)
    return (x.scatter_add_(1, raised, x.new_full(raised.shape, 4.0)).bfloat16(),)


def reference(weights, x):
    """Compute every expert for every token. An expert that was not chosen has a share of 0."""
    router, up, down = (weights[name].double() for name in ("router", "up", "down"))
    x = x.double()
    inner = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    scores = inner @ router
    least = scores.topk(CHOSEN).values[:, -1:]
    shares = scores.masked_fill(scores < least, -torch.inf).softmax(-1)
    for expert in range(len(up)):
        gate, value = (inner @ up[expert]).chunk(2, -1)
        x = x + shares[:, expert, None] * ((gate * gate.sigmoid() * value) @ down[expert])
    return x


def block(weights, x, routed):
    """Return the output of the block. `routed` is the weighted sum of the experts."""
    inner = F.rms_norm(x, x.shape[-1:], eps=1e-6)
    scores, chosen = (inner @ weights["router"]).float().topk(CHOSEN)
    shares = scores.softmax(-1).to(x.dtype)
    return x + routed(weights, inner, chosen, shares)


def masked(weights, x):
    return block(weights, x, by_mask)


def sorted_slices(weights, x):
    return block(weights, x, in_slices)


def grouped(weights, x):
    return block(weights, x, in_groups)


def captured(weights, x):
    yield capture(lambda: grouped(weights, x))


ROUTING = 8
"""Launches of every side: norm, product, a cast, selecting, sorting, softmax, a cast, the sum."""
SORTING = 3 + 6
"""The launches of the sort and of the ends of the slices."""
GATHERING = 2 + 3
"""The launches that gather sorted tokens, and that put results back, weight and add them."""
GROUPS = 2 * 2 + 2
"""The launches of two grouped products, each of which prepares its pointers, and of SwiGLU."""


def block_cost(tokens, width, hidden, experts, **starts):
    """Return the cost of the products. All experts have tokens."""
    weights = experts * (width + 3 * width * hidden)
    each = experts * width + CHOSEN * 3 * width * hidden
    return Cost(
        read=2 * weights + 2 * tokens * width,
        write=2 * tokens * width,
        ops={"bf16": 2 * tokens * each},
        **starts,
    )


def masked_cost(tokens, width, hidden, experts):
    """Return the cost of `masked`.

    For each expert, `nonzero` takes five kernels and copies and waits for the GPU. Further kernels
    compare, gather tokens and shares, multiply (2), apply SwiGLU (2), weight, and add.
    """
    each = Cost(launches=5 + 9, host_steps=6, syncs=1)
    return block_cost(tokens, width, hidden, experts, launches=ROUTING + 1) + experts * each


def sorted_cost(tokens, width, hidden, experts):
    sort = Cost(launches=ROUTING + SORTING + GATHERING + 1, syncs=1)  # and one joins the results
    return sort + block_cost(tokens, width, hidden, experts, launches=4 * experts)


def grouped_cost(tokens, width, hidden, experts):
    launches = ROUTING + SORTING + GATHERING + GROUPS
    return block_cost(tokens, width, hidden, experts, launches=launches)


def captured_cost(tokens, width, hidden, experts):
    nodes = ROUTING + SORTING + GATHERING + GROUPS
    return block_cost(tokens, width, hidden, experts, launches=1, graph_nodes=nodes)


def work(tokens, width, hidden, experts):
    used = min(experts, tokens * CHOSEN)  # the weights of experts without tokens are not read
    return Work(
        read=2 * used * 3 * width * hidden + 2 * tokens * width,
        write=2 * tokens * width,
        flops={"bf16": 2 * CHOSEN * tokens * 3 * width * hidden},
        terms=max(width, hidden),
        roundings=12,
    )


rung = functools.partial(
    compare,
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"tokens": 256, "width": 2048, "hidden": 1024, "experts": 32}],
    check_sizes=[
        {"tokens": 21, "width": 72, "hidden": 40, "experts": 3},
        {"tokens": 2, "width": 64, "hidden": 24, "experts": 6},  # some experts idle
    ],
    work=work,
    bound="launch",  # the rungs reduce the host's time
)


@rung(
    baseline=masked,
    optimized=[sorted_slices],
    costs={masked: masked_cost, sorted_slices: sorted_cost},
)
def test_moe_ladder_sorted(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    baseline=sorted_slices,
    optimized=[grouped],
    costs={sorted_slices: sorted_cost, grouped: grouped_cost},
)
def test_moe_ladder_grouped(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    baseline=grouped,
    optimized=[captured],
    costs={grouped: grouped_cost, captured: captured_cost},
)
def test_moe_ladder_captured(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    baseline=masked,
    optimized=[captured],
    costs={masked: masked_cost, captured: captured_cost},
)
def test_moe_ladder(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
