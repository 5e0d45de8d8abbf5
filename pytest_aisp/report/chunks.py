"""The top-level declarations of a CUDA C++ file, and which of them a kernel uses.

No parser: text is cut where braces close. That is enough to show a kernel with its helpers, and
what cannot be told apart is shown with its neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

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
    return [chunk for raw in _cut(text) if (chunk := raw.strip())]


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


def _cut(text: str) -> Iterator[str]:
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
