"""Pointwise operations: one generated kernel instead of six.

Problem    Compute residual + scale * (silu(gate + bias) * (up + shift)) in fp32. This is the gated
           activation, layer scale and residual of an MLP block. gate, up and residual are (rows,
           4096), and bias, shift and scale are (4096,).
Baseline   chain: eager torch, six kernels. Each kernel reads its operands from DRAM and writes its
           result to DRAM. In total, the kernels read or write a (rows, 4096) matrix 14 times.
Optimized  compiled: changes `chain`. With `torch.compile`, one kernel keeps intermediate results in
           registers, so a matrix is read or written only 4 times. The time does not include the
           compilation.
Bound      DRAM on both sides.
Use when   Several pointwise operations follow one another on arrays that do not fit in the L2.
           Compiling takes seconds per shape, so it pays only if each shape is used many times. A
           single operation gains nothing.
"""

import functools

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Work, compare

WIDTH = 4096


def inputs(device, rows):
    gate, up, residual = (torch.randn(rows, WIDTH, device=device) for _ in range(3))
    return gate, up, residual, *(torch.randn(WIDTH, device=device) for _ in range(3))


def chain(gate, up, residual, bias, shift, scale):
    return residual + scale * (F.silu(gate + bias) * (up + shift))


def reference(*tensors):
    return chain(*(tensor.double() for tensor in tensors))


@functools.cache
def compiled_chain():
    return torch.compile(chain, dynamic=False)  # compile a kernel for each size


def compiled(gate, up, residual, bias, shift, scale):
    return compiled_chain()(gate, up, residual, bias, shift, scale)


def pointwise(rows, operands):
    """Return the cost of a kernel that reads `operands` matrices and one row of 4096 elements."""
    matrix = 4 * rows * WIDTH
    return Cost(read=operands * matrix + 4 * WIDTH, write=matrix, launches=1)


@compare(
    baseline=chain,
    optimized=[compiled],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 16384}],
    check_sizes=[{"rows": 33}],
    cpu_sizes=[{"rows": 512}],
    work=lambda rows: Work(
        read=4 * (3 * rows + 3) * WIDTH,
        write=4 * rows * WIDTH,
        roundings=6,
    ),
    bound="dram",
    costs={
        chain: lambda rows: 4 * pointwise(rows, operands=1) + 2 * pointwise(rows, operands=2),
        compiled: lambda rows: Cost(
            read=4 * (3 * rows + 3) * WIDTH, write=4 * rows * WIDTH, launches=1
        ),
    },
    at_least={"sm90": 3.5, "cpu": 1.4},
)
def test_compiled(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
