"""Activation checkpointing: pay for memory with a second forward.

Problem    Gradients of the mean loss of 8 decoder blocks of width 1024 (RMS norm, rotary attention,
           SwiGLU) for 8 x 1024 tokens, in bf16. AdamW steps are left out: they add no activation.
Baseline   stored: autograd keeps what each operation needs for its backward. In units of (tokens,
           width) of bf16, 16.8 MB here, a block keeps its input and the middle residual, both
           normalized (4), q, k, v in one product (3), q and k rotated (2), attention's output and
           a copy of it with the heads side by side (2), and of hidden width 8/3 gate, silu(gate),
           up and their product (10.6): 21.6 units.
Optimized  checkpointed: `torch.utils.checkpoint` around each block keeps its input, 1 unit, and
           computes the block again when its backward needs it (Chen et al., arXiv:1604.06174).
           selective: the same, but what products and attention return is kept: input, q k v,
           attention, its projection, gate, up and down are 12.3 units. Norms, rotation and SwiGLU
           are computed again, which costs traffic and no product.
Bound      Tensor cores, and memory is the point. When the last block's backward begins there are 8
           blocks, some 10 units of temporaries and 3 of the loss: stored 173 + 13 units, 3.1 GB;
           checkpointed 8 + 21.6 + 13, 0.72 GB, 0.23; selective 98 + 9 + 13, 2.0 GB, 0.65. The
           gradients of the weights, 0.2 GB, come while activations go. In time the second
           forward is a third more products: 5.4 TFLOP, 7.1 ms at 750 TFLOP/s, become 9.5: 0.75
           times at worst. selective computes again what moves some 30 units a block, 0.12 ms of
           the 1.3: 0.9 times.
Seen       An H200: 2.8 GiB stored, 0.22 of it checkpointed and 0.64 selective, as counted; of the
           activations checkpointing saves 78 %. Times 15.9 ms, 0.76x and 0.86x. As called selective
           takes 36 ms: its policy is Python at every operation.
"""

import functools

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pytest_aisp import Work, compare

from .transformer import Block, batch, flops_of, model_of, reference_gradients, weights_of

aten = torch.ops.aten
COSTLY = [
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def state(device, layers, width, rows, length):
    return model_of(device, layers, width, length)


def inputs(device, layers, width, rows, length):
    return batch(device, rows, length)


def reference(model, tokens, labels):
    return reference_gradients(model, tokens, labels)


def gradients(model, tokens, labels, block):
    model.zero_grad()
    loss = model(tokens, labels, block)
    loss.backward()
    return loss.detach()


def stored(model, tokens, labels):
    return gradients(model, tokens, labels, Block.forward)


def checkpointed(model, tokens, labels):
    # Nothing is drawn at random, so no generator's state need be kept.
    block = functools.partial(
        checkpoint, Block.forward, use_reentrant=False, preserve_rng_state=False
    )
    return gradients(model, tokens, labels, block)


def selective(model, tokens, labels):
    block = functools.partial(
        checkpoint,
        Block.forward,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, COSTLY),
    )
    return gradients(model, tokens, labels, block)


def work(layers, width, rows, length):
    weights = weights_of(layers, width)
    return Work(
        read=2 * weights,
        write=2 * weights,
        flops={"bf16": flops_of(layers, width, length, rows * length)},
        terms=max(width, rows * length),
        roundings=8 * layers + 8,
    )


against_stored = functools.partial(
    compare,
    baseline=stored,
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 8, "width": 1024, "rows": 8, "length": 1024}],
    check_sizes=[{"layers": 2, "width": 64, "rows": 5, "length": 33}],
    work=work,
    bound="tensor",
    at_least="yardstick",
)


@against_stored(optimized=[checkpointed])
def test_checkpointing(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=0.4)


@against_stored(optimized=[selective])
def test_selective_checkpointing(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=0.8)
