"""Compare what two versions of a side launch, without a GPU.

A side runs twice on a fake GPU, because the first call may do more than later calls. Each launch is
recorded with its grid and block, its arguments, and the machine code of its kernel. The fake GPU
does not see kernels that libraries launch, so calls to torch's operators are recorded instead.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from itertools import zip_longest
from types import FunctionType
from typing import Any
from unittest import mock

from ..page.pair import Pair, Side, Size
from . import nvrtc, sass
from .capture_launches import CapturedLaunch, capture_launches
from .cuda_cpp import CudaModule
from .fake_gpu import FakeDriver

CALLS = 2
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""The operators that only allocate memory. Calls to these operators are not recorded."""
QUERIES: tuple[str, ...] = ("is_available", "device_count", "mem_get_info", "get_device_properties")
QUERIES += ("get_device_capability", "get_device_name")
"""Functions of torch.cuda whose results may differ between a fake GPU and a real one."""
MOST_LINES = 80
"""The largest number of lines of a SASS diff that is shown."""


@dataclass
class LaunchedCode:
    """The kernels and operators that `CALLS` calls of a side launch at one size.

    Attributes:
        launches: the kernel's name, the grid, the block, the arguments and the options of each
            launch.
        code: the names and machine code of all launched Triton kernels and all .cu files.
        operators: the called operators of torch that may launch kernels, with their arguments.
        launched: the launched Triton kernels, and the .cu files of the launched CUDA C++ kernels.
        queries: the functions of `QUERIES` that were called.
        error: the reason why the record is incomplete, or an empty string.
    """

    launches: list[tuple[str, str]] = field(default_factory=list)
    code: list[tuple[str, bytes]] = field(default_factory=list)
    operators: list[tuple[str, str]] = field(default_factory=list)
    launched: set[CudaModule | FunctionType] = field(default_factory=set)
    queries: set[str] = field(default_factory=set)
    error: str = ""

    def digest(self) -> str:
        """Return a digest of all kernels' instructions and constants, or "" without kernels."""
        parts = sorted(
            {(name, repr(sass.contents(code, code_alone=True))) for name, code in self.code}
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16] if parts else ""


def launched_code(
    pair: Pair, side: Side, size: Size, arch: str, files: Iterable[CudaModule] = ()
) -> LaunchedCode:
    """Return the kernels and operators that `side` launches at `size` on a GPU of `arch`.

    Args:
        files: .cu files whose machine code is included even if none of their kernels is launched.
    """
    found = LaunchedCode()
    if hasattr(side, "side") or tuple(pair.gpus) != (1,):
        found.error = "it runs in several processes"
        return found
    for _ in range(CALLS):
        watch = partial(_watching, found)
        captured = capture_launches(pair, side, size, arch, assemble=True, watch=watch)
        if captured.error is not None:
            found.error = f"on a fake GPU it raises {type(captured.error).__name__}"
        storages: dict[int, int] = {}
        for launch in captured.order:
            found.launches.append((launch.name, _text_of(launch, storages)))
            if launch.fault:
                found.error = f"{launch.name} cannot be compiled"
            if isinstance(launch.kernel, FunctionType):
                found.launched.add(launch.kernel)
                found.code.append((launch.name, launch.cubin))
            else:
                found.launched.add(launch.kernel.module)
    modules = {one for one in found.launched if isinstance(one, CudaModule)} | set(files)
    for module in sorted(modules, key=lambda module: str(module.path)):
        try:
            cubin = nvrtc.compile_module(module, module.target(arch)).code
        except (nvrtc.CompileError, nvrtc.NoCompiler):
            found.error = f"{module.path.name} cannot be compiled"
            continue
        found.code.append((module.path.name, cubin))
    return found


def difference(now: LaunchedCode, then: LaunchedCode) -> str:
    """Return a description of the first difference between two versions' launches, or ""."""
    for kind in ("launches", "operators"):
        pairs = zip_longest(getattr(now, kind), getattr(then, kind), fillvalue=("nothing", ""))
        for number, (new, old) in enumerate(pairs, start=1):
            if new[0] != old[0]:
                return f"number {number} of its {kind} is {new[0]} instead of {old[0]}"
            if new != old:
                return f"number {number} of its {kind}, {new[0]}, has other arguments or geometry"
    for new_code, old_code in zip_longest(now.code, then.code, fillvalue=("nothing", b"")):
        if new_code[0] != old_code[0] or not _is_same(new_code[1], old_code[1]):
            return f"the machine code of {new_code[0]} differs"
    return ""


def sass_diff(now: LaunchedCode, then: LaunchedCode) -> list[str]:
    """Return the diff of the SASS of all kernels that two versions launch.

    If the SASS is not known, return one line with the reason.
    """
    if error := now.error or then.error:
        return [f"not known: {error}"]
    try:
        new, old = _sass(now), _sass(then)
    except sass.NoDisassembler as missing:
        return [f"not known: {missing}"]
    if not new and not old:
        return ["not known: the side launches no kernel of CUDA C++ or Triton"]
    lines: list[str] = []
    for name in {**old, **new}:
        texts = old.get(name, []), new.get(name, [])
        lines += difflib.unified_diff(*texts, f"a/{name}", f"b/{name}", lineterm="")
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"... and {len(lines) - MOST_LINES} more lines"]
    return lines or ["the same in both versions"]


def _sass(found: LaunchedCode) -> dict[str, list[str]]:
    """Return the SASS lines of each launched kernel. Each tuned configuration has its own entry."""
    launched = {name for name, _ in found.launches}
    listings: dict[str, list[str]] = {}
    for cubin in dict.fromkeys(code for _, code in found.code):
        for name, lines in sass.listing(cubin).items():
            same = sum(each.partition(" ")[0] == name for each in listings)
            if name in launched:
                listings[f"{name} ({same + 1})" if same else name] = lines
    return listings


def _is_same(one: bytes, other: bytes) -> bool:
    return one == other or sass.contents(one) == sass.contents(other)


def _text_of(launch: CapturedLaunch, storages: dict[int, int]) -> str:
    options = {name: value for name, value in launch.metadata.items() if name != "hash"}
    arguments = [_value(value, storages) for value in launch.arguments]
    return f"{launch.grid} {launch.config} {launch.shared} {options} {arguments}"


def _value(value: Any, storages: dict[int, int]) -> object:
    """Return an argument in a form that can be compared between two versions of a side.

    Args:
        storages: a number for each memory allocation, in order of first appearance.
    """
    import torch

    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunction():
            at = storages.setdefault(value.untyped_storage()._cdata, len(storages))
            facts = value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
        return f"tensor {at} {facts}"
    if isinstance(value, (list, tuple)):
        return [_value(each, storages) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _value(each, storages) for name, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return [_value(getattr(value, one.name), storages) for one in fields(value)]
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))
    return repr(value) if plain else type(value).__name__


@contextlib.contextmanager
def _watching(found: LaunchedCode) -> Iterator[None]:
    """Record operators and queries of a side that runs on a fake GPU."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # with True, torch._dynamo is imported, which takes 1.5 s

        def __torch_dispatch__(
            self, func: Any, types: object, args: Any = (), kwargs: Any = None
        ) -> object:
            name = func._schema.name
            if not func.is_view and name.removeprefix("aten::") not in ALLOCATIONS:
                found.operators.append((name, repr(_value([args, kwargs or {}], {}))))
            return func(*args, **(kwargs or {}))

    def noting(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            found.queries.add(name)
            return function(*args, **kwargs)

        return call

    noted: dict[str, Any] = {n: noting(n, getattr(torch.cuda, n)) for n in QUERIES}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **noted))
        triton = sys.modules.get("triton")
        driver = triton.runtime.driver._active if triton is not None else None
        if isinstance(driver, FakeDriver):
            utils = driver.utils
            properties = noting("get_device_properties", utils.get_device_properties)
            stack.enter_context(mock.patch.object(utils, "get_device_properties", properties))
        mode: Any = Operators
        stack.enter_context(mode())
        yield
