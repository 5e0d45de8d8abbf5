"""Stencil: several cells per thread hide latency, and shared memory then adds little.

Problem    Compute one step of a 7-point stencil on nz x ny x nx fp32 cells: a cell becomes a
           quarter of itself plus an eighth of each of its six neighbors.
Baseline   in_cache: one thread per cell, with seven loads. Blocks are 32 x 8 cells. The L1 serves
           the neighbors along x and y, and the L2 serves the neighbors along z.
Optimized  column: changes `in_cache`. A thread computes 8 cells along z. The thread loads all 10
           cells of its column into registers before it uses any of them. The kernel reads the other
           four neighbors of each cell through the L1.
           planes: changes `column`. The neighbors along x and y come from shared memory. A block
           fills the shared memory plane by plane. For each plane, it loads the edges and waits at a
           barrier. So a thread does about 13 loads from global memory instead of 42.
           tiled: changes `planes`. A thread issues all its loads before it uses any of the values.
           So a block fills all planes in shared memory at once, with one barrier, and also reads
           the neighbors along z from shared memory. There is no library variant, because `conv3d`
           computes 27 products per cell.
Bound      DRAM: 4 bytes are read and 4 written per cell. If whole sectors are counted, `in_cache`
           reads 15 bytes per cell from the L2, and the other three sides read 8.
Seen       `in_cache` takes longer than predicted. A thread of `in_cache` has only one element from
           DRAM in flight. So does a thread of `scalar` in vector_width, which copies the same
           number of elements with the same number of threads and takes almost as long as
           `in_cache`. So `in_cache` is slow because too few bytes are in flight, not because of the
           L2. `column` takes slightly longer than predicted, and longer than `tiled`, although both
           have the same number of resident threads. On an H100, `planes` takes a sixth longer than
           predicted from its bytes, and gains less than `column` and `tiled` gain on an H200. The
           three sides have not been measured on the same GPU yet. `column` and `planes` issue loads
           between their sums, `planes` and `tiled` read shared memory, and `planes` also waits for
           loads at each of its 8 barriers. We do not know which of these differences matters most.
Use when   Neighboring cells share inputs. Compute several cells per thread before trying shared
           memory. Use shared memory if a wider stencil reads each cell so often that the L1 becomes
           the limit.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("stencil.cu")
by_planes = cuda_module("stencil_planes.cu")
X, Y, Z = 32, 8, 8


def inputs(device, nz, ny, nx):
    return (torch.randn(nz, ny, nx, device=device),)


def reference(u):
    u = u.double()
    out = u / 4
    for dim, length in enumerate(u.shape):
        lower, upper = (0, length - 1), (1, length - 1)
        out.narrow(dim, *upper).add_(u.narrow(dim, *lower), alpha=0.125)
        out.narrow(dim, *lower).add_(u.narrow(dim, *upper), alpha=0.125)
    return out


def step(kernel, u, depth):
    nz, ny, nx = u.shape
    out = torch.empty_like(u)
    kernel[(-(-nx // X), -(-ny // Y), -(-nz // depth)), (X, Y)](u, out, nx, ny, nz)
    return out


def in_cache(u):
    return step(kernels.in_cache, u, 1)


def planes(u):
    return step(by_planes.planes, u, Z)


def tiled(u):
    return step(kernels.tiled, u, Z)


def column(u):
    return step(kernels.column, u, Z)


def stepped(nz, ny, nx, depth):
    """Return the cost of a step by blocks of X x Y x depth cells."""
    cells = nz * ny * nx
    inner = Y * depth * 192  # rows of cells with one neighbor at each end: 6 sectors of 32 bytes
    faces = 2 * (Y + depth) * 128  # rows of neighbors along y and z: 4 sectors
    return Cost(
        read=4 * cells,
        write=4 * cells,
        l2=cells / (X * Y * depth) * (inner + faces) + 4 * cells,
        ops={"fp32": 8 * cells},
        launches=1,
    )


@compare(
    baseline=in_cache,
    optimized=[
        Variant(column, at_least={"sm90": 1.25}),
        planes,
        Variant(tiled, at_least={"sm90": 1.35}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"nz": 512, "ny": 512, "nx": 512}],
    check_sizes=[
        {"nz": 9, "ny": 11, "nx": 33},
        {"nz": 17, "ny": 8, "nx": 65},
        {"nz": st.integers(1, 17), "ny": st.integers(1, 17), "nx": st.integers(1, 67)},
    ],
    work=lambda nz, ny, nx: Work(
        read=4 * nz * ny * nx,
        write=4 * nz * ny * nx,
        flops={"fp32": 8 * nz * ny * nx},
        terms=7,
        roundings=2,
    ),
    bound="dram",
    costs={
        in_cache: lambda nz, ny, nx: stepped(nz, ny, nx, depth=1),
        column: lambda nz, ny, nx: stepped(nz, ny, nx, depth=Z),
        planes: lambda nz, ny, nx: stepped(nz, ny, nx, depth=Z),
        tiled: lambda nz, ny, nx: stepped(nz, ny, nx, depth=Z),
    },
)
def test_stencil(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
