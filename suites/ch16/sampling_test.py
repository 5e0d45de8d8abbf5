"""Sampling: choose from the best few tokens, and sort nothing else.

Problem    Sample a token for each of `rows` sequences from `vocabulary` fp32 logits, with
           temperature 0.8, top-k 50 and a top-p that differs per row. Top-p takes the best of the
           top k tokens, one by one, until their probabilities add up to p. The Gumbel noise is an
           input. The token with the largest sum of scaled logit and noise wins, which amounts to
           sampling from the softmax. The inputs are drawn so that rounding cannot change the kept
           tokens or the winner, but keeping one token too many or too few changes the winner. The
           check compares all tokens exactly.
Baseline   sort_all: sort all logits, and mask the tokens that top-k and top-p exclude.
Optimized  top_k_first: changes `sort_all`. `torch.topk` gives the best 50 tokens in order. All
           later operations use only these 50.
           fused: changes `top_k_first`. After `topk`, one Triton kernel does all the work, with one
           program per row.
Bound      Sorting limits `sort_all`: a sort moves all numbers and their indices several times. DRAM
           or the L2 limits the other sides, which read all logits a few times to find the best 50.
           The small kernels that follow take about as long as their starts.
Seen       On an H100, all sides take about twice as long as predicted. In `sort_all`, `softmax` and
           `cumsum` give each row to one block, so 64 blocks work and the other SMs are idle. The
           cost counts these operations as passes at the copy rate. A radix sort also ranks its keys
           in shared memory, so each pass is probably slower than a copy. We did not time these
           parts separately. In `top_k_first` and `fused`, the kernels of `topk` load one number at
           a time and count it with an atomic in shared memory. Each kernel waits for the previous
           one. So these kernels probably do not reach the DRAM rate.
Use when   A request uses top-k, alone or with top-p. Top-p alone may keep very many tokens, so it
           needs a sort, or a kernel that searches for a threshold, as in FlashInfer. If the
           requests of a batch have different k, use the largest k and mask the rest.
"""

import math

import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare

TEMPERATURE, KEPT = 0.8, 50
GAP = 0.01
"""The smallest lead of the winner, large enough that rounding cannot change the winner."""


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
    """Sample one token of a row from its best tokens, which are in descending order."""
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
    """Return Gumbel noise. The argmax of logits plus this noise is a sample of their softmax."""
    return -torch.empty(shape, device=device).exponential_().log()


def best_of(logits, count=KEPT):
    """Return the best tokens of each row, and their logits divided by the temperature."""
    values, tokens = (logits.double() / TEMPERATURE).topk(count)
    return tokens, values


def inputs(device, rows, vocabulary):
    logits = 2 * torch.randn(rows, vocabulary, device=device)
    noise = gumbel(rows, vocabulary, device=device)
    tokens, values = best_of(logits, KEPT + 1)
    sums = values[:, :KEPT].softmax(1).cumsum(1)
    # `top_p` is halfway between two cumulative probabilities, so rounding changes no count of
    # tokens.
    last = torch.randint(1, KEPT, (rows, 1), device=device)  # the place of the last kept token
    top_p = (sums.gather(1, last - 1) + sums.gather(1, last)) / 2
    # In half of the rows, the last kept token wins. In the other rows, any kept token may win. The
    # first token that is not kept would beat the winner. So a side that keeps one token too many or
    # too few fails the check.
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

    `sort` writes all indices, sorts fp32 keys with 8-byte indices in four passes, and sorts the
    indices by row in one pass. Then `sort` writes values and indices. Each sort first counts
    digits.
    """
    n = rows * vocabulary
    by_value = Cost(read=4 * n, launches=2) + 4 * Cost(read=12 * n, write=12 * n, launches=1)
    by_row = Cost(read=8 * n, launches=2) + Cost(read=8 * n, write=8 * n, launches=1)
    written = Cost(read=12 * n, write=12 * n, launches=1)
    sort = Cost(write=8 * n, launches=1) + by_value + by_row + written
    scaled = summed = shares = Cost(read=4 * n, write=4 * n, launches=1)
    rest_dropped = Cost(write=4 * n, launches=1)  # all but the best few tokens of a row
    masked = Cost(read=8 * n, write=4 * n, launches=1) + Cost(read=4 * n, write=n, launches=1)
    masked += Cost(read=5 * n, write=4 * n, launches=1)
    scattered = Cost(write=4 * n, launches=1) + Cost(read=12 * n, write=4 * n, launches=1)
    chosen = Cost(read=8 * n, write=4 * n, launches=1) + Cost(read=4 * n, launches=1)
    return scaled + sort + rest_dropped + shares + summed + masked + scattered + chosen


def top_k_cost(rows, vocabulary, kernels):
    """Return the cost of `topk` and of `kernels` small kernels after it.

    `topk` selects digit by digit: it reads all logits once for each of four digits, and once more
    to gather the best. `topk` starts with one kernel and two fills of memory. Since torch 2.10,
    each digit then takes three kernels. Finally, seven kernels add up block counts, gather and
    sort.
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
    """With new noise, the winners follow the softmax over the kept tokens."""

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
            # The limit is six standard deviations of chi squared above the mean.
            assert chi < freedom + 6 * math.sqrt(2 * freedom)
