"""Dropout, residual and norm: the three steps between two layers as one kernel.

Problem    Compute sum = residual + x * mask / (1 - p) and the RMS norm of sum in fp32, on rows of
           4096 fp16 elements. Return both, because the next block of the model adds to the sum. The
           mask is an input with one byte per element. The backward pass needs the mask anyway, and
           with a given mask, all sides drop the same elements.
Baseline   separate: multiplies by the mask, multiplies by the scale, adds the residual, and calls
           `torch.nn.functional.rms_norm`, which is one kernel already.
Optimized  compiled: changes `separate`. `torch.compile` compiles the same formula.
           added: changes `separate`. One Triton kernel does the dropout and the addition. The
           library's norm follows.
           fused: changes `added`. The same Triton kernel also computes the norm, from the sum that
           is still in registers.
Bound      DRAM. For each element, `fused` reads 5 bytes and writes 4. `added` moves 11 bytes,
           because its norm reads the sum again. The four kernels of `separate` move 19 bytes.
Seen       `separate` takes 1.5 times as long as its memory traffic alone. We did not time the
           kernels of `separate` one by one. The other sides take as long as predicted.
Use when   A norm follows pointwise work. Fuse the operations that produce its input into the norm:
           dropout, bias and residual. Inductor does this fusion too. A kernel can also generate the
           random numbers from a counter. Then there is no mask to read, and the backward pass
           generates the same numbers again.
"""

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pytest_aisp import Cost, Work, compare

DROPPED = 0.25
KEPT = 1 / (1 - DROPPED)
EPS = 1e-5


@triton.jit
def added_kernel(x, mask, residual, total, size, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    kept = tl.load(x + at, mask=inside).to(tl.float32) * factor * tl.load(mask + at, mask=inside)
    summed = tl.load(residual + at, mask=inside).to(tl.float32) + kept
    tl.store(total + at, summed.to(tl.float16), mask=inside)


@triton.jit
def fused_kernel(x, mask, residual, weight, total, out, n, factor, eps, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * n + lanes
    inside = lanes < n
    bits = tl.load(mask + at, mask=inside, other=0)
    kept = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factor * bits
    summed = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + kept
    stored = summed.to(tl.float16)
    tl.store(total + at, stored, mask=inside)
    # The norm is computed from the rounded sum, as on the other sides.
    value = stored.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value) / n + eps)
    scaled = value * scale * tl.load(weight + lanes, mask=inside)
    tl.store(out + at, scaled.to(tl.float16), mask=inside)


def inputs(device, rows, n):
    x, residual = (torch.randn(rows, n, device=device, dtype=torch.float16) for _ in range(2))
    mask = (torch.rand(rows, n, device=device) >= DROPPED).to(torch.uint8)
    return x, mask, residual, torch.randn(n, device=device, dtype=torch.float16)


def reference(x, mask, residual, weight):
    total = residual.double() + x.double() * mask.double() / (1 - DROPPED)
    scale = torch.rsqrt((total * total).mean(dim=1, keepdim=True) + EPS)
    return total, total * scale * weight.double()


def formula(x, mask, residual, weight):
    total = residual + x * mask * KEPT
    return total, F.rms_norm(total, total.shape[1:], weight, EPS)


def separate(x, mask, residual, weight):
    return formula(x, mask, residual, weight)


@functools.cache
def compiled_formula():
    return torch.compile(formula, dynamic=False)


def compiled(x, mask, residual, weight):
    return compiled_formula()(x, mask, residual, weight)


def added(x, mask, residual, weight):
    total = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 2048),)
    added_kernel[grid](x, mask, residual, total, x.numel(), KEPT, BLOCK=2048, num_warps=8)
    return total, F.rms_norm(total, total.shape[1:], weight, EPS)


def fused(x, mask, residual, weight):
    rows, n = x.shape
    total, out = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(n)
    fused_kernel[(rows,)](
        x, mask, residual, weight, total, out, n, KEPT, EPS, BLOCK=block, num_warps=8
    )
    return total, out


def moved(rows, n, read, write):
    """Return the cost of a kernel, from the bytes per element that it moves."""
    return Cost(read=read * rows * n + 2 * n, write=write * rows * n, launches=1)


@compare(
    baseline=separate,
    optimized=[compiled, added, fused],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 65536, "n": 4096}],
    check_sizes=[{"rows": 17, "n": 255}, {"rows": 3, "n": 1023}],
    work=lambda rows, n: Work(read=5 * rows * n + 2 * n, write=4 * rows * n, terms=n, roundings=4),
    bound="dram",
    costs={
        separate: lambda rows, n: (
            moved(rows, n, read=3, write=2)
            + moved(rows, n, read=2, write=2)
            + moved(rows, n, read=4, write=2)
            + moved(rows, n, read=2, write=2)
        ),
        added: lambda rows, n: moved(rows, n, read=5, write=2) + moved(rows, n, read=2, write=2),
        **dict.fromkeys([compiled, fused], lambda rows, n: moved(rows, n, read=5, write=4)),
    },
)
def test_dropout_norm(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
