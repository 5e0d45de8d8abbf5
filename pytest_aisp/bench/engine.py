"""The engine of a bench process: it loads a page, checks its sides, times them, checks again.

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

from ..common import trees
from ..common.peers import here
from ..common.protections import on, without
from ..common.quiet import no_gc, waiter
from ..common.stopwatch import Stopwatch
from ..guard import originals
from ..kernels import libraries
from ..kernels.standin import interpreting
from ..pages.pair import Pair, Precision, Side, is_plain, size_words
from ..proof import check, witness
from ..proof.check import Checked
from ..proof.numerics import Rule
from ..proof.oracle import Oracle, observed
from ..proof.repeats import check_repeats
from ..proof.sides import Subject
from ..proof.workbench import VALUE_SETS, Workbench
from ..results.messages import AT, Task
from ..results.timing import Budget, Samples
from . import apart
from .kept import Kept, seed_of
from .loader import MixedTreesError, leads_to, load_page, load_past, pair_of
from .nodes import ROLES

Progress = Callable[[str], None]
Declared = tuple[Side, Precision | None]
FIXED_SIZES = 3
"""Most of a page's listed check sizes that are checked before a case is timed."""


class PageError(Exception):
    """A page that cannot be run as declared; the message says what to change."""


@dataclass
class Engine:
    """Answer tasks in this process, one at a time."""

    progress: Progress = lambda text: None
    watch: Stopwatch = field(default_factory=Stopwatch)
    kept: Kept = field(init=False)
    _performer: apart.Performer | None = None

    def __post_init__(self) -> None:
        self.kept = Kept(self.watch)
        originals.remember()  # before any page is imported

    def check(self, task: Task) -> dict[str, Any]:
        """Check the case's variant and its baseline; return what was found by size."""
        self.watch.start()
        pair = self._pair(task)
        _need_interpreter(task, pair)
        rule = Rule(**task.rule)
        found = {}
        with self._prepared(task, pair), self.watch.phase("check"):
            for size in self._sizes(task, pair):
                found[size_words(size)] = asdict(self._check_at(task, pair, size, rule))
            if task.search:
                self._search(task, pair, rule)
        sources = self._sources(task, pair)
        self.kept.leave_memory(task.device)
        return {"sizes": found, "sources": sources, "spent": self.watch.read()}

    def _check_at(
        self,
        task: Task,
        pair: Pair,
        size: Mapping[str, Any],
        rule: Rule,
        *,
        controls: bool = True,
    ) -> Checked:
        key = f"{task.page}{task.function}{task.variant}{task.device}{size_words(size)}{rule}"
        if key not in self.kept.checked:
            self._tell("check", size)
            oracle = self.kept.oracle(task, pair, size)
            self.kept.checked[key] = check.check_sides(
                oracle,
                [(_inner(s), p) for s, p in self._both(task, pair)],
                rule,
                controls=controls,
                tell=lambda name: self._tell(f"check {name}", size),
            )
        return self.kept.checked[key]

    def _sizes(self, task: Task, pair: Pair) -> list[Mapping[str, Any]]:
        listed = [s for s in pair.check_sizes if is_plain(s)]
        if task.at == "check":
            if listed:
                return listed
            small = [s for s in pair.cpu_sizes] or [dict(task.size)]
            return small[:1]
        return [*listed[:FIXED_SIZES], dict(task.size)]

    def _tell(self, what: str, size: Mapping[str, Any]) -> None:
        self.progress(f"{what}{AT}{size_words(size)}")

    def _search(self, task: Task, pair: Pair, rule: Rule) -> None:
        from ..proof.search import smallest_failure

        for size in pair.check_sizes:
            if not is_plain(size):
                self.progress("search " + ", ".join(size))
                failure = smallest_failure(
                    size,
                    lambda found: self._check_at(task, pair, found, rule, controls=False),
                    task,
                )
                if failure is not None:
                    raise failure

    def changed(self, task: Task) -> dict[str, Any]:
        """Return which sides of the case are not as they were at the commit of `task.past`.

        An old page that cannot be imported today, or only with files of today's, has no sides to
        compare with, nor has a side that would import today's when it is called: `why` says so.
        """
        from ..pages.sources import digest, imported_late

        pair = self._pair(task)
        found: dict[str, Any] = {"baseline": False, "optimized": False, "why": ""}
        try:
            old = self._past_pair(task)
        except MixedTreesError as error:
            return {**found, "why": str(error)}
        except Exception as error:
            why = f"the old page cannot be imported: {type(error).__name__}: {error}"
            return {**found, "why": why}
        if old is not None:
            for role, now, then in self._roles(task, pair, old):
                late = imported_late(then, task.past["root"])
                if late := [name for name in late if leads_to(name, task.root)]:
                    found["why"] = f"{then.__name__} imports {', '.join(late)} when it is called"
                    continue
                before = digest(then, task.past["root"], constants=True)
                found[role] = digest(now, task.root, constants=True) != before
        return found

    def _past_pair(self, task: Task) -> Pair | None:
        past = task.past
        page = load_past(past["page"], past["root"], past["module"], task.root)
        return pair_of(getattr(page, task.function, None))

    @staticmethod
    def _roles(task: Task, pair: Pair, old: Pair) -> Iterator[tuple[str, Side, Side]]:
        """Yield role, side now and side then, where there were such sides."""
        yield "baseline", pair.baseline, old.baseline
        names = [variant.name for variant in old.variants]
        if task.variant in names:
            yield "optimized", pair.variant(task.variant).side, old.variant(task.variant).side

    def time(self, task: Task) -> dict[str, Any]:
        """Time the case's variant against its baseline; check the outputs of the timed calls."""
        self.watch.start()
        pair = self._pair(task)
        first, second = self._both(task, pair)
        sides = (second, second) if task.versus == "self" else (first, second)
        if task.versus == "old":
            now = first if task.side == "baseline" else second
            sides = (self._as_it_was(task, pair), now[1]), now
        budget = Budget(**task.budget)
        with self._prepared(task, pair):
            witness.refuse_tracers()
            samples, extra = self._measure(task, pair, sides, budget)
        if task.replicate and not task.keep:  # one of many processes
            self.kept.oracles.clear()
        self.kept.leave_memory(task.device)
        return {
            **asdict(samples),
            "value": samples.value,
            "error": samples.error,
            "sources": self._sources(task, pair),
            "work": asdict(pair.work_at(task.size, task.gpus)),
            "spent": self.watch.read(),
            **extra,
        }

    def _as_it_was(self, task: Task, pair: Pair) -> Side:
        old = self._past_pair(task)
        if old is None:
            raise PageError(f"{task.function} has no pair in the old page")
        return next(then for role, _, then in self._roles(task, pair, old) if role == task.side)

    def _measure(
        self,
        task: Task,
        pair: Pair,
        sides: tuple[tuple[Side, Precision | None], tuple[Side, Precision | None]],
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
        if hasattr(sides[0][0], "environment"):
            from .processes import measure_processes

            return measure_processes(task, sides, budget, random.Random(seed), self.progress), {}
        from .trial import Trial

        oracle = self.kept.oracle(task, pair, task.size)
        rng = random.Random(seed)
        return Trial(task, oracle, sides, budget, rng, self.progress).run()

    def count(self, task: Task) -> dict[str, Any]:
        """Return by role what a call takes of a goal beyond time."""
        from . import counting
        from .trial import Trial

        if task.timer is not None:
            return dict(task.timer["options"]["details"]["goals"][task.goal])
        pair = self._pair(task)
        sides = self._both(task, pair)
        with self._prepared(task, pair):
            oracle = self.kept.oracle(task, pair, task.size)
            rng = random.Random(seed_of(task, "count"))
            trial = Trial(task, oracle, sides, Budget(**task.budget), rng, self.progress)
            return counting.count(task, trial)

    def sample(self, task: Task) -> dict[str, Any]:
        """Time one process side in this process and check its output."""
        from .processes import time_here

        pair = self._past_pair(task) if task.versus == "old" else self._pair(task)
        if pair is None:
            raise PageError(f"{task.function} has no pair in the old page")
        sides = [(pair.baseline, None), *((v.side, v.precision) for v in pair.variants)]
        side, precision = next((s, p) for s, p in sides if s.__name__ == task.side)
        seed = zlib.crc32(task.function.encode())
        bench = Workbench(pair, dict(task.size), task.device, seed, task.seed)
        slot = trees.clone(bench.values[0])
        subject = Subject(side, [slot], None)
        with self._prepared(task, pair):
            witness.refuse_tracers()
            warmup = getattr(side, "warmup", 3)
            seconds = time_here(lambda: subject.run(0), warmup, waiter(task.device))
        oracle, rule = Oracle(bench), Rule(**task.rule)
        for turn in range(VALUE_SETS):  # the timed output, then one that nobody can remember
            if turn:
                trees.copy_into(slot, bench.values[turn])
                subject.run(0)
            found = observed(subject.outputs[0], None)
            check.judge(oracle, side, found, (turn,), precision, rule, is_baseline=True)
        if warmup and on("repeats"):
            bench.slots = [slot]
            check_repeats(bench, [subject], waiter(task.device), task.seed + 1)
        return {"seconds": seconds}

    def profile(self, task: Task) -> dict[str, Any]:
        """Run both sides under torch's profiler, or one for a profiler around this process."""
        from . import profiler

        pair = self._pair(task)
        size = dict(self._sizes(task, pair)[-1])
        bench = Workbench(pair, size, task.device, seed_of(task, "profile"), task.seed)
        with self._prepared(task, pair):
            if task.side:
                profiler.replay_side(bench, self._side(task, pair)[0], task.side)
                return {}
            sides = dict(zip(ROLES, (pair.baseline, pair.variant(task.variant).side), strict=True))
            return profiler.profile_sides(bench, sides, Path(task.profile), self.progress)

    def draw(self, task: Task) -> dict[str, Any]:
        """Write the values that a performer will be shown, and keep what is expected of them."""
        pair = self._pair(task)
        size = dict(self._sizes(task, pair)[-1])
        self._tell(task.kind, size)
        bench = Workbench(pair, size, task.device, seed_of(task, "apart"), task.seed)
        self.kept.oracles["apart"] = Oracle(bench, self.watch, Rule(**task.rule).exact)
        apart.draw(self.kept.oracles["apart"], Path(task.apart["values"]))
        return {}

    def perform(self, task: Task) -> dict[str, Any]:
        """Run one side: make it ready, do units of work, or show outputs for given values."""
        pair, act = self._pair(task), task.apart
        size = dict(self._sizes(task, pair)[-1])
        self._tell(task.kind, size)
        if "clock" in act:
            side = self._side(task, pair)[0]
            seed = seed_of(task, "apart")
            self._performer = apart.Performer(pair, side, size, task.device, seed, **act)
            return {"unit": self._performer.unit}
        if self._performer is None:
            raise PageError("a performer was asked to work before it was made ready")
        if "units" in act:
            self._performer.work(act["units"])
            return {}
        values, outputs = Path(act["values"]), Path(act["outputs"])
        self._performer.show(values, outputs, act["kept"])
        return {}

    def compare(self, task: Task) -> dict[str, Any]:
        """Compare what a performer of the side `task.side` has written with what is expected."""
        side, precision = self._side(task, self._pair(task))
        outputs, steps = Path(task.apart["outputs"]), int(task.apart["steps"])
        rule, is_baseline = Rule(**task.rule), task.side == "baseline"
        oracle = self.kept.oracles["apart"]
        return {
            "compared": apart.compare(
                oracle, side, precision, outputs, steps, rule, is_baseline=is_baseline
            )
        }

    @staticmethod
    def _side(task: Task, pair: Pair) -> tuple[Side, Precision | None]:
        """Return the side that `task.side` names by its role."""
        return Engine._both(task, pair)[ROLES.index(task.side)]

    @staticmethod
    def _both(task: Task, pair: Pair) -> tuple[Declared, Declared]:
        """Return baseline and variant, each with the precision that it declares."""
        variant = pair.variant(task.variant)
        return (pair.baseline, None), (variant.side, variant.precision)

    def facts(self, task: Task) -> dict[str, Any]:
        """Return versions and the device as this process sees them."""
        import torch

        facts: dict[str, Any] = dict(libraries.versions())
        if task.device.startswith("cuda"):
            facts["cuda"] = torch.version.cuda
            facts["device"] = torch.cuda.get_device_name()
        return facts

    def peaks(self, task: Task) -> dict[str, Any]:
        """Measure the machine's peaks."""
        from . import survey

        measured = survey.measure(task.device)
        return {"rates": dict(measured.rates), "facts": dict(measured.facts)}

    def collectives(self, task: Task) -> dict[str, Any]:
        """Time collectives with the other ranks."""
        from .collectives import sweep

        if here().world == 1:
            raise PageError("collectives need several ranks; this is one process\n    aisp nccl")
        return sweep(task.sweep["ops"], task.sweep["sizes"], task.device, self.progress)

    def compile(self, task: Task) -> dict[str, Any]:
        """Assemble every kernel that the case's sides launch, for each arch of `task`."""
        from ..kernels.assembly import Assembly

        pair = self._pair(task)
        pairs = [p for p in map(pair_of, vars(sys.modules[task.module]).values()) if p is not None]
        case = pair, pair.variant(task.variant), task.size
        assembly = Assembly(pairs, *case, root=task.root, tell=self.progress)
        assembly.run(task.archs)
        return {
            "assembled": [built.plain() for built in assembly.built],
            "words": [*assembly.notes, *map(str, assembly.built)],
            "sources": self._sources(task, pair),
        }

    def _pair(self, task: Task) -> Pair:
        page = load_page(task.page, task.root, task.module)
        pair = pair_of(getattr(page, task.function, None))
        if pair is None:
            raise PageError(f"{task.page} has no test {task.function!r} with @compare")
        return pair

    def _sources(self, task: Task, pair: Pair) -> dict[str, str]:
        from ..pages.sources import digest

        variant = pair.variant(task.variant)
        return {
            "baseline": digest(pair.baseline, task.root),
            "optimized": digest(variant.side, task.root),
        }

    @contextlib.contextmanager
    def _prepared(self, task: Task, pair: Pair) -> Iterator[None]:
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


def _need_interpreter(task: Task, pair: Pair) -> None:
    """Refuse Triton kernels on a CPU without its interpreter; bench processes are given it."""
    from ..pages.sources import triton_kernels

    sides = [pair.baseline, pair.variant(task.variant).side]
    if task.device == "cpu" and not interpreting() and triton_kernels(sides, task.root):
        raise PageError(
            f"{task.variant} launches Triton kernels, which without a GPU run in Triton's"
            " interpreter; it must be chosen before pytest starts when sides run inside pytest\n"
            "    TRITON_INTERPRET=1 pytest --pdb ..."
        )


def _inner(side: Side) -> Side:
    """Return the callable to check in this process: a process side's own function."""
    return getattr(side, "side", side)
