"""Compiled autograd: compile a backward whose forward stays as it is.

Problem    Gradients of `layers` pre-norm SwiGLU layers of width 1024 for 16384 tokens in bf16, by x
           and all weights, the gradient of the output given. The forward is eager on both sides, as
           it is where Dynamo cannot follow it: control flow on data, a library's own operators.
Baseline   eager: autograd runs a node at a time, as PyTorch does by default.
Optimized  compiled_backward: `torch._dynamo.config.compiled_autograd`: the graph that the engine
           would run, accumulation included, is traced at the first backward and compiled.
Bound      DRAM, for what is no product. In units of (tokens, width) of bf16, 33.6 MB, with hidden
           width 8/3: the backward of SwiGLU in eager kernels reads and writes silu, its gradient
           and two products, 29 units a layer, in one kernel 13; norm and sum 9, fused 6. 19 units
           are saved, 0.15 ms a layer at 4.24 TB/s. Forward and backward products, 0.82 TFLOP a
           layer, are 1.1 ms at 750 TFLOP/s, the eager forward moves 24 units, 0.19 ms, what is left
           of the backward 19, 0.15: 1.59 / 1.44 = 1.1x. Guards of every backward cost the host some
           0.1 ms.
Seen       An H200: 7.07 and 6.38 ms, 1.11x, as predicted.
"""

import functools

import torch
from torch.nn import functional as F

from pytest_aisp import Work, compare

from .transformer import hidden_of, normalized


def inputs(device, layers, width, tokens):
    hidden = hidden_of(width)
    x, gradient = torch.randn(2, tokens, width, device=device, dtype=torch.bfloat16)
    norms = torch.rand(layers, width, device=device) + 0.5
    gates, ups = torch.randn(2, layers, hidden, width, device=device) * width**-0.5
    downs = torch.randn(layers, width, hidden, device=device) * hidden**-0.5
    return x, gradient, *(w.bfloat16() for w in (norms, gates, ups, downs))


def stack(x, norms, gates, ups, downs):
    for norm, gate, up, down in zip(norms, gates, ups, downs, strict=True):
        y = normalized(x, norm)
        x = x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
    return x


def gradients(x, gradient, *weights, backward):
    leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    backward(stack(*leaves), gradient)
    return tuple(leaf.grad for leaf in leaves)


def reference(x, gradient, *weights):
    leaves = [t.double().requires_grad_() for t in (x, *weights)]
    return torch.autograd.grad(stack(*leaves), leaves, gradient.double())


def eager(x, gradient, *weights):
    return gradients(x, gradient, *weights, backward=torch.Tensor.backward)


@functools.cache
def compiled():
    def backward(y, gradient):
        y.backward(gradient)

    with torch._dynamo.config.patch(compiled_autograd=True):  # read when it is wrapped
        return torch.compile(backward, dynamic=False)


def compiled_backward(x, gradient, *weights):
    return gradients(x, gradient, *weights, backward=compiled())


def work(layers, width, tokens):
    weights = 3 * layers * width * hidden_of(width)
    return Work(
        read=2 * (3 * weights + 2 * tokens * width),
        write=2 * (weights + tokens * width),
        flops={"bf16": 6 * tokens * weights},
        terms=max(tokens, hidden_of(width)),
        roundings=6 * layers,
    )


@compare(
    baseline=eager,
    optimized=[compiled_backward],
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 4, "width": 1024, "tokens": 16384}],
    check_sizes=[{"layers": 1, "width": 64, "tokens": 33}],  # a CPU compiles 10 s a layer
    work=work,
    bound="dram",
    at_least={"sm90": 1.05},
)
def test_compiled_autograd(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
