"""Digests of a side's sources: the side's own code, and all code under the root that it uses.

A digest is computed from normalized sources, so changes of comments, docstrings and formatting do
not matter. Digests that earlier versions stored are compared with digests of the plain text.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

from . import normalize

if TYPE_CHECKING:
    from ..kernels.cuda_cpp import CudaModule

PACKAGE = str(Path(__file__).parents[1])
"""The folder of this package."""

TRITON_OPTIONS = ("num_warps", "num_ctas", "num_stages", "maxnreg")
"""The fields of a `triton.Config` that are not arguments of the kernel."""
READS_DOCSTRINGS = ("__doc__", "getdoc")
"""If code contains one of these texts, it reads docstrings, so the digest includes docstrings."""


def digest(side: object, root: str, *, constants: bool = False, kernels: bool = True) -> str:
    """Return a digest of the source of `side` and of the code under `root` that it uses.

    The digest includes everything that the code refers to by name: functions, Triton kernels, .cu
    files with their headers, and modules. Libraries are not included.

    Args:
        root: the root folder of the pages.
        constants: whether to include the plain constants that the code uses by name, and the
            compile options of .cu files. Comparisons of two commits pass True. Comparisons with
            stored results pass False.
        kernels: False to leave out the code of kernels. The parameters of Triton kernels are
            always included.
    """
    used = reach([side], root)
    docstrings = any(word in one.text for word in READS_DOCSTRINGS for one in used.sources.values())
    parts = []
    for (name, *_), one in used.sources.items():
        whole = kernels or not (one.is_triton or _is_cuda_module(one.thing))
        text = one.normalized(root, docstrings) if whole else ""
        if name in used.kernels and not whole:
            text = one.head(docstrings)
        parts.append((name, text, one.tuning, one.constants if constants else ""))
    return f"syntax:{_hash(ascii(sorted(parts)))}"


def text_digest(side: object, root: str) -> str:
    """Return the digest of the plain text, which earlier versions of the plugin stored."""
    texts: dict[str, str] = {}
    for (name, *_), one in reach([side], root).sources.items():
        texts.setdefault(name, one.text + one.tuning)
    return _hash("\0".join(f"{name}\0{texts[name]}" for name in sorted(texts)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def libraries() -> tuple[str, ...]:
    """Return the folders of Python, of installed packages, and of this package, each with a slash.

    These folders may be inside the pages' root. A virtual environment often is.
    """
    folders = {sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")}
    torch = importlib.util.find_spec("torch")  # some distributions install it elsewhere
    if torch and torch.origin:
        folders.add(str(Path(torch.origin).parents[1]))
    return tuple(f"{folder}{os.sep}" for folder in sorted(folders | {PACKAGE}))


def source_files(sides: Iterable[object], page: Path, root: str) -> dict[str, str]:
    """Return the git blob hashes of the page and of every file under `root` that `sides` use.

    The keys are paths relative to `root`. Blob hashes survive rebases and squash merges, so a
    result with blob hashes can be measured again later with the same code.
    """
    under = Path(root).resolve()
    names = {page.resolve()}
    for (name, *_), one in reach(sides, root).sources.items():
        names.add(under / name.rpartition(":")[0])
        names |= {Path(path).resolve() for path in getattr(one.thing, "sources", ())}
    below = sorted(path for path in names if path.is_relative_to(under) and path.is_file())
    return {str(path.relative_to(under)): git_blob(path) for path in below}


def git_blob(path: Path) -> str:
    """Return the git blob hash of a file's content."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def is_blob(path: Path, blob: str) -> bool:
    """Return whether `path` is a file whose content has the git hash `blob`."""
    return path.is_file() and git_blob(path) == blob


def reached_names(sides: Iterable[object], root: str) -> set[str]:
    """Return the names of the functions under `root` that `sides` use."""
    return {name.rpartition(":")[2] for (name, *_) in reach(sides, root).sources} - {""}


def kernel_files(sides: Iterable[object], root: str) -> list[CudaModule]:
    """Return the `cuda_module`s that `sides` use, in the order of their paths."""
    return [kernel for kernel in _sorted_kernels(sides, root) if _is_cuda_module(kernel)]


def kernel_sources(sides: Iterable[object], root: str) -> dict[str, set[str]]:
    """Return the files with kernels that `sides` use, each with the names of its Triton kernels.

    CUDA C++ files and headers have an empty set. The keys are paths relative to `root`.
    """
    under, found = Path(root).resolve(), dict[str, set[str]]()
    for (name, *_), one in reach(sides, root).sources.items():
        file, _, function = name.rpartition(":")
        if one.is_triton:
            found.setdefault(file, set()).add(function)
        elif _is_cuda_module(one.thing):
            paths = (Path(path).resolve() for path in one.thing.sources)
            found |= {str(p.relative_to(under)): set() for p in paths if p.is_relative_to(under)}
    return found


def triton_kernels(sides: Iterable[object], root: str) -> list[FunctionType]:
    """Return the Python functions of the Triton kernels that `sides` launch.

    Kernels that are called only by other kernels are not included.
    """
    return [k for k in _sorted_kernels(sides, root) if isinstance(k, FunctionType)]


@dataclass(frozen=True)
class _Source:
    """The source of one object.

    Attributes:
        text: the text of the object's definition, or of its file.
        tuning: the configurations of an autotuned kernel.
        constants: the plain constants that a function names, or the options of a .cu file.
        is_triton: whether the object is a function that Triton compiles.
    """

    thing: Any
    text: str
    tuning: str
    constants: str
    is_triton: bool

    def normalized(self, root: str, docstrings: bool) -> str:
        """Return the normalized source, or the plain text if the file has changed."""
        if _is_cuda_module(self.thing):
            return _normalized_cuda(self.thing, root)
        found = None
        if isinstance(self.thing, ModuleType):
            found = normalize.module(self.text, docstrings=docstrings)
        elif _kernel_path(self.thing) is None:
            found = self._definition(docstrings)
        return f"text {self.text}" if found is None else found

    def head(self, docstrings: bool) -> str:
        """Return a Triton kernel's decorators and parameters, or an empty string for a .cu file."""
        if _is_cuda_module(self.thing):
            return ""
        head = self._definition(docstrings, body=False)
        return f"text {self.text}" if head is None else head

    def _definition(self, docstrings: bool, *, body: bool = True) -> str | None:
        try:
            text = "".join(inspect.findsource(self.thing)[0])
        except (OSError, TypeError):
            return normalize.module(self.text, docstrings=docstrings)
        code = getattr(self.thing, "__code__", None)
        if code is not None:
            return normalize.function(text, code, docstrings=docstrings, body=body)
        return normalize.class_(text, self.thing.__qualname__, docstrings=docstrings)


def _normalized_cuda(kernels: CudaModule, root: str) -> str:
    """Return the tokens of a .cu file and of the headers under `root` that it includes, as text."""
    under = Path(root).resolve()
    texts = {
        str(path.relative_to(under)): text
        for path, text in sorted((Path(p).resolve(), t) for p, t in kernels.sources.items())
        if path.is_relative_to(under)
    }
    return ascii(list(zip(texts, normalize.cuda(list(texts.values())), strict=True)))


@dataclass
class Reach:
    """The objects under a root that sides use, directly or indirectly.

    Attributes:
        sources: each object's source. The key is the object's path and qualified name, its first
            line, and its tuning. The name alone is not enough, because lambdas have no names.
        kernels: the .cu files, and the Triton kernels that are launched from the host, by name.
    """

    root: Path
    sources: dict[tuple[str, int, str], _Source] = field(default_factory=dict)
    kernels: dict[str, object] = field(default_factory=dict)

    def visit(self, wrapped: object, *, from_kernel: bool = False) -> None:
        is_kernel, thing = _is_triton(wrapped), _unwrapped(wrapped)
        file = _kernel_path(thing) or _source_file(thing)
        if file is None or str(file).startswith(libraries()):
            return
        path = Path(file).resolve()
        if not path.is_relative_to(self.root):
            return
        name = f"{path.relative_to(self.root)}:{getattr(thing, '__qualname__', '')}"
        if _is_cuda_module(thing) or (is_kernel and not from_kernel):
            self.kernels[name] = thing
        line = getattr(getattr(thing, "__code__", None), "co_firstlineno", 0)
        key = name, line, _tuning(wrapped)
        if key in self.sources:
            return
        text = _text(thing, Path(file))
        self.sources[key] = _Source(thing, text, _tuning(wrapped), _constants(thing), is_kernel)
        for used in _used(thing):
            self.visit(used, from_kernel=is_kernel)


def reach(sides: Iterable[object], root: str) -> Reach:
    """Return the sources and kernels under `root` that `sides` use."""
    reach = Reach(Path(root).resolve())
    for side in sides:
        reach.visit(side)
    return reach


def _sorted_kernels(sides: Iterable[object], root: str) -> list[object]:
    return [kernel for _, kernel in sorted(reach(sides, root).kernels.items())]


def _constants(thing: object) -> str:
    """Return the plain constants that a function names, or the options of a .cu file, as text."""
    if _kernel_path(thing):
        settings = (getattr(thing, name, None) for name in ("options", "targets"))
        return repr([sorted(table.items()) for table in settings if isinstance(table, Mapping)])
    code, scope = getattr(thing, "__code__", None), getattr(thing, "__globals__", {})
    named = sorted(_names(code)) if code is not None else []
    names = [n for n in named if not n.startswith("__")]  # `__file__` depends on the checkout
    return "".join(f"\n{n}={scope[n]!r}" for n in names if n in scope and _is_plain(scope[n]))


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    is_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    return value is None or is_dtype or isinstance(value, (bool, int, float, str, bytes))


def _is_cuda_module(thing: object) -> TypeGuard[CudaModule]:
    return hasattr(thing, "assemble")


def _is_triton(thing: object) -> bool:
    """Return whether `thing` is a Triton function, possibly autotuned or interpreted."""
    return type(thing).__module__.startswith("triton.") and hasattr(thing, "fn")


def _tuning(thing: object) -> str:
    """Return an autotuned kernel's configurations as text. Any file may define them."""
    if not _is_triton(thing):
        return ""
    configs = "".join(map(_config_text, getattr(thing, "configs", ())))
    return configs + _tuning(getattr(thing, "fn", None))


def _config_text(config: Any) -> str:
    """Return a configuration in the text form of Triton 3.6. Later versions print more fields."""
    known = {**config.kwargs, **{name: getattr(config, name, None) for name in TRITON_OPTIONS}}
    if (override := getattr(config, "ir_override", None)) is not None:
        known["ir_override"] = override
    return "\n" + ", ".join(f"{name}: {value}" for name, value in known.items())


def _unwrapped(thing: object) -> object:
    """Return the function inside decorators: partials, Triton kernels, compiled functions."""
    for attribute in ("side", "fn", "func", "_torchdynamo_orig_callable", "__wrapped__"):
        inner = getattr(thing, attribute, None)
        if (callable(inner) or _is_triton(inner)) and not isinstance(thing, type):
            return _unwrapped(inner)
    return thing


def _kernel_path(thing: object) -> Path | None:
    path = getattr(thing, "path", None)  # modules such as `os` have a `path` of another type
    return path if isinstance(path, Path) else None


def _source_file(thing: Any) -> str | None:
    if isinstance(thing, ModuleType):
        return getattr(thing, "__file__", None)
    try:
        return inspect.getsourcefile(thing)
    except TypeError:
        return None


def _text(thing: Any, file: Path) -> str:
    if _kernel_path(thing) or isinstance(thing, ModuleType):
        return file.read_text()
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return file.read_text()


def _used(thing: object) -> Iterator[object]:
    """Yield the functions, modules and kernels whose names a function uses."""
    code: CodeType | None = getattr(thing, "__code__", None)
    if code is None:
        return
    scope, names = getattr(thing, "__globals__", {}), sorted(_names(code))
    for value in map(scope.get, names):
        if callable(value) or isinstance(value, ModuleType) or _is_launched(value):
            yield value
        if isinstance(value, ModuleType):
            yield from filter(_is_launched, map(vars(value).get, names))
    for cell in getattr(thing, "__closure__", None) or ():
        if callable(cell.cell_contents) or _is_launched(cell.cell_contents):
            yield cell.cell_contents


def _is_launched(value: object) -> bool:
    """Return whether `value` is a .cu file or a Triton kernel, which need not be callable."""
    return _kernel_path(value) is not None or _is_triton(value)


def _names(code: CodeType) -> set[str]:
    nested = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*nested)
