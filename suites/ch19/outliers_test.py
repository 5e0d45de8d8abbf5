"""Outliers: eight bits are enough for most channels, so treat the few large ones separately.

Problem    Compute y = x W^T in bf16, with x (m, k) and W (n, k). One channel in 64 of x is 48 times
           as large as the others, because some layers of real models have such outliers. The
           channels of the outliers are given, as if a calibration had found them. W is the page's
           state.
Baseline   bf16: `torch.nn.functional.linear`, which is cuBLASLt. Outliers do not harm it.
Optimized  All variants multiply in int8, with a scale for each row of x and of W. Triton kernels
           quantize the rows of x in the call, multiply, and rescale before they store. W is
           quantized once, before the timed part.
           apart: changes `bf16`. The int8 product treats the outliers as zero. A second product
           multiplies the outliers in bf16, and the int8 kernel adds this result (LLM.int8(),
           arXiv:2208.07339).
           smoothed: changes `apart`. Instead of a second product, each channel of x is divided by a
           factor, and the same channel of W is multiplied by that factor. The factor is 8 for
           outliers, and 1 for the others. So x and W share the difference in size (SmoothQuant,
           arXiv:2211.10438).
           rotated: changes `smoothed`. Instead of factors, every 64 channels of x and of W are
           multiplied by the same Hadamard matrix, which leaves y unchanged and spreads an outlier
           over its 64 channels (QuaRot, arXiv:2404.00456). `rotated` does not need to know the
           outliers' channels.
Bound      Tensor cores, at twice the rate of bf16 at best. Triton uses Hopper's own instruction for
           int8 (`wgmma` with s8), unlike cuBLAS in `../ch13/dynamic_int8_test.py`. DRAM limits the
           quantizing of x. In `smoothed`, the quantizing kernel also reads the factors. In
           `rotated`, it also multiplies by the matrix, on tensor cores. `apart` has to gather the
           outlier channels first, and the result of the second product is written to DRAM and read
           again.
Seen       On an H100, `smoothed` and `rotated` take less time than predicted. The rate `int8` was
           measured with `torch._int_mm`, and the Triton kernel multiplies faster than that call. So
           a result can exceed 100 % of the limit. `rotated` is as fast as `smoothed`. `apart` is
           slower, because of its second product, and gains only a little over bf16.
Use when   Your GPU or its memory requires int8, and activations have outliers. Plain int8 with a
           scale per row is not on this page, because the check rejects its results: the outliers
           set the scale, so most other values round to a few steps or to 0. The check accepts the
           error that rounding each operand, including the outliers, by 2^-6 of its value would
           cause. FP8 needs no remedy for outliers of this size, because its steps are relative to
           each value (`../ch13/fp8_linear_test.py`).
"""

import functools

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare
from suites.rounding import to_even

LARGEST, EVERY, LARGER, FACTOR = 127, 64, 48.0, 8.0
SMOOTHED, ROTATED, APART = 1, 2, 3
CONFIGS = [
    triton.Config({"M": 128, "N": n, "K": 128}, num_warps=8, num_stages=stages)
    for n, stages in ((128, 3), (256, 3), (64, 2))
]


def launchable(configs, named, **meta):
    """Keep configs whose tiles of all stages fit into shared memory."""
    driver = triton.runtime.driver.active
    most = driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]

    def needed(M, N, K, stages):
        return stages * (M + N) * K + 1024

    return [each for each in configs if needed(**each.kwargs, stages=each.num_stages) <= most]


@triton.jit
def rows_kernel(
    x, factors, hadamard, out, scales, k,
    HOW: tl.constexpr, PRODUCT: tl.constexpr, EVERY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize a row of x. The row's channels are viewed as a matrix with EVERY columns."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, EVERY)
    at = tl.arange(0, BLOCK)[:, None] * EVERY + lane[None, :]
    values = tl.load(x + row * k + at, mask=at < k, other=0.0)
    if HOW == 2:
        # The matrix has elements 1 and -1. The factor 1/8, which makes it orthogonal, comes later.
        matrix = tl.load(hadamard + lane[:, None] * EVERY + lane[None, :])
        values = tl.dot(values.to(PRODUCT), matrix.to(PRODUCT)) / 8
    else:
        values = values.to(tl.float32)
        values *= tl.load(factors + at, mask=at < k, other=0.0)
    largest = tl.max(tl.max(tl.abs(values), axis=1), axis=0)
    scale = tl.maximum(largest, 1e-12) / 127
    steps = values / scale
    steps = (steps + 3 * 2.0**22) - 3 * 2.0**22  # round to even
    tl.store(out + row * k + at, steps.to(tl.int8), mask=at < k)
    tl.store(scales + row, scale)


@triton.autotune(
    CONFIGS,
    key=["m", "n", "k", "ADDED"],
    prune_configs_by={"early_config_prune": launchable},
)
@triton.jit
def product_kernel(
    x, w, x_scales, w_scales, more, out, m, n, k,
    ADDED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    # Eight rows of tiles at a time reuse the L2.
    columns, index = tl.cdiv(n, N), tl.program_id(0)
    group, inside = index // (8 * columns), index % (8 * columns)
    height = min(tl.cdiv(m, M) - 8 * group, 8)
    rows = (8 * group + inside % height) * M + tl.arange(0, M)
    outputs = inside // height * N + tl.arange(0, N)
    total = tl.zeros((M, N), tl.int32)
    for start in range(0, k, K):
        at = start + tl.arange(0, K)
        left = (rows[:, None] < m) & (at[None, :] < k)
        right = (outputs[:, None] < n) & (at[None, :] < k)
        a = tl.load(x + rows[:, None].to(tl.int64) * k + at[None, :], mask=left, other=0)
        b = tl.load(w + outputs[:, None].to(tl.int64) * k + at[None, :], mask=right, other=0)
        total = tl.dot(a, b.T, total, out_dtype=tl.int32)
    scale = tl.load(x_scales + rows, mask=rows < m, other=0.0)[:, None]
    scale *= tl.load(w_scales + outputs, mask=outputs < n, other=0.0)[None, :]
    result = total.to(tl.float32) * scale
    here = (rows[:, None] < m) & (outputs[None, :] < n)
    place = rows[:, None].to(tl.int64) * n + outputs[None, :]
    if ADDED:
        result += tl.load(more + place, mask=here, other=0.0).to(tl.float32)
    tl.store(out + place, to_even(result, DROPPED=16).to(tl.bfloat16), mask=here)


def state(device, m, n, k):
    return torch.randn(n, k, device=device, dtype=torch.bfloat16)


def inputs(device, m, n, k):
    x = torch.randn(m, k, device=device)
    x[:, ::EVERY] *= LARGER
    return (x.bfloat16(),)


def reference(w, x):
    return x.double() @ w.double().t()


def bf16(w, x):
    return F.linear(x, w)


def outlier_channels(x):
    return torch.arange(0, x.shape[1], EVERY, device=x.device)


@functools.cache
def hadamard_matrix(device):
    matrix = torch.ones(1, 1)
    while len(matrix) < EVERY:
        matrix = torch.cat([torch.cat([matrix, matrix]), torch.cat([matrix, -matrix])], dim=1)
    return matrix.to(device, torch.bfloat16)


def quantized_rows(x, factors, matrix, how):
    rows, k = x.shape
    out = torch.empty_like(x, dtype=torch.int8)
    scales = torch.empty(rows, device=x.device)
    rows_kernel[(rows,)](
        x, factors, matrix, out, scales, k,
        HOW=how, PRODUCT=tl.bfloat16 if x.is_cuda else tl.float32, EVERY=EVERY,
        BLOCK=max(16, triton.next_power_of_2(triton.cdiv(k, EVERY))), num_warps=8,
    )  # fmt: skip
    return out, scales


def rescaled_product(x, x_scales, w, w_scales, more=None):
    (m, k), n = x.shape, len(w)
    out = torch.empty(m, n, device=x.device, dtype=torch.bfloat16)

    def grid(meta):
        return (triton.cdiv(m, meta["M"]) * triton.cdiv(n, meta["N"]),)

    product_kernel[grid](
        x, w, x_scales, w_scales, out if more is None else more, out, m, n, k,
        ADDED=more is not None,
    )  # fmt: skip
    return out


def prepared(w, w_factors, how):
    """Return W in int8 with its scales, and the Hadamard matrix."""
    matrix = hadamard_matrix(w.device)
    ready = quantized_rows(w, w_factors, matrix, how)
    return ready, matrix


def smoothed(w, x):
    factors = torch.ones(w.shape[1], device=w.device)
    factors[outlier_channels(w)] = FACTOR
    ready, matrix = prepared(w, factors, SMOOTHED)
    inverse = factors.reciprocal()
    yield lambda: rescaled_product(*quantized_rows(x, inverse, matrix, SMOOTHED), *ready)


def rotated(w, x):
    factors = torch.ones(w.shape[1], device=w.device)
    ready, matrix = prepared(w, factors, ROTATED)
    yield lambda: rescaled_product(*quantized_rows(x, factors, matrix, ROTATED), *ready)


def apart(w, x):
    channels = outlier_channels(w)
    factors = torch.ones(w.shape[1], device=w.device)
    factors[channels] = 0.0
    ready, matrix = prepared(w, factors, APART)
    w_large = w[:, channels].contiguous()

    def multiplied():
        large = F.linear(x.index_select(1, channels), w_large)
        return rescaled_product(*quantized_rows(x, factors, matrix, APART), *ready, large)

    yield multiplied


def bf16_cost(m, n, k):
    return Cost(read=2 * (m + n) * k, write=2 * m * n, ops={"bf16": 2 * m * n * k}, launches=1)


def int8_cost(m, n, k, rotating=0, added=0):
    rows = Cost(read=2 * m * k, write=m * k, ops={"bf16": 2 * rotating * m * k}, launches=1)
    return rows + Cost(
        read=(m + n) * k + added * m * n,
        write=2 * m * n,
        ops={"int8": 2 * m * n * k},
        launches=1,
    )


def apart_cost(m, n, k):
    large = k / EVERY
    gathered = Cost(read=32 * m * large, write=2 * m * large, launches=1)  # sectors of 32 bytes
    return gathered + bf16_cost(m, n, large) + int8_cost(m, n, k, added=2)


@compare(
    baseline=bf16,
    optimized=[
        Variant(apart, precision="int8", at_least="neutral"),
        Variant(smoothed, precision="int8", at_least={"sm90": 1.2}),
        Variant(rotated, precision="int8", at_least={"sm90": 1.2}),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 8192, "k": 8192}],
    check_sizes=[{"m": 33, "n": 70, "k": 640}, {"m": 5, "n": 130, "k": 320}],
    work=lambda m, n, k: Work(
        read=2 * (m + n) * k, write=2 * m * n, flops={"int8": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
    costs={
        bf16: bf16_cost,
        apart: apart_cost,
        smoothed: int8_cost,
        rotated: lambda m, n, k: int8_cost(m, n, k, rotating=EVERY),
    },
)
def test_outliers(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
