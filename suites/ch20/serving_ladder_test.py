"""A serving loop from end to end: fill rows at once, page the cache, share the prefix, capture.

Problem    Serve `requests` requests that all wait at the beginning, with a bf16 decoder
           (`suites/decoder.py`). The batch has `slots` rows. All prompts begin with the same
           `prefix` tokens, as with a system prompt, and end with their own `suffix` tokens. The
           server knows `prefix` in advance. A real server finds a common prefix by comparing hashes
           of blocks of tokens. The lengths of the answers are quantiles of an exponential
           distribution with the mean `mean`. The server knows the lengths in advance. Every new
           token is copied to the host before the next step, as in a server that streams. Decoding
           is greedy. The check compares all tokens and scores. The loop of all sides is `serve` in
           `suites/server.py`. Each rung has its own test, and the last test compares the first rung
           with the last. The throughput in requests per second is `requests` divided by the time of
           a call.
Baseline   static: one call of the decoder computes `slots` prompts. The next group starts when the
           longest answer of the group has ended. A row of the cache has room for the longest
           request.
           continuous: the baseline of `paged`.
           paged: the baseline of `prefix_cached`.
           prefix_cached: the baseline of `captured`.
Optimized  continuous: changes `static`. As soon as a row of the batch is free, the next request
           starts in it, with a separate call for its prompt.
           paged: changes `continuous`. Keys and values are in pages of 64 tokens. A Triton kernel
           looks up pages in a table and stops at a request's last token. `paged_cache_test.py` in
           chapter 15 measures the kernel, the stop and the pages one by one. The next rung needs
           the pages.
           prefix_cached: changes `paged`. The first request computes the pages of the prefix, and
           the server keeps them. Later requests refer to these pages in their tables and compute
           only their suffixes. Nothing is kept from an earlier call.
           captured: changes `prefix_cached`. A step is a CUDA graph. Prompts still run eagerly.
Bound      The number of steps limits all sides except `captured`. Launches limit each step: the
           costs predict that the host takes longer to launch a step than the GPU takes to read all
           weights. `continuous` makes fewer steps. `paged` reads only the tokens that exist, but
           gains nothing by itself, because launching a step takes longer than reading the cache.
           Tensor cores limit prompts that are computed in full. `prefix_cached` computes only a
           small part of a prompt's tokens, so launches also limit its prompts. `captured` removes
           the launches of steps, so DRAM and the starts of the graph's kernels limit a step. The
           GPU waits for the host only between two steps and for the launches of prompts.
Seen       On H100 and H200 machines, all sides take about two to 2.5 times as long as predicted, so
           most ratios are as predicted. The costs count only the launches, but the eager decoder
           also spends time in Python. Even `captured` computes its prompts eagerly. `paged` gains
           nothing by itself, as predicted: the confidence interval of its speedup includes 1.
           `prefix_cached` gains somewhat less than predicted, and its interval includes 1 too.
           `captured` gains somewhat more than predicted. The same side takes up to 50 % longer on
           one H100 machine than on another, so compare only the sides of one test.
Use when   You build a server, or want to know which of these techniques to add. Each rung gains
           most on certain requests: the first on answers of different lengths, the second on long
           contexts of different lengths, and the third on equal beginnings. The last rung gains
           most with a small batch or model. Each technique has its own page in chapter 15.
           `load_test.py` in chapter 17 serves requests that arrive one after another.
"""

import pytest
import torch

from pytest_aisp import Cost, Variant, Work, compare
from suites.decoder import matrix_weights
from suites.server import PAGE, Pages, Server, counted, lengths_of, serve
from suites.serving import config_of, continued, forward_cost, kernels_of, planted

AT_ONCE = 4  # requests for which the reference computes all scores


def size_of(layers, width, slots, prefix, suffix, requests, mean):
    lengths = lengths_of(requests, mean)
    room = -(-(prefix + suffix + max(lengths)) // PAGE) * PAGE
    return config_of(layers, width, room), lengths


def state(device, **size):
    return planted(device, size_of(**size)[0])


def inputs(device, layers, width, slots, prefix, suffix, requests, mean):
    size = layers, width, slots, prefix, suffix, requests, mean
    config, lengths = size_of(*size)
    common = torch.randint(config.vocabulary, (prefix,), device=device).expand(requests, -1)
    own = torch.randint(config.vocabulary, (requests, suffix), device=device)
    return torch.cat([common, own], 1), lengths, slots, prefix


def reference(model, prompts, lengths, slots, prefix):
    tokens, scores = [], []
    for first in range(0, len(prompts), AT_ONCE):
        own = lengths[first : first + AT_ONCE]
        found = continued(model, prompts[first : first + AT_ONCE], max(own))
        for row, length in enumerate(own):
            tokens.append(found[0][row, :length])
            scores.append(found[1][row, :length])
    return torch.cat(tokens), torch.cat(scores)


def served(server, prompts, lengths, **policy):
    due = [0.0] * len(lengths)
    yield lambda: serve(server, prompts, lengths, due, **policy)


def pages_of(model, slots, prefix):
    return Pages(model.config, slots, prefix, model.embedding.device)


def static(model, prompts, lengths, slots, prefix):
    yield from served(Server(model, slots), prompts, lengths, together=True)


def continuous(model, prompts, lengths, slots, prefix):
    yield from served(Server(model, slots), prompts, lengths)


def paged(model, prompts, lengths, slots, prefix):
    yield from served(Server(model, slots, pages_of(model, slots, 0)), prompts, lengths)


def prefix_cached(model, prompts, lengths, slots, prefix):
    yield from served(Server(model, slots, pages_of(model, slots, prefix)), prompts, lengths)


def captured(model, prompts, lengths, slots, prefix):
    server = Server(model, slots, pages_of(model, slots, prefix), graph=True)
    yield from served(server, prompts, lengths)


def work(layers, width, slots, prefix, suffix, requests, mean):
    config, lengths = size_of(layers, width, slots, prefix, suffix, requests, mean)
    # The prefix is computed once. The last token of an answer needs no further step.
    tokens = prefix + requests * suffix + sum(lengths) - requests
    return Work(
        read=2 * matrix_weights(config),
        flops={"bf16": 2 * tokens * matrix_weights(config)},
        roundings=20 * layers,
    )


def serving(*, together=False, pages=False, shared=False, graph=False):
    """Return a function from the page's sizes to the cost of serving all requests."""

    def cost(layers, width, slots, prefix, suffix, requests, mean):
        config, lengths = size_of(layers, width, slots, prefix, suffix, requests, mean)
        steps, calls = counted(lengths, slots, together=together)
        prompt, kernels = prefix + suffix, kernels_of(config)
        # Storing all rows takes 2 launches. Sending them takes a copy that the host waits for.
        sent = Cost(launches=2, d2h=8 * slots, syncs=1)
        # 5 kernels find the best token, store it and advance.
        nodes = kernels + 5
        starts = {"launches": 1, "graph_nodes": nodes} if graph else {"launches": nodes}
        keys = slots * config.length
        if pages:
            keys = sum((n - 1) * prompt + n * (n - 1) / 2 for n in lengths) / steps
        total = steps * (forward_cost(config, slots, keys, keys, **starts) + sent)
        # Keys and values are gathered from pages and put into the order that attention wants.
        more = 4 * layers + 6 if pages else 0
        for number, count in enumerate(calls):
            there = prefix if shared and number else 0
            own = prompt - there
            masks = layers + 4 if there else 0  # in each layer, queries share one mask
            scores = count * own * (there + own / 2)
            launches = kernels + 6 + more + masks
            total += sent + forward_cost(
                config, count * own, count * (there + own), scores, launches=launches
            )
        if pages:
            total += requests * Cost(launches=2, h2d=4 * config.length // PAGE, syncs=1)
        return total + Cost(launches=4 + 2 * -(-(steps + len(calls)) // 128), h2d=16 * sum(lengths))

    return cost


costs = {
    static: serving(together=True),
    continuous: serving(),
    paged: serving(pages=True),
    prefix_cached: serving(pages=True, shared=True),
    captured: serving(pages=True, shared=True, graph=True),
}


def rung(baseline, optimized, at_least=None):
    """Return the decorator of a test that compares two sides."""
    return compare(
        baseline=baseline,
        optimized=[Variant(optimized, at_least=at_least)],
        costs={side: costs[side] for side in (baseline, optimized)},
        state=state,
        inputs=inputs,
        reference=reference,
        sizes=[
            {
                "layers": 2,
                "width": 4096,
                "slots": 8,
                "prefix": 1024,
                "suffix": 64,
                "requests": 16,
                "mean": 12,
            }
        ],
        check_sizes=[
            {
                "layers": 1,
                "width": 128,
                "slots": 2,
                "prefix": 64,
                "suffix": 1,
                "requests": 3,
                "mean": 2,
            }
        ],
        work=work,
        bound="host",  # each step waits until the host has the tokens
    )


@rung(static, continuous)
def test_serving_ladder_continuous(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(continuous, paged, at_least="yardstick")
def test_serving_ladder_paged(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(paged, prefix_cached)
def test_serving_ladder_prefix_cached(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(prefix_cached, captured)
def test_serving_ladder_captured(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(static, captured)
def test_serving_ladder(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestPages:
    """What happens to the pages of a server's requests."""

    CONFIG = config_of(1, 128, 2 * PAGE)

    @pytest.fixture
    def cache(self):
        return Pages(self.CONFIG, 2, PAGE, "cpu")

    def test_the_prefix_is_shared_and_no_page_is_lost(self, cache):
        pages = len(cache.free)
        assert cache.begin(0, PAGE + 1) == 0
        cache.share(0)
        assert cache.begin(1, PAGE + 1) == PAGE
        assert cache.table[0, 0] == cache.table[1, 0]
        assert cache.table[0, 1] != cache.table[1, 1]
        for row in (0, 1):
            cache.end(row)
        assert len(cache.free) == pages - 1
        cache.forget()
        assert len(set(cache.free)) == pages

    def test_a_row_without_a_request_writes_where_nobody_reads(self, cache):
        cache.begin(0, 1)
        cache.begin(1, 1)
        cache.end(0)
        cache.begin(0, PAGE)
        cache.end(1)
        assert cache.nobody not in cache.free + cache.taken[0]
        assert set(cache.table[1].tolist()) == {cache.nobody}

    def test_a_request_for_more_than_there_is_is_refused(self, cache):
        with pytest.raises(ValueError, match="no pages for"):
            cache.begin(0, 9 * PAGE)
