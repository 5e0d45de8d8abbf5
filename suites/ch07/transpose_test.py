"""Transpose: let the tile turn in shared memory, and each of its columns meet every bank.

Problem    Write the transpose of a (rows, columns) fp32 matrix.
Baseline   naive: a warp reads along a row and writes down a column, so each of its stores touches
           32 sectors, 4 bytes each. A block has a tile of 64 x 64, a thread 16 elements.
Optimized  tiled: changes naive. The tile is transposed in shared memory, so that a warp also writes
           along a row. A warp reads a column of the tile there, and its 32 floats lie in one bank.
           padded: changes tiled. The rows of the tile lie 65 floats apart, so a column meets every
           bank.
           swizzled: changes tiled. Row r holds its columns in the order column xor r. A column
           meets every bank, without unused floats.
           library: `x.t().contiguous()`.
Bound      DRAM for padded and swizzled. The limit of tiled is shared memory, which serves its
           columns one float per clock. naive writes 32 bytes to the L2 for each of 4.
Seen       naive and library take longer than predicted. Whole sectors in the L2 do not explain it:
           naive moves them at a quarter of the L2's rate. It takes about four cycles of an SM for
           each store, as chunked of copy_stride does. We did not measure which part of the path to
           the L2 takes them. library reads down columns, so it also moves 32 bytes for 4, and it
           needs a lookup in the L1 for each element, one per cycle (row_mapping of chapter 8).
           These lookups take as long as the sectors. If the two do not overlap, they explain its
           time.
Use when   A kernel must read along one dimension and write along another. Pad the tile, or swizzle
           it if shared memory is short.
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
    """Return the cost with these bytes of the L2 and of shared memory per element."""
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
        # Reading a column is a 32-way bank conflict. Without it, shared memory is not the limit.
        tiled: lambda rows, columns: turned(rows, columns, shared=4 + 32 * 4),
        padded: turned,
        swizzled: turned,
    },
    at_least={"sm90": 6.0},
)
def test_transpose(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
