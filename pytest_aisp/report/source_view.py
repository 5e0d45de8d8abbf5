"""The code of a page's sides, read from its file and never run: functions, kernels, constants.

A side is listed with what it names at the top level of its page, and with the kernels that it takes
from `cuda_module`s, which `chunks` finds. What it imports from elsewhere is not.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CONTEXT = 4
"""Lines around a change in a diff."""
LONGEST = 600
"""Lines of a listing; the rest is counted."""


@dataclass(frozen=True)
class Page:
    """What a page's file holds.

    Attributes:
        path: the file; its kernel files lie beside it.
        text: its source.
        doc: its docstring, empty where it has none.
        defined: the top-level statements by the names that they bind.
        modules: file names of `cuda_module`s, by the names they go by.
    """

    path: Path
    text: str
    doc: str
    defined: dict[str, ast.stmt]
    modules: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Page:
        """Return the page at `path`.

        Raises:
            OSError: where it cannot be read.
            SyntaxError, ValueError: where it is no Python.
        """
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        defined = {name: node for node in tree.body for name in _bound(node)}
        modules = {name: file for name, node in defined.items() if (file := _kernel_file(node))}
        return cls(path, text, ast.get_docstring(tree) or "", defined, modules)

    @property
    def title(self) -> str:
        """The docstring's first line."""
        return self.doc.partition("\n")[0].strip()

    def side(self, name: str) -> str:
        """Return the code of a side by name, its kernels last; empty where the page has none."""
        if name not in self.defined:
            return ""
        nodes = self._reached(name)
        parts = [_source(self.text, node) for node in nodes]
        return _cut("\n\n\n".join([*parts, *self._kernels(nodes)]))

    def sides(self, function: str) -> tuple[str, tuple[str, ...]]:
        """Return the names of the baseline and of the variants that a test's `compare` names."""
        test = self.defined.get(function)
        for call in getattr(test, "decorator_list", []):
            told = {k.arg: k.value for k in getattr(call, "keywords", [])}
            if {"baseline", "optimized"} <= told.keys():
                listed = getattr(told["optimized"], "elts", [])
                return _name(told["baseline"]), tuple(map(_name, listed))
        return "", ()

    def _reached(self, name: str) -> list[ast.stmt]:
        """Return what `name` uses of the page, in its order; modules and imports are left out."""
        found: dict[str, ast.stmt] = {}
        waiting = [name]
        while waiting:
            one = waiting.pop()
            if one in found or one not in self.defined or one in self.modules:
                continue
            found[one] = self.defined[one]
            waiting += _used(found[one])
        return sorted({id(n): n for n in found.values()}.values(), key=lambda n: n.lineno)

    def _kernels(self, nodes: list[ast.stmt]) -> Iterator[str]:
        """Yield by kernel file what `nodes` take from it, with what that uses of the file."""
        wanted: dict[str, list[str]] = {}
        for node in (n for top in nodes for n in ast.walk(top)):
            if isinstance(node, ast.Attribute) and _name(node.value) in self.modules:
                wanted.setdefault(self.modules[_name(node.value)], []).append(node.attr)
        for file, names in sorted(wanted.items()):
            if parts := _chunks(self.path.parent / file):
                yield f"// {file}\n\n" + "\n\n".join(reached(parts, names))


def diff(baseline: str, optimized: str, names: tuple[str, str]) -> str:
    """Return what changed from `baseline` to `optimized`, as ``diff -u`` writes it."""
    lines = difflib.unified_diff(
        baseline.splitlines(), optimized.splitlines(), *names, lineterm="", n=CONTEXT
    )
    return "\n".join(lines)


def _used(top: ast.stmt) -> set[str]:
    """Return the names that a statement reads and does not bind inside itself."""
    names = [n for n in ast.walk(top) if isinstance(n, ast.Name)]
    bound = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    bound |= {n.arg for n in ast.walk(top) if isinstance(n, ast.arg)}
    return {n.id for n in names} - bound


@functools.cache
def _chunks(path: Path) -> list[str]:
    try:
        return list(chunks(path.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return []


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a top-level statement binds; imports bind what is not the page's."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in (n for t in targets for n in ast.walk(t)):
            if isinstance(target, ast.Name):
                yield target.id


def _kernel_file(node: ast.stmt) -> str:
    """Return the file of ``kernels = cuda_module("transpose.cu", ...)``, or nothing."""
    call = getattr(node, "value", None)
    if not (isinstance(call, ast.Call) and _name(call.func) == "cuda_module" and call.args):
        return ""
    first = call.args[0]
    is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return str(first.value) if is_text else ""  # type: ignore[attr-defined]


def _name(node: ast.expr) -> str:
    """Return the name that an element of `optimized=` goes by: ``tiled``, ``Variant(tiled)``."""
    if isinstance(node, ast.Call):
        return _name(node.args[0]) if node.args else ""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _source(text: str, node: ast.stmt) -> str:
    """Return the lines of a statement, its decorators with it."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def _cut(text: str) -> str:
    lines = text.splitlines()
    if len(lines) <= LONGEST:
        return text
    return "\n".join([*lines[:LONGEST], f"... {len(lines) - LONGEST} more lines"])


_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
    r"""|^[ \t]*\#(?:\\\n|[^\n])*|[{};]""",
    re.DOTALL | re.MULTILINE,
)
_WORD = re.compile(r"[A-Za-z_]\w*")
_NAMESPACE = re.compile(r"(?:namespace\b[\w\s:]*|extern\s*\"C\"\s*)$")
_SILENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
_ATTRIBUTE = re.compile(r"\b(?:__launch_bounds__|alignas|__align__)\s*\([^)]*\)")


def chunks(text: str) -> list[str]:
    """Return the declarations of `text` in order, each with the comment above it."""
    return [chunk for raw in _cut_declaration(text) if (chunk := raw.strip())]


def reached(parts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return those of `parts` that declare one of `names` or what these use, in order."""
    declared: dict[str, set[int]] = {}
    for index, part in enumerate(parts):
        for name in _declares(part):
            declared.setdefault(name, set()).add(index)
    waiting = [index for name in names for index in declared.get(name, ())]
    found: set[int] = set()
    while waiting:
        index = waiting.pop()
        if index not in found:
            found.add(index)
            words = set(_WORD.findall(_SILENT.sub(" ", parts[index])))
            waiting += [i for word in words for i in declared.get(word, ())]
    return [parts[index] for index in sorted(found)]


def _cut_declaration(text: str) -> Iterator[str]:
    """Yield the text between the ends of declarations; what a namespace wraps counts as top."""
    start = depth = wrapped = 0
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if token.start() < start:  # the comment behind a declaration is part of it
            continue
        if mark == "{":
            if depth == 0 and _NAMESPACE.search(text[start : token.start()].rstrip()):
                wrapped += 1
                start = token.end()
            else:
                depth += 1
        elif mark == "}" and depth == 0 and wrapped:
            wrapped -= 1
            start = token.end()
        elif mark == "}":
            depth -= 1
            if depth == 0 and not text[token.end() :].lstrip(" \t").startswith(";"):
                yield text[start : token.end()]
                start = token.end()
        elif mark == ";" and depth == 0:
            end = _line_end(text, token.end())
            yield text[start:end]
            start = end
        elif mark.lstrip().startswith("#") and depth == 0:
            yield text[start : token.end()]
            start = token.end()


def _line_end(text: str, end: int) -> int:
    """Return where the line ends that `end` is on, if only a comment follows there."""
    comment = re.compile(r"[ \t]*//[^\n]*").match(text, end)
    return comment.end() if comment else end


def _declares(part: str) -> set[str]:
    """Return the names that a declaration makes known."""
    head = _SILENT.sub(" ", part).strip()
    if define := re.match(r"#\s*define\s+(\w+)", head):
        return {define[1]}
    if head.startswith("#"):
        return set()
    head = _ATTRIBUTE.sub(" ", head)
    if re.match(r"enum\b", head):
        return set(_WORD.findall(head))
    if made := re.search(r"\b(?:struct|class|union)\s+(\w+)[^;(]*\{", head):
        return {made[1]}
    if using := re.match(r"using\s+(\w+)\s*=", head):
        return {using[1]}
    before = re.split(r"[={]", head, maxsplit=1)[0]
    if "(" in before:
        return set(re.findall(r"(\w+)\s*\(", before)[:1])
    return set(_WORD.findall(before)[-1:]) | set(re.findall(r"(\w+)\s*=", head.split("{")[0]))
