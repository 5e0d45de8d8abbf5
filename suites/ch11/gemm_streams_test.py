"""GEMMs on streams: first take out the waits, then batch, and only then use streams.

Problem    `count` independent bf16 products of (n, k) by (k, n), each into its place of a result
           that all sides allocate first. A product has fewer tiles than the GPU has SMs.
Baseline   one_stream: one `torch.mm` per product. The host waits for none of them.
Optimized  two_streams: of one_stream. The products take turns on two streams.
           four_streams: of two_streams, with four streams.
           batched: of one_stream. All products in one `torch.bmm`, which needs equal shapes.
Bound      Tensor cores. If a tile has 128 x 128 elements, a product has 64 tiles, so half of the
           SMs of an H200 are idle. Two products at once fill them. Four at once gain no more than
           that, except at the ends of products. cuBLAS may choose smaller tiles, or cut k into
           parts. Then one product fills more of the GPU, and streams gain less. All sides run in a
           CUDA graph, so the host's launches are not timed.
Use when   Independent products have different shapes and each is too small for the GPU. For equal
           shapes, batch them. For different shapes in one group, see
           `../ch01/grouped_gemm_test.py`. Public code compares streams with a loop in which the
           host waits after each product. Most of that gain comes from the missing waits, which need
           no streams.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare

SMS = 132  # of an H200, for costs
TILE = 128  # rows and columns of an output tile, for costs


def inputs(device, count, n, k):
    a = torch.randn(count, n, k, device=device).bfloat16()
    return a, torch.randn(count, k, n, device=device).bfloat16()


def reference(a, b):
    return a.double() @ b.double()


def room_for(a, b):
    return torch.empty(len(a), a.shape[1], b.shape[2], dtype=a.dtype, device=a.device)


def one_stream(a, b):
    out = room_for(a, b)
    for x, y, z in zip(a, b, out, strict=True):
        torch.mm(x, y, out=z)
    return out


def on_streams(a, b, width):
    gpu = torch.get_device_module(a.device)
    out, main = room_for(a, b), gpu.current_stream()
    # High-priority streams have their own pool, so none of them is the current stream.
    streams = [gpu.Stream(priority=-1) for _ in range(width)]
    for stream in streams:
        stream.wait_stream(main)
    for i, (x, y, z) in enumerate(zip(a, b, out, strict=True)):
        with gpu.stream(streams[i % width]):
            torch.mm(x, y, out=z)
    for stream in streams:
        main.wait_stream(stream)
    return out


def two_streams(a, b):
    return on_streams(a, b, 2)


def four_streams(a, b):
    return on_streams(a, b, 4)


def batched(a, b):
    out = room_for(a, b)
    torch.bmm(a, b, out=out)
    return out


def together(count, n, k, launches):
    """Return the cost of `count` products at once. The SMs without a tile count as busy."""
    tiles = count * (-(-n // TILE)) ** 2
    share = -(-tiles // SMS) * SMS / tiles
    return Cost(
        read=4 * count * n * k,
        write=2 * count * n * n,
        ops={"bf16": 2 * count * n * n * k * share},
        launches=launches,
    )


def on_width(width):
    """Return a function of the size that returns the cost of `width` products at once."""

    def cost(count, n, k):
        at_once = min(width, count)
        return -(-count // at_once) * together(at_once, n, k, launches=at_once)

    return cost


@compare(
    baseline=one_stream,
    optimized=[two_streams, four_streams, Variant(batched, at_least="yardstick")],
    inputs=inputs,
    reference=reference,
    sizes=[{"count": 16, "n": 1024, "k": 4096}],
    check_sizes=[
        {"count": 5, "n": 9, "k": 33},
        {"count": st.integers(1, 7), "n": st.integers(1, 20), "k": st.integers(1, 40)},
    ],
    work=lambda count, n, k: Work(
        read=4 * count * n * k,
        write=2 * count * n * n,
        flops={"bf16": 2 * count * n * n * k},
        terms=k,
    ),
    bound="tensor",
    costs={
        one_stream: on_width(1),
        two_streams: on_width(2),
        four_streams: on_width(4),
        batched: lambda count, n, k: together(count, n, k, launches=1),
    },
)
def test_gemm_streams(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
