"""Copy and compute: copy the next chunk while the GPU multiplies this one.

Problem    Multiply `count` fp32 matrices (n, n), which are in pinned host memory, by one (n, n)
           weight on the GPU.
Baseline   one_stream: copy a chunk, which is one matrix, multiply it, and go to the next chunk.
           The host never waits, but copies and products are in the same stream, so they never
           overlap.
Optimized  double_buffered: changes `one_stream`. The copies are on a second stream, and alternate
           between two buffers. A product waits for its chunk. A copy waits until the previous
           product has read the buffer.
Bound      `one_stream` takes the time of PCIe plus the time of fp32 arithmetic. `double_buffered`
           takes only the longer of the two times, plus the first copy and the last product, which
           do not overlap with anything.
Use when   Copies and kernels take similar times, as at this page's size, and the work comes in at
           least four chunks. If copies or kernels take nearly all of the time, there is little to
           gain. For example, on tensor cores these products would take much less time than the
           copies.
"""

from dataclasses import replace

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Work, compare


def inputs(device, count, n):
    chunks = torch.randn(count, n, n, pin_memory=device == "cuda")
    return chunks, torch.randn(n, n, device=device)


def reference(chunks, weight):
    return chunks.to(weight.device).double() @ weight.double()


def one_stream(chunks, weight):
    out = torch.empty(chunks.shape, device=weight.device)
    buffer = torch.empty_like(weight)
    for chunk, product in zip(chunks, out, strict=True):
        buffer.copy_(chunk, non_blocking=True)
        torch.mm(buffer, weight, out=product)
    return out


def double_buffered(chunks, weight):
    device = torch.get_device_module(weight.device)
    # A high-priority stream comes from a pool of its own, so it is never the current stream.
    compute, copies = device.current_stream(), device.Stream(priority=-1)
    out = torch.empty(chunks.shape, device=weight.device)
    buffers = [torch.empty_like(weight), torch.empty_like(weight)]
    copies.wait_stream(compute)  # earlier work may still use the buffers' memory
    drained = []
    for i, (chunk, product) in enumerate(zip(chunks, out, strict=True)):
        buffer = buffers[i % 2]
        with device.stream(copies):
            if i >= 2:
                copies.wait_event(drained[i - 2])
            buffer.copy_(chunk, non_blocking=True)
        compute.wait_stream(copies)
        torch.mm(buffer, weight, out=product)
        drained.append(compute.record_event())
    return out  # the products waited for all copies, so the buffers need no record_stream


def copying(n):
    return Cost(h2d=4 * n * n, launches=1)


def multiplying(n):
    return Cost(read=8 * n * n, write=8 * n * n, ops={"fp32": 2 * n**3}, launches=1)


def overlapping(n):
    """Return the cost of a product that overlaps with the copy of the next chunk."""
    return replace(multiplying(n), h2d=4 * n * n, launches=2)


@compare(
    baseline=one_stream,
    optimized=[double_buffered],
    inputs=inputs,
    reference=reference,
    sizes=[{"count": 8, "n": 2048}],
    check_sizes=[{"count": 5, "n": 33}, {"count": st.integers(1, 9), "n": st.integers(1, 40)}],
    work=lambda count, n: Work(
        wire=4 * count * n * n,
        read=8 * count * n * n,
        write=8 * count * n * n,
        flops={"fp32": 2 * count * n**3},
        terms=n,
    ),
    bound="pcie",
    costs={
        one_stream: lambda count, n: count * (copying(n) + multiplying(n)),
        double_buffered: lambda count, n: (
            copying(n) + (count - 1) * overlapping(n) + multiplying(n)
        ),
    },
    at_least={"sm90": 1.4},
)
def test_double_buffering(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
