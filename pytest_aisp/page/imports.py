"""The files that a page may use: imported modules, and data files whose names are in the code.

The digest of a side (see `sources`) includes only objects that the code refers to by name. A side
can also call code through a method, a default argument, a table, or a module that imports another
module. So if any file of the page changes, both sides count as changed.
"""

from __future__ import annotations

import ast
import dis
import functools
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType

from . import normalize
from .sources import libraries, reach

CUDA_SUFFIXES = (".cu", ".cuh", ".h", ".hpp")
PLUGIN = __name__.partition(".")[0]
"""The plugin's own package, which is not part of a page: old sides also run with today's plugin."""
DYNAMIC_IMPORTS = ("import_module", "__import__")
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
LONGEST_NAME = 200
"""String constants longer than this are not treated as file names."""


def import_folders(root: str) -> tuple[str, ...]:
    """Return `root` and the folders of `sys.path` under `root`, as relative paths."""
    under = Path(root).resolve()
    entries = [Path(entry).resolve() for entry in sys.path if entry]
    below = [str(entry.relative_to(under)) for entry in entries if entry.is_relative_to(under)]
    return tuple(dict.fromkeys([".", *below]))


def used_files(page: Path, root: str, folders: Iterable[str]) -> dict[str, Path]:
    """Return the page and the files under `root` that it may use, keyed by path relative to `root`.

    The files are modules that the page imports (directly or indirectly, even inside functions),
    files whose names are string constants in these modules, and headers that CUDA files include.
    File names that are built at run time are not found (see `worker.opened_files`).

    Args:
        folders: the folders that Python imports from, relative to `root`.
    """
    under = Path(root).resolve()
    bases = [under / folder for folder in folders]
    found: dict[str, Path] = {}
    header_folders = [under]
    todo = [page.resolve()]
    while todo:
        file = todo.pop()
        name = str(file.relative_to(under)) if file.is_relative_to(under) else ""
        if not name or name in found or str(file).startswith(libraries()):
            continue
        found[name] = file
        if file.suffix == ".py":
            text = file.read_text(encoding="utf-8", errors="replace")
            named = list(_named(text, file, under, bases))
            todo += [path.resolve() for path in named if path.is_file()]
            header_folders += [path for path in named if path.is_dir()]  # may be an include path
        elif file.suffix in CUDA_SUFFIXES:
            todo += _included(file, header_folders)
    return dict(sorted(found.items()))


def named_files(text: str, page: Path, root: str, folders: Iterable[str]) -> set[str]:
    """Return the files that a part of a page (`text`) may use, as paths relative to `root`."""
    under = Path(root).resolve()
    paths = _named(text, page.resolve(), under, [under / folder for folder in folders])
    files = (used_files(path, root, folders) for path in paths if path.is_file())
    return {name for each in files for name in each}


def imported_late(side: object, root: str) -> list[str]:
    """Return the names of modules that a side imports only when it is called.

    All code under `root` that the side uses is searched. Relative imports are left out. A side's
    digest does not include these modules.
    """
    things = [source.thing for source in reach([side], root).sources.values()]
    codes = [getattr(thing, "__code__", None) for thing in things]
    return sorted({name for code in codes if code is not None for name in _imports(code)})


def _imports(code: CodeType) -> Iterator[str]:
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for level, _, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME" and level.argval == 0:
            yield str(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imports(constant)


NO_KERNELS: Mapping[str, Collection[str]] = {}


def contents(
    page: Path,
    root: str,
    folders: Iterable[str],
    kernels: Mapping[str, Collection[str]] = NO_KERNELS,
    opened: Iterable[str] = (),
) -> dict[str, str]:
    """Return the normalized contents of the files that a page may use, without the page itself.

    The keys are paths relative to `root`.

    Args:
        kernels: the kernels to leave out, in the form that `sources.kernel_sources` returns.
        opened: further files that the page may open.
    """
    paths = {name: (Path(root) / name).resolve() for name in opened}
    files = {name: path for name, path in paths.items() if path.is_file()}
    files |= used_files(page, root, folders)
    others = {name: file for name, file in files.items() if file != page.resolve()}
    for name, functions in kernels.items():
        if not functions:
            others.pop(name, None)
    return {name: normalized_file(file, kernels.get(name, ())) for name, file in others.items()}


def normalized_file(path: Path, without: Collection[str] = ()) -> str:
    """Return the content of a file without comments, docstrings and formatting.

    Args:
        without: names of functions of a Python module to leave out.
    """
    text = path.read_bytes().decode(errors="surrogateescape")
    if path.suffix in CUDA_SUFFIXES:
        return str(normalize.cuda([text]))
    plain = normalize.rest(text, without, tests=True) if path.suffix == ".py" else None
    return plain or text


@functools.lru_cache(maxsize=256)
def _names_in(text: str) -> tuple[list[tuple[int, str]], list[str]]:
    """Return the imports in `text` as (level, dotted name), and its short string constants."""
    imports: list[tuple[int, str]] = []
    constants: list[str] = []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return imports, constants
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            imports += [(node.level, f"{module}{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(DYNAMIC_IMPORTS):
            named = node.args[0] if node.args else None
            if isinstance(named, ast.Constant) and isinstance(named.value, str):
                name = named.value.lstrip(".")
                imports.append((len(named.value) - len(name), name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            constants += [node.value] * _may_be_a_file(node.value)
    return imports, constants


def _may_be_a_file(text: str) -> bool:
    return 0 < len(text) <= LONGEST_NAME and text.isprintable()


def _named(text: str, file: Path, root: Path, bases: Collection[Path]) -> Iterator[Path]:
    """Yield paths that imports and string constants in a module's `text` may refer to."""
    imports, constants = _names_in(text)
    for level, name in imports:
        if not level and name.split(".")[0] == PLUGIN:
            continue
        for base in [file.parents[level - 1]] if level else bases:
            yield from _modules(base, name)
    for constant in constants:
        yield from (folder / constant for folder in (file.parent, root))


def _included(file: Path, folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the headers that a CUDA file includes from its own folder or from `folders`."""
    for name in _INCLUDE.findall(file.read_text(encoding="utf-8", errors="replace")):
        paths = ((folder / name).resolve() for folder in (file.parent, *folders))
        yield from (path for path in paths if path.is_file())


def _modules(base: Path, name: str) -> Iterator[Path]:
    """Yield the files that ``import name`` may run. The last part of `name` may be a function."""
    for part in name.split("."):
        yield base / "__init__.py"
        yield base / f"{part}.py"
        base /= part
    yield base / "__init__.py"
