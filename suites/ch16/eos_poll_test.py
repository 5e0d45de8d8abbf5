"""End of answers: keep the GPU busy while the host checks whether decoding is done.

Problem    Decode answers to `rows` prompts of 8 tokens, together and greedily, with a bf16 decoder
           (`suites/decoder.py`). An answer ends with the first end token, or after `limit` tokens.
           The greedy tokens visit the whole vocabulary in a fixed cycle, and every `period`-th
           token of the cycle is an end token. So answers have 1 to `period` tokens, and the host
           cannot know the number in advance. Decoding ends when all answers have ended. The check
           compares the tokens and their scores. After an answer's end, every side writes -1 and a
           score of 0. All sides compute the prompts and the steps in CUDA graphs.
Baseline   every_step: the host calls `.item()` after each step. The GPU is idle until the host has
           read the flag and launched the next step.
Optimized  every_eighth: changes `every_step`. The host checks after every 8 steps. Up to 7 extra
           steps run, which change nothing.
           one_behind: changes `every_step`. After each step, the flag is copied to pinned memory
           and an event is recorded. The host launches a step, and then waits for the event of the
           previous step. So the GPU always has work, and one extra step runs.
Bound      DRAM and the starts of kernels in the graph limit the steps. `every_step` adds a wait to
           each step. `every_eighth` saves 7 of 8 waits and runs 3.5 extra steps on average.
           `one_behind` saves all waits and runs one extra step.
Seen       On an H100, all sides take about twice as long as predicted. The costs count only the
           start of each small kernel, but a kernel probably takes longer. So a wait is a smaller
           share of a step than predicted. The gain of both variants is smaller than the confidence
           interval, even with a model of one layer. So the page claims only that neither variant is
           slower than `every_step`.
Use when   A loop decodes until an end token, and its steps are CUDA graphs. Expect little: the
           model of this page is tiny, and even its steps take many times as long as a wait. With a
           large model, the wait is an even smaller share of a step. If the host launches each
           kernel of a step separately, the host limits all sides, and the wait is a small part of
           the time. Checking rarely is simple, but helps only if answers are much longer than the
           interval. Extra steps after the end must be harmless, so the cache needs room for them. A
           server that sends each token to the user can also use `one_behind` and send each token
           one step late.
"""

import pytest
import torch

from pytest_aisp import Cost, Work, capture, compare
from suites.decoder import Cache, Decoder, matrix_weights
from suites.serving import best, config_of, continued, forward_cost, kernels_of, plant

PROMPT, RARELY = 8, 8
NOTHING = -1
"""The token that is written after the end of an answer."""


def size_of(layers, width, rows, period, limit):
    # Rounded up to 8 keys, as the masks of fused attention kernels require.
    return config_of(layers, width, -(-(PROMPT + limit) // 8) * 8)


def state(device, layers, width, rows, period, limit):
    """Return a decoder whose greedy tokens cycle through all tokens. `is_end` marks end tokens."""
    config = size_of(layers, width, rows, period, limit)
    model = Decoder(config, device=device)
    order = torch.randperm(config.vocabulary, device=device)
    table = torch.empty_like(order).index_copy_(0, order, order.roll(-1))
    plant(model, table)
    model.register_buffer("table", table)
    is_end = torch.zeros(config.vocabulary, dtype=torch.bool, device=device)
    model.register_buffer("is_end", is_end.index_fill_(0, order[::period], True))
    return model


def inputs(device, layers, width, rows, period, limit):
    return torch.randint(256, (rows, PROMPT), device=device), limit


def reference(model, prompts, limit):
    tokens, scores = continued(model, prompts, limit)
    ends = model.is_end[tokens].long()
    behind = ends.cumsum(1) - ends > 0
    return tokens.masked_fill(behind, NOTHING), scores.masked_fill(behind, 0)


class Answers:
    """Answers that are being decoded, at fixed addresses so that a step can be captured.

    Attributes:
        count: the number of tokens decoded in each row, including tokens after the end.
        going: whether any answer has not ended yet.
    """

    def __init__(self, model, prompts, limit):
        if limit < 1:
            raise ValueError(f"an answer of at most {limit} tokens")
        needed, length = PROMPT + limit, model.config.length
        if needed > length:
            raise ValueError(f"{needed} tokens do not fit in a cache of {length}")
        rows, device = len(prompts), prompts.device
        self.model, self.prompts, self.limit = model, prompts, limit
        self.cache = Cache(model.config, rows, length, device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.last = torch.zeros(rows, dtype=torch.int64, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.going = torch.zeros((), dtype=torch.bool, device=device)
        self.tokens = torch.zeros(rows, limit, dtype=torch.int64, device=device)
        self.scores = torch.zeros(rows, limit, dtype=torch.bfloat16, device=device)

    def read(self):
        self.tokens.fill_(NOTHING)
        for buffer in (self.scores, self.count, self.ended):
            buffer.zero_()
        self.keep(*best(self.model.prefill(self.prompts, self.cache)))

    def step(self):
        positions = (self.count + (PROMPT - 1)).expand(len(self.last))
        self.keep(*best(self.model.step(self.last, positions, self.cache)))

    def keep(self, tokens, scores):
        """Store a token of each answer that has not ended."""
        shown = tokens.masked_fill(self.ended, NOTHING), scores.masked_fill(self.ended, 0)
        for kept, new in zip((self.tokens, self.scores), shown, strict=True):
            kept.index_copy_(1, self.count, new[:, None])
        self.ended.logical_or_(self.model.is_end.index_select(0, tokens))
        self.going.copy_(self.ended.logical_not().any())
        self.last.copy_(tokens)
        self.count.add_(1).clamp_(max=self.limit - 1)

    def result(self):
        return self.tokens.clone(), self.scores.clone()


def asking(answers, read, step, every):
    """Decode. Each time `every` steps have run, wait for the GPU and check whether to go on."""
    read()
    for done in range(1, answers.limit):
        step()
        if done % every == 0 and not answers.going.item():
            break
    return answers.result()


class Flags:
    """Copies of the last two flags to the host. Without a GPU, the copies finish immediately."""

    def __init__(self, device):
        on_gpu = device.type == "cuda"
        self.values = [torch.zeros((), dtype=torch.bool, pin_memory=on_gpu) for _ in range(2)]
        self.arrived = [torch.cuda.Event() for _ in range(2)] if on_gpu else []

    def send(self, step, flag):
        self.values[step % 2].copy_(flag, non_blocking=True)
        if self.arrived:
            self.arrived[step % 2].record()

    def of(self, step):
        if self.arrived:
            self.arrived[step % 2].synchronize()
        return self.values[step % 2].item()


def asking_late(answers, read, step, flags):
    """Decode. Launch each step before checking whether the previous step was the last."""
    read()
    for done in range(1, answers.limit):
        step()
        flags.send(done, answers.going)
        if done > 1 and not flags.of(done - 1):
            break
    return answers.result()


def every_step(model, prompts, limit):
    answers = Answers(model, prompts, limit)
    read, step = capture(answers.read), capture(answers.step)
    yield lambda: asking(answers, read, step, 1)


def every_eighth(model, prompts, limit):
    answers = Answers(model, prompts, limit)
    read, step = capture(answers.read), capture(answers.step)
    yield lambda: asking(answers, read, step, RARELY)


def one_behind(model, prompts, limit):
    answers, flags = Answers(model, prompts, limit), Flags(prompts.device)
    read, step = capture(answers.read), capture(answers.step)
    yield lambda: asking_late(answers, read, step, flags)


def steps_of(rows, period, limit):
    """Return the mean number of steps that the longest of `rows` answers needs."""
    return max(1, min(limit, round(period * rows / (rows + 1))) - 1)


def decoding(steps, wait, waits):
    """Return a function from the page's sizes to the cost of prompts, steps and waits.

    Args:
        steps: a function from the number of needed steps to the number of steps that run.
        wait: the cost of one check.
        waits: a function from the number of steps that run to the number of checks.
    """

    def cost(layers, width, rows, period, limit):
        config = size_of(layers, width, rows, period, limit)
        # 17 kernels find the best token, store it, check for end tokens and advance.
        starts = {"launches": 1, "graph_nodes": kernels_of(config) + 17}
        total = forward_cost(config, rows * PROMPT, rows * PROMPT, rows * PROMPT**2 / 2, **starts)
        made = steps(steps_of(rows, period, limit))
        asked = waits(made)
        for number in range(asked):
            between = made // asked + (number < made % asked)
            keys = rows * config.length
            total += between * forward_cost(config, rows, keys, keys, **starts) + wait
        return total + Cost(launches=2)

    return cost


def in_eights(steps):
    return -(-steps // RARELY) * RARELY


def work(layers, width, rows, period, limit):
    config = size_of(layers, width, rows, period, limit)
    steps = steps_of(rows, period, limit)
    return Work(
        read=2 * (1 + steps) * matrix_weights(config),
        flops={"bf16": 2 * rows * (PROMPT + steps) * matrix_weights(config)},
        roundings=20 * layers,
    )


@compare(
    baseline=every_step,
    optimized=[every_eighth, one_behind],
    at_least="neutral",  # a wait is a small share of a step
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 1, "width": 1024, "rows": 16, "period": 128, "limit": 160}],
    check_sizes=[
        {"layers": 2, "width": 128, "rows": 3, "period": 9, "limit": 21},
        {"layers": 1, "width": 128, "rows": 2, "period": 40, "limit": 7},
    ],
    work=work,
    bound="launch",
    costs={
        every_step: decoding(lambda n: n, Cost(syncs=1), lambda made: made),
        every_eighth: decoding(
            # The needed steps may end anywhere between two multiples of 8.
            lambda n: n + RARELY // 2,
            Cost(syncs=1),
            lambda made: -(-made // RARELY),
        ),
        one_behind: decoding(lambda n: n + 1, Cost(d2h=1, launches=2), lambda made: made),
    },
)
def test_eos_poll(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class Counted:
    """Answers whose steps are counted."""

    def __init__(self, model, prompts, limit):
        self.answers, self.steps = Answers(model, prompts, limit), 0

    def step(self):
        self.steps += 1
        self.answers.step()

    def decoded(self, every):
        """Decode. Check for the end each time `every` steps have run, or one step late if None."""
        answers, read = self.answers, self.answers.read
        if every is None:
            return asking_late(answers, read, self.step, Flags(answers.prompts.device))
        return asking(answers, read, self.step, every)


class TestOverrun:
    """Counts the extra steps, and checks that they change nothing."""

    def made(self, model, prompts, limit):
        """Return the number of steps of each of the three sides. Results must be equal."""
        wanted, found = None, []
        for every in (1, RARELY, None):
            counted = Counted(model, prompts, limit)
            result = counted.decoded(every)
            found.append(counted.steps)
            wanted = wanted or result
            assert all(map(torch.equal, result, wanted))
        return found

    def test_only_as_many_steps_too_many_as_promised(self):
        model = state("cpu", 1, 256, rows=3, period=20, limit=64)
        prompts, limit = inputs("cpu", 1, 256, 3, 20, 64)
        tokens, _ = reference(model, prompts, limit)
        needed = max(1, int((tokens != NOTHING).sum(1).max()) - 1)
        assert self.made(model, prompts, limit) == [needed, in_eights(needed), needed + 1]

    def test_answers_that_end_with_their_first_token_cost_one_step(self):
        model = state("cpu", 1, 256, rows=2, period=1, limit=16)
        prompts, limit = inputs("cpu", 1, 256, 2, 1, 16)
        assert self.made(model, prompts, limit) == [1, RARELY, 2]

    def test_an_answer_without_an_end_stops_at_the_limit(self):
        model = state("cpu", 1, 256, rows=2, period=256, limit=12)
        model.is_end.zero_()
        prompts, limit = inputs("cpu", 1, 256, 2, 256, 12)
        assert self.made(model, prompts, limit) == [11, 11, 11]


class TestBadInput:
    """Sizes that do not fit are rejected."""

    def test_a_limit_longer_than_the_cache_is_refused(self):
        model = state("cpu", 1, 256, rows=1, period=4, limit=8)
        with pytest.raises(ValueError, match="17 tokens do not fit in a cache of 16"):
            Answers(model, torch.zeros(1, PROMPT, dtype=torch.int64), 9)

    def test_a_limit_of_no_token_is_refused(self):
        model = state("cpu", 1, 256, rows=1, period=4, limit=8)
        with pytest.raises(ValueError, match="at most 0 tokens"):
            Answers(model, torch.zeros(1, PROMPT, dtype=torch.int64), 0)
