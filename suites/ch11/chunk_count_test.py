"""Chunk count: cut a copy into just enough chunks to hide it.

Problem    Copy a (rows, k) fp32 matrix from pinned host memory and multiply it by a (k, columns)
           weight on the GPU. The copy and the product take about the same time. The page times a
           curve over the number of chunks.
Baseline   whole: copy all rows, then multiply them.
Optimized  chunked: changes `whole`. The rows are cut into `chunks` chunks. A second stream copies
           the chunks one after another. The product of a chunk waits only for the copy of that
           chunk. Each chunk has its own memory on the GPU, so no copy has to wait for a product.
           The cases only show a curve, so the page claims no speedup for them.
Bound      PCIe and fp32 arithmetic, which overlap. Only the copy of the first chunk and the product
           of the last chunk overlap with nothing. With twice as many chunks, these two take half
           the time. Two effects limit the gain. First, each copy and each kernel has a fixed
           start-up time. Second, a product of few rows has fewer tiles than the GPU has SMs: with
           128 chunks, half of the SMs are idle.
Seen       `chunked` is fastest with 8 to 32 chunks. With 128 chunks, there is almost no gain. The
           cost predicts this, because it assumes tiles of 128 x 128. The products do not reach the
           fp32 peak: a product alone takes about a quarter longer than predicted, and even longer
           with 4 chunks. cuBLAS chooses a kernel by the number of rows, so the curve is not smooth.
Use when   A copy and the work on the copied data take similar times. Begin with 8 to 16 chunks. Use
           fewer if a chunk would become smaller than about 1 MiB, or if the kernel of a chunk would
           no longer fill the GPU. `../ch01/double_buffering_test.py` shows the same overlap with
           only two buffers, for data that does not fit in GPU memory.
"""

import math
from dataclasses import replace

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Sweep, Work, compare

SMS = 132  # of an H200, for costs
TILE = 128 * 128  # elements of an output tile, for costs


def inputs(device, rows, k, columns, chunks):
    x = torch.randn(rows, k, pin_memory=device == "cuda")
    return x, torch.randn(k, columns, device=device), chunks


def reference(x, weight, chunks):
    return x.to(weight.device).double() @ weight.double()


def whole(x, weight, chunks):
    there = torch.empty(x.shape, device=weight.device)
    there.copy_(x, non_blocking=True)
    return there @ weight


def chunked(x, weight, chunks):
    device = torch.get_device_module(weight.device)
    # High-priority streams have their own pool, so this is never the current stream.
    compute, copies = device.current_stream(), device.Stream(priority=-1)
    there = torch.empty(x.shape, device=weight.device)
    out = torch.empty(len(x), weight.shape[1], device=weight.device)
    copies.wait_stream(compute)  # earlier work may still be using the memory of `there`
    parts = (tensor.tensor_split(chunks) for tensor in (x, there, out))
    for source, part, product in zip(*parts, strict=True):
        with device.stream(copies):
            part.copy_(source, non_blocking=True)
        compute.wait_stream(copies)
        torch.mm(part, weight, out=product)
    return out


def copied(rows, k):
    return Cost(h2d=4 * rows * k, launches=1)


def multiplied(rows, k, columns):
    """Return the cost of a product of `rows` rows. SMs without a tile count as busy."""
    tiles = math.ceil(rows * columns / TILE)
    share = math.ceil(tiles / SMS) * SMS / tiles
    return Cost(
        read=4 * (rows * k + k * columns),
        write=4 * rows * columns,
        ops={"fp32": 2 * rows * k * columns * share},
        launches=1,
    )


def overlapped(rows, k, columns, chunks):
    """Return the cost of `chunks` chunks. During each product, the next chunk is copied."""
    part = rows / chunks
    product = multiplied(part, k, columns)
    if chunks == 1:
        return copied(part, k) + product
    both = replace(product, h2d=4 * part * k)
    return copied(part, k) + (chunks - 1) * both + product


@compare(
    baseline=whole,
    optimized=[chunked],
    inputs=inputs,
    reference=reference,
    sizes=[
        {"rows": 65536, "k": 256, "columns": 2048, "chunks": chunks}
        for chunks in (2, 4, 8, 16, 32, 128)
    ],
    check_sizes=[
        {"rows": 37, "k": 9, "columns": 5, "chunks": 4},
        {
            "rows": st.integers(9, 40),
            "k": st.integers(1, 20),
            "columns": st.integers(1, 20),
            "chunks": st.integers(1, 9),
        },
    ],
    work=lambda rows, k, columns, chunks: Work(
        wire=4 * rows * k,
        read=4 * (rows * k + k * columns),
        write=4 * rows * columns,
        flops={"fp32": 2 * rows * k * columns},
        terms=k,
    ),
    bound="pcie",
    costs={
        whole: lambda rows, k, columns, chunks: copied(rows, k) + multiplied(rows, k, columns),
        chunked: overlapped,
    },
    at_least="yardstick",
    sweep=Sweep("chunks"),
)
def test_chunk_count(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
