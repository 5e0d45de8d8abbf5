"""The history of cases over runs: `HISTORY/<product>/<chapter>.jsonl`, one line per case and run.

Lines are only appended. A crash can leave the last line half written. When the next run is added,
the half-written line is moved to a file next to the history. Other unusable lines stay in the file
and are reported each time the file is read.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedRandom
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from .export import case as exported
from .messages import Json
from .models import base_of, differences
from .row import JournalLine
from .run_reader import MANIFEST, RecordedRun, RunError
from .stats import FLOOR, INTERVAL
from .verdict import VOTE

SUFFIX = ".jsonl"
BROKEN = ".broken"
"""The suffix of the file to which half-written lines are moved."""
SCHEMA: Literal[1] = 1
COMMIT = re.compile(r"[0-9a-f]{7,40}")
Finite = Annotated[float, Meta(ge=-50, le=50)]
FileName = Annotated[str, Meta(pattern=r"\A(?!\.)[^/\0]+\Z")]


class CodeGate(Struct, frozen=True, kw_only=True):
    """A direct comparison, in one run, of changed sides with their versions at another commit.

    Attributes:
        commit: the other commit, as given to ``--aisp-against``.
        values: ln(old time / new time) from each process, by changed side. The first measurement
            comes first, and the repeated ones (votes) follow.
        spread: the standard deviation of one process's value.
    """

    commit: str
    values: dict[str, Annotated[list[Finite], Meta(min_length=1)]]
    spread: Annotated[float, Meta(gt=0)]

    @property
    def effect(self) -> float:
        """The change in ln(speedup) that the changes to both sides cause together."""
        sides = {side: fmean(each[1:] or each) for side, each in self.values.items()}
        return sides.get("optimized", 0.0) - sides.get("baseline", 0.0)

    def confirms(self, change: float) -> bool:
        """Return whether the effect has the same sign as `change` and is larger than the noise."""
        return self.effect * change > 0 and abs(self.effect) > VOTE * self.spread


class HistoryLine(Struct, frozen=True, kw_only=True):
    """The result of one case in one run.

    Attributes:
        run: 12 hex digits that identify the run, wherever its folder is.
        started: when the run started, in UTC.
        commit, dirty: the run's commit, if known, and whether tracked files differed from it.
        case, id: the key of the case's stored result, and pytest's id of the case.
        value, error: ln(speedup) and its standard error.
        session: the standard deviation between sessions, or 0 if the run did not save it.
        environment: facts that the result depends on, such as the driver's version.
        sources: digests of the sources of both sides.
        code_gate: the comparison by ``--aisp-against`` in this run, or None.
    """

    schema: Literal[1] = SCHEMA
    run: Annotated[str, Meta(pattern=r"\A[0-9a-f]{12}\Z")]
    started: str
    commit: str = ""
    dirty: bool = False
    product: FileName
    chapter: FileName
    case: str
    id: str
    clock: str
    verdict: str = ""
    value: Finite
    error: Annotated[float, Meta(gt=0, le=50)]
    session: Annotated[float, Meta(ge=0, le=50)] = 0.0
    environment: dict[str, Json] = {}
    sources: dict[str, str] = {}
    code_gate: CodeGate | None = None

    def differences(self, before: HistoryLine) -> list[str]:
        """Return a message for each fact of the environment that differs from an earlier line.

        Changed sources are listed by `changed_sides` instead.
        """
        several = base_of(self.product) != self.product
        then, now = before.environment, self.environment
        names = differences(then, now, self.clock, several=several)
        clock = [f"clock {before.clock} -> {self.clock}"] if before.clock != self.clock else []
        return clock + [f"{name} {then.get(name)} -> {now.get(name)}" for name in names]

    def changed_sides(self, before: HistoryLine) -> list[str]:
        """Return the sides whose source differs from the source in an earlier line."""
        roles = ("baseline", "optimized")
        return [role for role in roles if self.sources.get(role) != before.sources.get(role)]


@dataclass
class HistoryFile:
    """The usable lines of one file, and messages about the lines that cannot be used.

    Attributes:
        torn: the half-written last line, or empty. `problems` does not list this line.
        length: the number of lines in the file.
    """

    path: Path
    lines: list[HistoryLine] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    torn: bytes = b""
    length: int = 0

    @property
    def all_problems(self) -> list[str]:
        """The messages of `problems`, and a message about a half-written last line."""
        half = f"{self.path}:{self.length}: the last line{_of(self.torn)} is half written"
        return [*self.problems, half] if self.torn else self.problems

    def by_case(self) -> dict[str, list[HistoryLine]]:
        """Return the lines of each case, the oldest first, sorted by the case."""
        found: dict[str, list[HistoryLine]] = {}
        for line in self.lines:
            found.setdefault(line.case, []).append(line)
        return dict(sorted(found.items()))


@dataclass
class Added:
    """The lines that `add` wrote, the lines that already existed, and messages about errors."""

    new: int = 0
    known: int = 0
    repaired: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def lines_of(run: RecordedRun) -> Iterator[HistoryLine]:
    """Yield a line for each timed case of a run.

    Raises:
        RunError: if samples of a comparison with a commit cannot be read, or if a case has an
            impossible value.
    """
    manifest, git = run.manifest, run.manifest.git
    machine = manifest.machine
    identity = [manifest.started, machine.name, machine.gpus, git and git.commit]
    name = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]
    against = manifest.options.get("against")
    for line in run.lines:
        if line.value is None or line.low is None or line.high is None:
            continue
        case = exported(line, manifest.root)
        gate = _code_gate(run, line, against) if isinstance(against, str) else None
        plain = {
            "run": name,
            "started": manifest.started,
            "commit": (git and git.commit) or "",
            "dirty": bool(git and git.dirty),
            "product": line.product,
            "chapter": case.chapter,
            "case": line.key,
            "id": line.nodeid,
            "clock": line.clock,
            "verdict": line.verdict,
            "value": line.value,
            "error": (line.high - line.low) / 2 / INTERVAL or FLOOR,
            "session": line.session or 0.0,
            "environment": line.environment,
            "sources": line.sources,
            "code_gate": msgspec.to_builtins(gate),
        }
        try:
            yield msgspec.convert(plain, HistoryLine)
        except ValueError as error:
            raise RunError(
                f"{run.path}: {line.nodeid}: a value that no run writes: {error}"
            ) from None


def _code_gate(run: RecordedRun, line: JournalLine, commit: str) -> CodeGate | None:
    plain = msgspec.to_builtins(exported(line, run.manifest.root))
    values: dict[str, list[float]] = {side: [0.0] for side in line.unchanged}
    for reply in run.samples(plain)["against"]:
        side, value = msgspec.convert((reply["side"], reply["value"]), tuple[str, float])
        values.setdefault(side, []).append(value)
    spread = max(line.spread or 0.0, FLOOR)
    return CodeGate(commit=commit, values=values, spread=spread) if values else None


def add(folder: Path, lines: Iterable[HistoryLine]) -> Added:
    """Append the `lines` that the history in `folder` lacks.

    Several processes may add at the same time. A file gets all its new lines in one write.

    Raises:
        OSError: if a file cannot be read or written. A failed write may leave half a line.
    """
    by_file: dict[Path, list[HistoryLine]] = {}
    for line in lines:
        path = folder / line.product / f"{line.chapter}{SUFFIX}"
        by_file.setdefault(path, []).append(line)
    done = Added()
    for path, new in sorted(by_file.items()):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path) as file:
            data = file.read()
            present = parse(path, data)
            if present.torn:
                done.repaired.append(_move_torn(path, file, len(data) - len(present.torn), present))
            elif data and not data.endswith(b"\n"):  # complete, except for the newline
                file.write(b"\n")
            known = {(line.run, line.case) for line in present.lines}
            missing = [line for line in new if (line.run, line.case) not in known]
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in missing))
            file.flush()
            os.fsync(file.fileno())
        done.new += len(missing)
        done.known += len(new) - len(missing)
        done.problems += present.problems
    return done


@contextmanager
def _locked(path: Path) -> Iterator[BufferedRandom]:
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


def _move_torn(path: Path, file: BufferedRandom, end: int, present: HistoryFile) -> str:
    """Move a half-written last line to a file next to the history. Return a message about it."""
    aside = path.with_name(path.name + BROKEN)
    with open(aside, "ab") as other:
        other.write(present.torn + b"\n")
        other.flush()
        os.fsync(other.fileno())
    file.truncate(end)
    return (
        f"{path}: its last line{_of(present.torn)} was half written and is now in {aside.name};"
        " add its run again"
    )


def _of(line: bytes) -> str:
    case = re.search(rb'"case": ?"((?:[^"\\]|\\.)*)"', line)
    return f", of {case[1].decode(errors='replace')}," if case else ""


def read(folder: Path) -> list[HistoryFile]:
    """Return all files of the history in `folder`.

    Raises:
        OSError: if a file cannot be read.
    """
    files = sorted(folder.glob(f"*/*{SUFFIX}"))
    return [parse(path, path.read_bytes()) for path in files]


def is_history(folder: Path) -> bool:
    """Return whether `folder` has history files but no run."""
    return not (folder / MANIFEST).exists() and any(folder.glob(f"*/*{SUFFIX}"))


def parse(path: Path, data: bytes) -> HistoryFile:
    """Return the lines in `data`, which are the contents of the file `path`."""
    *whole, last = data.split(b"\n")
    found, seen = HistoryFile(path, length=len(whole) + bool(last)), set[tuple[str, str]]()
    repeated: list[int] = []
    elsewhere: dict[str, list[int]] = {}
    for number, text in enumerate([*whole, last], start=1):
        if not text.strip():
            continue
        try:
            line = _decoded(text)
        except (ValueError, RecursionError) as error:
            if number > len(whole):
                found.torn = text
            else:
                found.problems.append(f"{path}:{number}: is not a line of a history: {error}")
            continue
        if (line.product, line.chapter) != (path.parent.name, path.name.removesuffix(SUFFIX)):
            elsewhere.setdefault(f"{line.product}/{line.chapter}", []).append(number)
        elif (line.run, line.case) in seen:
            repeated.append(number)
        else:
            seen.add((line.run, line.case))
            found.lines.append(line)
    for name, numbers in elsewhere.items():
        home = path.parent.parent / f"{name}{SUFFIX}"
        found.problems.append(f"{path}: {_listed(numbers)} of {name}; move them to {home}")
    if repeated:
        found.problems.append(f"{path}: {_listed(repeated)} there twice; remove them")
    found.lines.sort(key=lambda line: line.started)
    return found


def _decoded(text: bytes) -> HistoryLine:
    plain = json.loads(text)
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise ValueError(f"a newer pytest-aisp wrote it (schema {schema}; this one reads {SCHEMA})")
    return msgspec.convert(plain, HistoryLine)


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"line {numbers[0]} is"
    shown = ", ".join(map(str, numbers[:5]))
    return f"lines {shown}{', ...' if len(numbers) > 5 else ''} ({len(numbers)} lines) are"


def code_gate_between(
    lines: Iterable[HistoryLine], old: HistoryLine, new: HistoryLine
) -> CodeGate | None:
    """Return the direct comparison of the commits of two lines, or None if no run compared them."""
    for line in lines:
        gate = line.code_gate
        if gate is None or line.commit != new.commit or line.dirty:
            continue
        if COMMIT.fullmatch(gate.commit) and old.commit.startswith(gate.commit):
            return gate
    return None
