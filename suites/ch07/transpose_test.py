"""Transpose: transpose a tile in shared memory, and spread each of its columns over all banks.

Problem    Write the transpose of a (rows, columns) fp32 matrix.
Baseline   naive: a warp reads along a row and writes down a column, so each store of the warp
           writes 4 bytes to each of 32 sectors. A block handles a tile of 64 x 64, and a thread 16
           elements.
Optimized  tiled: changes `naive`. The tile is transposed in shared memory, so a warp also writes
           along a row. A warp reads a column of the tile from shared memory, and the 32 floats of
           the column are in one bank.
           padded: changes `tiled`. The rows of the tile lie 65 floats apart, so a column is spread
           over all banks.
           swizzled: changes `tiled`. Row r stores column c in place c xor r, so a column is spread
           over all banks without unused floats.
           library: `x.t().contiguous()`.
Bound      DRAM limits `padded` and `swizzled`. Shared memory limits `tiled`, which reads a column
           at one float per clock. Stores limit `naive`, which writes 32 bytes to the L2 for every 4
           bytes of the result.
Seen       `naive` and `library` take longer than predicted. The transfer of whole sectors to the L2
           does not explain the time of `naive`, because `naive` moves sectors at only a quarter of
           the L2's rate. `naive` takes about four cycles of an SM per stored element, like chunked
           of copy_stride. We did not measure which part of the path to the L2 needs these cycles.
           `library` reads down columns, so it also moves 32 bytes for every 4, and needs a lookup
           in the L1 for each element. The L1 does one lookup per cycle (row_mapping of chapter 8).
           These lookups take as long as moving the sectors. If the lookups and the transfers do not
           overlap, their sum explains the time of `library`.
Use when   A kernel must read along one dimension and write along another. Transpose a tile in
           shared memory. Pad the tile, or swizzle it if shared memory is scarce.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("transpose.cu")
BLOCK, TILE = 256, 64


def inputs(device, rows, columns):
    return (torch.randn(rows, columns, device=device),)


def reference(x):
    return x.double().t().contiguous()


def launch(kernel, x):
    rows, columns = x.shape
    out = torch.empty(columns, rows, device=x.device)
    kernel[-(-rows // TILE) * -(-columns // TILE), BLOCK](x, out, rows, columns)
    return out


def naive(x):
    return launch(kernels.naive, x)


def tiled(x):
    return launch(kernels.tiled, x)


def padded(x):
    return launch(kernels.padded, x)


def swizzled(x):
    return launch(kernels.swizzled, x)


def library(x):
    return x.t().contiguous()


def turned(rows, columns, l2=8, shared=0):
    """Return the cost with `l2` bytes of the L2 and `shared` bytes of shared memory per element."""
    n = rows * columns
    return Cost(read=4 * n, write=4 * n, l2=l2 * n, shared=shared * n, launches=1)


@compare(
    baseline=naive,
    optimized=[
        Variant(tiled, sass=("LDS", "STS"), at_least={"sm90": 2.9}),
        Variant(padded, sass=("LDS", "STS")),
        Variant(swizzled, sass=("LDS", "STS")),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 16384, "columns": 16384}],
    # Whole tiles and cut tiles, cut tiles alone, and two rows.
    check_sizes=[
        {"rows": 65, "columns": 130},
        {"rows": 200, "columns": 33},
        {"rows": 2, "columns": 1023},
        {"rows": st.integers(2, 150), "columns": st.integers(33, 150)},
    ],
    work=lambda rows, columns: Work(read=4 * rows * columns, write=4 * rows * columns),
    bound="dram",
    costs={
        # A warp moves 32 sectors of 32 bytes for 32 floats, in its stores or in its loads.
        naive: lambda rows, columns: turned(rows, columns, l2=4 + 32),
        library: lambda rows, columns: turned(rows, columns, l2=32 + 4),
        # Reading a column is a 32-way bank conflict. Without the conflict, shared memory is not the
        # limit.
        tiled: lambda rows, columns: turned(rows, columns, shared=4 + 32 * 4),
        padded: turned,
        swizzled: turned,
    },
    at_least={"sm90": 6.0},
)
def test_transpose(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
