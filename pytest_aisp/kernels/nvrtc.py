"""Compile CUDA C++ to machine code with NVRTC, and cache the cubins on disk."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from .arguments import only_kernel

if TYPE_CHECKING:
    from .cuda_cpp import CudaModule

INSTALL = (
    "cuda_module needs cuda.core and NVRTC: pip install cuda-core cuda-bindings nvidia-cuda-nvrtc"
)
HEADERS = "CUDA's headers are missing: pip install nvidia-cuda-runtime nvidia-cuda-cccl"
DEVICE_RUNTIME = (
    "Kernels that launch kernels need nvJitLink and CUDA's device runtime:"
    " pip install nvidia-nvjitlink nvidia-cuda-runtime"
)

Options: TypeAlias = "Mapping[str, object]"
"""Fields of `cuda.core.ProgramOptions`."""

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


class CompileError(RuntimeError):
    """A .cu file does not compile. The message has the file, the line and the compiler's error.

    Attributes:
        any_target: the same message without the target's name.
    """

    def __init__(self, message: str, any_target: str = "") -> None:
        super().__init__(message)
        self.any_target = any_target or message


class NoCompiler(RuntimeError):
    """This machine lacks cuda.core or NVRTC."""


@dataclass(frozen=True)
class Cubin:
    """Machine code, and the resources that each kernel uses according to the assembler."""

    code: bytes
    usage: dict[str, dict[str, int]]


class Toolchain(NamedTuple):
    """`cuda.core`, and the version and size of NVRTC. Together they identify the NVRTC build."""

    core: ModuleType
    version: str
    size: int


def compile_module(module: CudaModule, target: str, kernel: str = "") -> Cubin:
    """Return `module` compiled for `target`. NVRTC runs only if the cache on disk has no cubin.

    Args:
        kernel: the kernel that is needed. If the module does not compile, this kernel is compiled
            again without the bodies of all other kernels, because the error may be in another body.

    Raises:
        CompileError: the module does not compile.
        NoCompiler: cuda.core or NVRTC is not installed.
    """
    main = str(module.path)
    try:
        return _cached(module, target, module.sources[main], module.kernels)
    except CompileError:
        if not kernel or len(module.kernels) == 1:
            raise
        return _cached(module, target, only_kernel(module.sources[main], kernel), (kernel,))


def _cached(module: CudaModule, target: str, source: str, kernels: Sequence[str]) -> Cubin:
    core, *compiler = toolchain()
    options = {**module.options, "name": module.path.name, "arch": target}
    toolkit = _toolkit() if any(map(_INCLUDE.search, module.sources.values())) else []
    options["include_path"] = [*module.folders, *toolkit]
    options["ptxas_options"] = [*as_list(options.get("ptxas_options")), "-v"]
    sources = {**module.sources, str(module.path): source}
    try:
        libraries = _linked(options)
    except CompileError as error:
        raise _error(module, target, f"\n{error}") from None
    compiler += map(os.path.getsize, libraries)
    key = repr((compiler, kernels, sorted(options.items()), sorted(sources.items())))
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    entry = Path(home, "pytest-aisp", f"{hashlib.sha256(key.encode()).hexdigest()}.cubin")
    if cached := _read(entry):
        return cached
    try:
        code, log = compile_source(core, source, options, libraries)
    except CompileError as error:
        message = f"\n{error}"
        if "cannot open source file" in message and not _toolkit():
            message += f"\n{HEADERS}"
        raise _error(module, target, message) from None
    # A kernel inside `#if` has a signature, but no code for some targets.
    if missing := [k for k in kernels if f".text.{k}\0".encode() not in code]:
        raise _error(module, target, f" no code for {', '.join(missing)}; is it inside an #if?")
    cubin = Cubin(code, _usage(log))
    # NVRTC reads headers from disk. If a header was edited after the import, `key` is wrong.
    if sources_of(module.path, module.folders) == module.sources:
        _write(entry, cubin)
    return cubin


def _error(module: CudaModule, target: str, message: str) -> CompileError:
    what, how = f"{module.path} does not compile", f"(NVRTC {toolchain().version}):{message}"
    return CompileError(f"{what} for {target} {how}", f"{what} {how}")


def compile_source(
    core: ModuleType, source: str, options: Options, libraries: Sequence[str] = ()
) -> tuple[bytes, str]:
    """Compile `source`. Return the machine code and the compiler's log, or raise `CompileError`.

    Relocatable code must be linked with `libraries` (from `_linked`) before it can be loaded.
    """
    log = io.StringIO()
    try:
        program = core.Program(source, "c++", core.ProgramOptions(**options))
        compiled = program.compile("cubin", logs=log)
        if libraries:
            runtime = core.ObjectCode.from_library(libraries[-1])
            settings = core.LinkerOptions(arch=options["arch"])
            compiled = core.Linker(compiled, runtime, options=settings).link("cubin")
        return bytes(compiled.code), log.getvalue()
    except Exception as error:  # cuda.core's error classes are private
        raise CompileError(str(error).rstrip(" \n\0")) from None


def _usage(log: str) -> dict[str, dict[str, int]]:
    usage = {}
    for part in log.split("Compiling entry function '")[1:]:
        registers = re.search(r"Used (\d+) registers", part)
        shared, spilled = (re.search(rf"(\d+) bytes {w}", part) for w in ("smem", "spill stores"))
        counts = {"registers": registers, "shared": shared, "spilled": spilled}
        if registers:
            usage[part.split("'")[0]] = {k: int(m[1]) if m else 0 for k, m in counts.items()}
    return usage


@functools.cache
def toolchain() -> Toolchain:
    """Return the toolchain, or raise `NoCompiler`."""
    try:
        core = import_module("cuda.core")
        _, major, minor = import_module("cuda.bindings.nvrtc").nvrtcVersion()
        library = import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, RuntimeError) as error:
        raise NoCompiler(f"{INSTALL}\n({error})") from error
    return Toolchain(core, f"{major}.{minor}", os.path.getsize(library) if library else 0)


def _linked(options: Options) -> list[str]:
    """Return the paths of nvJitLink and CUDA's device runtime if code with `options` needs them.

    Raises:
        CompileError: one of these libraries is not installed.
    """
    if not options.get("relocatable_device_code"):
        return []
    finder = import_module("cuda.pathfinder")
    try:
        # Without nvJitLink, cuda.core links with the driver.
        linker = finder.load_nvidia_dynamic_lib("nvJitLink").abs_path
        return [linker, str(finder.find_static_lib("cudadevrt"))]
    except RuntimeError as error:
        raise CompileError(f"{DEVICE_RUNTIME}\n({str(error).strip()})") from None


@functools.cache
def _toolkit() -> list[str]:
    """Return the folders of CUDA's own headers, which are not part of NVRTC."""
    find = import_module("cuda.pathfinder").find_nvidia_header_directory
    return [folder for folder in map(find, ("cudart", "cccl")) if folder]


def sources_of(path: Path, folders: list[str]) -> dict[str, str]:
    """Return the texts of `path` and of the headers that it includes from `folders`, by path."""
    sources: dict[str, str] = {}
    todo = [path]
    while todo:
        file = todo.pop()
        if str(file) in sources:
            continue
        sources[str(file)] = file.read_text(encoding="utf-8")
        for name in _INCLUDE.findall(sources[str(file)]):
            candidates = [Path(f, name).resolve() for f in (str(file.parent), *folders)]
            todo += [p for p in candidates if p.is_file()][:1]
    return sources


def as_list(value: object) -> list[str]:
    """Return an option as a list. The option may be a string, several strings or None."""
    if isinstance(value, str):
        return [value]
    return [str(each) for each in value] if isinstance(value, Iterable) else []


def _read(entry: Path) -> Cubin | None:
    with suppress(OSError):
        stored = entry.read_bytes()
        digest, body = stored[:32], stored[32:]
        if hashlib.sha256(body).digest() == digest:
            usage, _, code = body.partition(b"\n")
            return Cubin(code, json.loads(usage))
    return None


def _write(entry: Path, cubin: Cubin) -> None:
    body = json.dumps(cubin.usage).encode() + b"\n" + cubin.code
    with suppress(OSError):  # without a cache folder, each process compiles again
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=entry.parent, delete=False) as file:
            file.write(hashlib.sha256(body).digest() + body)
        os.replace(file.name, entry)
