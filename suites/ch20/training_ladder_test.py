"""A training step from end to end: each rung removes what limits the rung below it.

Problem    One AdamW step of a decoder of `layers` blocks (`suites/ch13/transformer.py`) on `rows`
           sequences of `length` tokens. Weights, gradients and moments are bf16, and both
           optimizers can be captured. The loss is returned. Each rung is a test of its own, and the
           last test compares the first rung with the last.
Baseline   eager: one operation after the other, and torch's default AdamW, which works on lists of
           tensors. TF32 to bf16, the rung below this one, is `amp_training` in chapter 13.
           compiled: the baseline of fused.
           fused: the baseline of captured.
Optimized  compiled: of eager. `torch.compile` of the model and its loss.
           fused: of compiled. AdamW as one kernel, which reads and writes each number once.
           captured: of fused. The whole step is one CUDA graph.
Bound      eager: DRAM, for passes over activations and for the optimizer's passes over weights.
           compiled saves about half of the passes over activations, and fused most of those over
           weights. captured: tensor cores and DRAM, with no gaps between kernels.
Use when   You tune a training loop: take the rungs in this order, because each one shows the next
           limit. `captured` gains only if the GPU waits for the host, so it has a second, smaller
           size. Larger models gain less from the last two rungs, since products grow fastest. FP8
           is the next rung on Hopper: `fp8_linear` and `transformer_engine` in chapter 13.
"""

import copy
import functools

import torch

from pytest_aisp import Cost, Variant, Work, capture, compare
from suites.ch13 import decoder_costs
from suites.ch13.transformer import (
    BETAS,
    DECAY,
    EPS,
    LR,
    VOCABULARY,
    Transformer,
    batch,
    flops_of,
    reference_step,
    training,
    weights_of,
)


def state(device, layers, width, rows, length):
    both = training(device, layers, width, length)
    both.on_lists = torch.optim.AdamW(
        both.model.parameters(), LR, BETAS, EPS, DECAY, foreach=True, capturable=device == "cuda"
    )
    both.on_lists.state = both.optimizer.state  # one set of moments for both optimizers
    return both


def inputs(device, layers, width, rows, length):
    return batch(device, rows, length)


def reference(state, tokens, labels):
    return reference_step(state, tokens, labels)


def step(state, optimizer, tokens, labels, loss_of=Transformer.forward):
    optimizer.zero_grad()
    loss = loss_of(state.model, tokens, labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


@functools.cache
def compiled_loss():
    return torch.compile(Transformer.forward, dynamic=False)


def eager(state, tokens, labels):
    return step(state, state.on_lists, tokens, labels)


def compiled(state, tokens, labels):
    return step(state, state.on_lists, tokens, labels, compiled_loss())


def fused(state, tokens, labels):
    return step(state, state.optimizer, tokens, labels, compiled_loss())


def captured(state, tokens, labels):
    yield capture(lambda: step(state, state.optimizer, tokens, labels, compiled_loss()))


def products(width, tokens, length):
    """Return the cost of a block's products and attention, in both passes."""
    return (
        decoder_costs.linear_forward(width, tokens, 2, "bf16")
        + decoder_costs.linear_backward(width, tokens, 2, "bf16")
        + decoder_costs.attention_forward(width, tokens, length, 2, "bf16")
        + decoder_costs.attention_backward(width, tokens, length, 2, "bf16")
    )


FUSED = 8 + 21 + 18  # passes of a block when each chain is one kernel (ch13/train_step_test.py)


def update_by_lists(layers, width):
    """Return the cost of AdamW on lists: 20 numbers per weight, then bias corrections."""
    weights = weights_of(layers, width) + VOCABULARY * width
    return Cost(read=24 * weights, write=16 * weights, launches=30)


def update_at_once(layers, width):
    weights = weights_of(layers, width) + VOCABULARY * width
    return Cost(read=8 * weights, write=6 * weights, launches=3)


def eager_model(layers, width, rows, length):
    tokens = rows * length
    return decoder_costs.layers(layers, width, tokens, length) + decoder_costs.ends(width, tokens)


def compiled_model(layers, width, rows, length, **starts):
    """Return the cost of both passes if each chain of pointwise operations is one kernel."""
    tokens = rows * length
    moved = FUSED * 2 * tokens * width
    block = products(width, tokens, length) + Cost(read=moved / 2, write=moved / 2)
    ends = decoder_costs.ends(width, tokens)
    return without_launches(layers * block + ends) + Cost(**starts)


def without_launches(cost):
    """Return the phases of a cost without their launches, which are counted elsewhere."""
    phases = [Cost(**{**phase, "launches": 0}) for phase in cost.amounts()]
    return functools.reduce(lambda a, b: a + b, phases)


def kernels_of(layers):
    return 31 * layers + 20  # as compiled: products and attention 20, chains 11


def eager_cost(layers, width, rows, length):
    return eager_model(layers, width, rows, length) + update_by_lists(layers, width)


def compiled_cost(layers, width, rows, length):
    model = compiled_model(layers, width, rows, length, launches=kernels_of(layers))
    return model + update_by_lists(layers, width)


def fused_cost(layers, width, rows, length):
    model = compiled_model(layers, width, rows, length, launches=kernels_of(layers))
    return model + update_at_once(layers, width)


def captured_cost(layers, width, rows, length):
    nodes = kernels_of(layers) + 3
    model = compiled_model(layers, width, rows, length, launches=1, graph_nodes=nodes)
    return model + without_launches(update_at_once(layers, width))


def work(layers, width, rows, length):
    return Work(
        read=8 * weights_of(layers, width),
        write=6 * weights_of(layers, width),
        flops={"bf16": flops_of(layers, width, length, rows * length)},
        terms=max(width, rows * length),
        roundings=8 * layers + 8,
    )


LARGE = {"layers": 4, "width": 1024, "rows": 4, "length": 1024}
SMALL = {"layers": 4, "width": 768, "rows": 4, "length": 512}
rung = functools.partial(
    compare,
    state=state,
    inputs=inputs,
    reference=reference,
    check_sizes=[{"layers": 1, "width": 64, "rows": 5, "length": 33}],
    work=work,
    bound="launch",  # the host's time is part of the step
)


@rung(
    sizes=[LARGE],
    baseline=eager,
    optimized=[compiled],
    costs={eager: eager_cost, compiled: compiled_cost},
)
def test_training_ladder_compiled(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    sizes=[LARGE],
    baseline=compiled,
    optimized=[fused],
    costs={compiled: compiled_cost, fused: fused_cost},
)
def test_training_ladder_fused(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    sizes=[LARGE, SMALL],
    baseline=fused,
    optimized=[Variant(captured, at_least="neutral")],
    costs={fused: fused_cost, captured: captured_cost},
)
def test_training_ladder_captured(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    sizes=[LARGE],
    baseline=eager,
    optimized=[captured],
    costs={eager: eager_cost, captured: captured_cost},
)
def test_training_ladder(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestLossCurves:
    """Every rung learns the same, up to what rounding explains."""

    STEPS = 200
    ALLOWED = 0.05

    def losses(self, begun, optimizer, tokens, labels):
        run = copy.deepcopy(begun)
        run.on_lists.state = run.optimizer.state
        chosen = getattr(run, optimizer)
        return torch.stack([step(run, chosen, tokens, labels).float() for _ in range(self.STEPS)])

    def test_curves_of_200_steps_agree(self):
        tokens, _ = batch("cpu", 4, 32)
        labels = (tokens * 5 + 3) % VOCABULARY  # so there is something to learn
        begun = state("cpu", 1, 64, 4, 32)
        exact = copy.deepcopy(begun)
        curve = torch.stack(
            [reference_step(exact, tokens, labels).float() for _ in range(self.STEPS)]
        )
        assert curve[-1] < curve[0] / 2
        for optimizer in ("on_lists", "optimizer"):
            off = (self.losses(begun, optimizer, tokens, labels) - curve).abs()
            assert off.max() < self.ALLOWED * curve[0], optimizer
