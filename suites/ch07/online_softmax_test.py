"""Softmax of long rows: find maximum and sum in one pass, not in two.

Problem    Softmax of each row of a (rows, n) fp32 matrix whose rows fit neither registers nor, all
           that are at work together, the L2.
Baseline   three_passes: a pass for the row's maximum, one for the sum, one that writes: 12 bytes
           read and 4 written an element. The textbook's safe softmax, one program a row.
Optimized  online: maximum and sum in one pass; a sum is scaled down when its maximum grows
           (Milakov and Gimelshein, arXiv:1805.02867). 8 bytes read and 4 written, one more
           exponential an element.
           library: `torch.softmax`.
Bound      DRAM: 16 bytes an element against 12, so 1.33 times at most. What the L2 still holds of a
           row when its next pass comes is saved on both sides, and the gain with it. The
           exponentials, 3 an element, are a third of what an H200 computes in that time.
Seen       An H200 gains 1.3x, close to what the bytes predict: three_passes moves its 16 bytes at
           97 % of the copy rate, online its 12 at 94 %. `torch.softmax`, which reads as often as
           the baseline, gains 0.98x.
"""

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare

BLOCK = 4096
WARPS = 8


@triton.jit
def three_passes_kernel(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    lanes = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + lanes
        most = tl.maximum(most, tl.load(x + row + at, mask=at < n, other=float("-inf")))
    largest = tl.max(most)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + lanes
        total += tl.exp(tl.load(x + row + at, mask=at < n, other=float("-inf")) - largest)
    scale = 1 / tl.sum(total)
    for start in range(0, n, BLOCK):
        at = start + lanes
        value = tl.load(x + row + at, mask=at < n)
        tl.store(out + row + at, tl.exp(value - largest) * scale, mask=at < n)


@triton.jit
def online_kernel(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    lanes = tl.arange(0, BLOCK)
    # The lowest number, not -inf: a lane that sees no element must not compute -inf - -inf.
    most = tl.full((BLOCK,), -3.4028234e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + lanes
        value = tl.load(x + row + at, mask=at < n, other=float("-inf"))
        larger = tl.maximum(most, value)
        total = total * tl.exp(most - larger) + tl.exp(value - larger)
        most = larger
    largest = tl.max(most)
    scale = 1 / tl.sum(total * tl.exp(most - largest))
    for start in range(0, n, BLOCK):
        at = start + lanes
        value = tl.load(x + row + at, mask=at < n)
        tl.store(out + row + at, tl.exp(value - largest) * scale, mask=at < n)


def inputs(device, rows, n):
    return (torch.randn(rows, n, device=device),)


def reference(x):
    return x.double().softmax(dim=1)


def launch(kernel, x):
    out = torch.empty_like(x)
    kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return out


def three_passes(x):
    return launch(three_passes_kernel, x)


def online(x):
    return launch(online_kernel, x)


def library(x):
    return torch.softmax(x, dim=1)


def moved(rows, n, reads):
    ops = {"fp32": 4 * rows * n}
    return Cost(read=4 * reads * rows * n, write=4 * rows * n, ops=ops, launches=1)


@compare(
    baseline=three_passes,
    optimized=[online, Variant(library, at_least="yardstick")],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 2048, "n": 65536}],
    check_sizes=[
        {"rows": 3, "n": 1023},
        {"rows": 2, "n": 9001},
        {"rows": st.integers(1, 4), "n": st.integers(33, 9000)},
    ],
    work=lambda rows, n: Work(
        read=4 * rows * n, write=4 * rows * n, flops={"fp32": 4 * rows * n}, terms=n, roundings=3
    ),
    bound="dram",
    costs={
        three_passes: lambda rows, n: moved(rows, n, reads=3),
        online: lambda rows, n: moved(rows, n, reads=2),
        library: lambda rows, n: moved(rows, n, reads=3),
    },
    at_least={"sm90": 1.1},
)
def test_online_softmax(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
