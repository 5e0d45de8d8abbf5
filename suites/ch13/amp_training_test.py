"""Training in lower precision: products in TF32, bf16 or fp16, but weights and updates in fp32.

Problem    Take one AdamW step of 2 decoder blocks of width 1024 on 4 x 1024 tokens. Weights,
           gradients and moments are fp32 on every side. A step returns the loss.
Baseline   fp32: TF32 is off, which is torch's default. Matrix products run on the CUDA cores.
Optimized  tf32: changes `fp32`. TF32 is on: tensor cores round the fp32 operands to 11 significant
           bits. Compare bf16 and fp16 with tf32, because few people train without TF32.
           bf16: changes `fp32`. The step runs under autocast: weights are cast when they are used,
           and matrix products return bf16.
           fp16: changes `fp32`. The step runs under autocast with a `GradScaler`, because gradients
           of a mean loss are too small for fp16. The loss is multiplied by 2^16, and the fp32
           gradients are divided by 2^16 before the update.
Bound      In theory, tensor cores are the limit. Outside the matrix products, `bf16` moves about as
           many bytes as fp32. The residual stream and the norms stay fp32, and the fp32 cosines of
           the rotary embedding make q and k fp32. So the casts add about as much traffic as the
           smaller operands save.
Seen       tf32, bf16 and fp16 are slower than predicted. In fp32 and tf32, attention runs in a
           kernel made for Ampere, which multiplies in fp32 whether TF32 is on or off. We did not
           measure the rate of that kernel. In long_attention_test.py, flash reaches only a share of
           the peak. The same share in bf16 would explain about a fifth of the extra time of bf16.
           We cannot explain the rest.
Use when   You train on a GPU with tensor cores. bf16 autocast needs no scaler. Use fp16 only on
           GPUs without bf16.

The check compares loss, gradients, moments and weights with a float64 reference: after 1 step,
after 3 steps, and after a timed window of up to 16 steps. The error must be no larger than rounding
in the declared type can cause.
"""

import contextlib

import torch

from pytest_aisp import Conditions, Cost, Variant, Work, compare

from . import decoder_costs
from .transformer import (
    VOCABULARY,
    batch,
    flops_of,
    hidden_of,
    reference_step,
    training,
    weights_of,
)


def state(device, layers, width, rows, length):
    return training(device, layers, width, length, torch.float32)


def inputs(device, layers, width, rows, length):
    return batch(device, rows, length)


def reference(state, tokens, labels):
    return reference_step(state, tokens, labels)


@contextlib.contextmanager
def products_in(precision):
    matmul = torch.backends.cuda.matmul  # this flag applies to the whole process, so restore it
    before, matmul.fp32_precision = matmul.fp32_precision, precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def step(state, tokens, labels):
    state.optimizer.zero_grad()
    loss = state.model(tokens, labels)
    loss.backward()
    state.optimizer.step()
    return loss.detach()


def fp32(state, tokens, labels):
    with products_in("ieee"):
        return step(state, tokens, labels)


def tf32(state, tokens, labels):
    with products_in("tf32"):
        return step(state, tokens, labels)


def bf16(state, tokens, labels):
    state.optimizer.zero_grad()
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss = state.model(tokens, labels)
    loss.backward()
    state.optimizer.step()
    return loss.detach()


def fp16(state, tokens, labels):
    # The scale starts at 2^16. It must not grow, however many steps are timed.
    scaler = torch.amp.GradScaler(tokens.device.type, growth_interval=1 << 30)

    def scaled():
        state.optimizer.zero_grad()
        with torch.autocast(tokens.device.type, torch.float16):
            loss = state.model(tokens, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(state.optimizer)
        scaler.step(state.optimizer)
        scaler.update()
        return loss.detach()

    yield scaled


def adamw(layers, width):
    """Return the cost of fused AdamW: 28 bytes per weight."""
    weights = weights_of(layers, width) + VOCABULARY * width
    return Cost(read=16 * weights, write=12 * weights, launches=3)


def full_precision(products):
    """Return a function that takes the size and returns the cost of a step with fp32 attention.

    Args:
        products: the type of the other matrix products.
    """

    def cost(layers, width, rows, length):
        tokens = rows * length
        block = (
            decoder_costs.linear_forward(width, tokens, 4, products)
            + decoder_costs.linear_backward(width, tokens, 4, products)
            + decoder_costs.attention_forward(width, tokens, length, 4, "fp32")
            + decoder_costs.attention_backward(width, tokens, length, 4, "fp32")
            + decoder_costs.pointwise_forward(width, tokens, 4)
            + decoder_costs.pointwise_backward(width, tokens, 4)
        )
        ends = decoder_costs.ends(width, tokens, 4, products)
        return layers * block + ends + adamw(layers, width)

    return cost


def mixed_precision(arithmetic):
    """Return a function that computes the cost of a step under autocast to `arithmetic`."""

    def cost(layers, width, rows, length):
        tokens, unit, hidden = rows * length, 4 * rows * length * width, hidden_of(width) / width
        weights = decoder_costs.matrices(width)
        # Terms, in order: norms, casts, rotation with casts, copy of the heads, sums, SwiGLU.
        forward = Cost(
            read=(2 + 3 + 10 + 0.5 + 3 + 1.5 * hidden) * unit + 4 * weights,
            write=(2 + 1.5 + 9 + 0.5 + 2 + hidden) * unit + 2 * weights,
            launches=2 + 3 + 16 + 1 + 2 + 2 + 5,
        )
        # Sums, casts and a gradient sum, norms, rotation, concatenation of q, k, v, SwiGLU.
        backward = Cost(
            read=(4 + 5.5 + 8 + 13 + 1.5 + 3 * hidden) * unit + 2 * weights,
            write=(2 + 5 + 2 + 11 + 1.5 + 1.5 * hidden) * unit + 4 * weights,
            launches=2 + 6 + 4 + 26 + 1 + 3 + 5,
        )
        block = (
            decoder_costs.linear_forward(width, tokens, 2, arithmetic)
            + decoder_costs.linear_backward(width, tokens, 2, arithmetic)
            + decoder_costs.attention_forward(width, tokens, length, 2, arithmetic)
            + decoder_costs.attention_backward(width, tokens, length, 2, arithmetic)
            + forward
            + backward
        )
        ends = decoder_costs.ends(width, tokens, 4, arithmetic)
        return layers * block + ends + adamw(layers, width)

    return cost


def with_scaler(layers, width, rows, length):
    """Return the cost of a step under fp16 autocast, plus dividing all gradients by the scale."""
    weights = weights_of(layers, width) + VOCABULARY * width
    divided = Cost(read=4 * weights, write=4 * weights, launches=10)
    return mixed_precision("fp16")(layers, width, rows, length) + divided


@compare(
    baseline=fp32,
    optimized=[
        Variant(tf32, precision="tf32", at_least={"sm90": 2.3}),
        Variant(bf16, precision="bf16", at_least={"sm90": 4.6}),
        Variant(fp16, precision="fp16", at_least={"sm90": 4.4}),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 2, "width": 1024, "rows": 4, "length": 1024}],
    check_sizes=[{"layers": 1, "width": 64, "rows": 5, "length": 33}],
    work=lambda layers, width, rows, length: Work(
        read=16 * weights_of(layers, width),
        write=16 * weights_of(layers, width),
        # the fastest type of any variant: no variant can exceed its peak rate
        flops={"bf16": flops_of(layers, width, length, rows * length)},
        roundings=8 * layers + 8,
    ),
    bound="tensor",
    costs={
        fp32: full_precision("fp32"),
        tf32: full_precision("tf32"),
        bf16: mixed_precision("bf16"),
        fp16: with_scaler,
    },
    conditions=Conditions(owns=["tf32"]),
)
def test_amp_training(pair):
    pair.assert_equivalent()
    if pair.variant == "bf16":
        pair.assert_energy(at_most=0.35)
    pair.assert_speedup()
