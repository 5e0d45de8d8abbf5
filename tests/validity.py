"""The table of cheats and protections, from the exploits that the tests run.

python tests/validity.py          writes docs/reference/validity.md
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import checklists
from checklists import Item
from exploits.common import Exploit
from tricks import STATES, TRICKS

from pytest_aisp.isolation.protections import PROTECTIONS

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DOCUMENT = ROOT / "docs/reference/validity.md"
BOTH_MODES = "Under `--aisp-untrusted`, all protections of the ordinary mode work too."
INTRODUCTION = """
Each protection has a name. The exploits in `tests/exploits` are pages whose optimized side cheats.
`tests/exploits_test.py` runs every exploit with only one of its protections on: the protection must
catch it. It also runs every exploit with all of its protections off: the exploit must pass. There
are {exploits} exploits and {protections} protections. {gpu} exploits need a GPU and are skipped
without one.

The protections run in the process that runs the side. They stop mistakes and shortcuts, not a side
that attacks the harness itself. `--aisp-untrusted` is for attacks
([how a result is checked](../explanation/checking.md)).

Two public checklists follow the protections:
[40 cheats of public benchmarks](#40-cheats-of-public-benchmarks) and
[95 validity issues](#95-validity-issues).

`python tests/validity.py` writes this page, and a test compares it with the files.
"""
CHECKLISTS = """
The tables show what catches each item here, and which tests prove it. A script fills them in:

- **caught**: the tests in the last column prove it, and we know of no gap;
- **in part**: the tests prove a part. The gap follows *Open*;
- **by design**: this is not a problem here, for the given reason;
- **open**: not proved, or not done.
"""
WHEN = {"check": "checked", "time": "timed"}


@dataclass(frozen=True)
class FoundExploit:
    """An exploit and the file that declares it."""

    exploit: Exploit
    path: Path

    @property
    def device(self) -> str:
        return "cuda" if self.path.stem == "gpu" else "cpu"

    @property
    def link(self) -> str:
        return f"[{self.exploit.name}](../../{self.path.relative_to(ROOT).as_posix()})"


def find_exploits() -> list[FoundExploit]:
    """Return every exploit of `tests/exploits`, by name."""
    found = []
    for path in (TESTS / "exploits").glob("*.py"):
        page = importlib.import_module(f"exploits.{path.stem}")
        tests = [thing for thing in vars(page).values() if hasattr(thing, "exploit")]
        found += [FoundExploit(test.exploit, path) for test in tests]
    return sorted(found, key=lambda one: (one.device, one.exploit.name))


def document() -> str:
    """Return docs/reference/validity.md."""
    found = find_exploits()
    on_gpu = sum(one.device == "cuda" for one in found)
    intro = INTRODUCTION.format(exploits=len(found), protections=len(PROTECTIONS), gpu=on_gpu)
    lines = ["# Cheats and protections", "", *_tricks(), "", "## How this is proved", ""]
    lines += [*intro.strip().splitlines(), ""]
    for name, meaning in PROTECTIONS.items():
        caught = [one for one in found if name in one.exploit.protections]
        lines += [f"## {name}", "", f"{meaning[0].upper()}{meaning[1:]}.", ""]
        lines += [*_exploit_table(caught)] if caught else [checklists.SECOND_LINES[name]]
        lines.append("")
    lines += ["## 40 cheats of public benchmarks", "", *CHECKLISTS.strip().splitlines(), ""]
    lines += [*_checklist(checklists.BENCHMARK_CHEATS), ""]
    issues = [item for items in checklists.VALIDITY_ISSUES.values() for item in items]
    categories = [name for name, items in checklists.VALIDITY_ISSUES.items() for _ in items]
    lines += ["## 95 validity issues", "", *_checklist(issues, categories)]
    return "\n".join(lines).rstrip() + "\n"


def _tricks() -> Iterator[str]:
    """Yield the table of all classes of tricks."""
    known = {one.exploit.name: one.link for one in find_exploits()}
    for state, meaning in STATES.items():
        yield f"- **{state}**: {meaning}."
    yield from ("", BOTH_MODES, "", "| trick | ordinary mode | `--aisp-untrusted` | proved by |")
    yield "| --- | --- | --- | --- |"
    for trick in TRICKS:
        proofs = ", ".join(known.get(name) or _test_link(name) for name in trick.proofs.split())
        yield f"| {trick.name} | {trick.ordinary} | {trick.untrusted} | {proofs} |"


def _exploit_table(found: Sequence[FoundExploit]) -> Iterator[str]:
    yield "| exploit | caught when |"
    yield "| --- | --- |"
    for one in found:
        on_gpu = " on a GPU" if one.device == "cuda" else ""
        yield f"| {one.link}: {one.exploit.title} | {WHEN[one.exploit.stage]}{on_gpu} |"


def _checklist(items: Sequence[Item], categories: Sequence[str] = ()) -> Iterator[str]:
    states = Counter(item.state for item in items)
    counts = (f"{states[state]} {state}" for state in ("caught", "in part", "by design", "open"))
    yield f"Of {len(items)}: {', '.join(counts)}."
    yield ""
    first = "category" if categories else "number"
    yield f"| {first} | cheat | state | what catches it | proved by |"
    yield "| --- | --- | --- | --- | --- |"
    known = {one.exploit.name: one for one in find_exploits()}
    for number, item in enumerate(items):
        shown = [known[name] for name in item.exploits.split()]
        tests = item.tests.split()
        cells = (
            categories[number] if categories else str(number + 1),
            item.cheat,
            item.state,
            _what_catches(item, shown),
            ", ".join([one.link for one in shown] + [_test_link(test) for test in tests]),
        )
        yield f"| {' | '.join(cells)} |"


def _what_catches(item: Item, shown: Sequence[FoundExploit]) -> str:
    """Return the protections that catch exploits, other ways to catch them, and open items."""
    names = {name for one in shown for name in one.exploit.protections}
    parts = [", ".join(f"`{name}`" for name in PROTECTIONS if name in names), item.why]
    parts += [f"*Open:* {item.open}"] if item.open else []
    return ". ".join(part[0].upper() + part[1:] for part in parts if part)


def find_test(name: str) -> Path:
    """Return the file of a test. A name that is not unique has its file before it.

    Raises:
        LookupError: if there is no such test, or several.
    """
    file, _, function = name.rpartition("::")
    files = [path for path in TESTS.glob(file or "*_test.py") if function in _functions(path)]
    if len(files) != 1:
        raise LookupError(f"{len(files)} files have a test {function}")
    return files[0]


@functools.cache
def _functions(path: Path) -> frozenset[str]:
    parsed = ast.parse(path.read_text())
    return frozenset(node.name for node in parsed.body if isinstance(node, ast.FunctionDef))


def _test_link(name: str) -> str:
    words = name.rpartition("::")[2].removeprefix("test_").replace("_", " ")
    return f"[{words}](../../tests/{find_test(name).name})"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
