"""A training step: compile what moves bytes, capture what launches.

Problem    One AdamW step of a decoder of 2 or 4 blocks (RMS norm, rotary attention, SwiGLU) on
           `rows` sequences of `length` tokens. Weights, gradients and moments are bf16, the update
           is the fused kernel of torch on every side.
Baseline   eager: an operation at a time. SDPA and RMS norm are one kernel each; rotation, SwiGLU
           and the sums are chains of kernels.
Optimized  compiled: `torch.compile` of the whole model, loss included.
           regional: `torch.compile` of one block, which all blocks share: compiled once, not once a
           block, so that a start is as short for 80 blocks as for 1. Embedding and loss are eager.
           captured: the eager step as one CUDA graph.
Bound      Large, DRAM: in units of (tokens, width) of bf16, 33.6 MB at 32 x 1024 tokens of width
           512, a block's rotations forward and backward move 38, SwiGLU 37, sums and norms 26; in
           one kernel each 8, 21 and 18. 54 units a block are saved, 0.86 ms for 2 blocks at
           4.24 TB/s. What remains is products, 1.2 TFLOP in 1.7 ms at 750 TFLOP/s, 0.2 TFLOP of
           attention in 0.5 ms, and 47 units a block, 0.75 ms: 3.8 / 2.9 = 1.3x, less where
           products of 512 terms do not reach 750. More blocks compile longer and change no ratio.
           Embedding and loss, with 17 MB of logits, are small: regional gains as much.
           Small, launch: 4 blocks; with 2 x 128 tokens of width 256 a step is some 28 launches a
           block forward and 50 backward, 350 in all at 5 us: 1.8 ms. In a graph they take 1.5 us or
           what they compute, some 2 us: 0.7 ms, 2.5x. Kernels then compute for most of the time,
           and for a quarter of it as called.
Seen       An H200: compiled 1.54x, 6.9 ms against 4.4; regional 1.41x. captured 9x to 13x: 0.80 ms
           as a graph, but 7.6 to 10.9 as called, not 1.8: 20 to 30 us an operation, of which a
           launch is 7 in those virtual machines and the rest Python and autograd. Kernels compute
           for 6 to 9 % of the time as called and for 85 % in the graph.
"""

import functools

import torch

from pytest_aisp import Variant, Work, capture, compare

from .transformer import Block, Transformer, batch, flops_of, reference_step, training, weights_of


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
        terms=max(width, rows * length),
        roundings=8 * layers + 8,
    )


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
    # One block: on a CPU a model takes 5 s to compile, and as long again for another block.
    check_sizes=[{"layers": 1, "width": 64, "rows": 5, "length": 33}],
    work=work,
    bound="dram",
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
)
def test_train_step_as_a_graph(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_goodput(at_least=0.7)
