"""The table of lies and protections, from the exploits that the tests run.

python tests/validity.py          writes docs/reference/validity.md
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ledger
from ledger import Item

from pytest_aisp.isolation.protections import PROTECTIONS

ROOT = Path(__file__).parents[1]
EXPLOITS = ROOT / "tests" / "exploits"
DOCUMENT = ROOT / "docs/reference/validity.md"
INTRODUCTION = """
Each protection has a name. For each there are exploits: small pages in `tests/exploits` whose
optimized side cheats. `tests/exploits_test.py` runs every exploit with only one of its protections
on, which must catch it, and with all of them off, which must let it pass.
{lies} exploits, {protections} protections. {gpu} exploits need a GPU and are skipped without one.

The protections run in the process that runs the side. They stop mistakes and shortcuts, not a side
that attacks the harness itself. `--aisp-untrusted` is for attacks
([how a result is checked](../explanation/checking.md)).

Two public checklists follow the protections:
[40 lies of public benchmarks](#40-lies-of-public-benchmarks) and
[95 validity issues](#95-validity-issues).

`python tests/validity.py` writes this page, and a test compares it with the files.
"""
LEDGER = """
The tables say what catches each item here, and which test shows it. A script fills them in:

- **caught**: the tests in the last column show it, and we know of no gap;
- **in part**: the tests show some of it. The gap follows *Open*;
- **by design**: there is nothing to catch, for the reason given;
- **open**: not shown, or not done.
"""
WHEN = {"check": "checked", "time": "timed"}
WHEN_OF = {  # by test file: what its tests are about; the exploits say it themselves
    **dict.fromkeys(("page_mutants_test", "numerics_test", "check_test"), "checked"),
    **dict.fromkeys(("exploits_test", "inputs_test", "cross_check_test"), "timed"),
    **dict.fromkeys(("cuda_timer_test", "interference_test"), "timed"),
    **dict.fromkeys(("l2_test", "device_test", "untrusted_test"), "timed"),
    **dict.fromkeys(("cuda_timer_test", "cuda_graph_test", "trial_test"), "timed"),
    **dict.fromkeys(
        ("canary_test", "decision_test", "declare_test", "modes_test", "peaks_test"), "judged"
    ),
    **dict.fromkeys(("ranks_test",), "timed"),
    "remarks_test": "judged",
    **dict.fromkeys(("cuda_faults_test", "faults_test", "session_test", "terminal_test"), "run"),
    **dict.fromkeys(("versions_test", "store_test", "autotune_test"), "stored"),
}


@dataclass(frozen=True)
class Exploit:
    """One lie.

    Attributes:
        title: the lie in a sentence.
        protections: those that catch it, each alone.
        stage: ``check`` or ``time``: where it is caught.
        rule: the page's own tolerance, as keywords of `numerics.Rule`.
        breaks: whether without its protections the comparison ends in an error, not in belief.
        device: ``cpu``, or ``cuda`` for what only a GPU can show.
    """

    path: Path
    title: str
    protections: tuple[str, ...]
    stage: str
    rule: Mapping[str, Any]
    breaks: bool
    device: str

    @property
    def name(self) -> str:
        return self.path.stem


def exploits() -> list[Exploit]:
    """Return every exploit of `tests/exploits`, by name."""
    paths = [*sorted(EXPLOITS.glob("*.py")), *sorted(EXPLOITS.glob("gpu/*.py"))]
    return [_read(path) for path in paths if path.stem != "honest"]


def _read(path: Path) -> Exploit:
    module = ast.parse(path.read_text())
    title, _, rest = (ast.get_docstring(module) or "").partition("\n\n")
    said = dict(line.split(": ", 1) for line in rest.splitlines() if ": " in line)
    rules = [
        n for n in module.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "RULE"
    ]
    rule = ast.literal_eval(rules[0].value) if rules else {}
    protections = tuple(name.strip() for name in said["Protection"].split(","))
    return Exploit(
        path=path,
        title=" ".join(title.split()),
        protections=protections,
        stage=said["Stage"],
        rule=rule,
        breaks="Without it" in said,
        device="cuda" if path.parent.name == "gpu" else "cpu",
    )


def document() -> str:
    """Return docs/reference/validity.md."""
    lies = exploits()
    on_gpu = sum(lie.device == "cuda" for lie in lies)
    intro = INTRODUCTION.format(lies=len(lies), protections=len(PROTECTIONS), gpu=on_gpu)
    lines = ["# Cheats and protections", "", *intro.strip().splitlines(), ""]
    for name, meaning in PROTECTIONS.items():
        mine = [lie for lie in lies if name in lie.protections]
        lines += [f"## {name}", "", f"{meaning[0].upper()}{meaning[1:]}.", ""]
        lines += [*_lies_table(mine), ""] if mine else [ledger.SECOND_LINES[name], ""]
    lines += ["## 40 lies of public benchmarks", "", *LEDGER.strip().splitlines(), ""]
    lines += [*_ledger(ledger.PEERS), ""]
    issues = [item for items in ledger.VALIDITY.values() for item in items]
    names = [name for name, items in ledger.VALIDITY.items() for _ in items]
    lines += ["## 95 validity issues", "", *_ledger(issues, names)]
    return "\n".join(lines).rstrip() + "\n"


def _lies_table(lies: Sequence[Exploit]) -> Iterator[str]:
    yield "| exploit | caught when |"
    yield "| --- | --- |"
    for lie in lies:
        on_gpu = " on a GPU" if lie.device == "cuda" else ""
        yield f"| {_link(lie)}: {lie.title} | {WHEN[lie.stage]}{on_gpu} |"


def _ledger(items: Sequence[Item], names: Sequence[str] = ()) -> Iterator[str]:
    states = Counter(item.state for item in items)
    counts = (f"{states[state]} {state}" for state in ("caught", "in part", "by design", "open"))
    yield f"Of {len(items)}: {', '.join(counts)}."
    yield ""
    first = "category" if names else "number"
    yield f"| {first} | lie | state | what catches it | when | shown by |"
    yield "| --- | --- | --- | --- | --- | --- |"
    known = {lie.name: lie for lie in exploits()}
    for number, item in enumerate(items):
        name = names[number] if names else number + 1
        mine = [known[e] for e in item.exploits.split()]
        when = {WHEN[lie.stage] for lie in mine}
        when |= {WHEN_OF[test.partition(".")[0]] for test in item.tests.split()}
        shown = [_link(lie) for lie in mine] + [_test(t) for t in item.tests.split()]
        cells = (
            name,
            item.lie,
            item.state,
            _what(item, mine),
            ", ".join(sorted(when)),
            ", ".join(shown),
        )
        yield f"| {' | '.join(map(str, cells))} |"


def _what(item: Item, lies: Sequence[Exploit]) -> str:
    """Return the protections that catch the exploits, what else does, and what is open."""
    named = {name for lie in lies for name in lie.protections}
    parts = [", ".join(f"`{p}`" for p in PROTECTIONS if p in named), item.why]
    parts += [f"*Open:* {item.open}"] if item.open else []
    return ". ".join(part[0].upper() + part[1:] for part in parts if part)


def _link(exploit: Exploit) -> str:
    return f"[{exploit.name}](../../{exploit.path.relative_to(ROOT).as_posix()})"


def _test(name: str) -> str:
    file, _, function = name.partition("::")
    words = function.removeprefix("test_").replace("_", " ")
    return f"[{words}](../../tests/{file})"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
