"""A tile through shared memory: all threads copy pieces of it, or one thread starts a TMA copy.

Problem    Copy an (m, n) fp32 matrix in tiles of 32 x 128 through shared memory. Tiled kernels load
           and store their tiles like this.
Baseline   cp_async: 128 threads compute addresses and check edges. Each thread copies 16 bytes at a
           time into shared memory with `cp.async`, and then stores them to the result with 16-byte
           stores.
Optimized  tma: changes `cp_async`. One thread passes a tensor map to the tensor memory accelerator
           (TMA), which computes addresses, handles edges and loads the tile. TMA also stores the
           tile. A block has 32 threads instead of 128, and 31 of them do nothing.
           library: `x * 1`, PyTorch's elementwise kernel, which copies without tiles.
Bound      DRAM. A tile is 16 KiB, and 12 or more tiles are in flight per SM. About 13 KiB would be
           enough (see vector_width). TMA saves instructions, but instructions are not the limit
           here.
Use when   TMA is the simpler way to move tiles on sm90 and later, and leaves threads free for other
           work. Do not expect a plain copy to become faster.
"""

import torch

from pytest_aisp import Cost, Variant, Work, compare, cuda_module, tensor_map

kernels = cuda_module("tile_copy.cu")
ROWS, COLUMNS, THREADS = 32, 128, 128


def inputs(device, m, n):
    return (torch.randn(m, n, device=device),)


def reference(x):
    return x.clone()


def grid(x):
    return -(-x.shape[1] // COLUMNS), -(-x.shape[0] // ROWS)


def cp_async(x):
    out = torch.empty_like(x)
    kernels.cp_async[grid(x), THREADS](x, out, *x.shape)
    return out


def tma(x):
    out = torch.empty_like(x)
    maps = (tensor_map(tensor, (ROWS, COLUMNS)) for tensor in (x, out))
    kernels.tma[grid(x), 32](*maps)
    return out


def library(x):
    return x * 1


def copied(m, n):
    return Cost(read=4 * m * n, write=4 * m * n, launches=1)


@compare(
    baseline=cp_async,
    optimized=[
        Variant(tma, needs="tma", at_least="neutral"),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"m": 12288, "n": 21848}],
    # Rows begin at multiples of 16 bytes. The edges may cut tiles.
    check_sizes=[{"m": 33, "n": 132}, {"m": 31, "n": 4}, {"m": 70, "n": 384}],
    work=lambda m, n: Work(read=4 * m * n, write=4 * m * n),
    bound="dram",
    costs=dict.fromkeys([cp_async, tma, library], copied),
)
def test_tile_copy(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
