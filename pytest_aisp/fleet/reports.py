"""Emit the reports of nodes as reports of this pytest session."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..results.row import Row
from ..results.verdict import RED
from ..session.options import RECORDER, SETTINGS
from .checkpoint import Reports
from .scheduler_types import Work


@dataclass(frozen=True)
class Gateway:
    """The name of a seat, which the terminal shows before each report."""

    id: str


@dataclass(eq=False)
class Process:
    """pytest on a node, with the attributes that pytest expects of an xdist worker.

    Attributes:
        tree: the working tree on the node, whose paths in reports are replaced by local paths.
        reports: the reports of the running case, by key.
    """

    gateway: Gateway
    node: str
    works: dict[str, Work] = field(default_factory=dict)
    reports: dict[str, Reports] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    tree: str = ""
    workeroutput: dict[str, Any] = field(default_factory=dict)
    workerinfo: dict[str, Any] = field(default_factory=dict)
    errors: Sequence[str] = ()

    def add(self, key: str, plain: dict[str, Any], top: Path) -> None:
        """Store a report of a case, with its local node id and local paths.

        The report is not emitted yet: if the seat is lost, another node reports the case again.
        """
        plain = _replaced(plain, self.tree, str(top))
        plain["nodeid"] = key
        if row := plain.get("aisp"):
            row["nodeid"] = key
        self.reports.setdefault(key, []).append(plain)


class Reporter:
    """Emits reports through pytest's hooks.

    Attributes:
        confirmed: the cases that ran a second time.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._hook: Any = config.hook
        self._verdicts: dict[str, str] = {}
        self.confirmed: list[str] = []

    def begin(self, key: str, location: tuple[str, int | None, str]) -> None:
        """Report the start of a case."""
        self._hook.pytest_runtest_logstart(nodeid=key, location=location)

    def emit(self, reports: Reports, process: Process | None = None) -> None:
        """Report a case that has ended. Reports of an earlier run have no process."""
        for plain in reports:
            data = dict(plain)
            report = self._hook.pytest_report_from_serializable(config=self._config, data=data)
            if process is not None:
                report.node = process
            if row := plain.get("aisp"):
                self._verdicts[report.nodeid] = row["verdict"]
            self._hook.pytest_runtest_logreport(report=report)
        if reports:  # a plugin on the node may suppress all reports
            first = reports[0]
            self._hook.pytest_runtest_logfinish(nodeid=first["nodeid"], location=first["location"])

    def compare(self, key: str, process: Process, reports: Reports, rows: Sequence[Row]) -> None:
        """Record a case's second run. Report the second run if it is red and the first was not."""
        recorder = self._config.stash.get(RECORDER, None)
        if self._config.stash[SETTINGS].update and rows and recorder is not None:
            recorder.add_session(rows[-1])
        self.confirmed.append(key)
        red = any(row.verdict in RED for row in rows)
        red = red or any(plain["outcome"] == "failed" for plain in reports)
        if red and self._verdicts.get(key) not in RED:
            self.write(f"{key}: a second run on {process.node} is red")
            self.emit(reports, process)

    def red(self, item: pytest.Item, product: str, why: str) -> None:
        """Report a case without a verdict as failed. JUnit gets the property ``aisp_missing``."""
        key, location = item.nodeid, item.location
        self.begin(key, location)
        for outcome, text, when in (("failed", why, "call"), ("passed", None, "teardown")):
            report = pytest.TestReport(key, location, {}, outcome, text, when)  # type: ignore[arg-type]
            report.user_properties = [("aisp_missing", product)]
            self._hook.pytest_runtest_logreport(report=report)
        self._hook.pytest_runtest_logfinish(nodeid=key, location=location)
        if (recorder := self._config.stash.get(RECORDER, None)) is not None:
            recorder.crashes.append(f"{key}: {why.splitlines()[0]}")

    def unproved(self, seat: str, keys: Sequence[str]) -> None:
        """Record that no canary confirms the verdicts of `keys`."""
        if (recorder := self._config.stash.get(RECORDER, None)) is not None:
            recorder.without_canary.append((seat, list(keys)))

    def process_ended(self, process: Process) -> None:
        """Record the results that a process sent when it ended: its canary and unused results."""
        if (gather := self._config.pluginmanager.get_plugin("aisp-gather")) is not None:
            gather.pytest_testnodedown(node=process, error=None)

    def warn(self, text: str, file: str, line: int, when: str, nodeid: str) -> None:
        """Add a node's warning to the summary of warnings."""
        message = warnings.WarningMessage(UserWarning(text), UserWarning, file, line)
        arguments = {"warning_message": message, "when": when, "nodeid": nodeid, "location": None}
        self._hook.pytest_warning_recorded.call_historic(kwargs=arguments)

    def write(self, text: str) -> None:
        """Write a text to the terminal."""
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.ensure_newline()
            for line in text.split("\n"):
                terminal.write_line(f"fleet: {line}")


def _replaced(value: Any, old: str, new: str) -> Any:
    """Return plain values with the path `old` replaced in every text."""
    if isinstance(value, str):
        return value.replace(old, new) if old in value else value
    if isinstance(value, dict):
        return {key: _replaced(each, old, new) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], float):  # samples
            return value
        return type(value)(_replaced(each, old, new) for each in value)
    return value
