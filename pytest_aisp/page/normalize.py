"""Normalize source code: comments and formatting do not change the digest of normalized code.

Python code becomes its syntax tree, and CUDA C++ becomes its tokens. The
normalized text is the same in every supported version of Python.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import CodeType

IGNORED = ("kind", "type_comment")
"""Fields of the syntax tree that do not affect the code, such as the `u` of ``u"text"``."""
Definition = tuple[int, str]
"""The first line and the name of a function. A class has line 0 and its qualified name."""


def function(
    text: str, code: CodeType, *, docstrings: bool = False, body: bool = True
) -> str | None:
    """Return the normalized source of the function whose code object is `code`.

    If several lambdas begin on the same line, all are included. Return None if `text` does not
    contain the function, because the file was edited after the import or is not Python.

    Args:
        text: the content of the function's file.
        docstrings: whether to include docstrings.
        body: False to include only decorators, parameters and annotations.
    """
    return _definition(text, (code.co_firstlineno, code.co_name), docstrings, body)


def class_(text: str, name: str, *, docstrings: bool = False) -> str | None:
    """Return the normalized source of the class `name` (its qualified name) in the file `text`."""
    return _definition(text, (0, name), docstrings)


def module(text: str, *, docstrings: bool = False) -> str | None:
    """Return the normalized source of a module, or None if `text` is not Python."""
    tree = _parsed(text)
    return None if tree is None else _python(tree, docstrings)


def rest(text: str, names: Collection[str], *, tests: bool = False) -> str | None:
    """Return the normalized source of a page, without tests and the top-level functions in `names`.

    Return None if `text` is not Python.

    Args:
        tests: True to include tests.
    """
    tree = _parsed(text)
    if tree is None:
        return None
    kept = [node for node in tree.body if not _is_left_out(node, names, tests)]
    return _python(ast.Module(kept, []), docstrings=False)


def _is_left_out(node: ast.stmt, names: Collection[str], tests: bool) -> bool:
    if isinstance(node, ast.ClassDef):
        return not tests and node.name.startswith("Test")
    return isinstance(node, ast.FunctionDef) and (
        node.name in names or (not tests and node.name.startswith("test_"))
    )


def _definition(text: str, key: Definition, docstrings: bool, body: bool = True) -> str | None:
    found = _definitions(text).get(key)
    if found is None:
        return None
    nodes = found if body else [_without_body(node) for node in found]
    return "\n".join(sorted(_python(node, docstrings) for node in nodes))


def _without_body(node: ast.AST) -> ast.AST:
    fields = {**dict(ast.iter_fields(node)), "body": []}
    return type(node)(**fields) if isinstance(node, ast.FunctionDef) else node


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@functools.lru_cache(maxsize=8)
def _definitions(text: str) -> dict[Definition, list[ast.AST]]:
    """Return the syntax trees of the functions and classes in `text`, keyed by definition."""
    table: dict[Definition, list[ast.AST]] = {}
    todo: list[tuple[str, ast.AST | None]] = [("", _parsed(text))]
    while todo:
        outer, parent = todo.pop()
        for node in () if parent is None else ast.iter_child_nodes(parent):
            inner, key = outer, None
            if isinstance(node, ast.Lambda):
                key = node.lineno, "<lambda>"
            elif isinstance(node, ast.ClassDef):
                inner, key = f"{outer}{node.name}.", (0, f"{outer}{node.name}")
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = f"{outer}{node.name}.<locals>."
                key = min(n.lineno for n in (node, *node.decorator_list)), node.name
            if key is not None:
                table.setdefault(key, []).append(node)
            todo.append((inner, node))
    return table


def _python(tree: ast.AST, docstrings: bool) -> str:
    """Return a syntax tree as text, without line numbers and empty fields.

    `ast.dump` is not used, because the output differs between versions of Python. The function is
    not recursive, because Python's recursion limit would limit the tree's depth.
    """
    parts: list[str] = []
    todo: list[object] = [tree]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            parts.append(item)
        else:
            todo += reversed(list(_children(item, docstrings)))
    return "".join(parts)


def _children(item: object, docstrings: bool) -> Iterator[object]:
    """Yield the parts of a node or a list: strings, and further nodes and lists."""
    if isinstance(item, list):
        yield "["
        for each in item:
            if docstrings or not _is_string_statement(each):
                yield from (_part(each), ",")
        yield "]"
        return
    assert isinstance(item, ast.AST)
    yield f"{type(item).__name__}("
    if isinstance(item, ast.Constant):
        yield ascii(item.value)  # `repr` depends on the version of Unicode
    elif isinstance(item, ast.JoinedStr):
        yield list(_joined(item.values))
    else:
        for name, value in ast.iter_fields(item):
            if name not in IGNORED and not _is_empty(name, value):
                yield from (f"{name}=", _part(value), ",")
    yield ")"


def _part(value: object) -> object:
    return value if isinstance(value, (ast.AST, list)) else ascii(value)


def _is_empty(name: str, value: object) -> bool:
    if name == "format_spec" and isinstance(value, ast.JoinedStr):
        return not list(_joined(value.values))
    return value is None or value == []


def _is_string_statement(node: object) -> bool:
    """Return whether a statement is only a string: a docstring of a function or of a variable."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _joined(values: Iterable[ast.expr]) -> Iterator[ast.expr]:
    """Yield the parts of an f-string. Versions of Python split its constant parts differently."""
    constant = ""
    for value in values:
        if isinstance(value, ast.Constant):
            constant += str(value.value)
            continue
        if constant:
            yield ast.Constant(constant)
        constant = ""
        yield value
    if constant:
        yield ast.Constant(constant)


SPLICE = r"\\\r?\n"
"""A backslash at the end of a line, which joins the line to the next one."""
OPERATORS = (
    "<<< >>> <=> <<= >>= ... ->* :: -> .* ++ -- << >> <= >= == != && || += -= *= /= %= &= |= ^= ##"
    " %:%: %:"
)
TOKEN = re.compile(
    rf"""
      (?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{{0,16}})\(.*?\)(?P=delimiter)"\w*
    | (?<=include)[ \t]*<[^>\n]*>
    | (?P<comment> // (?:{SPLICE}|[^\n])* | /\*.*?\*/ )
    | (?P<space> (?:\s|{SPLICE})+ )
    | (?:u8|[uUL])?(?: "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )\w*
    | \.?\d(?:[eEpP][+-]|'?\w|\.)*
    | \w+
    | {"|".join(map(re.escape, OPERATORS.split()))}
    | .
    """,
    re.VERBOSE | re.DOTALL,
)
HASH = ("#", "%:")
GAP = ""
"""White space between two tokens, which matters only if a macro turns the tokens into a string."""


def cuda(texts: Sequence[str]) -> list[list[str]]:
    """Return the tokens of each of `texts`: a CUDA C++ file and the headers that it includes.

    String literals are unchanged. In a preprocessor directive, white space and the end of the line
    are tokens too. In other code, white space is kept only if one of the texts has a macro that
    turns an argument into a string, as ``#x`` does.
    """
    found = [list(_tokens(text)) for text in texts]
    if any(map(_makes_strings, found)):
        return found
    return [[token for token in tokens if token != GAP] for tokens in found]


def _tokens(text: str) -> Iterator[str]:
    in_directive, after_gap, starts_line, before = False, False, True, ""
    for match in TOKEN.finditer(text):
        token = match[0]
        joined = re.sub(SPLICE, "", token)
        if match["comment"] is not None or (match["space"] is not None and joined):
            after_gap = True
            if match["space"] is not None and "\n" in joined:
                if in_directive:
                    yield "\n"
                in_directive, starts_line = False, True
            continue
        if starts_line and token in HASH:
            in_directive = True
            yield "\n"
        elif after_gap and before not in HASH:
            yield " " if in_directive else GAP
        yield token
        after_gap, starts_line, before = False, False, token
    if in_directive:
        yield "\n"


def _makes_strings(tokens: Sequence[str]) -> bool:
    """Return whether a macro uses the operator ``#``: a ``#`` that does not begin its line."""
    pairs = itertools.pairwise(tokens)
    return any(token in HASH and before != "\n" for before, token in pairs)
