"""How a CUDA C++ kernel is launched: its signature, its arguments, grid, block and cluster."""

from __future__ import annotations

import ctypes
import functools
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from types import ModuleType
from typing import Any, TypeAlias

Argument: TypeAlias = Any
"""What a page passes to a kernel: a tensor, a number, a tensor map, or a mistake."""
Dims: TypeAlias = "int | tuple[int, ...]"
"""A grid, a block or a cluster: an int or up to 3 ints."""

# PyTorch's names for C types. `_dtype` derives the integers from their bits.
_DTYPES = {"float": "float32", "double": "float64", "bool": "bool", "size_t": "uint64"}
_DTYPES |= {"half": "float16", "__half": "float16", "__nv_bfloat16": "bfloat16"}
_DTYPES |= {"__nv_fp8_e4m3": "float8_e4m3fn", "__nv_fp8_e5m2": "float8_e5m2"}
_BITS = {f"{u}int{bits}_t": bits for bits in (8, 16, 32, 64) for u in ("", "u")}
_BITS |= {"char": 8, "short": 16, "long": 64, "int": 32, "unsigned": 32, "signed": 32}

_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_KERNEL = re.compile(r'extern\s*"C"\s*__global__([^{;]*)[{;]')
_ATTRIBUTE = re.compile(r"__\w+__\s*\((?:[^()]|\([^()]*\))*\)")
_QUALIFIER = re.compile(r"\b(const|volatile|__restrict__|__restrict|__grid_constant__)\b|std::")


Number: TypeAlias = "ctypes._SimpleCData[Any]"


class LaunchError(TypeError):
    """A kernel cannot be launched this way; the message says what it needs."""


@dataclass(frozen=True)
class Param:
    """One parameter of a kernel.

    Attributes:
        text: the declaration: ``const float4* x``.
        needs: what it accepts, for error messages; has a ``{device}``.
        convert: returns an argument, given with the device, as cuda.core takes it; or None.
    """

    text: str
    name: str
    needs: str
    convert: Callable[[Argument, int], object]


def check_arguments(
    name: str, params: Sequence[Param], args: Sequence[Argument], device: int
) -> list[object]:
    """Return `args` as cuda.core takes them.

    Raises:
        LaunchError: an argument does not match its parameter, or their counts differ.
    """
    __tracebackhide__ = True
    if len(args) != len(params):
        texts = ", ".join(p.text for p in params)
        raise LaunchError(f"{name}({texts}) needs {len(params)} arguments; {len(args)} were given")
    values = [param.convert(given, device) for param, given in zip(params, args, strict=True)]
    if None in values:
        at = values.index(None)
        fault = f"{name}: parameter {params[at].name!r} was given {_describe(args[at])}"
        needs = params[at].needs.format(device=device)
        raise LaunchError(f"{fault}; `{params[at].text}` needs {needs}")
    return values


def _describe(given: Argument) -> str:
    if not hasattr(given, "data_ptr"):
        return f"{reprlib.repr(given)} ({type(given).__name__})"
    where = f"cuda:{given.get_device()}" if given.get_device() >= 0 else "the CPU"
    faults = ", not contiguous" * (not given.is_contiguous())
    faults += ", not 16-byte aligned" * (given.data_ptr() % 16 != 0)
    return f"a {_torch_name(given.dtype)} tensor of shape {tuple(given.shape)} on {where}{faults}"


@functools.cache
def _torch_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(dtypes: frozenset[str], align: int, given: Argument, device: int) -> int | None:
    try:
        right = not dtypes or _torch_name(given.dtype) in dtypes
        if right and given.get_device() == device and given.is_contiguous():
            address: int = given.data_ptr()
            return None if address % align else address
    except AttributeError:  # not a tensor
        pass
    return None


def _integer(ctype: type[Number], given: Argument, device: int) -> Number | None:
    # cuda.core would take a Python int for an address. ctypes wraps a number that is too large.
    number = ctype(int(given)) if isinstance(given, (int, Integral)) else None
    return number if number is not None and number.value == given else None


def _real(ctype: type[Number], given: Argument, device: int) -> Number | None:
    if not isinstance(given, (float, Real)) or isinstance(given, bool):
        return None
    try:
        number = ctype(given)
        return number if math.isinf(number.value) == math.isinf(given) else None
    except OverflowError:
        return None


def _tensor_map(given: Argument, device: int) -> object:
    found = getattr(given, "descriptor", given)  # a `tma.TensorMap`, or cuda.core's descriptor
    return found if type(found).__name__ == "TensorMapDescriptor" else None


def without_comments(source: str) -> str:
    """Return `source` without comments, every line in its place."""
    return _COMMENT.sub(lambda found: found[1] or " " + "\n" * found[0].count("\n"), source)


def signatures(file: str, sources: Iterable[str]) -> Iterator[tuple[str, tuple[Param, ...]]]:
    """Yield the name and the parameters of every kernel in the sources of `file`."""
    for source in sources:
        for header in _KERNEL.findall(without_comments(source)):
            words = " ".join(_ATTRIBUTE.sub("", header).split())
            if not (found := re.fullmatch(r"void (\w+) ?\(([^()]*)\)", words)):
                raise LaunchError(f"{file}: cannot read the signature of `{words}`")
            texts = [t.strip() for t in found[2].split(",") if t.strip() not in ("", "void")]
            yield found[1], tuple(_param(f"{file}: {found[1]}", text) for text in texts)


def _param(kernel: str, text: str) -> Param:
    words = _QUALIFIER.sub(" ", text).replace("*", " * ").split()
    name = words.pop() if len(words) > 1 and words[-1] != "*" else "unnamed"
    c_type, stars = " ".join(w for w in words if w != "*"), words.count("*")
    dtype, width = _element("uint64_t" if stars > 1 else c_type)
    scalar = {"float32": "float", "float64": "double"}.get(dtype, dtype)
    ctype = getattr(ctypes, f"c_{scalar}", None)
    if stars and (dtype or c_type == "void"):
        return Param(text, name, *_pointer(dtype, width))
    if c_type == "CUtensorMap":
        return Param(text, name, "a tensor_map(...)", _tensor_map)
    if not stars and width == 1 and ctype:
        convert = _real if dtype.startswith("float") else _integer
        return Param(text, name, f"a number that {dtype} holds", partial(convert, ctype))
    raise LaunchError(
        f"{kernel}: `{text}` cannot be passed; legal are pointers to integers, float, double,"
        " __half, __nv_bfloat16, fp8, their vectors (float4) and void, integer, float, double and"
        " bool scalars, and CUtensorMap"
    )


def _pointer(dtype: str, width: int) -> tuple[str, Callable[[Argument, int], object]]:
    """Return what a pointer needs, in words, and the function that converts an argument to it."""
    # PyTorch has few operations for wide unsigned dtypes, so signed tensors are accepted too.
    signed = dtype if dtype == "uint8" else dtype.removeprefix("u")
    names = " or ".join(dict.fromkeys((dtype, signed)))
    found = re.search(r"\d+", dtype)
    align = min(16, int(found[0]) // 8 * (1 if width == 3 else width)) if found else 1
    needs = f"a contiguous {names} tensor" if names else "a contiguous tensor"
    needs += " on cuda:{device}" + f" at a multiple of {align} bytes" * (width > 1)
    return needs, partial(_tensor, frozenset((dtype, signed)) - {""}, align)


def _element(c_type: str) -> tuple[str, int]:
    """Return the PyTorch dtype and the width of a C type: float32 and 4 for float4."""
    if dtype := _dtype(c_type):
        return dtype, 1
    found = re.fullmatch(r"(.+)([1-4])", c_type)
    return (_dtype(found[1]), int(found[2])) if found else ("", 1)


def _dtype(c_type: str) -> str:
    plain = re.sub(r"^u(?=char|short|int$|long)", "unsigned ", c_type).replace("longlong", "long")
    words = plain.split()
    if not words or not set(words) <= _BITS.keys():
        return _DTYPES.get(c_type, "")
    bits = next(bits for word, bits in _BITS.items() if word in words)
    unsigned = any(word.startswith("u") for word in words)
    return f"{'u' * unsigned}int{bits}"


MAX_CLUSTER = 8
"""Blocks in the largest cluster that every GPU with clusters can schedule."""
DIM_LIMITS = {"grid": (2**31 - 1, 65535, 65535), "block": (1024, 1024, 64)}


@dataclass(frozen=True)
class LaunchConfig:
    """Grid and block; `shared` is bytes of dynamic shared memory."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int = 0
    cluster: tuple[int, ...] = ()
    cooperative: bool = False
    dependent: bool = False

    def __str__(self) -> str:
        words = [f"block {_by(self.block)}"]
        words += [f"cluster {_by(self.cluster)}"] * bool(self.cluster)
        words += [f"{self.shared} B dynamic"] * bool(self.shared)
        words += ["cooperative"] * self.cooperative + ["dependent"] * self.dependent
        return ", ".join(words)

    def for_cuda_core(self, core: ModuleType) -> object:
        """Return the `cuda.core.LaunchConfig`, whose grid counts clusters."""
        grid = self.grid
        attributes: dict[str, object] = {}
        if self.cluster:
            grid = tuple(n // c for n, c in zip(grid, self.cluster, strict=True))
            attributes["cluster"] = self.cluster
        if self.cooperative:
            attributes["is_cooperative"] = True
        if self.dependent:
            attributes["programmatic_stream_serialization"] = True
        return core.LaunchConfig(grid=grid, block=self.block, shmem_size=self.shared, **attributes)


def _by(dims: tuple[int, ...]) -> str:
    return "x".join(map(str, dims))


def launch_config_of(name: str, index: object) -> LaunchConfig:
    """Return the launch config of ``kernel[index]``."""
    if not isinstance(index, tuple) or len(index) not in (2, 3):
        raise LaunchError(f"{name}[{index!r}]: needs [grid, block] or [grid, block, shared_bytes]")
    grid, block = (dims if isinstance(dims, tuple) else (dims,) for dims in index[:2])
    for what, dims in (("grid", grid), ("block", block)):
        ints = 1 <= len(dims) <= 3 and all(isinstance(d, int) for d in dims)
        if not ints or not all(1 <= d <= m for d, m in zip(dims, DIM_LIMITS[what], strict=False)):
            needs = f"1 to 3 ints from 1 to at most {DIM_LIMITS[what]}"
            raise LaunchError(f"{name}: {what} is {dims!r}; needs {needs}")
    threads, shared = math.prod(block), (*index, 0)[2]
    if threads > 1024:
        raise LaunchError(f"{name}: block {block} has {threads} threads; needs at most 1024")
    if not isinstance(shared, int) or shared < 0:
        raise LaunchError(f"{name}: shared_bytes is {shared!r}; needs an int of at least 0")
    return LaunchConfig(grid, block, shared)


def cluster_of(name: str, grid: tuple[int, ...], cluster: Dims | None) -> tuple[int, ...]:
    """Return `cluster` with as many dimensions as `grid`; empty for None."""
    if cluster is None:
        return ()
    dims = cluster if isinstance(cluster, tuple) else (cluster,)
    dims += (1,) * (len(grid) - len(dims))
    if not all(isinstance(d, int) and d >= 1 for d in dims) or math.prod(dims) > MAX_CLUSTER:
        needs = f"1 to 3 ints from 1, together at most {MAX_CLUSTER}"
        raise LaunchError(f"{name}: cluster is {cluster!r}; needs {needs}")
    if len(dims) != len(grid) or any(n % c for n, c in zip(grid, dims, strict=True)):
        raise LaunchError(f"{name}: a grid of {grid} is no multiple of its cluster {cluster!r}")
    return dims
