"""Host to device: copy from pinned memory.

Problem    Copy n fp32 values that lie in host memory to the GPU.
Baseline   pageable: ordinary memory. The GPU cannot read it, so the driver moves the bytes twice:
           one core copies them, piece by piece, into pinned memory of the driver's own.
Optimized  pinned: the same values in pinned memory; the copy engine reads them at the link's rate.
           asynchronous: pinned and `non_blocking=True`; the host does not wait for the copy. One
           that is waited for in the end takes as long, so against `pinned` this is neutral. A rung
           is judged against the baseline: it claims what `pinned` claims. It pays where something
           else is done meanwhile, as in `double_buffering_test.py`.
Bound      PCIe: 4n bytes at 55 GB/s, 1.2 ms for 64 MiB; one core stages some 10 GB/s: 5 times.

Filling the pinned memory is not timed, as filling the pageable memory is not: the data lie where
they were read or made. Who must first copy them from pageable into pinned memory gains little.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Work, compare


def inputs(device, n):
    pageable = torch.randn(n)
    pinned = torch.empty(n, pin_memory=device == "cuda").copy_(pageable)
    return pageable, pinned, device


def reference(pageable, pinned, device):
    return pageable.double().to(device)


# copy=True changes nothing on a GPU; without one `to` would return the input itself.
def pageable(pageable, pinned, device):
    return pageable.to(device, copy=True)


def pinned(pageable, pinned, device):
    return pinned.to(device, copy=True)


def asynchronous(pageable, pinned, device):
    return pinned.to(device, copy=True, non_blocking=True)


@compare(
    baseline=pageable,
    optimized=[pinned, asynchronous],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 1 << 24}],
    check_sizes=[{"n": 1023}, {"n": st.integers(1, 5000)}],
    work=lambda n: Work(wire=4 * n),
    bound="pcie",
    at_least={"sm90": 4.0},
)
def test_h2d(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
