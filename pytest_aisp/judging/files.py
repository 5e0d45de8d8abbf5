"""Run the file of a problem or of a candidate. Only worker processes use this module."""

from __future__ import annotations

import ast
import os
import sys
import traceback
import types
import zlib
from collections.abc import Mapping
from pathlib import Path

from ..page.pair import PageError
from ..results.messages import Json

Names = dict[str, object]
"""The objects that a file defines, keyed by name."""


class ProblemError(PageError):
    """The problem is invalid, so no candidate can be judged."""

    code = "problem_error"


class Misfit(PageError):
    """A candidate does not define the name that the problem requires, or returns no tensors."""

    code = "wrong_structure"


class ImportFailed(PageError):
    """The file of a candidate raised an exception when it was imported."""

    code = "import_error"

    @classmethod
    def of(cls, file: Path, error: Exception) -> ImportFailed:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f"\n    line {f.lineno}: {f.line}" for f in frames if f.filename == str(file)]
        kind = type(error).__name__
        return cls(f"{file.name} cannot be imported: {kind}: {first}{''.join(lines[-1:])}")


class PackageMissing(PageError):
    """A module is not installed."""

    code = "missing_package"

    @classmethod
    def of(cls, who: str, error: ModuleNotFoundError) -> PackageMissing:
        return cls(
            f"{who} imports {error.name}, which is not installed\n    pip install {error.name}"
        )


def run_problem(file: Path, sizes: Mapping[str, Json], device: str) -> Names:
    """Run a problem's file with other constants, and with `device` in place of ``"cuda"``."""
    module = ast.parse(file.read_text(), str(file))
    _override(module, sizes)
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and node.value == "cuda":
            node.value = device
    return _run(file, module)


def run_candidate(file: Path, sizes: Mapping[str, Json]) -> Names:
    """Run a candidate's file with other constants.

    Environment variables that the file changes, for example for a compiler, are restored.

    Raises:
        ImportFailed: if the file raises an exception.
    """
    environment = dict(os.environ)
    try:
        module = ast.parse(file.read_text(), str(file))
        _override(module, sizes)
        return _run(file, module)
    except (ModuleNotFoundError, MemoryError):
        raise
    except Exception as error:
        raise ImportFailed.of(file, error) from error
    finally:
        os.environ.clear()
        os.environ.update(environment)


def constants(file: Path) -> set[str]:
    """Return the names that a file assigns at its top level."""
    module = ast.parse(file.read_text(), str(file))
    return {name for statement in module.body if (name := _assigned(statement))}


def _assigned(statement: ast.stmt) -> str:
    """Return the name that a statement assigns to, or an empty string."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return ""
    return target.id if isinstance(target, ast.Name) else ""


def _override(module: ast.Module, sizes: Mapping[str, Json]) -> None:
    for statement in module.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            name = _assigned(statement)
            if name in sizes:
                statement.value = ast.parse(repr(sizes[name]), mode="eval").body
    ast.fix_missing_locations(module)


def _run(file: Path, module: ast.Module) -> Names:
    """Run a file as a separate module, even if another file has the same name."""
    if (folder := str(file.parent)) not in sys.path:
        sys.path.append(folder)  # so that the file can import modules in its folder
    name = f"aisp_judged_{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    made = types.ModuleType(name)
    made.__file__ = str(file)
    sys.modules[name] = made  # `torch.compile` and dataclasses look up modules there
    exec(compile(module, str(file), "exec"), vars(made))
    return vars(made)
