"""One case from its declaration to its verdict.

`Run` is what a whole pytest process has: machine, bench processes, stored results, peaks.
`CaseRun` is one case on it: decide where it can be shown, check, time, judge. No pytest here: glue
calls it.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from . import peaks as peaks_module
from . import stats, store, verdict
from .bench import InProcess
from .client import START_SECONDS, Bench, BenchProcess
from .device import Machine, cpu_machine
from .messages import Reply, Task
from .options import Settings
from .pair import Case, Work
from .row import Row, bare, duration, ratio
from .skus import missing

CHECK_CLOCKS = ("host", "cpu", "process")


class Failed(Exception):
    """A case that is red; the message says why and what to do."""


class Interrupted(Exception):
    """The run's own time is over."""


class EndOfBody(Exception):
    """Nothing is timed here, so the test body has said all it can."""


@dataclass(frozen=True)
class Place:
    """Where a case can be shown: timed, checked, compiled, or (with a reason) not at all."""

    kind: str
    device: str
    need: str = ""
    archs: tuple[str, ...] = ()


@dataclass
class Run:
    """What the cases of one pytest process share.

    Attributes:
        make_bench: starts one more bench process with changed environment variables.
        timer: another timer than the device's own, from the hook, or None.
        worker: number of this xdist worker; chooses its GPU.
    """

    settings: Settings
    machine: Machine
    timer: Mapping[str, Any] | None = None
    worker: int = 0
    replay: Bench | None = None
    progress: Callable[[str], None] = lambda text: None
    times_cpu: bool = False
    started: float = field(default_factory=time.monotonic)
    confirmed: float = 0.0
    _benches: dict[tuple[str, int], Bench] = field(default_factory=dict)
    _stored: dict[Path, store.Stored] = field(default_factory=dict)
    _peaks: dict[str, peaks_module.Peaks | None] = field(default_factory=dict)
    _caches: list[str] = field(default_factory=list)
    secret: int = field(default_factory=lambda: random.SystemRandom().randrange(2**31))

    @property
    def seed(self) -> int:
        """Seed of checked values: secret, unless the run must be reproducible."""
        return 0 if self.settings.reproducible else self.secret

    def bench(self, device: str, number: int = 0) -> Bench:
        """Return bench process `number` for `device`, started if need be."""
        if self.replay is not None:
            return self.replay
        key = device, number
        current = self._benches.get(key)
        if isinstance(current, BenchProcess) and not current.alive:
            current.close()
            current = None
        if current is None:
            current = self._benches[key] = self.start(device)
        return current

    def start(self, device: str) -> Bench:
        """Start one more bench process for `device`."""
        if self.settings.in_process:
            return InProcess()
        return BenchProcess(self._environment(device))

    def _environment(self, device: str) -> dict[str, str | None]:
        changes: dict[str, str | None] = {}
        if device == "cuda" and self.machine.gpus:
            changes["CUDA_VISIBLE_DEVICES"] = self.gpu
        if device == "cpu":
            changes["CUDA_VISIBLE_DEVICES"] = ""
            changes["TRITON_INTERPRET"] = "1"
        if self.settings.reproducible:
            changes["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        if self.settings.cold_start:
            changes |= self._fresh_caches()
        return changes

    def _fresh_caches(self) -> dict[str, str | None]:
        folder = tempfile.mkdtemp(prefix="aisp-cold-")
        self._caches.append(folder)
        names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH")
        return {name: os.path.join(folder, name.lower()) for name in names}

    @property
    def gpu(self) -> str:
        """UUID of the GPU that this process uses."""
        return self.machine.gpus[self.worker % len(self.machine.gpus)]

    def stored(self, path: Path) -> store.Stored:
        """Return the stored results in `path`, read once."""
        if path not in self._stored:
            try:
                self._stored[path] = store.load(path)
            except store.StoreError as error:
                raise Failed(str(error)) from None
        return self._stored[path]

    def peaks(self, product: str) -> peaks_module.Peaks | None:
        """Return the stored peaks of `product`, or None where nobody has measured them."""
        if product not in self._peaks:
            path = self.settings.baselines / product / "peaks.json"
            try:
                if not path.exists() and self.settings.update is not None and self.timer is None:
                    self._measure_peaks(path, product)
                self._peaks[product] = peaks_module.load(path) if path.exists() else None
            except (peaks_module.PeaksError, OSError) as error:
                raise Failed(str(error)) from None
        return self._peaks[product]

    def _measure_peaks(self, path: Path, product: str) -> None:
        """Measure the peaks of a machine that is being recorded for the first time."""
        device = "cuda" if product == self.machine.product and self.machine.gpus else "cpu"
        self.progress(f"measure the peaks of {product}")
        task = Task(kind="peaks", device=device)
        reply = self.bench(device).ask(task, self.settings.timeout, self.progress)
        if reply.error is not None:
            raise Failed(f"the peaks of {product} could not be measured: {reply.message}")
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = dict(reply.result["facts"])
        peaks_module.save(path, peaks_module.Peaks(product, reply.result["rates"], facts))

    def check_time(self) -> None:
        """Raise `Interrupted` when the suite's time is over."""
        limit = self.settings.suite_timeout
        if limit is not None and time.monotonic() - self.started > limit:
            raise Interrupted(f"--aisp-suite-timeout: {limit:g} s are over")

    def close(self) -> None:
        """End every bench process."""
        for bench in self._benches.values():
            bench.close()
        self._benches.clear()
        for folder in self._caches:
            shutil.rmtree(folder, ignore_errors=True)
        self._caches.clear()


class CaseRun:
    """One case: `check`, then `time`; `row` is what became of it."""

    def __init__(self, run: Run, case: Case, where: Mapping[str, str], kernels: bool) -> None:
        self.run, self.case = run, case
        self.where = where
        self.timeout = run.settings.timeout
        self.place = self._place(kernels)
        self.machine = self._machine()
        self.rule: dict[str, Any] | None = None
        folder = where["folder"]
        product = self.machine.with_count(case.gpus)
        self.path = run.settings.baselines / product / f"{folder}.json"
        self.row = Row(
            nodeid=where["nodeid"],
            file=str(self.path),
            key=f"{Path(where['page']).name}::{where['function']}[{case.id}]",
            page=where["page"],
            function=where["function"],
            variant=case.variant_name,
            size=dict(case.size),
            bound=case.pair.bound,
            product=product,
            arch=self.machine.arch,
            need=self.place.need,
            claim=self._claim(),
        )

    def _machine(self) -> Machine:
        on_gpu = self.place.kind == "time" and self.place.device == "cuda"
        return self.run.machine if on_gpu or self.run.timer is not None else cpu_machine()

    def _claim(self) -> float | str | None:
        """Return the claim that is judged here; none where nothing is timed."""
        timed = self.place.kind == "time" and not self.run.settings.aa
        return self.case.pair.claim(self.case.variant, self.machine.arch) if timed else None

    def _place(self, kernels: bool) -> Place:
        """Decide where the case can be shown, and say what is missing to time it."""
        run, case = self.run, self.case
        archs = case.pair.archs(case.variant)
        checking = run.settings.check
        if case.kind == "cpu":
            if run.machine.arch == "cpu" or run.times_cpu or run.timer is not None:
                return Place("check" if checking else "time", "cpu", "--aisp-check" * checking)
            return Place("check", "cpu", "timed on a GPU machine only with -m cpu")
        if run.timer is not None and run.machine.arch in archs:
            return Place("check" if checking else "time", "cpu", "--aisp-check" * checking)
        if run.machine.arch in archs and len(run.machine.gpus) >= case.gpus:
            return Place("check" if checking else "time", "cuda", "--aisp-check" * checking)
        need = self._need(case.pair.features(case.variant))
        if kernels:
            return Place("compile", "cpu", need, archs)
        return Place("check", "cpu", need)

    def _need(self, features: tuple[str, ...]) -> str:
        machine = self.run.machine
        here = "there is none here"
        if machine.arch != "cpu":
            here = f"this GPU is {machine.arch} ({machine.name})"
        lacking = missing(features, machine.arch) if features else None
        if machine.arch != "cpu" and len(machine.gpus) < self.case.gpus:
            return f"needs {self.case.gpus} GPUs; this machine has {len(machine.gpus)}"
        if lacking:
            return f"needs {lacking}; {here}"
        return f"needs a GPU; {here}"

    def task(self, kind: Any, **changes: Any) -> Task:
        """Return a task of `kind` for this case."""
        where, settings = self.where, self.run.settings
        return Task(
            kind=kind,
            page=where["page"],
            root=str(settings.root),
            module=where["module"],
            function=where["function"],
            variant=self.case.variant_name,
            size=dict(self.case.size),
            gpus=self.case.gpus,
            device=self.place.device,
            rule=self.rule or {},
            seed=self.run.seed,
            reproducible=settings.reproducible,
            timer=self.run.timer,
            archs=self.place.archs,
            **changes,
        )

    def ask(self, task: Task, bench: Bench | None = None) -> dict[str, Any]:
        """Return the result of `task`; raise `Failed` with the verdict set for an error."""
        self.run.check_time()
        bench = bench or self.run.bench(self.place.device)
        reply = bench.ask(task, self.timeout, self.run.progress)
        if reply.error is not None:
            self._fail(reply)
        return dict(reply.result)

    def _fail(self, reply: Reply) -> None:
        verdicts = {"wrong": "wrong", "disturbed": "invalid"}
        self.row.verdict = verdicts.get(reply.error or "", "fail")
        size = ", ".join(f"{k}={v}" for k, v in self.case.size.items())
        where = f"{self.case.variant_name} at {size}" if size else self.case.variant_name
        parts = [reply.message if reply.error in ("wrong", "page") else f"{where}: {reply.message}"]
        self.row.reasons.append(parts[0].splitlines()[0])
        parts += [reply.trace.rstrip()] if reply.trace else []
        raise Failed("\n".join([*parts, *self._commands()]))

    def _commands(self) -> list[str]:
        return ["reproduce:", f"    pytest '{self.where['nodeid']}'"]

    def check(self, rule: dict[str, Any]) -> None:
        """Prove both sides right under `rule`, or assemble kernels where that is all we can."""
        self.rule = rule
        if self.place.kind == "compile":
            found = self.ask(self.task("compile"))
            self.row.verdict = "compiled"
            self.row.notes.append("assembled " + ", ".join(sorted(found["assembled"])))
            raise EndOfBody
        timed = self.place.kind == "time"
        at = "case" if timed else "check"
        found = self.ask(self.task("check", at=at, search=self.run.settings.check))
        self.row.checks.append(found)
        self.row.notes.append("checked at " + "; ".join(found["sizes"]))

    def measure(self) -> None:
        """Time the sides, screen, vote, judge. Where nothing is timed the case is `checked`.

        Raises:
            EndOfBody: where nothing is timed.
            Failed: for a red verdict.
        """
        if self.rule is None:
            raise Failed(
                "assert_speedup() before assert_equivalent(): nothing is timed before it is proved"
                " right\nCall pair.assert_equivalent() first"
            )
        if self.place.kind != "time":
            self.row.verdict = self.row.verdict or "checked"
            raise EndOfBody
        first = self._timed(0)
        self._fill(first)
        self._judge(first)
        if self.run.settings.aa:
            self._repeat(first)

    def _repeat(self, first: Mapping[str, Any]) -> None:
        """Repeat an A/A trial in more processes, each a trial of its own, judged alike."""
        values = [float(first["value"])]
        recorded = self._spread()
        verdicts = [self.row.verdict]
        for number in range(1, self.run.settings.processes):
            timed = self._timed(100 + number, self.run.bench(self.place.device, number))
            reading = _reading(timed)
            values.append(reading.value)
            gates = verdict.same_gates(verdict.believed(recorded, reading))
            decision = verdict.decide(reading, gates, self._vote)
            self.row.votes += [vote.value for vote in decision.votes]
            verdicts.append(verdict.verdict_of(decision, stored=True, same_environment=True))
        self.row.trials = [[v, w] for v, w in zip(values, verdicts, strict=True)]
        if len(values) > 1:
            self._interval(values)
        worst = next((v for v in ("regressed", "improved", "inconclusive") if v in verdicts), None)
        self.row.verdict = worst or self.row.verdict
        if worst == "regressed":
            raise Failed("\n".join(["a side differs from a copy of itself", *self._commands()]))

    def _timed(self, replicate: int, bench: Bench | None = None) -> dict[str, Any]:
        versus = "self" if self.run.settings.aa else "baseline"
        task = self.task("time", versus=versus, replicate=replicate, budget=self._budget())
        result = self.ask(task, bench)
        self.row.timings.append(result)
        return result

    def _budget(self) -> dict[str, Any]:
        settings = self.run.settings
        budget: dict[str, Any] = {}
        if settings.blocks is not None:
            budget |= {"blocks": settings.blocks, "least": min(6, settings.blocks)}
        if settings.window is not None:
            budget["window"] = settings.window
        if settings.warmup is not None:
            budget["warmup"] = settings.warmup
        return budget

    def _fill(self, timed: Mapping[str, Any]) -> None:
        row = self.row
        row.clock = str(timed["clock"])
        row.spread = verdict.believed(self._spread(), _reading(timed))
        names = self._names()
        row.seconds = {
            names[0]: median(timed["baseline"]),
            names[1]: median(timed["optimized"]),
        }
        self._interval([timed["value"]])
        self._limit(timed)
        self._other_clock(timed["details"])
        for name, seconds in timed.get("one_off", {}).items():
            if seconds:
                row.notes.append(self._break_even(name, seconds))

    def _names(self) -> tuple[str, str]:
        baseline = self.case.pair.baseline.__name__
        variant = self.case.variant_name
        return (f"{variant}, a copy", variant) if self.run.settings.aa else (baseline, variant)

    def _other_clock(self, details: Mapping[str, Any]) -> None:
        """Note the times on the clock that does not judge, and the goodput of host-bound sides."""
        for key in ("as_called", "gpu_only"):
            if key in details:
                times = " / ".join(duration(t) for t in details[key])
                self.row.notes.append(f"{key.replace('_', ' ')}: {times}")
        if "gpu_only" in details:
            busy = zip(details["gpu_only"], self.row.pair_seconds(), strict=True)
            shares = " / ".join(f"{min(1.0, gpu / wall):.0%}" for gpu, wall in busy)
            self.row.notes.append(f"goodput, GPU time over wall time: {shares}")

    def _break_even(self, name: str, seconds: float) -> str:
        slow, fast = self.row.pair_seconds()
        gain = slow - fast
        calls = f"pays after {seconds / gain:.3g} calls" if gain > 0 else "never pays"
        return f"preparing {name} took {duration(seconds)}: {calls}"

    def _interval(self, values: list[float]) -> None:
        row = self.row
        row.value = fmean(values)
        spread = row.spread or 0.0
        row.low, row.high = verdict.interval(row.value, spread, len(values))

    def _spread(self) -> float:
        """Return the spread of one process's value: recorded, pooled, or this clock's default."""
        clock = self.row.clock
        results = list(self.run.stored(self.path).results.values())
        others = store.pooled(results, clock)
        mine = self.run.stored(self.path).results.get(self.row.key)
        own = mine.own_spread if mine is not None and mine.clock == clock else None
        if own is not None and mine is not None:
            return stats.pooled_spread(own, mine.processes, others)
        return stats.rms(others) if len(others) >= 3 else verdict.DEFAULT_SPREAD[clock]

    def _limit(self, timed: Mapping[str, Any]) -> None:
        peaks = self.run.peaks(self.machine.product)
        if peaks is None or self.run.settings.aa:
            return
        limit = peaks_module.limit_of(Work(**timed["work"]), self.row.bound, peaks)
        if limit is None:
            return
        seconds = min(self.row.pair_seconds())
        self.row.share = peaks_module.share(limit, self.row.pair_seconds()[1])
        self.row.limit = limit.name
        cold = self.case.pair.l2 == "cold" and self.row.clock == "graph"
        if cold and peaks_module.implausible(limit, seconds):
            self.row.verdict = "invalid"
            raise Failed(
                f"{duration(seconds)} is less than the {duration(limit.seconds)} that this"
                f" machine's measured {limit.name} rate allows for the declared work:\n"
                "the work is overstated, or a side does less of it"
            )

    def _judge(self, first: Mapping[str, Any]) -> None:
        row, settings = self.row, self.run.settings
        gates, same_environment, has_record = self._gates(first)
        row.detectable = verdict.detectable(gates, row.spread or 0.0, self._session(), row.clock)
        decision = verdict.decide(_reading(first), gates, self._vote)
        row.votes = [vote.value for vote in decision.votes]
        if row.votes:
            # The first value was singled out for being extreme; the votes were not.
            self._interval(row.votes)
            row.notes.append(
                f"measured {1 + len(row.votes)} times; the first gave {ratio(first['value'])}"
            )
        row.suspect = self._direction(gates, _reading(first)) if decision.suspect else 0
        row.verdict = verdict.verdict_of(
            decision, stored=has_record or settings.aa, same_environment=same_environment
        )
        self._explain(gates, decision, first)
        if settings.update is not None and row.verdict not in verdict.RED:
            self._record(first, gates)
        if row.verdict == "stale" and settings.strict_env:
            row.verdict = "regressed"
        red = row.verdict in verdict.RED
        red |= row.verdict == "new" and settings.missing == "fail" and settings.update is None
        red |= row.verdict == "inconclusive" and settings.inconclusive == "fail"
        if red:
            raise Failed("\n".join([*row.reasons, *self._commands(), *self._accept()]))

    @staticmethod
    def _direction(gates: list[verdict.Gate], first: verdict.Reading) -> int:
        losing = [g.sign for g in gates if g.name != "claim" and g.decide(first, []) != "clear"]
        return losing[0] if losing else 0

    def _gates(self, timed: Mapping[str, Any]) -> tuple[list[verdict.Gate], bool, bool]:
        """Return the gates, whether the record's environment is this one, whether there is one."""
        row = self.row
        spread = row.spread or 0.0
        if self.run.settings.aa:
            return list(verdict.same_gates(spread)), True, True
        gates: list[verdict.Gate] = []
        if row.claim == "neutral":
            margin = max(verdict.NEUTRAL_FLOOR[row.clock], verdict.DETECTABLE * spread)
            gates.append(verdict.neutral_gate(margin))
        else:
            gates.append(verdict.claim_gate(float(row.claim or 1.0), spread))
        stored_file = self.run.stored(self.path)
        mine = stored_file.results.get(row.key)
        if mine is None:
            return gates, True, False
        if mine.clock != row.clock:
            row.notes.append(f"the stored result was timed on the {mine.clock} clock: not compared")
            return gates, True, False
        row.stored = mine.value
        margin = verdict.record_margin(spread, self._session(), row.clock)
        gates += verdict.record_gates(mine.value, margin)
        return gates, self._same_environment(stored_file, mine, timed), True

    def _session(self) -> float | None:
        """Return this product's recorded session-to-session spread on this clock, or None."""
        return store.session_sd(self.run.stored(self.path).results.values(), self.row.clock)

    def _same_environment(
        self, stored: store.Stored, mine: store.Result, timed: Mapping[str, Any]
    ) -> bool:
        then = stored.environments.get(mine.environments[-1], {})
        now = self.environment()
        keys = ("driver", "cuda", "torch", "triton")
        same = all(then.get(k) == now.get(k) for k in keys)
        return same and mine.sources.get("baseline") == timed["sources"]["baseline"]

    def environment(self) -> dict[str, Any]:
        """Return what a stored result depends on besides its sources."""
        return {**self.machine.versions, **self.machine.facts, **self._facts()}

    def _facts(self) -> dict[str, Any]:
        if self.run.timer is not None:
            return {"torch": "simulated"}
        if not hasattr(self.run, "_facts"):
            reply = self.run.bench(self.place.device).ask(
                self.task("facts"), START_SECONDS, self.run.progress
            )
            if reply.error is not None:
                self._fail(reply)
            self.run._facts = {  # type: ignore[attr-defined]
                k: v for k, v in reply.result.items() if k in ("torch", "triton")
            }
        return self.run._facts  # type: ignore[attr-defined,no-any-return]

    def _vote(self) -> verdict.Reading | None:
        """Measure the case in a fresh process; None when the run's budget for votes is spent."""
        run = self.run
        if run.confirmed > run.settings.confirm_budget:
            self.row.notes.append("--aisp-confirm-budget is spent: no more votes in this run")
            return None
        start = time.monotonic()
        number = len(self.row.timings)
        run.progress(f"vote {number} in a fresh process")
        bench = run.replay or run.start(self.place.device)
        try:
            return _reading(self._timed(number, bench))
        finally:
            if run.replay is None:
                bench.close()
            run.confirmed += time.monotonic() - start

    def _record(self, first: Mapping[str, Any], gates: list[verdict.Gate]) -> None:
        """Measure the case in every recording process and put what to store in the row."""
        run, row = self.run, self.row
        count = 1 if self.row.clock == "process" else run.settings.processes
        timed = [first]
        for number in range(1, count):
            run.progress(f"record {number + 1}/{count}")
            timed.append(self._timed(100 + number, run.bench(self.place.device, number)))
        values = [float(t["value"]) for t in timed]
        self._interval(values)
        names = list(row.seconds)
        for name, side in zip(names, ("baseline", "optimized"), strict=True):
            row.seconds[name] = median(median(t[side]) for t in timed)
        row.environment = self.environment()
        row.recorded = {
            "values": [values],
            "clock": row.clock,
            "baseline_us": row.seconds[names[0]] * 1e6,
            "optimized_us": row.seconds[names[1]] * 1e6,
            "share": row.share,
            "limit": row.limit or None,
            "sources": dict(first["sources"]),
            "replace": run.settings.update == "all",
        }

    def _explain(
        self, gates: list[verdict.Gate], decision: verdict.Decision, first: Mapping[str, Any]
    ) -> None:
        """Say for each missed gate which number missed which limit, and where that came from."""
        origin = {
            "claim": "at_least on the page",
            "neutral": "at_least='neutral' on the page",
            "record": f"stored in {self._relative()}",
            "improvement": f"stored in {self._relative()}",
            "same-slower": "the same side, built again",
            "same-faster": "the same side, built again",
        }
        for gate in gates:
            outcome = decision.outcomes[gate.name]
            if outcome in ("clear", "green"):
                continue
            votes = ", ".join(bare(v.value) for v in decision.votes)
            self.row.reasons.append(
                f"{ratio(first['value'])} against {ratio(gate.limit)} ({origin[gate.name]}),"
                f" margin {gate.red:.1%}; votes of fresh processes: {votes or 'none'}"
                f" -> {outcome}"
            )

    def _relative(self) -> str:
        try:
            return str(self.path.relative_to(self.run.settings.root))
        except ValueError:
            return str(self.path)

    def _accept(self) -> list[str]:
        if self.row.stored is None and self.row.verdict != "new":
            return []
        how = "=all" if self.row.stored is not None else ""
        return ["accept:", f"    pytest --aisp-update-expectations{how} '{self.where['nodeid']}'"]


def _reading(timed: Mapping[str, Any]) -> verdict.Reading:
    return verdict.Reading(float(timed["value"]), float(timed.get("error", 0.0)))


def as_result(recorded: Mapping[str, Any], environment: str) -> store.Result:
    """Return the stored result of a row's `recorded` values."""
    return store.Result(
        values=tuple(tuple(v) for v in recorded["values"]),
        clock=recorded["clock"],
        baseline_us=recorded["baseline_us"],
        optimized_us=recorded["optimized_us"],
        share=recorded["share"],
        limit=recorded["limit"],
        sources=dict(recorded["sources"]),
        environments=(environment,) * len(recorded["values"]),
        choices={},
        samples=None,
    )


def plain_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings as plain types, for a manifest."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(settings).items()}
