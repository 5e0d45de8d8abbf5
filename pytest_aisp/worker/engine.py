"""The engine of a worker process. An `Engine` has one method for each kind of task."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from msgspec import Struct

from ..checking import check, diagnose
from ..checking.check import CheckResult
from ..checking.inputs import VALUE_SETS, BoundSide, InputPool
from ..checking.memoization import check_repeats
from ..checking.numerics import Rule
from ..checking.reference import Reference, outputs_and_state
from ..isolation import monkeypatches
from ..isolation.protections import enabled, without
from ..page.pair import ROLES, PageError, Pair, Side, Size, is_plain, size_words
from ..results import messages, task_results
from ..results.messages import AT, CaseTask, Json, Task, TimeTask, case_fields
from ..timing.schedule import Budget, Samples
from ..util import device, pytree
from ..util.cpu_load import CpuLoad
from ..util.device_state import Stopwatch, no_gc, synchronizer
from . import input_process, sandbox
from .changed_sides import changed_sides
from .client import Progress
from .held_side import Holder
from .loader import Cache, DeclaredSide, TaskContext, pair_of, seed_of
from .process_timer import ProcessSide, measure_processes, time_here

SANDBOX = "sandbox"
"""A part of the seed of a sandboxed side's values, and also the key of the results in the cache."""


@dataclass
class Engine:
    """Answer tasks in this process, one at a time."""

    progress: Progress = lambda text: None
    watch: Stopwatch = field(default_factory=Stopwatch)
    cache: Cache = field(init=False)
    _sandboxed: sandbox.SandboxedSide | None = None

    def __post_init__(self) -> None:
        self.cache = Cache(self.watch)
        self.holder = Holder(self.cache, self._quiet_process, self.progress)
        if emulator := os.environ.get("AISP_CUDA_EMULATOR"):
            importlib.import_module(emulator).install()
        monkeypatches.remember()  # before any page is imported

    def answer(self, task: Task) -> Struct | Mapping[str, Json]:
        """Return the result of `task`."""
        match task:
            case messages.CheckTask():
                return self.check(task)
            case messages.TimeTask():
                return self.time(task)
            case messages.HoldTask() | messages.WindowTask() | messages.ReleaseTask():
                self._sandboxed = None
                return self.holder.answer(task)
            case messages.CountTask():
                return self.count(task)
            case messages.ChangedTask():
                return changed_sides(TaskContext(task, task.past))
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
            case messages.DiagnoseTask():
                from . import collective_arrivals

                return collective_arrivals.diagnose(task, self.progress)
        raise TypeError(f"no engine answers {task.kind!r}")

    def check(self, task: messages.CheckTask) -> task_results.CheckResult:
        """Check the case's variant and baseline, and return the results by size."""
        self.watch.start()
        context = TaskContext(task)
        context.require_interpreter()
        rule = Rule(**task.rule)
        results = {}
        with self._quiet_process(task, context.pair), self.watch.phase("check"):
            for size in context.sizes:
                found = self._check_at(context, size, rule, 1 if task.baseline_alone else 2)
                results[size_words(size)] = task_results.SizeCheck(**asdict(found))
            searched = self._search(context, rule) if task.search else []
        self.cache.release_memory(task.device)
        details = context.sources(), searched, self.watch.read(), *context.opened_files()
        return task_results.CheckResult(results, *details)

    def _check_at(
        self, context: TaskContext, size: Size, rule: Rule, count: int = 2, *, controls: bool = True
    ) -> CheckResult:
        """Check the first `count` sides, the baseline first."""
        task, at = context.task, f"{size_words(size)}{rule}"
        key = f"{task.page}{task.function}{task.variant}{count}{task.device}{at}"
        if key not in self.cache.checks:
            self._report("check", size)
            self.cache.checks[key] = check.check_sides(
                self.cache.reference(task, context.pair, size),
                [(_function_of(side), precision) for side, precision in context.sides[:count]],
                rule,
                controls=controls,
                progress=lambda name: self._report(f"check {name}", size),
            )
        return self.cache.checks[key]

    def _report(self, work: str, size: Size) -> None:
        self.progress(f"{work}{AT}{size_words(size)}")

    def _search(self, context: TaskContext, rule: Rule) -> list[str]:
        """Check random sizes, and return them. Raise the failure at the smallest failing size."""
        searched: dict[str, None] = {}

        def check_at(size: Size) -> CheckResult:
            searched[size_words(size)] = None
            return self._check_at(context, size, rule, controls=False)

        for size in (size for size in context.pair.check_sizes if not is_plain(size)):
            self.progress("search " + ", ".join(size))
            if failure := diagnose.smallest_failure(size, check_at, context.task.seed):
                raise failure
        return list(searched)

    def time(self, task: TimeTask) -> task_results.TimeResult:
        """Time the case's variant and its baseline, and check the outputs of the timed calls."""
        self.watch.start()
        context = TaskContext(task, task.past)
        sides = context.sides
        if task.versus == "self":
            sides = sides[1], sides[1]
        if task.versus == "old":
            now, precision = context.side(task.side)
            sides = (context.old_side(task.side), precision), (now, precision)
        with self._quiet_process(task, context.pair):
            monkeypatches.refuse_tracers()
            samples, extra = self._measure(task, context, sides)
        if task.replicate and not task.keep:  # one of several processes that measure the case
            self.cache.references.clear()
        self.cache.release_memory(task.device)
        return task_results.TimeResult(
            **asdict(samples),
            value=samples.value,
            error=samples.error,
            sources=context.sources(),
            work=context.pair.work_at(task.size, task.gpus).declared(),
            spent=self.watch.read(),
            **extra,
        )

    def _measure(
        self, task: TimeTask, context: TaskContext, sides: tuple[DeclaredSide, DeclaredSide]
    ) -> tuple[Samples, dict[str, Json]]:
        budget = Budget(**task.budget)
        seed = f"{Path(task.page).name}{task.function}{task.variant}{task.size}{task.replicate}"
        first, second = (side for side, _ in sides)
        if task.timer is not None:
            simulate = pkgutil.resolve_name(task.timer["target"])
            options = {**task.timer.get("options", {}), "planted": task.planted}
            first_name = first.__name__ + ("@old" if task.versus == "old" else "")
            return simulate(first_name, second.__name__, options, budget, seed), {}
        rng = random.Random(seed)
        if isinstance(first, ProcessSide) and isinstance(second, ProcessSide):
            return measure_processes(task, (first, second), budget, rng, self.progress), {}
        from ..timing.trial import Trial

        reference = self.cache.reference(task, context.pair, task.size)
        with input_process.values_for(task) as source:
            return Trial(task, reference, sides, budget, rng, self.progress, source).run()

    def count(self, task: messages.CountTask) -> Mapping[str, float]:
        """Return a metric per call, keyed by role."""
        from ..timing.trial import Trial
        from . import metrics

        if task.timer is not None:
            return dict(task.timer["options"]["details"]["goals"][task.metric])
        context = TaskContext(task)
        with self._quiet_process(task, context.pair):
            reference = self.cache.reference(task, context.pair, task.size)
            rng = random.Random(seed_of(task, "count"))
            budget, timed = Budget(**task.budget), TimeTask(**case_fields(task))
            trial = Trial(timed, reference, context.sides, budget, rng, self.progress)
            return metrics.count(task, trial)

    def sample(self, task: messages.SampleTask) -> task_results.SampleResult:
        """Time one process side in this process and check its output."""
        context = TaskContext(task, task.past)
        pair = context.pair if task.past is None else context.old_pair()
        baseline = pair.baseline, pair.baseline_precision
        sides = [baseline, *((v.side, v.precision) for v in pair.variants)]
        side, precision = next((s, p) for s, p in sides if s.__name__ == task.side)
        seed = zlib.crc32(task.function.encode())
        pool = InputPool(pair, dict(task.size), task.device, seed, task.seed)
        bound = BoundSide(side, [slot := pytree.clone(pool.value_set(0))], None)
        with self._quiet_process(task, pair):
            monkeypatches.refuse_tracers()
            warmup, load = getattr(side, "warmup", 3), CpuLoad()
            seconds, share = time_here(lambda: bound.run(0), warmup, synchronizer(task.device))
            disturbed = load.look() or ""
        reference, rule = Reference(pool), Rule(**task.rule)
        for turn in range(VALUE_SETS):  # first the timed output, then the outputs for new values
            if turn:
                pytree.copy_into(slot, pool.value_set(turn))
                bound.run(0)
            outputs = outputs_and_state(bound.outputs[0], None)
            check.judge(reference, side, outputs, (turn,), precision, rule, is_baseline=True)
        if warmup and enabled("repeats"):
            pool.slots = [slot]
            check_repeats(pool, [bound], synchronizer(task.device), task.seed + 1)
        return task_results.SampleResult(seconds, disturbed, share)

    def profile(self, task: messages.ProfileTask) -> task_results.ProfileResult:
        """Run both sides under torch's profiler, or one side for a profiler around this process."""
        from . import torch_profiler

        context = TaskContext(task)
        size = dict(context.sizes[-1])
        pool = InputPool(context.pair, size, task.device, seed_of(task, "profile"), task.seed)
        with self._quiet_process(task, context.pair):
            if task.side:
                torch_profiler.replay_side(pool, context.side(task.side)[0], task.side)
                return task_results.ProfileResult()
            sides = {role: context.side(role)[0] for role in ROLES}
            return torch_profiler.profile_sides(pool, sides, Path(task.folder), self.progress)

    def draw(self, task: messages.DrawTask) -> Mapping[str, Json]:
        """Write input values for a sandboxed side, and keep the expected results for `compare`."""
        context = TaskContext(task)
        if task.count:
            return input_process.write_value_sets(context.pair, task)
        size = dict(context.sizes[-1])
        self._report(task.kind, size)
        pool = InputPool(context.pair, size, task.device, seed_of(task, SANDBOX), task.seed)
        reference = Reference(pool, self.watch, Rule(**task.rule).exact)
        self.cache.references[SANDBOX] = reference
        sandbox.draw(reference, Path(task.values))
        return {}

    def prepare(self, task: messages.PrepareTask) -> task_results.PrepareResult:
        """Prepare one side in this process, and return the number of calls in a unit of work."""
        context = TaskContext(task)
        size = dict(context.sizes[-1])
        self._report(task.kind, size)
        (side, _), seed = context.side(task.side), seed_of(task, SANDBOX)
        self._sandboxed = sandbox.SandboxedSide(context.pair, side, size, seed, task)
        return task_results.PrepareResult(self._sandboxed.unit)

    def perform(self, task: messages.PerformTask) -> dict[str, Json]:
        """Run the requested units of work with the prepared side."""
        self._prepared_side(task).work(task.units)
        return {}

    def show(self, task: messages.ShowTask) -> dict[str, Json]:
        """Write the outputs of the prepared side for given values."""
        self._prepared_side(task).show(Path(task.values), Path(task.outputs), task.slots)
        return {}

    def _prepared_side(self, task: CaseTask) -> sandbox.SandboxedSide:
        self._report(task.kind, TaskContext(task).sizes[-1])
        if self._sandboxed is None:
            raise PageError("a side was asked to work before it was prepared")
        return self._sandboxed

    def compare(self, task: messages.CompareTask) -> dict[str, int]:
        """Compare the outputs that the sandboxed side wrote with the reference."""
        side, precision = TaskContext(task).side(task.side)
        return {"compared": sandbox.compare(self.cache.references[SANDBOX], side, precision, task)}

    def facts(self, task: messages.FactsTask) -> task_results.Facts:
        """Return the libraries' versions and the name of this process's device."""
        return dict(device.libraries_and_gpu(task.device))

    def peaks(self, task: messages.PeaksTask) -> Struct:
        """Measure the machine's peaks, or the levels of its memory hierarchy."""
        from ..timing import hierarchy, measure_peaks

        if task.hierarchy:
            return hierarchy.measure()
        measured = measure_peaks.measure(task.device)
        return task_results.PeaksResult(dict(measured.rates), dict(measured.facts))

    def collectives(self, task: messages.CollectivesTask) -> dict[str, Json]:
        """Time collectives with the other ranks."""
        from ..timing.collectives import sweep

        return sweep(task.ops, task.sizes, task.device, self.progress)

    def compile(self, task: messages.CompileTask) -> task_results.CompileResult:
        """For each arch of `task`, assemble every kernel that the case's sides launch."""
        from ..kernels.cross_compile import Assembly

        context = TaskContext(task)
        case = context.pair, context.pair.variant(task.variant), task.size
        pairs = list(filter(None, map(pair_of, vars(sys.modules[task.module]).values())))
        assembly = Assembly(pairs, *case, root=task.root, progress=self.progress)
        assembly.run(task.archs)
        return task_results.CompileResult(
            assembled=[kernel.to_json() for kernel in assembly.assembled],
            words=[*assembly.notes, *map(str, assembly.assembled)],
            sources=context.sources(),
        )

    @contextlib.contextmanager
    def _quiet_process(self, task: CaseTask, pair: Pair) -> Iterator[None]:
        """Suspend garbage collection, and use deterministic algorithms if `task` requires them."""
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


def _function_of(side: Side) -> Side:
    """Return the function to check in this process: the side, or a process side's function."""
    return side.side if isinstance(side, ProcessSide) else side
