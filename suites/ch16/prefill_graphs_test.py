"""Graphs for prompts: capture a graph for each bucket of lengths, and pad prompts to it.

Problem    Serve `requests` requests, one after another, with a bf16 decoder (`suites/decoder.py`).
           The lengths of the prompts are quantiles of an exponential distribution with the mean
           `mean`, at most `longest`. For each request, compute the logits after its prompt, and the
           logits after one more token, whose step reads the cache. On all sides, this step is a
           CUDA graph. The check compares all logits.
Baseline   eager_prefill: prompts run without a graph, because a graph has a fixed shape and prompts
           have many lengths.
Optimized  padded: changes `eager_prefill`. One graph computes `longest` tokens, and shorter prompts
           are padded. Attention is causal, so no token attends to the padding after it. Logits are
           computed only at the last token. The graph reads this token's position from memory.
           bucketed: changes `padded`. There are graphs for `smallest` tokens, for twice as many,
           and so on. A prompt is padded to the next size.
           piecewise: changes `bucketed`. Attention is not part of the graphs, and is launched with
           the true length of the prompt. All work between the attention of two layers is one graph.
Bound      The host limits `eager_prefill`, because it launches more than a hundred kernels per
           prompt. The GPU limits `padded`, which always computes `longest` tokens. `bucketed`
           computes less than twice the tokens of a prompt, but at least `smallest`. Even the
           smallest graph must read all weights and start all kernels. `piecewise` launches a graph
           and four kernels per layer.
Seen       On an H100 and an H200, all sides take longer than predicted: `eager_prefill` two to
           almost four times as long, `padded` and `bucketed` about 1.5 times, and `piecewise` about
           twice. The predicted time of a launch was measured with an addition, not with products.
           For each small kernel of a graph, the costs count only the start. The time of
           `eager_prefill` differs by a third between the recorded results. `padded` and `bucketed`
           are recorded on an H100 only, and `piecewise` on an H200 only. So the results do not show
           whether `piecewise` is faster or slower than `bucketed`.
Use when   The model is so small that its launches take longer than its work, and prompts are short
           or come in chunks of limited size. With long prompts, launches overlap with the work on
           the GPU, so padding only adds work. Each bucket needs its own capture and its own memory,
           so use few buckets. Capture in pieces if attention cannot be captured, for example
           because its library plans on the host.
"""

import functools
import math

import pytest
import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, capture, compare
from suites.decoder import Cache, Decoder, exact_logits, matrix_weights, normalized, rotated
from suites.serving import config_of, forward_cost, kernels_of

MASK_KERNELS = 4
"""Kernels that make a step's mask. A prompt needs no mask, because its attention is causal."""


def lengths_of(requests, mean, longest):
    """Return each prompt's number of tokens: quantiles of an exponential distribution."""
    quantiles = ((k + 0.5) / requests for k in range(requests))
    return [min(longest, 1 + round(-(mean - 1) * math.log(1 - q))) for q in quantiles]


def buckets_of(longest, smallest):
    """Return bucket sizes that double from `smallest` until a bucket holds `longest` tokens."""
    sizes = [smallest]
    while sizes[-1] < longest:
        sizes.append(2 * sizes[-1])
    return sizes


def bucket_of(tokens, sizes):
    """Return the smallest of `sizes` that has room for `tokens` tokens."""
    fitting = [size for size in sizes if size >= tokens]
    if not fitting:
        raise ValueError(
            f"a prompt of {tokens} tokens fits in no bucket; the largest is {sizes[-1]}"
        )
    return min(fitting)


def size_of(layers, width, requests, mean, longest, smallest):
    # Rounded up to 8 keys, as the masks of fused attention kernels require.
    room = max(buckets_of(longest, smallest)[-1], longest + 1)
    return config_of(layers, width, -(-room // 8) * 8)


def state(device, layers, width, requests, mean, longest, smallest):
    return Decoder(size_of(layers, width, requests, mean, longest, smallest), device=device)


def inputs(device, layers, width, requests, mean, longest, smallest):
    prompts = torch.randint(256, (requests, longest), device=device)
    following = torch.randint(256, (requests,), device=device)
    return prompts, following, lengths_of(requests, mean, longest), smallest


def reference(model, prompts, following, lengths, smallest):
    rows = [
        exact_logits(model, torch.cat([prompt[:length], token[None]])[None])[0, -2:]
        for prompt, token, length in zip(prompts, following, lengths, strict=True)
    ]
    return torch.stack(rows)


class Server:
    """A cache with one row, and a captured step that decodes one token."""

    def __init__(self, model):
        device = model.embedding.device
        self.model, self.cache = model, Cache(model.config, 1, model.config.length, device)
        self.token, self.position = torch.zeros(2, 1, dtype=torch.int64, device=device)
        self.step = capture(lambda: model.step(self.token, self.position, self.cache))

    def decode(self, token, position):
        self.token.copy_(token)
        self.position.fill_(position)
        return self.step()

    def serve(self, prompts, following, lengths, prefill):
        """Return the logits after each prompt, and the logits after one more token."""
        vocabulary = self.model.config.vocabulary
        out = torch.empty(len(prompts), 2, vocabulary, dtype=torch.bfloat16, device=prompts.device)
        for request, length in enumerate(lengths):
            out[request, 0] = prefill(prompts[request : request + 1, :length])[0]
            out[request, 1] = self.decode(following[request : request + 1], length)[0]
        return out


class Whole:
    """One graph that computes up to `size` tokens of a prompt."""

    def __init__(self, server, size):
        self.model, self.cache, device = server.model, server.cache, server.token.device
        self.tokens = torch.zeros(1, size, dtype=torch.int64, device=device)
        self.last = torch.zeros(1, dtype=torch.int64, device=device)
        self.replay = capture(self.compute)

    def compute(self):
        states = self.model.states(self.tokens, 0, self.cache)
        return self.model.logits(states.index_select(1, self.last)[:, 0])

    def take(self, tokens):
        self.tokens[:, : tokens.shape[1]] = tokens
        self.last.fill_(tokens.shape[1] - 1)

    def __call__(self, tokens):
        self.take(tokens)
        return self.replay()


class Pieces(Whole):
    """Graphs that compute up to `size` tokens. Attention is launched between the graphs.

    Attributes:
        streams: the residual stream before each layer. A replay overwrites it.
        heads: queries, keys and values of each layer. A replay overwrites them.
        turns: cosines and sines of all positions. A replay overwrites them.
        attended: where attention writes its output.
    """

    def __init__(self, server, size):
        self.model, self.cache, device = server.model, server.cache, server.token.device
        config = self.model.config
        self.tokens = torch.zeros(1, size, dtype=torch.int64, device=device)
        self.last = torch.zeros(1, dtype=torch.int64, device=device)
        shape = 1, size, config.heads, config.head
        self.attended = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        self.streams, self.heads, self.turns = {}, {}, ()
        numbers = range(config.layers + 1)
        self.pieces = [capture(functools.partial(self.piece, number)) for number in numbers]

    def piece(self, number):
        """Do all work between the attention of layers `number - 1` and `number`."""
        model = self.model
        if number == 0:
            at = torch.arange(self.tokens.shape[1], device=self.tokens.device)[None]
            self.turns = [F.embedding(at, table)[:, None] for table in (model.cos, model.sin)]
            x = F.embedding(self.tokens, model.embedding)
        else:
            x = behind(model.blocks[number - 1], self.streams[number - 1], self.attended)
        if number == len(model.blocks):
            return model.logits(x.index_select(1, self.last)[:, 0])
        self.streams[number] = x
        self.heads[number] = before(model.blocks[number], x, *self.turns)
        return None

    def __call__(self, tokens):
        self.take(tokens)
        n = tokens.shape[1]
        plan = self.cache.plan(0, n, tokens.device)
        for layer in range(len(self.model.blocks)):
            self.pieces[layer]()
            q, k, v = (t[:, :, :n] for t in self.heads[layer])
            self.cache.append(layer, k, v, plan)
            self.attended[:, :n] = self.cache.attend(layer, q, plan).transpose(1, 2)
        return self.pieces[-1]()


def before(block, x, cos, sin):
    """Return the queries, keys and values of a block, as its `forward` computes them."""
    parts = F.linear(normalized(x, block.attention_norm), block.qkv).split(block.sizes, -1)
    q, k, v = (t.unflatten(-1, (-1, block.head)).transpose(1, 2) for t in parts)
    return rotated(q, cos, sin), rotated(k, cos, sin), v


def behind(block, x, attended):
    """Return the output of a block, as its `forward` computes it after attention."""
    x = x + F.linear(attended.flatten(2), block.out)
    gate, up = F.linear(normalized(x, block.mlp_norm), block.gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, block.down)


class Buckets:
    """One computation per bucket size. A prompt uses the smallest bucket that it fits in."""

    def __init__(self, server, sizes, kind):
        self.of_size = {size: kind(server, size) for size in sizes}

    def __call__(self, tokens):
        return self.of_size[bucket_of(tokens.shape[1], list(self.of_size))](tokens)


def eager_prefill(model, prompts, following, lengths, smallest):
    server = Server(model)

    def prefill(tokens):
        return model.prefill(tokens, server.cache)

    yield lambda: server.serve(prompts, following, lengths, prefill)


def padded(model, prompts, following, lengths, smallest):
    server = Server(model)
    prefill = Buckets(server, buckets_of(prompts.shape[1], smallest)[-1:], Whole)
    yield lambda: server.serve(prompts, following, lengths, prefill)


def bucketed(model, prompts, following, lengths, smallest):
    server = Server(model)
    prefill = Buckets(server, buckets_of(prompts.shape[1], smallest), Whole)
    yield lambda: server.serve(prompts, following, lengths, prefill)


def piecewise(model, prompts, following, lengths, smallest):
    server = Server(model)
    prefill = Buckets(server, buckets_of(prompts.shape[1], smallest), Pieces)
    yield lambda: server.serve(prompts, following, lengths, prefill)


def work(layers, width, requests, mean, longest, smallest):
    config = size_of(layers, width, requests, mean, longest, smallest)
    tokens = sum(lengths_of(requests, mean, longest)) + requests
    return Work(
        read=2 * 2 * requests * matrix_weights(config),  # requests come one after another
        flops={"bf16": 2 * tokens * matrix_weights(config)},
        roundings=20 * layers,
    )


def step_cost(config):
    """Return the cost of one decoding step, with copies of its token and its logits."""
    keys, nodes = config.length, kernels_of(config)
    return Cost(launches=3) + forward_cost(config, 1, keys, keys, launches=1, graph_nodes=nodes)


def serving(prompt_cost):
    """Return a function from the page's sizes to the cost of all prompts and one step each."""

    def cost(layers, width, requests, mean, longest, smallest):
        config = size_of(layers, width, requests, mean, longest, smallest)
        sizes, total = buckets_of(longest, smallest), None
        for length in lengths_of(requests, mean, longest):
            one = prompt_cost(config, length, sizes) + Cost(launches=1) + step_cost(config)
            total = one if total is None else total + one
        return total

    return cost


def eager_cost(config, length, sizes):
    launches = kernels_of(config) - MASK_KERNELS
    return forward_cost(config, length, length, length**2 / 2, launches=launches)


def graph_cost(config, size):
    nodes = kernels_of(config) - MASK_KERNELS + 1
    cost = forward_cost(config, size, size, size**2 / 2, launches=1, graph_nodes=nodes)
    return Cost(launches=2) + cost


def pieces_cost(config, length, sizes):
    """Return the cost of the graphs, and of attention, its output and two cache writes."""
    size, layers = bucket_of(length, sizes), config.layers
    nodes = kernels_of(config) - MASK_KERNELS - 4 * layers  # positions of the cache are outside
    cost = forward_cost(
        config,
        size,
        length,
        length**2 / 2,
        launches=1 + layers * 5,
        graph_nodes=nodes,
        host_steps=12 * layers,  # views
    )
    return Cost(launches=3) + cost


@compare(
    baseline=eager_prefill,
    optimized=[
        Variant(padded, at_least={"sm90": 1.4}),
        Variant(bucketed, at_least={"sm90": 2.3}),
        piecewise,
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[
        {"layers": 4, "width": 2048, "requests": 6, "mean": 128, "longest": 512, "smallest": 32}
    ],
    check_sizes=[
        {"layers": 2, "width": 128, "requests": 3, "mean": 6, "longest": 13, "smallest": 3},
        {"layers": 1, "width": 64, "requests": 2, "mean": 4, "longest": 5, "smallest": 8},
    ],
    work=work,
    bound="launch",
    costs={
        eager_prefill: serving(eager_cost),
        padded: serving(lambda config, length, sizes: graph_cost(config, sizes[-1])),
        bucketed: serving(
            lambda config, length, sizes: graph_cost(config, bucket_of(length, sizes))
        ),
        piecewise: serving(pieces_cost),
    },
)
def test_prefill_graphs(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestBuckets:
    """Each prompt uses the right graph, and padding does not change the prompt's logits."""

    def test_a_prompt_takes_the_smallest_bucket_that_it_fits_in(self):
        sizes = buckets_of(500, 32)
        assert sizes == [32, 64, 128, 256, 512]
        assert [bucket_of(n, sizes) for n in (1, 32, 33, 500, 512)] == [32, 32, 64, 512, 512]

    def test_a_prompt_longer_than_the_largest_bucket_is_refused(self):
        server = Server(Decoder(config_of(1, 64, 16)))
        prefill = Buckets(server, [4, 8], Whole)
        with pytest.raises(ValueError, match="9 tokens fits in no bucket; the largest is 8"):
            prefill(torch.zeros(1, 9, dtype=torch.int64))

    @pytest.mark.parametrize("kind", [Whole, Pieces])
    def test_what_an_earlier_prompt_left_in_the_padding_does_not_matter(self, kind):
        server = Server(Decoder(config_of(2, 64, 16)))
        prompts, following = torch.randint(256, (2, 7)), torch.randint(256, (2,))
        prefill = Buckets(server, [8], kind)
        alone = server.serve(prompts[1:], following[1:], [3], prefill)
        both = server.serve(prompts, following, [7, 3], prefill)
        assert torch.equal(both[1:], alone)
