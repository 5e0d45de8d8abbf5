"""Pointwise chain: one kernel instead of eight, in Triton, in CUDA C++ or from the compiler.

Problem    Compute GELU of n fp32 elements in the tanh approximation:
           x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
Baseline   eager: the formula in torch, as in GPT-2's code. Each of its eight kernels reads its
           operands from DRAM and writes its result to DRAM.
Optimized  compiled: changes `eager`. `torch.compile` compiles the same formula.
           in_triton: changes `eager`. One hand-written Triton kernel computes the formula.
           in_cuda: changes `eager`. One CUDA C++ kernel with 16-byte accesses computes the formula.
           library: `torch.nn.functional.gelu`.
           The hand-written kernels use tanh(u) = 1 - 2 / (1 + exp(2 u)), so that GELU becomes x /
           (1 + exp(-2 u)). All four variants make the same number of passes over the data.
Bound      DRAM. A fused kernel reads and writes each element once. `eager` makes 18 passes. In the
           fused kernels, the arithmetic takes less time than the memory traffic.
Use when   Several pointwise operations follow one another on data larger than the L2. Try the
           compiler first, because no hand-written kernel can move fewer bytes. Write a kernel if
           the compiler cannot be used, or if the chain ends in an operation that the compiler does
           not fuse. `../ch01/compiled_test.py` has a chain with several operands.
"""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("pointwise.cu")
ROOT = 0.7978845608028654  # sqrt(2 / pi)
CUBIC = 0.044715
TILE = 1024  # elements per program
THREADS = 256


@triton.jit
def gelu_kernel(x, out, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.load(x + at, mask=at < n)
    u = 0.7978845608028654 * (value + 0.044715 * value * value * value)
    tl.store(out + at, value / (1 + tl.exp(-2 * u)), mask=at < n)


def inputs(device, n):
    return (torch.randn(n, device=device),)


def formula(x):
    return 0.5 * x * (1.0 + torch.tanh(ROOT * (x + CUBIC * torch.pow(x, 3))))


def reference(x):
    return formula(x.double())


def eager(x):
    return formula(x)


@functools.cache
def compiled_formula():
    return torch.compile(formula, dynamic=False)


def compiled(x):
    return compiled_formula()(x)


def in_triton(x):
    out = torch.empty_like(x)
    gelu_kernel[(triton.cdiv(x.numel(), TILE),)](x, out, x.numel(), TILE=TILE, num_warps=8)
    return out


def in_cuda(x):
    out = torch.empty_like(x)
    kernels.gelu[-(-x.numel() // (4 * THREADS)), THREADS](x, out, x.numel())
    return out


def library(x):
    return F.gelu(x, approximate="tanh")


def pass_over(n, operands):
    """Return the cost of one of torch's kernels, which reads `operands` arrays and writes one."""
    return Cost(read=4 * operands * n, write=4 * n, launches=1)


def fused(n):
    """Return the cost of one fused kernel, with about 12 instructions per element."""
    return Cost(read=4 * n, write=4 * n, sfu=2 * n, ops={"fp32": 24 * n}, launches=1)


@compare(
    baseline=eager,
    optimized=[
        Variant(compiled, at_least={"sm90": 7.6}),
        in_triton,
        Variant(in_cuda, sass=("LDG.128", "STG.128")),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**28}],
    # A block of in_cuda has 1024 elements. The last 1 to 3 elements do not fill a vector.
    check_sizes=[{"n": 1023}, {"n": 2050}],
    cpu_sizes=[{"n": 2**20}],
    # Near x = -3, the sum 1 + tanh(u) loses digits. The tolerance includes this error, because it
    # is traced from the reference, which computes the same sum.
    work=lambda n: Work(read=4 * n, write=4 * n, roundings=4),
    bound="dram",
    costs={
        eager: lambda n: 6 * pass_over(n, operands=1) + 2 * pass_over(n, operands=2),
        **dict.fromkeys([compiled, in_triton, in_cuda, library], fused),
    },
)
def test_pointwise(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
