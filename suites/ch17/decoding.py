"""The decoder of the curves of this chapter, and what its calls cost."""

from pytest_aisp import Cost
from suites.decoder import Config, Decoder, cached_numbers, matrix_weights

HEAD = 64
STEP_KERNELS, LAYER_KERNELS = 16, 28
"""Kernels of a call on a GPU: those of the whole call, and those of each layer."""


def config_of(layers, width, length):
    """Return sizes as in Llama: 4 heads share keys, and the hidden width is 11/4 of the width."""
    heads = width // HEAD
    return Config(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=max(1, heads // 4),
        hidden=11 * width // 4,
        length=length,
    )


def decoder_of(device, layers, width, length):
    return Decoder(config_of(layers, width, length), device=device)


def call_cost(config, tokens, keys, scores, **starts):
    """Return the cost of one call of the decoder.

    Args:
        config: its sizes.
        tokens: how many tokens it computes.
        keys: tokens whose keys and values it reads from the cache.
        scores: products of a query and a key, summed over all queries of a head.
        starts: launches, or nodes of a graph.
    """
    entry, weights = 2 * cached_numbers(config), matrix_weights(config)
    return Cost(
        read=2 * weights + entry * keys,
        write=entry * tokens,
        ops={"bf16": 2 * tokens * weights + 4 * config.layers * config.width * scores},
        **starts,
    )


def kernels_of(config):
    """Return how many kernels a call of the decoder launches."""
    return STEP_KERNELS + LAYER_KERNELS * config.layers
