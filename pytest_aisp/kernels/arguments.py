"""The signature of a CUDA C++ kernel, and its arguments: tensors, numbers and tensor maps.

A tensor map tells the tensor memory accelerator (TMA) where the tiles of a tensor are. A kernel
takes a tensor map as a parameter ``const __grid_constant__ CUtensorMap map``.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import cuda.core
    import torch

Integer: TypeAlias = "ctypes._SimpleCData[int]"
Float: TypeAlias = "ctypes._SimpleCData[float]"
Convert: TypeAlias = Callable[[Any, int], object]
"""A function that takes an argument and a device index. It returns the argument converted for
cuda.core, or None if the argument does not match the parameter."""

# PyTorch's names of C types. `_dtype` derives the names of integer types from their bits.
_DTYPES = {"float": "float32", "double": "float64", "bool": "bool", "size_t": "uint64"}
_DTYPES |= {"half": "float16", "__half": "float16", "__nv_bfloat16": "bfloat16"}
_DTYPES |= {"__nv_fp8_e4m3": "float8_e4m3fn", "__nv_fp8_e5m2": "float8_e5m2"}
_BITS = {f"{u}int{bits}_t": bits for bits in (8, 16, 32, 64) for u in ("", "u")}
_BITS |= {"char": 8, "short": 16, "long": 64, "int": 32, "unsigned": 32, "signed": 32}

_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_KERNEL = re.compile(r'extern\s*"C"\s*__global__([^{;]*)[{;]')
_ATTRIBUTE = re.compile(r"__\w+__\s*\((?:[^()]|\([^()]*\))*\)")
_QUALIFIER = re.compile(r"\b(const|volatile|__restrict__|__restrict|__grid_constant__)\b|std::")

# The dtype that a tensor map uses, keyed by the element size in bytes.
_SAME_WIDTH = {1: "uint8", 2: "uint16", 4: "int32", 8: "int64"}
SWIZZLES = {0: "NONE", 32: "SWIZZLE_32B", 64: "SWIZZLE_64B", 128: "SWIZZLE_128B"}
PROMOTIONS = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}
MAX_BOX = 256
"""The largest size of a tile in one dimension, in elements."""
TMA_ALIGNMENT = 16
"""Required alignment, in bytes, of a tensor, of its rows and of a tile's rows."""
MAX_RANK = 5
PASSED = (
    "pointers to integers, float, double, __half, __nv_bfloat16, fp8, their vectors (float4) and"
    " void, integer, float, double and bool scalars, and CUtensorMap"
)
"""The types of parameters that a kernel can have."""


class LaunchError(TypeError):
    """A kernel cannot be launched this way. The message says what the kernel needs."""


@dataclass(frozen=True)
class Param:
    """One parameter of a kernel.

    Attributes:
        text: the declaration, such as ``const float4* x``.
        needs: a description of valid arguments for error messages, with a placeholder ``{device}``.
    """

    text: str
    name: str
    needs: str
    convert: Convert


def check_arguments(
    name: str, params: Sequence[Param], args: Sequence[object], device: int
) -> list[object]:
    """Return `args` converted for cuda.core.

    Raises:
        LaunchError: an argument does not match its parameter, or the number of arguments is wrong.
    """
    __tracebackhide__ = True
    if len(args) != len(params):
        texts = ", ".join(p.text for p in params)
        raise LaunchError(f"{name}({texts}) needs {len(params)} arguments; {len(args)} were given")
    values = [param.convert(arg, device) for param, arg in zip(params, args, strict=True)]
    if None in values:
        index = values.index(None)
        fault = f"{name}: parameter {params[index].name!r} was given {_describe(args[index])}"
        needs = params[index].needs.format(device=device)
        raise LaunchError(f"{fault}; `{params[index].text}` needs {needs}")
    return values


def _describe(arg: Any) -> str:
    if not hasattr(arg, "data_ptr"):
        return f"{reprlib.repr(arg)} ({type(arg).__name__})"
    where = f"cuda:{arg.get_device()}" if arg.get_device() >= 0 else "the CPU"
    faults = ", not contiguous" * (not arg.is_contiguous())
    faults += ", not 16-byte aligned" * (arg.data_ptr() % 16 != 0)
    return f"a {_torch_name(arg.dtype)} tensor of shape {tuple(arg.shape)} on {where}{faults}"


@functools.cache
def _torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(
    dtypes: frozenset[str], align: int, cast: int, arg: torch.Tensor, device: int
) -> int | None:
    """Return the tensor's address, or None if the tensor does not match the parameter.

    Args:
        align: the required alignment of the address in bytes.
        cast: 0, or the number of bytes that must divide the size of a tensor of any other dtype.
    """
    try:
        fits = not dtypes or _torch_name(arg.dtype) in dtypes or (cast and not arg.nbytes % cast)
        if fits and arg.get_device() == device and arg.is_contiguous():
            address = arg.data_ptr()
            return None if address % align else address
    except AttributeError:  # not a tensor
        pass
    return None


def _integer(ctype: type[Integer], arg: object, device: int) -> Integer | None:
    # Use ctypes, because cuda.core treats a Python int as an address. A number that does not fit
    # wraps around and then differs from `arg`.
    number = ctype(int(arg)) if isinstance(arg, (int, Integral)) else None
    return number if number is not None and number.value == arg else None


def _real(ctype: type[Float], arg: object, device: int) -> Float | None:
    if not isinstance(arg, (float, Real)) or isinstance(arg, bool):
        return None
    try:
        number = ctype(float(arg))
        return number if math.isinf(number.value) == math.isinf(arg) else None
    except OverflowError:
        return None


def _tensor_map(arg: object, device: int) -> object:
    descriptor = getattr(arg, "descriptor", arg)  # a `TensorMap`, or cuda.core's object
    return descriptor if type(descriptor).__name__ == "TensorMapDescriptor" else None


def without_comments(source: str) -> str:
    """Return `source` without comments and with the same line numbers."""
    return _COMMENT.sub(lambda match: match[1] or " " + "\n" * match[0].count("\n"), source)


def only_kernel(source: str, name: str) -> str:
    """Return `source` without comments, with the bodies of all kernels except `name` removed.

    Line numbers stay the same. Kernels that are defined by a macro keep their bodies.
    """
    plain = without_comments(source)
    kept, end = [], 0
    for match in _KERNEL.finditer(plain):
        words = re.findall(r"(\w+)\s*\(", _ATTRIBUTE.sub("", match[1]))
        if match[0].endswith("{") and words[:1] != [name]:
            kept.append(plain[end : match.end()])
            end = _closing_brace(plain, match.end())
            kept.append("\n" * plain.count("\n", match.end(), end))
    return "".join([*kept, plain[end:]])


def _closing_brace(plain: str, start: int) -> int:
    """Return the index of the brace that closes the block that begins at index `start`."""
    depth = 1
    for match in re.finditer(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|[{}]', plain[start:]):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return start + match.start()
    return len(plain)


def signatures(file: str, sources: Iterable[str]) -> Iterator[tuple[str, tuple[Param, ...]]]:
    """Yield the name and parameters of each kernel in `sources`. `file` is for error messages."""
    for source in sources:
        for header in _KERNEL.findall(without_comments(source)):
            words = " ".join(_ATTRIBUTE.sub("", header).split())
            match = re.fullmatch(r"void (\w+) ?\(([^()]*)\)", words)
            if match is None:
                raise LaunchError(f"{file}: cannot read the signature of `{words}`")
            texts = [t.strip() for t in match[2].split(",") if t.strip() not in ("", "void")]
            yield match[1], tuple(map(_param, texts))


def _param(text: str) -> Param:
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
    # A launch of this kernel raises an error, but the other kernels of the file can run.
    return Param(text, name, f"a type that can be passed; legal are {PASSED}", lambda *_: None)


def _pointer(dtype: str, width: int) -> tuple[str, Convert]:
    """Return a description of valid pointer arguments, and the function that converts them."""
    # Signed tensors are accepted too, because PyTorch has few operations for unsigned dtypes.
    signed = dtype if dtype == "uint8" else dtype.removeprefix("u")
    names = " or ".join(dict.fromkeys((dtype, signed)))
    bits = re.search(r"\d+", dtype)
    size = int(bits[0]) // 8 * width if bits else 1
    align = min(16, size // 3 if width == 3 else size)
    needs = f"a contiguous {names} tensor" if names else "a contiguous tensor"
    needs += " on cuda:{device}" + f" at a multiple of {align} bytes" * (width > 1)
    # Kernels load any type as float4 or similar types. But half2 is for arithmetic, so the tensor's
    # dtype must match.
    cast = size if width in (2, 4) and dtype not in ("float16", "bfloat16") else 0
    needs += f", or one of another type whose size is a multiple of {size} bytes" * bool(cast)
    return needs, partial(_tensor, frozenset((dtype, signed)) - {""}, align, cast)


def _element(c_type: str) -> tuple[str, int]:
    """Return a C type's PyTorch dtype and vector width: ``("float32", 4)`` for ``float4``."""
    if dtype := _dtype(c_type):
        return dtype, 1
    vector = re.fullmatch(r"(.+)([1-4])", c_type)
    return (_dtype(vector[1]), int(vector[2])) if vector else ("", 1)


def _dtype(c_type: str) -> str:
    plain = re.sub(r"^u(?=char|short|int$|long)", "unsigned ", c_type).replace("longlong", "long")
    words = plain.split()
    if not words or not set(words) <= _BITS.keys():
        return _DTYPES.get(c_type, "")
    bits = next(bits for word, bits in _BITS.items() if word in words)
    unsigned = any(word.startswith("u") for word in words)
    return f"{'u' * unsigned}int{bits}"


@dataclass(frozen=True)
class TensorMap:
    """A kernel argument that keeps `tensor` alive and has tiles of `box` elements."""

    tensor: torch.Tensor
    box: tuple[int, ...]
    descriptor: cuda.core.TensorMapDescriptor


def tensor_map(
    tensor: torch.Tensor, box: Sequence[int], *, swizzle: int = 0, promotion: int = 128
) -> TensorMap:
    """Return a TMA descriptor of `tensor` in tiles of `box` elements, to pass to a kernel.

    Elements beyond the tensor's edge are read as zero and never written. The TMA treats elements of
    one or two bytes as integers. A kernel can load and store these elements, but must not use TMA
    reductions on them.

    Args:
        box: the tile's size in each dimension, 1 to 256 elements. A row (the last dimension) must
            be a multiple of 16 bytes.
        swizzle: 32, 64 or 128 bytes, or 0 for none. The swizzle selects the pattern in which
            16-byte pieces of a tile's rows are exchanged in shared memory. A row of a tile must not
            be longer than the swizzle.
        promotion: bytes that a miss loads into the L2: 64, 128 or 256, or 0 for no promotion.

    Raises:
        LaunchError: the TMA cannot access this tensor in tiles of this size.
    """
    __tracebackhide__ = True
    box = tuple(box)
    for fault in _tma_faults(tensor, box, swizzle, promotion):
        dtype = str(tensor.dtype).removeprefix("torch.")
        what = f"a {dtype} tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        raise LaunchError(f"tensor_map of {what} in tiles of {box}: {fault}")
    return TensorMap(tensor, box, _encode_tensor_map(tensor, box, swizzle, promotion))


def _tma_faults(
    tensor: torch.Tensor, box: tuple[int, ...], swizzle: int, promotion: int
) -> Iterator[str]:
    size, rank = tensor.element_size(), tensor.dim()
    if not tensor.is_cuda:
        yield "it is on the CPU; the accelerator reads GPU memory"
    if not 1 <= rank <= MAX_RANK or len(box) != rank:
        yield f"needs 1 to {MAX_RANK} dimensions, and the tile needs the same number"
    if not all(isinstance(n, int) and 1 <= n <= MAX_BOX for n in box):
        yield f"a tile has 1 to {MAX_BOX} elements in each dimension"
    if size not in _SAME_WIDTH or tensor.is_complex() or not tensor.numel():
        yield "needs elements of 1, 2, 4 or 8 bytes, and at least one"
    if tensor.stride(-1) != 1:
        yield "its last dimension must be contiguous"
    starts = [tensor.data_ptr(), *(stride * size for stride in tensor.stride()[:-1])]
    if any(start < 1 or start % TMA_ALIGNMENT for start in starts):
        yield f"each row must begin at a multiple of {TMA_ALIGNMENT} bytes"
    if box[-1] * size % TMA_ALIGNMENT:
        yield f"a row of a tile is {box[-1] * size} bytes; needs a multiple of {TMA_ALIGNMENT}"
    if swizzle not in SWIZZLES or promotion not in PROMOTIONS:
        yield f"swizzle is one of {list(SWIZZLES)}, promotion of {list(PROMOTIONS)}"
    if swizzle and box[-1] * size > swizzle:
        yield f"a row of a tile is {box[-1] * size} bytes; swizzle={swizzle} has at most that many"


def _encode_tensor_map(
    tensor: torch.Tensor, box: tuple[int, ...], swizzle: int, promotion: int
) -> cuda.core.TensorMapDescriptor:
    """Return the descriptor. The call does not wait for the GPU, so graph capture permits it."""
    import torch

    maps = import_module("cuda.core._tensor_map")  # cuda.core does not export its enums
    plain = tensor.detach()
    if not tensor.is_floating_point() or tensor.element_size() < 4:
        plain = plain.view(getattr(torch, _SAME_WIDTH[tensor.element_size()]))
    view = import_module("cuda.core.utils").StridedMemoryView.from_dlpack(plain, stream_ptr=-1)
    return view.as_tensor_map(
        box,
        swizzle=maps.TensorMapSwizzle[SWIZZLES[swizzle]],
        l2_promotion=maps.TensorMapL2Promotion[PROMOTIONS[promotion]],
    )
