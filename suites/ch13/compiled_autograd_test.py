"""Compiled autograd: compile the backward pass of an eager forward pass.

Problem    Run the backward pass of `layers` pre-norm SwiGLU layers of width 1024 for 16384 tokens
           in bf16: compute the gradients of x and all weights from a given gradient of the output.
           The forward pass is eager on both sides, as in a model that Dynamo cannot trace because
           of data-dependent control flow or custom operators.
Baseline   eager: autograd runs one node at a time, as PyTorch does by default.
Optimized  compiled_backward: changes `eager`. `torch._dynamo.config.compiled_autograd` is on, so
           the first backward pass traces the autograd graph and compiles it.
Bound      Tensor cores limit the matrix products, which are the same on both sides. DRAM limits the
           other kernels. After compilation, the backward pass of SwiGLU is one kernel, and the
           backward pass of the norm and the sums is two kernels.
Use when   Dynamo cannot trace the forward pass. If Dynamo can trace it, compile the whole step
           instead.
"""

import functools

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Work, compare

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

    with torch._dynamo.config.patch(compiled_autograd=True):  # read by torch.compile
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


def forward_cost(width, tokens):
    hidden = hidden_of(width)
    products = Cost(
        read=2 * (3 * hidden * width + tokens * (2 * width + hidden)),
        write=2 * tokens * (2 * hidden + width),
        ops={"bf16": 6 * tokens * width * hidden},
        launches=3,
    )
    pointwise = Cost(  # norm, silu, product, sum
        read=2 * tokens * (3 * width + 3 * hidden),
        write=2 * tokens * (2 * width + 2 * hidden),
        launches=4,
    )
    return products + pointwise


def backward_products(width, tokens):
    hidden = hidden_of(width)
    return Cost(
        read=2 * (3 * hidden * width + tokens * (4 * width + 5 * hidden)),
        write=2 * (3 * hidden * width + tokens * (2 * width + hidden)),
        ops={"bf16": 12 * tokens * width * hidden},
        launches=6,
    )


def eager_cost(layers, width, tokens):
    hidden, weights = hidden_of(width), 3 * layers * width * hidden_of(width)
    pointwise = Cost(  # gate * up (2), silu, sums of gradients (2), norm (2)
        read=2 * tokens * (8 * width + 6 * hidden),
        write=2 * tokens * (3 * width + 3 * hidden),
        launches=7,
    )
    stacked = Cost(read=2 * weights, write=2 * weights, launches=4)  # stack gradients
    layer = forward_cost(width, tokens) + backward_products(width, tokens) + pointwise
    return layers * layer + stacked


def compiled_cost(layers, width, tokens):
    hidden, weights = hidden_of(width), 3 * layers * width * hidden_of(width)
    swiglu = Cost(read=8 * tokens * hidden, write=4 * tokens * hidden, launches=1)
    norm = Cost(read=8 * tokens * width, write=2 * tokens * width, launches=1)
    norm += Cost(read=6 * tokens * width, launches=1)  # the gradient of the norm's weight
    stacked = Cost(read=2 * weights, write=2 * weights, launches=4)
    layer = forward_cost(width, tokens) + backward_products(width, tokens) + swiglu + norm
    return layers * layer + stacked


@compare(
    baseline=eager,
    optimized=[compiled_backward],
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 4, "width": 1024, "tokens": 16384}],
    check_sizes=[{"layers": 1, "width": 64, "tokens": 33}],  # a CPU takes 10 s per layer
    work=work,
    bound="dram",
    costs={eager: eager_cost, compiled_backward: compiled_cost},
    at_least={"sm90": 1.05},
)
def test_compiled_autograd(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
