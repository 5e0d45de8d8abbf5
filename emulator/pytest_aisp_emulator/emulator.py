"""Run launches of CUDA C++ kernels on the CPU.

`emulated.cpp` runs a kernel's threads one at a time, in an order drawn from a seed, and inspects
every access to tensors and shared memory. It raises a `Fault` for an access that is out of bounds,
is misaligned, or races with another thread. It also raises one for a barrier or shuffle that some
thread never reaches. Shared memory starts as NaN. The GPU's memory model, time, and warps or blocks
that wait for one another in a loop are not emulated.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

from pytest_aisp.kernels.arguments import LaunchError, check_arguments
from pytest_aisp.kernels.cuda_cpp import Kernel, Launch
from pytest_aisp.kernels.fake_gpu import cuda_functions

from .compiler import library_of

MOST_SHARED = 227 * 1024
SMALL_GPU = {"multi_processor_count": 2, "max_threads_per_multi_processor": 1024}
"""The emulated GPU has few processors, so that persistent kernels loop."""


class Fault(RuntimeError):
    """A kernel did something illegal. The message names the error, the thread and the line."""


@contextlib.contextmanager
def emulated(seed: int = 0, *, races: bool = True) -> Iterator[None]:
    """Run each launch on the CPU when it is called, and draw its thread order from `seed`.

    Args:
        races: report a race (accesses by two threads without a barrier between them) as a fault.
            If false, a race only shows in wrong results.
    """
    import torch

    seeds = itertools.count(seed << 32)

    def call(launch: Launch, *args: object) -> None:
        __tracebackhide__ = True
        run(launch, args, next(seeds), races=races)

    with (
        mock.patch.object(Launch, "__call__", call),
        mock.patch.multiple(torch.cuda, **_device_properties()),
    ):
        yield


def _device_properties() -> dict[str, Callable[..., object]]:
    """Return substitutes for torch.cuda's device queries, with few processors."""
    functions = cuda_functions("sm90")
    properties = functions["get_device_properties"]()
    vars(properties).update(SMALL_GPU)
    return {name: functions[name] for name in functions if name.startswith("get_device_")}


def run(launch: Launch, args: Sequence[object], seed: int, *, races: bool) -> None:
    """Run one launch until all of its threads have ended.

    Raises:
        LaunchError: if the launch would also be refused on a GPU.
        CannotEmulate: if the kernel needs a GPU.
        Fault: if the kernel did something illegal.
    """
    __tracebackhide__ = True
    kernel, config = launch.kernel, launch.config
    values = _checked(kernel, args)
    if config.shared > MOST_SHARED:
        fault = f"{kernel.name}: {config.shared} bytes of dynamic shared memory"
        raise LaunchError(f"{fault}; a GPU has {MOST_SHARED} a block")
    threads, most = math.prod(config.grid) * math.prod(config.block), math.prod(SMALL_GPU.values())
    if config.cooperative and threads > most:
        fault = f"{kernel.name}: a cooperative launch of {threads} threads"
        raise LaunchError(f"{fault}; all must run at once, and the emulated GPU runs {most}")
    library = library_of(kernel.module, kernel.name)
    held = [v if isinstance(v, ctypes._SimpleCData) else ctypes.c_uint64(v) for v in values]
    pointers = (ctypes.c_void_p * max(1, len(held)))(*map(ctypes.addressof, held))
    grid, block = ((*dims, 1, 1)[:3] for dims in (config.grid, config.block))
    tensors = [
        _Tensor(arg.data_ptr(), arg.nbytes, arg.element_size(), param.name.encode())
        for arg, param in zip(args, kernel.params, strict=True)
        if hasattr(arg, "data_ptr")
    ]
    message = library.emulate(
        getattr(library, f"emulated_{kernel.name}"),
        pointers,
        (ctypes.c_uint * 6)(*grid, *block),
        ctypes.c_size_t(config.shared),
        ctypes.c_uint64(seed),
        (_Tensor * max(1, len(tensors)))(*tensors),
        len(tensors),
        races,
        any(p.text.count("*") > 1 for p in kernel.params),
        config.cooperative,
    )
    if message is not None:
        raise Fault(f"{kernel.name}: {message.decode()}{_line(library)}")


def _checked(kernel: Kernel, args: Sequence[object]) -> list[object]:
    """Return `args` converted to the signature's types. Tensors must be on the CPU, device -1."""
    __tracebackhide__ = True
    try:
        return check_arguments(kernel.name, kernel.params, args, -1)
    except LaunchError as error:
        raise LaunchError(str(error).replace("on cuda:-1", "on the CPU")) from None


class _Tensor(ctypes.Structure):
    """The struct in which `emulated.cpp` receives a tensor."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("item", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
    )


def _line(library: ctypes.PyDLL) -> str:
    """Return the source line of the faulty access, if there was one."""
    site = library.emulated_site()
    if not site:
        return ""
    command = ["addr2line", "-i", "-e", library._name, hex(site)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    lines = [Path(line.split(" ")[0]).name for line in found if "emulated.h" not in line]
    return f" ({lines[0]})" if lines and ":" in lines[0] else ""
