"""Norm backward: compute the gradients of the input and the weights in one pass over the data.

Problem    Compute the backward pass of the layer norm (test_norm_backward) and of the RMS norm
           (test_rms_backward) in fp32, over rows of 4096 fp16 elements. The forward pass has saved
           each row's mean and 1 / standard deviation. The gradients of weight and bias are sums
           over all rows.
Baseline   chain: the formula of the layer norm's backward in torch, in fp32.
           rms_chain: the formula of the RMS norm's backward.
Optimized  compiled: changes `chain`. `torch.compile` compiles the same formula.
           two_passes: changes `chain`. One Triton kernel has a program for each row and computes
           the gradient of the input. A second kernel reads both matrices again and sums over the
           rows for the gradients of the weights.
           one_pass: changes `two_passes`. The first kernel also sums the gradients of the weights,
           so the matrices are read only once. A program processes many rows and keeps its sums in
           registers.
           library: torch's own backward kernels, which autograd calls.
           rms_compiled: changes `rms_chain`. `torch.compile` compiles the same formula.
           rms_one_pass: changes `rms_chain`. The kernel is the same as in `one_pass`, but without
           the mean and the bias.
           rms_library: torch's own kernels for the RMS norm.
Bound      DRAM. `one_pass` reads two matrices and writes one, and the partial sums add little
           memory traffic. `two_passes` reads four matrices. `chain` and `rms_chain` also read and
           write fp32 copies. An SM holds only two programs of `one_pass`, and three programs of the
           first kernel of `two_passes`. A program loads nothing while it sums over a row, so both
           sides may fall short of the full DRAM bandwidth.
Seen       On an H100, both compiled sides take less time than two reads of the matrices from DRAM.
           So Inductor's kernels also read the matrices once, and the page gives both compiled sides
           the cost of `one_pass`. `library` has the cost of `two_passes`, but takes longer. We did
           not examine the library's kernels.
Use when   You write a norm, and no library has its backward pass. Sum the gradients of the weights
           in the kernel that already has the row in registers. Let a program process many rows:
           with one program per row, every row would need an atomic addition to each weight's
           gradient. A last small kernel adds the programs' sums, always in the same order. If you
           do not need your own kernel, compile the formula. Compiled code is nearly as fast as the
           hand-written kernel, and faster than torch's own kernels for the layer norm.
"""

import functools

import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare

PROGRAMS = 264  # two for each SM of an H200: 128 registers per thread
SPLITS = 16  # programs that share the rows of a tile of columns
TILE = 64


@triton.jit
def row_kernel(
    grad,
    x,
    weight,
    mean,
    scale,
    dx,
    dweights,
    dbiases,
    rows,
    n,
    CENTERED: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute dx row by row. With SUMS, also sum the weights' gradients over these rows."""
    lanes = tl.arange(0, BLOCK)
    inside = lanes < n
    factor = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row * n + lanes
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        root = tl.load(scale + row)
        if CENTERED:
            value = tl.where(inside, value - tl.load(mean + row), 0.0)
        value *= root
        inner = g * factor
        change = inner - value * (tl.sum(inner * value) / n)
        if CENTERED:
            change -= tl.sum(inner) / n
        tl.store(dx + at, (change * root).to(tl.float16), mask=inside)
        if SUMS:
            dweight += g * value
            dbias += g
    if SUMS:
        own = tl.program_id(0) * n + lanes
        tl.store(dweights + own, dweight, mask=inside)
        if CENTERED:
            tl.store(dbiases + own, dbias, mask=inside)


@triton.jit
def column_kernel(grad, x, mean, scale, dweights, dbiases, rows, n, TILE: tl.constexpr):
    """Sum the gradients of TILE weights over this program's share of the rows."""
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    share = tl.cdiv(rows, tl.num_programs(1))
    first = tl.program_id(1) * share
    last = min(first + share, rows)
    dweight = tl.zeros((TILE,), tl.float32)
    dbias = tl.zeros((TILE,), tl.float32)
    for start in range(first, last, TILE):
        row = start + tl.arange(0, TILE)
        inside = (row[:, None] < last) & (column[None, :] < n)
        at = row[:, None].to(tl.int64) * n + column[None, :]
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        center = tl.load(mean + row, mask=row < last, other=0.0)
        root = tl.load(scale + row, mask=row < last, other=0.0)
        dweight += tl.sum(g * (value - center[:, None]) * root[:, None], axis=0)
        dbias += tl.sum(g, axis=0)
    own = tl.program_id(1) * n + column
    tl.store(dweights + own, dweight, mask=column < n)
    tl.store(dbiases + own, dbias, mask=column < n)


def matrices(device, rows, n):
    grad, x = (torch.randn(rows, n, device=device, dtype=torch.float16) for _ in range(2))
    return grad, x, torch.randn(n, device=device, dtype=torch.float16)


def inputs(device, rows, n):
    grad, x, weight = matrices(device, rows, n)
    wide = x.float()
    variance = wide.var(dim=1, keepdim=True, correction=0)
    return grad, x, weight, wide.mean(dim=1, keepdim=True), torch.rsqrt(variance + 1e-5)


def rms_inputs(device, rows, n):
    grad, x, weight = matrices(device, rows, n)
    return grad, x, weight, torch.rsqrt(x.float().square().mean(dim=1, keepdim=True) + 1e-5)


def reference(grad, x, weight, mean, scale):
    grad, mean, scale = grad.double(), mean.double(), scale.double()
    normal = (x.double() - mean) * scale
    inner = grad * weight.double()
    n = x.shape[1]
    both = (inner * normal).sum(dim=1, keepdim=True) / n
    dx = scale * (inner - inner.sum(dim=1, keepdim=True) / n - normal * both)
    return dx, (grad * normal).sum(dim=0), grad.sum(dim=0)


def rms_reference(grad, x, weight, scale):
    grad, scale = grad.double(), scale.double()
    normal, inner = x.double() * scale, grad * weight.double()
    both = (inner * normal).sum(dim=1, keepdim=True) / x.shape[1]
    return scale * (inner - normal * both), (grad * normal).sum(dim=0)


def formula(grad, x, weight, mean, scale):
    g = grad.float()
    normal = (x.float() - mean) * scale
    inner = g * weight
    middle = inner.mean(dim=1, keepdim=True)
    both = (inner * normal).mean(dim=1, keepdim=True)
    dx = (inner - middle - normal * both) * scale
    dweight, dbias = (g * normal).sum(dim=0), g.sum(dim=0)
    return dx.to(x.dtype), dweight.to(x.dtype), dbias.to(x.dtype)


def rms_formula(grad, x, weight, scale):
    g = grad.float()
    normal = x.float() * scale
    inner = g * weight
    both = (inner * normal).mean(dim=1, keepdim=True)
    dx = (inner - normal * both) * scale
    return dx.to(x.dtype), (g * normal).sum(dim=0).to(x.dtype)


def chain(grad, x, weight, mean, scale):
    return formula(grad, x, weight, mean, scale)


def rms_chain(grad, x, weight, scale):
    return rms_formula(grad, x, weight, scale)


@functools.cache
def compiled_formula():
    return torch.compile(formula, dynamic=False)


@functools.cache
def compiled_rms_formula():
    return torch.compile(rms_formula, dynamic=False)


def compiled(grad, x, weight, mean, scale):
    return compiled_formula()(grad, x, weight, mean, scale)


def rms_compiled(grad, x, weight, scale):
    return compiled_rms_formula()(grad, x, weight, scale)


def by_rows(grad, x, weight, mean, scale, programs, summed):
    """Return dx, and each program's sums for weight and bias, with shape (2, programs, n)."""
    rows, n = x.shape
    dx = torch.empty_like(x)
    shares = torch.empty(2, programs if summed else 0, n, device=x.device)
    block = triton.next_power_of_2(n)
    centered = mean is not None
    row_kernel[(programs,)](
        grad,
        x,
        weight,
        mean if centered else scale,
        scale,
        dx,
        shares[0],
        shares[1],
        rows,
        n,
        CENTERED=centered,
        SUMS=summed,
        BLOCK=block,
        num_warps=8,
    )
    return dx, shares


def two_passes(grad, x, weight, mean, scale):
    rows, n = x.shape
    dx, _ = by_rows(grad, x, weight, mean, scale, rows, summed=False)
    shares = torch.empty(2, SPLITS, n, device=x.device)
    grid = (triton.cdiv(n, TILE), SPLITS)
    column_kernel[grid](grad, x, mean, scale, shares[0], shares[1], rows, n, TILE=TILE)
    dweight, dbias = shares.sum(dim=1).to(x.dtype)
    return dx, dweight, dbias


def one_pass(grad, x, weight, mean, scale):
    programs = min(len(x), PROGRAMS)
    dx, shares = by_rows(grad, x, weight, mean, scale, programs, summed=True)
    dweight, dbias = shares.sum(dim=1).to(x.dtype)
    return dx, dweight, dbias


def rms_one_pass(grad, x, weight, scale):
    programs = min(len(x), PROGRAMS)
    dx, shares = by_rows(grad, x, weight, None, scale, programs, summed=True)
    return dx, shares[0].sum(dim=0).to(x.dtype)


def library(grad, x, weight, mean, scale):
    # The function requires a bias, but does not read it.
    return torch.ops.aten.native_layer_norm_backward(
        grad, x, x.shape[1:], mean, scale, weight, weight, [True] * 3
    )


def rms_library(grad, x, weight, scale):
    return torch.ops.aten._fused_rms_norm_backward(grad, x, x.shape[1:], scale, weight, [True] * 2)


def work_of(rows, n, rows_read, vectors):
    return Work(
        read=4 * rows * n + 2 * n + 4 * rows * rows_read,
        write=2 * rows * n + 2 * vectors * n,
        terms=max(rows, n),
        roundings=3,
    )


def in_turn(rows, n, kernels):
    """Return the cost of torch's `kernels`, given as (bytes read, bytes written) per element."""
    first, *others = (
        Cost(read=read * rows * n, write=write * rows * n, launches=1) for read, write in kernels
    )
    return sum(others, first)


# The kernels convert two matrices to fp32, then compute the normalized input, the gradient times
# the weight, the two sums and the differences, and convert to fp16.
WIDENED = [(2, 4), (2, 4)]
SUMMED = [(8, 4), (4, 0)]  # a product of two matrices, and its sum


def chain_cost(rows, n):
    normal = [(4, 4), (4, 4)]
    dx = [(4, 4), (4, 0), *SUMMED, (4, 4), (4, 4), (8, 4), (4, 4), (4, 2)]
    return in_turn(rows, n, [*WIDENED, *normal, *dx, *SUMMED, (4, 0), (0, 2 / rows), (0, 2 / rows)])


def rms_chain_cost(rows, n):
    dx = [(4, 4), *SUMMED, (4, 4), (8, 4), (4, 4), (4, 2)]
    return in_turn(rows, n, [*WIDENED, (4, 4), *dx, *SUMMED, (0, 2 / rows)])


def two_kernels(rows, n):
    # The row kernel, the column kernel, the sum of the column kernel's results, and a conversion.
    return in_turn(rows, n, [(4 + 8 / n, 2), (4 + 8 / n, 0), (0, 4 / rows), (0, 4 / rows)])


def one_kernel(rows, n, vectors=2):
    shares = 4 * vectors * min(rows, PROGRAMS) * n
    first = Cost(read=4 * rows * n + 2 * n + 8 * rows, write=2 * rows * n + shares, launches=1)
    return first + Cost(read=shares, write=2 * vectors * n, launches=2)


SIZES = [{"rows": 65536, "n": 4096}]
# With 300 rows, some programs of one_pass process two rows.
CHECK_SIZES = [{"rows": 33, "n": 41}, {"rows": 300, "n": 9}, {"rows": 3, "n": 1023}]


@compare(
    baseline=chain,
    optimized=[
        Variant(compiled, at_least={"sm90": 16}),
        Variant(two_passes, at_least={"sm90": 10}),
        Variant(one_pass, at_least={"sm90": 17}),
        Variant(library, at_least="yardstick", gpu_only="on CPUs it wants fp16 statistics"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=SIZES,
    check_sizes=CHECK_SIZES,
    work=lambda rows, n: work_of(rows, n, rows_read=2, vectors=2),
    bound="dram",
    costs={
        chain: chain_cost,
        **dict.fromkeys([two_passes, library], two_kernels),
        **dict.fromkeys([compiled, one_pass], one_kernel),
    },
)
def test_norm_backward(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=rms_chain,
    optimized=[
        Variant(rms_compiled, at_least={"sm90": 14}),
        Variant(rms_one_pass, at_least={"sm90": 14}),
        Variant(rms_library, at_least="yardstick", gpu_only="torch has this kernel for GPUs"),
    ],
    inputs=rms_inputs,
    reference=rms_reference,
    sizes=SIZES,
    check_sizes=CHECK_SIZES,
    work=lambda rows, n: work_of(rows, n, rows_read=1, vectors=1),
    bound="dram",
    costs={
        rms_chain: rms_chain_cost,
        rms_library: two_kernels,
        **dict.fromkeys([rms_compiled, rms_one_pass], lambda rows, n: one_kernel(rows, n, 1)),
    },
)
def test_rms_backward(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
