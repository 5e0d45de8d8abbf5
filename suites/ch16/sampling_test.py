"""Sampling: choose from the best few tokens, and sort nothing else.

Problem    Sample a token for each of `rows` sequences from `vocabulary` fp32 logits, with
           temperature 0.8, top-k 50 and a top-p of each row's own. Top-p keeps the fewest best
           tokens whose probability among the top k reaches it. The noise is given: the kept token
           with the largest sum of scaled logit and Gumbel noise wins, which samples from softmax.
           Inputs are drawn such that rounding changes neither the kept tokens nor the winner, but
           one kept token more or less does. All tokens are compared exactly.
Baseline   sort_all: sort all logits, and mask what top-k and top-p leave out.
Optimized  top_k_first: changes sort_all. `torch.topk` gives the best 50 tokens in their order. All
           else is done with these 50.
           fused: changes top_k_first. A Triton kernel does all else, with one program per row.
Bound      Sorting for sort_all: a sort moves all numbers and their places several times. DRAM or
           the L2 for the others, which read all logits a few times to find the best ones. Their
           small kernels after that are limited by the time that it takes to start a kernel.
Seen       On an H100, all sides take about twice as long as predicted. sort_all: `softmax` and
           `cumsum` give each row to one block, so 64 blocks work and the other SMs are idle. The
           cost takes them for passes at the copy rate. A pass of a radix sort also ranks its keys
           in shared memory, so it is probably slower than a copy. We did not measure how the time
           divides among these. top_k_first and fused: the kernels of `topk` load one number at a
           time and count it with an atomic in shared memory, and each waits for the one before. So
           they probably do not reach the DRAM rate.
Use when   A request uses top-k, alone or with top-p. Top-p alone may keep very many tokens, so it
           needs a sort or a kernel that searches a threshold (FlashInfer has one). If requests of
           a batch have different k, take the largest one and mask the rest.
"""

import math

import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare

TEMPERATURE, KEPT = 0.8, 50
GAP = 0.01
"""By how much the winner wins, so that rounding cannot change it."""


@triton.jit
def choose_kernel(
    values,
    tokens,
    noise,
    top_p,
    chosen,
    vocabulary,
    scale,
    KEPT: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Choose one of the best tokens of a row, which are in descending order."""
    row, place = tl.program_id(0), tl.arange(0, PADDED)
    there = place < KEPT
    value = tl.load(values + row * KEPT + place, mask=there, other=float("-inf")) * scale
    token = tl.load(tokens + row * KEPT + place, mask=there, other=0)
    weight = tl.exp(value - tl.max(value, 0))
    share = weight / tl.sum(weight, 0)
    kept = there & (tl.cumsum(share, 0) - share < tl.load(top_p + row))
    random = tl.load(noise + row * vocabulary + token, mask=kept, other=0.0)
    best = tl.argmax(tl.where(kept, value + random, float("-inf")), 0)
    tl.store(chosen + row, tl.sum(tl.where(place == best, token, 0), 0))


def gumbel(*shape, device):
    """Return noise. The largest sum of it and of logits samples from their softmax."""
    return -torch.empty(shape, device=device).exponential_().log()


def best_of(logits, count=KEPT):
    """Return the best tokens, and their logits over the temperature."""
    values, tokens = (logits.double() / TEMPERATURE).topk(count)
    return tokens, values


def inputs(device, rows, vocabulary):
    logits = 2 * torch.randn(rows, vocabulary, device=device)
    noise = gumbel(rows, vocabulary, device=device)
    tokens, values = best_of(logits, KEPT + 1)
    sums = values[:, :KEPT].softmax(1).cumsum(1)
    # Half-way between the sums of two shares, so that rounding does not change how many are kept.
    last = torch.randint(1, KEPT, (rows, 1), device=device)  # the place of the last kept token
    top_p = (sums.gather(1, last - 1) + sums.gather(1, last)) / 2
    # The last kept token wins in half of the rows, and any kept one in the others. The next token
    # would beat it. So a side that keeps one more or one less is refused.
    score = values + noise.double().gather(1, tokens)
    places = torch.arange(KEPT + 1, device=device)
    highest = score.masked_fill(places > last, -torch.inf).amax(1, keepdim=True)
    any_place = (torch.rand(rows, 1, device=device) * (last + 1)).long()
    winner = torch.where(torch.rand(rows, 1, device=device) < 0.5, last, any_place)
    for place, above in ((winner, GAP), (last + 1, 2 * GAP)):
        raised = (highest + above - values.gather(1, place)).float()
        noise.scatter_(1, tokens.gather(1, place), raised)
    return logits, noise, top_p[:, 0].float()


def reference(logits, noise, top_p):
    tokens, values = best_of(logits)
    share = values.softmax(1)
    before = share.cumsum(1) - share
    score = values + noise.double().gather(1, tokens)
    best = score.masked_fill(before >= top_p[:, None].double(), -torch.inf).argmax(1, keepdim=True)
    return tokens.gather(1, best)[:, 0]


def sort_all(logits, noise, top_p):
    values, tokens = (logits / TEMPERATURE).sort(descending=True)
    values[:, KEPT:] = -torch.inf
    share = values.softmax(1)
    values.masked_fill_(share.cumsum(1) - share >= top_p[:, None], -torch.inf)
    kept = torch.full_like(logits, -torch.inf).scatter_(1, tokens, values)
    return (kept + noise).argmax(1)


def top_k_first(logits, noise, top_p):
    values, tokens = logits.topk(KEPT)
    values = values / TEMPERATURE
    share = values.softmax(1)
    score = values + noise.gather(1, tokens)
    score.masked_fill_(share.cumsum(1) - share >= top_p[:, None], -torch.inf)
    return tokens.gather(1, score.argmax(1, keepdim=True))[:, 0]


def fused(logits, noise, top_p):
    rows, vocabulary = logits.shape
    values, tokens = logits.topk(KEPT)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    choose_kernel[rows,](
        values,
        tokens,
        noise,
        top_p,
        chosen,
        vocabulary,
        1 / TEMPERATURE,
        KEPT=KEPT,
        PADDED=triton.next_power_of_2(KEPT),
        num_warps=1,
    )
    return chosen


def work(rows, vocabulary):
    return Work(read=4 * rows * vocabulary, write=8 * rows)


def sort_all_cost(rows, vocabulary):
    """Return the cost of sorting all rows as one list, and of the kernels around it.

    `sort` numbers all places, sorts fp32 keys with places of 8 bytes in four passes, and sorts the
    places by row in one pass. It then writes values and indices. Each sort first counts digits.
    """
    n = rows * vocabulary
    by_value = Cost(read=4 * n, launches=2) + 4 * Cost(read=12 * n, write=12 * n, launches=1)
    by_row = Cost(read=8 * n, launches=2) + Cost(read=8 * n, write=8 * n, launches=1)
    written = Cost(read=12 * n, write=12 * n, launches=1)
    sort = Cost(write=8 * n, launches=1) + by_value + by_row + written
    scaled = summed = shares = Cost(read=4 * n, write=4 * n, launches=1)
    rest_dropped = Cost(write=4 * n, launches=1)  # of a row, all but the best few
    masked = Cost(read=8 * n, write=4 * n, launches=1) + Cost(read=4 * n, write=n, launches=1)
    masked += Cost(read=5 * n, write=4 * n, launches=1)
    scattered = Cost(write=4 * n, launches=1) + Cost(read=12 * n, write=4 * n, launches=1)
    chosen = Cost(read=8 * n, write=4 * n, launches=1) + Cost(read=4 * n, launches=1)
    return scaled + sort + rest_dropped + shares + summed + masked + scattered + chosen


def top_k_cost(rows, vocabulary, kernels):
    """Return its cost. `topk` selects digit by digit: it reads all logits for each of four digits.

    It reads them once more to gather the best. Since torch 2.10, a digit is three kernels. One more
    and two fills of memory begin, and seven add up the counts of blocks, gather and sort.
    """
    read = 5 * 4 * rows * vocabulary
    return Cost(read=read, write=12 * rows * KEPT, launches=22) + Cost(launches=kernels)


@compare(
    baseline=sort_all,
    optimized=[
        Variant(top_k_first, at_least={"sm90": 6.1}),
        Variant(fused, at_least={"sm90": 7.0}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 64, "vocabulary": 128256}],
    check_sizes=[{"rows": 5, "vocabulary": 301}, {"rows": 1, "vocabulary": 64}],
    work=work,
    bound="dram",
    costs={
        sort_all: sort_all_cost,
        top_k_first: lambda rows, vocabulary: top_k_cost(rows, vocabulary, 10),
        fused: lambda rows, vocabulary: top_k_cost(rows, vocabulary, 1),
    },
)
def test_sampling(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()


class TestDistribution:
    """The winner of fresh noise is distributed as softmax over the kept tokens."""

    def test_tokens_come_as_often_as_their_shares_say(self):
        draws, vocabulary, top_p = 40_000, 64, 0.9
        logits = torch.linspace(-2, 2, vocabulary)
        values, tokens = (logits.double() / TEMPERATURE).topk(KEPT)
        share = values.softmax(0)
        share[share.cumsum(0) - share >= top_p] = 0
        wanted = torch.zeros(vocabulary, dtype=torch.float64)
        wanted[tokens] = share / share.sum()
        noise = gumbel(draws, vocabulary, device="cpu")
        rows = logits.expand(draws, -1).contiguous()
        for side in (sort_all, top_k_first):
            found = side(rows, noise, torch.full((draws,), top_p))
            counts = found.bincount(minlength=vocabulary)
            assert counts[wanted == 0].sum() == 0
            used = wanted > 0
            chi = ((counts - draws * wanted).square() / (draws * wanted))[used].sum()
            freedom = int(used.sum()) - 1
            # Six standard deviations of chi squared above its mean.
            assert chi < freedom + 6 * math.sqrt(2 * freedom)
