"""CUDA C++ kernels on the CPU: what a launch computes, where there is no GPU to compute it.

    with emulated(seed=1):
        kernels.rows[grid, block](x, out, n)  # tensors of the CPU

A .cu is compiled by g++ behind `emulated.h`, and `emulated.cpp` runs its threads one at a time, in
an order drawn from the seed. It looks at every access to a tensor or to shared memory: one outside
of it, a misaligned one, and one that races with another thread's, are a `Fault`, and so is a
barrier or a shuffle that not everybody reaches. Shared memory begins as NaN. Not seen are
what a GPU's memory model reorders, time, and warps or blocks that wait for one another.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from pytest_aisp.kernels import cuda_cpp, fake_gpu, launch_config

HERE = Path(__file__).parent
COMPILER = shutil.which("objcopy") and shutil.which("g++")
MOST_SHARED = 227 * 1024
SMALL = {"multi_processor_count": 2, "max_threads_per_multi_processor": 1024}
"""A GPU that few blocks fill: where a page launches as many as fit, each goes round its loop."""
RUNTIME = ("-O2", "-w", "-std=c++17", "-fPIC", "-U_FORTIFY_SOURCE")
KERNELS = ("-O1", "-g1", "-fPIC", "-w", "-fsanitize=thread", "--param=tsan-distinguish-volatile=1")
HEADERS = (
    *("cuda_bf16.h", "cuda_fp16.h", "cuda_pipeline.h", "cuda_pipeline_primitives.h"),
    *("cuda_runtime.h", "device_launch_parameters.h", "math_constants.h", "vector_types.h"),
    *("cuda/std/cstddef", "cuda/std/cstdint", "cuda/std/limits", "cuda/std/type_traits"),
    *("cuda/std/utility",),
)
"""What a .cu may include; `emulated.h` holds what is in them."""
BEYOND = {
    "inline assembly": r"\basm\b",
    "tensor maps": r"\bCUtensorMap\b",
    "clusters": r"__cluster_dims__|\bcluster_group\b|\bthis_cluster\b",
    "tensor cores": r"\bwmma\s*::|\bmma\.h\b",
    "cooperative groups": r"\bcooperative_groups\b",
    "libcu++": r"\bcuda\s*::\s*(?!std\b)\w+",
}
"""What only a GPU runs, as its source is recognised."""
ONLY_ON_A_GPU: dict[str, str] = {
    "ch04/symmetric_all_reduce-pushed": "Default process group has not been initialized",
    "ch07/histogram-library": "not implemented for 'Int'",
    "ch07/l2_persistence": "inline assembly",
    "ch07/tile_copy": "inline assembly, tensor maps",
    "ch10/cluster_reduction": "clusters, cooperative groups",
    "ch10/gemm": "inline assembly",
    "ch10/tcgen05": "the accelerator reads GPU memory",
}
"""By page (``ch07/gather``) or by case (``ch07/gather-library``) what emulation says of it; tests
fail where it does not say so any more."""


class CannotEmulate(RuntimeError):
    """A .cu holds what only a GPU runs; the message says what."""


class Fault(RuntimeError):
    """A kernel did what no kernel may; the message names it, thread and line."""


@contextlib.contextmanager
def emulated(seed: int = 0, *, races: bool = True) -> Iterator[None]:
    """Run every launch at once and on the CPU, each in an order of its own drawn from `seed`.

    Args:
        races: whether two accesses that no barrier orders are a fault; else they show only in
            what is computed.
    """
    numbers = itertools.count(seed << 32)

    def call(launch: cuda_cpp.Launch, *args: Any) -> None:
        __tracebackhide__ = True
        run(launch, args, next(numbers), races=races)

    with (
        mock.patch.object(cuda_cpp.Launch, "__call__", call),
        mock.patch.multiple(torch.cuda, **_answers()),
    ):
        yield


def _answers() -> dict[str, Any]:
    """Return what torch.cuda says of the GPU: few processors, so that who counts them loops."""
    said = fake_gpu._answers("sm90")
    properties = said["get_device_properties"]()
    vars(properties).update(SMALL)
    return {name: said[name] for name in said if name.startswith("get_device_")}


def unsupported(module: cuda_cpp.CudaModule) -> str:
    """Return what in `module` only a GPU runs, or an empty string."""
    plain = "".join(_plain(source) for source in module.sources.values())
    return ", ".join(what for what, pattern in BEYOND.items() if re.search(pattern, plain))


def run(launch: cuda_cpp.Launch, args: tuple[Any, ...], seed: int, *, races: bool) -> None:
    """Run one launch to its end.

    Raises:
        LaunchError: as on a GPU; CannotEmulate, Fault.
    """
    __tracebackhide__ = True
    kernel, geometry = launch.kernel, launch.geometry
    values = _checked(kernel, args)
    if geometry.shared > MOST_SHARED:
        fault = f"{kernel.name}: {geometry.shared} bytes of dynamic shared memory"
        raise cuda_cpp.LaunchError(f"{fault}; a GPU has {MOST_SHARED} a block")
    library = _library(kernel.module)
    held = [v if isinstance(v, ctypes._SimpleCData) else ctypes.c_uint64(v) for v in values]
    pointers = (ctypes.c_void_p * max(1, len(held)))(*map(ctypes.addressof, held))
    sizes = [(*dims, 1, 1)[:3] for dims in (geometry.grid, geometry.block)]
    given = [_Given.of(arg, p.name) for arg, p in zip(args, kernel.params, strict=True)]
    tensors = [g for g in given if g is not None]
    words = library.emulate(
        getattr(library, f"emulated_{kernel.name}"),
        pointers,
        (ctypes.c_uint * 6)(*sizes[0], *sizes[1]),
        ctypes.c_size_t(geometry.shared),
        ctypes.c_uint64(seed),
        (_Given * max(1, len(tensors)))(*tensors),
        len(tensors),
        races,
        any(p.text.count("*") > 1 for p in kernel.params),
    )
    if words is not None:
        raise Fault(f"{kernel.name}: {words.decode()}{_where(library)}")


def _checked(kernel: cuda_cpp.Kernel, args: tuple[Any, ...]) -> list[Any]:
    """Return `args` as the signature wants them; tensors of the CPU are on device -1."""
    __tracebackhide__ = True
    try:
        return launch_config.check(kernel.name, kernel.params, args, -1)
    except cuda_cpp.LaunchError as error:
        raise cuda_cpp.LaunchError(str(error).replace("on cuda:-1", "on the CPU")) from None


class _Given(ctypes.Structure):
    """A tensor, as emulated.cpp wants to know of it."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("item", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
    ]

    @classmethod
    def of(cls, given: Any, name: str) -> _Given | None:
        if not hasattr(given, "data_ptr"):
            return None
        item = given.element_size()
        return cls(given.data_ptr(), given.numel() * item, item, name.encode())


def _where(library: Any) -> str:
    """Return the line of the access at fault, where there was one."""
    site = library.emulated_site()
    if not site:
        return ""
    command = ["addr2line", "-i", "-e", library._name, hex(site)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    lines = [Path(line.split(" ")[0]).name for line in found if "emulated.h" not in line]
    return f" ({lines[0]})" if lines and ":" in lines[0] else ""


# Compiling.


def _library(module: cuda_cpp.CudaModule) -> Any:
    if reason := unsupported(module):
        raise CannotEmulate(f"{module.path.name}: {reason}: only a GPU runs that")
    if COMPILER is None:
        raise CannotEmulate("there is no g++ to compile it with")
    flags = [f"-I{folder}" for folder in module.folders]
    flags += [f"-D{macro}" for macro in _macros(module.options)]
    return _compiled(str(module.path), _unit(module), (*flags, f"-std={module.options['std']}"))


def _macros(options: Mapping[str, Any]) -> list[str]:
    """Return what `define_macro` defines: a name, a name and its value, or several of them."""
    given = options.get("define_macro") or []
    several = given if isinstance(given, list) else [given]
    return [one if isinstance(one, str) else "=".join(map(str, one)) for one in several]


def _unit(module: cuda_cpp.CudaModule) -> str:
    """Return the .cu as C++: in a namespace, so that a kernel may be called as libc's functions."""
    source = _plain(module.sources[str(module.path)])
    source = re.sub(r'extern\s*"C"\s*(?=__global__)', "", source)
    source = re.sub(r"__shared__\s+alignas\b", "__shared__ __align__", source)
    variable = r"__device__(?=(?:(?!\bconst)[^(){};=])*(?:=[^;]*)?;)"
    source = re.sub(variable, "EMULATED_GLOBAL", source)
    arena = r"\1* const \2 = reinterpret_cast<\1*>(::emulated::dynamic_shared);"
    attribute = r"(?:(?:__align__|alignas)\s*\([^()]*(?:\([^()]*\))?\)\s*)?"
    dynamic = rf"{attribute}extern\s+__shared__\s+{attribute}([\w:\s]+?)\s*\b(\w+)\s*\[\s*\]\s*;"
    source = re.sub(dynamic, arena, source)
    call = 'extern "C" void emulated_{0}(void** args) {{ emulated::unpack(page::{0}, args); }}'
    entries = "\n".join(map(call.format, module.kernels))
    top = f'#include "{HERE / "emulated.h"}"\nnamespace page {{ namespace {{'
    return f'{top}\n#line 1 "{module.path}"\n{source}\n}} }}\n{entries}\n'


def _plain(source: str) -> str:
    """Return `source` without its comments, line by line as it was."""

    def blank(found: re.Match[str]) -> str:
        return found[1] or " " + "\n" * found[0].count("\n")

    return launch_config._COMMENT.sub(blank, source)


@functools.cache
def _folder() -> Path:
    """Return this process's folder, with the runtime compiled and headers that are empty."""
    _folder.kept = tempfile.TemporaryDirectory(prefix="emulated-")  # type: ignore[attr-defined]
    folder = Path(_folder.kept.name)  # type: ignore[attr-defined]
    for header in HEADERS:
        (folder / "include" / header).parent.mkdir(parents=True, exist_ok=True)
        (folder / "include" / header).touch()
    _tool(COMPILER, *RUNTIME, "-c", HERE / "emulated.cpp", "-o", folder / "runtime.o")
    return folder


@functools.cache
def _compiled(path: str, unit: str, flags: tuple[str, ...]) -> Any:
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    source = folder / Path(path).name  # the name that addr2line tells
    source.write_text(unit)
    include = f"-I{_folder() / 'include'}"
    _tool(COMPILER, *KERNELS, *flags, include, "-x", "c++", "-c", source, "-o", folder / "unit.o")
    # What is shared stands together, so that each block can begin with garbage in it.
    moved = ".bss=emulated_shared,alloc,load,data,contents"
    _tool("objcopy", "--rename-section", moved, folder / "unit.o")
    # Linked without -fsanitize: its functions are ours.
    objects = (folder / "unit.o", _folder() / "runtime.o")
    _tool(COMPILER, "-shared", "-Wl,-Bsymbolic", *objects, "-o", folder / "unit.so")
    library = ctypes.PyDLL(str(folder / "unit.so"))  # holds the GIL: there is one GPU
    library.emulate.restype = ctypes.c_char_p
    library.emulated_site.restype = ctypes.c_size_t
    return library


def _tool(*args: Any) -> None:
    command, plain = [*map(str, args)], {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, env=plain, check=False)
    if done.returncode:
        raise CannotEmulate(f"{Path(command[0]).name} does not take it:\n{done.stderr}")
