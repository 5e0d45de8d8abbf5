"""Continuous batching: when a request ends, start the next request in its row.

Problem    Serve `requests` requests with a decoder in bf16 (`suites/decoder.py`) that has `slots`
           rows in its batch. All prompts are equally long. The lengths of the answers are quantiles
           of an exponential distribution with the mean `mean`, in a fixed order: most are short and
           a few are long. The lengths are given, so no side checks on the host whether an answer
           has ended. A request starts only when a row is free. Decoding is greedy. The check
           compares all tokens and their scores.
Baseline   static: `slots` requests start together, and one call of the decoder computes their
           prompts. The next group starts when the longest answer of the group has ended.
Optimized  continuous: changes `static`. A row starts the next request as soon as the row's answer
           has ended (Orca, OSDI 2022). Both sides run the same loop. Only the schedule differs.
           captured: changes `continuous`. The step is a CUDA graph. A step always computes all
           rows, so one graph is enough. Prompts still run eagerly.
Bound      The host's launches limit `static` and `continuous`. A step takes the same time in
           `static` as in `continuous`. `continuous` makes fewer steps and more calls for prompts,
           because most requests start alone. DRAM limits the steps of `captured`: each step reads
           all weights and all rows of the cache, even rows without a request. Even in `captured`,
           launches limit the prompts.
Seen       `static` and `continuous` on an H100, and `static` on an H200, take two to three times as
           long as predicted. The costs count only the launches, but the eager decoder also spends
           time in Python. `captured` takes almost twice as long as predicted. Its prompts still run
           eagerly, and its graphs start many small kernels. We did not time these parts alone. The
           gains of `continuous` and `captured` agree with the predictions within the confidence
           intervals.
Use when   Answers differ in length, and the lengths are not known in advance. The gain is about the
           ratio of a group's longest answer to the average answer. There is no gain if all answers
           are equally long. `static` would also be faster if its step were a graph. A new request's
           prompt delays the next token of all other rows (`chunked_prefill_test.py`). With both
           schedules, a server that checks in each step whether answers have ended also waits for
           the GPU in each step.
"""

import itertools
import math

import pytest
import torch

from pytest_aisp import Cost, Work, capture, compare
from suites.decoder import Cache, matrix_weights
from suites.serving import best, config_of, continued, forward_cost, kernels_of, planted


def lengths_of(requests, mean):
    """Return each answer's number of tokens: quantiles of an exponential distribution."""
    golden = (math.sqrt(5) - 1) / 2  # multiples of it spread the quantiles evenly, in a mixed order
    quantiles = [(k * golden) % 1 for k in range(1, requests + 1)]
    return [1 + round(-(mean - 1) * math.log(1 - q)) for q in quantiles]


def schedule(lengths, slots, *, in_groups):
    """Return the step and the row in which each request starts, and the number of steps.

    Args:
        lengths: the number of tokens in each answer. The prompt's logits give the first token.
        slots: the number of rows in the batch.
        in_groups: whether requests start only when all rows are free.

    Returns:
        A list of (step, row) for all requests, and the number of steps. A request's prompt is
        computed just before this step.
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
    # Rounded up to 8 keys, as the masks of fused attention kernels require.
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
    """A batch of rows that are decoded together, and all tokens decoded so far."""

    def __init__(self, model, slots):
        device = model.embedding.device
        self.model, self.cache = model, Cache(model.config, slots, model.config.length, device)
        self.tokens, self.positions = torch.zeros(2, slots, dtype=torch.int64, device=device)
        self.scores = torch.zeros(slots, dtype=torch.bfloat16, device=device)
        self.found = []

    def admit(self, prompts, row):
        """Compute prompts in rows from `row` on. A prompt's last logits give the first token."""
        rows = slice(row, row + len(prompts))
        logits = self.model.prefill(prompts, self.cache.rows(rows.start, rows.stop))
        self.tokens[rows], self.scores[rows] = best(logits)
        self.positions[rows] = prompts.shape[1]

    def advance(self):
        """Decode a token in all rows. A row without a request repeats its last position."""
        token, score = best(self.model.step(self.tokens, self.positions, self.cache))
        self.tokens.copy_(token)
        self.scores.copy_(score)
        self.positions.add_(1).clamp_(max=self.model.config.length - 1)

    def keep(self):
        self.found.append((self.tokens.clone(), self.scores.clone()))


def admissions(starts):
    """Return the prefill calls before each step, each as (first request, count, row).

    Requests that start together in neighboring rows share a call.
    """
    due = {}
    for request, (begin, row) in enumerate(starts):
        calls = due.setdefault(begin, [])
        if calls and calls[-1][2] + calls[-1][1] == row and calls[-1][0] + calls[-1][1] == request:
            calls[-1][1] += 1
        else:
            calls.append([request, 1, row])
    return due


def served(batch, prompts, lengths, advance, *, in_groups):
    """Serve all requests. Return their tokens and scores, in the order of the requests."""
    starts, steps = schedule(lengths, len(batch.tokens), in_groups=in_groups)
    due, first = admissions(starts), []
    batch.found.clear()
    for step in range(steps + 1):
        for request, count, row in due.get(step, ()):
            batch.admit(prompts[request : request + count], row)
            rows = slice(row, row + count)
            first.append((batch.tokens[rows].clone(), batch.scores[rows].clone()))
        if step < steps:
            advance()
            batch.keep()
    tokens, scores = (torch.stack(all_steps) for all_steps in zip(*batch.found, strict=True))
    first_tokens, first_scores = (torch.cat(all_calls) for all_calls in zip(*first, strict=True))
    answers = []
    for request, (begin, row) in enumerate(starts):
        end = begin + lengths[request] - 1
        for whole, one in ((tokens, first_tokens), (scores, first_scores)):
            answers.append(torch.cat([one[request : request + 1], whole[begin:end, row]]))
    return torch.cat(answers[::2]), torch.cat(answers[1::2])


def static(model, prompts, lengths, slots):
    batch = Batch(model, slots)
    yield lambda: served(batch, prompts, lengths, batch.advance, in_groups=True)


def continuous(model, prompts, lengths, slots):
    batch = Batch(model, slots)
    yield lambda: served(batch, prompts, lengths, batch.advance, in_groups=False)


def captured(model, prompts, lengths, slots):
    batch = Batch(model, slots)
    replay = capture(batch.advance)
    yield lambda: served(batch, prompts, lengths, replay, in_groups=False)


def work(layers, width, slots, prompt, requests, mean):
    config, lengths = size_of(layers, width, prompt, requests, mean)
    tokens = requests * prompt + sum(lengths) - requests
    return Work(
        read=2 * matrix_weights(config),
        flops={"bf16": 2 * tokens * matrix_weights(config)},
        roundings=20 * layers,
    )


def serving(in_groups, graph):
    """Return a function from the page's sizes to the cost of serving all requests."""

    def cost(layers, width, slots, prompt, requests, mean):
        config, lengths = size_of(layers, width, prompt, requests, mean)
        starts, steps = schedule(lengths, slots, in_groups=in_groups)
        # Kernels that find the best token, store it and advance: 5 in the step, 2 after it.
        kernels, rows = kernels_of(config) + 5, slots * config.length
        kept = {"launches": 3, "graph_nodes": kernels} if graph else {"launches": kernels + 2}
        total = steps * forward_cost(config, slots, rows, rows, **kept)
        for calls in admissions(starts).values():
            for _, count, _ in calls:
                tokens, scores = count * prompt, count * prompt**2 / 2
                launches = kernels_of(config) + 6
                total += forward_cost(config, tokens, tokens, scores, launches=launches)
        return total + Cost(launches=4 + 2 * requests + 2)

    return cost


@compare(
    baseline=static,
    optimized=[continuous, captured],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 2, "width": 4096, "slots": 8, "prompt": 64, "requests": 24, "mean": 16}],
    check_sizes=[
        {"layers": 2, "width": 128, "slots": 3, "prompt": 3, "requests": 5, "mean": 3},
        {"layers": 1, "width": 128, "slots": 2, "prompt": 5, "requests": 4, "mean": 3},
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
    """Requests that do not fit, must wait or are cancelled."""

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
            Batch(model, 1).admit(torch.zeros(1, 9, dtype=torch.int64), 0)

    def test_a_cancelled_request_leaves_nothing_behind_for_the_next_one_in_its_row(self):
        model = planted("cpu", config_of(1, 64, 16))
        prompts = torch.randint(model.config.vocabulary, (2, 4))
        fresh, used = Batch(model, 1), Batch(model, 1)
        used.admit(prompts[:1], 0)
        for _ in range(5):  # then its user disconnects
            used.advance()
        for batch in (fresh, used):
            batch.admit(prompts[1:], 0)
            batch.advance()
        assert torch.equal(fresh.scores, used.scores)
