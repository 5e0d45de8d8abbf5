"""Write the terminal output: a header, progress, a word for each case, the closing table."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from ..kernels.cross_compile import NOT_CHECKED
from ..results.curves import curves
from ..results.export import page_labels
from ..results.messages import Json
from ..results.notes import unchanged_code
from ..results.row import (
    LETTERS,
    Row,
    bare,
    claim_text,
    duration,
    rerun_command,
    size_text,
)
from ..results.verdict import DISTURBED, INVALID_RUN, RED
from ..worker.client import ReplayWorker
from .options import Settings
from .unused_results import missing_files

if TYPE_CHECKING:
    import pytest
    from _pytest.terminal import TerminalReporter

    from .recorder import Recorder
    from .run_context import RunContext

NAMED = 5
"""The maximum number of cases or sizes in one line."""
CHECK_ONLY = "--aisp-check"
"""The text shown in a check run as the reason why no case is timed."""
COLUMNS: tuple[str, ...] = (
    "page",
    "variant",
    "size",
    "baseline",
    "optimized",
    "speedup [99 %]",
    "limit",
    "bound",
)
COLUMNS += ("claim", "stored", "detects", "verdict")
CHECK_COLUMNS: tuple[str, ...] = ("page", "variant", "size", "checked at", "verdict")
"""The columns of the closing table if nothing was timed."""

Status = tuple[str, str, "tuple[str, Mapping[str, bool]]"]
"""The return type of `pytest_report_teststatus`: category, letter, and word with markup."""


def status(plain: Mapping[str, Json], outcome: str) -> Status | None:
    """Return the category, letter and word of a case's outcome, or None for pytest's defaults."""
    row = Row.of(plain)
    verdict = row.verdict
    if verdict not in LETTERS or (outcome == "skipped" and verdict != DISTURBED):
        return None
    letter, word = LETTERS[verdict]
    if verdict == DISTURBED and outcome == "skipped":
        return DISTURBED, letter, (": ".join([word, *row.reasons[:1]]), {"yellow": True})
    red = outcome == "failed" or verdict in RED
    headline = "" if red and row.value is None else row.headline()
    if verdict == "checked" and (sizes := _checked_at(row, NAMED)):
        headline = f"at {sizes}" + (f"; not timed: {row.need}" if row.need != CHECK_ONLY else "")
    text = f"{word} {headline}" if headline else word
    if red:
        return "failed", letter, (text, {"red": True})
    category = "passed" if verdict == "pass" else verdict
    return category, letter, (text, {"green": True})


def header(run: RunContext) -> list[str]:
    """Return the header lines: the mode, the machine, and notes about peaks and replays."""
    settings, machine = run.settings, run.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    gpus = f" x {len(machine.gpus)}" if len(machine.gpus) > 1 else ""
    here = f"{machine.name}{gpus} ({machine.product}, {machine.arch}) {versions}"
    lines = [f"aisp: {settings.mode} on {here}".rstrip()]
    peaks = settings.baselines / machine.product / "peaks.json"
    if settings.mode == "measure" and not peaks.exists() and run.timer is None:
        lines.append(f"aisp: no peaks stored for {machine.product}: shares of the limit are blank")
    if run.timer is not None:
        lines.append(f"aisp: {_simulated(run.timer['target'])}")
    if isinstance(run.replay, ReplayWorker) and run.replay.dropped:
        lines.append(f"aisp: --aisp-replay={settings.replay}: {run.replay.dropped}")
    return lines


def _simulated(timer: str) -> str:
    """Return a line about a timer that a conftest provides."""
    return f"simulated: the times come from {timer} (pytest_aisp_timer), not from a device"


def show_captured(terminal: TerminalReporter) -> None:
    """With -rP, write the output of green cases. pytest does this only for the verdict `pass`."""
    if terminal.no_summary:
        return
    for verdict, (_, word) in LETTERS.items():
        if verdict != "pass" and verdict not in RED:
            terminal.summary_passes_combined(verdict, word, "P")


def show_summary(terminal: TerminalReporter, recorder: Recorder) -> None:
    """Write the closing table, and the lines below it."""
    rows = recorder.rows
    verbosity = terminal.config.get_verbosity()
    closing = _closing(recorder, rows, verbosity)
    if not rows and not closing:
        return
    terminal.section("aisp")
    lines = _table(rows, verbosity) if rows else []
    lines += [f"curve: {curve}" for curve in curves(rows)]
    if verbosity > 1:
        lines += [f"{row.function}[{row.variant}]: {note}" for row in rows for note in row.notes]
    for line in [*lines, *closing]:
        terminal.write_line(line)


def _closing(recorder: Recorder, rows: Sequence[Row], verbosity: int) -> list[str]:
    """Return the lines below the table."""
    settings = recorder.settings
    lines = [_simulated(timer) for timer in sorted({row.timer for row in rows if row.timer})]
    lines += unchanged_code(rows) if settings.mode == "measure" and not settings.against else []
    lines += _remarks(rows, None if verbosity > 0 else 1)
    if profiled := sum(bool(row.profile) for row in rows):
        choose = "" if settings.artifacts else "; --aisp-artifacts=DIR keeps them elsewhere"
        what = f"profiles ({settings.profile}) of {_cases(profiled)}"
        lines.append(f"{what}: {settings.profiles}{choose}")
    lines += [f"stored: {change}" for change in recorder.changes]
    lines += [f"not stored: {reason}" for reason in recorder.not_stored]
    if settings.timestamped is not None:
        lines.append(f"artifacts: {settings.artifacts}")
    lines += [recorder.left_alone] if recorder.left_alone else []
    lines += [f"NOT STORED: {error}" for error in recorder.errors]
    lines += [f"NO VERDICT: {crash}" for crash in recorder.crashes]
    needs = {row.need for row in rows if row.need and row.verdict in ("checked", "compiled")}
    if needs and settings.check:
        needs = {CHECK_ONLY}  # in a check run, no machine times the cases
    lines += [f"not timed: {need}" for need in sorted(needs)]
    if settings.check and (compiled := sum(row.verdict == "compiled" for row in rows)):
        lines.append(
            f"compiled and not checked: {_cases(compiled)}; CUDA C++ is checked on a GPU"
            " or with the emulator: docs/how-to/check-cuda-without-a-gpu.md"
        )
    lines += _unchecked_promises(rows)
    if any(row.verdict == "new" for row in rows) and settings.update is None:
        lines.append("new cases have no stored result; record them on a quiet machine:")
        lines.append("    pytest --aisp-update-expectations <the same paths>")
    for file in missing_files(rows, settings.root) if settings.update is None else ():
        lines.append(f"{file} is committed but not here, so its cases are new; restore it:")
        lines.append(f"    git checkout -- {shlex.quote(file)}")
    lines += _unused(sorted(recorder.unused))
    for row in rows:
        if row.verdict in ("inconclusive", "stale", DISTURBED):
            causes = [f"cause: {row.cause}"] * bool(row.cause)
            lines += [f"{row.verdict}: {row.key}: {text}" for text in (*row.reasons, *causes)]
    lines += [_no_canary(worker, keys) for worker, keys in recorder.without_canary]
    lines += [f"canary: {canary}" for canary in recorder.canaries if not canary.wrong]
    invalid = recorder.why_invalid()
    lines += [f"{reason} (exit code {INVALID_RUN})" for reason in invalid]
    if unjudged := recorder.not_replayed():
        lines.append(f"NOT REPLAYED (exit code {INVALID_RUN} if no case is red):")
        lines += [f"    {line}" for line in unjudged]
    if disturbed := sum(row.verdict == DISTURBED for row in rows):
        lines.append(
            f"DISTURBED: {disturbed} of {_cases(len(rows))} got no verdict, because something else"
            f" used the machine (exit code {INVALID_RUN} if no case is red). Find out what:"
        )
        lines.append("    aisp machine doctor")
    if invalid and recorder.changes:
        lines.append("this run is invalid, but its results were stored. To restore the old ones:")
        lines.append(f"    git checkout -- {settings.baselines.name}")
    return lines


def _remarks(rows: Sequence[Row], most: int | None) -> list[str]:
    """Return each remark once, after the names of at most `most` cases that have it."""
    keys: dict[str, list[str]] = {}
    for row in rows:
        for remark in row.remarks:
            keys.setdefault(remark, []).append(row.key)
    return [f"{_named(keys[remark], most)}: {remark}" for remark in keys]


def _named(keys: Sequence[str], most: int | None) -> str:
    """Return the first `most` keys, and how many more there are."""
    shown = keys[:most]
    more = len(keys) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _unused(results: Sequence[str]) -> list[str]:
    """Return lines about stored results that no collected case uses."""
    if not results:
        return []
    lines = [f"unused: {result}" for result in results[:NAMED]]
    more = len(results) - NAMED
    return [
        *lines,
        *([f"unused: {more} more"] if more > 0 else []),
        "no case uses these stored results: a page, a test or a size was renamed or removed",
        "Undo that, or record under the new name; then list the results that are left to remove:",
        "    aisp results prune",
    ]


def _cases(count: int) -> str:
    return "1 case" if count == 1 else f"{count} cases"


def _unchecked_promises(rows: Sequence[Row]) -> list[str]:
    """Return the promises about machine code that were not checked, one line per reason."""
    promises: dict[str, set[str]] = {}
    for note in (note for row in rows for note in row.notes if note.startswith(NOT_CHECKED)):
        _, promise, why = note.split(": ", 2)
        promises.setdefault(why, set()).add(promise)
    return [f"{NOT_CHECKED}: {', '.join(sorted(promises[why]))}: {why}" for why in sorted(promises)]


def _no_canary(worker: str, keys: Sequence[str]) -> str:
    """Return a line about an xdist worker that ended before its canary."""
    named = _named(keys, NAMED)
    return f"NO CANARY: worker '{worker}' ended before its canary; its verdicts: {named}"


def _table(rows: Sequence[Row], verbosity: int) -> list[str]:
    """Return the closing table. If nothing was timed, it has fewer columns; -q omits it."""
    labels = page_labels((row.page, row.function) for row in rows)
    several = len({row.product for row in rows}) > 1  # only in a fleet run
    pages = [
        labels[row.page, row.function] + (f"@{row.product}" if several else "") for row in rows
    ]
    if any(row.value is not None for row in rows):
        return table(
            [COLUMNS, *((page, *_cells(row)) for page, row in zip(pages, rows, strict=True))]
        )
    if verbosity < 0:
        return []
    named = NAMED if verbosity == 0 else None
    lines = [
        (
            page,
            row.variant,
            size_text(row.gpus, row.size),
            _checked_at(row, named) or "-",
            row.verdict,
        )
        for page, row in zip(pages, rows, strict=True)
    ]
    return table([CHECK_COLUMNS, *lines])


def _checked_at(row: Row, most: int | None) -> str:
    """Return the first `most` sizes at which the sides were checked, such as ``n=33; n=1001``."""
    replies = [[*reply.get("sizes", ()), *reply.get("searched", ())] for reply in row.checks]
    sizes = list(dict.fromkeys(size for found in replies for size in found))
    more = 0 if most is None else len(sizes) - most
    return "; ".join(sizes[:most]) + (f"; {more} more" if more > 0 else "")


def _cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a timed case in the closing table, without the first column."""
    seconds = [duration(s) for s in row.pair_seconds()] or ["-", "-"]
    speed = "-"
    if row.value is not None and row.low is not None and row.high is not None:
        speed = f"{bare(row.value)}x [{bare(row.low)}, {bare(row.high)}]"
    return (
        row.variant,
        size_text(row.gpus, row.size),
        *seconds,
        speed,
        "-" if row.share is None else f"{row.share:.0%} {row.limit}",
        row.bound,
        claim_text(row.claim, row.versus),
        "-" if row.stored is None else f"{bare(row.stored)}x",
        "-" if row.detectable is None else f"{1 - math.exp(-row.detectable):.1%}",
        row.verdict,
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with aligned columns. The first row is the heading."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    return [lines[0], "  ".join("-" * w for w in widths), *lines[1:]]


def rerun_commands(settings: Settings, case: str, seed: int = 0) -> list[str]:
    """Return the command that runs `case` again in this mode. A `seed` of 0 is left out."""
    plain: dict[str, Json] = msgspec.to_builtins(settings, enc_hook=str)
    return ["reproduce:", f"    {rerun_command(case, plain, seed)}"]


def accept_commands(case: str, *, stored: bool) -> list[str]:
    """Return the command that stores the result of `case`. If `stored`, it replaces an old one."""
    how = "=all" if stored else ""
    return ["accept:", f"    pytest --aisp-update-expectations{how} {shlex.quote(case)}"]


class LiveProgress:
    """A pytest plugin. With -v, it shows the current measurement on the case's line."""

    def __init__(self, config: pytest.Config, run: RunContext) -> None:
        self._config, self._run, self._nodeid = config, run, ""
        self._terminal: TerminalReporter | None = None

    def pytest_sessionstart(self) -> None:
        # pytest registers its reporter after it has configured the plugins, so look it up now.
        self._terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if self._terminal:
            self._run.announce = self._announce
        if self._terminal and self._terminal.isatty and self._config.get_verbosity() > 0:
            self._run.progress = self._show

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._nodeid = nodeid

    def _announce(self, text: str) -> None:
        """Show why the run waits, on the case's line or on a separate line."""
        if self._run.progress == self._show:
            return self._show(text)
        terminal = self._terminal
        assert terminal is not None
        capture = self._config.pluginmanager.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            terminal.ensure_newline()
            terminal.write_line(f"{self._nodeid}: {text}")
            terminal.flush()

    def _show(self, text: str) -> None:
        terminal = self._terminal
        assert terminal is not None
        capture = self._config.pluginmanager.get_plugin("capturemanager")
        width = terminal._tw.fullwidth - 1
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            terminal.rewrite(f"{self._nodeid} {text}"[:width], erase=True)
            if not text:  # pytest will write the verdict directly after the name
                terminal.rewrite(f"{self._nodeid} ")
                # pytest places its percentage after this text. The progress text is already erased.
                terminal._tw._current_line = f"{self._nodeid} "
            terminal.flush()
