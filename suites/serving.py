"""A decoder for the serving pages whose greedy tokens are known in advance, and its costs.

Checks compare greedy tokens exactly, so rounding must not change them. With random weights, the two
best tokens are often equal in bf16. So each token has one successor, chosen at random. The weights
of the LM head raise the successor's logit far above all other logits. Checks also compare the
scores of the tokens, which depend on the whole context through attention and so reveal a wrong
cache. The embeddings are doubled, so the layers change the input of the last norm only a little.
Models need a width of at least 128. In 1,000 models with that width and two layers, the successor's
logit led by at least 4.5. At a width of 64, the smallest lead was only 0.16.
"""

import torch

from pytest_aisp import Cost
from suites.decoder import Config, Decoder, cached_numbers, exact_logits, matrix_weights

HEAD, VOCABULARY = 64, 256
RAISED = 24.0
"""How much the successor's logit is raised. After the norm, 0.8 to 0.9 of this raise is left."""
STEP_KERNELS, LAYER_KERNELS = 11, 28
"""The number of kernels that a call of the decoder launches on a GPU: per call, and per layer.

A layer has 2 norms, 4 products, 14 kernels for the rotary positions, 2 kernels that fill the cache,
attention, a copy of its output, 2 sums, and 2 kernels of SwiGLU. The call has 3 embeddings, a norm,
a product, and at most 6 kernels for positions and a mask. If cuBLAS splits a product along k, it
launches one more kernel.
"""


def config_of(layers, width, length):
    heads = width // HEAD
    return Config(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=max(1, heads // 4),
        hidden=11 * width // 4,
        length=length,
        vocabulary=VOCABULARY,
    )


def plant(model, successors):
    """Raise the logit of each token's successor far above all others."""
    model.lm_head.index_add_(0, successors, RAISED / model.config.width * model.embedding)
    model.embedding *= 2


def planted(device, config):
    """Return a bf16 decoder, whose attribute `table` holds the successor of each token."""
    model = Decoder(config, device=device)
    model.register_buffer("table", torch.randperm(config.vocabulary, device=device))
    plant(model, model.table)
    return model


def continued(model, prompts, count):
    """Return `count` greedy tokens after each prompt, and their scores, in float64.

    Raises:
        ValueError: if a planted successor is not the best token.
    """
    tokens = [prompts[:, -1]]
    for _ in range(count):
        tokens.append(model.table[tokens[-1]])
    chosen = torch.stack(tokens[1:], 1)
    logits = exact_logits(model, torch.cat([prompts, chosen[:, :-1]], 1))[:, -count:]
    if not torch.equal(logits.argmax(-1), chosen):
        raise ValueError("a planted successor is not the best token")
    return chosen, logits.gather(2, chosen[..., None])[..., 0]


def best(logits):
    """Return the best token of each row, and its score."""
    score, token = logits.max(-1)
    return token, score


def forward_cost(config, tokens, keys, scores, **starts):
    """Return the cost of one call of the decoder: its products, its attention, and all other work.

    Args:
        config: the decoder's sizes.
        tokens: how many tokens the call computes.
        keys: the number of tokens whose keys and values are read from the cache.
        scores: the number of query-key products of one head, over all queries.
        starts: `launches` or `graph_nodes` of the call.
    """
    entry = 2 * cached_numbers(config)
    products = Cost(
        read=2 * matrix_weights(config),
        ops={"bf16": 2 * matrix_weights(config) * tokens},
        **starts,
    )
    attention = Cost(
        read=entry * keys,
        write=entry * tokens,
        ops={"bf16": 4 * config.layers * config.width * scores},
    )
    read, write = pointwise_numbers(config)
    return products + attention + Cost(read=2 * read * tokens, write=2 * write * tokens)


def pointwise_numbers(config):
    """Return how many numbers per token norms, rotations, sums and SwiGLU read and write."""
    width, kv, hidden = config.width, config.kv_heads * config.head, config.hidden
    read, write = 12 * width + 7 * kv + 3 * hidden, 9 * width + 4 * kv + 2 * hidden
    return config.layers * read, config.layers * write


def kernels_of(config):
    """Return how many kernels a call of the decoder launches."""
    return STEP_KERNELS + LAYER_KERNELS * config.layers
