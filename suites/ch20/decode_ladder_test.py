"""A decode loop from end to end: fuse the small kernels, then launch all of them at once.

Problem    Generate `steps` greedy tokens for one sequence after a prompt of 8 tokens, with a bf16
           decoder (`suites/decoder.py`). Each token is the input of the next step. The check
           compares the tokens and their scores. All sides compute the prompt in the same way, one
           operation after another. Each rung has its own test. The last test compares eager with
           captured.
Baseline   eager: one operation after another. Positions and tokens stay on the GPU.
           compiled: the baseline of captured.
           captured: the baseline of persistent.
Optimized  compiled: changes eager. `torch.compile` compiles a step. Norms, rotation and SwiGLU
           become one kernel each. Products and attention are the same library kernels as before.
           captured: changes compiled. A step is a CUDA graph.
           eager_captured: changes eager. A step is a CUDA graph, and nothing is compiled.
           persistent: changes captured. One cooperative kernel computes all steps. A layer has five
           phases. All blocks run at the same time, and wait for each other after each phase. Before
           it waits, each warp loads its first weights of the next product. No library kernel is
           left in a step: products, attention and the search for the best token are written by
           hand, and numbers that captured rounds to bf16 between kernels stay in fp32. So more than
           the starts of kernels changes, and the speedup does not say what the barriers alone gain.
Bound      The host limits eager and compiled: a step computes one token, but launches more than a
           hundred small kernels. Two things limit captured: DRAM, because each step reads all
           weights, and the starts of the kernels in the graph. DRAM limits persistent. Its cost has
           the bytes and the instructions of the products. The cost leaves out the barriers, whose
           wait was not measured. It also leaves out norms and attention, during which an SM reads
           only the weights that it loads ahead.
Seen       eager_captured and captured take much longer than predicted. The rate `graph_node` was
           measured with a kernel that adds to one number, and the kernels of a step do more.
           Products with one row probably do not read their weights at the full rate of DRAM,
           either. We did not time any kernel alone. eager and compiled take about twice as long as
           predicted, or longer. The rate `launch` was measured with an addition, and most other
           operators probably take the host longer. On an H100, eager took longer when timed with
           eager_captured than when timed with compiled. The host was probably slower at that time.
           Such differences explain the wide intervals of the speedups. persistent is about a third
           faster than captured on an H200, but takes more than three times as long as predicted. By
           the profiler, the GPU computes for a little more than half of the time of persistent, and
           for three fifths of the time of captured. In the rest, it probably waits for the host,
           which launches the prompt's kernels one after another on both sides. So without the
           prompt, the speedup would be larger. All kernels of persistent together still take about
           twice the predicted time. The rest is probably the barriers, norms and attention, which
           its cost leaves out. captured takes more than a third longer there than in its other
           results on an H200, probably because of a slower host.
Use when   A model generates for few users at a time. Capture first, because a graph removes all
           launches and needs no compiler. Compile as well if the starts of small kernels still take
           a noticeable part of a captured step. With large batches or large models, kernels take
           longer, and compiling and capturing gain less. A persistent kernel is written for one
           model and one batch size, so first measure how much time a captured step loses between
           its kernels. Ours suits a small vocabulary: each warp searches all logits itself.
"""

import dataclasses
import functools

import pytest
import torch

from pytest_aisp import Cost, Variant, Work, capture, compare, cuda_module
from suites.decoder import Cache, Decoder, cached_numbers, matrix_weights
from suites.serving import HEAD, config_of, continued, forward_cost, kernels_of, planted

kernels = cuda_module("decode_ladder.cu")
WARPS, SEGMENT = 16, 1024  # as in decode_ladder.cu
PROMPT = 8
COMPILED_KERNELS = 13
"""The number of kernels of a layer when pointwise chains are fused: 4 products, attention, the
fused chains between them, and two writes to the cache."""
INSTRUCTIONS = 194 / 32
"""The number of instructions per weight in the products of `persistent`, counted in the loop of the
sm90 machine code. Each takes the slot of an fp32 multiply-add, so it counts as 2 operations."""


def room_of(steps):
    return -(-(PROMPT + steps) // 8) * 8  # fused kernels need masks of 8 x n keys


def state(device, layers, width, steps):
    return planted(device, config_of(layers, width, room_of(steps)))


def inputs(device, layers, width, steps):
    return torch.randint(256, (1, PROMPT), device=device), steps


def reference(model, prompts, steps):
    tokens, scores = continued(model, prompts, steps)
    return tokens[0], scores[0]


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

    def run(self, prompts, advance):
        self.place.zero_()
        self.keep(self.model.prefill(prompts, self.cache))
        self.position.fill_(PROMPT)
        self.place.fill_(1)
        for _ in range(len(self.tokens) - 1):
            advance()
        return self.tokens.clone(), self.scores.clone()


def eager_step(model, token, position, cache):
    return model.step(token, position, cache)


@functools.cache
def compiled_step():
    return torch.compile(eager_step, dynamic=False)


def eager(model, prompts, steps):
    loop = Loop(model, steps, eager_step)
    yield lambda: loop.run(prompts, loop.advance)


def compiled(model, prompts, steps):
    loop = Loop(model, steps, compiled_step())
    loop.advance()
    yield lambda: loop.run(prompts, loop.advance)


def captured(model, prompts, steps):
    loop = Loop(model, steps, compiled_step())
    loop.advance()
    replay = capture(loop.advance)
    yield lambda: loop.run(prompts, replay)


def eager_captured(model, prompts, steps):
    loop = Loop(model, steps, eager_step)
    replay = capture(loop.advance)
    yield lambda: loop.run(prompts, replay)


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


def whole_loop(loop):
    """Return a function that decodes all tokens after the first, in one kernel.

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
            *(loop.token, loop.tokens[1:], loop.scores[1:]),
            *(*sizes, PROMPT, len(loop.tokens) - 1),
        )

    return decode


def persistent(model, prompts, steps):
    loop = Loop(model, steps, eager_step)
    decode = whole_loop(loop)

    def run():
        loop.place.zero_()
        loop.keep(model.prefill(prompts, loop.cache))
        decode()
        return loop.tokens.clone(), loop.scores.clone()

    yield run


def looped(kernels_per_layer, *, graph):
    """Return a function from the page's sizes to the cost of the prompt and all steps."""

    def cost(layers, width, steps):
        config = config_of(layers, width, room_of(steps))
        ends = 16 + 8  # embedding, positions, mask and logits, then the best token and counters
        kernels = kernels_per_layer * layers + ends
        starts = {"launches": 1, "graph_nodes": kernels} if graph else {"launches": kernels}
        step = forward_cost(config, 1, room_of(steps), room_of(steps), **starts)
        prompt = forward_cost(config, PROMPT, PROMPT, PROMPT**2, launches=kernels_of(config) + 10)
        return prompt + (steps - 1) * step

    return cost


eager_cost, eager_captured_cost = (looped(28, graph=graph) for graph in (False, True))
compiled_cost, captured_cost = (looped(COMPILED_KERNELS, graph=graph) for graph in (False, True))


def persistent_cost(layers, width, steps):
    """Return the cost of the prompt and all steps in one kernel, without its barriers."""
    config = config_of(layers, width, room_of(steps))
    entry = 2 * cached_numbers(config)
    products = Cost(
        read=2 * matrix_weights(config),
        ops={"fp32": 2 * INSTRUCTIONS * matrix_weights(config)},
    )
    attention = Cost(read=entry * (PROMPT + steps // 2), write=entry)
    prompt = forward_cost(config, PROMPT, PROMPT, PROMPT**2, launches=kernels_of(config) + 10)
    return prompt + Cost(launches=1) + (steps - 1) * (products + attention)


def work(layers, width, steps):
    config = config_of(layers, width, room_of(steps))
    return Work(
        read=2 * steps * matrix_weights(config),  # each token depends on the previous token
        flops={"bf16": 2 * (PROMPT + steps - 1) * matrix_weights(config)},
        roundings=20 * layers,
    )


rung = functools.partial(
    compare,
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 8, "width": 2048, "steps": 32}],
    check_sizes=[{"layers": 1, "width": 128, "steps": 3}],
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
    optimized=[captured],
    costs={compiled: compiled_cost, captured: captured_cost},
)
def test_decode_ladder_captured(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    baseline=captured,
    optimized=[persistent],
    # Several layers and key heads, rows of several segments, and several keys per warp.
    check_sizes=[{"layers": 2, "width": 512, "steps": 12}],
    costs={captured: captured_cost, persistent: persistent_cost},
)
def test_decode_ladder_persistent(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    baseline=eager,
    optimized=[captured],
    costs={eager: eager_cost, captured: captured_cost},
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
