"""NUMA: allocate pinned host memory on the node that the GPU is connected to.

Problem    Copy n fp32 values from the GPU to pinned host memory and back, as in offloading
           activations or optimizer states. The CPU does not touch the values. The page needs a
           machine with two NUMA nodes. On other machines, it is skipped, and the report gives the
           reason.
Baseline   far: the host memory is on a different NUMA node from the GPU, usually on the other
           socket. Any process that is not bound to a node can get such memory, because the core
           that runs the pinning thread determines the node.
Optimized  near: changes `far`. The host memory is on the GPU's node.
           unbound: changes `far`. torch allocates the pinned memory, and Linux chooses the node.
           The memory of `far` and `near` comes from `mmap` and is then pinned. So `unbound` changes
           more than the node, and is only a yardstick.
Bound      For `near`, PCIe. In `far`, each byte also crosses the link between the sockets. If this
           link is faster than PCIe and idle, `near` gains nothing. So the page claims no speedup,
           only that `near` is not slower. The costs count only PCIe, so they predict no gain.
Use when   A machine has several NUMA nodes and moves much data between host and GPUs. Start the
           process of each GPU with `numactl --cpunodebind=N --membind=N`. `nvidia-smi topo -m`
           shows the node number N of each GPU. On this page, only one GPU copies. Expect a larger
           gain when several GPUs copy at once, because their copies to the far node share the link
           between the sockets.
"""

import contextlib
import ctypes
import mmap
import os
import platform
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from pytest_aisp import Cost, Variant, Work, compare

SYSTEM = Path("/sys/devices/system/node")
MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())  # system call numbers
ONLY_THESE_NODES = 2  # MPOL_BIND


def inputs(device, n):
    return (torch.randn(n, device=device),)


def reference(x):
    return x.double()


def numbers(text):
    """Return the numbers in a list that Linux writes as ``0-1,3``."""
    ranges = (part.split("-") for part in text.strip().split(",") if part)
    return {n for ends in ranges for n in range(int(ends[0]), int(ends[-1]) + 1)}


def host_nodes():
    """Return the numbers of the NUMA nodes whose cores and memory this process may use."""
    try:
        nodes = [numbers((SYSTEM / name).read_text()) for name in ("has_cpu", "has_memory")]
        status = Path("/proc/self/status").read_text()
    except OSError:  # not Linux, or a sandbox without these files
        return set()
    allowed = numbers(status.partition("Mems_allowed_list:")[2].partition("\n")[0])
    return nodes[0] & nodes[1] & allowed


def gpu_node():
    """Return the number of the current GPU's NUMA node, or -1 if Linux does not report it."""
    gpu = torch.cuda.get_device_properties()
    name = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    return int(Path(f"/sys/bus/pci/devices/{name}/numa_node").read_text())


def far_from(node):
    """Return the node that is farthest from `node`."""
    distances = (SYSTEM / f"node{node}/distance").read_text().split()
    order = sorted(numbers((SYSTEM / "online").read_text()))
    others = host_nodes() - {node}
    return max(others, key=lambda other: int(distances[order.index(other)]))


def bind(memory, node):
    """Bind `memory`, whose pages must not have been touched, to `node`."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mask = ctypes.c_ulong(1 << node)
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_ulong(len(memory))
    bits = ctypes.c_ulong(8 * ctypes.sizeof(mask))
    words = ctypes.c_long(MBIND), ctypes.c_void_p(address), size, ctypes.c_int(ONLY_THESE_NODES)
    if libc.syscall(*words, ctypes.byref(mask), bits, ctypes.c_uint(0)):
        error = ctypes.get_errno()
        raise OSError(error, f"mbind: {os.strerror(error)}")


def why_not():
    """Return the reason why this machine cannot run the page, or an empty string."""
    if not os.path.exists("/dev/nvidiactl"):
        return ""  # without a GPU, no memory is bound, so the page can be checked
    nodes = host_nodes()
    if len(nodes) < 2:
        return f"needs two NUMA nodes; this process may use {len(nodes)}"
    if MBIND is None:
        return f"does not know how to bind memory on {platform.machine()}"
    devices = Path("/sys/bus/pci/devices").glob("*")
    gpus = (d for d in devices if (d / "vendor").read_text().strip() == "0x10de")
    if all(int((gpu / "numa_node").read_text()) not in nodes for gpu in gpus):
        return "Linux does not say on which NUMA node the GPU is"
    try:
        bind(mmap.mmap(-1, mmap.PAGESIZE), min(nodes))
    except OSError as error:
        return f"cannot bind memory to a node ({error}); in Docker, add --cap-add=SYS_NICE"
    return ""


REASON = why_not()
two_nodes = pytest.mark.skipif(bool(REASON), reason=REASON)


@contextlib.contextmanager
def memory_on(node, x):
    """Yield a pinned tensor like `x` in memory on `node`. Without a GPU, it is not pinned."""
    if not torch.cuda.is_available():
        yield torch.empty(x.shape)
        return
    memory = mmap.mmap(-1, x.nbytes)
    bind(memory, node)
    host = torch.frombuffer(memory, dtype=x.dtype)
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(host.data_ptr(), x.nbytes, 0)))
    try:
        yield host
    finally:
        torch.cuda.synchronize()
        torch.cuda.check_error(int(runtime.cudaHostUnregister(host.data_ptr())))


def there_and_back(x, host):
    def call():
        host.copy_(x, non_blocking=True)
        return torch.empty_like(x).copy_(host, non_blocking=True)

    return call


def far(x):
    node = far_from(gpu_node()) if x.is_cuda else 0
    with memory_on(node, x) as host:
        yield there_and_back(x, host)


def near(x):
    node = gpu_node() if x.is_cuda else 0
    with memory_on(node, x) as host:
        yield there_and_back(x, host)


def unbound(x):
    yield there_and_back(x, torch.empty(x.shape, pin_memory=x.is_cuda))


def moved(n):
    return Cost(d2h=4 * n, launches=1) + Cost(h2d=4 * n, launches=1)


@compare(
    baseline=far,
    optimized=[
        Variant(near, at_least="neutral", marks=[two_nodes]),
        Variant(unbound, at_least="yardstick", marks=[two_nodes]),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**26}],
    check_sizes=[{"n": 1023}, {"n": st.integers(1, 3000)}],
    work=lambda n: Work(wire=4 * n),
    bound="pcie",
    costs=dict.fromkeys([far, near, unbound], moved),
)
def test_numa(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
