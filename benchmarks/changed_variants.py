"""Whether a change of a page reaches all its variants: why `aisp suite changed` names pages.

    python benchmarks/changed_variants.py [FOLDER]          # default: suites; needs the git history

Goes through the commits that changed a page in FOLDER. A variant is reached if a definition of the
page has changed that it uses by name, directly or indirectly, or that its test uses: the baseline,
inputs, sizes and claims. Comments and docstrings do not count. Changes of other files are not
looked at. Such a change reaches all variants of a page (`worker/changed_sides.py`).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

Definitions = dict[str, list[ast.stmt]]


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def changes(folder: str) -> Iterator[tuple[str, str]]:
    """Yield each commit and page of it that existed before, except for merges."""
    for commit in git("log", "--no-merges", "--format=%H", "--", folder).split():
        words = ("diff-tree", "-r", "--no-commit-id", "--name-only", "--diff-filter=M")
        for path in git(*words, commit, "--", folder).splitlines():
            if path.endswith("_test.py"):
                yield commit, path


def definitions(text: str) -> Definitions:
    """Return the statements of a page by the name that they define, without docstrings."""
    found: Definitions = {}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    for number, statement in enumerate(tree.body):
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        targets = [node.id for node in names if isinstance(node.ctx, ast.Store)]
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            targets = [statement.name]
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            targets = [(a.asname or a.name).partition(".")[0] for a in statement.names]
        for name in targets or [f"statement {number}"]:
            found.setdefault(name, []).append(statement)
    return found


def reached(start: Iterable[ast.AST], page: Definitions) -> set[str]:
    """Return the names that `start` uses, directly or through definitions of the page."""
    found: set[str] = set()
    todo = list(start)
    while todo:
        used = {x.id for x in ast.walk(todo.pop()) if isinstance(x, ast.Name)} - found
        found |= used
        todo += [statement for name in used for statement in page.get(name, ())]
    return found


def variants_of(old: Definitions, new: Definitions) -> tuple[int, int, set[str]]:
    """Return how many variants a page has, how many a change reaches, and what has changed."""

    def text(page: Definitions, name: str) -> list[str]:
        return [ast.dump(statement) for statement in page.get(name, ())]

    changed = {name for name in old.keys() | new.keys() if text(old, name) != text(new, name)}
    count = hit = 0
    for name, [test, *_] in new.items():
        for call in test.decorator_list if isinstance(test, ast.FunctionDef) else ():
            if not (isinstance(call, ast.Call) and ast.unparse(call.func).endswith("compare")):
                continue
            arguments = {keyword.arg: keyword.value for keyword in call.keywords}
            optimized = arguments.pop("optimized")
            variants = optimized.elts if isinstance(optimized, ast.List) else [optimized]
            common = reached(arguments.values(), new) | {name}
            every = common | {other for other in changed if other.startswith("statement ")}
            count += len(variants)
            hit += sum(bool((every | reached([one], new)) & changed) for one in variants)
    return count, hit, changed


def main() -> None:
    counts: Counter[str] = Counter()
    variants = hits = 0
    for commit, path in changes(*sys.argv[1:2] or ["suites"]):
        try:
            pages = [definitions(git("show", f"{at}:{path}")) for at in (f"{commit}~", commit)]
        except (subprocess.CalledProcessError, SyntaxError):  # of the first commit, or broken
            continue
        count, hit, changed = variants_of(*pages)
        if not changed or not count:
            continue
        counts["all" if hit == count else "some" if hit else "none"] += 1
        variants, hits = variants + count, hits + hit
    print(f"{counts.total()} changes of pages reach {dict(counts)} of their variants,")
    print(f"together {hits} of {variants} variants ({hits / variants:.0%})")


if __name__ == "__main__":
    main()
