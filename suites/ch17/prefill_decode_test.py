"""Prefill and decode: tokens computed together share one pass over the weights.

Problem    Compute the logits of all `tokens` tokens of one sequence with a bf16 decoder
           (`suites/decoder.py`). The tokens are inputs, so nothing is generated. The page is a
           curve over `tokens`.
Baseline   decode: one token after another, as when text is generated. A step is a CUDA graph, whose
           attention reads the whole cache, and masks the later positions.
Optimized  prefill: all tokens in one call, like a prompt. The call is a CUDA graph too. Outputs,
           weights and cache are the same on both sides.
Bound      A step of `decode` does only 2 operations with each weight that it reads, so DRAM limits
           it. `prefill` reads the weights once, and its number of operations grows with `tokens`.
           Beyond the ridge point of the roofline, tensor cores limit `prefill`. Each token takes 2
           operations per weight. So the ridge point, in tokens, is half the number of operations
           that the tensor cores do while DRAM delivers one weight. The starts of the many small
           kernels add time. With two layers, they take longer than reading the weights.
Seen       The result with 4 tokens is from an H100, and the others are from an H200. Both sides
           take from half again to a little more than twice as long as predicted. The costs count
           only the start of each small kernel. We did not time the kernels alone. From 16 to 64
           tokens, the time of prefill hardly changes. With 256 tokens, `prefill` takes only about a
           fifth longer. So up to 256 tokens, the speedup is at least 80 % of the number of tokens.
Use when   You decide how many tokens to compute together. Up to the ridge point, more tokens in a
           call cost nearly nothing. Prompts usually have more tokens than that, but a sequence that
           is being generated adds only one token per step. So a server batches decodes
           (`batch_size_test.py`), adds prompt tokens to them, or checks several guessed tokens in
           one call.
"""

import torch

from pytest_aisp import Cost, Sweep, Work, capture, compare
from suites.decoder import Cache, Decoder, exact_logits, matrix_weights
from suites.serving import config_of, forward_cost, kernels_of


def state(device, layers, width, tokens):
    return Decoder(config_of(layers, width, room_of(tokens)), device=device)


def room_of(tokens):
    return -(-tokens // 8) * 8  # rounded up to 8 keys, as the masks of fused kernels require


def inputs(device, layers, width, tokens):
    return (torch.randint(256, (1, tokens), device=device),)


def reference(model, tokens):
    return exact_logits(model, tokens)


def decode(model, tokens):
    config, device = model.config, tokens.device
    cache = Cache(config, 1, config.length, device)
    position = torch.zeros(1, dtype=torch.int64, device=device)
    out = torch.empty(1, tokens.shape[1], config.vocabulary, dtype=torch.bfloat16, device=device)

    def advance():
        logits = model.step(tokens.index_select(1, position)[0], position, cache)
        out.index_copy_(1, position, logits[:, None])
        position.add_(1).remainder_(tokens.shape[1])

    replay = capture(advance)

    def call():
        position.zero_()
        for _ in range(tokens.shape[1]):
            replay()
        return out.clone()

    yield call


def prefill(model, tokens):
    cache = Cache(model.config, 1, model.config.length, tokens.device)
    yield capture(lambda: model(tokens, 0, cache))


def decode_cost(layers, width, tokens):
    config, room = config_of(layers, width, room_of(tokens)), room_of(tokens)
    step = forward_cost(config, 1, room, room, launches=1, graph_nodes=kernels_of(config) + 4)
    return tokens * step + Cost(launches=2)


def prefill_cost(layers, width, tokens):
    config = config_of(layers, width, room_of(tokens))
    nodes = kernels_of(config) - 4  # there is no mask
    return forward_cost(config, tokens, tokens, tokens**2 / 2, launches=1, graph_nodes=nodes)


def work(layers, width, tokens):
    config = config_of(layers, width, room_of(tokens))
    return Work(
        read=2 * matrix_weights(config),
        write=2 * tokens * config.vocabulary,
        flops={"bf16": 2 * tokens * matrix_weights(config)},
        roundings=20 * layers,
    )


@compare(
    baseline=decode,
    optimized=[prefill],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 2, "width": 2048, "tokens": n} for n in (4, 16, 64, 256, 512)],
    check_sizes=[
        {"layers": 1, "width": 64, "tokens": 1},
        {"layers": 2, "width": 128, "tokens": 13},
    ],
    work=work,
    bound="launch",
    costs={decode: decode_cost, prefill: prefill_cost},
    sweep=Sweep("tokens", judged=[64]),
)
def test_prefill_decode(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
