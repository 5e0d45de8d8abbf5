"""Round trip: copy results to the host while the next data is copied to the GPU.

Problem    The fp32 data is in pinned host memory, as `chunks` chunks of n values. Compute the
           sigmoid of each value on the GPU. The results must end up in pinned host memory. All
           sides allocate the result buffer, and two chunks of GPU memory per stream, before the
           timed part.
Baseline   one_stream: copy a chunk in, compute, copy the result out, then go to the next chunk.
Optimized  two_streams: changes `one_stream`. The chunks alternate between two streams. While one
           stream copies results out, the other stream copies data in.
           three_streams: like `two_streams`, with a third stream. While one chunk is copied in, a
           second chunk can be computed, and the results of a third chunk copied out.
Bound      PCIe, which carries data in both directions at once. A GPU has a copy engine for each
           direction. `one_stream` uses only one direction at a time. The kernel reads and writes
           DRAM, not PCIe, so it takes much less time than a copy. So a third stream hides only a
           little more.
Seen       On an H200, `three_streams` takes as long as `two_streams`. The costs predict that it is
           slightly faster. We do not know why the third stream does not hide more of the copies.
Use when   Data is streamed through the GPU, and the results go back to the host. Two chunks in
           flight are enough. If the results stay on the GPU, only the copy in and the kernel can
           overlap (`chunk_count_test.py`). More streams only add buffers.
"""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Work, compare


def inputs(device, chunks, n):
    return torch.randn(chunks, n, pin_memory=device == "cuda"), device


def reference(x, device):
    return 1 / (1 + torch.exp(-x.double()))


def through(x, device, count):
    """Yield a function that processes the chunks on the GPU with `count` streams."""
    gpu = torch.get_device_module(device)
    out = torch.empty(x.shape, pin_memory=device == "cuda")
    # High-priority streams have their own pool, so none of them is the current stream.
    streams = [gpu.Stream(priority=-1) for _ in range(count)]
    buffers = [torch.empty_like(x[0], device=device) for _ in streams]
    results = [torch.empty_like(x[0], device=device) for _ in streams]

    def call():
        main = gpu.current_stream()
        for stream in streams:
            stream.wait_stream(main)
        for i, (chunk, target) in enumerate(zip(x, out, strict=True)):
            turn = i % count
            with gpu.stream(streams[turn]):
                buffers[turn].copy_(chunk, non_blocking=True)
                torch.sigmoid(buffers[turn], out=results[turn])
                target.copy_(results[turn], non_blocking=True)
        for stream in streams:
            main.wait_stream(stream)
        return out

    return call


def one_stream(x, device):
    yield through(x, device, 1)


def two_streams(x, device):
    yield through(x, device, 2)


def three_streams(x, device):
    yield through(x, device, 3)


def computed(n):
    # The division of a sigmoid takes a reciprocal after the exponential.
    return Cost(read=4 * n, write=4 * n, sfu=2 * n, ops={"fp32": 4 * n}, launches=1)


def copied_in(n):
    return Cost(h2d=4 * n, launches=1)


def copied_out(n):
    return Cost(d2h=4 * n, launches=1)


def both_ways(n):
    return Cost(h2d=4 * n, d2h=4 * n, launches=2)


def steady(chunks, n, step):
    """Return the cost of the first chunk in, `step` per other chunk, and the last chunk out."""
    first, last = copied_in(n) + computed(n), copied_out(n)
    return first + (chunks - 1) * step + last if chunks > 1 else first + last


def in_turn(chunks, n):
    return chunks * (copied_in(n) + computed(n) + copied_out(n))


def with_two(chunks, n):
    """Return the cost of two streams. No copy overlaps with the computation of a chunk."""
    return steady(chunks, n, both_ways(n) + computed(n))


def with_three(chunks, n):
    """Return the cost of three streams. Other chunks are copied while one is computed."""
    return steady(chunks, n, replace(computed(n), h2d=4 * n, d2h=4 * n, launches=3))


@compare(
    baseline=one_stream,
    optimized=[two_streams, three_streams],
    at_least={"sm90": 1.35},
    inputs=inputs,
    reference=reference,
    sizes=[{"chunks": 16, "n": 2**21}],
    check_sizes=[{"chunks": 5, "n": 33}, {"chunks": st.integers(1, 7), "n": st.integers(1, 99)}],
    work=lambda chunks, n: Work(
        wire=4 * chunks * n, read=4 * chunks * n, write=4 * chunks * n, roundings=4
    ),
    bound="pcie",
    costs={one_stream: in_turn, two_streams: with_two, three_streams: with_three},
)
def test_round_trip(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
