"""A decode loop from end to end: fuse the small kernels, then launch all of them at once.

Problem    Generate `steps` greedy tokens for one sequence after a prompt of 8 tokens, with a bf16
           decoder (`suites/decoder.py`). Each token is the input of the next step. The check
           compares the tokens and their scores. All sides compute the prompt in the same way, one
           operation after another. Each rung has its own test, and the last test compares the first
           rung with the last.
Baseline   eager: one operation after another. Positions and tokens stay on the GPU.
           compiled: the baseline of captured.
Optimized  compiled: changes eager. `torch.compile` compiles a step. Norms, rotation and SwiGLU
           become one kernel each. Products and attention are the same library kernels as before.
           captured: changes compiled. A step is a CUDA graph.
           eager_captured: changes eager. A step is a CUDA graph, and nothing is compiled.
Bound      The host limits eager and compiled: a step computes one token, but launches more than a
           hundred small kernels. Two things limit captured: DRAM, because each step reads all
           weights, and the starts of the kernels in the graph.
Seen       eager_captured and captured take much longer than predicted. The rate `graph_node` was
           measured with a kernel that adds to one number, and the kernels of a step do more.
           Products with one row probably do not read their weights at the full rate of DRAM,
           either. We did not time any kernel alone. eager and compiled take about twice as long as
           predicted, or longer. The rate `launch` was measured with an addition, and most other
           operators probably take the host longer. On an H100, eager took longer when timed with
           eager_captured than when timed with compiled. The host was probably slower at that time.
           Such differences explain the wide intervals of the speedups.
Use when   A model generates for few users at a time. Capture first, because a graph removes all
           launches and needs no compiler. Compile as well if the starts of small kernels still take
           a noticeable part of a captured step. With large batches or large models, kernels take
           longer, and compiling and capturing gain less.
"""

import functools

import torch

from pytest_aisp import Variant, Work, capture, compare
from suites.decoder import Cache, matrix_weights
from suites.serving import config_of, continued, forward_cost, kernels_of, planted

PROMPT = 8
COMPILED_KERNELS = 13
"""The number of kernels of a layer when pointwise chains are fused: 4 products, attention, the
fused chains between them, and two writes to the cache."""


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


def work(layers, width, steps):
    config = config_of(layers, width, room_of(steps))
    return Work(
        read=2 * steps * matrix_weights(config),  # each token depends on the previous token
        flops={"bf16": 2 * (PROMPT + steps - 1) * matrix_weights(config)},
        terms=max(config.hidden, config.length),
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
    baseline=eager,
    optimized=[captured],
    costs={eager: eager_cost, captured: captured_cost},
)
def test_decode_ladder(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
