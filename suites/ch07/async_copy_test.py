"""Asynchronous copies: fetch the next tiles while the block works on the current one.

Problem    Compute h = relu(0.75 h + x) along each of 8192 rows of 16384 fp32 steps, and write every
           h. Each step needs the previous h, so one thread computes a whole row, and there are only
           64 threads per SM. torch has no function for such a recurrence.
Baseline   synchronous: a block loads a tile of 64 rows and 32 steps (128 bytes per row) into shared
           memory, waits, computes the steps of the tile, and writes the results back. Each thread
           issues its eight 16-byte loads before its first store.
Optimized  one_stage: changes `synchronous`. `cp.async` loads the tile and bypasses registers. The
           block still waits for each tile.
           two_stages: changes `one_stage`. The block fetches tile i + 1 while it works on tile i.
           four_stages: changes `two_stages`. The block fetches three tiles ahead, 24 KiB per SM.
Bound      DRAM: every side reads each x once and writes each h once.
Seen       All sides take longer than predicted. The costs count only bytes, but an SM has only one
           block, which fetches a tile, then computes its steps, then writes the results. In
           `synchronous` and `one_stage`, the SM fetches nothing while the block computes and
           writes. `one_stage` only replaces the load instruction, and gains nothing. `two_stages`
           and `four_stages` only fetch earlier. `two_stages` is faster than `one_stage`, and
           `four_stages` is faster than `two_stages`. `four_stages` still does not reach the copy
           rate. Each step is a chain of three dependent instructions (FFMA, FSETP and FSEL with
           nvcc 13.0 for sm_90), and the SM has no other block to run in the meantime. We did not
           measure how long these chains take, so we do not know whether they explain the rest. With
           blocks of 32 rows, most SMs would have a second block, which could hide part of the wait
           even without additional stages. We did not try smaller blocks.
Use when   A kernel can have only a few threads per SM, because few rows can be computed in
           parallel, or because each thread needs much memory. With 2048 threads per SM, other
           blocks hide the wait.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("async_copy.cu")
ROWS = 64


def inputs(device, rows, steps):
    return (torch.randn(rows, steps, device=device),)


def reference(x):
    # The steps up to t map h to max(low, factor * h + up). Compose the maps of 1, 2, 4 ... steps.
    up, factor, span = x.double(), 0.75, 1
    low = torch.zeros_like(up)
    while span < x.shape[1]:
        lower = torch.maximum(low[:, span:], factor * low[:, :-span] + up[:, span:])
        higher = factor * up[:, :-span] + up[:, span:]
        low = torch.cat([low[:, :span], lower], dim=1)
        up = torch.cat([up[:, :span], higher], dim=1)
        factor, span = factor * factor, 2 * span
    return torch.maximum(low, up)


def launch(kernel, x):
    out = torch.empty_like(x)
    rows, steps = x.shape
    kernel[-(-rows // ROWS), ROWS](x, out, rows, steps // 4)
    return out


def synchronous(x):
    return launch(kernels.synchronous, x)


def one_stage(x):
    return launch(kernels.one_stage, x)


def two_stages(x):
    return launch(kernels.two_stages, x)


def four_stages(x):
    return launch(kernels.four_stages, x)


def moved(rows, steps):
    elements = rows * steps
    return Cost(read=4 * elements, write=4 * elements, ops={"fp32": 2 * elements}, launches=1)


@compare(
    baseline=synchronous,
    optimized=[
        # one_stage waits as long as synchronous. one_stage saves registers, but there are enough
        # registers anyway.
        Variant(one_stage, sass="LDGSTS.128", at_least="neutral"),
        Variant(two_stages, sass="LDGSTS.128", at_least={"sm90": 1.1}),
        Variant(four_stages, sass="LDGSTS.128", at_least={"sm90": 1.7}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 8192, "steps": 16384}],
    # Copies of 16 bytes need steps to be a multiple of 4. A tile is 64 rows and 32 steps.
    check_sizes=[
        {"rows": 33, "steps": 36},
        {"rows": 130, "steps": 260},
        {"rows": 64, "steps": 32},
        {"rows": st.integers(1, 150), "steps": st.integers(8, 64).map(lambda fours: 4 * fours)},
    ],
    # After 16 steps, an x has decayed to a hundredth, so h is a sum of about 16 terms.
    work=lambda rows, steps: Work(
        read=4 * rows * steps, write=4 * rows * steps, flops={"fp32": 2 * rows * steps}, terms=16
    ),
    bound="dram",
    costs=dict.fromkeys([synchronous, one_stage, two_stages, four_stages], moved),
)
def test_async_copy(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
