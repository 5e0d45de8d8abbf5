"""What the terminal shows: a word a case, a header, the closing table."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..kernels.assemble import NOT_CHECKED
from ..results.row import LETTERS, Row, bare, duration, size_text
from ..results.verdict import INVALID_RUN, RED
from ..worker.client import ReplayWorker
from .canary import Canary
from .options import Settings

if TYPE_CHECKING:
    from .options import Settings
    from .recorder import Recorder
    from .run_context import RunContext


NAMED = 5
"""Cases that a line names."""
COLUMNS: tuple[str, ...] = (
    "page",
    "variant",
    "size",
    "baseline",
    "optimized",
    "speedup [99 %]",
    "limit",
)
COLUMNS += ("bound", "claim", "stored", "detects", "verdict")


def status(row: Mapping[str, Any], outcome: str) -> tuple[str, str, Any] | None:
    """Return pytest's category, letter and word of a case."""
    verdict = row["verdict"]
    if outcome == "skipped" or verdict not in LETTERS:
        return None
    letter, word = LETTERS[verdict]
    red = outcome == "failed" or verdict in RED
    headline = "" if red and row["value"] is None else Row(**row).headline()
    verbose = f"{word} {headline}" if headline else word
    if red:
        return "failed", letter, (verbose, {"red": True})
    category = {"pass": "passed"}.get(verdict, verdict)
    return category, letter, (verbose, {"green": True})


def header(run: RunContext) -> list[str]:
    """Return the header: machine, mode, limits."""
    settings, machine = run.settings, run.machine
    mode = settings.mode
    versions = ", ".join(f"{k} {v}" for k, v in machine.versions.items())
    gpus = f" x {len(machine.gpus)}" if len(machine.gpus) > 1 else ""
    lines = [f"aisp: {mode} on {machine.name}{gpus} ({machine.product}, {machine.arch}) {versions}"]
    peaks = settings.baselines / machine.product / "peaks.json"
    if mode == "measure" and not peaks.exists() and run.timer is None:
        lines.append(f"aisp: no peaks stored for {machine.product}: shares of the limit are blank")
    if isinstance(run.replay, ReplayWorker) and run.replay.dropped:
        lines.append(f"aisp: --aisp-replay={settings.replay}: {run.replay.dropped}")
    return [line.rstrip() for line in lines]


def captured(terminal: Any) -> None:
    """Write what green cases have printed, with -rP; pytest knows of those that `pass` alone."""
    if terminal.no_summary:
        return
    for verdict, (_, word) in LETTERS.items():
        if verdict != "pass" and verdict not in RED:
            terminal.summary_passes_combined(verdict, word, "P")


def summary(terminal: Any, recorder: Recorder) -> None:
    """Write the closing table and what the run changed."""
    rows = [Row(**row) for row in recorder.rows]
    closing = _closing(recorder, rows)
    if not rows and not closing:
        return
    terminal.section("aisp")
    for line in table([COLUMNS, *(cells(row) for row in rows)]) if rows else []:
        terminal.write_line(line)
    for row in rows:
        for note in row.notes if terminal.config.get_verbosity() > 1 else []:
            terminal.write_line(f"{row.function}[{row.variant}]: {note}")
    for line in closing:
        terminal.write_line(line)


def _closing(recorder: Recorder, rows: Sequence[Row]) -> list[str]:
    lines = [f"{row.key}: {remark}" for row in rows for remark in row.remarks]
    lines += _profiles(recorder.settings, rows)
    lines += [f"stored: {change}" for change in recorder.changes]
    lines += [f"not stored: {kept}" for kept in recorder.kept]
    if recorder.settings.timestamped is not None:
        lines.append(f"artifacts: {recorder.settings.artifacts}")
    lines += [recorder.left] if recorder.left else []
    lines += [f"NOT STORED: {error}" for error in recorder.errors]
    lines += [f"NO VERDICT: {crash}" for crash in recorder.crashes]
    needs = {row.need for row in rows if row.need and row.verdict in ("checked", "compiled")}
    if needs and recorder.settings.check:
        needs = {"--aisp-check"}  # nor would it be on a machine with all that it lacks here
    lines += [f"not timed: {need}" for need in sorted(needs)]
    if recorder.settings.check and (built := sum(row.verdict == "compiled" for row in rows)):
        cases = "1 case" if built == 1 else f"{built} cases"
        lines.append(f"not proved, only assembled: {cases}; CUDA C++ is compared on a GPU alone")
    lines += _unseen(rows)
    if any(row.verdict == "new" for row in rows) and recorder.settings.update is None:
        lines.append("new cases have no stored result; record them on a quiet machine:")
        lines.append("    pytest --aisp-update-expectations <the same paths>")
    for row in rows:
        if row.verdict in ("inconclusive", "stale"):
            lines += [f"{row.verdict}: {row.key}: {reason}" for reason in row.reasons]
    lines += [_unguarded(*found) for found in recorder.unguarded]
    lines += [f"canary: {Canary(**found)}" for found in recorder.canaries if not found["wrong"]]
    invalid = recorder.why_invalid()
    lines += [f"{why} (exit code {INVALID_RUN})" for why in invalid]
    if invalid and recorder.changes:
        lines.append("what this run stored was measured on a disturbed machine: take it back")
        lines.append(f"    git checkout -- {recorder.settings.baselines.name}")
    return lines


def _unseen(rows: Sequence[Row]) -> list[str]:
    """Say which promises machine code was not searched for, once for each reason."""
    promises: dict[str, set[str]] = {}
    for note in (note for row in rows for note in row.notes if note.startswith(NOT_CHECKED)):
        _, promise, why = note.split(": ", 2)
        promises.setdefault(why, set()).add(promise)
    return [f"{NOT_CHECKED}: {', '.join(sorted(promises[why]))}: {why}" for why in sorted(promises)]


def _unguarded(worker: str, keys: Sequence[str]) -> str:
    """Say which verdicts stand although nothing was held against their process at its end."""
    more = len(keys) - NAMED
    named = ", ".join(keys[:NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"NO CANARY: worker '{worker}' ended before its own; unguarded are its verdicts: {named}"


def _profiles(settings: Settings, rows: Sequence[Row]) -> list[str]:
    """Say where the run's profiles are."""
    count = sum(bool(row.profile) for row in rows)
    if not count:
        return []
    choose = "" if settings.artifacts else "; --aisp-artifacts=DIR keeps them elsewhere"
    cases = "1 case" if count == 1 else f"{count} cases"
    return [f"profiles ({settings.profile}) of {cases}: {settings.profiles}{choose}"]


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the closing table."""
    size = size_text(row.gpus, row.size)
    seconds = [duration(s) for s in row.pair_seconds()] or ["-", "-"]
    speed = "-"
    if row.value is not None and row.low is not None and row.high is not None:
        speed = f"{bare(row.value)}x [{bare(row.low)}, {bare(row.high)}]"
    return (
        row.page.rpartition("/")[2].removesuffix("_test.py"),
        row.variant,
        size,
        *seconds,
        speed,
        "-" if row.share is None else f"{row.share:.0%} {row.limit}",
        row.bound,
        "-" if row.claim is None else str(row.claim),
        "-" if row.stored is None else f"{bare(row.stored)}x",
        "-" if row.detectable is None else f"{1 - math.exp(-row.detectable):.1%}",
        row.verdict,
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows with their columns aligned, the first one as a heading."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    return [lines[0], "  ".join("-" * w for w in widths), *lines[1:]]


def rerun_commands(settings: Settings, case: str, seed: int = 0) -> list[str]:
    """Return how to run `case` again, in this mode, on the values of `seed`.

    0 is the seed of a task that draws none, and of a reproducible run.
    """
    values = {
        "--aisp-check": "" if settings.check and not settings.sanitize else None,
        "--aisp-sanitize": settings.sanitize or None,
        "--aisp-aa": "" if settings.aa else None,
        "--aisp-compile": ",".join(settings.compile) or None,
        "--aisp-against": settings.against,
        "--aisp-untrusted": "" if settings.untrusted else None,
        "--aisp-reproducible": "" if settings.reproducible else None,
        "--aisp-seed": f"{seed}" if seed and not settings.compile else None,
    }
    given = [f"{k}={shlex.quote(v)}" if v else k for k, v in values.items() if v is not None]
    return ["reproduce:", " ".join([f"    pytest {shlex.quote(case)}", *given])]


def accept_commands(case: str, *, stored: bool) -> list[str]:
    """Return how to store what was measured of `case`, in place of what is `stored`."""
    how = "=all" if stored else ""
    return ["accept:", f"    pytest --aisp-update-expectations{how} {shlex.quote(case)}"]
