"""The table of lies and protections, from the exploits that the tests run.

python tests/validity.py          writes docs/validity.md
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_aisp.protections import PROTECTIONS

ROOT = Path(__file__).parents[1]
EXPLOITS = ROOT / "tests" / "exploits"
DOCUMENT = ROOT / "docs" / "validity.md"
INTRODUCTION = """
Each protection has a name, and for each there are lies: small pages in `tests/exploits` whose
optimized side cheats. `tests/exploits_test.py` shows of every lie that each of the protections it
names catches it with the others switched off, and that it is believed with all of them off.
{lies} lies, {protections} protections, all on a CPU: lies that need a GPU (streams, graphs, a warm
L2, throttling) are not here yet.

A process that times a page's code is no proof against an author who attacks the harness itself;
these are the mistakes and the shortcuts. This page is written by `python tests/validity.py`, and a
test holds it to the files.
"""


@dataclass(frozen=True)
class Exploit:
    """One lie.

    Attributes:
        title: the lie in a sentence.
        protections: those that catch it, each alone.
        stage: ``check`` or ``time``: where it is caught.
        rule: the page's own tolerance, as keywords of `numerics.Rule`.
        breaks: whether without its protections the comparison ends in an error, not in belief.
    """

    path: Path
    title: str
    protections: tuple[str, ...]
    stage: str
    rule: Mapping[str, Any]
    breaks: bool

    @property
    def name(self) -> str:
        return self.path.stem


def exploits() -> list[Exploit]:
    """Return every exploit of `tests/exploits`, by name."""
    paths = sorted(EXPLOITS.glob("*.py"))
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
        path, " ".join(title.split()), protections, said["Stage"], rule, "Without it" in said
    )


def document() -> str:
    """Return docs/validity.md."""
    lies = exploits()
    intro = INTRODUCTION.format(lies=len(lies), protections=len(PROTECTIONS))
    lines = ["# What is refused, and how that is known", "", *intro.strip().splitlines(), ""]
    for name, meaning in PROTECTIONS.items():
        mine = [lie for lie in lies if name in lie.protections]
        lines += [f"## {name}", "", f"{meaning[0].upper()}{meaning[1:]}.", ""]
        if not mine:
            lines += ["No lie of its own yet.", ""]
            continue
        lines += ["| lie | caught when |", "| --- | --- |"]
        for lie in mine:
            link = f"[{lie.name}](../tests/exploits/{lie.name}.py)"
            when = {"check": "checked", "time": "timed"}[lie.stage]
            lines.append(f"| {link}: {lie.title} | {when} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
