"""GEMMs on streams: first remove the host's waits, then batch, and use streams only as a last step.

Problem    Compute `count` independent bf16 products of (n, k) by (k, n), each into its own slice of
           a result tensor. All sides allocate this tensor first. The page times a curve over n:
           with a larger n, a product has more output tiles and can use more SMs.
Baseline   one_stream: one `torch.mm` per product. The host does not wait for the products.
Optimized  two_streams: changes `one_stream`. The products alternate between two streams.
           four_streams: like `two_streams`, with four streams.
           batched: changes `one_stream`. One `torch.bmm` computes all products, which must have
           equal shapes. The variants with streams only show a curve, so the page claims no speedup
           for them.
Bound      Tensor cores. With tiles of 128 x 64 elements, a product of n=1024 has 128 tiles, nearly
           as many as an H200 has SMs. So running a second product at the same time does not help.
           With n=512, three quarters of the SMs are idle, and with n=256, nearly all SMs. If cuBLAS
           cuts k into parts, a product fills more of the GPU, and streams gain less. The costs
           assume 128 x 64 tiles and an uncut k. All sides run in a CUDA graph, so the host's
           launches are not timed.
Seen       On an H100, `two_streams` and `four_streams` are slower than `one_stream` with n=512 and
           n=1024, and faster with n=256. `batched` is the fastest at each n. With n=256 and n=512,
           `one_stream` takes less time than predicted. So cuBLAS probably cuts k into parts, which
           leaves fewer idle SMs for a second stream. With n=1024, a product alone already reaches
           three quarters of the tensor cores' peak. We did not measure why more streams are slower
           with n=1024.
Use when   Independent products have different shapes, and each has fewer tiles than the GPU has
           SMs. Batch products of equal shape. For different shapes in one group, see
           `../ch01/grouped_gemm_test.py`. Public code compares streams with a loop in which the
           host waits after each product. Most of the reported gain comes from removing the waits,
           which needs no streams.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Sweep, Variant, Work, compare

SMS = 132  # of an H200, for costs
TILE_ROWS, TILE_COLUMNS = 128, 64  # of an output tile, for costs


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
    """Return the cost of `count` products at the same time. SMs without a tile count as busy."""
    tiles = count * -(-n // TILE_ROWS) * -(-n // TILE_COLUMNS)
    share = -(-tiles // SMS) * SMS / tiles
    return Cost(
        read=4 * count * n * k,
        write=2 * count * n * n,
        ops={"bf16": 2 * count * n * n * k * share},
        launches=launches,
    )


def on_width(width):
    """Return the cost function of a side that runs `width` products at the same time."""

    def cost(count, n, k):
        at_once = min(width, count)
        return -(-count // at_once) * together(at_once, n, k, launches=at_once)

    return cost


@compare(
    baseline=one_stream,
    optimized=[
        Variant(two_streams, at_least="yardstick"),
        Variant(four_streams, at_least="yardstick"),
        Variant(batched, at_least={"sm90": 1.1}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"count": 16, "n": n, "k": 4096} for n in (256, 512, 1024)],
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
    sweep=Sweep("n"),
)
def test_gemm_streams(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
