"""A training step from end to end: each rung removes what limits the rung below it.

Problem    One AdamW step of a decoder of `layers` blocks (`suites/ch13/transformer.py`) on `rows`
           sequences of `length` tokens. Weights, gradients and moments are fp32, and both
           optimizers can be captured. The loss is returned. Each rung is a test of its own, and the
           last test compares the first rung with the last.
Baseline   tf32: eager mode, fp32 with TF32 products, and torch's default AdamW, which works on
           lists of tensors.
           bf16: the baseline of compiled.
           compiled: the baseline of fused.
           fused: the baseline of captured.
Optimized  bf16: of tf32. Autocast: products in bf16, the residual stream in fp32.
           compiled: of bf16. `torch.compile` of the model and its loss.
           fused: of compiled. AdamW as one kernel, which reads and writes each number once.
           captured: of fused. The whole step is one CUDA graph.
Bound      tf32: tensor cores and DRAM. bf16: DRAM, because the casts add passes over activations.
           compiled: the optimizer's passes over the weights are a large part of what is left.
           captured: tensor cores and DRAM again, with no gaps between kernels.
Use when   You tune a training loop: take the rungs in this order, because each one shows the next
           limit. `captured` gains only if the GPU waits for the host, so it has a second, smaller
           size. Larger models gain less from the last two rungs, since products grow fastest. FP8
           is the next rung on Hopper: `fp8_linear` and `transformer_engine` in chapter 13.
"""

import contextlib
import copy
import functools

import torch

from pytest_aisp import Conditions, Cost, Variant, Work, capture, compare
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
    hidden_of,
    reference_step,
    training,
    weights_of,
)


def state(device, layers, width, rows, length):
    both = training(device, layers, width, length, torch.float32)
    both.on_lists = torch.optim.AdamW(
        both.model.parameters(), LR, BETAS, EPS, DECAY, foreach=True, capturable=device == "cuda"
    )
    both.on_lists.state = both.optimizer.state  # one set of moments for both optimizers
    return both


def inputs(device, layers, width, rows, length):
    return batch(device, rows, length)


def reference(state, tokens, labels):
    return reference_step(state, tokens, labels)


@contextlib.contextmanager
def products_in_tf32():
    matmul = torch.backends.cuda.matmul  # the flag is the process's: put it back
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def step(state, optimizer, tokens, labels, loss_of=Transformer.forward):
    optimizer.zero_grad()
    loss = loss_of(state.model, tokens, labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def in_bf16(loss_of):
    def forward(model, tokens, labels):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return loss_of(model, tokens, labels)

    return forward


@functools.cache
def compiled_loss():
    return in_bf16(torch.compile(Transformer.forward, dynamic=False))


def tf32(state, tokens, labels):
    with products_in_tf32():
        return step(state, state.on_lists, tokens, labels)


def bf16(state, tokens, labels):
    return step(state, state.on_lists, tokens, labels, in_bf16(Transformer.forward))


def compiled(state, tokens, labels):
    return step(state, state.on_lists, tokens, labels, compiled_loss())


def fused(state, tokens, labels):
    return step(state, state.optimizer, tokens, labels, compiled_loss())


def captured(state, tokens, labels):
    yield capture(lambda: step(state, state.optimizer, tokens, labels, compiled_loss()))


def products(width, tokens, length, element, arithmetic):
    """Return the cost of a block's products and attention, in both passes."""
    return (
        decoder_costs.linear_forward(width, tokens, element, arithmetic)
        + decoder_costs.linear_backward(width, tokens, element, arithmetic)
        + decoder_costs.attention_forward(width, tokens, length, element, arithmetic)
        + decoder_costs.attention_backward(width, tokens, length, element, arithmetic)
    )


def update_by_lists(layers, width):
    """Return the cost of AdamW on lists: 20 numbers per weight, then bias corrections."""
    weights = weights_of(layers, width) + VOCABULARY * width
    return Cost(read=48 * weights, write=32 * weights, launches=30)


def update_at_once(layers, width):
    weights = weights_of(layers, width) + VOCABULARY * width
    return Cost(read=16 * weights, write=12 * weights, launches=3)


def tf32_cost(layers, width, rows, length):
    tokens = rows * length
    block = (
        products(width, tokens, length, 4, "tf32")
        + decoder_costs.pointwise_forward(width, tokens, 4)
        + decoder_costs.pointwise_backward(width, tokens, 4)
    )
    ends = decoder_costs.ends(width, tokens, 4, "tf32")
    return layers * block + ends + update_by_lists(layers, width)


def bf16_model(layers, width, rows, length):
    """Return the cost of both passes under autocast, in eager mode."""
    tokens, unit, hidden = rows * length, 4 * rows * length * width, hidden_of(width) / width
    weights = decoder_costs.matrices(width)
    # In units of fp32: norms, casts, rotation with casts, heads side by side, sums, SwiGLU.
    forward = Cost(
        read=(2 + 3 + 10 + 0.5 + 3 + 1.5 * hidden) * unit + 4 * weights,
        write=(2 + 1.5 + 9 + 0.5 + 2 + hidden) * unit + 2 * weights,
        launches=2 + 3 + 16 + 1 + 2 + 2 + 5,
    )
    # Sums, casts and a sum of gradients, norms, rotation, q k v side by side, SwiGLU.
    backward = Cost(
        read=(4 + 5.5 + 8 + 13 + 1.5 + 3 * hidden) * unit + 2 * weights,
        write=(2 + 5 + 2 + 11 + 1.5 + 1.5 * hidden) * unit + 4 * weights,
        launches=2 + 6 + 4 + 26 + 1 + 3 + 5,
    )
    block = products(width, tokens, length, 2, "bf16") + forward + backward
    return layers * block + decoder_costs.ends(width, tokens, 4, "bf16")


def compiled_model(layers, width, rows, length, **starts):
    """Return the cost of both passes if each chain of pointwise operations is one kernel."""
    tokens, weights = rows * length, decoder_costs.matrices(width)
    # Chains of a block move about 47 units (ch13/train_step_test.py), half of them in fp32. Weights
    # are cast to bf16, and their gradients to fp32.
    moved = 47 * 3 * tokens * width
    chains = Cost(read=moved / 2 + 6 * weights, write=moved / 2 + 6 * weights)
    block = products(width, tokens, length, 2, "bf16") + chains
    ends = decoder_costs.ends(width, tokens, 2, "bf16")
    return without_launches(layers * block + ends) + Cost(**starts)


def without_launches(cost):
    """Return the phases of a cost without their launches, which are counted elsewhere."""
    phases = [Cost(**{**phase, "launches": 0}) for phase in cost.amounts()]
    return functools.reduce(lambda a, b: a + b, phases)


def kernels_of(layers):
    return 45 * layers + 20  # as compiled: products and attention 20, casts 14, chains 11


def bf16_cost(layers, width, rows, length):
    return bf16_model(layers, width, rows, length) + update_by_lists(layers, width)


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
        read=16 * weights_of(layers, width),
        write=12 * weights_of(layers, width),
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
    conditions=Conditions(owns=["tf32"]),
)


@rung(
    sizes=[LARGE],
    baseline=Variant(tf32, precision="tf32"),
    optimized=[Variant(bf16, precision="bf16")],
    costs={tf32: tf32_cost, bf16: bf16_cost},
)
def test_training_ladder_bf16(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    sizes=[LARGE],
    baseline=Variant(bf16, precision="bf16"),
    optimized=[Variant(compiled, precision="bf16")],
    costs={bf16: bf16_cost, compiled: compiled_cost},
)
def test_training_ladder_compiled(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    sizes=[LARGE],
    baseline=Variant(compiled, precision="bf16"),
    optimized=[Variant(fused, precision="bf16")],
    costs={compiled: compiled_cost, fused: fused_cost},
)
def test_training_ladder_fused(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    sizes=[LARGE, SMALL],  # at the small size, launches take longer than kernels
    baseline=Variant(fused, precision="bf16"),
    optimized=[Variant(captured, precision="bf16", at_least="neutral")],
    costs={fused: fused_cost, captured: captured_cost},
)
def test_training_ladder_captured(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@rung(
    sizes=[LARGE],
    baseline=Variant(tf32, precision="tf32"),
    optimized=[Variant(captured, precision="bf16")],
    costs={tf32: tf32_cost, captured: captured_cost},
)
def test_training_ladder(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


class TestLossCurves:
    """Every rung learns the same, up to what rounding explains."""

    STEPS = 200

    def losses(self, begun, side, tokens, labels):
        run = copy.deepcopy(begun)
        run.on_lists.state = run.optimizer.state
        return torch.stack([side(run, tokens, labels).float() for _ in range(self.STEPS)])

    def test_curves_of_200_steps_agree(self):
        tokens, _ = batch("cpu", 4, 32)
        labels = (tokens * 5 + 3) % VOCABULARY  # so there is something to learn
        begun = state("cpu", 1, 64, 4, 32)
        exact = copy.deepcopy(begun)
        curve = torch.stack(
            [reference_step(exact, tokens, labels).float() for _ in range(self.STEPS)]
        )
        assert curve[-1] < curve[0] / 2
        for side, allowed in ((tf32, 1e-3), (bf16, 0.03)):
            off = (self.losses(begun, side, tokens, labels) - curve).abs()
            assert (off / curve[0]).max() < allowed, side.__name__
