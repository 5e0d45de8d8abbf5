"""Batch size: a larger batch lowers the cost of a token and raises the time between two tokens.

Problem    Decode 8 tokens of each of `rows` sequences with a bf16 decoder (`suites/decoder.py`).
           The tokens are inputs, so both sides do the same work. Each sequence has a cache of 1024
           positions. Return the logits of all tokens. The page is a curve over `rows`.
Baseline   alone: one sequence after another. A step is a CUDA graph.
Optimized  batched: changes `alone`. One step advances all sequences, so each sequence waits for all
           others. The time between two tokens of a sequence is the time of the call divided by 8.
Bound      DRAM. A step reads all weights once, for one sequence or for many. The step also reads
           the whole cache of each sequence, because a captured step has fixed shapes and masks the
           positions after the current token. So the time between two tokens is the time to read the
           weights and `rows` caches. The cost of a token is the time to read one cache and a share
           of the weights. If reading the caches takes longer than reading the weights, the cost of
           a token barely falls with more sequences. With few sequences and two layers, the starts
           of a step's many small kernels take even longer than the reads.
Seen       On an H100, both sides take 1.5 times as long as predicted, or slightly longer, at every
           number of sequences. So their ratio is as predicted. For each small kernel, the costs
           count only the start. A kernel probably takes somewhat longer, because it waits for its
           first bytes and has work for only a few SMs, as in `prefill_decode_test.py`. With 64 and
           256 sequences, reading the caches should take longer than all kernel starts. But
           `batched` still takes 1.5 times as long as predicted. We did not time the attention of
           `batched` alone. With 1 sequence, both sides do the same work, so nothing is gained. With
           16, `batched` also needs less than a tenth of the energy.
Use when   A server has an objective for the time between tokens. The largest batch that meets the
           objective is the cheapest, and the curve shows where larger batches no longer pay off. If
           even a step with one sequence takes longer than the objective, no batch size helps. Use
           smaller weights, a smaller cache, or more GPUs.
"""

import torch

from pytest_aisp import Sweep, Work, capture, compare
from suites.decoder import Cache, Decoder, exact_logits, matrix_weights
from suites.serving import config_of, forward_cost, kernels_of

STEPS = 8


def state(device, layers, width, length, rows):
    return Decoder(config_of(layers, width, length), device=device)


def inputs(device, layers, width, length, rows):
    return (torch.randint(256, (rows, STEPS), device=device),)


def reference(model, tokens):
    return exact_logits(model, tokens)


def decoded(model, tokens, together):
    """Return a function that decodes `together` rows at a time and replays a graph of a step."""
    config, device, rows = model.config, tokens.device, len(tokens)
    cache = Cache(config, together, config.length, device)
    current, positions = torch.zeros(2, together, dtype=torch.int64, device=device)
    logits = torch.empty(together, config.vocabulary, dtype=torch.bfloat16, device=device)
    replay = capture(lambda: logits.copy_(model.step(current, positions, cache)))

    def call():
        out = logits.new_empty(rows, STEPS, config.vocabulary)
        for first in range(0, rows, together):
            for step in range(STEPS):
                current.copy_(tokens[first : first + together, step])
                positions.fill_(step)
                replay()
                out[first : first + together, step] = logits
        return out

    return call


def alone(model, tokens):
    yield decoded(model, tokens, 1)


def batched(model, tokens):
    yield decoded(model, tokens, len(tokens))


def decoded_cost(layers, width, length, rows, together):
    config = config_of(layers, width, length)
    keys = together * length
    step = forward_cost(
        config, together, keys, keys, launches=4, graph_nodes=kernels_of(config) + 1
    )
    return rows // together * STEPS * step


def work(layers, width, length, rows):
    config = config_of(layers, width, length)
    return Work(
        read=2 * matrix_weights(config),
        flops={"bf16": 2 * STEPS * rows * matrix_weights(config)},
        roundings=20 * layers,
    )


@compare(
    baseline=alone,
    optimized=[batched],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[
        {"layers": 2, "width": 2048, "length": 1024, "rows": rows} for rows in (1, 4, 16, 64, 256)
    ],
    check_sizes=[{"layers": 2, "width": 128, "length": 16, "rows": 2}],
    work=work,
    bound="launch",
    costs={
        alone: lambda **size: decoded_cost(**size, together=1),
        batched: lambda rows, **size: decoded_cost(**size, rows=rows, together=rows),
    },
    sweep=Sweep("rows", judged=[16]),
)
def test_batch_size(pair):
    pair.assert_equivalent()
    if pair.size["rows"] == 16:
        pair.assert_energy(at_most=1.0)
    pair.assert_speedup()
