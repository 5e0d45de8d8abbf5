"""Speculative decoding: guess a few tokens cheaply, and verify them in one call of the model.

Problem    Generate `steps` greedy tokens for one sequence after a prompt of 8 tokens, with a
           decoder in bf16 (`suites/decoder.py`). The check compares the tokens and their scores.
           The draft stands in for a trained draft: it guesses the right successor of `percent` % of
           all tokens, chosen at random. A unit test, `TestAcceptance`, measures how many tokens a
           verification gives. All sides compute the prompt and their steps in CUDA graphs. A second
           test is a curve over `percent`, from a draft that is never right to a draft that is
           always right. Chance decides which guesses are right, so the number of verifications may
           differ by several percent between two prompts.
Baseline   greedy: one token per step. The host launches all steps without waiting for the GPU.
Optimized  speculative: changes `greedy`. The draft, a table of successors, guesses `drafted`
           tokens. One call of the decoder computes the last token and all guesses. All guesses
           before the first wrong guess are accepted, and the call gives one more token
           (arXiv:2211.17192). The draft, the call and the acceptance are one graph of fixed shape.
           The host waits after each graph to learn how many tokens there are.
           fewer_waits: changes `speculative`. Before each wait, the host launches as many
           verifications as the remaining tokens need if all guesses are right. So the host waits
           only a few times, and never launches more verifications than needed.
           draft_model: changes `fewer_waits`. The guesses come from a decoder of one layer and a
           quarter of the width, which was built with the same successors. The steps of this decoder
           are in the graph too.
Bound      DRAM, and the time to start each kernel of the graphs. A verification reads the same
           weights as a step, for a few tokens instead of one, and gives all accepted guesses and
           one more token. If a draft is never right, each verification gives only one token, but
           the tokens are still correct. `draft_model` adds the small kernels of its steps, one
           after another.
Seen       All sides take almost half again as long as predicted on an H100, and more on an H200.
           The costs count only the start of each small kernel, and assume that products of a few
           rows read weights at the DRAM rate. We did not time these kernels or products alone.
           `speculative` and `fewer_waits` differ by less than the confidence interval.
           `draft_model` gains about a third less than `fewer_waits`, as predicted. In the curve on
           the H200, speculation does not clearly gain until two guesses in five are right. A draft
           that is never right makes as many calls as `greedy` makes steps, so at this point a
           verification takes about a sixth longer than a step. The costs predict only a third of
           this difference.
Use when   Few sequences are decoded at a time, and guesses are often right, as in code, in quotes
           from the prompt, and in answers of a fixed form. The table of successors stands for any
           draft that costs almost nothing, such as n-grams of the prompt. With a large batch,
           tensor cores are busy, so a rejected guess costs as much as an accepted one. Measure the
           acceptance rate on your own text. The curve shows how many guesses must be right before
           speculation pays. A server that sends each token immediately has to wait after each
           verification, as in `speculative`.
"""

import functools

import pytest
import torch

from pytest_aisp import Cost, Sweep, Variant, Work, capture, compare
from suites.decoder import Cache, Decoder, matrix_weights
from suites.serving import best, config_of, continued, forward_cost, kernels_of, plant

PROMPT = 8
NARROWER = 4
"""The decoder is this many times as wide as the draft model."""


def size_of(layers, width, steps, drafted, percent):
    # Rounded up to 8 keys, as the masks of fused attention kernels require.
    return config_of(layers, width, -(-(PROMPT + steps + drafted) // 8) * 8)


def draft_size(width, length):
    return config_of(1, max(128, width // NARROWER), length)


def state(device, layers, width, steps, drafted, percent):
    """Return a decoder with a known successor of each token, and its drafts' guesses.

    The successors form one cycle through all tokens, so no sequence repeats a few tokens that a
    draft happens to know.
    """
    config = size_of(layers, width, steps, drafted, percent)
    model, tokens = Decoder(config, device=device), config.vocabulary
    order = torch.randperm(tokens, device=device)
    table = torch.empty_like(order).index_copy_(0, order, order.roll(-1))
    missed = torch.randperm(tokens, device=device)[: round((1 - percent / 100) * tokens)]
    # No two tokens have the same guess, so `plant` adds at most one row to each row of the head.
    guess = table.index_copy(0, missed, table[missed.roll(1)])
    plant(model, table)
    model.small = Decoder(draft_size(width, config.length), device=device)
    plant(model.small, guess)
    model.register_buffer("table", table)
    model.register_buffer("guess", guess)
    return model


def inputs(device, layers, width, steps, drafted, percent):
    return torch.randint(256, (1, PROMPT), device=device), steps, drafted


def reference(model, prompts, steps, drafted):
    tokens, scores = continued(model, prompts, steps)
    return tokens[0], scores[0]


class Sequence:
    """A sequence that is being decoded, at fixed addresses so that its steps can be captured.

    Attributes:
        count: the number of tokens, as a tensor on the GPU. The last token is not in the cache yet.
        token: the last token.
    """

    def __init__(self, model, prompts, steps, drafted):
        if drafted < 1:
            raise ValueError(f"a draft of {drafted} tokens leaves nothing to verify")
        needed, length = PROMPT + steps + drafted, model.config.length
        if needed > length:
            raise ValueError(f"{needed} tokens do not fit in a cache of {length}")
        device = prompts.device
        self.model, self.prompts, self.steps, self.drafted = model, prompts, steps, drafted
        self.cache = Cache(model.config, 1, length, device)
        self.count, self.token = torch.zeros(2, 1, dtype=torch.int64, device=device)
        # Wrong guesses after the last token need room too.
        self.tokens = torch.zeros(steps + drafted + 1, dtype=torch.int64, device=device)
        self.scores = torch.zeros(steps + drafted + 1, dtype=torch.bfloat16, device=device)
        self.offsets = torch.arange(drafted + 1, device=device)

    def position(self):
        return self.count + (PROMPT - 1)

    def read(self):
        self.count.zero_()
        self.keep(*best(self.model.prefill(self.prompts, self.cache)), 1)

    def step(self):
        self.keep(*best(self.model.step(self.token, self.position(), self.cache)), 1)

    def verify(self, guesses):
        """Compute the last token and the guesses. Keep the tokens that single steps would give."""
        tokens = torch.cat([self.token, guesses])
        positions = self.position() + self.offsets
        found, scores = best(self.model(tokens[None], positions[None], self.cache)[0])
        accepted = (found[:-1] == guesses).cumprod(0).sum(0, keepdim=True)
        self.keep(found, scores, accepted + 1)

    def keep(self, tokens, scores, new):
        """Store `tokens`. Only the first `new` are valid, and the next call overwrites the rest."""
        places = self.count + self.offsets[: len(tokens)]
        self.tokens.index_copy_(0, places, tokens)
        self.scores.index_copy_(0, places, scores)
        self.count.add_(new).clamp_(max=self.steps)
        self.token.copy_(self.tokens.index_select(0, self.count - 1))

    def result(self):
        return self.tokens[: self.steps].clone(), self.scores[: self.steps].clone()


class Table:
    """A draft that looks up the successor of each token in a table."""

    def __init__(self, sequence, successors):
        self.sequence, self.successors = sequence, successors

    def read(self):
        """Do nothing, because a table does not depend on the prompt."""

    def guesses(self):
        tokens = [self.sequence.token]
        for _ in range(self.sequence.drafted):
            tokens.append(self.successors.index_select(0, tokens[-1]))
        return torch.cat(tokens[1:])


class Model:
    """A draft that is a small decoder with its own cache."""

    def __init__(self, sequence, small):
        self.sequence, self.small = sequence, small
        self.cache = Cache(small.config, 1, small.config.length, sequence.prompts.device)

    def read(self):
        self.small.states(self.sequence.prompts, 0, self.cache)

    def guesses(self):
        token, position = self.sequence.token, self.sequence.position()
        tokens = []
        for _ in range(self.sequence.drafted):
            token = self.small.step(token, position, self.cache).argmax(-1)
            tokens.append(token)
            position = position + 1
        # If all guesses are accepted, the next call needs the last guess in the cache.
        self.small.states(token[:, None], position[:, None], self.cache)
        return torch.cat(tokens)


def greedy(model, prompts, steps, drafted):
    sequence = Sequence(model, prompts, steps, drafted)
    read, step = capture(sequence.read), capture(sequence.step)

    def run():
        read()
        for _ in range(steps - 1):
            step()
        return sequence.result()

    yield run


def graphs_of(sequence, draft):
    """Return two graphs: one computes the prompt, and one drafts and verifies once."""

    def read():
        sequence.read()
        draft.read()

    return capture(read), capture(lambda: sequence.verify(draft.guesses()))


def one_by_one(sequence, draft):
    """Return a function that decodes all tokens and waits after each verification."""
    read, verify = graphs_of(sequence, draft)

    def run():
        read()
        produced = 1
        while produced < sequence.steps:
            verify()
            produced = sequence.count.item()
        return sequence.result()

    return run


def in_bursts(sequence, draft):
    """Return a function that decodes all tokens and waits only a few times.

    Before each wait, the function launches the verifications that are needed even if all guesses
    are right.
    """
    read, verify = graphs_of(sequence, draft)

    def run():
        read()
        produced = 1
        while produced < sequence.steps:
            for _ in range(certain(sequence.steps - produced, sequence.drafted)):
                verify()
            produced = sequence.count.item()
        return sequence.result()

    return run


def certain(tokens, drafted):
    """Return how many verifications `tokens` tokens need if all guesses are right."""
    return -(-tokens // (drafted + 1))


def speculative(model, prompts, steps, drafted):
    sequence = Sequence(model, prompts, steps, drafted)
    yield one_by_one(sequence, Table(sequence, model.guess))


def fewer_waits(model, prompts, steps, drafted):
    sequence = Sequence(model, prompts, steps, drafted)
    yield in_bursts(sequence, Table(sequence, model.guess))


def draft_model(model, prompts, steps, drafted):
    sequence = Sequence(model, prompts, steps, drafted)
    yield in_bursts(sequence, Model(sequence, model.small))


def work(layers, width, steps, drafted, percent):
    config = size_of(layers, width, steps, drafted, percent)
    passes = 1 + certain(steps - 1, drafted)
    return Work(
        read=2 * passes * matrix_weights(config),
        flops={"bf16": 2 * (PROMPT + steps - 1) * matrix_weights(config)},
        roundings=20 * layers,
    )


def per_verification(drafted, share):
    """Return how many tokens a verification gives on average."""
    return sum(share**k for k in range(drafted + 1))


def verifications(tokens, drafted, share):
    """Return the mean number of verifications for `tokens` tokens, rounded to an integer."""
    chances = [share**k * (1 - share) for k in range(drafted)] + [share**drafted]
    needed = [0.0]
    for left in range(1, tokens + 1):
        rest = (p * needed[max(0, left - 1 - k)] for k, p in enumerate(chances))
        needed.append(1 + sum(rest))
    return round(needed[tokens])


def bursts(tokens, drafted, share):
    """Return how often the host waits if each verification gives the average number of tokens."""
    count = 0
    while tokens >= 1:
        tokens -= certain(tokens, drafted) * per_verification(drafted, share)
        count += 1
    return count


def prompt_cost(config):
    nodes = kernels_of(config) + 6
    return forward_cost(config, PROMPT, PROMPT, PROMPT**2, launches=1, graph_nodes=nodes)


def step_cost(config, more, *, launches=0):
    """Return the cost of a step and of `more` small kernels that choose and store its token."""
    nodes = kernels_of(config) + more
    return forward_cost(
        config, 1, config.length, config.length, launches=launches, graph_nodes=nodes
    )


def greedy_cost(layers, width, steps, drafted, percent):
    config = size_of(layers, width, steps, drafted, percent)
    step = step_cost(config, 10, launches=1)
    return prompt_cost(config) + (steps - 1) * step + Cost(launches=2)


def speculation(*, waits_always, small):
    """Return a function from the page's sizes to the cost of the prompt and all verifications."""

    def cost(layers, width, steps, drafted, percent):
        config = size_of(layers, width, steps, drafted, percent)
        own, share = draft_size(width, config.length), percent / 100
        count = verifications(steps - 1, drafted, share)
        # Each layer copies the mask for all query heads that share a key head. Another 17 kernels
        # join tokens, count the accepted ones and store them.
        nodes = kernels_of(config) + layers + 17
        total, draft = prompt_cost(config), Cost(graph_nodes=drafted + 1)
        if small:
            total, draft = total + prompt_cost(own), (drafted + 1) * step_cost(own, 2)
        scores = (drafted + 1) * config.length
        verified = forward_cost(
            config, drafted + 1, config.length, scores, launches=1, graph_nodes=nodes
        )
        waits = count if waits_always else bursts(steps - 1, drafted, share)
        for burst in range(waits):
            each = count // waits + (burst < count % waits)
            total += each * (draft + verified) + Cost(syncs=1)
        return total + Cost(launches=2)

    return cost


speculative_cost = speculation(waits_always=True, small=False)

shared = functools.partial(
    compare,
    baseline=greedy,
    state=state,
    inputs=inputs,
    reference=reference,
    work=work,
    bound="launch",
)


@shared(
    optimized=[
        Variant(speculative, at_least={"sm90": 2.0}),
        Variant(fewer_waits, at_least={"sm90": 2.1}),
        draft_model,
    ],
    sizes=[{"layers": 4, "width": 4096, "steps": 96, "drafted": 4, "percent": 80}],
    check_sizes=[
        {"layers": 2, "width": 128, "steps": 11, "drafted": 3, "percent": 60},
        {"layers": 1, "width": 128, "steps": 7, "drafted": 1, "percent": 80},
    ],
    costs={
        greedy: greedy_cost,
        speculative: speculative_cost,
        fewer_waits: speculation(waits_always=False, small=False),
        draft_model: speculation(waits_always=False, small=True),
    },
)
def test_speculative_decoding(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@shared(
    optimized=[speculative],
    sizes=[
        {"layers": 4, "width": 4096, "steps": 96, "drafted": 4, "percent": percent}
        for percent in (0, 20, 40, 60, 80, 100)
    ],
    check_sizes=[
        {"layers": 1, "width": 128, "steps": 7, "drafted": 2, "percent": 0},
        {"layers": 1, "width": 128, "steps": 7, "drafted": 2, "percent": 100},
    ],
    sweep=Sweep("percent", judged=[80]),
    costs={greedy: greedy_cost, speculative: speculative_cost},
)
def test_speculative_decoding_acceptance(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


SIZE = {"layers": 1, "width": 256, "steps": 128, "drafted": 3}


class Counting(Table):
    """A table draft that counts how often it makes guesses."""

    calls = 0

    def guesses(self):
        self.calls += 1
        return super().guesses()


def decoded(percent, *loops):
    """Decode one prompt with each loop.

    Returns:
        Whether all tokens were as expected, and the number of verifications of each loop.
    """
    model = state("cpu", **SIZE, percent=percent)
    prompts, steps, drafted = inputs("cpu", **SIZE, percent=percent)
    wanted, calls, right = continued(model, prompts, steps)[0][0], [], True
    for loop in loops:
        sequence = Sequence(model, prompts, steps, drafted)
        draft = Counting(sequence, model.guess)
        right = right and torch.equal(loop(sequence, draft)()[0], wanted)
        calls.append(draft.calls)
    return right, calls


class TestAcceptance:
    """The number of accepted guesses, and the number of verifications."""

    def test_a_verification_gives_as_many_tokens_as_the_share_says(self):
        right, (calls,) = decoded(80, one_by_one)
        assert right
        expected = per_verification(SIZE["drafted"], 0.8)
        assert (SIZE["steps"] - 1) / calls == pytest.approx(expected, rel=0.3)

    def test_a_draft_that_never_agrees_changes_no_token_and_gives_one_a_call(self):
        assert decoded(0, one_by_one) == (True, [SIZE["steps"] - 1])

    def test_a_draft_that_always_agrees_is_verified_in_one_burst(self):
        assert decoded(100, in_bursts) == (True, [certain(SIZE["steps"] - 1, SIZE["drafted"])])

    def test_bursts_make_no_verification_more_than_waiting_after_each(self):
        right, calls = decoded(60, one_by_one, in_bursts)
        assert right
        assert calls[0] == calls[1]

    @pytest.mark.parametrize("percent", [0, 60, 100])
    def test_the_draft_knows_the_share_of_successors(self, percent):
        model = state("cpu", **SIZE, percent=percent)
        known = 100 * (model.guess == model.table).float().mean().item()
        assert known == pytest.approx(percent, abs=0.5)

    def test_the_draft_model_guesses_what_the_table_does(self):
        model = state("cpu", **SIZE, percent=60)
        sequence = Sequence(model, *inputs("cpu", **SIZE, percent=60))
        sequence.read()
        drafts = Table(sequence, model.guess), Model(sequence, model.small)
        drafts[1].read()
        assert torch.equal(*(draft.guesses() for draft in drafts))


class TestBadInput:
    """Sizes that do not fit are rejected."""

    def test_a_sequence_longer_than_the_cache_is_refused(self):
        model = state("cpu", 1, 128, 4, 4, 80)
        with pytest.raises(ValueError, match="17 tokens do not fit in a cache of 16"):
            Sequence(model, torch.zeros(1, PROMPT, dtype=torch.int64), 5, 4)

    def test_an_empty_draft_is_refused(self):
        model = state("cpu", 1, 128, 4, 4, 80)
        with pytest.raises(ValueError, match="a draft of 0 tokens"):
            Sequence(model, torch.zeros(1, PROMPT, dtype=torch.int64), 4, 0)
