"""Prefix cache: compute the keys and values of a shared system prompt once.

Problem    Compute `requests` prompts with a decoder in bf16 (`suites/decoder.py`) and return the
           logits of each prompt's next token. All prompts begin with the same `prefix` tokens, and
           each ends with its own `suffix` tokens. The length of the common prefix is given. A real
           server finds it by comparing hashes of token blocks. An earlier request had the same
           prefix, and its keys and values are part of the state of all sides. After a call, the
           cache has a row for each prompt. Each row then computes one more token, which reads the
           whole row. The check also compares the logits of this token.
Baseline   recomputed: all prompts are computed in full, as one batch.
Optimized  copied: changes `recomputed`. The prefix is computed in one row, and its keys and values
           are copied to the other rows. Then the suffixes are computed as one batch. Nothing comes
           from an earlier request.
           cached: changes `copied`. The prefix is not computed. The keys and values of the earlier
           request are copied to all rows.
Bound      Tensor cores limit `recomputed`. The other sides compute few tokens. The starts of many
           small kernels and two passes over the weights take a large part of their time.
Seen       On an H200, `recomputed` takes about a third longer than predicted, `copied` two thirds
           longer, and `cached` almost twice as long. So both gain less than predicted. The costs
           count only the start of each small kernel, and assume that all products reach the peak of
           the tensor cores. We did not time the kernels alone. Without a CUDA graph, `copied` takes
           about three times as long, and `cached` almost five times as long, because the host's
           launches are the limit.
Use when   Many requests begin with the same instructions, documents or turns of a conversation. The
           time to the first token improves, but by less than the number of computed tokens
           suggests, because small batches use the GPU less efficiently. Later tokens take as long
           as before. `copied` and `cached` save no memory, because each row holds its own copy of
           the prefix. A paged cache also saves memory: the page tables of all rows can name the
           same pages (`paged_cache_test.py`).
"""

import torch

from pytest_aisp import Cost, Variant, Work, compare
from suites.decoder import Cache, Decoder, cached_numbers, exact_logits, matrix_weights
from suites.serving import config_of, forward_cost, kernels_of


def size_of(layers, width, requests, prefix, suffix):
    return config_of(layers, width, -(-(prefix + suffix + 1) // 8) * 8)


def state(device, layers, width, requests, prefix, suffix):
    """Return a decoder that also holds a prefix and the prefix's cached keys and values."""
    config = size_of(layers, width, requests, prefix, suffix)
    model = Decoder(config, device=device)
    model.register_buffer("prefix", torch.randint(config.vocabulary, (prefix,), device=device))
    earlier = Cache(config, 1, prefix, device)
    model.states(model.prefix[None], 0, earlier)
    model.register_buffer("keys", earlier.keys)
    model.register_buffer("values", earlier.values)
    return model


def inputs(device, layers, width, requests, prefix, suffix):
    vocabulary = size_of(layers, width, requests, prefix, suffix).vocabulary
    suffixes = torch.randint(vocabulary, (requests, suffix), device=device)
    return suffixes, torch.randint(vocabulary, (requests,), device=device)


def whole_prompts(model, suffixes):
    return torch.cat([model.prefix.expand(len(suffixes), -1), suffixes], 1)


def reference(model, suffixes, following):
    prompts = torch.cat([whole_prompts(model, suffixes), following[:, None]], 1)
    return exact_logits(model, prompts)[:, -2:]


def with_next(model, cache, logits, following, length):
    """Return the logits after each prompt, and the logits after one more token."""
    at = torch.full((len(following),), length, device=following.device)
    return torch.stack([logits, model.step(following, at, cache)], 1)


def recomputed(model, suffixes, following):
    cache = Cache(model.config, len(suffixes), model.config.length, suffixes.device)

    def run():
        prompts = whole_prompts(model, suffixes)
        logits = model.prefill(prompts, cache)
        return with_next(model, cache, logits, following, prompts.shape[1])

    yield run


def after_prefix(model, cache, suffixes, following):
    start = len(model.prefix)
    logits = model.prefill(suffixes, cache, start)
    return with_next(model, cache, logits, following, start + suffixes.shape[1])


def copied(model, suffixes, following):
    cache = Cache(model.config, len(suffixes), model.config.length, suffixes.device)
    length = len(model.prefix)

    def run():
        model.states(model.prefix[None], 0, cache.rows(0, 1))
        for numbers in (cache.keys, cache.values):
            numbers[:, 1:, :, :length] = numbers[:, :1, :, :length]
        return after_prefix(model, cache, suffixes, following)

    yield run


def cached(model, suffixes, following):
    cache = Cache(model.config, len(suffixes), model.config.length, suffixes.device)

    def run():
        cache.keys[:, :, :, : len(model.prefix)] = model.keys
        cache.values[:, :, :, : len(model.prefix)] = model.values
        return after_prefix(model, cache, suffixes, following)

    yield run


def work(layers, width, requests, prefix, suffix):
    config = size_of(layers, width, requests, prefix, suffix)
    tokens = requests * (suffix + 1)
    return Work(
        read=2 * matrix_weights(config),
        flops={"bf16": 2 * tokens * matrix_weights(config)},
        roundings=20 * layers,
    )


def prompts_cost(config, rows, prompt, start=0):
    """Return the cost of computing `prompt` tokens in each row, after `start` cached tokens."""
    keys, scores = rows * (start + prompt), rows * prompt * (start + prompt / 2)
    # Each layer copies the mask for all query heads that share a key head.
    kernels = kernels_of(config) + (config.layers if start else 0)
    return forward_cost(config, rows * prompt, keys, scores, launches=kernels)


def next_cost(config, rows):
    keys = rows * config.length
    return Cost(launches=3) + forward_cost(config, rows, keys, keys, launches=kernels_of(config))


def recomputed_cost(layers, width, requests, prefix, suffix):
    config = size_of(layers, width, requests, prefix, suffix)
    return prompts_cost(config, requests, prefix + suffix) + next_cost(config, requests)


def with_copies(copies, layers, width, requests, prefix, suffix):
    """Return the cost of copying a prefix to `copies` rows, and of all later work."""
    config = size_of(layers, width, requests, prefix, suffix)
    entry = 2 * cached_numbers(config) * prefix
    spread = Cost(read=entry, write=copies * entry, launches=2)
    return spread + prompts_cost(config, requests, suffix, prefix) + next_cost(config, requests)


def copied_cost(layers, width, requests, prefix, suffix):
    config = size_of(layers, width, requests, prefix, suffix)
    alone = prompts_cost(config, 1, prefix)
    return alone + with_copies(requests - 1, layers, width, requests, prefix, suffix)


def cached_cost(layers, width, requests, prefix, suffix):
    return with_copies(requests, layers, width, requests, prefix, suffix)


@compare(
    baseline=recomputed,
    optimized=[
        Variant(copied, at_least={"sm90": 2.6}),
        Variant(cached, at_least={"sm90": 4.6}),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 4, "width": 2048, "requests": 8, "prefix": 1024, "suffix": 64}],
    check_sizes=[
        {"layers": 2, "width": 128, "requests": 3, "prefix": 9, "suffix": 5},
        {"layers": 1, "width": 64, "requests": 1, "prefix": 4, "suffix": 1},
    ],
    work=work,
    bound="tensor",
    costs={recomputed: recomputed_cost, copied: copied_cost, cached: cached_cost},
)
def test_prefix_cache(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
