"""Chunked prefill: compute a long prompt in chunks, and let other requests decode in between.

Problem    `running` requests are decoding when a prompt of `chunks` x `chunk` tokens arrives.
           Compute the prompt with a bf16 decoder (`suites/decoder.py`), and decode `chunks` tokens
           of each running request. `context` tokens of each running request are already in the
           cache. The check compares the logits after the prompt, and all decoded tokens with their
           scores.
Baseline   whole: the whole prompt is one call of the decoder. Then the running requests make
           `chunks` steps. So their first token waits for the whole prompt.
Optimized  chunked: changes `whole`. The prompt is computed in chunks, and the running requests make
           a step after each chunk. So a token of a running request waits for only one chunk. The
           steps delay the first token of the new request.
           mixed: changes `chunked`. One call of the decoder computes a chunk and a step together
           (Sarathi-Serve, OSDI 2024). Each linear layer multiplies all these tokens as rows of one
           matrix, so the weights are read only once. Only attention handles chunk and step
           separately.
Bound      Tensor cores limit the prompt. DRAM limits the steps of `whole` and `chunked`: a step
           reads all weights and the whole cache of each row, and does little arithmetic. `mixed`
           adds the rows of a step to products that already have hundreds of rows. So a step's rows
           cost extra time only in attention. `chunked` saves nothing: it does the same work as
           `whole` in more and smaller calls. Later chunks read the keys of earlier chunks again,
           and need attention with a mask. `whole` has plain causal attention. On all sides, the
           starts of many small kernels add time.
Seen       All sides take longer than predicted. `chunked` and `mixed` exceed their predictions the
           most. A product of 256 rows and 4096 columns has 64 tiles of 128 x 128, and the GPU has
           132 SMs. So the products of a chunk probably reach neither the rate of the tensor cores
           nor the rate of DRAM. The costs also assume that small kernels take no longer than their
           starts, and that attention with a mask reads the cache at the DRAM rate. We did not time
           any of these separately.
Use when   Long prompts arrive while other requests decode, and the time between tokens has a limit.
           The longest wait is one call with a chunk, so smaller chunks shorten the wait. Keep the
           chunk long enough to fill the tensor cores, a few hundred tokens on a large GPU. This
           page judges the total time of all calls, not the longest wait: when the longest wait
           ends, `whole` and `mixed` have done different amounts of work.
"""

import pytest
import torch

from pytest_aisp import Variant, Work, compare
from suites.decoder import Cache, exact_logits, matrix_weights
from suites.serving import best, config_of, continued, forward_cost, kernels_of, planted


def size_of(layers, width, running, context, chunk, chunks):
    # Rounded up to 8 keys, as the masks of fused attention kernels require.
    return config_of(layers, width, -(-max(context + chunks + 1, chunk * chunks) // 8) * 8)


def state(device, layers, width, running, context, chunk, chunks):
    config = size_of(layers, width, running, context, chunk, chunks)
    model = planted(device, config)
    shape = running, context
    model.register_buffer("before", torch.randint(config.vocabulary, shape, device=device))
    return model


def inputs(device, layers, width, running, context, chunk, chunks):
    vocabulary = size_of(layers, width, running, context, chunk, chunks).vocabulary
    prompt = torch.randint(vocabulary, (chunks * chunk,), device=device)
    return prompt, torch.randint(vocabulary, (running,), device=device), chunk


def reference(model, prompt, last, chunk):
    running = torch.cat([model.before, last[:, None]], 1)
    tokens, scores = continued(model, running, len(prompt) // chunk)
    return exact_logits(model, prompt[None])[:, -1], tokens, scores


class Rows:
    """A cache with the prompt in its last row, and the running requests in all other rows."""

    def __init__(self, model):
        config, (running, length) = model.config, model.before.shape
        self.model, self.running, self.device = model, running, model.before.device
        self.whole = Cache(config, running + 1, config.length, self.device)
        self.decoding = self.whole.rows(0, running)
        self.reading = self.whole.rows(running, running + 1)
        model.states(model.before, 0, self.decoding)
        self.first = torch.full((running,), length, device=self.device)

    def begin(self, last):
        self.tokens, self.positions = last, self.first
        self.found = []

    def take(self, logits):
        self.tokens, scores = best(logits)
        self.positions = self.positions + 1
        self.found.append((self.tokens, scores))

    def step(self):
        self.take(self.model.step(self.tokens, self.positions, self.decoding))

    def result(self, logits):
        tokens, scores = (torch.stack(each, 1) for each in zip(*self.found, strict=True))
        return logits, tokens, scores


class Mixture:
    """A cache for calls that take a chunk's tokens first, then one token per running request.

    Attributes:
        start: the position of the chunk's first token.
    """

    def __init__(self, rows, chunk):
        self.parts, self.chunk, self.start = (rows.reading, rows.decoding), chunk, 0

    def plan(self, positions, n, device):
        steps = positions[0, self.chunk :, None]
        return (
            self.parts[0].plan(self.start, self.chunk, device),
            self.parts[1].plan(steps, 1, device),
        )

    def split(self, x):
        """Return the chunk, of shape (1, heads, chunk, head), and the rows with one token each."""
        return x[:, :, : self.chunk], x[:, :, self.chunk :].permute(2, 1, 0, 3)

    def append(self, layer, k, v, plan):
        split = zip(self.parts, self.split(k), self.split(v), plan, strict=True)
        for part, keys, values, own in split:
            part.append(layer, keys, values, own)

    def attend(self, layer, q, plan):
        split = zip(self.parts, self.split(q), plan, strict=True)
        chunk, steps = (part.attend(layer, queries, own) for part, queries, own in split)
        return torch.cat([chunk, steps.permute(2, 1, 0, 3)], 2)


def whole(model, prompt, last, chunk):
    rows = Rows(model)

    def run():
        rows.begin(last)
        logits = model.prefill(prompt[None], rows.reading)
        for _ in range(len(prompt) // chunk):
            rows.step()
        return rows.result(logits)

    yield run


def chunked(model, prompt, last, chunk):
    rows = Rows(model)

    def run():
        rows.begin(last)
        for start in range(0, len(prompt), chunk):
            logits = model.prefill(prompt[None, start : start + chunk], rows.reading, start)
            rows.step()
        return rows.result(logits)

    yield run


def mixed(model, prompt, last, chunk):
    rows = Rows(model)
    cache, places = Mixture(rows, chunk), torch.arange(len(prompt), device=prompt.device)

    def run():
        rows.begin(last)
        for start in range(0, len(prompt), chunk):
            cache.start, end = start, start + chunk
            tokens = torch.cat([prompt[start:end], rows.tokens])
            positions = torch.cat([places[start:end], rows.positions])
            states = model.states(tokens[None], positions[None], cache)
            logits = model.logits(states[0, chunk - 1 :])
            rows.take(logits[1:])
        return rows.result(logits[:1])

    yield run


def work(layers, width, running, context, chunk, chunks):
    config = size_of(layers, width, running, context, chunk, chunks)
    return Work(
        read=2 * matrix_weights(config),
        flops={"bf16": 2 * chunks * (chunk + running) * matrix_weights(config)},
        roundings=20 * layers,
    )


def steps_cost(config, running, count):
    keys = running * config.length
    return count * forward_cost(config, running, keys, keys, launches=kernels_of(config) + 3)


def whole_cost(layers, width, running, context, chunk, chunks):
    config, n = size_of(layers, width, running, context, chunk, chunks), chunk * chunks
    read = forward_cost(config, n, n, n**2 / 2, launches=kernels_of(config))
    return read + steps_cost(config, running, chunks)


def chunked_cost(layers, width, running, context, chunk, chunks):
    config = size_of(layers, width, running, context, chunk, chunks)
    total = steps_cost(config, running, chunks)
    for k in range(chunks):
        # Each layer copies the mask for all query heads that share a key head.
        keys, kernels = (k + 1) * chunk, kernels_of(config) + (config.layers if k else 0)
        scores = chunk * (k + 0.5) * chunk
        total += forward_cost(config, chunk, keys, scores, launches=kernels)
    return total


def mixed_cost(layers, width, running, context, chunk, chunks):
    config = size_of(layers, width, running, context, chunk, chunks)
    # Compared with a plain call, each layer adds one attention, 2 writes to the cache, and a copy
    # that joins the outputs. A call computes positions and a mask twice, joins tokens and
    # positions, and finds the best token.
    kernels, rows = kernels_of(config) + 4 * config.layers + 10, running * config.length
    calls = []
    for k in range(chunks):
        keys, scores = (k + 1) * chunk + rows, chunk * (k + 0.5) * chunk + rows
        launches = kernels + (2 * config.layers if k else 0)  # the mask and queries are copied
        calls.append(forward_cost(config, chunk + running, keys, scores, launches=launches))
    return sum(calls[1:], calls[0])


@compare(
    baseline=whole,
    optimized=[Variant(chunked, at_least="yardstick"), mixed],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[
        {
            "layers": 4,
            "width": 4096,
            "running": 16,
            "context": 500,
            "chunk": 256,
            "chunks": 8,
        }
    ],
    check_sizes=[
        {"layers": 2, "width": 128, "running": 2, "context": 6, "chunk": 5, "chunks": 2},
        {"layers": 1, "width": 128, "running": 1, "context": 2, "chunk": 3, "chunks": 3},
    ],
    work=work,
    bound="tensor",
    costs={whole: whole_cost, chunked: chunked_cost, mixed: mixed_cost},
)
def test_chunked_prefill(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestBadInput:
    """A prompt that does not fit in the cache is rejected."""

    def test_a_chunk_behind_the_end_of_the_cache_is_refused_before_anything_is_written(self):
        model = planted("cpu", config_of(1, 64, 8))
        cache = Cache(model.config, 1, 8)
        model.prefill(torch.zeros(1, 6, dtype=torch.int64), cache)
        kept = cache.keys.clone()
        with pytest.raises(ValueError, match="9 tokens do not fit in a cache of 8"):
            model.prefill(torch.zeros(1, 3, dtype=torch.int64), cache, 6)
        assert torch.equal(cache.keys, kept)
