"""What is found out about a machine: a fact, whether it is well, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..common.answers import columns

WORDS = {
    "fine": "fine",
    "note": "note",
    "harms": "HARMS",
    "unread": "?",
}
"""`note` may cost something, or somebody; `harms` makes measurements wrong or spread; `unread` is
what this machine does not say."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        state: of `WORDS`.
        said: what it is; change: what to do where it is not fine, the command last.
    """

    name: str
    state: str
    said: str
    change: str = ""


def unread(name: str, why: str) -> Finding:
    """Return the finding of what could not be read."""
    return Finding(name, "unread", why)


def words(findings: Sequence[Finding]) -> list[str]:
    """Return a line a finding; what to change stands below it."""
    lines = columns([(WORDS[f.state], f.name, f.said) for f in findings])
    out = []
    for line, finding in zip(lines, findings, strict=True):
        out += [line, *(f"         {change}" for change in finding.change.splitlines())]
    return out
