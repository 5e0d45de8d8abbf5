"""Offered load: a server that refills rows immediately keeps up with more arrivals.

Problem    Serve `requests` requests with a bf16 decoder (`suites/decoder.py`) that has `slots` rows
           in its batch. Requests arrive at random, on average `load` per second. The arrivals are
           drawn once and replayed in real time for all sides. A server without work waits for the
           next arrival. All calls of the decoder are real, and each new token is copied to the host
           before the next call. All prompts are equally long. The lengths of the answers are
           quantiles of an exponential distribution with the mean `mean`. The server knows the
           lengths in advance. A call ends when the last answer has ended. The check compares all
           tokens and scores. The loop of all sides is `serve` in `suites/server.py`. The first test
           is a curve over `load`. The second test runs at the largest load.
Baseline   static: when the batch is empty, up to `slots` requests that have arrived start together.
           The next group starts when the longest answer has ended.
           continuous: the baseline of `chunked`.
Optimized  continuous: changes `static`. A request starts as soon as it has arrived and a row is
           free. One call computes the whole prompt, and all decoding rows wait for this call.
           chunked: changes `continuous`. Prompts are computed in chunks, one prompt after another.
           After each chunk, all decoding rows make a step. The total time is longer, but no token
           waits for more than one chunk. So the longest time between tokens (ITL) does not depend
           on the length of prompts. Serving engines put a chunk and a step into one call, which
           saves one pass over the weights (`mixed` of `chunked_prefill_test.py` in chapter 15).
Bound      Arrivals are the limit while a side keeps up with them, and all sides take about the same
           time. Above a side's capacity, requests wait in line, and a call takes `requests` divided
           by the capacity. In all sides, a step is a CUDA graph. DRAM and the starts of the graph's
           kernels limit the step. The capacity is limited by the number of steps, and by the host's
           launches for the prompts. `static` makes more steps, and fewer calls for prompts. The
           curve bends where `static` reaches its capacity.
Seen       At the largest load on an H200, `static` serves about 240 requests a second, and
           `continuous` about 280. The gain is as predicted, but smaller than the confidence
           interval. `chunked` takes about 40 % longer than `continuous`, which is also as
           predicted. But all sides take 2.5 times as long as predicted. The launches for prompts
           cannot be the only
           reason: `static` makes less than half as many launches as `continuous`, and still exceeds
           its prediction by more time. `prefill_decode_test.py` shows that a step as a CUDA graph
           takes about twice as long as predicted. We did not time the host's work in each step
           alone. At 100 requests a second, both sides keep up, so `continuous` gains almost
           nothing. The gain of `continuous` is smaller than the confidence interval at every load.
           So the curve does not show at which load `continuous` gains most. The costs do not count
           the waits for arrivals. So a side that keeps up with its load takes longer than
           predicted.
Use when   A server has objectives for the time to the first token (TTFT) and between tokens. Above
           the capacity, the line grows, so no TTFT objective can be met for long. Below the
           capacity, chunks bound the time between tokens, for which chunked gives up some capacity.
           This page judges the total time of all requests. To measure both latencies and the
           requests per second that meet objectives, with bootstrap intervals, run `python
           benchmarks/serving_load.py`, which replays the same sides.
"""

import functools

import pytest
import torch

from pytest_aisp import Cost, Sweep, Variant, Work, compare
from suites.decoder import matrix_weights
from suites.server import Server, counted, lengths_of, serve
from suites.serving import config_of, continued, forward_cost, kernels_of, planted


def size_of(layers, width, slots, prompt, chunk, requests, mean, load):
    lengths = lengths_of(requests, mean)
    # Rounded up to 8 keys, as the masks of fused attention kernels require. One extra position
    # takes the writes of steps while a row's prompt is being computed.
    return config_of(layers, width, -(-(prompt + max(lengths) + 1) // 8) * 8), lengths


def state(device, **size):
    return planted(device, size_of(**size)[0])


def inputs(device, layers, width, slots, prompt, chunk, requests, mean, load):
    size = layers, width, slots, prompt, chunk, requests, mean, load
    config, lengths = size_of(*size)
    prompts = torch.randint(config.vocabulary, (requests, prompt), device=device)
    return prompts, lengths, arrivals(requests, load), slots, chunk


def arrivals(requests, load):
    """Return arrival times in seconds: a Poisson process whose first request arrives at 0."""
    gaps = -torch.rand(requests, dtype=torch.float64).neg().log1p() / load
    gaps[0] = 0.0
    return gaps.cumsum(0)  # on the host, which reads the times


def reference(model, prompts, lengths, due, slots, chunk):
    tokens, scores = continued(model, prompts, max(lengths))
    kept = [torch.arange(max(lengths), device=tokens.device) < length for length in lengths]
    return tokens[torch.stack(kept)], scores[torch.stack(kept)]


def served(model, prompts, lengths, due, slots, **policy):
    server = Server(model, slots, graph=True)
    yield lambda: serve(server, prompts, lengths, due.tolist(), **policy)


def static(model, prompts, lengths, due, slots, chunk):
    yield from served(model, prompts, lengths, due, slots, together=True)


def continuous(model, prompts, lengths, due, slots, chunk):
    yield from served(model, prompts, lengths, due, slots)


def chunked(model, prompts, lengths, due, slots, chunk):
    yield from served(model, prompts, lengths, due, slots, chunk=chunk)


def work(layers, width, slots, prompt, chunk, requests, mean, load):
    config, lengths = size_of(layers, width, slots, prompt, chunk, requests, mean, load)
    tokens = requests * prompt + sum(lengths) - requests
    return Work(
        read=2 * matrix_weights(config),
        flops={"bf16": 2 * tokens * matrix_weights(config)},
        roundings=20 * layers,
    )


def serving(*, together=False, in_chunks=False):
    """Return a function from the page's sizes to the cost of serving without idle time."""

    def cost(layers, width, slots, prompt, chunk, requests, mean, load):
        config, lengths = size_of(layers, width, slots, prompt, chunk, requests, mean, load)
        parts = [min(chunk, prompt - at) for at in range(0, prompt, chunk)]
        steps, calls = counted(
            lengths, slots, together=together, parts=len(parts) if in_chunks else None
        )
        parts = parts if in_chunks else [prompt]
        # Storing all rows takes 2 launches. Sending them takes a copy that the host waits for.
        sent = Cost(launches=2, d2h=8 * slots, syncs=1)
        kernels, keys = kernels_of(config), slots * config.length
        # 5 kernels find the best token, store it and advance.
        step = forward_cost(config, slots, keys, keys, launches=1, graph_nodes=kernels + 5)
        total = steps * (step + sent)
        for count in calls:
            start = 0
            for part in parts:
                masks = layers + 2 if start else 0  # each layer copies the mask for its query heads
                # Only the last part computes logits and a token: 7 more launches.
                token = 6 if start + part == prompt else -1
                scores = count * part * (start + part / 2)
                total += forward_cost(
                    config,
                    count * part,
                    count * (start + part),
                    scores,
                    launches=kernels + token + masks,
                )
                start += part
            total += sent
        return total + Cost(launches=4 + 2 * -(-(steps + len(calls)) // 128), h2d=16 * sum(lengths))

    return cost


LARGE = {
    "layers": 2,
    "width": 2048,
    "slots": 8,
    "prompt": 512,
    "chunk": 256,
    "requests": 24,
    "mean": 32,
}
SMALL = {"layers": 1, "width": 128, "slots": 2, "prompt": 5, "chunk": 2, "requests": 3, "mean": 3}
SATURATED = 3200
judged = functools.partial(
    compare,
    state=state,
    inputs=inputs,
    reference=reference,
    work=work,
    bound="host",  # each step waits until the host has the tokens
)
static_cost, continuous_cost = serving(together=True), serving()


@judged(
    baseline=static,
    optimized=[continuous],
    sizes=[{**LARGE, "load": load} for load in (100, 200, 400, 800, SATURATED)],
    check_sizes=[{**SMALL, "load": 500}],
    costs={static: static_cost, continuous: continuous_cost},
    sweep=Sweep("load", judged=[SATURATED]),
)
def test_load(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@judged(
    baseline=continuous,
    optimized=[Variant(chunked, at_least="yardstick")],
    sizes=[{**LARGE, "load": SATURATED}],
    check_sizes=[{**SMALL, "load": 10000}],
    costs={continuous: continuous_cost, chunked: serving(in_chunks=True)},
)
def test_load_in_chunks(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestServer:
    """The server answers all requests under each policy."""

    LENGTHS = (1, 3, 1, 1, 4, 2)
    POLICIES = pytest.mark.parametrize("policy", [{"together": True}, {}, {"chunk": 2}])

    @pytest.fixture
    def model(self):
        return planted("cpu", config_of(1, 128, 16))

    def served(self, model, due, policy):
        server, prompts = Server(model, 2), torch.randint(256, (len(due), 5))
        return server, serve(server, prompts, self.LENGTHS[: len(due)], due, **policy)

    @POLICIES
    def test_requests_wait_while_all_rows_are_taken_and_none_is_lost(self, model, policy):
        server, (tokens, _) = self.served(model, [0.0] * 6, policy)
        assert [len(times) for times in server.times] == list(self.LENGTHS)
        assert len(tokens) == sum(self.LENGTHS)

    @POLICIES
    def test_calls_are_as_many_as_the_costs_count(self, model, policy):
        server, _ = self.served(model, [0.0] * 6, policy)
        steps, calls = counted(
            self.LENGTHS,
            2,
            together="together" in policy,
            parts=3 if "chunk" in policy else None,
        )
        assert len(server.found) == steps + len(calls)

    @POLICIES
    def test_no_request_starts_before_it_arrives(self, model, policy):
        due = [0.0, 0.02, 0.3]
        server, _ = self.served(model, due, policy)
        assert all(
            times[0] - server.begun >= at for times, at in zip(server.times, due, strict=True)
        )

    def test_a_prompt_longer_than_the_cache_is_refused(self, model):
        with pytest.raises(ValueError, match="do not fit in a cache of 16"):
            serve(Server(model, 1), torch.zeros(1, 17, dtype=torch.int64), [1], [0.0])
