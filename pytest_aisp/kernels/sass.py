"""Read a cubin's registers, stack and instructions (SASS).

The registers and the stack are in section ``.nv.info`` of the ELF file. The instructions are read
with ``nvdisasm``, which comes with Triton, with CUDA, and as a package. An old ``nvdisasm`` does
not support newer archs. For example, the ``nvdisasm`` of Triton 3.6 cannot read sm103.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

REGISTERS, FRAME = 0x2F, 0x11
"""Attributes of ``.nv.info``: EIATTR_REGCOUNT and EIATTR_FRAME_SIZE, as nvdisasm names them."""
Section: TypeAlias = tuple[str, tuple[int, ...], bytes]
"""Name, header and content of a section of an ELF file."""
NOBITS = 8
"""The type of a section without content, such as shared memory."""
CODE = (".text", ".nv.constant", ".nv.global")
UNSEEN = re.compile(r"(\.rela?)?\.(debug|nv_debug)|\.note|\.(sh)?strtab$")
"""Names of sections that have no effect on the execution of a kernel."""
INSTALL = "pip install nvidia-cuda-nvdisasm"
NEWER = "pip install -U nvidia-cuda-nvdisasm"

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_KERNEL = re.compile(r"^\.text\.(\w+):$", re.MULTILINE)
_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;|^(\.L_\w+):", re.MULTILINE)
_LABEL = re.compile(r"\.L_\w+")


def usage(cubin: bytes) -> dict[str, dict[str, int]]:
    """Return the ``registers`` and the bytes of ``stack`` per thread, keyed by kernel.

    The stack is in local memory, and contains spilled registers and arrays that do not fit in
    registers.
    """
    sections = {name: content for name, _, content in _sections(cubin)}
    names = list(_symbols(sections[".symtab"], sections[".strtab"]))
    usage: dict[str, dict[str, int]] = {}
    for attribute, symbol, value in _attributes(sections[".nv.info"]):
        resource = {REGISTERS: "registers", FRAME: "stack"}.get(attribute)
        if resource and f".text.{names[symbol]}" in sections:
            usage.setdefault(names[symbol], {})[resource] = value
    return usage


def contents(cubin: bytes, *, code_alone: bool = False) -> list[Section]:
    """Return the name, header and content of each section that may affect a kernel's execution.

    Debug information (such as line tables), compiler notes and symbol names are left out, because
    they change with comments and variable names.

    Args:
        code_alone: True to return only instructions and initial values of variables. The other
            sections depend on the compiler version.
    """
    (flags,) = struct.unpack_from("<I", cubin, 0x30)
    found: list[Section] = [] if code_alone else [("", (flags,), b"")]
    for name, header, content in _sections(cubin):
        if name.startswith(CODE if code_alone else "") and not UNSEEN.match(name):
            numbers = range(4, len(content), 24) if name == ".symtab" else ()
            values = b"".join(content[start : start + 20] for start in numbers)
            found.append((name, () if code_alone else header, values or content))
    return found


def _sections(cubin: bytes) -> Iterator[Section]:
    """Yield the name, header and content of each section of a 64-bit little-endian ELF file.

    The header has type, flags, size, link, info, alignment and entry size, but no addresses.
    """
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    length, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<II4QIIQQ", cubin, start + i * length) for i in range(count)]
    text = headers[names][4]
    for name, kind, flags, _, offset, size, *others in headers:
        end = cubin.index(b"\0", text + name)
        content = b"" if kind == NOBITS else cubin[offset : offset + size]
        yield cubin[text + name : end].decode(), (kind, flags, size, *others), content


def _symbols(table: bytes, names: bytes) -> Iterator[str]:
    for entry in range(0, len(table), 24):
        (name,) = struct.unpack_from("<I", table, entry)
        yield names[name : names.index(b"\0", name)].decode()


def _attributes(info: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (attribute, symbol index, value) for each entry of `info` that has all three."""
    at = 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        sized = kind == 4  # EIFMT_SVAL: the only format whose third field is a length
        if sized and size == 8:
            yield (attribute, *struct.unpack_from("<II", info, at + 4))
        at += 4 + size * sized


class NoDisassembler(Exception):
    """No nvdisasm can read this machine code. The message says what to install."""


@functools.cache
def disassemblers() -> tuple[str, ...]:
    """Return the path of each nvdisasm: on the PATH, in Triton, and in NVIDIA's package."""
    on_path = shutil.which("nvdisasm")
    paths = [on_path] if on_path else []
    for package, folder in (("triton", "backends/nvidia/bin"), ("nvidia", "")):
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            root = Path(location, folder)
            tools = [root / "nvdisasm", *sorted(root.glob("*/bin/nvdisasm"))]
            paths += [str(tool) for tool in tools if tool.is_file()]
    return tuple(paths)


@functools.cache
def instructions(cubin: bytes) -> dict[str, frozenset[str]]:
    """Return each kernel's instructions with their modifiers, such as ``LDG.E.128``.

    Raises:
        NoDisassembler: no nvdisasm can read this machine code.
    """
    texts = _disassembled(cubin)
    return {name: frozenset(_INSTRUCTION.findall(text)) for name, text in texts.items()}


def listing(cubin: bytes) -> dict[str, list[str]]:
    """Return the SASS of each kernel as lines: its instructions without addresses, and its labels.

    Labels are renumbered in order of appearance. The padding at the kernel's end is left out.

    Raises:
        NoDisassembler: no nvdisasm can read this machine code.
    """
    return {name: _normalized(text) for name, text in _disassembled(cubin).items()}


def _normalized(text: str) -> list[str]:
    numbers: dict[str, str] = {}

    def renamed(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], f".L{len(numbers)}")

    found = [f"    {code}" if code else f"{label}:" for code, label in _LINE.findall(text)]
    while found and (found[-1] == "    NOP" or found[-1].endswith(":")):
        found.pop()
    return [_LABEL.sub(renamed, line) for line in found]


@functools.cache
def _disassembled(cubin: bytes) -> dict[str, str]:
    """Return the output of nvdisasm for each kernel, by name."""
    fault = ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        for tool in disassemblers():
            done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True)
            if not done.returncode:
                _, *parts = _KERNEL.split(done.stdout)
                return dict(zip(parts[::2], parts[1::2], strict=True))
            fault = fault or f"{tool} cannot read it: {done.stderr.strip()}"
    if fault:
        raise NoDisassembler(f"{fault}: {NEWER}")
    raise NoDisassembler(f"nvdisasm is not installed: {INSTALL}")


def contains(instructions: Iterable[str], promised: str) -> bool:
    """Return whether one of `instructions` matches `promised`, possibly with more modifiers.

    For example, LDG.E.128.CONSTANT matches ``LDG.128``, and UTMALDG.2D matches ``UTMALDG``.
    """
    name, *modifiers = promised.split(".")
    parts = (instruction.split(".") for instruction in instructions)
    return any(base == name and set(modifiers) <= set(others) for base, *others in parts)
