"""Asynchronous copies: what a block fetches must not wait until it has done with what it has.

Problem    h = relu(0.75 h + x) along each of 8192 rows of 16384 fp32 steps, time innermost, every h
           written: a recurrence that is not linear, so a thread a row and 64 threads an SM.
Baseline   synchronous: a block takes 64 rows, 32 steps at a time (128 bytes a row, or a lane would
           read a sector for 4 bytes): loads them into shared memory, waits, walks, writes them
           back. Each thread loads its eight 16 bytes before it stores the first.
Optimized  one_stage: the same by `cp.async`, which leaves registers out. It still waits.
           two_stages: tile i + 1 is on its way while the block walks and writes tile i.
           four_stages: three tiles are on their way, 24 KiB an SM.
Bound      DRAM: a tile is 8 KiB read and 8 written; at 4.24 TB/s 128 blocks have one each 0.49 us.
           To fetch it takes 0.7 us or more from a DRAM that is busy, to walk 0.2 to 0.3 us (32
           steps, each a product, a comparison and a choice), to write 0.1 us. synchronous pays the
           sum, 1.1 us; one_stage as well, 1.0x; two_stages the longer half, 0.7 us, 1.5x;
           four_stages has three times the bytes in flight and is left with DRAM, 0.5 us, 2.2x.
           With 2048 threads an SM other blocks would hide the same: stages are for kernels that
           cannot have them. No library has this recurrence; the yardstick is a copy's 4.24 TB/s.
Seen       An H200 gains nothing from one_stage, 1.3x from two_stages and 2.0x from four_stages: the
           order is as predicted, both gains are smaller. A tile takes 1.34, 1.35, 1.06 and 0.68 us.
           The first three fit a fetch of 1.06 us, longer than *Bound* has it, and 0.28 us to walk
           and write. Three such fetches at a time would leave four_stages with DRAM's 0.5 us; why
           it stays at 73 % of the copy rate is not explained.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Variant, Work, compare, cuda_module

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


@compare(
    baseline=synchronous,
    optimized=[
        # It waits as long as its baseline: what it saves is registers, which nobody misses here.
        Variant(one_stage, sass="LDGSTS.128", at_least="neutral"),
        Variant(two_stages, sass="LDGSTS.128", at_least={"sm90": 1.1}),
        Variant(four_stages, sass="LDGSTS.128", at_least={"sm90": 1.7}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 8192, "steps": 16384}],
    # Copies of 16 bytes want steps to be a multiple of 4; a tile is 64 rows and 32 steps.
    check_sizes=[
        {"rows": 33, "steps": 36},
        {"rows": 130, "steps": 260},
        {"rows": 64, "steps": 32},
        {"rows": st.integers(1, 150), "steps": st.integers(8, 64).map(lambda fours: 4 * fours)},
    ],
    # What lies 16 steps back has decayed to a hundredth: an h is a sum of 16 terms.
    work=lambda rows, steps: Work(
        read=4 * rows * steps, write=4 * rows * steps, flops={"fp32": 2 * rows * steps}, terms=16
    ),
    bound="dram",
)
def test_async_copy(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
