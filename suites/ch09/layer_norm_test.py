"""Layer norm: with the row in registers, the variance needs no extra memory traffic.

Problem    Compute (x - mean) / sqrt(variance + eps) * weight + bias in fp32 for rows of 4096 fp16
           elements. Also return the mean and 1 / sqrt(variance + eps) of each row, because the
           backward pass needs them.
Baseline   chain: the formula in torch, which converts to fp32, computes the mean, the differences,
           their squares and the mean of the squares, then the root, the products and the sum, and
           converts to fp16.
Optimized  compiled: changes `chain`. `torch.compile` compiles the same formula.
           one_sweep: changes `chain`. One Triton kernel makes two passes over the row, in steps of
           2048. The first pass sums x and x^2, because variance = mean(x^2) - mean^2.
           in_registers: changes `one_sweep`. The row is loaded once and stays in registers. The
           variance is computed after the mean, as the mean of (x - mean)^2. Both Triton kernels
           load 16 bytes at a time, and their registers allow 6 programs per SM.
           library: `torch.native_layer_norm`, which `torch.nn.functional.layer_norm` calls.
Bound      DRAM for all fused sides: 2 bytes read and 2 written per element. The rows of all running
           programs add up to 6 MiB, so the second pass of `one_sweep` reads from the L2 and should
           take little time. `in_registers` has the loads of a whole row in flight at once.
           `one_sweep` has only the loads of half a row in flight.
Seen       `chain` and `library` take 1.5 times as long as their memory traffic alone. `compiled`
           takes about a quarter longer than its memory traffic. We did not time the kernels of
           these sides one by one. `one_sweep` and `in_registers` take as long as predicted.
Use when   A row fits in registers: load it once and compute the variance from differences. Sums of
           x and x^2 lose digits if the mean is much larger than the standard deviation. On this
           page, mean and standard deviation are about equal, and both formulas are accurate enough.
           For a row that does not fit in registers, use Welford's algorithm. See rms_norm_test.py
           for other row lengths, and norm_backward_test.py for the gradients.
"""

import functools

import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare

EPS = 1e-5
STEP = 2048


@triton.jit
def one_sweep_kernel(x, weight, bias, out, means, scales, n, eps, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    lanes = tl.arange(0, STEP)
    total = tl.zeros((STEP,), tl.float32)
    squares = tl.zeros((STEP,), tl.float32)
    for start in range(0, n, STEP):
        at = start + lanes
        value = tl.load(x + row + at, mask=at < n, other=0.0).to(tl.float32)
        total += value
        squares += value * value
    mean = tl.sum(total) / n
    scale = 1 / tl.sqrt(tl.sum(squares) / n - mean * mean + eps)
    tl.store(means + tl.program_id(0), mean)
    tl.store(scales + tl.program_id(0), scale)
    for start in range(0, n, STEP):
        at = start + lanes
        inside = at < n
        value = tl.load(x + row + at, mask=inside).to(tl.float32)
        factor = tl.load(weight + at, mask=inside).to(tl.float32)
        scaled = (value - mean) * scale * factor + tl.load(bias + at, mask=inside)
        tl.store(out + row + at, scaled.to(tl.float16), mask=inside)


@triton.jit
def in_registers_kernel(x, weight, bias, out, means, scales, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    lanes = tl.arange(0, BLOCK)
    inside = lanes < n
    value = tl.load(x + row + lanes, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value) / n
    value = tl.where(inside, value - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(value * value) / n + eps)
    tl.store(means + tl.program_id(0), mean)
    tl.store(scales + tl.program_id(0), scale)
    factor = tl.load(weight + lanes, mask=inside).to(tl.float32)
    scaled = value * scale * factor + tl.load(bias + lanes, mask=inside)
    tl.store(out + row + lanes, scaled.to(tl.float16), mask=inside)


def inputs(device, rows, n):
    shift = torch.randn(rows, 1, device=device)
    x = (torch.randn(rows, n, device=device) + shift).half()
    weight, bias = torch.randn(2, n, device=device).half()
    return x, weight, bias


def reference(x, weight, bias):
    x = x.double()
    mean = x.mean(dim=1, keepdim=True)
    rest = x - mean
    scale = torch.rsqrt((rest * rest).mean(dim=1, keepdim=True) + EPS)
    return rest * scale * weight.double() + bias.double(), mean, scale


def formula(x, weight, bias):
    wide = x.float()
    mean = wide.mean(dim=1, keepdim=True)
    rest = wide - mean
    scale = torch.rsqrt(rest.pow(2).mean(dim=1, keepdim=True) + EPS)
    return (rest * scale * weight + bias).to(x.dtype), mean, scale


def chain(x, weight, bias):
    return formula(x, weight, bias)


@functools.cache
def compiled_formula():
    return torch.compile(formula, dynamic=False)


def compiled(x, weight, bias):
    return compiled_formula()(x, weight, bias)


def launch(kernel, x, weight, bias, **sizes):
    rows, n = x.shape
    out = torch.empty_like(x)
    means, scales = (torch.empty(rows, 1, device=x.device) for _ in range(2))
    kernel[(rows,)](x, weight, bias, out, means, scales, n, EPS, **sizes, num_warps=8)
    return out, means, scales


def one_sweep(x, weight, bias):
    return launch(one_sweep_kernel, x, weight, bias, STEP=STEP)


def in_registers(x, weight, bias):
    block = triton.next_power_of_2(x.shape[1])
    return launch(in_registers_kernel, x, weight, bias, BLOCK=block)


def library(x, weight, bias):
    return torch.native_layer_norm(x, x.shape[1:], weight, bias, EPS)


def per_element(rows, n, read, write):
    """Return the cost of one of torch's kernels that moves these bytes per element."""
    return Cost(read=read * rows * n, write=write * rows * n, launches=1)


def chain_cost(rows, n):
    return (
        per_element(rows, n, read=2, write=4)  # to fp32
        + per_element(rows, n, read=4, write=4 / n)  # mean
        + 2 * per_element(rows, n, read=4, write=4)  # difference, square
        + per_element(rows, n, read=4, write=4 / n)  # variance
        + 2 * Cost(read=4 * rows, write=4 * rows, launches=1)  # eps, root
        + 3 * per_element(rows, n, read=4, write=4)  # times root, times weight, plus bias
        + per_element(rows, n, read=4, write=2)  # to fp16
    )


def one_kernel(rows, n):
    return Cost(read=2 * rows * n + 4 * n, write=2 * rows * n + 8 * rows, sfu=2 * rows, launches=1)


@compare(
    baseline=chain,
    optimized=[
        compiled,
        one_sweep,
        in_registers,
        Variant(library, at_least="yardstick", gpu_only="on CPUs it returns fp16 statistics"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 65536, "n": 4096}],
    check_sizes=[{"rows": 17, "n": 255}, {"rows": 3, "n": 2051}],
    work=lambda rows, n: Work(
        read=2 * rows * n + 4 * n, write=2 * rows * n + 8 * rows, terms=n, roundings=3
    ),
    bound="dram",
    costs={
        chain: chain_cost,
        **dict.fromkeys([compiled, one_sweep, in_registers, library], one_kernel),
    },
)
def test_layer_norm(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
