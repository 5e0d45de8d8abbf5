"""Queue disciplines: batch prompts of similar length, so that little padding is needed.

Problem    `requests` prompts of 1 to `longest` tokens are waiting, and most are short. Compute the
           hidden state of each prompt's last token with a decoder of `layers` bf16 blocks. A batch
           is padded to its longest prompt. Attention is causal, so no token attends to the padding
           after it. The host knows all lengths at the start. The results are in the order of
           arrival.
Baseline   fifo: 16 prompts at a time, in the order of arrival.
           by_length: the baseline of the second test, and a variant in the first (see below).
Optimized  by_length: changes `fifo`. The queue is sorted by length, still 16 prompts at a time.
           token_budget: changes `by_length`. A batch has no fixed number of prompts, but at most
           half of 16 times `longest` tokens, including padding. So batches of short prompts are
           larger.
Bound      Tensor cores, which multiply the padding too. A length is `longest` times the cube of a
           uniform random number. So the mean is a quarter of `longest`, and the longest of 16
           prompts is on average 5/6 of `longest`. `token_budget` saves launches and fills the GPU
           when prompts are short.
Seen       On an H100 and on an H200, each side takes about twice as long as predicted. `by_length`
           is predicted to gain a little more over `fifo` than it does. We do not know yet whether
           `token_budget` is faster than `by_length`. On one H100, `token_budget` takes 4 % less
           time. On two different H200s, it takes a little longer. The second test times both in one
           run. On an H200, `token_budget` takes about a fifth less time there, more than predicted.
           But the confidence interval almost reaches a speedup of 1, so the page claims only that
           `token_budget` is not slower. With typical lengths, `token_budget` forms six batches
           instead of eight, but computes about a tenth more tokens, because it pads more. In the
           first test, two things make `fifo` and `token_budget` slower than predicted. First, the
           costs assume that all products reach the peak of the tensor cores. By the profiler on an
           H200, the kernels take about 1.5 times the predicted time. Second, the GPU waits. The
           kernels of `fifo` take about 83 % of its time, and the kernels of `token_budget` take
           about 70 %. The GPU probably waits for the host between batches, because the host copies
           a batch's indices to the GPU before it launches the batch's kernels. We did not measure
           the gaps, and did not profile the second test.
Use when   Prompts wait and their lengths are known, as in offline inference or under load. A budget
           of tokens limits the memory of a batch. It may also save time, so time it on your
           machine. The shortest prompts finish first, so the mean wait falls too. Limit the wait of
           long prompts, because under steady load they may starve. Attention over packed sequences
           needs no padding (`varlen` in chapter 18). With such attention, the order changes only
           which requests wait.
"""

import functools

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare

HEAD, BATCH, VOCABULARY = 64, 16, 256
KERNELS = 11  # of a block, see `block_of`


def state(device, requests, longest, layers, width):
    def weight(*shape):
        return (torch.randn(shape, device=device) / shape[-2] ** 0.5).bfloat16()

    return {
        "embedding": torch.randn(VOCABULARY, width, device=device).bfloat16(),
        "qkv": weight(layers, width, 3 * width),
        "out": weight(layers, width, width),
        "up": weight(layers, width, 4 * width),
        "down": weight(layers, 4 * width, width),
    }


def inputs(device, requests, longest, layers, width):
    tokens = torch.randint(VOCABULARY, (requests, longest), device=device)
    lengths = (longest * torch.rand(requests) ** 3).long() + 1
    return tokens, lengths  # lengths stay on the host, where batches are formed


def reference(state, tokens, lengths):
    """Compute each prompt alone, without padding."""
    w = {name: weight.double() for name, weight in state.items()}
    results = []
    for prompt, length in zip(tokens, lengths.tolist(), strict=True):
        x = w["embedding"][prompt[:length]]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        for layer in range(len(w["qkv"])):
            inner = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            q, k, v = (inner @ w["qkv"][layer]).unflatten(1, (3, -1, HEAD)).permute(1, 2, 0, 3)
            scores = (q @ k.mT / HEAD**0.5).masked_fill(later, -torch.inf)
            x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w["out"][layer]
            inner = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            x = x + F.gelu(inner @ w["up"][layer]) @ w["down"][layer]
        results.append(x[-1])
    return torch.stack(results)


def block_of(x, qkv, out, up, down):
    def normalized(x):
        return F.rms_norm(x, x.shape[-1:], eps=1e-5)

    q, k, v = (normalized(x) @ qkv).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.transpose(1, 2).flatten(2) @ out
    return x + F.gelu(normalized(x) @ up) @ down


def prefill(state, tokens, lengths, batches):
    """Return the last state of each prompt. `batches` is a list of lists of prompt numbers."""
    layers = list(zip(*(state[name] for name in ("qkv", "out", "up", "down")), strict=True))
    results = state["embedding"].new_empty(len(tokens), state["embedding"].shape[1])
    host = lengths.tolist()
    for batch in batches:
        which = torch.tensor(batch, device=tokens.device)
        x = F.embedding(tokens[which, : max(host[i] for i in batch)], state["embedding"])
        for weights in layers:
            x = block_of(x, *weights)
        ends = torch.tensor([host[i] - 1 for i in batch], device=tokens.device)
        results[which] = x[torch.arange(len(batch), device=tokens.device), ends]
    return results


def in_groups(order):
    return [order[first : first + BATCH] for first in range(0, len(order), BATCH)]


def fifo(state, tokens, lengths):
    return prefill(state, tokens, lengths, in_groups(list(range(len(tokens)))))


def by_length(state, tokens, lengths):
    return prefill(state, tokens, lengths, in_groups(lengths.argsort(stable=True).tolist()))


def token_budget(state, tokens, lengths):
    budget, host = BATCH * tokens.shape[1] // 2, lengths.tolist()
    batches = [[]]
    for prompt in lengths.argsort(stable=True).tolist():
        if (len(batches[-1]) + 1) * host[prompt] > budget and batches[-1]:
            batches.append([])
        batches[-1].append(prompt)  # the longest prompt so far, which sets the padding
    return prefill(state, tokens, lengths, batches)


def expected(longest, requests):
    """Return the expected length of the longest of `requests` prompts."""
    return sum(1 - (steps / longest) ** (requests / 3) for steps in range(longest))


def quantiles(requests, longest):
    """Return the lengths of a typical draw, from short to long."""
    return [int(longest * ((i + 0.5) / requests) ** 3) + 1 for i in range(requests)]


def block_cost(layers, width, rows, length):
    """Return the cost of all blocks, for a batch of `rows` prompts padded to `length`."""
    tokens = rows * length
    moved = 2 * tokens * width * (2 + 4 + 2 + 3 + 2 + 8 + 5 + 3)
    products = 2 * tokens * 12 * width**2 + 2 * tokens * length * width
    each = Cost(
        read=moved / 2 + 24 * width**2, write=moved / 2, ops={"bf16": products}, launches=KERNELS
    )
    return layers * each + Cost(launches=6, h2d=16 * rows, syncs=2)


def fifo_cost(requests, longest, layers, width):
    whole, rest = divmod(requests, BATCH)
    cost = Cost(launches=1)
    for rows in [BATCH] * whole + [rest] * (rest > 0):
        cost += block_cost(layers, width, rows, expected(longest, rows))
    return cost


def sorted_cost(requests, longest, layers, width):
    lengths, cost = quantiles(requests, longest), Cost(launches=1)
    for group in in_groups(lengths):
        cost += block_cost(layers, width, len(group), group[-1])
    return cost


def budget_cost(requests, longest, layers, width):
    cost, batch = Cost(launches=1), []
    for length in [*quantiles(requests, longest), 1 << 60]:
        if batch and (len(batch) + 1) * length > BATCH * longest // 2:
            cost += block_cost(layers, width, len(batch), batch[-1])
            batch = []
        batch.append(length)
    return cost


def work(requests, longest, layers, width):
    # 0.6, because the prompts of a draw may be shorter than expected.
    tokens = 0.6 * requests * longest / 4
    return Work(
        read=24 * layers * width**2,
        flops={"bf16": 2 * tokens * layers * 12 * width**2},
        terms=max(longest, 4 * width),
        roundings=10 * layers,
    )


judged = functools.partial(
    compare,
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"requests": 128, "longest": 1024, "layers": 4, "width": 1024}],
    check_sizes=[
        {"requests": 17, "longest": 9, "layers": 1, "width": 64},
        {"requests": 3, "longest": 12, "layers": 2, "width": 128},
    ],
    work=work,
    bound="host",  # the host forms batches from the lengths
)


@judged(
    baseline=fifo,
    optimized=[by_length, token_budget],
    at_least={"sm90": 1.4},
    costs={fifo: fifo_cost, by_length: sorted_cost, token_budget: budget_cost},
)
def test_queue(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@judged(
    baseline=by_length,
    optimized=[Variant(token_budget, at_least="neutral")],
    costs={by_length: sorted_cost, token_budget: budget_cost},
)
def test_queue_budget(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
