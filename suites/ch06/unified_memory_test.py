"""Unified memory: prefetch the pages before a kernel needs them, or copy.

Problem    In each call, the CPU writes n fp32 values into a buffer, and the GPU returns their sum.
           All sides allocate the buffer before the timed part. All sides wait for the sum, so that
           the CPU does not overwrite values before the GPU has read them.
Baseline   on_demand: the CPU and the GPU both use one buffer in managed memory. When one processor
           touches a page in the memory of the other, a page fault makes the driver move the page.
Optimized  prefetched: changes `on_demand`. `cuMemPrefetchAsync` moves the buffer to the GPU before
           the sum and back to the host afterwards, so there are no page faults.
           copied: changes `on_demand`. The CPU has a pinned buffer, the GPU has its own, and each
           call copies from the first to the second. Nothing is copied back, because the GPU does
           not change the values.
Bound      The host, which writes the values with one thread or several. The predicted times leave
           out the writing, because its rate was not measured. Then the values cross PCIe. In
           `on_demand` and `prefetched`, the old values also cross back, because the driver cannot
           know that the CPU will overwrite them. In `on_demand`, page faults take additional time:
           a fault stops the threads that caused it until the driver has moved the page. GPUs that
           share the CPU's page tables, such as those of GH200 and GB10, may read a page without
           moving it. We did not measure such GPUs.
Seen       On an H200, `prefetched` is one and a half times as fast as `on_demand`, and `copied` is
           seven times as fast. All sides take longer than predicted: `on_demand` nearly ten times
           as long, prefetched six times, and `copied` two and a half times. In `on_demand`, the
           profiler shows that the sum takes about 90 % of the call, because its threads wait for
           pages. In `prefetched`, the sum takes almost no time, so writing and prefetching take
           nearly all of the call. In `copied`, the copy and the sum take less than half of the
           call. Writing probably takes the rest. We timed neither the writing nor the prefetches
           alone.
Use when   The data does not fit on the GPU, or you do not know which part of it a kernel will use.
           Prefetch the parts that will be used for certain. If the CPU and the GPU take turns with
           a buffer that fits on the GPU, copy it.
"""

import ctypes
from importlib import import_module

import torch
from hypothesis import strategies as st

from pytest_aisp import Conditions, Cost, Work, compare


def inputs(device, n):
    return torch.randn(n), device


def reference(x, device):
    return x.double().sum().to(device)


class Managed:
    """n fp32 elements of managed memory, as a tensor `host` and a tensor `gpu` on the same bytes.

    PyTorch cannot allocate managed memory, so the driver allocates it. Without a GPU, `host` and
    `gpu` are the same ordinary tensor.
    """

    def __init__(self, n, device):
        self.device, self.bytes, self.address = device, 4 * n, None
        if device == "cpu":
            self.host = self.gpu = torch.empty(n)
            return
        torch.cuda.synchronize()  # create the context that the calls below need
        driver = import_module("cuda.bindings.driver")
        everyone = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
        self.address = int(self.call("cuMemAllocManaged", self.bytes, everyone.value))
        memory = (ctypes.c_byte * self.bytes).from_address(self.address)
        self.host = torch.frombuffer(memory, dtype=torch.float32)
        self.__cuda_array_interface__ = {
            "shape": (n,),
            "typestr": "<f4",
            "data": (self.address, False),
            "version": 3,
        }
        self.gpu = torch.as_tensor(self, device=device)

    def call(self, name, *arguments):
        """Call a function of the driver, and return its result if it has one."""
        status, *result = getattr(import_module("cuda.bindings.driver"), name)(*arguments)
        if status.value:
            raise RuntimeError(f"{name}: {status.name}")
        return result[0] if result else None

    def prefetch(self, where):
        """Move all pages to the GPU or to the host, in order with the other work of the stream."""
        if self.address is None:
            return
        driver = import_module("cuda.bindings.driver")
        place, kinds = driver.CUmemLocation(), driver.CUmemLocationType
        host = where == "host"
        place.type = getattr(kinds, f"CU_MEM_LOCATION_TYPE_{'HOST' if host else 'DEVICE'}")
        place.id = 0 if host else torch.cuda.current_device()
        stream = torch.cuda.current_stream().cuda_stream
        self.call("cuMemPrefetchAsync", self.address, self.bytes, place, 0, stream)

    def free(self):
        if self.address is not None:
            self.call("cuMemFree", self.address)


def waited(total):
    """Wait until the GPU has computed `total`, and return it."""
    if total.is_cuda:
        torch.cuda.current_stream().synchronize()
    return total


def on_demand(x, device):
    buffer = Managed(x.numel(), device)

    def call():
        buffer.host.copy_(x)
        return waited(buffer.gpu.sum())

    yield call
    buffer.free()


def prefetched(x, device):
    buffer = Managed(x.numel(), device)

    def call():
        buffer.host.copy_(x)
        buffer.prefetch("gpu")
        total = buffer.gpu.sum()
        buffer.prefetch("host")
        return waited(total)

    yield call
    buffer.free()


def copied(x, device):
    pinned = torch.empty(x.shape, pin_memory=device == "cuda")
    buffer = torch.empty(x.shape, device=device)

    def call():
        pinned.copy_(x)
        buffer.copy_(pinned, non_blocking=True)
        return waited(buffer.sum())

    yield call


def summed(n, d2h=0):
    total = Cost(read=4 * n, write=4, ops={"fp32": n}, launches=1)
    return Cost(h2d=4 * n) + total + Cost(d2h=d2h * n, syncs=1)


@compare(
    baseline=on_demand,
    optimized=[prefetched, copied],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**23}],
    check_sizes=[{"n": 1023}, {"n": st.integers(1, 3000)}],
    work=lambda n: Work(read=4 * n, wire=4 * n, flops={"fp32": n}, terms=n),
    bound="host",
    conditions=Conditions(owns=["page_faults"]),  # Linux counts them as pages read from disk
    costs={
        on_demand: lambda n: summed(n, d2h=4),
        prefetched: lambda n: summed(n, d2h=4),
        copied: summed,
    },
)
def test_unified_memory(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
