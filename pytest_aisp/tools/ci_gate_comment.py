"""The comment of `aisp ci gate` on a pull request: Markdown, and an SVG plot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..results.export import page_labels
from ..results.row import JournalLine, bare, ratio, rerun_command, size_text
from ..results.run_reader import replace
from ..results.verdict import LOOK, ORDER, RED
from ..util import svg
from ..util.cli_result import CliError
from .ci_gate_runs import Gate, GateRun

TITLE = "Performance gate"
MARKER = "<!-- aisp gate -->"
"""The first line of the comment. A CI job finds its earlier comment by this line."""
LIMIT = 60_000
"""The maximum number of characters. GitHub allows 65,536, and a CI job adds a link."""
LONGEST, LONGEST_COMMAND = 300, 600
"""The maximum lengths of a text and of a command in a table cell."""
RUN_HEADS = ("run", "products", "cases", "verdict")
CASE_HEADS = ("product", "case", "speedup over stored [99 %]", "verdict", "cause", "why", "repeat")

PLOTTED = 40
"""The maximum number of cases in the plot."""
WIDTH, LEFT, RIGHT, TOP, STEP = 1000, 460, 980, 72, 20
FARTHEST = math.log(2)
"""The largest change that the plot shows. Intervals are cut off there."""
COLORS = {word: "#cf222e" for word in RED} | {word: "#bc4c00" for word in set(LOOK) - set(RED)}


class Line(NamedTuple):
    """A case of a valid run, and the label of its page."""

    run: GateRun
    case: JournalLine
    page: str

    @property
    def label(self) -> str:
        """Return a string such as ``gemm: tiled, n=4096``."""
        size = size_text(self.case.gpus, self.case.size)
        return f"{self.page}: {self.case.variant}" + (f", {size}" if size else "")

    @property
    def change(self) -> tuple[float, float, float] | None:
        """Return ln(speedup over stored) with its interval, or None if there is none."""
        one = self.case
        if one.value is None or one.low is None or one.high is None or one.stored is None:
            return None
        found = (one.value - one.stored, one.low - one.stored, one.high - one.stored)
        return found if all(map(math.isfinite, found)) else None


def why(case: JournalLine) -> str:
    """Return the reasons for the verdict of a case."""
    return "; ".join(case.reasons) or "see its log"


def write(gate: Gate, file: Path) -> list[str]:
    """Write the comment to `file`, and the plot next to it. Return a line that names both files.

    Raises:
        CliError: if `file` cannot be written, or ends in ``.svg`` like the plot.
    """
    if not file.name or file.suffix == ".svg":
        raise CliError(f"--comment={file}: name a file of Markdown, such as gate-comment.md")
    drawn = file.with_suffix(".svg")
    for path, text in ((file, "\n".join(markdown(gate)) + "\n"), (drawn, plot(gate))):
        try:
            replace(path, text.encode())
        except OSError as error:
            raise CliError(f"{path}: cannot be written: {error.strerror}") from None
    return [f"wrote {file} and {drawn}"]


def markdown(gate: Gate) -> list[str]:
    """Return the comment: all runs, then the red cases, then other cases that need attention.

    If the comment reaches `LIMIT` characters, tables end early and state how many rows are missing.
    """
    lines = [MARKER, f"## {TITLE}: {gate.headline}", "", _counts(gate)]
    if gate.unreadable:
        errors = [(code(message.partition("\n")[0]),) for message in gate.unreadable]
        lines += _section("", ("not readable",), errors, "messages", lines)
    runs = [_run_cells(run) for run in gate.runs]
    runs += [("-", code(product), "0", "missing") for product in gate.missing]
    lines += _section("", RUN_HEADS, runs, "runs", lines)
    cases = _lines(gate)
    red = [_case_cells(line) for line in cases if line.case.verdict in RED]
    others = [_case_cells(line) for line in cases if line.case.verdict in set(LOOK) - set(RED)]
    lines += _section("### Red", CASE_HEADS, red, "red cases", lines)
    title = "### Disturbed, stale and inconclusive"
    return lines + _section(title, CASE_HEADS, others, "such cases", lines)


def code(text: str, longest: int = LONGEST) -> str:
    """Return `text` as inline code, in which Markdown, HTML, mentions and links have no effect."""
    line = _one_line(text)
    line = line if len(line) <= longest else f"{line[: longest - 3]}..."
    if not set(line) & set("`|\\"):
        return f"`{line}`" if line else ""
    # Tables split cells at "|" even in code, so these characters become character references.
    escaped = (c if c.isalnum() or c in " .,-" else f"&#{ord(c)};" for c in line)
    return f"<code>{''.join(escaped)}</code>"


def _one_line(text: str) -> str:
    """Return `text` on one line, without invisible characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _section(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    what: str,
    before: Sequence[str],
) -> list[str]:
    """Return a table with its title, cut so that it fits after the lines `before`."""
    if not rows:
        return []
    lines = ["", *([title, ""] if title else [])]
    lines += [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads))]
    room = LIMIT - sum(len(line) + 1 for line in [*before, *lines]) - 100
    for number, row in enumerate(rows):
        line = f"| {' | '.join(row)} |"
        room -= len(line) + 1
        if room < 0:
            return [*lines, "", f"and {len(rows) - number} more {what}"]
        lines.append(line)
    return lines


def _lines(gate: Gate) -> list[Line]:
    """Return the cases of the valid runs, sorted by verdict, then with the largest loss first."""
    found = [(run, case) for run in gate.runs if not run.invalid for case in run.lines]
    labels = page_labels(_test(case) for _, case in found)
    places = {verdict: place for place, verdict in enumerate(ORDER)}

    def order(line: Line) -> tuple[int, float, str]:
        change = line.change
        place = places.get(line.case.verdict, len(ORDER))
        return place, change[0] if change else -math.inf, line.case.nodeid

    return sorted((Line(run, case, labels[_test(case)]) for run, case in found), key=order)


def _test(case: JournalLine) -> tuple[str, str]:
    return case.nodeid.partition("::")[0], case.function


def _counts(gate: Gate) -> str:
    """Return a string such as ``1 red, 2 stale, 5 green (4 pass, 1 new) of 8 cases in 2 runs``."""
    words = Counter(line.case.verdict or "without a verdict" for line in _lines(gate))
    red = sum(words[word] for word in RED)
    parts = [f"{red} red"] if red else []
    rest = ("without a verdict", *LOOK[len(RED) :])
    parts += [f"{words[word]} {word}" for word in rest if words[word]]
    green = {word: words[word] for word in ORDER[len(LOOK) :] if words[word]}
    each = ", ".join(f"{count} {word}" for word, count in green.items())
    parts.append(f"{sum(green.values())} green" + (f" ({each})" if each else ""))
    valid = sum(not run.invalid for run in gate.runs)
    runs = "1 valid run" if valid == 1 else f"{valid} valid runs"
    text = f"{', '.join(parts)} of {words.total()} cases in {runs}"
    commits = sorted({run.commit for run in gate.runs if run.commit})
    return f"{text}, at {', '.join(map(code, commits))}" if commits else text


def _run_cells(run: GateRun) -> tuple[str, ...]:
    status = run.status if run.status == "green" else code(run.status)
    return code(run.folder), code(", ".join(run.products)), str(run.cases), status


def _case_cells(line: Line) -> tuple[str, ...]:
    case = line.case
    cells = (code(case.product), code(line.label), _speedup(line), case.verdict, case.cause or "-")
    return (*cells, code(why(case)), _repeat(line))


def _speedup(line: Line) -> str:
    case, change = line.case, line.change
    if change is not None and case.value is not None and case.stored is not None:
        value, low, high = change
        text = f"{ratio(value)} [{bare(low)}, {bare(high)}]"
        return f"{text} ({ratio(case.value)}, stored {ratio(case.stored)})"
    if case.value is None:
        return "-"
    return f"- ({ratio(case.value)}, {'nothing stored' if case.stored is None else 'no interval'})"


def _repeat(line: Line) -> str:
    """Return the command that reruns the case, or the page if that command cannot be shown.

    A command cannot be shown if it is too long or contains invisible characters. If no command can
    be shown, the result is a dash.
    """
    for test in (line.case.nodeid, line.case.nodeid.partition("::")[0]):
        command = rerun_command(test, line.run.options)
        if command == _one_line(command) and len(command) <= LONGEST_COMMAND:
            return code(command, LONGEST_COMMAND)
    return "-"


def plot(gate: Gate) -> str:
    """Return an SVG with each case's speedup relative to the stored one, on a logarithmic axis."""
    every = [(line, change) for line in _lines(gate) if (change := line.change)]
    shown = every[:PLOTTED]
    reach = max([math.log(1.02), *(abs(value) for _, change in shown for value in change)])
    reach = min(1.1 * reach, FARTHEST)
    bottom = TOP + STEP * len(shown)
    more = len(every) - len(shown)
    parts = [
        *svg.opening(WIDTH, bottom + 60),
        svg.text(16, 28, f"{TITLE}: {gate.headline}", size=18, weight="bold"),
        svg.text(16, 50, "speedup over stored, with its 99 % interval", fill=svg.GRAY),
        *_axis(reach, bottom),
    ]
    for number, (line, change) in enumerate(shown):
        y = TOP + STEP * (number + 0.5)
        parts += _interval(line, [_across(value, reach) for value in change], y)
    note = f"and {more} more cases" if more else "" if every else "no case has a stored result"
    parts.append(svg.text(16, bottom + 44, note, fill=svg.GRAY))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _across(value: float, reach: float) -> float:
    """Return the x coordinate of ln(speedup over stored), limited to the plot's edges."""
    fraction = min(max(value / reach, -1), 1)
    return LEFT + (fraction + 1) / 2 * (RIGHT - LEFT)


def _axis(reach: float, bottom: float) -> Iterator[str]:
    for share in (-1, -0.5, 0, 0.5, 1):
        x = _across(share * reach, reach)
        yield svg.line(x, TOP, x, bottom, svg.GRID if share else svg.INK)
        anchor = "end" if share == 1 else "middle"
        yield svg.text(x, bottom + 18, ratio(share * reach), anchor=anchor, size=12)


def _interval(line: Line, across: Sequence[float], y: float) -> Iterator[str]:
    case, (x, low, high) = line.case, across
    color = COLORS.get(case.verdict, "#1a7f37")
    label = _one_line(f"{case.verdict}  {case.product}  {line.label}")
    label = label if len(label) <= 68 else f"{label[:65]}..."
    yield svg.text(16, y + 4, label, size=12, fill=color)
    yield svg.line(low, y, high, y, color, width=2)
    yield svg.circle(x, y, 3.5, color, color)
