"""Count how many of a page's variants each commit changed, according to `aisp suite changed`.

    python benchmarks/changed_variants.py [FOLDER]          # default: suites; needs the git history

The script goes through the commits that changed a page in FOLDER, and ignores changes of other
files.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

from pytest_aisp.tools.changed_cases import PageSyntax, touched


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def changes(folder: str) -> Iterator[tuple[str, str]]:
    """Yield (commit, page) for each changed page that existed before. Merges are left out."""
    for commit in git("log", "--no-merges", "--format=%H", "--", folder).split():
        words = ("diff-tree", "-r", "--no-commit-id", "--name-only", "--diff-filter=M")
        for path in git(*words, commit, "--", folder).splitlines():
            if path.endswith("_test.py"):
                yield commit, path


def main() -> None:
    counts: Counter[str] = Counter()
    variants = hits = 0
    for commit, path in changes(*sys.argv[1:2] or ["suites"]):
        try:
            texts = [git("show", f"{at}:{path}") for at in (f"{commit}~", commit)]
            old, new = map(PageSyntax.of, texts)
        except (subprocess.CalledProcessError, SyntaxError):  # of the first commit, or broken
            continue
        cases = set(new.cases())
        hit = len(touched(cases, new, old, (), lambda statement: ()))
        if not hit:
            continue
        counts["all" if hit == len(cases) else "some"] += 1
        variants, hits = variants + len(cases), hits + hit
    print(f"{counts.total()} changes of pages touch {dict(counts)} of their variants,")
    print(f"together {hits} of {variants} variants ({hits / variants:.0%})")


if __name__ == "__main__":
    main()
