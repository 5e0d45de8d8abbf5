"""Events: make the streams wait for each other, and not the host.

Problem    `count` fp32 chunks (rows, k) are in pinned host memory. Multiply each chunk by the same
           (k, columns) weight on the GPU, which has two buffers for chunks. A copy takes about as
           long as a product: about 20 us with few rows, and about 100 us with many rows.
Baseline   one_stream: copy a chunk, multiply it, copy the next chunk. No waits are needed, because
           the work in a stream runs in order.
Optimized  host_waits: changes `one_stream`. A second stream copies the next chunk during a product.
           Before a copy into a buffer, the host waits for the product that last read the buffer.
           Before a product, the host waits for the copy of its chunk.
           event_waits: changes `host_waits`. The streams wait instead of the host: each stream
           waits for CUDA events that the other stream records.
Bound      With many rows, arithmetic limits `event_waits`. With few rows, the host's calls limit
           `event_waits`. In `host_waits`, the host waits for each product. After this wait, the GPU
           computes nothing until the host has launched the next copy and the next product. With few
           rows, this gap is longer than the copy that the second stream hides.
Seen       With few rows, `host_waits` is slower than `one_stream` on an H100, and `event_waits`
           takes about as long as `one_stream` on an H200. In one of four processes on the H200,
           `event_waits` was slower than `one_stream`. In the other three, it was faster. The host's
           calls take two to three times as long per chunk as predicted, because the predicted time
           of a launch was measured with a small addition, not with products and copies. Captured as
           a CUDA graph, `event_waits` took a third less time. With many rows, the limit is the
           products, which do not reach the fp32 peak, as in `chunk_count_test.py`. So all sides
           take longer than predicted by about the same factor.
Use when   Two streams depend on each other, and a step takes less than about 1 ms. If steps take
           longer, a wait by the host costs little. If the host's calls take longer than the steps,
           use larger chunks or capture a graph. The host must still wait before it reads a result,
           and before it writes new data into pinned memory that is being copied.
"""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare


def inputs(device, count, rows, k, columns):
    chunks = torch.randn(count, rows, k, pin_memory=device == "cuda")
    return chunks, torch.randn(k, columns, device=device)


def reference(chunks, weight):
    return chunks.to(weight.device).double() @ weight.double()


def room_for(chunks, weight):
    """Return two uninitialized buffers for chunks, and a tensor for all results."""
    buffers = [torch.empty(chunks.shape[1:], device=weight.device) for _ in range(2)]
    return buffers, torch.empty(*chunks.shape[:2], weight.shape[1], device=weight.device)


def one_stream(chunks, weight):
    buffers, out = room_for(chunks, weight)
    for i, (chunk, product) in enumerate(zip(chunks, out, strict=True)):
        buffers[i % 2].copy_(chunk, non_blocking=True)
        torch.mm(buffers[i % 2], weight, out=product)
    return out


def two_streams(chunks, weight, copies_wait, products_wait):
    """Return the products of all chunks, with a second stream for the copies.

    `copies_wait(stream, event)` and `products_wait(stream, event)` delay the next work of `stream`
    until `event` has happened.
    """
    gpu = torch.get_device_module(weight.device)
    # High-priority streams have their own pool, so this is never the current stream.
    products, copies = gpu.current_stream(), gpu.Stream(priority=-1)
    buffers, out = room_for(chunks, weight)
    copies.wait_stream(products)  # earlier work may still be using the buffers' memory
    filled, drained = ([gpu.Event(), gpu.Event()] for _ in range(2))

    def fill(i):
        if i >= 2:
            copies_wait(copies, drained[i % 2])
        with gpu.stream(copies):
            buffers[i % 2].copy_(chunks[i], non_blocking=True)
        filled[i % 2].record(copies)

    fill(0)
    for i, product in enumerate(out):
        if i + 1 < len(chunks):
            fill(i + 1)
        products_wait(products, filled[i % 2])
        torch.mm(buffers[i % 2], weight, out=product)
        drained[i % 2].record(products)
    return out


def on_host(stream, event):
    event.synchronize()


def on_gpu(stream, event):
    stream.wait_event(event)


def host_waits(chunks, weight):
    return two_streams(chunks, weight, on_host, on_host)


def event_waits(chunks, weight):
    return two_streams(chunks, weight, on_gpu, on_gpu)


def copied(rows, k):
    return Cost(h2d=4 * rows * k, launches=1, host_steps=1)


def multiplied(rows, k, columns):
    return Cost(
        read=4 * (rows * k + k * columns),
        write=4 * rows * columns,
        ops={"fp32": 2 * rows * k * columns},
        launches=1,
        host_steps=1,
    )


def overlapped(rows, k, columns, waits):
    """Return the cost of a product that overlaps with the next copy.

    The host enters and leaves the stream for copies, indexes a chunk, and records two events. If
    `waits`, the host also waits for a copy and for a product, and the GPU is idle during the
    launches.
    """
    calls = Cost(launches=2, host_steps=6)
    both = replace(multiplied(rows, k, columns), h2d=4 * rows * k, launches=0, host_steps=0)
    if waits:
        return replace(calls, syncs=1) + replace(both, syncs=1)
    return replace(both, launches=2, host_steps=8)


def in_turn(count, rows, k, columns):
    return count * (copied(rows, k) + multiplied(rows, k, columns))


def at_once(count, rows, k, columns, waits):
    first, last = copied(rows, k), multiplied(rows, k, columns)
    if count == 1:
        return first + last
    return first + (count - 1) * overlapped(rows, k, columns, waits) + last


@compare(
    baseline=one_stream,
    optimized=[
        Variant(host_waits, at_least="yardstick"),
        Variant(event_waits, at_least={"sm90": "neutral"}),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[
        {"count": 32, "rows": 1024, "k": 256, "columns": 2048},
        {"count": 16, "rows": 4096, "k": 256, "columns": 2048},
    ],
    check_sizes=[
        {"count": 5, "rows": 7, "k": 9, "columns": 5},
        {
            "count": st.integers(1, 6),
            "rows": st.integers(1, 9),
            "k": st.integers(1, 20),
            "columns": st.integers(1, 9),
        },
    ],
    work=lambda count, rows, k, columns: Work(
        wire=4 * count * rows * k,
        read=4 * (count * rows * k + k * columns),
        write=4 * count * rows * columns,
        flops={"fp32": 2 * count * rows * k * columns},
        terms=k,
    ),
    bound="host",
    costs={
        one_stream: in_turn,
        host_waits: lambda **size: at_once(**size, waits=True),
        event_waits: lambda **size: at_once(**size, waits=False),
    },
)
def test_events(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
