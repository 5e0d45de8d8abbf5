"""What a side is made of: a digest of its source and of everything of ours that it uses."""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import inspect
import os
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGE = str(Path(__file__).parents[1])
"""The folder of this package."""

TUNED = ("num_warps", "num_ctas", "num_stages", "maxnreg")
"""What a configuration of Triton says besides a kernel's own arguments."""
CONSTANTS = "\0constants"
"""What stands between a thing's source and the constants that it names."""


def digest(side: Any, root: str, *, constants: bool = False) -> str:
    """Return 16 hex digits of the source of `side` and of what it reaches under `root`.

    Followed are functions, Triton kernels, kernel files and modules by the names that the code
    uses; libraries outside `root` are the environment's business, not the source's.

    Args:
        constants: whether the plain constants that the code names count too, and the options of its
            kernel files. They do for what changed since a commit; the digests of stored results
            were made without them.
    """
    seen: dict[str, str] = {}
    _visit(side, Path(root).resolve(), seen)
    if not constants:
        seen = {name: text.partition(CONSTANTS)[0] for name, text in seen.items()}
    text = "\0".join(f"{name}\0{seen[name]}" for name in sorted(seen))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def libraries() -> tuple[str, ...]:
    """Return the folders of what is no page's code: Python, what is installed, this package.

    They may lie under the root of the pages, as a virtual environment often does.
    """
    folders = {sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")}
    torch = importlib.util.find_spec("torch")  # a distribution may keep it elsewhere
    folders |= {str(Path(torch.origin).parents[1])} if torch and torch.origin else set()
    return tuple(f"{folder}{os.sep}" for folder in sorted(folders | {PACKAGE}))


def kernel_files(sides: Iterable[Any], root: str) -> list[Any]:
    """Return the `cuda_module`s that `sides` reach, in the order of their paths."""
    return [thing for thing in _kernels(sides, root) if hasattr(thing, "assemble")]


def triton_kernels(sides: Iterable[Any], root: str) -> list[Any]:
    """Return the Triton kernels that `sides` name themselves, not those called by kernels only.

    They are returned as the Python functions inside the decorators.
    """
    return [thing for thing in _kernels(sides, root) if not hasattr(thing, "assemble")]


def imported_late(side: Any, root: str) -> list[str]:
    """Return the modules that `side` and what it reaches under `root` import when called.

    Those of relative imports are left out. The digest does not follow what such an import finds.
    """
    reached: list[Any] = []
    _visit(side, Path(root).resolve(), {}, reached=reached)
    codes = [getattr(thing, "__code__", None) for thing in reached]
    return sorted({name for code in codes if code is not None for name in _imports(code)})


def _imports(code: types.CodeType) -> Iterator[str]:
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for level, _, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME" and level.argval == 0:
            yield str(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imports(constant)


def _kernels(sides: Iterable[Any], root: str) -> list[Any]:
    found: dict[str, Any] = {}
    for side in sides:
        _visit(side, Path(root).resolve(), {}, found)
    return [found[name] for name in sorted(found)]


def _visit(
    thing: Any,
    root: Path,
    seen: dict[str, str],
    kernels: dict[str, Any] | None = None,
    *,
    from_kernel: bool = False,
    reached: list[Any] | None = None,
) -> None:
    is_kernel, tuned, thing = _is_triton(thing), _tuned(thing), _unwrapped(thing)
    file = _kernel_file(thing) or _file_of(thing)
    if file is None or str(file).startswith(libraries()):
        return
    if not Path(file).resolve().is_relative_to(root):
        return
    name = f"{Path(file).resolve().relative_to(root)}:{getattr(thing, '__qualname__', '')}"
    if kernels is not None and (hasattr(thing, "assemble") or (is_kernel and not from_kernel)):
        kernels[name] = thing
    if name in seen:
        return
    seen[name] = _text(thing, Path(file)) + tuned + CONSTANTS + _constants(thing)
    if reached is not None:
        reached.append(thing)
    for used in _used(thing):
        _visit(used, root, seen, kernels, from_kernel=is_kernel, reached=reached)


def _constants(thing: Any) -> str:
    """Return the plain constants that a function names, or the options of a kernel file."""
    if _kernel_file(thing):
        settings = (getattr(thing, name, None) for name in ("options", "targets"))
        return repr([sorted(given.items()) for given in settings if isinstance(given, Mapping)])
    code, scope = getattr(thing, "__code__", None), getattr(thing, "__globals__", {})
    names = sorted(_names(code)) if code is not None else []
    return "".join(f"\n{n}={scope[n]!r}" for n in names if n in scope and _is_plain(scope[n]))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    named = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    return value is None or named or isinstance(value, (bool, int, float, str, bytes))


def _is_triton(thing: Any) -> bool:
    """Return whether `thing` is a Triton function, tuned or interpreted ones included."""
    return type(thing).__module__.startswith("triton.") and hasattr(thing, "fn")


def _tuned(thing: Any) -> str:
    """Return what a Triton kernel is tuned over, which may stand far from its source."""
    if not _is_triton(thing):
        return ""
    return "".join(map(_config, getattr(thing, "configs", ()))) + _tuned(thing.fn)


def _config(config: Any) -> str:
    """Return a configuration as Triton 3.6 printed it: later versions know more to print."""
    known = {**config.kwargs}
    known |= {name: getattr(config, name, None) for name in TUNED}
    override = getattr(config, "ir_override", None)
    known |= {} if override is None else {"ir_override": override}
    return "\n" + ", ".join(f"{name}: {value}" for name, value in known.items())


def _unwrapped(thing: Any) -> Any:
    """Return the function inside decorators: partials, Triton kernels, compiled functions."""
    for attribute in ("side", "fn", "func", "_torchdynamo_orig_callable", "__wrapped__"):
        inner = getattr(thing, attribute, None)
        if (callable(inner) or _is_triton(inner)) and not isinstance(thing, type):
            return _unwrapped(inner)
    return thing


def _kernel_file(thing: Any) -> Path | None:
    path = getattr(thing, "path", None)  # `os` has one too, and it is a module
    return path if isinstance(path, Path) else None


def _file_of(thing: Any) -> str | None:
    if isinstance(thing, types.ModuleType):
        return getattr(thing, "__file__", None)
    try:
        return inspect.getsourcefile(thing)
    except TypeError:
        return None


def _text(thing: Any, file: Path) -> str:
    if _kernel_file(thing) or isinstance(thing, types.ModuleType):
        return file.read_text()
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return file.read_text()


def _used(thing: Any) -> Iterator[Any]:
    code = getattr(thing, "__code__", None)
    scope = getattr(thing, "__globals__", {})
    if code is None:
        return
    names = sorted(_names(code))
    for value in map(scope.get, names):
        if callable(value) or isinstance(value, types.ModuleType) or _launches(value):
            yield value
        if isinstance(value, types.ModuleType):
            yield from filter(_launches, map(vars(value).get, names))
    for cell in getattr(thing, "__closure__", None) or ():
        if callable(cell.cell_contents) or _launches(cell.cell_contents):
            yield cell.cell_contents


def _launches(value: Any) -> bool:
    """Return whether `value` is launched by index: a tuned kernel cannot even be called."""
    return _kernel_file(value) is not None or _is_triton(value)


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names
