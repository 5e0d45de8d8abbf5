"""SwiGLU: an epilogue that combines two matrix products.

Problem    Compute silu(x gate^T) * (x up^T) in fp16, with sums in fp32. test_swiglu has the MLP
           shape of an 8-billion-parameter model. test_swiglu_narrow has a smaller k, so each result
           needs fewer multiply-adds. x is (m, k). The weights gate and up are (n, k) each, and are
           the halves of one (2n, k) tensor.
Baseline   separate: the library's two matrix products, then `silu`, then an elementwise product.
Optimized  activated: changes `separate`. One Triton kernel replaces the two pointwise kernels.
           one_product: changes `activated`. The library multiplies by the whole (2n, k) tensor in
           one matrix product.
           own_products: changes `activated`. One Triton kernel computes a tile of both products and
           writes both tiles. `own_products` is there only for comparison with `fused`, and the page
           claims no speedup for it.
           fused: changes `own_products`. The kernel combines the two tiles in registers, and writes
           only the result. `own_products` and `fused` are autotuned over the same three
           configurations, and may choose different ones.
Bound      Tensor cores limit test_swiglu. The pointwise kernels take a tenth of the time, so
           `activated` can gain only a few percent. The page claims no speedup for `one_product`,
           because the library may also be faster or slower with the wider matrix. DRAM limits
           test_swiglu_narrow, with k = 256. `separate` writes both products. The two pointwise
           kernels of `separate` read both products, pass a tensor from the first kernel to the
           second, and write the result. `fused` writes only the result. A block first multiplies
           and then stores. The costs add the times of these two phases, because with few steps of k
           the phases can hardly overlap. The costs ignore data that a product leaves in the L2 for
           the next kernel.
Seen       On an H100, `own_products` and `fused` take longer than predicted, because a Triton
           product with these tiles does not reach the library's rate. The library's products take
           as long as predicted. In test_swiglu, `fused` takes as long as `own_products`, and both
           are slower than `separate`. In test_swiglu_narrow, `fused` is the fastest side, although
           `own_products` is slower than `separate`. At each shape, `activated` and `one_product`
           have about the same speedup.
Use when   k is small, or DRAM is slow. If k is large, use the library's products and one pointwise
           kernel, because the library's faster products save more time than the epilogue does.
           `../ch10/epilogue_test.py` shows the library's epilogue for GELU with a bias.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pytest_aisp import Cost, Variant, Work, compare

# The configurations need at most 96 KiB of shared memory, which a block can get on every arch.
CONFIGS = [
    triton.Config({"M": 128, "N": 64, "K": 64}, num_warps=8, num_stages=3),
    triton.Config({"M": 128, "N": 128, "K": 64}, num_warps=8, num_stages=2),
    triton.Config({"M": 128, "N": 64, "K": 64}, num_warps=4, num_stages=3),
]
BLOCK = 2048


@triton.jit
def joined(gate, up):
    """Return silu(gate) * up. Round to fp16 wherever `separate` stores a value."""
    gate = gate.to(tl.float16).to(tl.float32)
    active = (gate / (1 + tl.exp(-gate))).to(tl.float16)
    return active.to(tl.float32) * up.to(tl.float16).to(tl.float32)


@triton.jit
def join_kernel(gate, up, out, n, gate_stride, up_stride, BLOCK: tl.constexpr):
    """Store silu(gate) * up for rows of two tensors. A program processes BLOCK elements."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(gate + row * gate_stride + j, mask=j < n).to(tl.float32)
    right = tl.load(up + row * up_stride + j, mask=j < n).to(tl.float32)
    tl.store(out + row * n + j, joined(left, right).to(tl.float16), mask=j < n)


@triton.jit
def tile_of(m, n, M: tl.constexpr, N: tl.constexpr):
    """Return this tile's first row and column. Taking 8 tile rows at a time reuses L2 data."""
    rows, columns = tl.cdiv(m, M), tl.cdiv(n, N)
    group = tl.program_id(0) // (8 * columns)
    height = min(rows - 8 * group, 8)
    inside = tl.program_id(0) % (8 * columns)
    return (8 * group + inside % height) * M, inside // height * N


@triton.autotune(CONFIGS, key=["m", "n", "k", "JOINED"])
@triton.jit
def products_kernel(
    x,
    w,
    out,
    m,
    n,
    k,
    JOINED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    row, column = tile_of(m, n, M, N)
    i, j, steps = row + tl.arange(0, M), column + tl.arange(0, N), tl.arange(0, K)
    gate = tl.zeros((M, N), tl.float32)
    up = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        at = start + steps
        left = (i[:, None] < m) & (at[None, :] < k)
        right = (at[:, None] < k) & (j[None, :] < n)
        a = tl.load(x + i[:, None] * k + at[None, :], mask=left, other=0.0)
        place = w + j[None, :] * k + at[:, None]
        gate = tl.dot(a, tl.load(place, mask=right, other=0.0), gate)
        up = tl.dot(a, tl.load(place + n * k, mask=right, other=0.0), up)
    inside = (i[:, None] < m) & (j[None, :] < n)
    place = out + i[:, None] * n + j[None, :]
    if JOINED:
        tl.store(place, joined(gate, up).to(tl.float16), mask=inside)
    else:
        tl.store(place, gate.to(tl.float16), mask=inside)
        tl.store(place + m * n, up.to(tl.float16), mask=inside)


def inputs(device, m, n, k):
    x = torch.randn(m, k, device=device, dtype=torch.float16)
    return x, torch.randn(2 * n, k, device=device, dtype=torch.float16) / k**0.5


def reference(x, w):
    gate, up = (x.double() @ w.double().mT).chunk(2, dim=1)
    return F.silu(gate) * up


def separate(x, w):
    gate, up = w.chunk(2)
    return F.silu(x @ gate.mT) * (x @ up.mT)


def join(gate, up):
    m, n = gate.shape
    out = torch.empty(m, n, device=gate.device, dtype=gate.dtype)
    grid = (m, triton.cdiv(n, BLOCK))
    join_kernel[grid](gate, up, out, n, gate.stride(0), up.stride(0), BLOCK=BLOCK, num_warps=8)
    return out


def activated(x, w):
    gate, up = w.chunk(2)
    return join(x @ gate.mT, x @ up.mT)


def one_product(x, w):
    return join(*(x @ w.mT).chunk(2, dim=1))


def in_tiles(x, w, one):
    (m, k), n = x.shape, len(w) // 2
    out = torch.empty(1 if one else 2, m, n, device=x.device, dtype=x.dtype)

    def grid(meta):
        return (triton.cdiv(m, meta["M"]) * triton.cdiv(n, meta["N"]),)

    products_kernel[grid](x, w, out, m, n, k, JOINED=one)
    return out


def own_products(x, w):
    return join(*in_tiles(x, w, one=False))


def fused(x, w):
    return in_tiles(x, w, one=True)[0]


def multiplied(m, n, k, results):
    """Return the cost of a product with `results` * n columns, not counting its writes."""
    return Cost(
        read=2 * (m * k + results * n * k),
        ops={"fp16": 2 * results * m * n * k},
        launches=1,
    )


def pointwise(m, n, read, sfu):
    return Cost(read=2 * read * m * n, write=2 * m * n, sfu=sfu * m * n, launches=1)


def stored(m, n, results):
    return Cost(write=2 * results * m * n)


def products(m, n, k):
    """Return the cost of one kernel for both products. Its blocks first multiply, then store."""
    return multiplied(m, n, k, results=2) + stored(m, n, results=2)


def two_products(m, n, k):
    return 2 * (multiplied(m, n, k, results=1) + stored(m, n, results=1))


COSTS = {
    separate: lambda m, n, k: (
        two_products(m, n, k) + pointwise(m, n, 1, sfu=2) + pointwise(m, n, 2, sfu=0)
    ),
    activated: lambda m, n, k: two_products(m, n, k) + pointwise(m, n, 2, sfu=2),
    one_product: lambda m, n, k: products(m, n, k) + pointwise(m, n, 2, sfu=2),
    own_products: lambda m, n, k: products(m, n, k) + pointwise(m, n, 2, sfu=2),
    fused: lambda m, n, k: (
        multiplied(m, n, k, results=2) + Cost(sfu=2 * m * n) + stored(m, n, results=1)
    ),
}
CHECK_SIZES = [{"m": 33, "n": 41, "k": 65}, {"m": 3, "n": 2100, "k": 33}]


def work(m, n, k):
    return Work(
        read=2 * (m * k + 2 * n * k),
        write=2 * m * n,
        flops={"fp16": 4 * m * n * k},
        terms=k,
        roundings=4,
    )


@compare(
    baseline=separate,
    optimized=[
        activated,
        Variant(one_product, at_least="yardstick"),
        Variant(own_products, at_least="yardstick"),
        Variant(fused, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 8192, "n": 14336, "k": 4096}],
    check_sizes=CHECK_SIZES,
    work=work,
    bound="tensor",
    costs=COSTS,
)
def test_swiglu(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=separate,
    optimized=[
        Variant(activated, at_least={"sm90": 1.1}),
        Variant(one_product, at_least={"sm90": 1.1}),
        Variant(own_products, at_least="yardstick"),
        Variant(fused, at_least={"sm90": 1.4}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 16384, "n": 8192, "k": 256}],
    check_sizes=CHECK_SIZES,
    work=work,
    bound="dram",
    costs=COSTS,
)
def test_swiglu_narrow(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
