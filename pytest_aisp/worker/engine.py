"""The engine of a worker process: it loads a page, checks its sides, times them, checks again.

An `Engine` answers `Task`s, one method a kind.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..checking import check
from ..checking.check import CheckResult
from ..checking.inputs import VALUE_SETS, BoundSide, InputPool
from ..checking.memoization import check_repeats
from ..checking.numerics import Rule
from ..checking.reference import Reference, outputs_and_state
from ..isolation import monkeypatches
from ..isolation.protections import enabled, without
from ..page.pair import ROLES, Pair, Side, is_plain, size_words
from ..results import messages
from ..results.messages import AT, CaseTask, Task, TimeTask, case_fields
from ..timing.schedule import Budget, Samples
from ..util import device, pytree
from ..util.device_state import Stopwatch, no_gc, synchronizer
from ..util.process_group import current_group
from . import sandbox
from .cache import Cache, seed_of
from .loader import DeclaredSide, PageError, TaskContext, pair_of
from .process_timer import ProcessSide, measure_processes, time_here

Progress = Callable[[str], None]


@dataclass
class Engine:
    """Answer tasks in this process, one at a time."""

    progress: Progress = lambda text: None
    watch: Stopwatch = field(default_factory=Stopwatch)
    kept: Cache = field(init=False)
    _performer: sandbox.SandboxedSide | None = None

    def __post_init__(self) -> None:
        self.kept = Cache(self.watch)
        if emulator := os.environ.get("AISP_CUDA_EMULATOR"):
            importlib.import_module(emulator).install()
        monkeypatches.remember()  # before any page is imported

    def answer(self, task: Task) -> Mapping[str, Any]:
        """Return the result of `task`."""
        match task:
            case messages.CheckTask():
                return self.check(task)
            case messages.TimeTask():
                return self.time(task)
            case messages.CountTask():
                return self.count(task)
            case messages.ChangedTask():
                return self.changed(task)
            case messages.SampleTask():
                return self.sample(task)
            case messages.CompileTask():
                return self.compile(task)
            case messages.ProfileTask():
                return self.profile(task)
            case messages.FactsTask():
                return self.facts(task)
            case messages.DrawTask():
                return self.draw(task)
            case messages.PrepareTask():
                return self.prepare(task)
            case messages.PerformTask():
                return self.perform(task)
            case messages.ShowTask():
                return self.show(task)
            case messages.CompareTask():
                return self.compare(task)
            case messages.PeaksTask():
                return self.peaks(task)
            case messages.CollectivesTask():
                return self.collectives(task)
        raise TypeError(f"no engine answers {task.kind!r}")

    def check(self, task: messages.CheckTask) -> dict[str, Any]:
        """Check the case's variant and its baseline; return what was found by size."""
        self.watch.start()
        asked = TaskContext(task)
        asked.need_interpreter()
        rule = Rule(**task.rule)
        found = {}
        with self._prepared(task, asked.pair), self.watch.phase("check"):
            for size in asked.sizes:
                found[size_words(size)] = asdict(self._check_at(asked, size, rule))
            if task.search:
                self._search(asked, rule)
        sources = asked.sources()
        self.kept.leave_memory(task.device)
        return {"sizes": found, "sources": sources, "spent": self.watch.read()}

    def _check_at(
        self, asked: TaskContext, size: Mapping[str, Any], rule: Rule, *, controls: bool = True
    ) -> CheckResult:
        task = asked.task
        key = f"{task.page}{task.function}{task.variant}{task.device}{size_words(size)}{rule}"
        if key not in self.kept.checked:
            self._tell("check", size)
            oracle = self.kept.oracle(task, asked.pair, size)
            self.kept.checked[key] = check.check_sides(
                oracle,
                [(_inner(s), p) for s, p in asked.sides],
                rule,
                controls=controls,
                progress=lambda name: self._tell(f"check {name}", size),
            )
        return self.kept.checked[key]

    def _tell(self, what: str, size: Mapping[str, Any]) -> None:
        self.progress(f"{what}{AT}{size_words(size)}")

    def _search(self, asked: TaskContext, rule: Rule) -> None:
        for size in asked.pair.check_sizes:
            if not is_plain(size):
                self.progress("search " + ", ".join(size))
                failure = check.smallest_failure(
                    size,
                    lambda found: self._check_at(asked, found, rule, controls=False),
                    asked.task.seed,
                )
                if failure is not None:
                    raise failure

    def changed(self, task: messages.ChangedTask) -> dict[str, Any]:
        """Return which sides of the case are not as they were at the commit of `task.past`."""
        return TaskContext(task, task.past).changed()

    def time(self, task: TimeTask) -> dict[str, Any]:
        """Time the case's variant against its baseline; check the outputs of the timed calls."""
        self.watch.start()
        asked = TaskContext(task, task.past)
        sides = asked.sides
        if task.versus == "self":
            sides = sides[1], sides[1]
        if task.versus == "old":
            now = asked.side(task.side)
            sides = (asked.old_side(task.side), now[1]), now
        budget = Budget(**task.budget)
        with self._prepared(task, asked.pair):
            monkeypatches.refuse_tracers()
            samples, extra = self._measure(task, asked, sides, budget)
        if task.replicate and not task.keep:  # one of many processes
            self.kept.oracles.clear()
        self.kept.leave_memory(task.device)
        return {
            **asdict(samples),
            "value": samples.value,
            "error": samples.error,
            "sources": asked.sources(),
            "work": asdict(asked.pair.work_at(task.size, task.gpus)),
            "spent": self.watch.read(),
            **extra,
        }

    def _measure(
        self,
        task: TimeTask,
        asked: TaskContext,
        sides: tuple[DeclaredSide, DeclaredSide],
        budget: Budget,
    ) -> tuple[Samples, dict[str, Any]]:
        name = os.path.basename(task.page)
        seed = f"{name}{task.function}{task.variant}{task.size}{task.replicate}"
        names = [s.__name__ for s, _ in sides]
        if task.versus == "old":
            names[0] += "@old"
        if task.timer is not None:
            module, function = task.timer["target"].split(":")
            simulate = getattr(importlib.import_module(module), function)
            options = {**task.timer.get("options", {}), "planted": task.planted}
            return simulate(names[0], names[1], options, budget, seed), {}
        first, second = (side for side, _ in sides)
        if isinstance(first, ProcessSide) and isinstance(second, ProcessSide):
            rng = random.Random(seed)
            return measure_processes(task, (first, second), budget, rng, self.progress), {}
        from ..timing.trial import Trial

        oracle = self.kept.oracle(task, asked.pair, task.size)
        rng = random.Random(seed)
        return Trial(task, oracle, sides, budget, rng, self.progress).run()

    def count(self, task: messages.CountTask) -> dict[str, Any]:
        """Return by role what a call takes of a goal beyond time."""
        from ..timing.trial import Trial
        from . import metrics

        if task.timer is not None:
            return dict(task.timer["options"]["details"]["goals"][task.metric])
        asked = TaskContext(task)
        with self._prepared(task, asked.pair):
            oracle = self.kept.oracle(task, asked.pair, task.size)
            rng = random.Random(seed_of(task, "count"))
            budget, timed = Budget(**task.budget), TimeTask(**case_fields(task))
            trial = Trial(timed, oracle, asked.sides, budget, rng, self.progress)
            return metrics.count(task, trial)

    def sample(self, task: messages.SampleTask) -> dict[str, Any]:
        """Time one process side in this process and check its output."""
        asked = TaskContext(task, task.past)
        pair = asked.pair if task.past is None else asked.old_pair()
        sides = [(pair.baseline, None), *((v.side, v.precision) for v in pair.variants)]
        side, precision = next((s, p) for s, p in sides if s.__name__ == task.side)
        seed = zlib.crc32(task.function.encode())
        bench = InputPool(pair, dict(task.size), task.device, seed, task.seed)
        slot = pytree.clone(bench.values[0])
        subject = BoundSide(side, [slot], None)
        with self._prepared(task, pair):
            monkeypatches.refuse_tracers()
            warmup = getattr(side, "warmup", 3)
            seconds = time_here(lambda: subject.run(0), warmup, synchronizer(task.device))
        oracle, rule = Reference(bench), Rule(**task.rule)
        for turn in range(VALUE_SETS):  # the timed output, then one that nobody can remember
            if turn:
                pytree.copy_into(slot, bench.values[turn])
                subject.run(0)
            found = outputs_and_state(subject.outputs[0], None)
            check.judge(oracle, side, found, (turn,), precision, rule, is_baseline=True)
        if warmup and enabled("repeats"):
            bench.slots = [slot]
            check_repeats(bench, [subject], synchronizer(task.device), task.seed + 1)
        return {"seconds": seconds}

    def profile(self, task: messages.ProfileTask) -> dict[str, Any]:
        """Run both sides under torch's profiler, or one for a profiler around this process."""
        from . import torch_profiler

        asked = TaskContext(task)
        size = dict(asked.sizes[-1])
        bench = InputPool(asked.pair, size, task.device, seed_of(task, "profile"), task.seed)
        with self._prepared(task, asked.pair):
            if task.side:
                torch_profiler.replay_side(bench, asked.side(task.side)[0], task.side)
                return {}
            sides = dict(zip(ROLES, (side for side, _ in asked.sides), strict=True))
            return torch_profiler.profile_sides(bench, sides, Path(task.folder), self.progress)

    def draw(self, task: messages.DrawTask) -> dict[str, Any]:
        """Write the values that a performer will be shown, and keep what is expected of them."""
        asked = TaskContext(task)
        size = dict(asked.sizes[-1])
        self._tell(task.kind, size)
        bench = InputPool(asked.pair, size, task.device, seed_of(task, "apart"), task.seed)
        self.kept.oracles["apart"] = Reference(bench, self.watch, Rule(**task.rule).exact)
        sandbox.draw(self.kept.oracles["apart"], Path(task.values))
        return {}

    def prepare(self, task: messages.PrepareTask) -> dict[str, Any]:
        """Get one side ready in this process; return the calls in a unit of work."""
        asked = TaskContext(task)
        size = dict(asked.sizes[-1])
        self._tell(task.kind, size)
        self._performer = sandbox.SandboxedSide(
            asked.pair,
            asked.side(task.side)[0],
            size,
            task.device,
            seed_of(task, "apart"),
            clock=task.clock,
            counted=task.counted,
            slots=task.slots,
        )
        return {"unit": self._performer.unit}

    def perform(self, task: messages.PerformTask) -> dict[str, Any]:
        """Do units of work with the prepared side."""
        self._prepared_side(task).work(task.units)
        return {}

    def show(self, task: messages.ShowTask) -> dict[str, Any]:
        """Write the outputs of the prepared side for given values."""
        self._prepared_side(task).show(Path(task.values), Path(task.outputs), task.slots)
        return {}

    def _prepared_side(self, task: CaseTask) -> sandbox.SandboxedSide:
        self._tell(task.kind, TaskContext(task).sizes[-1])
        if self._performer is None:
            raise PageError("a side was asked to work before it was prepared")
        return self._performer

    def compare(self, task: messages.CompareTask) -> dict[str, Any]:
        """Compare the outputs that the sandboxed side has written with the reference."""
        side, precision = TaskContext(task).side(task.side)
        outputs, steps = Path(task.outputs), task.steps
        rule, is_baseline = Rule(**task.rule), task.side == "baseline"
        oracle = self.kept.oracles["apart"]
        return {
            "compared": sandbox.compare(
                oracle, side, precision, outputs, steps, rule, is_baseline=is_baseline
            )
        }

    def facts(self, task: messages.FactsTask) -> dict[str, Any]:
        """Return versions and the device as this process sees them."""
        import torch

        facts: dict[str, Any] = dict(device.versions())
        if task.device.startswith("cuda"):
            facts["cuda"] = torch.version.cuda
            facts["device"] = torch.cuda.get_device_name()
        return facts

    def peaks(self, task: messages.PeaksTask) -> dict[str, Any]:
        """Measure the machine's peaks."""
        from ..timing import peaks

        measured = peaks.measure(task.device)
        return {"rates": dict(measured.rates), "facts": dict(measured.facts)}

    def collectives(self, task: messages.CollectivesTask) -> dict[str, Any]:
        """Time collectives with the other ranks."""
        from ..timing.collectives import sweep

        if current_group().world == 1:
            raise PageError(
                "collectives need several ranks; this is one process\n    aisp links nccl"
            )
        return sweep(task.ops, task.sizes, task.device, self.progress)

    def compile(self, task: messages.CompileTask) -> dict[str, Any]:
        """Assemble every kernel that the case's sides launch, for each arch of `task`."""
        from ..kernels.assemble import Assembly

        asked = TaskContext(task)
        pair = asked.pair
        pairs = [p for p in map(pair_of, vars(sys.modules[task.module]).values()) if p is not None]
        case = pair, pair.variant(task.variant), task.size
        assembly = Assembly(pairs, *case, root=task.root, progress=self.progress)
        assembly.run(task.archs)
        return {
            "assembled": [kernel.to_json() for kernel in assembly.assembled],
            "words": [*assembly.notes, *map(str, assembly.assembled)],
            "sources": asked.sources(),
        }

    @contextlib.contextmanager
    def _prepared(self, task: CaseTask, pair: Pair) -> Iterator[None]:
        """Hold the process still: no garbage collection, deterministic where asked."""
        import torch

        if task.reproducible:
            torch.use_deterministic_algorithms(True)
        with without(task.without):
            if "gc" in pair.owns:
                yield
                return
            gc.collect()
            with no_gc():
                yield


def _inner(side: Side) -> Side:
    """Return the callable to check in this process: a process side's own function."""
    return getattr(side, "side", side)
