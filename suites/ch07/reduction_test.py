"""Reduction: read every byte once, and always keep reads in flight.

Problem    Sum each of 8 long fp32 rows, 1 GiB in total.
Baseline   shared_tree: a block sums 1024 elements with four coalesced loads per thread. The block
           reduces the 256 partial sums in a tree in shared memory, with 9 barriers, and adds the
           result to its row's sum with one atomic. In total, that is 262144 atomics on 8 addresses.
Optimized  shuffle: changes `shared_tree`. Warps reduce their sums with shuffles, so only one
           barrier remains.
           persistent: changes `shuffle`. Only as many blocks start as fit on the GPU at once. The
           blocks loop over the rows, with four loads per thread in flight. So there are 1056 blocks
           and 1056 atomics instead of 262144 of each.
           vectorized: changes `persistent`. Loads are 16 bytes long, so four times as many bytes
           are in flight.
           two_pass: changes `vectorized`. Each block stores its sum, and a second kernel adds the
           sums in a fixed order. `two_pass` has no atomics and gives bitwise the same result at
           every call.
           library: `torch.sum`.
Bound      DRAM: every element is read once.
Seen       `shared_tree` and `shuffle` take more than twice as long as predicted from their bytes.
           Both take about the same time, so the barriers that `shuffle` saves hardly matter.
           `persistent` has both fewer blocks and fewer atomics, so it does not show whether the
           blocks or the atomics take the time. The measured time of `shared_tree` is 2 ns per
           atomic. In histogram, an integer atomic on one address takes 1 ns. The eight sums are in
           one sector of 32 bytes, so probably one slice of the L2 performs all atomics, one after
           another. We did not measure the atomics separately.
Use when   There are few rows, and they are long. Let a fixed number of blocks loop over the rows,
           so that each block reduces once. Use `two_pass` if results must be reproducible. For a
           plain sum, call the library, which is about as fast.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("reduction.cu")
BLOCK = 256
TILE = 4 * BLOCK


def inputs(device, rows, n):
    return (torch.randn(rows, n, device=device),)


def reference(x):
    return x.double().sum(dim=1)


def tiled(kernel, x):
    rows, n = x.shape
    out = torch.zeros(rows, device=x.device)
    kernel[(-(-n // TILE), rows), BLOCK](x, out, n)
    return out


def shared_tree(x):
    return tiled(kernels.shared_tree, x)


def shuffle(x):
    return tiled(kernels.shuffle, x)


def blocks_a_row(x, width):
    """Return the number of blocks per row. If possible, all blocks run at once."""
    rows, n = x.shape
    gpu = torch.cuda.get_device_properties(x.device)
    resident = gpu.max_threads_per_multi_processor // BLOCK * gpu.multi_processor_count
    return max(1, min(resident // rows, -(-n // (width * BLOCK))))


def walked(kernel, x, width):
    rows, n = x.shape
    out = torch.zeros(rows, device=x.device)
    kernel[(blocks_a_row(x, width), rows), BLOCK](x, out, n)
    return out


def persistent(x):
    return walked(kernels.persistent, x, 1)


def vectorized(x):
    return walked(kernels.vectorized, x, 4)


def two_pass(x):
    rows, n = x.shape
    blocks = blocks_a_row(x, 4)
    parts = torch.empty(rows, blocks, device=x.device)
    out = torch.empty(rows, device=x.device)
    kernels.partials[(blocks, rows), BLOCK](x, parts, n)
    kernels.finish[(1, rows), BLOCK](parts, out, blocks)
    return out


def library(x):
    return torch.sum(x, dim=1)


def summed(rows, n, atomics=0):
    reading = {"read": 4 * rows * n, "ops": {"fp32": rows * n}}
    return Cost(**reading, write=4 * rows, atomics=atomics, launches=1)


def by_tiles(rows, n):
    # The first launch fills the result with zeros.
    return Cost(launches=1) + summed(rows, n, atomics=rows * n / TILE)


def by_blocks(rows, n):
    return Cost(launches=1) + summed(rows, n, atomics=8 * 132)  # 8 blocks on each of 132 SMs


@compare(
    baseline=shared_tree,
    optimized=[
        Variant(shuffle, sass="SHFL", at_least="neutral"),
        persistent,
        Variant(vectorized, sass="LDG.128"),
        Variant(two_pass, sass="LDG.128"),
        Variant(library, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 8, "n": 2**25}],
    check_sizes=[
        {"rows": 8, "n": 1023},
        {"rows": 5, "n": 9001},
        {"rows": st.integers(5, 9), "n": st.integers(1, 5000)},
    ],
    work=lambda rows, n: Work(read=4 * rows * n, write=4 * rows, flops={"fp32": rows * n}, terms=n),
    bound="dram",
    costs={
        **dict.fromkeys([shared_tree, shuffle], by_tiles),
        **dict.fromkeys([persistent, vectorized], by_blocks),
        two_pass: lambda rows, n: summed(rows, n) + Cost(launches=1),
        library: summed,
    },
    at_least={"sm90": 2.0},
)
def test_reduction(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
