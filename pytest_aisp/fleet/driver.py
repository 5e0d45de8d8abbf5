"""The pytest plugin of a fleet run, which sends the cases to nodes and emits the reports."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ..results.results_json import Canary
from ..results.row import Row
from ..session.canary import CLOCKS, has_canary
from ..session.collect import case_of
from ..session.options import PRODUCTS, RECORDER, RUN, Settings
from ..session.run_context import Interrupted
from ..timing import peaks as peaks_module
from . import setup, shipping
from .checkpoint import FILE, FOLDER, Checkpoint, CheckpointFile
from .connection import HeadGone, RayProcess
from .reports import Gateway, Process, Reporter
from .scheduler import Scheduler
from .scheduler_types import Finish, Give, Kill, Note, NoVerdict, Start, Unproved, Work

TICK = 0.2
"""The longest time in seconds that the loop waits for events."""


class FleetRun:
    """Runs the selected cases on the nodes of a Ray cluster."""

    def __init__(
        self, config: pytest.Config, settings: Settings, ray: RayProcess, nodes: setup.Nodes
    ) -> None:
        self._config, self._settings, self._ray, self._nodes = config, settings, ray, nodes
        products: Mapping[str, str] = config.stash[PRODUCTS]
        self._products = list(products)
        self._processes: dict[str, Process] = {}
        self._numbers = itertools.count()
        self._reporter = Reporter(config)
        self._patience = setup.patience(config)
        self._span = bool(config.getoption("aisp_fleet_span_nodes"))
        self._scheduler = Scheduler([], self._patience)

    def pytest_report_header(self) -> list[str]:
        """Return header lines with the nodes, and version differences from this machine."""
        address = self._config.getoption("aisp_fleet")
        products = ", ".join(self._products)
        lines = [f"aisp: {self._settings.mode} by the fleet at {address}: {products}"]
        return lines + [f"aisp: {line}" for text in self._nodes.lines for line in text.split("\n")]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all cases on the nodes."""
        stopped = session.testsfailed and not self._config.option.continue_on_collection_errors
        if stopped or self._config.option.collectonly:
            return None  # pytest's own loop reports the reason
        self._session = session
        self._items = {item.nodeid: item for item in session.items}
        self._tree = self._pack()
        self._checkpoint = self._resume()
        works = [work for item in session.items if (work := self._work(item)).key not in self._done]
        self._scheduler = Scheduler(works, self._patience, span=self._span)
        for node in self._nodes.accepted:
            self._scheduler.node_joined(node)
        try:
            self._run()
        except HeadGone as error:
            self._ray.close()
            count = f"{len(self._done)} of {len(self._items)} cases are kept"
            raise session.Interrupted(f"{error}; {count}; go on with: aisp fleet resume") from None
        finally:
            self._ray.end_seats(list(self._processes))
        self._checkpoint.remove()
        return True

    def _pack(self) -> shipping.Tree:
        refs = [ref for ref in (self._settings.against,) if ref is not None]
        try:
            tree = shipping.pack(self._config.rootpath, refs)
        except shipping.ShippingError as error:
            raise pytest.UsageError(f"{setup.OPTION}: {error}") from None
        for item in self._items.values():
            if not item.path.is_relative_to(tree.top):
                raise pytest.UsageError(
                    f"{item.path} is outside {tree.top}, which is shipped to the nodes\n"
                    "Run what is in the repository"
                )
        files = sorted(
            {str(i.path.relative_to(self._config.rootpath)) for i in self._items.values()}
        )
        self._spec = setup.spec(self._config, tree.top, tree.digest, files)
        return tree

    def _resume(self) -> CheckpointFile:
        """Report the finished cases of an interrupted run, and begin the file of this run."""
        self._done: set[str] = set()
        cache = getattr(self._config, "cache", None)
        folder = Path(cache.mkdir(FOLDER)) if cache is not None else None
        arguments = [a for a in self._config.invocation_params.args if a != "--aisp-fleet-resume"]
        here = str(self._config.invocation_params.dir)
        new = Checkpoint(list(map(str, arguments)), here, self._tree.code)
        file = (folder or self._config.rootpath) / FILE
        old = None
        if self._config.getoption("aisp_fleet_resume"):
            old = self._checkpoint_of(file)
        checkpoint = CheckpointFile(file, new)
        if old is not None:
            for key, reports in old.reports.items():
                if key in self._items:
                    self._done.add(key)
                    checkpoint.case(key, reports, unproved=False)
                    self._reporter.emit(reports)
            for canary in old.canaries:
                checkpoint.proved([], canary)
                if (recorder := self._config.stash.get(RECORDER, None)) is not None:
                    recorder.add_canary(msgspec.convert(canary, Canary))
        return checkpoint

    def _checkpoint_of(self, file: Path) -> Checkpoint:
        try:
            checkpoint = Checkpoint.read(file)
        except FileNotFoundError:
            raise pytest.UsageError("aisp fleet resume: no run was interrupted here") from None
        if checkpoint.code != self._tree.code:
            raise pytest.UsageError(
                "aisp fleet resume: code has changed since the run began, so what it"
                " finished is of other code\nRun the suite again"
            )
        return checkpoint

    def _work(self, item: pytest.Item) -> Work:
        case, marker = case_of(item), item.get_closest_marker("aisp_product")
        product = marker.args[0] if marker else self._products[0]
        on_gpus = case is not None and case.kind == "gpu"
        return Work(item.nodeid, product, case.gpus if case is not None and on_gpus else 1)

    # The loop

    def _run(self) -> None:
        self._ray.send("tree", self._tree.data)
        while not self._scheduler.done:
            # Handle events first: they may have piled up while this process was suspended.
            for event in self._ray.events(TICK):
                self._handle(event)
            self._stop_if_asked()
            for action in self._scheduler.plan(time.monotonic()):
                self._carry_out(action)

    def _stop_if_asked(self) -> None:
        session = self._session
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        if (run := self._config.stash.get(RUN, None)) is not None:
            try:
                run.check_time()
            except Interrupted as over:
                pytest.exit(str(over), returncode=pytest.ExitCode.INTERRUPTED)

    def _carry_out(self, action: object) -> None:
        match action:
            case Start(seat, nodes, gpus):
                name = " and ".join(self._scheduler.nodes[node].name for node in nodes)
                self._processes[seat] = Process(Gateway(seat), name)
                self._ray.send("start", seat, nodes, gpus, self._spec_of(seat))
            case Give(seat, work):
                remote = self._remote_id(work)
                self._processes[seat].works[remote] = work
                self._ray.send("send", seat, pickle.dumps(("run", remote)))
            case Finish(seat):
                self._ray.send("send", seat, pickle.dumps(("finish",)))
            case Kill(seat):
                self._ray.send("kill", [seat])
                self._processes.pop(seat, None)
            case NoVerdict(work, why):
                self._report_red(work, why)
            case Unproved(seat, keys):
                self._reporter.unproved(seat, keys)
            case Note(text):
                self._reporter.write(text)

    def _spec_of(self, seat: str) -> dict[str, Any]:
        run = self._config.stash.get(RUN, None)
        worker = {
            "workerid": f"gw{next(self._numbers)}",
            "workercount": sum(node.gpus for node in self._scheduler.nodes.values()),
            "testrunuid": self._tree.digest[:16],
            "mainargv": ["pytest"],
            "aisp_elapsed": time.monotonic() - run.started if run is not None else 0.0,
        }
        return {**self._spec, "seat": seat, "workerinput": worker}

    def _remote_id(self, work: Work) -> str:
        """Return the id that a case has on the node, which does not contain the product."""
        end = f"@{work.product}]"
        return work.key.removesuffix(end) + "]" if work.key.endswith(end) else work.key

    def _handle(self, event: tuple[Any, ...]) -> None:
        match event:
            case ("node" | "refused", *_):
                known = len(self._nodes.lines)
                node = self._nodes.judge(event)
                for line in self._nodes.lines[known:]:
                    self._reporter.write(line)
                if node is not None:
                    self._scheduler.node_joined(node)
            case ("gone", node_id):
                self._scheduler.node_left(node_id, "Ray lost it")
            case ("lost", seat, why, part):
                self._scheduler.lost(seat, why, part)
            case ("alive", seat, messages, part):
                self._scheduler.heard(seat, time.monotonic(), part)
                for message in messages:
                    if (process := self._processes.get(seat)) is not None:
                        self._receive(seat, process, *pickle.loads(message))

    def _receive(self, seat: str, process: Process, kind: str, *rest: Any) -> None:
        match kind, rest:
            case "ready", (tree, errors, python):
                process.tree, process.errors, process.workerinfo = tree, errors, python
                self._scheduler.ready(seat, time.monotonic())
            case "start", (remote, location):
                if not (work := process.works[remote]).again:
                    self._reporter.begin(work.key, location)
            case "report", (remote, data):
                process.add(process.works[remote].key, pickle.loads(data), self._tree.top)
            case "done", (remote,):
                self._finish_case(seat, process, process.works.pop(remote))
            case "unknown", (remote,):
                work = process.works.pop(remote)
                found = "\n".join(process.errors) or "it collected other cases than pytest here"
                self._report_red(work, f"{process.node} did not collect this case\n{found}")
                self._scheduler.finished(seat, work, unproved=False)
            case "warning", warning:
                self._reporter.warn(*warning)
            case "lost", (why, part):
                self._scheduler.lost(seat, why, part)
            case "unreachable", (why,):
                self._scheduler.unreachable(seat, why)
            case "stop", (why,):
                self._session.shouldstop = why
            case "output", (output, peaks):
                self._end_process(seat, process, output, peaks)
            case "ended", (code, output):
                if process.workeroutput:
                    self._scheduler.ended(seat)
                    self._ray.send("kill", [seat])
                    self._processes.pop(seat, None)
                else:
                    last = f"\n{output}" if output else ""
                    self._scheduler.lost(seat, f"its pytest ended with code {code}{last}")

    def _finish_case(self, seat: str, process: Process, work: Work) -> None:
        reports = process.reports.pop(work.key, [])
        rows = [Row.of(plain["aisp"]) for plain in reports if plain.get("aisp")]
        unproved = any(row.value is not None and row.clock in CLOCKS for row in rows)
        run = self._config.stash.get(RUN, None)
        unproved = unproved and run is not None and has_canary(run)
        where = self._scheduler.seats.get(seat)
        if work.again:
            self._reporter.compare(work.key, process, reports, rows)
        else:
            self._reporter.emit(reports, process)
            self._done.add(work.key)
            self._checkpoint.case(work.key, reports, unproved=unproved)
            recorded = self._settings.update and rows
            if where is not None and recorded and self._scheduler.has_others(where):
                self._scheduler.again(work, where)  # a record needs two boards
        process.finished += [work.key] if unproved else []
        self._scheduler.finished(seat, work, unproved=unproved)

    def _report_red(self, work: Work, why: str) -> None:
        if not work.again:
            self._reporter.red(self._items[work.key], work.product, why)

    def _end_process(
        self, seat: str, process: Process, output: dict[str, Any], peaks: Mapping[str, str]
    ) -> None:
        process.workeroutput = {"ended": True, **output}
        if "aisp_canary" in output or not process.finished:
            self._scheduler.proved(seat)
            self._checkpoint.proved(process.finished, output.get("aisp_canary"))
            self._reporter.process_ended(process)
        for product, text in peaks.items():
            path = peaks_module.path_of(self._settings.baselines, product)
            if self._settings.update and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self) -> None:
        """Write the number of cases that ran twice."""
        if count := len(self._reporter.confirmed):
            self._reporter.write(
                f"{count} case{'s' * (count > 1)} ran a second time, on another node"
            )
