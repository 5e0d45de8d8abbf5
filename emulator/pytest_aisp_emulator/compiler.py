"""Compile a .cu file with g++ into a library, whose kernels `emulated.cpp` runs on the CPU."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pytest_aisp.kernels.arguments import only_kernel, without_comments
from pytest_aisp.kernels.cuda_cpp import CudaModule

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") if shutil.which("objcopy") else None
RUNTIME = ("-O2", "-w", "-std=c++17", "-fPIC", "-U_FORTIFY_SOURCE")
KERNELS = ("-O1", "-g1", "-fPIC", "-w", "-fsanitize=thread", "--param=tsan-distinguish-volatile=1")
HEADERS = (
    "cooperative_groups.h",
    *("cuda_bf16.h", "cuda_fp16.h", "cuda_pipeline.h", "cuda_pipeline_primitives.h"),
    *("cuda_runtime.h", "device_launch_parameters.h", "math_constants.h", "vector_types.h"),
    *("cuda/std/cstddef", "cuda/std/cstdint", "cuda/std/limits", "cuda/std/type_traits"),
    *("cuda/std/utility",),
)
"""CUDA headers that a .cu file may include. `emulated.h` defines their contents."""
PREFETCH = (
    r'\basm volatile\(\s*"(?:cp\.async\.bulk\.prefetch\.L2\.global \[%0\], %1'
    r'|prefetch\.global\.L[12] \[%0\]);"\s*:\s*:\s*"l"\([^;]*\);'
)
"""Inline assembly that changes no value. The emulator leaves it out."""
UNSUPPORTED = {
    "inline assembly": r"\basm\b",
    "tensor maps": r"\bCUtensorMap\b",
    "clusters": r"__cluster_dims__|\bcluster_group\b|\bthis_cluster\b",
    "tensor cores": r"\bwmma\s*::|\bmma\.h\b",
    "cooperative groups": r"\bcooperative_groups\b(?!\.h\b|::(?:grid_group|this_grid)\b)",
    "libcu++": r"\bcuda\s*::\s*(?!std\b)\w+",
}
"""For each feature that needs a GPU, the pattern that finds its use in a source file."""


class CannotEmulate(RuntimeError):
    """A .cu file cannot run on the CPU. The message says why."""


def unsupported(module: CudaModule) -> str:
    """Return the features of `module` that need a GPU, separated by commas, or an empty string."""
    plain = "".join(map(_plain, module.sources.values()))
    return ", ".join(what for what, pattern in UNSUPPORTED.items() if re.search(pattern, plain))


def _plain(source: str) -> str:
    """Return `source` without comments and without prefetches."""
    return re.sub(PREFETCH, ";", without_comments(source))


def library_of(module: CudaModule, kernel: str) -> ctypes.PyDLL:
    """Compile `module` and return the loaded library, which contains `kernel`.

    If g++ rejects the module, the bodies of its other kernels are left out.

    Raises:
        CannotEmulate: if the module needs a GPU, or if g++ is missing or rejects it.
    """
    if reason := unsupported(module):
        raise CannotEmulate(f"{module.path.name}: {reason}: needs a GPU")
    if COMPILER is None:
        raise CannotEmulate("g++ or objcopy is missing\n    apt install g++")
    flags = [f"-I{folder}" for folder in module.folders]
    flags += [f"-D{macro}" for macro in _macros(module.options)]
    path, flags = str(module.path), [*flags, f"-std={module.options['std']}"]
    source = module.sources[path]
    library = _compiled(path, _unit(module, source), tuple(flags))
    if isinstance(library, CannotEmulate) and len(module.kernels) > 1:
        library = _compiled(path, _unit(module, only_kernel(source, kernel)), tuple(flags))
    if isinstance(library, CannotEmulate):
        raise library
    return library


def _macros(options: Mapping[str, object]) -> list[str]:
    """Return the macros in the form `NAME` or `NAME=VALUE`.

    The option `define_macro` is a name, a name with its value, or a list of these.
    """
    given = options.get("define_macro") or []
    macros = given if isinstance(given, list) else [given]
    return [one if isinstance(one, str) else "=".join(map(str, one)) for one in macros]


def _unit(module: CudaModule, source: str) -> str:
    """Return `source`, the text of the .cu file, as C++ source.

    It is in a namespace, so that a kernel may have the name of a libc function.
    """
    source = _plain(source)
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


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """Return the temporary folder of this process, which is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="pytest-aisp-emulator-")


@functools.cache
def _runtime() -> Path:
    """Return the folder with the compiled runtime and the empty CUDA headers."""
    folder = Path(_temporary().name)
    for header in HEADERS:
        (folder / "include" / header).parent.mkdir(parents=True, exist_ok=True)
        (folder / "include" / header).touch()
    _tool("g++", *RUNTIME, "-c", HERE / "emulated.cpp", "-o", folder / "runtime.o")
    return folder


@functools.cache
def _compiled(path: str, unit: str, flags: tuple[str, ...]) -> ctypes.PyDLL | CannotEmulate:
    """Return the loaded library, or the error of g++, which is cached too."""
    runtime = _runtime()
    folder = Path(tempfile.mkdtemp(dir=runtime))
    source = folder / Path(path).name  # addr2line prints this name
    source.write_text(unit)
    include, built = f"-I{runtime / 'include'}", folder / "unit.o"
    try:
        _tool("g++", *KERNELS, *flags, include, "-x", "c++", "-c", source, "-o", built)
    except CannotEmulate as error:
        return error
    # All shared memory is in one section, so that the runtime can fill it before each block.
    moved = ".bss=emulated_shared,alloc,load,data,contents"
    _tool("objcopy", "--rename-section", moved, built)
    # No -fsanitize here: the runtime defines the sanitizer's functions itself.
    library = folder / "unit.so"
    _tool("g++", "-shared", "-Wl,-Bsymbolic", built, runtime / "runtime.o", "-o", library)
    loaded = ctypes.PyDLL(str(library))  # PyDLL keeps the GIL, since the emulator has no locks
    loaded.emulate.restype = ctypes.c_char_p
    loaded.emulated_site.restype = ctypes.c_size_t
    return loaded


def _tool(*command: str | Path) -> None:
    english = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, env=english, check=False)
    if done.returncode:
        raise CannotEmulate(f"{command[0]} rejects it:\n{done.stderr}")
