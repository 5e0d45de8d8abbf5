"""A decode loop from end to end: fuse the small kernels, then launch all of them at once.

Problem    Generate `steps` greedy tokens for one sequence with a bf16 decoder
           (`suites/decoder.py`). The KV cache already holds 16 tokens, and each new token is the
           input of the next step. The check compares the tokens, their scores, and the keys and
           values that the steps add to the cache. Each rung has its own test. The last test
           compares `eager` with `captured` and with `persistent`.
Baseline   eager: one operation after another. Positions and tokens stay on the GPU.
           compiled: the baseline of `captured`.
           captured: the baseline of `persistent`.
           persistent: the baseline of `prefetched`.
Optimized  compiled: changes `eager`. `torch.compile` compiles a step. Norms, rotation and SwiGLU
           become one kernel each. Products and attention are the same library kernels as before.
           captured: changes `compiled`. A step is a CUDA graph.
           eager_captured: changes `eager`. A step is a CUDA graph, and nothing is compiled.
           persistent: changes `captured`. One cooperative kernel computes all steps. A layer has
           five phases. All blocks run at the same time, and wait for each other after each phase.
           Before it waits, each warp loads its first weights of the next product. No library kernel
           is left in a step: products, attention and the search for the best token are written by
           hand, and numbers that `captured` rounds to bf16 between kernels stay in fp32. So more
           than the starts of kernels changes, and the speedup does not say what the barriers alone
           gain.
           prefetched: changes `persistent`. Before it waits, each warp also prefetches four more
           segments of weights, 2 KB each, into the L2. If the warp has fewer segments of the next
           product, it continues with the product after that. So DRAM keeps working for longer
           during barriers, norms and attention.
Bound      The host limits `eager` and `compiled`: a step computes one token, but launches more than
           a hundred small kernels. Two things limit captured: DRAM, because each step reads all
           weights, and the starts of the kernels in the graph. DRAM limits `persistent` and
           `prefetched`. Their cost has the bytes and the instructions of the products. The cost
           leaves out the barriers, whose wait was not measured. It also leaves out norms and
           attention, during which `persistent` reads only the weights that it loads ahead.
Seen       On an H200, `eager` and `compiled` take about three times as long as predicted, and on an
           H100 more than twice as long. The rate `launch` was measured with an addition, and most
           other operators take the host longer. On an H200, `eager_captured` and `captured` take
           almost twice as long as predicted. On an H100, `eager_captured` takes about two thirds
           longer than predicted. The rate `graph_node` was measured with a kernel that adds to one
           number, and the kernels of a step do more. Products with one row probably do not read
           their weights at the full rate of DRAM, either. We did not time any kernel alone. On an
           H200, `persistent` takes twice as long as predicted: it reads weights at half the rate of
           DRAM. On an H100, whose DRAM is slower, it takes less than twice as long. The rest goes
           to barriers, norms and attention, which the cost leaves out. `prefetched` is slower than
           `persistent`: on an H100, it takes about a seventh longer. We do not know why. The
           prefetches may delay the loads that the next phase waits for. Times on the host's clock
           vary: the same `eager` took longer in one case than in another.
Use when   A model generates for few users at a time. Capture first, because a graph removes all
           launches and needs no compiler. Compile as well if the starts of small kernels still take
           a noticeable part of a captured step. With large batches or large models, kernels take
           longer, and compiling and capturing gain less. A persistent kernel is written for one
           model and one batch size, so first measure how much time a captured step loses between
           its kernels. Ours suits a small vocabulary: each warp searches all logits itself. It also
           suits a short context: one block computes the attention of a head.
"""

import dataclasses
import functools

import pytest
import torch

from pytest_aisp import Cost, Variant, Work, capture, compare, cuda_module
from suites.decoder import Cache, Decoder, cached_numbers, exact_norm, matrix_weights, turned
from suites.serving import HEAD, VOCABULARY, config_of, forward_cost, planted

kernels = cuda_module("decode_ladder.cu")
WARPS, SEGMENT = 16, 1024  # as in decode_ladder.cu
CONTEXT = 16
"""The number of tokens that the cache holds before the first step."""
PREFETCHED = 4
"""The number of segments of a product that each warp of `prefetched` prefetches, at most."""
COMPILED_KERNELS = 13
"""The number of kernels of a layer when pointwise chains are fused: 4 products, attention, the
fused chains between them, and two writes to the cache."""
INSTRUCTIONS = 194 / 32
"""The number of instructions per weight in the products of `persistent`, counted in the loop of the
sm90 machine code. Each takes the slot of an fp32 multiply-add, so it counts as 2 operations."""


def room_of(steps):
    return -(-(CONTEXT + steps) // 8) * 8  # fused kernels need masks of 8 x n keys


def state(device, layers, width, steps):
    return planted(device, config_of(layers, width, room_of(steps)))


def inputs(device, layers, width, steps):
    """Return the last token, the cached keys and values of the tokens before it, and `steps`."""
    config = config_of(layers, width, room_of(steps))
    shape = layers, 1, config.kv_heads, CONTEXT, HEAD
    keys, values = torch.randn(2, *shape, device=device).bfloat16()
    return torch.randint(VOCABULARY, (1,), device=device), keys, values, steps


def reference(model, token, keys, values, steps):
    """Return the tokens, their scores, and the new keys and values, in float64."""
    tokens = [token]
    for _ in range(steps):
        tokens.append(model.table[tokens[-1]])
    chosen = torch.cat(tokens[1:])
    groups = model.config.heads // model.config.kv_heads
    x = model.embedding.double()[torch.cat(tokens[:-1])]
    at = slice(CONTEXT, CONTEXT + steps)
    turns = torch.complex(model.cos[at].double(), model.sin[at].double())
    future = torch.ones(steps, CONTEXT + steps, dtype=torch.bool, device=x.device)
    future = future.triu(CONTEXT + 1)
    added = []
    for block, old_keys, old_values in zip(model.blocks, keys, values, strict=True):
        y = exact_norm(x, block.attention_norm.double()) @ block.qkv.double().t()
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(0, 1) for t in y.split(block.sizes, -1))
        k = turned(k, turns)
        added.append((k, v))
        k, v = torch.cat([old_keys[0].double(), k], 1), torch.cat([old_values[0].double(), v], 1)
        k, v = (t.repeat_interleave(groups, 0) for t in (k, v))
        scores = turned(q, turns) @ k.transpose(1, 2) / HEAD**0.5
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + y.transpose(0, 1).flatten(1) @ block.out.double().t()
        y = exact_norm(x, block.mlp_norm.double()) @ block.gate_up.double().t()
        gate, up = y.chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ block.down.double().t()
    logits = exact_norm(x, model.norm.double()) @ model.lm_head.double().t()
    if not torch.equal(logits.argmax(-1), chosen):
        raise ValueError("a planted successor is not the best token")
    new_keys, new_values = (torch.stack(each)[:, None] for each in zip(*added, strict=True))
    return chosen, logits.gather(1, chosen[:, None])[:, 0], new_keys, new_values


class Loop:
    """One sequence that is being decoded. Its tensors keep their addresses, for graphs."""

    def __init__(self, model, steps, step):
        device = model.embedding.device
        self.model, self.step = model, step
        self.cache = Cache(model.config, 1, model.config.length, device)
        self.token, self.position, self.place = torch.zeros(3, 1, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(steps, dtype=torch.int64, device=device)
        self.scores = torch.zeros(steps, dtype=torch.bfloat16, device=device)

    def keep(self, logits):
        score, token = logits.max(-1)
        self.token.copy_(token)
        self.tokens.index_copy_(0, self.place, token)
        self.scores.index_copy_(0, self.place, score)

    def advance(self):
        self.keep(self.step(self.model, self.token, self.position, self.cache))
        self.position.add_(1).clamp_(max=self.model.config.length - 1)
        self.place.add_(1).clamp_(max=len(self.tokens) - 1)

    def begin(self, token, keys, values):
        self.cache.keys[..., :CONTEXT, :].copy_(keys)
        self.cache.values[..., :CONTEXT, :].copy_(values)
        self.token.copy_(token)
        self.position.fill_(CONTEXT)
        self.place.zero_()

    def results(self):
        at = slice(CONTEXT, CONTEXT + len(self.tokens))
        keys, values = (t[..., at, :].clone() for t in (self.cache.keys, self.cache.values))
        return self.tokens.clone(), self.scores.clone(), keys, values

    def run(self, context, advance):
        self.begin(*context)
        for _ in range(len(self.tokens)):
            advance()
        return self.results()


def eager_step(model, token, position, cache):
    return model.step(token, position, cache)


@functools.cache
def compiled_step():
    return torch.compile(eager_step, dynamic=False)


def eager(model, token, keys, values, steps):
    loop = Loop(model, steps, eager_step)
    yield lambda: loop.run((token, keys, values), loop.advance)


def compiled(model, token, keys, values, steps):
    loop = Loop(model, steps, compiled_step())
    loop.advance()
    yield lambda: loop.run((token, keys, values), loop.advance)


def captured(model, token, keys, values, steps):
    loop = Loop(model, steps, compiled_step())
    loop.advance()
    replay = capture(loop.advance)
    yield lambda: loop.run((token, keys, values), replay)


def eager_captured(model, token, keys, values, steps):
    loop = Loop(model, steps, eager_step)
    replay = capture(loop.advance)
    yield lambda: loop.run((token, keys, values), replay)


def addresses(model):
    """Return the address of each weight of the layers, in the order that the kernel expects.

    Raises:
        ValueError: if the kernel does not support the model.
    """
    config, weights = model.config, [*model.blocks.parameters()]
    if config.head != HEAD:
        raise ValueError(f"persistent needs heads of {HEAD} elements, not {config.head}")
    if config.heads % config.kv_heads:
        raise ValueError(
            f"persistent needs as many query heads for each key head, but there are {config.heads}"
            f" query heads and {config.kv_heads} key heads"
        )
    if config.hidden % 8:
        raise ValueError(f"persistent needs a hidden size of 8 x n, not {config.hidden}")
    for each in model.parameters():
        if each.dtype != torch.bfloat16:
            raise ValueError(f"persistent needs weights in torch.bfloat16, not {each.dtype}")
    pointers = [each.data_ptr() for each in weights]
    return torch.tensor(pointers, device=model.embedding.device)


def whole_loop(loop, prefetched):
    """Return a function that decodes all tokens in one kernel.

    Args:
        prefetched: the number of segments of a product that each warp prefetches into the L2, at
        most.

    Raises:
        ValueError: if the kernel does not support the model.
    """
    model, config, cache = loop.model, loop.model.config, loop.cache
    device, kv = model.embedding.device, config.kv_heads * config.head
    weights = addresses(model)
    x, qkv, logits = (
        torch.empty(n, device=device)
        for n in (config.width, config.width + 2 * kv, config.vocabulary)
    )
    mixed, activated = (
        torch.empty(n, device=device, dtype=torch.bfloat16) for n in (config.width, config.hidden)
    )
    grid = torch.cuda.get_device_properties(device).multi_processor_count
    products = [  # rows and columns
        (config.width + 2 * kv, config.width),
        (config.width, config.width),
        (2 * config.hidden, config.width),
        (config.width, config.hidden),
        (config.vocabulary, config.width),
    ]
    sums = max((-(-rows // grid) + 1) * -(-columns // SEGMENT) for rows, columns in products)
    shared = 2 * max(config.width, config.hidden) + 4 * sums
    launch = kernels.decode.launch(grid, 32 * WARPS, shared, cooperative=True)
    sizes = (config.layers, config.width, kv, config.hidden, config.vocabulary, config.length)

    def decode():
        launch(
            *(weights, model.embedding, model.norm, model.lm_head, model.cos, model.sin),
            *(cache.keys, cache.values, x, qkv, mixed, activated, logits),
            *(loop.token, loop.tokens, loop.scores),
            *(*sizes, CONTEXT, len(loop.tokens), prefetched),
        )

    return decode


def in_one_kernel(model, context, steps, ahead):
    """Return a function that generates all tokens in one kernel."""
    loop = Loop(model, steps, eager_step)
    decode = whole_loop(loop, ahead)

    def run():
        loop.begin(*context)
        decode()
        return loop.results()

    return run


def persistent(model, token, keys, values, steps):
    yield in_one_kernel(model, (token, keys, values), steps, 0)


def prefetched(model, token, keys, values, steps):
    yield in_one_kernel(model, (token, keys, values), steps, PREFETCHED)


def looped(kernels_per_layer, *, graph):
    """Return a function from the page's sizes to the cost of all steps."""

    def cost(layers, width, steps):
        config = config_of(layers, width, room_of(steps))
        ends = 16 + 8  # embedding, positions, mask and logits, then the best token and counters
        kernels = kernels_per_layer * layers + ends
        starts = {"launches": 1, "graph_nodes": kernels} if graph else {"launches": kernels}
        step = forward_cost(config, 1, room_of(steps), room_of(steps), **starts)
        return Cost(launches=9) + steps * step  # copies to and from the cache, and counters

    return cost


eager_cost, eager_captured_cost = (looped(28, graph=graph) for graph in (False, True))
compiled_cost, captured_cost = (looped(COMPILED_KERNELS, graph=graph) for graph in (False, True))


def persistent_cost(layers, width, steps):
    """Return the cost of all steps in one kernel, without its barriers."""
    config = config_of(layers, width, room_of(steps))
    entry = 2 * cached_numbers(config)
    products = Cost(
        read=2 * matrix_weights(config),
        ops={"fp32": 2 * INSTRUCTIONS * matrix_weights(config)},
    )
    attention = Cost(read=entry * (CONTEXT + steps // 2), write=entry)
    return Cost(launches=10) + steps * (products + attention)


def work(layers, width, steps):
    config = config_of(layers, width, room_of(steps))
    return Work(
        read=2 * steps * matrix_weights(config),  # each token depends on the previous token
        flops={"bf16": 2 * steps * matrix_weights(config)},
        roundings=20 * layers,
    )


rung = functools.partial(
    compare,
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 8, "width": 2048, "steps": 32}],
    # Keys and values of the second layer depend on attention. Scores alone show it too weakly.
    check_sizes=[{"layers": 2, "width": 128, "steps": 3}],
    work=work,
    bound="launch",
)


@rung(
    baseline=eager,
    optimized=[
        Variant(compiled, at_least={"sm90": 1.3}),
        Variant(eager_captured, at_least={"sm90": 4.7}),
    ],
    costs={eager: eager_cost, compiled: compiled_cost, eager_captured: eager_captured_cost},
)
def test_decode_ladder_compiled(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    baseline=compiled,
    optimized=[Variant(captured, at_least={"sm90": 3})],
    costs={compiled: compiled_cost, captured: captured_cost},
)
def test_decode_ladder_captured(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    baseline=captured,
    optimized=[Variant(persistent, at_least={"sm90": 1.3})],
    # Several key heads, rows of several segments, and several keys per warp. With three layers, the
    # new keys of the last layer depend on the attention of two layers.
    check_sizes=[
        {"layers": 2, "width": 512, "steps": 3},
        {"layers": 3, "width": 128, "steps": 3},
    ],
    costs={captured: captured_cost, persistent: persistent_cost},
)
def test_decode_ladder_persistent(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    baseline=persistent,
    optimized=[Variant(prefetched, at_least="yardstick")],
    costs=dict.fromkeys([persistent, prefetched], persistent_cost),
    bound="dram",
)
def test_decode_ladder_prefetched(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    baseline=eager,
    optimized=[Variant(captured, at_least={"sm90": 5}), persistent],
    costs={eager: eager_cost, captured: captured_cost, persistent: persistent_cost},
)
def test_decode_ladder(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestPersistent:
    """The kernel refuses a model that it does not support, and names the reason."""

    @pytest.mark.parametrize(
        ("words", "dtype", "changes"),
        [
            ("heads of 64 elements, not 32", torch.bfloat16, {"heads": 4}),
            ("3 query heads and 2 key", torch.bfloat16, {"width": 192, "heads": 3, "kv_heads": 2}),
            ("hidden size of 8 x n, not 100", torch.bfloat16, {"hidden": 100}),
            ("weights in torch.bfloat16, not torch.float32", torch.float32, {}),
        ],
    )
    def test_an_unsupported_model_is_refused(self, words, dtype, changes):
        config = dataclasses.replace(config_of(1, 128, 8), **changes)
        with pytest.raises(ValueError, match=words):
            addresses(Decoder(config, dtype=dtype))
