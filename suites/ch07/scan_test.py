"""Prefix sums in one pass: tiles publish their sums, so the data is read once, not twice.

Problem    Compute the inclusive prefix sums of n int32 values.
Baseline   reduce_then_scan: one kernel sums tiles of 8192 elements. One block turns these sums into
           prefix sums. A third kernel reads each tile again, scans it, and adds the sum of the
           tiles before it.
Optimized  look_back: changes `reduce_then_scan`. One kernel reads each tile once and scans it in
           the same way. Each tile publishes its own sum. One warp of the tile then adds up the
           published sums of earlier tiles, back to the nearest tile that has published a prefix
           sum. Then the tile publishes its own prefix sum (Merrill and Garland 2016). The words in
           which tiles publish are set to zero before the kernel, which the time includes.
           library: `torch.cumsum`, which calls CUB's DeviceScan for one contiguous row.
Bound      DRAM. `reduce_then_scan` reads 8 bytes per element and writes 4. `look_back` reads 4 and
           writes 4. `look_back` reaches the rate of DRAM only if prefix sums pass from tile to tile
           fast enough.
Seen       `look_back` takes longer than its bytes predict. The third kernel of `reduce_then_scan`
           scans the same tiles without this loss, so the scan of a tile is not the cause. We did
           not measure how long tiles wait for a prefix. `library` takes longer than `look_back`,
           but CUB itself does not: benchmarks/cub_test.py calls DeviceScan without torch, and is
           slightly faster than `look_back`. We cannot explain why `torch.cumsum` takes longer.
Use when   The data of a scan is too large for the L2, so reading the data twice costs time. If your
           code can call CUB's DeviceScan, call it instead of writing this kernel.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("scan.cu")
BLOCK = 256
TILE = 32 * BLOCK


def inputs(device, n):
    return (torch.randint(-9, 10, (n,), device=device, dtype=torch.int32),)


def reference(x):
    return torch.cumsum(x, 0, dtype=torch.int64)


def tiles_of(x):
    return -(-x.numel() // TILE)


def reduce_then_scan(x):
    n, tiles = x.numel(), tiles_of(x)
    out, sums = torch.empty_like(x), x.new_empty(tiles)
    kernels.tile_sums[tiles, BLOCK](x, sums, n)
    kernels.scan_sums[1, BLOCK](sums, tiles)
    kernels.scan_tiles[tiles, BLOCK](x, sums, out, n)
    return out


def look_back(x):
    n, tiles = x.numel(), tiles_of(x)
    out = torch.empty_like(x)
    known = torch.zeros(tiles + 1, dtype=torch.int64, device=x.device)
    kernels.look_back[tiles, BLOCK](x, out, known, n, tiles)
    return out


def library(x):
    return torch.cumsum(x, 0, dtype=torch.int32)


def read_and_written(n):
    return Cost(read=4 * n, write=4 * n, launches=1)


def small_kernel():
    """Return the cost of a kernel that moves only a few KiB: its launch."""
    return Cost(launches=1)


@compare(
    baseline=reduce_then_scan,
    optimized=[
        Variant(look_back, sass=("LDG.128", "STG.128"), at_least={"sm90": 1.04}),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**28}],
    check_sizes=[
        {"n": 1023},
        {"n": 8192},
        {"n": 33 * 8192 + 5},
        {"n": st.integers(2, 20000)},
    ],
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="dram",
    costs={
        reduce_then_scan: lambda n: (
            Cost(read=4 * n, launches=1) + small_kernel() + read_and_written(n)
        ),
        look_back: lambda n: small_kernel() + read_and_written(n),
        library: lambda n: small_kernel() + read_and_written(n),
    },
)
def test_scan(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
