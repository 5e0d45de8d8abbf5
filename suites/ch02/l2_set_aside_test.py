"""L2 set-aside: reserve part of the L2 for a table, so that streamed data cannot evict it.

Problem    Compute out[i] = x[i] . table[index[i]] on `rows` rows of 128 floats. 1 GiB of x passes
           through the L2. Each row of the table is read many times, in random order.
Baseline   normal: all lines in the L2 have the same priority, so x evicts rows of the table that
           will be read again.
Optimized  set_aside: changes `normal`. The process sets aside the largest part of the L2 for
           persisting accesses that the GPU allows (`CU_LIMIT_PERSISTING_L2_CACHE_SIZE`). An access
           policy window on the stream makes all accesses to the table persisting. The limit and the
           window are set once, before the first timed call. The kernel does not change. The limit
           applies to the whole process, so each sample runs in a new process. All calls of a
           process use the same table, as in an application. So the table may still be in the L2
           from the previous call. The cost of `set_aside` still counts one read of the table from
           DRAM per call.
Bound      DRAM. If the table stays in the L2, only x, the index and the results are transferred. In
           `normal`, a row stays in the L2 until newer rows have filled the L2. If a row of the
           table is read again after that, it comes from DRAM. With a larger table, more reads come
           from DRAM. The costs treat the L2 as one cache. But the L2 has two halves. If SMs near
           both halves read a line, both halves may keep it, and less of the table fits.
Seen       On an H100, `normal` takes almost 1.5 times its predicted time, and `set_aside` takes 1.5
           times its predicted time or more. The confidence intervals of both speedups include 1, so
           the record does not show that `set_aside` gains. The two speedups are about the same, but
           the costs predict a larger speedup with the larger table. The costs assume the L2 of an
           H200, and an H100 has a sixth less. With that L2, the prediction for `normal` would be
           only a few percent longer, and `set_aside` has the same prediction with any L2. Lines
           that are in both halves of the L2 may be the reason. We did not count the sectors that
           come from DRAM.
Use when   You control the whole process, and a table of at most half the L2 is read many times
           while much more data passes through the L2. All other kernels lose the part of the L2
           that is set aside. When the table is no longer used, call `cuCtxResetPersistingL2Cache`.
           A slice of a GPU (MIG) has no set-aside. `../ch07/l2_persistence_test.py` uses hints on
           single loads, which work without a set-aside.
"""

import functools
import math
from importlib import import_module

import torch
from hypothesis import strategies as st

from pytest_aisp import Conditions, Cost, Variant, Work, compare, cuda_module, fresh_process

kernels = cuda_module("l2_set_aside.cu")
BLOCK, LANES = 256, 32
WIDTH = 128  # floats in a row
L2 = 60 << 20  # bytes of L2 on an H200, for costs


def inputs(device, rows, entries):
    x, table = (torch.randn(n, WIDTH, device=device) for n in (rows, entries))
    return x, table, torch.randint(entries, (rows,), device=device, dtype=torch.int32)


def reference(x, table, index):
    return (x.double() * table.double()[index.long()]).sum(1)


def scored(x, table, index):
    out = torch.empty(len(x), device=x.device)
    kernels.scores[-(-len(x) * LANES // BLOCK), BLOCK](x, table, index, out, len(x))
    return out


@functools.cache
def own_stream():
    return torch.cuda.Stream()


def on_own_stream(x, table, index, before):
    """Call `before` with a new stream, compute the scores on this stream, and return them.

    Each side has its own stream, because the access policy window is an attribute of a stream.
    Without a GPU, compute the scores without a stream, and do not call `before`.
    """
    if not torch.cuda.is_available():
        return scored(x, table, index)
    stream, usual = own_stream(), torch.cuda.current_stream()
    stream.wait_stream(usual)
    before(stream.cuda_stream)
    with torch.cuda.stream(stream):
        out = scored(x, table, index)
    usual.wait_stream(stream)
    return out


def driver_call(name, *arguments):
    """Call the driver function `name`, and return its result, or None if it has no result."""
    status, *result = getattr(import_module("cuda.bindings.driver"), name)(*arguments)
    if status.value:
        raise RuntimeError(f"{name}: {status.name}")
    return result[0] if result else None


@functools.lru_cache(maxsize=1)  # only a new table or stream needs a new window
def persist(gpu, address, size, stream):
    """Set a part of the L2 aside, and make accesses of `stream` to the table persisting."""
    driver = import_module("cuda.bindings.driver")
    most = driver_call(
        "cuDeviceGetAttribute",
        driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE,
        gpu,
    )
    if not most:
        raise RuntimeError("this GPU, or this slice of it (MIG), can set no part of the L2 aside")
    driver_call("cuCtxSetLimit", driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE, most)
    window = driver.CUaccessPolicyWindow()
    window.base_ptr, window.num_bytes = address, size
    window.hitRatio = min(1.0, most / size)
    window.hitProp = driver.CUaccessProperty.CU_ACCESS_PROPERTY_PERSISTING
    window.missProp = driver.CUaccessProperty.CU_ACCESS_PROPERTY_NORMAL
    value = driver.CUstreamAttrValue()
    value.accessPolicyWindow = window
    policy = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    driver_call("cuStreamSetAttribute", stream, policy, value)


@fresh_process
def normal(x, table, index):
    return on_own_stream(x, table, index, before=lambda stream: None)


@fresh_process
def set_aside(x, table, index):
    where = table.get_device(), table.data_ptr(), table.nbytes
    return on_own_stream(x, table, index, before=lambda stream: persist(*where, stream))


def missing(entries):
    """Return the share of reads of the table that miss the L2, from 0 to 1.

    With probability exp(-later / entries), more than `later` other reads come before a row of the
    table is read again. During `later` reads, `later` rows of x and entries * (1 - exp(-later /
    entries)) different rows of the table come into the L2. A read misses if these rows fill the L2
    first.
    """
    later = 0.0
    for _ in range(200):
        later = L2 / (4 * WIDTH) - entries * (1 - math.exp(-later / entries))
    return math.exp(-later / entries)


def read_once(rows, entries, again=0.0):
    """Return the cost if `again` reads of the table come from DRAM, and at least one per row."""
    return Cost(
        read=4 * WIDTH * (rows + max(entries, again)) + 4 * rows,
        write=4 * rows,
        ops={"fp32": 2 * WIDTH * rows},
        launches=1,
        host_steps=2,
        syncs=1,
    )


@compare(
    baseline=normal,
    optimized=[Variant(set_aside, at_least="neutral")],  # the interval includes 1
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 2**21, "entries": entries} for entries in (49152, 61440)],
    check_sizes=[
        {"rows": 33, "entries": 5},
        {"rows": 257, "entries": 70},
        {"rows": st.integers(1, 80), "entries": st.integers(1, 40)},
    ],
    work=lambda rows, entries: Work(
        read=4 * WIDTH * (rows + entries) + 4 * rows,
        write=4 * rows,
        flops={"fp32": 2 * WIDTH * rows},
        terms=WIDTH,
    ),
    bound="dram",
    costs={
        normal: lambda rows, entries: read_once(rows, entries, again=missing(entries) * rows),
        set_aside: read_once,
    },
    conditions=Conditions(owns=["l2_persistence"]),
)
def test_l2_set_aside(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
