"""Tail: start the longest work first, so that only short work is left at the end.

Problem    Multiply a lower triangular fp32 matrix of m rows by a vector. The rows are packed: row i
           has i + 1 elements. Causal attention and pairwise distances are also triangular problems.
Baseline   in_order: a warp per row, in the order of the rows. An H200 can run 8448 warps at a time,
           and the longest rows start last.
Optimized  longest_first: changes `in_order`. Warp w gets row m - 1 - w. Only the order of the rows
           changes, so the longest rows start first.
           in_pieces: changes `in_order`. A warp gets a piece of at most 2048 elements of a row, and
           adds its sum to the row's result with an atomic. A separate launch first sets the results
           to zero. There is no library variant, because PyTorch has no product of packed triangular
           matrices. A dense product would also read the zeros of the upper triangle.
Bound      DRAM: every element is read once. A lane has four loads in flight, so a warp has 512
           bytes in flight. The latency of an idle DRAM is 0.34 us, so the full rate needs about
           3000 active warps, and more when DRAM is busy. The last warps of `in_order` have long
           rows of different lengths. These warps end one by one, so fewer and fewer warps read, and
           the rate drops. In `longest_first`, the last warps have rows of a few elements, so the
           rate drops only at the very end. `in_pieces` has no long pieces, but needs a second
           launch, and an additional warp and an atomic for each piece. The costs count bytes, so
           the predicted times include no tail.
Use when   The pieces of work have known and different lengths. Start the long pieces first, which
           takes one subtraction or a sorted list of indices. If a single piece of work is still too
           long, split it. If the lengths are unknown, use a queue (`../ch12/uneven_work_test.py`).
           If the pieces are few and equally long, their number decides whether there is a tail
           (`../ch02/wave_quantization_test.py`). With many short pieces per SM, the tail is too
           short to matter.
"""

import torch

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("tail.cu")
BLOCK, WARPS, PIECE = 256, 8, 2048


def packed_elements(m):
    return m * (m + 1) // 2


def inputs(device, m):
    return torch.randn(packed_elements(m), device=device), torch.randn(m, device=device)


def reference(packed, x):
    m = x.numel()
    lower = torch.ones(m, m, dtype=torch.bool, device=x.device).tril()
    dense = torch.zeros(m, m, dtype=torch.float64, device=x.device)
    return dense.masked_scatter(lower, packed.double()) @ x.double()


def row_per_warp(kernel, packed, x):
    out = torch.empty_like(x)
    m = x.numel()
    kernel[-(-m // WARPS), BLOCK](packed, x, out, m)
    return out


def in_order(packed, x):
    return row_per_warp(kernels.in_order, packed, x)


def longest_first(packed, x):
    return row_per_warp(kernels.longest_first, packed, x)


def in_pieces(packed, x):
    out = torch.zeros_like(x)
    m = x.numel()
    kernels.in_pieces[(-(-m // WARPS), -(-m // PIECE)), BLOCK](packed, x, out, m)
    return out


def multiplied(m, atomics=0, blocks=0):
    elements = packed_elements(m)
    reading = {"read": 4 * (elements + m), "ops": {"fp32": 2 * elements}}
    return Cost(**reading, write=4 * m, atomics=atomics, blocks=blocks, launches=1)


def filled_and_added(m):
    pieces = sum(-(-row // PIECE) for row in range(1, m + 1))
    blocks = -(-m // WARPS) * -(-m // PIECE)  # blocks whose rows have no such piece also start
    return Cost(write=4 * m, launches=1) + multiplied(m, atomics=pieces, blocks=blocks)


@compare(
    baseline=in_order,
    optimized=[
        longest_first,
        # The second launch and the many short warps may cost as much as the tail.
        Variant(in_pieces, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 2**14}],
    check_sizes=[{"m": 75}, {"m": 33}, {"m": 2051}],
    work=lambda m: Work(
        read=4 * (packed_elements(m) + m),
        write=4 * m,
        flops={"fp32": 2 * packed_elements(m)},
        terms=m,
    ),
    bound="dram",
    costs={in_order: multiplied, longest_first: multiplied, in_pieces: filled_and_added},
)
def test_tail(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
