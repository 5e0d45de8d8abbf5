"""Extract the code of a page's sides from its files: functions, constants and kernels.

The code is not run. A side is shown with all top-level definitions of the page that it uses, and
with the kernels that it uses from .cu files. Code from other files is shown only for imported
sides.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

CONTEXT = 4
"""The number of unchanged lines around a change in a diff."""
MAX_LINES = 600
"""The maximum number of lines of a side that are shown."""
_CHANGES = re.compile(r"\b(\w+): changes\s+`(\w+)`")


@dataclass(frozen=True, eq=False)
class Page:
    """The contents of a page's file.

    Attributes:
        path: the path of the file. Paths of .cu files are relative to the folder of this file.
        text: the source code.
        doc: the docstring, or "".
        defined: the top-level statements, keyed by the names that they bind.
        modules: the .cu file of each variable that is assigned from `cuda_module`.
        imported: the file of each name from a relative import, and the name in that file.
    """

    path: Path
    text: str
    doc: str
    defined: dict[str, ast.stmt]
    modules: dict[str, str]
    imported: dict[str, tuple[Path, str]]

    @classmethod
    def read(cls, path: Path) -> Page:
        """Return the page at `path`.

        Raises:
            OSError: if the file cannot be read.
            SyntaxError, ValueError: if the file is not valid Python.
        """
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        defined = {name: node for node in tree.body for name in _bound_names(node)}
        modules = {name: file for name, node in defined.items() if (file := _kernel_file(node))}
        imported = {
            alias.asname or alias.name: (path.parents[node.level - 1] / file, alias.name)
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.level and node.module
            for file in [Path(*node.module.split(".")).with_suffix(".py")]
            for alias in node.names
        }
        return cls(path, text, ast.get_docstring(tree) or "", defined, modules, imported)

    @property
    def title(self) -> str:
        """The docstring's first line."""
        return self.doc.partition("\n")[0].strip()

    def side(self, name: str) -> str:
        """Return the code of a side, followed by its kernels, or "" if the page lacks the side."""
        if name not in self.defined and name in self.imported:
            file, there = self.imported[name]
            return Page.read(file).side(there) if file.is_file() else ""
        nodes = self._reached(name)
        source = self.text.splitlines()
        parts = ["\n".join(source[_first_line(n) - 1 : n.end_lineno]) for n in nodes]
        lines = "\n\n\n".join([*parts, *self._kernels(nodes)]).splitlines()
        if len(lines) > MAX_LINES:
            lines = [*lines[:MAX_LINES], f"... {len(lines) - MAX_LINES} more lines"]
        return "\n".join(lines)

    def sides(self, function: str) -> tuple[str, tuple[str, ...]]:
        """Return the names of the baseline and of the variants in a test's `compare`."""
        test = self.defined.get(function)
        for call in getattr(test, "decorator_list", []):
            arguments = {k.arg: k.value for k in getattr(call, "keywords", [])}
            if {"baseline", "optimized"} <= arguments.keys():
                variants = getattr(arguments["optimized"], "elts", [])
                return _name(arguments["baseline"]), tuple(map(_name, variants))
        return "", ()

    def _reached(self, name: str) -> list[ast.stmt]:
        """Return the page's statements that define `name` and all names that it uses, in order."""
        reached: dict[str, ast.stmt] = {}
        pending = [name]
        while pending:
            each = pending.pop()
            if each not in reached and each in self.defined and each not in self.modules:
                reached[each] = self.defined[each]
                pending += _used_names(reached[each])
        return sorted(set(reached.values()), key=lambda node: node.lineno)

    def _kernels(self, nodes: list[ast.stmt]) -> Iterator[str]:
        """Yield the kernels of each kernel file that `nodes` use, with the kernels' helper code."""
        names_by_file: dict[str, list[str]] = {}
        for node in (n for top in nodes for n in ast.walk(top)):
            if isinstance(node, ast.Attribute) and _name(node.value) in self.modules:
                names_by_file.setdefault(self.modules[_name(node.value)], []).append(node.attr)
        for file, names in sorted(names_by_file.items()):
            if parts := kernel_parts(_read_kernels(self.path.parent / file), names):
                yield f"// {file}\n\n" + "\n\n".join(parts)


def page_diffs(page: Page) -> Iterator[str]:
    """Yield the lines of each variant's diff.

    The diff is from the side `x` if the docstring says ``variant: changes `x```, or else from the
    baseline of the variant's test.
    """
    named = {new: old for new, old in _CHANGES.findall(page.doc) if all(map(page.side, (new, old)))}
    sides = [page.sides(function) for function in page.defined]
    pairs = [(named.get(new, baseline), new) for baseline, variants in sides for new in variants]
    pairs += [(old, new) for new, old in named.items()]  # `sides` does not find all variants
    for old, new in dict.fromkeys(pairs):
        yield from ["", *diff(page.side(old), page.side(new), (old, new)).splitlines()]


@cache
def diff(baseline: str, optimized: str, names: tuple[str, str]) -> str:
    """Return the diff from `baseline` to `optimized` in the format of ``diff -u``."""
    lines = difflib.unified_diff(
        baseline.splitlines(), optimized.splitlines(), *names, lineterm="", n=CONTEXT
    )
    return "\n".join(lines)


def _used_names(top: ast.stmt) -> set[str]:
    """Return the names that a statement reads but does not bind."""
    names = [n for n in ast.walk(top) if isinstance(n, ast.Name)]
    bound = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    bound |= {n.arg for n in ast.walk(top) if isinstance(n, ast.arg)}
    return {n.id for n in names} - bound


def _bound_names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a definition or an assignment binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in (n for t in targets for n in ast.walk(t)):
            if isinstance(target, ast.Name):
                yield target.id


def _kernel_file(node: ast.stmt) -> str:
    """Return the file name in ``kernels = cuda_module("transpose.cu", ...)``, or ""."""
    match getattr(node, "value", None):
        case ast.Call(func=function, args=[ast.Constant(value=str(file)), *_]):
            return file if _name(function) == "cuda_module" else ""
    return ""


def _name(node: ast.expr) -> str:
    """Return the function's name in an element of `optimized=`: ``tiled`` or ``Variant(tiled)``."""
    match node:
        case ast.Call(args=[first, *_]):
            return _name(first)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


@cache
def _read_kernels(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# The code below does not parse CUDA C++, and only splits a .cu file at blank lines outside of
# braces.

_WORD = re.compile(r"[A-Za-z_]\w*")
_COMMENT_OR_STRING = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
_NAMESPACE = re.compile(r"\b(?:namespace\b[\w\s:]*|extern\s*)\{")
_ATTRIBUTE = re.compile(r"\b(?:__launch_bounds__|__cluster_dims__|alignas|__align__)\s*\([^)]*\)")
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|[^\n])*", re.MULTILINE)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)*(?:=|,|$)")


def kernel_parts(text: str, names: Sequence[str]) -> list[str]:
    """Return the parts of a kernel file that declare `names` and all names they use, in order."""
    parts = _parts(text)
    reached: set[int] = set()
    pending = set(names)
    while pending:
        new = {i for i, part in enumerate(parts) if part.declared & pending} - reached
        reached |= new
        pending = {word for i in new for word in parts[i].words}
    return [parts[i].text for i in sorted(reached)]


class _Part(NamedTuple):
    text: str
    declared: set[str]
    words: set[str]


@cache
def _parts(text: str) -> list[_Part]:
    """Return the parts between blank lines outside of braces, each with the comments above it."""
    parts = []
    part = ""
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        part = f"{part}\n\n{block}" if part else block
        code = _code(part)
        if code.strip() and code.count("{") <= code.count("}"):
            parts.append(_Part(part, _declared_names(code), set(_WORD.findall(code))))
            part = ""
    return parts


def _code(part: str) -> str:
    """Return `part` without comments, strings and the braces of namespaces."""
    return _NAMESPACE.sub(" ", _COMMENT_OR_STRING.sub(" ", part))


def _declared_names(code: str) -> set[str]:
    code = _ATTRIBUTE.sub(" ", code)
    names = set(re.findall(r"#\s*define\s+(\w+)", code))
    code = _DIRECTIVE.sub("", code)
    for enumerators in re.findall(r"\benum\b[^;{]*\{([^}]*)\}", code):
        names.update(_WORD.findall(enumerators))
    nested = 1
    while nested:  # remove the bodies, the innermost first
        code, nested = re.subn(r"\{[^{}]*\}", ";", code)
    for statement in code.split(";"):
        before, parenthesis, _ = statement.partition("(")
        if parenthesis and "=" not in before:
            names.update(_WORD.findall(before)[-1:])
        else:
            names.update(_VARIABLE.findall(statement.strip()))
    return names
