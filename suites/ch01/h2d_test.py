"""Host to device: copy from pinned memory.

Problem    Copy n fp32 values from host memory to the GPU.
Baseline   pageable: ordinary memory, which the GPU cannot read. The driver first copies the bytes
           on the CPU, piece by piece, into its own pinned memory.
Optimized  pinned: changes `pageable`. The values are in pinned memory, which the copy engine reads
           directly.
           asynchronous: changes `pinned`. With `non_blocking=True`, the host does not wait for the
           copy. Here, `asynchronous` gains nothing over `pinned`, because the host waits for the
           copy at the end anyway. A non-blocking copy pays off if other work runs during the copy,
           as in `double_buffering_test.py`.
Bound      For pinned and `asynchronous`, PCIe. For pageable, the driver's copy on the CPU.
Seen       `pageable` takes several times as long as predicted, because the cost counts only the
           transfer over PCIe. The rate of the driver's copy on the CPU was not measured.
Use when   Data can be read or created in pinned memory. The time does not include filling either
           kind of memory. Data that is already in pageable memory would first need a copy on the
           CPU into pinned memory. No side of this page includes such a copy.
"""

import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Work, compare


def inputs(device, n):
    pageable = torch.randn(n)
    pinned = torch.empty(n, pin_memory=device == "cuda").copy_(pageable)
    return pageable, pinned, device


def reference(pageable, pinned, device):
    return pageable.double().to(device)


# copy=True changes nothing on a GPU. On a CPU, `to` without copy=True returns the input itself.
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
    costs={
        **dict.fromkeys(
            [pageable, pinned], lambda n: Cost(h2d=4 * n, launches=1, host_steps=1, syncs=1)
        ),
        asynchronous: lambda n: Cost(h2d=4 * n, launches=1, host_steps=1),
    },
    at_least={"sm90": 4.0},
)
def test_h2d(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
