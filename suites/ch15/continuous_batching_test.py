"""Continuous batching: fill a row of the batch as soon as its request has ended.

Problem    Serve `requests` requests with a decoder in bf16 (`suites/decoder.py`) that has `slots`
           rows in its batch. All prompts are equally long. The lengths of the answers are quantiles
           of an exponential distribution with the mean `mean`, in a fixed order: most are short and
           a few are long. All tokens are greedy. Every token of every answer and its score are
           compared.
Baseline   static: `slots` requests start together. The next group starts when the longest answer of
           the group has ended.
Optimized  continuous: of static. The next request starts in a row as soon as this row's answer has
           ended. The loop is the same function, with one condition less (Orca, OSDI 2022).
           captured: of continuous. The step is a CUDA graph. A step always computes all rows, so
           one graph is enough. Prompts still run eagerly.
Bound      Launches, which the host makes, for static and continuous. Both take the same time for a
           step, and continuous makes fewer steps. captured is limited by DRAM: each step reads all
           weights and all rows of the cache, whether they hold a request or not.
Use when   Answers differ in length and nobody knows how long they will be. Continuous batching
           gains as much as the longest answer of a group exceeds the average one. It gains nothing
           if all answers are equally long. A new request's prompt delays the next token of all
           other rows (`chunked_prefill_test.py`).
"""

import itertools
import math

import pytest
import torch

from pytest_aisp import Cost, Work, capture, compare
from suites.decoder import Cache, matrix_weights

from .serving import best, config_of, continued, forward_cost, kernels_of, planted


def lengths_of(requests, mean):
    """Return the tokens of each answer: quantiles of an exponential distribution."""
    golden = (math.sqrt(5) - 1) / 2  # its multiples spread the quantiles evenly, in a mixed order
    quantiles = [(k * golden) % 1 for k in range(1, requests + 1)]
    return [1 + round(-(mean - 1) * math.log(1 - q)) for q in quantiles]


def schedule(lengths, slots, *, in_groups):
    """Return when and where each request starts.

    Args:
        lengths: tokens of each answer. The first one comes from the prompt.
        slots: rows of the batch.
        in_groups: whether requests start only when all rows are free.

    Returns:
        For each request the step before which it starts and its row, and the number of steps.
    """
    free_at, starts = [0] * slots, []
    for request, length in enumerate(lengths):
        if in_groups and request % slots == 0:
            free_at = [max(free_at)] * slots
        row = free_at.index(min(free_at))
        starts.append((free_at[row], row))
        free_at[row] += length - 1
    return starts, max(free_at)


def size_of(layers, width, prompt, requests, mean):
    lengths = lengths_of(requests, mean)
    # Whole multiples of 8 keys, as the fused attention kernels want their masks.
    return config_of(layers, width, -(-(prompt + max(lengths)) // 8) * 8), lengths


def state(device, layers, width, slots, prompt, requests, mean):
    return planted(device, size_of(layers, width, prompt, requests, mean)[0])


def inputs(device, layers, width, slots, prompt, requests, mean):
    config, lengths = size_of(layers, width, prompt, requests, mean)
    shape = requests, prompt
    return torch.randint(config.vocabulary, shape, device=device), lengths, slots


def reference(model, prompts, lengths, slots):
    tokens, scores = continued(model, prompts, max(lengths))
    kept = [torch.arange(max(lengths), device=tokens.device) < length for length in lengths]
    return tokens[torch.stack(kept)], scores[torch.stack(kept)]


class Batch:
    """A batch of rows that are decoded together, and what it has produced so far."""

    def __init__(self, model, slots):
        device = model.embedding.device
        self.model, self.cache = model, Cache(model.config, slots, model.config.length, device)
        self.tokens, self.positions = torch.zeros(2, slots, dtype=torch.int64, device=device)
        self.scores = torch.zeros(slots, dtype=torch.bfloat16, device=device)
        self.found = []

    def admit(self, prompt, row):
        """Compute the prompt of a request in a row. Its last token's logits give a first token."""
        logits = self.model.prefill(prompt[None], self.cache.rows(row, row + 1))
        self.tokens[row : row + 1], self.scores[row : row + 1] = best(logits)
        self.positions[row] = len(prompt)

    def advance(self):
        """Decode a token in all rows. A row without a request repeats its last position."""
        token, score = best(self.model.step(self.tokens, self.positions, self.cache))
        self.tokens.copy_(token)
        self.scores.copy_(score)
        self.positions.add_(1).clamp_(max=self.model.config.length - 1)

    def keep(self):
        self.found.append((self.tokens.clone(), self.scores.clone()))


def served(batch, prompts, lengths, starts, steps, advance):
    """Serve all requests as the schedule says. Return the tokens of each and their scores."""
    due = {}
    for request, (begin, row) in enumerate(starts):
        due.setdefault(begin, []).append((request, row))
    batch.found.clear()
    first = {}
    for step in range(steps + 1):
        for request, row in due.get(step, ()):
            batch.admit(prompts[request], row)
            first[request] = batch.tokens[row].clone(), batch.scores[row].clone()
        if step < steps:
            advance()
            batch.keep()
    tokens, scores = (torch.stack(all_steps) for all_steps in zip(*batch.found, strict=True))
    answers = []
    for request, (begin, row) in enumerate(starts):
        end = begin + lengths[request] - 1
        for whole, one in zip((tokens, scores), first[request], strict=True):
            answers.append(torch.cat([one[None], whole[begin:end, row]]))
    return torch.cat(answers[::2]), torch.cat(answers[1::2])


def static(model, prompts, lengths, slots):
    batch = Batch(model, slots)
    starts, steps = schedule(lengths, slots, in_groups=True)
    yield lambda: served(batch, prompts, lengths, starts, steps, batch.advance)


def continuous(model, prompts, lengths, slots):
    batch = Batch(model, slots)
    starts, steps = schedule(lengths, slots, in_groups=False)
    yield lambda: served(batch, prompts, lengths, starts, steps, batch.advance)


def captured(model, prompts, lengths, slots):
    batch = Batch(model, slots)
    starts, steps = schedule(lengths, slots, in_groups=False)
    replay = capture(batch.advance)
    yield lambda: served(batch, prompts, lengths, starts, steps, replay)


def work(layers, width, slots, prompt, requests, mean):
    config, lengths = size_of(layers, width, prompt, requests, mean)
    tokens = requests * prompt + sum(lengths) - requests
    return Work(
        read=2 * matrix_weights(config),
        flops={"bf16": 2 * tokens * matrix_weights(config)},
        terms=max(config.hidden, config.length),
        roundings=20 * layers,
    )


def serving(in_groups, graph):
    """Return a function of the size: the cost of serving all requests."""

    def cost(layers, width, slots, prompt, requests, mean):
        config, lengths = size_of(layers, width, prompt, requests, mean)
        _, steps = schedule(lengths, slots, in_groups=in_groups)
        kernels, rows = kernels_of(config) + 7, slots * config.length
        kept = {"launches": 3, "graph_nodes": kernels} if graph else {"launches": kernels + 2}
        admitted = forward_cost(
            config, prompt, prompt, prompt**2 / 2, launches=kernels_of(config) + 6
        )
        answers = Cost(launches=2 + 2 * requests + 2)
        return (
            requests * admitted + steps * forward_cost(config, slots, rows, rows, **kept) + answers
        )

    return cost


@compare(
    baseline=static,
    optimized=[continuous, captured],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 4, "width": 2048, "slots": 8, "prompt": 64, "requests": 32, "mean": 24}],
    check_sizes=[
        {"layers": 2, "width": 128, "slots": 3, "prompt": 5, "requests": 8, "mean": 4},
        {"layers": 1, "width": 64, "slots": 2, "prompt": 9, "requests": 5, "mean": 3},
    ],
    work=work,
    bound="launch",
    costs={
        static: serving(in_groups=True, graph=False),
        continuous: serving(in_groups=False, graph=False),
        captured: serving(in_groups=False, graph=True),
    },
)
def test_continuous_batching(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestBadInput:
    """What happens to requests that do not fit."""

    def test_requests_wait_while_all_rows_are_taken_and_none_is_lost(self):
        starts, steps = schedule([5] * 7, 2, in_groups=False)
        assert len(starts) == 7
        assert all(begin % 4 == 0 for begin, _ in starts)
        assert steps == 16

    def test_two_requests_never_share_a_row(self):
        lengths = lengths_of(40, 9)
        for in_groups in (True, False):
            starts, _ = schedule(lengths, 4, in_groups=in_groups)
            spans = [(row, b, b + n - 1) for (b, row), n in zip(starts, lengths, strict=True)]
            for (row, begin, end), (other, first, last) in itertools.combinations(spans, 2):
                assert row != other or end <= first or last <= begin

    def test_a_prompt_longer_than_the_cache_is_refused(self):
        model = planted("cpu", config_of(1, 64, 8))
        with pytest.raises(ValueError, match="do not fit in a cache of 8"):
            Batch(model, 1).admit(torch.zeros(9, dtype=torch.int64), 0)

    def test_a_cancelled_request_leaves_nothing_behind_for_the_next_one_in_its_row(self):
        model = planted("cpu", config_of(1, 64, 16))
        prompts = torch.randint(model.config.vocabulary, (2, 4))
        fresh, used = Batch(model, 1), Batch(model, 1)
        used.admit(prompts[0], 0)
        for _ in range(5):  # then its user hangs up
            used.advance()
        for batch in (fresh, used):
            batch.admit(prompts[1], 0)
            batch.advance()
        assert torch.equal(fresh.scores, used.scores)
