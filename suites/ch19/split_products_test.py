"""fp32 products on tensor cores: split each number into parts, and sum the products of the parts.

Problem    Compute y = x W^T with x (m, k), W (n, k) and y in fp32.
Baseline   fp32: `torch.nn.functional.linear` with TF32 off, which is PyTorch's default. The product
           runs on CUDA cores.
Optimized  All variants use the same two Triton kernels. One kernel splits an operand, and the other
           multiplies. The first part is the rounded number. Each further part is the rounded
           remainder.
           tf32: one part of 11 bits, which shows the time and the error of a single product.
           tf32x3: changes `tf32`. Two parts have 22 bits. There are three products: high with high,
           high with low, and low with high.
           bf16x3: changes `tf32x3`. Two bf16 parts have 16 bits. The three products are as in
           `tf32x3`.
           bf16x6: changes `bf16x3`. Three bf16 parts have 24 bits, as in fp32. There are six of the
           nine products, because the other three are below the last bit of fp32. A tensor core
           truncates the bits that its sum cannot hold. So tensor cores sum only the products of one
           step of the loop. CUDA cores add the sums of the steps, with rounding.
Bound      Tensor cores, with three or six times as many operations as one product. The number of
           products and the rate of the type determine the time. TF32 runs at half the rate of bf16,
           so `tf32x3` should take about as long as `bf16x6`. DRAM limits the splitting, which takes
           little time compared with the products. Two sums per output take many registers, so tiles
           are at most 128 x 128. The kernel also waits for each of its products.
Seen       tf32 and `tf32x3` are recorded on an H100, `bf16x3` and `bf16x6` on an H200. All four
           take longer than predicted: tf32 about 1.5 times as long, and the others about a third
           longer. The rates `tf32` and `bf16` were measured with a library's products. The Triton
           kernel waits for each product and adds the sums on CUDA cores, so it does not reach those
           rates. We did not measure the waits and the additions separately. `bf16x3` is still
           almost four times as fast as fp32 on CUDA cores, and `tf32x3` and `bf16x6` are almost
           twice as fast. `tf32x3` and `bf16x6` take about the same time, as predicted.
Use when   fp32 products take most of the time, and TF32 is not accurate enough. For `tf32x3` and
           `bf16x6`, the check accepts fp32's error: the error of an fp32 sum that is rounded at
           each step. For `bf16x3` and tf32, the check accepts the error of operands with 11 bits.
           `bf16x3` keeps 16 bits, so its error is far smaller than accepted, but larger than the
           error of fp32. Parts in bf16 have the same exponent range as fp32, but very small numbers
           lose their low parts. Infinity splits into infinity and NaN, so these sides turn infinite
           values into NaN.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare
from suites.rounding import to_even

CONFIGS = [
    triton.Config({"M": m, "N": n, "K": k}, num_warps=m // 16, num_stages=stages)
    for m, n, k, stages in (
        (128, 128, 64, 3),
        (128, 128, 32, 3),
        (128, 64, 32, 2),
        (64, 128, 32, 2),
    )
]
BLOCK = 1024
DROPPED = {torch.float32: 13, torch.bfloat16: 16}  # fp32's mantissa bits minus a part's
BYTES = {"tf32": 4, "bf16": 2}


def launchable(configs, named, PARTS, PRODUCT, **meta):
    """Keep configs whose tiles of all parts and stages fit into shared memory."""
    driver = triton.runtime.driver.active
    most = driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]
    size = PARTS * (2 if tl.bfloat16 == PRODUCT else 4)

    def needed(M, N, K, stages):
        return stages * size * (M + N) * K + 1024

    return [each for each in configs if needed(**each.kwargs, stages=each.num_stages) <= most]


@triton.jit
def split_kernel(
    x, out, size, PARTS: tl.constexpr, DROPPED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(x + at, mask=at < size, other=0.0)
    for part in tl.static_range(PARTS):
        rounded = to_even(rest, DROPPED=DROPPED)
        rest -= rounded
        tl.store(out + part * size + at, rounded.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def loaded(x, part, rows, at, m, k, PRODUCT: tl.constexpr):
    inside = (rows[:, None] < m) & (at[None, :] < k)
    start = x + (part * m + rows[:, None]).to(tl.int64) * k
    return tl.load(start + at[None, :], mask=inside, other=0.0).to(PRODUCT)


@triton.autotune(
    CONFIGS,
    key=["m", "n", "k", "PARTS", "PRODUCT"],
    prune_configs_by={"early_config_prune": launchable},
)
@triton.jit
def product_kernel(
    x,
    w,
    out,
    m,
    n,
    k,
    one,
    PARTS: tl.constexpr,
    PRODUCT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    # Eight rows of tiles at a time reuse the L2.
    columns, index = tl.cdiv(n, N), tl.program_id(0)
    group, inside = index // (8 * columns), index % (8 * columns)
    height = min(tl.cdiv(m, M) - 8 * group, 8)
    rows = (8 * group + inside % height) * M + tl.arange(0, M)
    outputs = inside // height * N + tl.arange(0, N)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        at = start + tl.arange(0, K)
        x_high = loaded(x, 0, rows, at, m, k, PRODUCT)
        w_high = loaded(w, 0, outputs, at, n, k, PRODUCT)
        step = tl.zeros((M, N), tl.float32)
        # Add the smallest products first: while the sum is small, its rounding errors are small.
        if PARTS > 1:
            x_low = loaded(x, 1, rows, at, m, k, PRODUCT)
            w_low = loaded(w, 1, outputs, at, n, k, PRODUCT)
            if PARTS > 2:
                x_last = loaded(x, 2, rows, at, m, k, PRODUCT)
                w_last = loaded(w, 2, outputs, at, n, k, PRODUCT)
                step = tl.dot(x_last, w_high.T, step, input_precision="tf32")
                step = tl.dot(x_high, w_last.T, step, input_precision="tf32")
                step = tl.dot(x_low, w_low.T, step, input_precision="tf32")
            step = tl.dot(x_low, w_high.T, step, input_precision="tf32")
            step = tl.dot(x_high, w_low.T, step, input_precision="tf32")
        step = tl.dot(x_high, w_high.T, step, input_precision="tf32")
        # Without the factor, Triton would sum all steps in the tensor cores. With the factor, each
        # step starts at 0 and ends with one multiply-add for each output, as the PTX for sm90
        # shows.
        total += step * one
    here = (rows[:, None] < m) & (outputs[None, :] < n)
    tl.store(out + rows[:, None].to(tl.int64) * n + outputs[None, :], total, mask=here)


def inputs(device, m, n, k):
    return torch.randn(m, k, device=device), torch.randn(n, k, device=device)


def reference(x, w):
    return x.double() @ w.double().t()


def fp32(x, w):
    return F.linear(x, w)


def parts_of(x, count, dtype):
    out = torch.empty(count, *x.shape, device=x.device, dtype=dtype)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    split_kernel[grid](x, out, x.numel(), PARTS=count, DROPPED=DROPPED[dtype], BLOCK=BLOCK)
    return out


def split_and_multiplied(x, w, count, dtype):
    (m, k), n = x.shape, len(w)
    out = torch.empty(m, n, device=x.device)
    x_parts, w_parts = parts_of(x, count, dtype), parts_of(w, count, dtype)
    # Triton 3.9's interpreter treats bf16 as integers. In fp32, the products are the same.
    bf16 = dtype == torch.bfloat16 and x.is_cuda

    def grid(meta):
        return (triton.cdiv(m, meta["M"]) * triton.cdiv(n, meta["N"]),)

    product_kernel[grid](
        x_parts,
        w_parts,
        out,
        m,
        n,
        k,
        1.0,
        PARTS=count,
        PRODUCT=tl.bfloat16 if bf16 else tl.float32,
    )
    return out


def tf32(x, w):
    return split_and_multiplied(x, w, 1, torch.float32)


def tf32x3(x, w):
    return split_and_multiplied(x, w, 2, torch.float32)


def bf16x3(x, w):
    return split_and_multiplied(x, w, 2, torch.bfloat16)


def bf16x6(x, w):
    return split_and_multiplied(x, w, 3, torch.bfloat16)


def fp32_cost(m, n, k):
    return Cost(read=4 * (m + n) * k, write=4 * m * n, ops={"fp32": 2 * m * n * k}, launches=1)


def split_cost(m, n, k, kind, parts, products):
    elements = (m + n) * k
    kept = BYTES[kind] * parts * elements
    splitting = Cost(read=4 * elements, write=kept, launches=2)
    return splitting + Cost(
        read=kept, write=4 * m * n, ops={kind: products * 2 * m * n * k}, launches=1
    )


@compare(
    baseline=fp32,
    optimized=[
        Variant(tf32, precision="tf32", at_least={"sm90": 3.9}),
        Variant(tf32x3, at_least={"sm90": 1.6}),
        Variant(bf16x3, precision="tf32", at_least={"sm90": 3.0}),
        Variant(bf16x6, at_least={"sm90": 1.4}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 8192, "k": 4096}],
    check_sizes=[{"m": 37, "n": 50, "k": 300}, {"m": 1, "n": 130, "k": 65}],
    work=lambda m, n, k: Work(
        read=4 * (m + n) * k, write=4 * m * n, flops={"tf32": 2 * m * n * k}, terms=k
    ),
    bound="tensor",
    costs={
        fp32: fp32_cost,
        tf32: lambda m, n, k: split_cost(m, n, k, "tf32", parts=1, products=1),
        tf32x3: lambda m, n, k: split_cost(m, n, k, "tf32", parts=2, products=3),
        bf16x3: lambda m, n, k: split_cost(m, n, k, "bf16", parts=2, products=3),
        bf16x6: lambda m, n, k: split_cost(m, n, k, "bf16", parts=3, products=6),
    },
)
def test_split_products(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
