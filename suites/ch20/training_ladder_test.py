"""A training step from end to end: each rung removes the limit of the previous rung.

Problem    Take one AdamW step of a decoder of `layers` blocks (`suites/ch13/transformer.py`) on
           `rows` sequences of `length` tokens, and return the loss. Weights, gradients and moments
           are bf16. Each rung has its own test, and the last test compares `eager` with `captured`.
Baseline   eager: one operation after another, and torch's default AdamW, which works on lists of
           tensors and counts its steps on the CPU. For the previous rung, from TF32 to bf16, see
           `amp_training` in chapter 13.
           compiled: the baseline of `fused`.
           fused: the baseline of `captured`.
           captured: the baseline of fp8.
Optimized  compiled: changes `eager`. `torch.compile` compiles the model and its loss.
           fused: changes `compiled`. One kernel makes the whole update, reads and writes each
           number once, and counts its steps on the GPU.
           captured: changes `fused`. The whole step is one CUDA graph.
           fp8: changes `captured`. The linear layers of the blocks multiply in e4m3, in the forward
           and the backward pass. The gradient dy of a layer's output is quantized to e4m3 too.
           Other recipes use e5m2 for dy, which has more range and less precision. Each tensor has
           one scale, from its maximum. Weights, gradients and moments stay bf16, as do attention
           and the head.
Bound      DRAM limits `eager`: it makes passes over activations, and the optimizer makes passes
           over weights. `compiled` saves about half of the passes over activations. `fused` saves
           more than half of the passes over weights. Tensor cores and DRAM limit `captured`, which
           never waits for the host. fp8 doubles the rate of most products, but quantizing makes
           more passes over inputs, weights and gradients. So its test has wider layers.
Seen       On H100 and H200 machines, `eager` takes about four times as long as predicted, and
           `compiled` two to three times. The host limits both: the costs count launches, but not
           the time that Python takes in modules, autograd and the optimizer. The host also limits
           `fused`, which takes more than twice as long as predicted, and more than four times as
           long at the smaller size. So `fused` gains little over `compiled`, and the confidence
           interval of its speedup includes 1. `captured` removes that limit. `captured` is nearly
           twice as fast as `fused` at the larger size, and more than three times as fast at the
           smaller size. `captured` still takes a third longer than predicted at the larger size,
           and one and a half times as long as predicted at the smaller size. By the profiler, the
           GPU is almost always busy in `captured` at the larger size, so the kernels themselves
           take longer. We did not compare single kernels with their costs. On an H200, `captured`
           is almost four times as fast as `eager`. With the wider layers of its test, `fp8` gains
           about a quarter over `captured`, about as predicted, and both sides take about a tenth
           longer than predicted.
Use when   You tune a training loop: take the rungs in this order, because each rung shows the next
           limit. `captured` gains only if the GPU waits for the host, so its test has a second,
           smaller size. The update takes a smaller share of the step if a batch has more tokens.
           `fp8` needs wide layers. See also `fp8_linear` and `transformer_engine` in chapter 13.
"""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, capture, compare
from suites.ch13 import decoder_costs
from suites.ch13.fp8_linear_test import product, tensorwise
from suites.ch13.transformer import (
    BETAS,
    DECAY,
    EPS,
    HEAD,
    LR,
    VOCABULARY,
    Transformer,
    batch,
    flops_of,
    hidden_of,
    normalized,
    reference_step,
    rotated,
    training,
    weights_of,
)


def state(device, layers, width, rows, length):
    return training(device, layers, width, length)


def inputs(device, layers, width, rows, length):
    return batch(device, rows, length)


def reference(state, tokens, labels):
    begun = state.optimizer.state
    for moments in begun.values():
        moments["step"] = torch.tensor(float(moments["step"]))
    loss = reference_step(state, tokens, labels)
    for moments in begun.values():
        moments["step"] = moments["step"].item()  # a number is not compared: see `on_lists`
    return loss


def on_lists(state, lr=LR):
    """Return torch's default AdamW with the moments of `state` and step counts on the CPU."""
    optimizer = torch.optim.AdamW(state.model.parameters(), lr, BETAS, EPS, DECAY, foreach=True)
    for p, moments in state.optimizer.state.items():
        optimizer.state[p] = {**moments, "step": moments["step"].cpu().clone()}
    return optimizer


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
    optimizer = on_lists(state)
    yield lambda: step(state, optimizer, tokens, labels)


def compiled(state, tokens, labels):
    optimizer = on_lists(state)
    yield lambda: step(state, optimizer, tokens, labels, compiled_loss())


def fused(state, tokens, labels):
    return step(state, state.optimizer, tokens, labels, compiled_loss())


def captured(state, tokens, labels):
    yield capture(lambda: step(state, state.optimizer, tokens, labels, compiled_loss()))


def exact_product(x, x_scale, w, w_scale):
    """Return `product`, with partial sums added in fp32, as libraries do in the backward pass."""
    return torch._scaled_mm(
        x, w.t(), x_scale, w_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=False
    )


class Fp8Linear(torch.autograd.Function):
    """A linear layer whose three products are e4m3, with one scale per tensor from its maximum.

    The summed dimension must be contiguous in both operands, so the backward pass transposes.
    """

    @staticmethod
    def forward(ctx, x, w):
        (rows, x_scale), (weights, w_scale) = tensorwise(x), tensorwise(w)
        ctx.save_for_backward(rows, x_scale, weights, w_scale)
        return product(rows, x_scale, weights, w_scale)

    @staticmethod
    def backward(ctx, dy):
        rows, x_scale, weights, w_scale = ctx.saved_tensors
        gradients, scale = tensorwise(dy)
        dx = exact_product(gradients, scale, weights.t().contiguous(), w_scale)
        dw = exact_product(gradients.t().contiguous(), scale, rows.t().contiguous(), x_scale)
        return dx, dw


def fp8_linear(layer, x):
    return Fp8Linear.apply(x.flatten(0, -2), layer.weight).unflatten(0, x.shape[:-1])


def fp8_block(block, x, cos, sin):
    """Return what `Block.forward` returns, with all linear layers in FP8."""
    qkv = fp8_linear(block.qkv, normalized(x, block.attention_norm)).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in qkv)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + fp8_linear(block.out, y.transpose(1, 2).flatten(2))
    y = normalized(x, block.mlp_norm)
    gated = F.silu(fp8_linear(block.gate, y)) * fp8_linear(block.up, y)
    return x + fp8_linear(block.down, gated)


@functools.cache
def compiled_fp8_loss(device):
    # Compiling takes a CPU many seconds, so only the graphs of both passes are made there.
    backend = "inductor" if device == "cuda" else "aot_eager"
    loss_of = functools.partial(Transformer.forward, block=fp8_block)
    return torch.compile(loss_of, dynamic=False, backend=backend)


def fp8(state, tokens, labels):
    loss_of = compiled_fp8_loss(tokens.device.type)
    yield capture(lambda: step(state, state.optimizer, tokens, labels, loss_of))


def products(width, tokens, length):
    """Return the cost of a block's products and attention, forward and backward."""
    return (
        decoder_costs.linear_forward(width, tokens, 2, "bf16")
        + decoder_costs.linear_backward(width, tokens, 2, "bf16")
        + decoder_costs.attention_forward(width, tokens, length, 2, "bf16")
        + decoder_costs.attention_backward(width, tokens, length, 2, "bf16")
    )


FUSED = 8 + 21 + 18  # passes of a block when each chain is one kernel (ch13/train_step_test.py)


AT_ONCE = 320 << 16  # numbers that one launch of an operation on lists covers at most


def update_by_lists(layers, width):
    """Return the cost of AdamW on lists, which is 7 operations.

    For each weight, the operations read 11 numbers and write 7. For each of a block's 7 matrices
    and vectors, the host increments the step count, reads it twice, and creates a result.
    """
    weights = weights_of(layers, width) + VOCABULARY * width
    return Cost(
        read=22 * weights,
        write=14 * weights,
        launches=7 * -(-weights // AT_ONCE),
        host_steps=4 * (7 * layers + 3),
    )


def update_launches(layers, width):
    """Return the launches of the fused update: one for the steps, then the others."""
    return 1 + -(-(weights_of(layers, width) + VOCABULARY * width) // AT_ONCE)


def update_at_once(layers, width):
    weights = weights_of(layers, width) + VOCABULARY * width
    launches = update_launches(layers, width)
    return Cost(read=8 * weights, write=6 * weights, launches=launches)


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
    return 31 * layers + 20  # when compiled: 20 for products and attention, 11 for chains


def eager_cost(layers, width, rows, length):
    return eager_model(layers, width, rows, length) + update_by_lists(layers, width)


def compiled_cost(layers, width, rows, length):
    model = compiled_model(layers, width, rows, length, launches=kernels_of(layers))
    return model + update_by_lists(layers, width)


def fused_cost(layers, width, rows, length):
    model = compiled_model(layers, width, rows, length, launches=kernels_of(layers))
    return model + update_at_once(layers, width)


def captured_cost(layers, width, rows, length):
    nodes = kernels_of(layers) + update_launches(layers, width)
    model = compiled_model(layers, width, rows, length, launches=1, graph_nodes=nodes)
    return model + without_launches(update_at_once(layers, width))


def fp8_products(width, tokens, length):
    """Return `products` with linear layers in FP8.

    Quantizing reads each bf16 element twice, once for the maximum, and writes one byte. A copy
    transposes this byte. The backward pass adds partial sums on the CUDA cores every 128 terms.
    """
    weights, hidden = decoder_costs.matrices(width), hidden_of(width)
    inputs, outputs = tokens * (4 * width + hidden), tokens * (5 * width + 2 * hidden)
    quantized = weights + inputs - tokens * width + outputs  # gate and up share an input
    there = {"fp8": 2 * tokens * weights}
    back = {"fp8": 4 * tokens * weights, "fp32": 4 * tokens * weights / 128}
    return (
        Cost(read=5 * quantized, write=2 * quantized)
        + Cost(read=weights + inputs, write=2 * outputs, ops=there)
        + Cost(read=weights + inputs + 2 * outputs, write=2 * (weights + inputs), ops=back)
        + decoder_costs.attention_forward(width, tokens, length, 2, "bf16")
        + decoder_costs.attention_backward(width, tokens, length, 2, "bf16")
    )


QUANTIZING = 14 * 4  # kernels of a block: 5 weights, 4 inputs and 5 gradients take four each


def fp8_cost(layers, width, rows, length):
    tokens = rows * length
    moved = FUSED * tokens * width  # half of the bytes
    block = fp8_products(width, tokens, length) + Cost(read=moved, write=moved)
    model = without_launches(layers * block + decoder_costs.ends(width, tokens))
    nodes = kernels_of(layers) + layers * QUANTIZING + update_launches(layers, width)
    starts = Cost(launches=1, graph_nodes=nodes)
    return model + starts + without_launches(update_at_once(layers, width))


def work(layers, width, rows, length):
    return Work(
        read=8 * weights_of(layers, width),
        write=6 * weights_of(layers, width),
        flops={"bf16": flops_of(layers, width, length, rows * length)},
        roundings=8 * layers + 8,
    )


def fp8_work(layers, width, rows, length):
    """Return `work` with the products of the blocks' linear layers in FP8."""
    whole, tokens = work(layers, width, rows, length), rows * length
    linear = 6 * tokens * layers * decoder_costs.matrices(width)
    return replace(whole, flops={"fp8": linear, "bf16": whole.flops["bf16"] - linear})


WIDE = {"layers": 1, "width": 4096, "rows": 4, "length": 1024}
LARGE = {"layers": 4, "width": 1024, "rows": 4, "length": 1024}
SMALL = {"layers": 4, "width": 768, "rows": 4, "length": 512}
# The small checks use a model without blocks, because compiling a block takes seconds on a CPU.
# `train_step` in chapter 13 checks the same model with one block.
NO_BLOCK = {"layers": 0, "width": 64, "rows": 2, "length": 17}
ONE_BLOCK = {**NO_BLOCK, "layers": 1}
rung = functools.partial(
    compare,
    state=state,
    inputs=inputs,
    reference=reference,
    check_sizes=[NO_BLOCK],
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
    optimized=[Variant(fused, at_least="neutral")],
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
    sizes=[WIDE],
    check_sizes=[{**ONE_BLOCK, "length": 16}],  # the products need multiples of 16 tokens
    baseline=captured,
    optimized=[Variant(fp8, precision="fp8", needs="fp8")],
    work=fp8_work,
    costs={captured: captured_cost, fp8: fp8_cost},
)
def test_training_ladder_fp8(pair):
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
    """With both optimizers, the loss falls as in float64, except for rounding."""

    STEPS = 200
    ALLOWED = 0.05  # of the first loss

    @pytest.fixture(autouse=True)
    def one_thread(self):
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # operations this small are slower on several threads
        yield
        torch.set_num_threads(before)

    def curve(self, begun, optimizer_of, tokens, labels):
        run = copy.deepcopy(begun)
        optimizer = optimizer_of(run)
        return torch.stack([step(run, optimizer, tokens, labels) for _ in range(self.STEPS)])

    def test_curves_of_200_steps_agree(self):
        tokens, _ = inputs("cpu", **ONE_BLOCK)
        labels = (tokens * 5 + 3) % VOCABULARY  # so there is something to learn
        begun = state("cpu", **ONE_BLOCK)
        exact = copy.deepcopy(begun)
        right = torch.stack([reference_step(exact, tokens, labels) for _ in range(self.STEPS)])
        assert right[-1] < right[0] / 2

        def off(optimizer_of):
            curve = self.curve(begun, optimizer_of, tokens, labels).double()
            return ((curve - right).abs().max() / right[0]).item()

        assert off(on_lists) < self.ALLOWED
        assert off(lambda run: run.optimizer) < self.ALLOWED
        assert off(lambda run: on_lists(run, lr=1.25 * LR)) > self.ALLOWED
