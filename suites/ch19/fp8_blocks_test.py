"""FP8 with a scale per block: finer scales and exact sums cost a part of FP8's gain.

Problem    Compute y = x W^T in bf16, with x (m, k) and W (n, k). W is the page's state.
           The second test times only the product: x and W are already codes with a scale per row.
Baseline   bf16: `torch.nn.functional.linear`, which is cuBLASLt.
           library: in the second test, `torch._scaled_mm` with fast sums. As in `by_rows`, tensor
           cores sum over all of k. On Hopper, `torch._scaled_mm` has called cuBLASLt since CUDA
           12.9.
Optimized  All variants multiply in e4m3. Triton kernels quantize x in the call, multiply, and scale
           before they store. W is quantized once, before the timed part.
           by_rows: a scale for each row of x and of W. Tensor cores sum over all of k.
           summed: changes `by_rows`. Tensor cores sum over 128 channels at a time, starting at 0.
           CUDA cores add up these sums.
           by_blocks: changes `summed`. There is one scale for every 128 elements of a row of x, and
           one for every tile of 128 x 128 in W, as in DeepSeek-V3 (arXiv:2412.19437). Each sum over
           128 channels is multiplied by its two scales.
           hopper_rows: changes `by_rows`. The product is a kernel in CUDA C++, with TMA, tiles of
           128 x 256, a warp that only loads, and one block per SM.
           hopper_summed: changes `summed`. The kernel is like `hopper_rows`, but tiles are 128 x
           128, and two blocks load each tile of W together.
           hopper_blocks: changes `by_blocks`. The kernel is like `hopper_summed`.
           product_by_rows: in the second test, the product of `hopper_rows`.
           product_summed: in the second test, the product of `hopper_summed`.
           library_summed: changes `library`, by `use_fast_accum=False`. cuBLASLt then promotes its
           sums to a higher precision at intervals. Compare `product_summed` with `library_summed`.
Bound      Tensor cores, at twice the rate of bf16. `summed` and `by_blocks` add one multiply-add on
           CUDA cores for every 128 on tensor cores. These additions are little work, but a block's
           tensor cores wait for them. The registers for a second set of sums cost more. In the code
           for sm90, a thread of a 128 x 128 tile needs 170 registers instead of 117. So only one
           block fits on an SM, and no second block can use the tensor cores during the wait. Tiles
           of 64 x 128 leave room for two blocks, but read more bytes. So the page claims no speedup
           over bf16 for `summed` and `by_blocks`. In `hopper_summed` and `hopper_blocks`, each of
           two warpgroups has half of the tile. While one warpgroup adds up its sums, the other
           warpgroup's products can run.
Seen       On an H100, the variants in Triton take longer than predicted. The predictions use the
           rate `fp8`, which was measured with a library's product. `by_rows` does not reach this
           rate, and we did not measure why. `summed` and `by_blocks` have one block per SM (see
           *Bound*), so nothing hides the block's waits. `summed` is as fast as bf16, and
           `by_blocks` is slower than `bf16`. The kernels in CUDA C++ were recorded on an H200.
           `hopper_rows` is within a seventh of its prediction, and `hopper_summed` takes a quarter
           longer than predicted. Both are faster than `bf16`. `hopper_blocks` takes about 60 %
           longer than predicted, and is barely faster than `bf16`. `hopper_blocks` differs from
           `hopper_summed` only in the scales: a thread reads three scales in each step of 128
           channels. We did not measure whether the thread waits for these scales. In Triton,
           `by_blocks` is also slower than `summed`. In the second test, on an H200,
           `product_by_rows` is a little slower than `library`, although both should take the same
           time. cuBLASLt launches `nvjet_sm90_qqtst_128x128_128x6_2x1`, whose name suggests tiles
           of 128 x 128 and six stages. We did not measure the cause of the difference.
           `product_summed` is even slower, mostly as predicted, because its additions take time.
           `product_summed` takes about a sixth longer than `library_summed`, for which cuBLASLt
           launches another kernel. The costs assume that `library_summed` adds once per 128
           channels. But `library_summed` loses less to library than these additions would cost, so
           it may add less often.
Use when   Use `by_rows` for speed if the values in a row are similar in size. `by_rows` does not
           wait for CUDA cores, and cuBLASLt offers it (`../ch13/fp8_linear_test.py`). `summed` and
           `by_blocks` are for accuracy, and in Triton save no time over bf16. In CUDA C++ on an
           H200, `hopper_summed` saves time, and `hopper_blocks` saves almost none. Use `summed` for
           a long k: Hopper's tensor cores keep about 14 bits of a sum of FP8 products, which may
           matter in training. Use `by_blocks` if parts of a row differ in size by more than 2^15,
           the ratio of e4m3's largest number to its smallest normal one. Outliers in a few channels
           do not need `by_blocks`, because e4m3's steps are relative to each value. The check
           accepts the error that rounding each operand by 2^-4 of its value would cause. On these
           normally distributed inputs, all variants lose about the same accuracy. In the second
           test, products may differ from `library` by the same amount, because tensor cores round
           the sums.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Conditions, Cost, Variant, Work, compare, cuda_module, tensor_map
from suites.rounding import to_even

hopper = cuda_module("fp8_blocks.cu")
LARGEST = 448.0  # of e4m3
SIDE = 128  # of a block that shares a scale
CONFIGS = [
    triton.Config({"M": m}, num_warps=warps, num_stages=stages)
    for m, warps, stages in ((128, 8, 3), (128, 4, 3), (64, 4, 3), (128, 8, 4))
]


def launchable(configs, named, **meta):
    """Keep configs whose tiles of all stages fit into shared memory."""
    driver = triton.runtime.driver.active
    most = driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]
    return [c for c in configs if c.num_stages * (c.kwargs["M"] + SIDE) * SIDE + 1024 <= most]


@triton.jit
def rows_kernel(
    x, out, scales, m, k,
    BLOCKS: tl.constexpr, SIDE: tl.constexpr, COUNT: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Quantize a row of x, which is a matrix of COUNT blocks of SIDE elements."""
    row = tl.program_id(0)
    block = tl.arange(0, COUNT)
    at = block[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    start = row.to(tl.int64) * k
    values = tl.load(x + start + at, mask=at < k, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=1)
    if not BLOCKS:
        largest = tl.zeros((COUNT,), tl.float32) + tl.max(largest, axis=0)
    scale = tl.maximum(largest, 1e-12) / LARGEST
    rounded = to_even(values / scale[:, None], DROPPED=20)
    tl.store(out + start + at, rounded.to(tl.float8e4nv), mask=at < k)
    # The scales of a column of blocks are contiguous. With one scale per row, only the first column
    # is stored.
    here = (block * SIDE < k) if BLOCKS else block == 0
    tl.store(scales + block * m + row, scale, mask=here)


@triton.autotune(
    CONFIGS,
    key=["m", "n", "k", "BLOCKS", "SUMMED"],
    prune_configs_by={"early_config_prune": launchable},
)
@triton.jit
def product_kernel(
    x, w, x_scales, w_scales, out, m, n, k, one,
    BLOCKS: tl.constexpr, SUMMED: tl.constexpr, SIDE: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    # Eight rows of tiles at a time reuse the L2.
    columns, index = tl.cdiv(n, SIDE), tl.program_id(0)
    group, inside = index // (8 * columns), index % (8 * columns)
    height = min(tl.cdiv(m, M) - 8 * group, 8)
    rows = (8 * group + inside % height) * M + tl.arange(0, M)
    column = inside // height
    outputs = column * SIDE + tl.arange(0, SIDE)
    total = tl.zeros((M, SIDE), tl.float32)
    for block in range(k // SIDE):
        at = block * SIDE + tl.arange(0, SIDE)
        left = x + rows[:, None].to(tl.int64) * k + at[None, :]
        right = w + outputs[:, None].to(tl.int64) * k + at[None, :]
        a = tl.load(left, mask=rows[:, None] < m, other=0.0)
        b = tl.load(right, mask=outputs[:, None] < n, other=0.0)
        if BLOCKS:
            scale = tl.load(x_scales + block * m + rows, mask=rows < m, other=0.0)
            scale *= tl.load(w_scales + column * (k // SIDE) + block)
            total += tl.dot(a, b.T) * scale[:, None]
        elif SUMMED:
            # Without the factor, Triton would sum all blocks in the tensor cores. With the factor,
            # the sums of each block start at 0 and end with one multiply-add per output (PTX for
            # sm90).
            total += tl.dot(a, b.T) * one
        else:
            total = tl.dot(a, b.T, total)
    if not BLOCKS:
        total *= tl.load(x_scales + rows, mask=rows < m, other=0.0)[:, None]
        total *= tl.load(w_scales + outputs, mask=outputs < n, other=0.0)[None, :]
    here = (rows[:, None] < m) & (outputs[None, :] < n)
    place = out + rows[:, None].to(tl.int64) * n + outputs[None, :]
    tl.store(place, to_even(total, DROPPED=16).to(tl.bfloat16), mask=here)


def state(device, m, n, k):
    return torch.randn(n, k, device=device, dtype=torch.bfloat16)


def inputs(device, m, n, k):
    return (torch.randn(m, k, device=device, dtype=torch.bfloat16),)


def reference(w, x):
    return x.double() @ w.double().t()


def bf16(w, x):
    return F.linear(x, w)


def quantized_rows(x, blocks):
    rows, k = x.shape
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty(k // SIDE if blocks else 1, rows, device=x.device)
    rows_kernel[(rows,)](
        x, out, scales, rows, k,
        BLOCKS=blocks, SIDE=SIDE, COUNT=triton.next_power_of_2(k // SIDE), LARGEST=LARGEST,
        num_warps=8,
    )  # fmt: skip
    return out, scales


def quantized_squares(w):
    """Return W in e4m3, and the scale of each SIDE x SIDE elements."""
    n, k = w.shape
    squares = F.pad(w.float(), (0, 0, 0, -n % SIDE)).view(-1, SIDE, k // SIDE, SIDE)
    scales = squares.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-12) / LARGEST
    rounded = (squares / scales).view(-1, k)[:n].to(torch.float8_e4m3fn)
    return rounded, scales.flatten()


def multiplied(x, w, w_scales, blocks, adding):
    (m, k), n = x.shape, len(w)
    out = torch.empty(m, n, device=x.device, dtype=x.dtype)
    small, x_scales = quantized_rows(x, blocks)

    def grid(meta):
        return (triton.cdiv(m, meta["M"]) * triton.cdiv(n, SIDE),)

    product_kernel[grid](
        small, w, x_scales, w_scales, out, m, n, k, 1.0, BLOCKS=blocks, SUMMED=adding, SIDE=SIDE
    )
    return out


def by_rows(w, x):
    ready = quantized_rows(w, blocks=False)
    yield lambda: multiplied(x, *ready, blocks=False, adding=False)


def summed(w, x):
    ready = quantized_rows(w, blocks=False)
    yield lambda: multiplied(x, *ready, blocks=False, adding=True)


def by_blocks(w, x):
    ready = quantized_squares(w)
    yield lambda: multiplied(x, *ready, blocks=True, adding=True)


THREADS = 2 * 128 + 32
"""Threads of a block: two warpgroups that multiply, and a warp that loads."""


def on_hopper(kernel, x, x_scales, w, w_scales, columns, stages, cluster=1):
    """Multiply codes by `kernel`, with tiles of 128 x `columns` and a ring of `stages` tiles."""
    out = torch.empty(len(x), len(w), device=x.device, dtype=torch.bfloat16)
    maps = (
        tensor_map(x, (SIDE, SIDE), swizzle=128),
        tensor_map(w, (columns // cluster, SIDE), swizzle=128),
        tensor_map(out, (64, 64), swizzle=128),
    )
    shared = stages * (SIDE + columns) * SIDE + 2 * 2 * 64 * 64 * 2 + 1024
    if cluster == 1:
        blocks = torch.cuda.get_device_properties(x.device).multi_processor_count
    else:
        blocks = cluster * kernel.clusters_at_once(THREADS, shared, cluster=cluster)
    launch = kernel[blocks, THREADS, shared]
    launch(*maps, x_scales, w_scales, *out.shape, x.shape[1])
    return out


def product_by_rows(x, x_scales, w, w_scales):
    return on_hopper(hopper.by_rows, x, x_scales, w, w_scales, columns=256, stages=4)


def product_summed(x, x_scales, w, w_scales):
    return on_hopper(hopper.summed, x, x_scales, w, w_scales, columns=128, stages=6, cluster=2)


def product_by_blocks(x, x_scales, w, w_scales):
    return on_hopper(hopper.by_blocks, x, x_scales, w, w_scales, columns=128, stages=6, cluster=2)


def hopper_rows(w, x):
    ready = quantized_rows(w, blocks=False)
    yield lambda: product_by_rows(*quantized_rows(x, blocks=False), *ready)


def hopper_summed(w, x):
    ready = quantized_rows(w, blocks=False)
    yield lambda: product_summed(*quantized_rows(x, blocks=False), *ready)


def hopper_blocks(w, x):
    ready = quantized_squares(w)
    yield lambda: product_by_blocks(*quantized_rows(x, blocks=True), *ready)


def bf16_cost(m, n, k):
    return Cost(read=2 * (m + n) * k, write=2 * m * n, ops={"bf16": 2 * m * n * k}, launches=1)


def fp8_cost(m, n, k, added=0):
    rows = Cost(read=2 * m * k, write=m * k, launches=1)
    ops = {"fp8": 2 * m * n * k, "fp32": 2 * added * m * n * k / SIDE}
    return rows + Cost(read=(m + n) * k, write=2 * m * n, ops=ops, launches=1)


MULTICAST = ("tma", "wgmma", "multicast")


@compare(
    baseline=bf16,
    optimized=[
        Variant(by_rows, precision="fp8", at_least={"sm90": 1.3}),
        Variant(summed, precision="fp8", at_least="yardstick"),
        Variant(by_blocks, precision="fp8", at_least="yardstick"),
        Variant(hopper_rows, precision="fp8", needs=("tma", "wgmma"), at_least="yardstick"),
        Variant(hopper_summed, precision="fp8", needs=MULTICAST, at_least="yardstick"),
        Variant(hopper_blocks, precision="fp8", needs=MULTICAST, at_least="yardstick"),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 8192, "k": 8192}],
    check_sizes=[{"m": 35, "n": 200, "k": 384}, {"m": 3, "n": 136, "k": 256}],
    work=lambda m, n, k: Work(
        read=2 * (m + n) * k, write=2 * m * n, flops={"fp8": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
    costs={
        bf16: bf16_cost,
        **dict.fromkeys((by_rows, hopper_rows), fp8_cost),
        **dict.fromkeys(
            (summed, by_blocks, hopper_summed, hopper_blocks),
            lambda m, n, k: fp8_cost(m, n, k, added=1),
        ),
    },
    conditions=Conditions(needs="fp8"),
)
def test_fp8_blocks(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


def codes(device, m, n, k):
    """Return e4m3 codes and a scale per row of x (m, k), and then of W (n, k)."""
    rows = []
    for count in (m, n):
        rows.append(torch.randn(count, k, device=device).to(torch.float8_e4m3fn))
        rows.append(torch.rand(1, count, device=device) + 0.5)
    return tuple(rows)


def reference_of_codes(x, x_scales, w, w_scales):
    return x.double() @ w.double().t() * x_scales.double().t() * w_scales.double()


def by_library(x, x_scales, w, w_scales, fast):
    if not x.is_cuda:  # before torch 2.13, its CPU version rejects scales per row
        return (x.float() @ w.float().t() * x_scales.t() * w_scales).bfloat16()
    return torch._scaled_mm(
        x, w.t(), x_scales.view(-1, 1), w_scales, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def library(x, x_scales, w, w_scales):
    return by_library(x, x_scales, w, w_scales, fast=True)


def library_summed(x, x_scales, w, w_scales):
    return by_library(x, x_scales, w, w_scales, fast=False)


def product_cost(m, n, k, added=0):
    ops = {"fp8": 2 * m * n * k, "fp32": 2 * added * m * n * k / SIDE}
    return Cost(read=(m + n) * (k + 4), write=2 * m * n, ops=ops, launches=1)


@compare(
    baseline=Variant(library, precision="fp8"),
    optimized=[
        Variant(product_by_rows, precision="fp8", needs=("tma", "wgmma"), sass="QGMMA"),
        Variant(product_summed, precision="fp8", needs=MULTICAST, sass="QGMMA"),
        Variant(library_summed, precision="fp8"),
    ],
    inputs=codes,
    reference=reference_of_codes,
    sizes=[{"m": 8192, "n": 8192, "k": 8192}],
    # Sizes below one tile, partial tiles in all dimensions, and more tiles than an H200 has SMs.
    # `_scaled_mm` needs multiples of 16 for k and n.
    check_sizes=[
        {"m": 35, "n": 208, "k": 384},
        {"m": 257, "n": 784, "k": 144},
        {"m": 1500, "n": 3120, "k": 272},
    ],
    work=lambda m, n, k: Work(
        read=(m + n) * (k + 4), write=2 * m * n, flops={"fp8": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
    versus="library",
    at_least="yardstick",
    costs={
        library: product_cost,
        product_by_rows: product_cost,
        # cuBLASLt's interval is not documented. Both costs assume our interval.
        **dict.fromkeys(
            (product_summed, library_summed), lambda m, n, k: product_cost(m, n, k, added=1)
        ),
    },
    conditions=Conditions(needs="fp8"),
)
def test_fp8_product_beside_the_library(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
