"""CUDA C++ to machine code: NVRTC, what it needs, and the cubins that are kept on disk."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

INSTALL = (
    "cuda_module needs cuda.core and NVRTC: pip install cuda-core cuda-bindings nvidia-cuda-nvrtc"
)
HEADERS = "CUDA's headers are not here: pip install nvidia-cuda-runtime nvidia-cuda-cccl"

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


class CompileError(RuntimeError):
    """A .cu file does not compile; the message has file, line and the compiler's words.

    Attributes:
        anywhere: the message without the target: the same where the compiler says the same.
    """

    def __init__(self, message: str, anywhere: str = "") -> None:
        super().__init__(message)
        self.anywhere = anywhere or message


class NoCompiler(RuntimeError):
    """This machine lacks cuda.core or NVRTC."""


class Module(Protocol):
    """A .cu file: where it is, how it is compiled, its text and that of its headers by path."""

    path: Path
    options: dict[str, Any]
    folders: list[str]
    sources: dict[str, str]

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the kernels that its text has."""


@dataclass(frozen=True)
class Cubin:
    """Machine code, and what each kernel uses in the assembler's words."""

    code: bytes
    usage: dict[str, dict[str, int]]


def compiled(module: Module, target: str) -> Cubin:
    """Return `module` compiled for `target`, from the cache on disk or by NVRTC.

    Raises:
        CompileError: with file, line and the compiler's words.
        NoCompiler: cuda.core or NVRTC is not installed.
    """
    core, *version = toolchain()
    options = {**module.options, "name": module.path.name, "arch": target}
    toolkit = _toolkit() if any(map(_INCLUDE.search, module.sources.values())) else []
    options["include_path"] = [*module.folders, *toolkit]
    options["ptxas_options"] = [*listed(options.get("ptxas_options")), "-v"]
    key = repr((version, sorted(options.items()), sorted(module.sources.items())))
    entry = _cache() / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    if cached := _read(entry):
        return cached
    cubin = _nvrtc(core, module, options)
    # NVRTC reads headers from disk: one edited since the import must not go under the old key.
    if sources_of(module.path, module.folders) == module.sources:
        _write(entry, cubin)
    return cubin


def _nvrtc(core: Any, module: Module, options: dict[str, Any]) -> Cubin:
    try:
        code, log = assembled(core, module.sources[str(module.path)], options)
    except CompileError as error:
        words = str(error)
        if "cannot open source file" in words and not _toolkit():
            words += f"\n{HEADERS}"
        raise _error(module, options["arch"], f"\n{words}") from None
    # ELF section names: a kernel inside `#if` has a signature for us, yet no code for every target.
    if absent := [k for k in module.kernels if f".text.{k}\0".encode() not in code]:
        words = f" no code for {', '.join(absent)}; is it inside an #if?"
        raise _error(module, options["arch"], words)
    return Cubin(code, _usage(log))


def _error(module: Module, target: str, words: str) -> CompileError:
    what, how = f"{module.path} does not compile", f"(NVRTC {toolchain()[1]}):{words}"
    return CompileError(f"{what} for {target} {how}", f"{what} {how}")


def assembled(core: Any, source: str, options: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the machine code of CUDA C++ and the compiler's log, or raise its words."""
    log = io.StringIO()
    try:
        program = core.Program(source, "c++", core.ProgramOptions(**options))
        return bytes(program.compile("cubin", logs=log).code), log.getvalue()
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
def toolchain() -> tuple[Any, str, int]:
    """Return `cuda.core`, NVRTC's version, and its size, which tells builds of a version apart."""
    try:
        core = import_module("cuda.core")
        _, major, minor = import_module("cuda.bindings.nvrtc").nvrtcVersion()
        library = import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, RuntimeError) as error:
        raise NoCompiler(f"{INSTALL}\n({error})") from error
    return core, f"{major}.{minor}", os.path.getsize(library) if library else 0


def compiler() -> tuple[Any, str]:
    """Return `cuda.core` and NVRTC's version, or raise `NoCompiler`."""
    return toolchain()[:2]


@functools.cache
def _toolkit() -> list[str]:
    """Return the folders of CUDA's own headers, which NVRTC does not bring."""
    find = import_module("cuda.pathfinder").find_nvidia_header_directory
    return [folder for folder in map(find, ("cudart", "cccl")) if folder]


def sources_of(path: Path, folders: list[str]) -> dict[str, str]:
    """Return the text of `path` and of every header of ours that it includes, by path."""
    sources: dict[str, str] = {}
    todo = [path]
    while todo:
        file = todo.pop()
        if str(file) in sources:
            continue
        sources[str(file)] = file.read_text(encoding="utf-8")
        for name in _INCLUDE.findall(sources[str(file)]):
            found = [Path(f, name).resolve() for f in (str(file.parent), *folders)]
            todo += [p for p in found if p.is_file()][:1]
    return sources


def listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else list(value or ())


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home, "pytest-aisp")


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
    with suppress(OSError):  # without a cache every process compiles once more, and that is all
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=entry.parent, delete=False) as file:
            file.write(hashlib.sha256(body).digest() + body)
        os.replace(file.name, entry)
