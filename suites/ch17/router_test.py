"""Router: choose the experts of all tokens at once, and in one kernel.

Problem    A router gives each token a score for each of `experts` experts, in fp32. Find the 4 best
           experts of a token, best first, and their shares: a softmax over their 4 scores. The
           scores of a token all differ, so there is one right answer.
Baseline   of_all: a softmax over all experts, `topk`, and a division by the sum of the chosen
           shares, as in published implementations of Mixtral.
           looped: the baseline of a separate test, which routes requests instead of tokens. A
           function is called once per request, as in the first version of a server. Nobody would
           write such a loop for the tokens of a layer.
Optimized  of_chosen: changes `of_all`. `topk` comes first, then a softmax over the 4 chosen scores.
           The shares are the same, because the sum over all experts cancels out.
           fused: changes `of_chosen`. One Triton kernel reads the scores once, then finds and
           removes the largest score 4 times. The scores and shares stay in registers. In the test
           of requests, `of_chosen` changes `looped`. Two calls process all requests at once.
Bound      With few tokens, the host limits all sides: it launches a few kernels per call, or in
           `looped`, a few per request. With many tokens, DRAM limits `fused`. The other sides call
           `topk` of torch, which starts a block of threads for each row. The block finds the fourth
           largest score digit by digit, with barriers in between.
Seen       On an H100, with many tokens, `of_chosen` gains nothing over `of_all`, because both spend
           nearly all their time in `topk`. `topk` takes several times as long as predicted: the
           cost counts only the starts of its blocks, and not the search. `fused` takes longer than
           predicted from its bytes. `fused` searches a row 4 times for the largest score and its
           index. The cost does not count the instructions of this search. The predicted time of a
           launch was measured with an addition. With few tokens, the host takes longer to call
           `topk` or a Triton kernel than to call an addition. `looped` calls `topk` once per
           request, so it takes longer than predicted, too. We did not time `topk` alone.
Use when   Always: choose first, and then normalize the chosen scores. The shares are the same, and
           fewer launches matter only with few tokens. Write one kernel if the router takes a
           noticeable part of a layer's time. The kernel gains most with many tokens, but with large
           experts the router hardly matters. Vectorize any decision that is made per request and
           does not depend on the previous decision.
"""

import functools

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare

CHOSEN = 4
TOKENS = 16  # tokens per program


def inputs(device, tokens, experts):
    ranks = torch.rand(tokens, experts, device=device).argsort(dim=1)
    spread = 1 + 7 * torch.rand(tokens, 1, device=device)  # some scores are close, some are not
    return (spread * (ranks / experts - 0.5),)


def reference(scores):
    best, chosen = scores.double().sort(dim=1, descending=True)
    best = best[:, :CHOSEN]
    weights = (best - best[:, :1]).exp()
    return chosen[:, :CHOSEN].contiguous(), weights / weights.sum(dim=1, keepdim=True)


def of_all(scores):
    best, which = scores.softmax(dim=1).topk(CHOSEN, dim=1)
    return which, best / best.sum(dim=1, keepdim=True)


def looped(scores):
    chosen, shares = [], []
    for token in scores:
        best, which = token.topk(CHOSEN)
        chosen.append(which)
        shares.append(best.softmax(dim=0))
    return torch.stack(chosen), torch.stack(shares)


def of_chosen(scores):
    best, which = scores.topk(CHOSEN, dim=1)
    return which, best.softmax(dim=1)


@triton.jit
def router_kernel(
    scores, chosen, shares, tokens, experts,
    CHOSEN: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns, places = tl.arange(0, BLOCK), tl.arange(0, CHOSEN)
    known = (rows < tokens)[:, None]
    left = tl.load(
        scores + rows[:, None] * experts + columns[None, :],
        mask=known & (columns < experts)[None, :],
        other=float("-inf"),
    )
    best = tl.zeros((TOKENS, CHOSEN), tl.float32)
    which = tl.zeros((TOKENS, CHOSEN), tl.int64)
    for place in tl.static_range(CHOSEN):
        largest, at = tl.max(left, axis=1), tl.argmax(left, axis=1)
        here = (places == place)[None, :]
        best = tl.where(here, largest[:, None], best)
        which = tl.where(here, at[:, None].to(tl.int64), which)
        left = tl.where(columns[None, :] == at[:, None], float("-inf"), left)
    weights = tl.exp(best - tl.max(best, axis=1)[:, None])
    out = rows[:, None] * CHOSEN + places[None, :]
    tl.store(chosen + out, which, mask=known)
    tl.store(shares + out, weights / tl.sum(weights, axis=1)[:, None], mask=known)


def fused(scores):
    tokens, experts = scores.shape
    chosen = torch.empty(tokens, CHOSEN, dtype=torch.int64, device=scores.device)
    shares = torch.empty(tokens, CHOSEN, device=scores.device)
    router_kernel[(triton.cdiv(tokens, TOKENS),)](
        scores, chosen, shares, tokens, experts,
        CHOSEN=CHOSEN, TOKENS=TOKENS, BLOCK=triton.next_power_of_2(experts), num_warps=4,
    )  # fmt: skip
    return chosen, shares


def routed(tokens, experts, launches, **more):
    moved = {"read": 4 * tokens * experts, "write": 12 * tokens * CHOSEN}
    return Cost(**moved, sfu=2 * tokens * CHOSEN, launches=launches, **more)


def each_request(tokens, experts):
    """Return the cost of `topk`, a sort and a softmax per request, and of two `stack` calls."""
    stacks = 2 * -(-tokens // 128)  # a launch copies up to 128 tensors
    return routed(tokens, experts, launches=3 * tokens + stacks, host_steps=3 * tokens)


def chosen_only(tokens, experts):
    """Return the cost of `topk`, of sorting the selected scores, and of a softmax."""
    kept = 12 * tokens * CHOSEN
    sort = Cost(read=kept, write=kept, launches=1)
    softmax = Cost(read=kept / 3, write=kept / 3, sfu=2 * tokens * CHOSEN, launches=1)
    return routed(tokens, experts, launches=1, blocks=tokens) + sort + softmax


def all_experts(tokens, experts):
    """Return the cost of a softmax, of `topk` and a sort, of a sum, and of a division."""
    scores, kept = 4 * tokens * experts, 12 * tokens * CHOSEN
    softmax = Cost(read=scores, write=scores, sfu=tokens * (experts + 1), launches=1)
    sort = Cost(read=kept, write=kept, launches=1)
    total = Cost(read=kept / 3, write=4 * tokens, launches=1)
    shares = Cost(read=kept / 3 + 4 * tokens, write=kept / 3, launches=1)
    select = routed(tokens, experts, launches=1, blocks=tokens)
    return softmax + select + sort + total + shares


def one_kernel(tokens, experts):
    return routed(tokens, experts, launches=1)


router = functools.partial(
    compare,
    inputs=inputs,
    reference=reference,
    work=lambda tokens, experts: Work(
        read=4 * tokens * experts, write=12 * tokens * CHOSEN, terms=experts, roundings=4
    ),
)
rungs = functools.partial(
    router,
    baseline=of_all,
    costs={of_all: all_experts, of_chosen: chosen_only, fused: one_kernel},
)


@router(
    baseline=looped,
    optimized=[Variant(of_chosen, at_least={"sm90": 190, "cpu": 4.0})],
    sizes=[{"tokens": 256, "experts": 64}],
    check_sizes=[{"tokens": 5, "experts": 9}],
    cpu_sizes=[{"tokens": 256, "experts": 64}],
    bound="launch",
    costs={looped: each_request, of_chosen: chosen_only},
)
def test_router_of_requests(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rungs(
    optimized=[Variant(of_chosen, at_least={"sm90": 1.1}), Variant(fused, at_least={"sm90": 1.3})],
    sizes=[{"tokens": 8192, "experts": 64}],
    check_sizes=[
        {"tokens": 33, "experts": 9},
        {"tokens": st.integers(1, 20), "experts": st.integers(CHOSEN, 20)},
    ],
    bound="launch",
)
def test_router(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rungs(
    # With many tokens, of_all and of_chosen both spend nearly all their time in `topk`.
    optimized=[Variant(of_chosen, at_least="neutral"), Variant(fused, at_least={"sm90": 13})],
    sizes=[{"tokens": 1 << 19, "experts": 64}],
    check_sizes=[{"tokens": 17, "experts": 6}],
    bound="dram",
)
def test_router_of_many_tokens(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
