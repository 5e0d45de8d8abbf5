"""Prefix cache: compute the keys and values of a shared system prompt once.

Problem    Read `requests` prompts with a decoder in bf16 (`suites/decoder.py`) and return the
           logits of each one's next token. All prompts begin with the same `prefix` tokens, and
           each ends with `suffix` tokens of its own. The length of the shared part is given: a
           server finds it by comparing hashes of blocks of tokens. An earlier request had the same
           prefix, and its keys and values are part of the state of all sides. After a call, the
           cache has a row for each prompt. The logits of one more token in each row, which reads
           the whole row, are compared too.
Baseline   recomputed: one batch with all prompts as they are.
Optimized  copied: changes recomputed. The prefix is computed in one row, and its keys and values
           are copied to the other rows. Then the suffixes are computed as one batch that attends to
           them. Nothing comes from an earlier request.
           cached: changes copied. The prefix is not computed. The keys and values of the earlier
           request are copied to all rows.
Bound      Tensor cores for recomputed. The other sides compute few tokens. For them, the starts of
           many small kernels and two passes over the weights take a large part of the time.
Use when   Many requests begin with the same instructions, documents or turns of a conversation. The
           gain is in the time to the first token. It is smaller than the ratio of the tokens that
           are computed, because small batches use the GPU less well. A later token takes as long as
           without the cache. The copies make each row as large as without sharing. A cache in pages
           shares the memory too, since the tables of all rows can name the same page
           (`paged_cache_test.py`).
"""

import torch

from pytest_aisp import Cost, Work, compare
from suites.decoder import Cache, Decoder, cached_numbers, exact_logits, matrix_weights
from suites.serving import config_of, forward_cost, kernels_of


def size_of(layers, width, requests, prefix, suffix):
    return config_of(layers, width, -(-(prefix + suffix + 1) // 8) * 8)


def state(device, layers, width, requests, prefix, suffix):
    """Return a decoder, a prefix, and what an earlier request with this prefix has cached."""
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
    """Return the logits of the prompts, and those of one more token of each."""
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
        terms=max(config.hidden, config.length),
        roundings=20 * layers,
    )


def prompts_cost(config, rows, prompt, start=0):
    """Return the cost of `prompt` tokens in each row, behind `start` tokens in the cache."""
    keys, scores = rows * (start + prompt), rows * prompt * (start + prompt / 2)
    # In each layer, the mask is copied for the queries that share a key.
    kernels = kernels_of(config) + (config.layers if start else 0)
    return forward_cost(config, rows * prompt, keys, scores, launches=kernels)


def next_cost(config, rows):
    keys = rows * config.length
    return Cost(launches=3) + forward_cost(config, rows, keys, keys, launches=kernels_of(config))


def recomputed_cost(layers, width, requests, prefix, suffix):
    config = size_of(layers, width, requests, prefix, suffix)
    return prompts_cost(config, requests, prefix + suffix) + next_cost(config, requests)


def with_copies(copies, layers, width, requests, prefix, suffix):
    """Return the cost of copying a prefix to so many rows, and of all that follows."""
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
    optimized=[copied, cached],
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
