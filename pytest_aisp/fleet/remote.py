"""Run pytest on a node: collect the same files, run the cases that arrive, and report them.

Other modules treat this pytest like an xdist worker: it sends its result rows and stores nothing.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ..distributed.multi_node import Machines, Unreachable
from ..session.options import MACHINES
from .seat import die_with

PEAKS = "*/peaks.json"


class Cases:
    """Runs cases in the order in which they arrive."""

    def __init__(self, config: pytest.Config, pipe: Connection, spec: Mapping[str, Any]) -> None:
        self._config, self._pipe, self._spec = config, pipe, spec
        self._queue: list[str] = []
        self._items: dict[str, pytest.Item] = {}
        self._open = True
        self._errors: list[str] = []
        self._peaks = set(self._peak_files())

    def _send(self, *message: object) -> None:
        self._pipe.send_bytes(pickle.dumps(message))

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self._items[item.nodeid] = item  # the main process selects the cases

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._errors.append(f"{report.nodeid}: {report.longreprtext}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = self._items
        if (machines := self._config.stash.get(MACHINES, None)) is not None:
            try:
                machines.check()
            except Unreachable as error:
                self._send("unreachable", str(error))
                return True
        python = {"id": self._spec["seat"], "sysplatform": sys.platform}
        python |= {"executable": sys.executable, "version_info": tuple(sys.version_info)}
        self._send("ready", self._spec["tree"], self._errors, python)
        while self._take():
            item = items.get(self._queue[0])
            following = items.get(self._queue[1]) if len(self._queue) > 1 else None
            if item is None:
                self._send("unknown", self._queue[0])
            else:
                self._run(item, following)
            del self._queue[0]
            if session.shouldstop:
                self._send("stop", str(session.shouldstop))
                break
        return True

    def lost(self, part: int, why: str) -> NoReturn:
        """Report that another node of this seat is lost, and end: its case has no verdict."""
        self._send("lost", why, part)
        os._exit(1)

    def _run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        try:
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        except pytest.exit.Exception as stop:
            self._send("stop", str(stop))
            raise
        self._send("done", item.nodeid)

    def _take(self) -> bool:
        """Read the messages that have arrived, or wait for one. Return whether a case is queued."""
        while self._open and (not self._queue or self._pipe.poll()):
            try:
                kind, *rest = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):  # the process that sends cases is gone
                os._exit(1)
            if kind == "run":
                self._queue.append(*rest)
            else:
                self._open = False
        return bool(self._queue)

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._send("start", nodeid, location)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        plain = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        try:
            data = pickle.dumps(plain)
        except Exception as error:  # an object's own methods may raise anything
            data = pickle.dumps(self._unpicklable(report, error))
        self._send("report", report.nodeid, data)

    def _unpicklable(self, report: pytest.TestReport, error: Exception) -> Any:
        """Return a failed report in place of a report that cannot be sent."""
        why = (
            f"the report of {report.nodeid} cannot be sent from the node: {error}\n"
            "Put only plain values into user_properties and into attributes of reports"
        )
        plain = pytest.TestReport(
            report.nodeid, report.location, {}, "failed", why, report.when, duration=report.duration
        )
        return self._config.hook.pytest_report_to_serializable(config=self._config, report=plain)

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: Any
    ) -> None:
        if when == "config":  # the main process has the same warnings
            return
        text, category = str(warning_message.message), warning_message.category.__name__
        place = warning_message.filename, warning_message.lineno
        self._send("warning", f"{category}: {text}", *place, when, nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        output = self._config.workeroutput  # type: ignore[attr-defined]
        new = set(self._peak_files()) - self._peaks
        peaks = {path.parent.name: path.read_text() for path in new}
        self._send("output", output, peaks)

    def _peak_files(self) -> list[Path]:
        folder = self._config.rootpath / str(self._config.getini("aisp_baselines"))
        return sorted(folder.glob(PEAKS))


def main(descriptor: int, parent: int) -> int:
    """Run pytest with the settings from the pipe. Return its exit code."""
    die_with(parent)
    pipe = Connection(descriptor)
    spec = pickle.loads(pipe.recv_bytes())
    tree, root = spec["tree"], os.path.join(spec["tree"], spec["root"])
    here = {name: _moved(value, spec["top"], tree) for name, value in spec["options"].items()}
    options = {**here, "rootdir": root, "inifilename": _moved(spec["inifile"], spec["top"], tree)}
    options["plugins"] = [*options["plugins"], "no:terminal", "no:rerunfailures"]
    arguments = [os.path.join(root, file) for file in spec["files"]]
    config = pytest.Config.fromdictargs(options, arguments)
    config.workerinput = spec["workerinput"]  # type: ignore[attr-defined]
    config.workeroutput = {}  # type: ignore[attr-defined]
    cases = Cases(config, pipe, spec)
    config.pluginmanager.register(cases, "aisp-fleet-cases")
    if "machines" in spec:
        config.stash[MACHINES] = Machines(**spec["machines"], tree=tree, lost=cases.lost)
    code = config.hook.pytest_cmdline_main(config=config)
    return int(code or 0)


def _moved(value: Any, top: str, tree: str) -> Any:
    """Return an option's value with paths below `top` replaced by paths below `tree`."""
    if isinstance(value, list):
        return [_moved(each, top, tree) for each in value]
    if isinstance(value, str) and (value == top or value.startswith(top + os.sep)):
        return tree + value[len(top) :]
    return value


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
