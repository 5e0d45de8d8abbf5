"""Regional compilation: compile one block of a model once, instead of the whole model.

Problem    Run the first pass of a new process through `blocks` identical fp32 pre-norm SwiGLU
           blocks, including compilation.
Baseline   whole: `torch.compile` of the model. Dynamo unrolls the loop over the blocks, so all
           blocks are in one graph.
Optimized  regional: changes `whole`. `torch.compile` compiles one block. All blocks have the same
           code and shapes, so all use the code that is compiled for the first block.
           eager: like `whole`, but not compiled.
Bound      The compiler, on the host. We cannot predict how long compilation takes, so the costs
           count only the kernels. Both compiled sides take far longer than predicted. `whole`
           traces all blocks and generates code for them. `regional` does so for one block only. On
           both sides, identical kernels are compiled only once. Both times include importing the
           compiler, and both sides start with empty Inductor and Triton caches.
Seen       On an H200, `whole` compiles eight blocks and takes only half again as long as
           `regional`, which compiles one. So most of the time of `whole` does not grow with the
           number of blocks. We did not time the parts. The time of `whole` differs by a fifth
           between its two results, so this ratio is rough. `eager` takes less than a fiftieth of
           the time of `whole`, but still hundreds of times as long as predicted. A first pass also
           loads kernels and initializes cuBLAS. The costs leave this out, and we did not time it.
Use when   A model repeats a block and start-up time matters, as in a server that scales out, a
           debugging session or a test. `train_step_test.py` in chapter 13 shows the cost in later
           passes: nothing is fused across blocks, and the host checks guards once per block. A disk
           cache of compiled code makes the second start of both sides faster, but not the first.
"""

import contextlib
from importlib import import_module

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare, fresh_process


def inputs(device, blocks, rows, width):
    x = torch.randn(rows, width, device=device)
    norms = torch.rand(blocks, width, device=device) + 0.5
    ups = torch.randn(blocks, width, 4 * width, device=device) * width**-0.5
    downs = torch.randn(blocks, 2 * width, width, device=device) * (2 * width) ** -0.5
    return x, norms, ups, downs


def one_block(x, norm, up, down):
    gate, value = (F.rms_norm(x, x.shape[-1:], norm, eps=1e-5) @ up).chunk(2, dim=-1)
    return x + (F.silu(gate) * value) @ down


def all_blocks(x, norms, ups, downs, block=one_block):
    layers = zip(norms.unbind(0), ups.unbind(0), downs.unbind(0), strict=True)
    for norm, up, down in layers:
        x = block(x, norm, up, down)
    return x


def reference(*tensors):
    return all_blocks(*(tensor.double() for tensor in tensors))


def cold_caches(x):
    """Return a context with empty compiler caches. On a CPU, it does nothing."""
    if not x.is_cuda:
        return contextlib.nullcontext()
    return import_module("torch._inductor.utils").fresh_cache()


@fresh_process(warmup=0)
def whole(x, norms, ups, downs):
    with cold_caches(x):
        return torch.compile(all_blocks, dynamic=False)(x, norms, ups, downs)


@fresh_process(warmup=0)
def regional(x, norms, ups, downs):
    with cold_caches(x):
        block = torch.compile(one_block, dynamic=False)
        return all_blocks(x, norms, ups, downs, block)


@fresh_process(warmup=0)
def eager(x, norms, ups, downs):
    return all_blocks(x, norms, ups, downs)


def moved(blocks, rows, width):
    """Return the bytes of all weights."""
    return 4 * blocks * (6 * width**2 + width)


def first_pass(blocks, rows, width, launches):
    """Return the cost of running all blocks. Activations between blocks stay in the L2."""
    ops = {"fp32": 12 * blocks * rows * width**2}
    activations = 4 * rows * width
    read = moved(blocks, rows, width) + activations
    return Cost(read=read, write=activations, ops=ops, launches=launches * blocks)


@compare(
    baseline=whole,
    optimized=[
        Variant(regional, at_least={"sm90": 1.2}),
        Variant(eager, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"blocks": 8, "rows": 64, "width": 1024}],
    check_sizes=[{"blocks": 2, "rows": 5, "width": 40}],
    work=lambda blocks, rows, width: Work(
        read=moved(blocks, rows, width),
        flops={"fp32": 12 * blocks * rows * width**2},
        terms=2 * width,
        roundings=8 * blocks,
    ),
    bound="host",
    costs={
        # Norm, matrix product, SwiGLU, a copy of x, and an addmm, which adds to the copy. On both
        # sides, Inductor turns the residual sum into this addmm. So whole does not fuse across
        # blocks either.
        **dict.fromkeys([whole, regional], lambda **size: first_pass(**size, launches=5)),
        # Norm, matrix product, silu, gate times value, matrix product, sum
        eager: lambda **size: first_pass(**size, launches=6),
    },
)
def test_regional(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
