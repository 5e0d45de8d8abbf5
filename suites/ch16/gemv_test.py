"""Weight-only GEMV: multiply one row without tensor cores, and convert weights cheaply.

Problem    Compute y = W x for one token of a decode step. x, W (n, k) and y are bf16. The weights
           are the page's state.
Baseline   library: `torch.nn.functional.linear`, which calls cuBLAS.
Optimized  bf16: a CUDA C++ kernel. A warp computes four rows, and sums in fp32. This variant shows
           the gain of the kernel alone.
           int8: changes `bf16`. There is one byte per weight, and one scale per row of W. The
           weights are quantized once, before the timed part. Bit operations and a subtraction
           convert a byte to a float.
           int4: changes `int8`. There is half a byte per weight, and one fp32 scale per 128 weights
           of a row. The weights in a word are in an order in which one mask extracts two weights.
           The conversion adds an offset to each weight. The kernel subtracts the offsets from the
           sum, once per 32 weights.
Bound      DRAM limits bf16 and int8. `int4` reads half the bytes of int8 and needs about as many
           instructions per weight, most of them for the conversion. So instructions and DRAM limit
           int4 about equally. `weight_only_test.py` in chapter 13 solves the same problem with
           tensor cores, whose products always have 16 rows. That kernel takes more instructions per
           weight.
Seen       On an H100, `int4` takes longer than its loads alone or its instructions alone would
           take, but less than the sum of both. A warp loads its weights and then converts them, so
           loads and conversions overlap only across warps. The kernel uses 80 registers, so an SM
           holds three blocks. On 132 SMs, the 896 blocks do not fill the last wave, so many SMs
           then have less to overlap. We did not measure each of these effects.
Use when   One sequence is decoded at a time. Each additional row of x adds multiplications on the
           CUDA cores, so with more than a few rows, tensor cores are faster. 4-bit weights cost
           accuracy. This page has random weights, so it cannot show the loss (see
           `outliers_test.py` in chapter 19).
"""

import torch
import triton
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("gemv.cu")
WARPS, ROWS, GROUP = 8, 4, 128  # as in the kernels


def state(device, n, k):
    return torch.randn(n, k, device=device, dtype=torch.bfloat16)


def inputs(device, n, k):
    return (torch.randn(k, device=device, dtype=torch.bfloat16),)


def reference(w, x):
    return w.double() @ x.double()


def library(w, x):
    return F.linear(x, w)


def blocks(n):
    return triton.cdiv(n, WARPS * ROWS)


def bf16(w, x):
    y = torch.empty(len(w), device=x.device, dtype=x.dtype)
    kernels.gemv_bf16[blocks(len(w)), 32 * WARPS](w, x, y, *w.shape)
    return y


def rounded(w, most):
    """Return `w` as integers up to `most`, with one fp32 scale per row of its last dimension."""
    scales = (w.float().abs().amax(dim=-1, keepdim=True) / most).clamp(min=1e-12)
    return (w.float() / scales).round().clamp(-most, most).int(), scales.squeeze(-1)


def int8(w, x):
    n, k = w.shape
    integers, scales = rounded(w, 127)
    stored = (integers + 128).to(torch.uint8)

    def run():
        y = torch.empty(n, device=x.device, dtype=x.dtype)
        kernels.gemv_int8[blocks(n), 32 * WARPS](stored, scales, x, y, n, k)
        return y

    yield run


def in_words(integers):
    """Pack eight weights from -8 to 7 into an int32, with weights 0, 2, 4, 6 in the lower half."""
    places = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], device=integers.device)
    halves = (integers + 8).unflatten(-1, (-1, 8)).long()
    words = (halves << places).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).int()


def int4(w, x):
    n, k = w.shape
    integers, scales = rounded(w.view(n, -1, GROUP), 7)
    stored = in_words(integers.view(n, k))

    def run():
        y = torch.empty(n, device=x.device, dtype=x.dtype)
        kernels.gemv_int4[blocks(n), 32 * WARPS](stored, scales, x, y, n, k)
        return y

    yield run


def product_cost(weights, instructions=0):
    """Return a function from the page's sizes to the cost of a product.

    Args:
        weights: bytes per weight, including its share of the scales.
        instructions: the number per weight, counted in the loop of the sm90 machine code. Each
            instruction takes the slot of an fp32 multiply-add, so it counts as 2 operations.
    """

    def cost(n, k):
        return Cost(
            read=weights * n * k + 2 * k,
            write=2 * n,
            ops={"fp32": 2 * max(1, instructions) * n * k},
            launches=1,
        )

    return cost


FOUR_BITS = 0.5 + 4 / GROUP


@compare(
    baseline=library,
    optimized=[
        Variant(bf16, at_least="yardstick"),
        Variant(int8, precision="int8", at_least={"sm90": 1.6}),
        Variant(int4, precision="w4a16", at_least={"sm90": 2.4}),
    ],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 28672, "k": 8192}],
    # The tolerance of int4 is wide, so the check needs many elements to detect a stale answer.
    check_sizes=[{"n": 101, "k": 256}, {"n": 130, "k": 1152}],
    work=lambda n, k: Work(read=FOUR_BITS * n * k + 2 * k, write=2 * n, terms=k),
    bound="dram",
    costs={
        library: product_cost(2),
        bf16: product_cost(2, 104 / 32),
        int8: product_cost(1, 300 / 64),
        int4: product_cost(FOUR_BITS, 556 / 128),
    },
)
def test_gemv(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
