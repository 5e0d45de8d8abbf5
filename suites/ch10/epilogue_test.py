"""A linear layer with GELU: apply bias and GELU while the product is in registers.

Problem    Compute GELU(x w^T + bias), with the tanh approximation of GELU. x (m, k), w (n, k), bias
           (n) and the results are fp16, and sums are fp32. k is small, so a product does little
           arithmetic for each result: k is 128 in test_epilogue and 512 in test_epilogue_deeper.
Baseline   separate: `torch.matmul`, then one kernel for bias and GELU. The product writes m n
           elements. The second kernel reads them and writes m n results.
Optimized  own_product: changes `separate`. A Triton product replaces the library's product.
           `own_product` saves no time: it is only there for comparison with `fused`, which differs
           only in the epilogue.
           fused: changes `own_product`. The same Triton product adds the bias and applies GELU in
           its epilogue.
           library: `torch._addmm_activation`, the epilogue of cuBLASLt. This kernel adds the bias
           before it rounds the product. The other sides round the product first.
Bound      DRAM, L2 and special functions, one after the other. A block multiplies, applies GELU,
           and stores. With so few steps of k, the other block on the SM hides little of this time,
           so the cost adds the times of the phases. We have not seen the code of the library's
           kernels, and assume that their phases do not overlap either.
Use when   A product has large results and a small k. With a larger k, the library's faster product
           saves more time than fusion does. In that case, use the library's own epilogue if it has
           your function.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare

# Three stages of the largest tiles need 96 KiB of shared memory, which a block can get on every
# arch.
CONFIGS = [
    triton.Config({"M": 128, "N": 128, "K": 64}, num_warps=8, num_stages=3),
    triton.Config({"M": 128, "N": 128, "K": 64}, num_warps=8, num_stages=2),
    triton.Config({"M": 128, "N": 64, "K": 64}, num_warps=4, num_stages=3),
]
BLOCK = 2048


@triton.jit
def finished(product, bias):
    """Return GELU(product + bias), using x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u))."""
    x = product.to(tl.float32) + bias.to(tl.float32)
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return (x / (1 + tl.exp(-2 * u))).to(tl.float16)


@triton.jit
def finish_kernel(c, bias, n, BLOCK: tl.constexpr):
    """Add the bias and apply GELU in place. A program processes BLOCK elements."""
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = c + tl.program_id(0).to(tl.int64) * n + j
    product = tl.load(at, mask=j < n)
    tl.store(at, finished(product, tl.load(bias + j, mask=j < n)), mask=j < n)


@triton.jit
def tile_of(m, n, M: tl.constexpr, N: tl.constexpr):
    """Return this tile's first row and column. Taking 8 tile rows at a time reuses L2 data."""
    rows, columns = tl.cdiv(m, M), tl.cdiv(n, N)
    group = tl.program_id(0) // (8 * columns)
    height = min(rows - 8 * group, 8)
    inside = tl.program_id(0) % (8 * columns)
    return (8 * group + inside % height) * M, inside // height * N


@triton.autotune(CONFIGS, key=["m", "n", "k", "FUSED"])
@triton.jit
def product_kernel(
    x,
    w,
    bias,
    c,
    m,
    n,
    k,
    FUSED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    row, column = tile_of(m, n, M, N)
    i, j, steps = row + tl.arange(0, M), column + tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        at = start + steps
        left = (i[:, None] < m) & (at[None, :] < k)
        right = (at[:, None] < k) & (j[None, :] < n)
        a = tl.load(x + i[:, None] * k + at[None, :], mask=left, other=0.0)
        b = tl.load(w + j[None, :] * k + at[:, None], mask=right, other=0.0)
        total = tl.dot(a, b, total)
    out = total.to(tl.float16)
    if FUSED:
        out = finished(out, tl.load(bias + j, mask=j < n)[None, :])
    inside = (i[:, None] < m) & (j[None, :] < n)
    tl.store(c + i[:, None] * n + j[None, :], out, mask=inside)


def inputs(device, m, n, k):
    x = torch.randn(m, k, device=device, dtype=torch.float16)
    w = torch.randn(n, k, device=device, dtype=torch.float16) / k**0.5
    return x, w, torch.randn(n, device=device, dtype=torch.float16)


def reference(x, w, bias):
    product = x.double() @ w.double().t() + bias.double()
    return torch.nn.functional.gelu(product, approximate="tanh")


def finish(c, bias):
    m, n = c.shape
    finish_kernel[m, triton.cdiv(n, BLOCK)](c, bias, n, BLOCK=BLOCK, num_warps=8)
    return c


def separate(x, w, bias):
    return finish(x @ w.t(), bias)


def product(x, w, bias, fused):
    (m, k), n = x.shape, len(w)
    c = torch.empty(m, n, device=x.device, dtype=x.dtype)

    def grid(meta):
        return (triton.cdiv(m, meta["M"]) * triton.cdiv(n, meta["N"]),)

    product_kernel[grid](x, w, bias, c, m, n, k, FUSED=fused)
    return c


def own_product(x, w, bias):
    return finish(product(x, w, bias, fused=False), bias)


def fused(x, w, bias):
    return product(x, w, bias, fused=True)


def library(x, w, bias):
    return torch._addmm_activation(bias, x, w.t(), use_gelu=True)


def work(m, n, k):
    return Work(
        read=2 * (m * k + k * n + n),
        write=2 * m * n,
        flops={"fp16": 2 * m * n * k},
        terms=k,
        roundings=2,
    )


def multiplied(m, n, k):
    """Return the cost of a product that leaves its results in registers."""
    return Cost(read=2 * (m * k + k * n + n), ops={"fp16": 2 * m * n * k}, launches=1)


def in_tiles(m, n, k, side=128):
    """Return the cost of the Triton product with tiles of side x side, its largest tiles."""
    return replace(multiplied(m, n, k), l2=m // side * (n // side) * 2 * 2 * side * k)


def gelu(m, n):
    """Return the cost of an exponential and a reciprocal per result."""
    return Cost(sfu=2 * m * n)


def stored(m, n):
    return Cost(write=2 * m * n)


def finished_in_place(m, n):
    """Return the cost of the kernel that adds the bias and applies GELU in place."""
    return Cost(read=2 * m * n, write=2 * m * n, sfu=2 * m * n, launches=1)


COSTS = {
    separate: lambda m, n, k: multiplied(m, n, k) + stored(m, n) + finished_in_place(m, n),
    own_product: lambda m, n, k: in_tiles(m, n, k) + stored(m, n) + finished_in_place(m, n),
    fused: lambda m, n, k: in_tiles(m, n, k) + gelu(m, n) + stored(m, n),
    library: lambda m, n, k: multiplied(m, n, k) + gelu(m, n) + stored(m, n),
}
CHECK_SIZES = [{"m": 33, "n": 41, "k": 65}, {"m": 3, "n": 2100, "k": 33}]


@compare(
    baseline=separate,
    optimized=[
        Variant(own_product, at_least="yardstick"),
        Variant(fused, at_least={"sm90": 1.05}),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 16384, "n": 8192, "k": 128}],
    check_sizes=CHECK_SIZES,
    work=work,
    bound="dram",
    costs=COSTS,
)
def test_epilogue(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=separate,
    optimized=[
        Variant(own_product, at_least="yardstick"),
        Variant(fused, at_least="yardstick"),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 16384, "n": 8192, "k": 512}],
    check_sizes=CHECK_SIZES,
    work=work,
    bound="dram",
    costs=COSTS,
)
def test_epilogue_deeper(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
