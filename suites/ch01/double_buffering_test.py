"""Copy and compute: fetch the next chunk while this one is multiplied.

Problem    `count` fp32 matrices (n, n) lie in pinned host memory; multiply each by one weight on
           the GPU.
Baseline   one_stream: copy a chunk, multiply it, copy the next. Nothing waits for the host, but
           one stream does one thing at a time.
Optimized  double_buffered: the copies on a stream of their own, into two buffers in turn. A product
           waits for its chunk, a copy for the product that read its buffer last.
Bound      PCIe: 16 MiB take 0.31 ms at 55 GB/s, their product 0.34 ms at 50 TFLOP/s of fp32. In
           turn that is 8 x 0.65 ms; overlapped 0.31 + 8 x 0.34 ms, since nothing hides the
           first copy: 1.7 times. Equal parts and chunks without end would reach 2.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Work, compare


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
    # High priority streams are a pool apart, so this is never the stream that we are called on.
    compute, copies = device.current_stream(), device.Stream(priority=-1)
    out = torch.empty(chunks.shape, device=weight.device)
    buffers = [torch.empty_like(weight), torch.empty_like(weight)]
    copies.wait_stream(compute)  # earlier work may still use the memory that the buffers were given
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
    return out  # every copy was waited for, so the buffers may go without record_stream


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
    at_least={"sm90": 1.4},
)
def test_double_buffering(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
