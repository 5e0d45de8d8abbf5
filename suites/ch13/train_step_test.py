"""A training step: compile it if memory traffic is the limit. Capture it if launches are the limit.

Problem    Take one AdamW step of a decoder of 2 or 4 blocks (RMS norm, rotary attention, SwiGLU) on
           `rows` sequences of `length` tokens. Weights, gradients and moments are bf16. Every side
           uses torch's fused AdamW kernel.
Baseline   eager: runs one operation after another. Attention and RMS norm are one kernel each.
           Rotation, SwiGLU and the residual sums are several kernels each.
Optimized  compiled: changes `eager`. `torch.compile` compiles the whole model, including the loss.
           regional: changes `eager`. `torch.compile` compiles one block. The compiled code is used
           for all blocks. Embedding and loss stay eager.
           captured: changes `eager`. The whole step is captured as one CUDA graph.
Bound      In the large model, tensor cores limit the matrix products, and DRAM limits the passes
           over activations. Compiling saves about half of those passes. Embedding and loss are
           small, so `regional` saves nearly as much as `compiled`. In the small model, kernel
           launches by the host are the limit. `captured` makes one launch, so the GPU limits it.
Seen       In the large model, all sides take longer than predicted. Attention is one reason:
           long_attention_test.py shows that PyTorch's flash attention is far below the rate of
           matrix products. We cannot explain the rest. In the small model, `eager` takes longer
           than its launches predict. The predicted time of a launch was measured with an in-place
           addition. We did not measure the host time that autograd and the optimizer add to each
           operation, so we cannot explain this. `captured` also takes longer than predicted. Nearly
           all of its predicted time is the starts of about 300 kernels. The predicted time of a
           start was measured with an addition to one number. The prediction also assumes that every
           kernel fills the GPU. But matrix products of 256 rows have tiles for only a few of the
           SMs, and the kernels of norms and attention have few blocks. We did not time the kernels
           one by one.
Use when   Passes over activations take a visible part of the step (compile), or the GPU waits for
           the host and shapes repeat (capture). The time of matrix products grows with the square
           of the width, but the time of the passes only grows with the width. So compiling helps
           less in wide models. Capturing does not help if the kernels take longer than their
           launches.
"""

import functools

import torch

from pytest_aisp import Cost, Variant, Work, capture, compare

from .transformer import (
    VOCABULARY,
    Block,
    Transformer,
    batch,
    flops_of,
    reference_step,
    training,
    weights_of,
)


def state(device, layers, width, rows, length):
    return training(device, layers, width, length)


def inputs(device, layers, width, rows, length):
    return batch(device, rows, length)


def step(state, tokens, labels, loss_of):
    state.optimizer.zero_grad()
    loss = loss_of(state.model, tokens, labels)
    loss.backward()
    state.optimizer.step()
    return loss.detach()


def reference(state, tokens, labels):
    return reference_step(state, tokens, labels)


def eager(state, tokens, labels):
    return step(state, tokens, labels, Transformer.forward)


@functools.cache
def compiled_model():
    return torch.compile(Transformer.forward, dynamic=False)


def compiled(state, tokens, labels):
    return step(state, tokens, labels, compiled_model())


@functools.cache
def compiled_block():
    return torch.compile(Block.forward, dynamic=False)


def regional(state, tokens, labels):
    forward = functools.partial(Transformer.forward, block=compiled_block())
    return step(state, tokens, labels, forward)


def captured(state, tokens, labels):
    yield capture(lambda: step(state, tokens, labels, Transformer.forward))


def work(layers, width, rows, length):
    weights = weights_of(layers, width)
    return Work(
        read=8 * weights,
        write=8 * weights,
        flops={"bf16": flops_of(layers, width, length, rows * length)},
        roundings=8 * layers + 8,
    )


def costs_of(layers, width, rows, length, launches, host_steps=0):
    """Return the cost of matrix products, attention, update and all launches of a step."""
    tokens, weights = rows * length, weights_of(layers, width)
    # Flash attention recomputes the scores in its backward pass: 7 products instead of 6.
    again = tokens * layers * width * length
    products = Cost(
        read=4 * weights,  # read in both passes
        write=2 * weights,  # gradients
        ops={"bf16": flops_of(layers, width, length, tokens) + again},
        launches=launches,
        host_steps=host_steps,
    )
    return products + Cost(read=8 * weights, write=6 * weights)


def passes(layers, width, rows, length, block, loss):
    """Return the cost of the passes over activations.

    Args:
        layers, width, rows, length: the size.
        block: passes per block. A pass reads or writes one (tokens, width) tensor in bf16.
        loss: bytes read and written per logit to compute the loss.
    """
    tokens = rows * length
    # Embedding and the last norm are about 10 passes, forward and backward together.
    moved = 2 * tokens * width * (block * layers + 10) + loss * tokens * VOCABULARY
    return Cost(read=moved / 2, write=moved / 2)


# Counted with a TorchDispatchMode. Views count as host steps. On a GPU, RMS norm and attention are
# one kernel each in the forward pass, and four each in the backward pass.
def eager_launches(layers):
    return {"launches": 72 * layers + 27, "host_steps": 75 * layers + 22}


# Passes per block: rotation 38, SwiGLU 37, sums and norms 26. If each is one kernel: 8, 21, 18.
CHAINS, FUSED = 38 + 37 + 26, 8 + 21 + 18


def eager_cost(**size):
    return costs_of(**size, **eager_launches(size["layers"])) + passes(
        **size, block=CHAINS, loss=32
    )


def compiled_cost(**size):
    return costs_of(**size, launches=31 * size["layers"] + 20) + passes(
        **size, block=FUSED, loss=12
    )


def regional_cost(**size):
    return costs_of(**size, launches=31 * size["layers"] + 27) + passes(
        **size, block=FUSED, loss=32
    )


# The activations of the small model stay in the L2.
def small_eager_cost(**size):
    return costs_of(**size, **eager_launches(size["layers"]))


# One replay starts the kernels of eager, one after another.
def captured_cost(**size):
    kernels = eager_launches(size["layers"])["launches"]
    return costs_of(**size, launches=1) + Cost(graph_nodes=kernels)


@compare(
    baseline=eager,
    optimized=[
        Variant(compiled, at_least={"sm90": 1.3}),
        Variant(regional, at_least={"sm90": 1.2}),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 2, "width": 512, "rows": 32, "length": 1024}],
    # Use only one block, because a CPU takes 5 s to compile each block.
    check_sizes=[{"layers": 1, "width": 64, "rows": 5, "length": 33}],
    work=work,
    bound="dram",
    costs={eager: eager_cost, compiled: compiled_cost, regional: regional_cost},
)
def test_train_step(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=eager,
    optimized=[Variant(captured, at_least={"sm90": 6.0})],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 4, "width": 256, "rows": 2, "length": 128}],
    check_sizes=[{"layers": 1, "width": 64, "rows": 5, "length": 33}],
    work=work,
    bound="launch",
    costs={eager: small_eager_cost, captured: captured_cost},
)
def test_train_step_as_a_graph(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_goodput(at_least=0.7)
