"""Record the trials of `code_gate.py`: each kernel against itself, unchanged and slowed down.

A worker process runs every trial as it does for the plugin. Each trial is written immediately, as
one JSON object per line. So a recording that is stopped early is valid, only shorter.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from code_gate_others import CALLS

from pytest_aisp.results import stats, verdict
from pytest_aisp.results.encoding import plain
from pytest_aisp.results.messages import CaseTask, FactsTask, PageSource, Reply, TimeTask
from pytest_aisp.timing.schedule import Budget
from pytest_aisp.util.device import Machine
from pytest_aisp.worker.client import Worker, WorkerProcess
from pytest_aisp.worker.server import InProcess

HERE = Path(__file__).resolve().parent
PAGE = HERE / "code_gate_kernels.py"
SILENCE = 90.0
"""Seconds without a message after which a worker process is abandoned."""
ROUND = (False, False, True)
"""Whether a slowdown is planted, for a kernel's trials in one round."""
MOST_ERRORS = 3
"""Errors in a row after which a kernel is left out."""
PILOT = 5
"""Unchanged trials of a kernel before a slowdown is planted. Their spread decides its size."""
HEADROOM = 1.2
"""A planted slowdown is this many times the detectable one. The final spread may be larger."""
NOISE = {"window": 0.002, "capture": 0.0015, "process": 0.0004}
"""Noise of the simulated device, close to the measurements in docs/explanation/spread.md."""


@dataclass(frozen=True)
class Kernel:
    """One pair of the page: its size, its rule, and the simulated seconds of a call."""

    size: Mapping[str, int]
    seconds: float
    exact: bool = False


KERNELS = {
    "scaled": Kernel({"n": 2**19}, 2e-6),
    "transposed": Kernel({"rows": 2048, "columns": 1024}, 5e-6, exact=True),
    "projected": Kernel({"m": 2048, "n": 1024, "k": 1024}, 1e-5),
    "gathered": Kernel({"n": 2**23, "count": 2**20}, 1.5e-5, exact=True),
    "softmaxed": Kernel({"rows": 2048, "columns": 4096}, 1e-5),
    "lgammaed": Kernel({"n": 2**22}, 2e-5),
    "added": Kernel({"n": 2**24}, 4.8e-5),
    "multiplied": Kernel({"m": 4096, "n": 2048, "k": 2048}, 5.3e-5),
}


@dataclass(frozen=True)
class Plan:
    """What to record.

    Attributes:
        processes: fresh worker processes, one after the other.
        rounds: the maximum number of rounds over all kernels in each process (None: as many as fit
            into the process's share of the time).
        minutes: the wall-clock time for everything, divided evenly among the processes (None: no
            limit).
        others: the number of kernels that each process also times with other tools.
        simulated: time on the simulated device instead of a GPU.
        in_process: use no worker process; for tests.
        seed: the seed of all random orders.
        rebuilt: compare each kernel with the same kernel of a copy of the page, which is loaded and
            compiled separately.
        python: the interpreter of a second environment. If given, each trial compares a kernel in
            the second environment with the same kernel in today's environment.
    """

    processes: int = 21
    rounds: int | None = None
    minutes: float | None = None
    others: int = 2
    simulated: bool = False
    in_process: bool = False
    seed: int = 0
    rebuilt: bool = False
    python: str = ""


class Lost(Exception):
    """The worker process is dead."""


@dataclass
class Recorder:
    """Fill the file `out` as `plan` says.

    Attributes:
        values: by kernel, ln(speedup) of each unchanged trial so far.
        seconds: by kernel, seconds of a call; errors: by kernel, trials in a row that failed.
        reserve: seconds that the other tools took last time.
        copy: the copy of the page, if kernels are compared with it.
    """

    plan: Plan
    out: Path
    values: dict[str, list[float]] = field(default_factory=lambda: {k: [] for k in KERNELS})
    seconds: dict[str, float] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    described: bool = False
    reserve: float = 0.0
    planted: int = 0
    failed: int = 0
    copy: PageSource | None = None

    def run(self) -> None:
        """Record every process; raise FileExistsError rather than overwrite."""
        self.machine = None if self.plan.simulated else Machine.here()
        self.started = time.monotonic()
        with self.out.open("x") as self.file, tempfile.TemporaryDirectory() as folder:
            if self.plan.rebuilt:
                copy = shutil.copy(PAGE, folder)
                self.copy = PageSource(page=copy, root=folder, module=f"aisp_past.{PAGE.stem}")
            self.spare: Worker | None = self.start()
            try:
                for process in range(self.plan.processes):
                    self._process(process)
                    self._print_progress(process)
            finally:
                if self.spare is not None:
                    self.spare.close()

    def start(self) -> Worker:
        """Start a worker process as the plugin does: pinned to the first GPU."""
        if self.plan.in_process:
            return InProcess()
        if self.machine is None:
            return WorkerProcess({"CUDA_VISIBLE_DEVICES": ""})
        gpus = self.machine.gpus
        return WorkerProcess({"CUDA_VISIBLE_DEVICES": gpus[0]} if gpus else {})

    def _process(self, process: int) -> None:
        self.worker, self.spare = self.spare or self.start(), None
        self.number, self.process = 0, process
        self.rng = random.Random(f"{self.plan.seed} {process}")
        try:
            self._describe()
            for kernel in self._kernels():
                for planted in self._kinds(kernel):
                    self._trial(kernel, planted)
                if self.spare is None and process + 1 < self.plan.processes:
                    self.spare = self.start()  # it imports torch while this one measures
            self._others()
        except Lost:
            self.failed += 1
        finally:
            self.worker.close()

    def _kernels(self) -> Iterator[str]:
        """Yield kernels, round by round in random order, until this process's time is over."""
        rounds = 0
        while self.plan.rounds is None or rounds < self.plan.rounds:
            left = [kernel for kernel in KERNELS if self.errors[kernel] < MOST_ERRORS]
            for kernel in self.rng.sample(left, len(left)):
                if time.monotonic() > self._until():
                    return
                yield kernel
            if not left:
                return
            rounds += 1

    def _until(self) -> float:
        if self.plan.minutes is None:
            return math.inf
        share = (self.process + 1) / self.plan.processes
        return self.started + 60 * self.plan.minutes * share - self.reserve

    def _kinds(self, kernel: str) -> list[bool]:
        """Return a flag for each trial of one round: whether a slowdown is planted."""
        known = len(self.values[kernel]) >= PILOT
        return self.rng.sample(ROUND, len(ROUND)) if known else [False] * len(ROUND)

    def _trial(self, kernel: str, planted: bool) -> None:
        if kernel not in self.seconds and not self._learn_seconds(kernel):
            return
        asked = self.share(kernel) if planted else 0.0
        result = self._timed(kernel, planted=asked, budget={"window": self.window(kernel)})
        if result is not None:
            self._store(kernel, asked, trial_row(result))

    def _learn_seconds(self, kernel: str) -> bool:
        """Learn the seconds of a call from one discarded trial; return whether it succeeded."""
        result = self._timed(kernel)
        if result is not None:
            self.seconds[kernel] = trial_row(result)["seconds"]
        return result is not None

    def window(self, kernel: str) -> float:
        """Return the seconds of a window with enough calls to plant 1 %.

        Unchanged trials use it too. Longer windows are not always quieter: a GEMM at the power
        limit scatters four times as much in 5 ms as in 1 ms.
        """
        return max(1e-3, CALLS * self.seconds[kernel])

    def _timed(self, kernel: str, **changes: Any) -> dict[str, Any] | None:
        self.number += 1
        timer = self._timer(kernel) if self.plan.simulated else None
        return self.ask(self.task(kernel, keep=True, timer=timer, **changes))

    def _store(self, kernel: str, asked: float, row: dict[str, Any]) -> None:
        self.errors[kernel] = 0
        if asked:
            self.planted += 1
        else:
            self.values[kernel].append(row["value"])
        self.write("trial", kernel=kernel, asked=round(asked, 5), **row)

    def share(self, kernel: str) -> float:
        """Return the slowdown to plant: 1 %, or slightly more than is detectable so far."""
        values = self.values[kernel]
        if len(values) < PILOT:
            return verdict.planted_share(verdict.DEFAULT_SPREAD["graph"])
        owns = [stats.trimmed_spread(v) for v in self.values.values() if len(v) >= PILOT]
        spread = stats.pooled_spread(stats.trimmed_spread(values), len(values), owns)
        share = verdict.planted_share(spread)
        return share if share == verdict.PLANTED else verdict.planted_share(HEADROOM * spread)

    def task(self, kernel: str, **changes: Any) -> TimeTask:
        """Return a task to time `kernel` against itself."""
        spec = KERNELS[kernel]
        versus: dict[str, Any] = {"versus": "self"}
        if self.copy is not None:
            versus = {"versus": "old", "side": "optimized", "past": self.copy}
        return TimeTask(
            **versus,
            page=str(PAGE),
            root=str(HERE.parent),
            module=PAGE.stem,
            function=f"test_{kernel}",
            variant=kernel,
            size=dict(spec.size),
            device="cpu" if self.plan.simulated else "cuda",
            rule={"exact": True} if spec.exact else {},
            seed=self.plan.seed,
            replicate=1 + 1000 * self.process + self.number,
            **changes,
        )

    def _timer(self, kernel: str) -> dict[str, Any]:
        bias = random.Random(f"{self.plan.seed} {self.process} {kernel}").gauss(0, 0.0003)
        seconds = dict.fromkeys([kernel, f"{kernel}@old"], KERNELS[kernel].seconds)
        options = {"seconds": seconds, "noise": NOISE, "session": bias}
        options["seed"] = f"{self.plan.seed} {self.process} {self.number}"
        return {"target": "pytest_aisp.timing.fake_device:simulate", "options": options}

    def _others(self) -> None:
        """Time some kernels with other tools. The next process takes the next kernels."""
        began, names = time.monotonic(), list(KERNELS)
        for turn in range(self.plan.others):
            kernel = names[(self.process * self.plan.others + turn) % len(names)]
            self.number += 1
            timer = {"target": "code_gate_others:measure", "options": self._location(kernel)}
            result = self.ask(self.task(kernel, planted=self.share(kernel), timer=timer))
            if result is not None:
                details = result["details"]
                for row in details["found"]:
                    self.write("other", kernel=kernel, planted=details["planted"], **row)
        self.reserve = time.monotonic() - began

    def _location(self, kernel: str) -> dict[str, Any]:
        spec, seed = KERNELS[kernel], f"{self.plan.seed} {self.process}"
        if self.plan.simulated:
            return {"seconds": {kernel: spec.seconds}, "seed": seed}
        names = ("page", "root", "module", "function", "size")
        return {name: getattr(self.task(kernel), name) for name in names}

    def ask(self, task: CaseTask) -> dict[str, Any] | None:
        """Return the result, or None after writing and counting an error."""
        reply: Reply = self.worker.ask(task, SILENCE, lambda doing: None)
        if reply.error is None:
            return dict(plain(reply.result))
        self.write_error(task.variant, reply)
        if reply.error in ("died", "timeout"):
            raise Lost
        return None

    def write_error(self, kernel: str, reply: Reply) -> None:
        """Write, print and count the error of a trial."""
        self.failed += 1
        self.errors[kernel] += 1
        message = reply.message.splitlines()[:3]
        self.write("error", kernel=kernel, error=reply.error, message=message)
        print(f"{kernel}: {reply.error}: {' '.join(message)}", flush=True)

    def write(self, kind: str, **row: Any) -> None:
        """Append one line and flush it."""
        after = round(time.monotonic() - self.started, 2)
        line = {"kind": kind, "process": self.process, "number": self.number, "after": after, **row}
        self.file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self.file.flush()

    def _describe(self) -> None:
        """Write the environment once."""
        if self.described:
            return
        facts = self.ask(FactsTask(device="cpu" if self.plan.simulated else "cuda"))
        self.described = True
        self.write("environment", **self._environment(facts or {}))

    def _environment(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        machine = self.machine
        return {
            "product": "simulated" if machine is None else machine.product,
            "versions": {} if machine is None else dict(machine.versions),
            "facts": {} if machine is None else dict(machine.facts),
            **{key: facts.get(key) for key in ("torch", "triton", "device")},
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "commit": _commit(),
            "budget": asdict(Budget()),
            "plan": {**asdict(self.plan), "python": bool(self.plan.python)},
        }

    def _print_progress(self, process: int) -> None:
        unchanged = sum(map(len, self.values.values()))
        print(
            f"process {process + 1} of {self.plan.processes}: {unchanged} unchanged,"
            f" {self.planted} planted, {self.failed} failed,"
            f" {time.monotonic() - self.started:.0f} s",
            flush=True,
        )


def trial_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded part of one timing, with its raw blocks and laps."""
    details = result["details"]
    calls, counted = details["calls"][1], details["counted"][1]
    row = {
        "clock": result["clock"],
        "seconds": _rounded(median(result["baseline"]), 10),
        "counted": counted,
        "planted": _rounded(calls / counted - 1, 6),
        "value": _rounded(result["value"], 7),
        "error": _rounded(result["error"], 7),
        "blocks": [_rounded(value, 7) for value in result["blocks"]],
        "laps": [_rounded(value, 7) for value in result["laps"]],
        "firsts": "".join(map(str, result["firsts"])),
        "dropped": result["dropped"],
        "slots": details["slots"],
    }
    return row | {name: details.get(name) for name in ("sm_mhz", "watts", "celsius")}


def _rounded(value: Any, digits: int) -> float:
    return round(float(value), digits)  # infinities are sent as text


def _commit() -> str | None:
    if given := os.environ.get("GITHUB_SHA"):  # the checkout may lack its history
        return given
    command = ["git", "-C", str(HERE), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
