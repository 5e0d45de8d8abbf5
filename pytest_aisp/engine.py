"""The engine of a bench process: it loads a page, checks its sides, times them, checks again.

An `Engine` answers `Task`s. It keeps what neighbouring cases share: the page, the values, the
reference. Cases are ordered size by size, so a ladder builds its reference once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from . import check, numerics, timing, trees
from .check import Checked, Oracle
from .loader import load_page, pair_of
from .messages import Task
from .numerics import Rule
from .pair import Pair, Precision, Side, is_plain, size_words
from .sides import SideError, Subject
from .timing import Budget, Samples
from .workbench import VALUE_SETS, Workbench

Progress = Callable[[str], None]
CPU_ORACLES = 4
"""Most expected results kept on a CPU."""
LONG_ROUND = 3e-3
"""Seconds of a call above which two laps must do: its captures scatter least (docs/spread.md)."""
FIXED_SIZES = 3
"""Most of a page's listed check sizes that are checked before a case is timed."""


class PageError(Exception):
    """A page that cannot be run as declared; the message says what to change."""


@dataclass
class Engine:
    """Answer tasks in this process, one at a time."""

    progress: Progress = lambda text: None
    _oracles: dict[str, Oracle] = field(default_factory=dict)
    _checked: dict[str, Checked] = field(default_factory=dict)

    def check(self, task: Task) -> dict[str, Any]:
        """Check the case's variant and its baseline; return what was found by size."""
        pair = self._pair(task)
        rule = Rule(**task.rule)
        found = {}
        with self._prepared(task, pair):
            for size in self._sizes(task, pair):
                self.progress(f"check {size_words(size)}")
                found[size_words(size)] = asdict(self._check_at(task, pair, size, rule))
            if task.search:
                self._search(task, pair, rule)
        return {"sizes": found, "sources": self._sources(task, pair)}

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
        if key not in self._checked:
            variant = pair.variant(task.variant)
            sides: list[tuple[Side, Precision | None]] = [
                (pair.baseline, None),
                (variant.side, variant.precision),
            ]
            oracle = self._oracle(task, pair, size, f"check{task.seed}")
            self._checked[key] = check.check_sides(
                oracle,
                [(_inner(s), p) for s, p in sides],
                rule,
                controls=controls,
                tell=lambda name: self.progress(f"check {name} at {size_words(size)}"),
            )
        return self._checked[key]

    def _sizes(self, task: Task, pair: Pair) -> list[Mapping[str, Any]]:
        listed = [s for s in pair.check_sizes if is_plain(s)]
        if task.at == "check":
            if listed:
                return listed
            small = [s for s in pair.cpu_sizes] or [dict(task.size)]
            return small[:1]
        return [*listed[:FIXED_SIZES], dict(task.size)]

    def _search(self, task: Task, pair: Pair, rule: Rule) -> None:
        from .search import smallest_failure

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

    def time(self, task: Task) -> dict[str, Any]:
        """Time the case's variant against its baseline; check the outputs of the timed calls."""
        pair = self._pair(task)
        variant = pair.variant(task.variant)
        first: tuple[Side, Precision | None] = (pair.baseline, None)
        second: tuple[Side, Precision | None] = (variant.side, variant.precision)
        sides = (second, second) if task.versus == "self" else (first, second)
        budget = Budget(**task.budget)
        with self._prepared(task, pair):
            samples, extra = self._measure(task, pair, sides, budget)
        if task.replicate:  # one of many processes on this GPU: leave the memory to the next
            self._oracles.clear()
            self._release(task.device)
        return {
            **asdict(samples),
            "value": samples.value,
            "sources": self._sources(task, pair),
            "work": asdict(pair.work(**task.size)),
            **extra,
        }

    def _measure(
        self,
        task: Task,
        pair: Pair,
        sides: tuple[tuple[Side, Precision | None], tuple[Side, Precision | None]],
        budget: Budget,
    ) -> tuple[Samples, dict[str, Any]]:
        name = os.path.basename(task.page)
        seed = f"{name}{task.function}{task.variant}{task.size}{task.seed}{task.replicate}"
        names = [s.__name__ for s, _ in sides]
        if task.timer is not None:
            module, function = task.timer["target"].split(":")
            simulate = getattr(importlib.import_module(module), function)
            return simulate(names[0], names[1], task.timer.get("options", {}), budget, seed), {}
        if hasattr(sides[0][0], "environment"):
            from .processes import measure_processes

            return measure_processes(task, sides, budget, random.Random(seed), self.progress), {}
        return _Trial(self, task, pair, sides, budget, random.Random(seed)).run()

    def sample(self, task: Task) -> dict[str, Any]:
        """Time one process side in this process and check its output."""
        from .processes import time_here

        pair = self._pair(task)
        sides = [(pair.baseline, None), *((v.side, v.precision) for v in pair.variants)]
        side, precision = next((s, p) for s, p in sides if s.__name__ == task.side)
        bench = Workbench(pair, dict(task.size), task.device, zlib.crc32(task.function.encode()))
        slot = trees.clone(bench.values[0])
        subject = Subject(side, [slot], None)
        with self._prepared(task, pair):
            warmup = getattr(side, "warmup", 3)
            seconds = time_here(lambda: subject.run(0), warmup, _waiter(task.device))
        oracle, rule = Oracle(bench), Rule(**task.rule)
        for turn in range(VALUE_SETS):  # the timed output, then one that nobody can remember
            if turn:
                trees.copy_into(slot, bench.values[turn])
                subject.run(0)
            found = check.observed(subject.outputs[0], None)
            check.judge(oracle, side, found, (turn,), precision, rule, is_baseline=True)
        return {"seconds": seconds}

    def facts(self, task: Task) -> dict[str, Any]:
        """Return versions and the device as this process sees them."""
        import torch

        facts: dict[str, Any] = {"torch": torch.__version__, "triton": _version("triton")}
        if task.device.startswith("cuda"):
            facts["cuda"] = torch.version.cuda
            facts["device"] = torch.cuda.get_device_name()
        return facts

    def peaks(self, task: Task) -> dict[str, Any]:
        """Measure the machine's peaks."""
        from . import peaks

        measured = peaks.measure(task.device)
        return {"rates": dict(measured.rates), "facts": dict(measured.facts)}

    def compile(self, task: Task) -> dict[str, Any]:
        """Assemble the kernel files that the case's sides use, for each arch of `task`."""
        from .sources import kernel_files

        pair = self._pair(task)
        variant = pair.variant(task.variant)
        modules = kernel_files([pair.baseline, variant.side], task.root)
        if not modules:
            raise PageError(f"{task.variant} launches no kernel file, so nothing was assembled")
        made = {}
        for module in modules:
            for arch in task.archs:
                self.progress(f"assemble {module.path.name} for {arch}")
                made[f"{module.path.name} {arch}"] = module.assemble(arch)
        return {"assembled": made, "sources": self._sources(task, pair)}

    def _pair(self, task: Task) -> Pair:
        page = load_page(task.page, task.root, task.module)
        pair = pair_of(getattr(page, task.function, None))
        if pair is None:
            raise PageError(f"{task.page} has no test {task.function!r} with @compare")
        return pair

    def _oracle(self, task: Task, pair: Pair, size: Mapping[str, Any], salt: str) -> Oracle:
        page = f"{task.page}{task.function}{task.device}"
        key = f"{page}{size_words(size)}{salt}"
        if key not in self._oracles:
            self._make_room(page, task.device)
            seed = zlib.crc32(f"{task.function}{salt}".encode())
            self._oracles[key] = Oracle(Workbench(pair, dict(size), task.device, seed))
        return self._oracles[key]

    def _sources(self, task: Task, pair: Pair) -> dict[str, str]:
        from .sources import digest

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
        was = gc.isenabled()
        if "gc" not in pair.owns:
            gc.collect()
            gc.disable()
        try:
            yield
        finally:
            if was:
                gc.enable()

    def _make_room(self, page: str, device: str) -> None:
        """Forget what other pages expected, and this page's too where memory is short."""
        import torch

        if not device.startswith("cuda"):
            scarce = len(self._oracles) >= CPU_ORACLES
        else:
            free, total = torch.cuda.mem_get_info()
            reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            scarce = free + reserved < 0.5 * total
        for key in [k for k in self._oracles if scarce or not k.startswith(page)]:
            del self._oracles[key]
        self._release(device)

    @staticmethod
    def _release(device: str) -> None:
        import torch

        gc.collect()
        gc.freeze()  # what is alive now stays: later collections do not walk through torch again
        if device.startswith("cuda"):
            torch.cuda.empty_cache()


class _Trial:
    """One case being timed: laps of slots, subjects, bout, blocks, and a check of each output."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        pair: Pair,
        sides: Sequence[tuple[Side, Precision | None]],
        budget: Budget,
        rng: random.Random,
    ) -> None:
        self.engine, self.task, self.pair = engine, task, pair
        self.sides, self.budget, self.rng = sides, budget, rng
        self.oracle = engine._oracle(task, pair, task.size, "time")
        self.bench = self.oracle.bench
        self.rule = Rule(**task.rule)
        self.worst: dict[str, float] = {}
        self.outputs = 0
        self.one_off: dict[str, float] = {}

    def run(self) -> tuple[Samples, dict[str, Any]]:
        self._learn_types()
        if self._rebuilds():
            parts = [self._lap(self.budget.lap(), lap) for lap in range(self._laps())]
        else:
            parts = [self._lap(self.budget, self.rng.randrange(2))]
        extra = {"one_off": self.one_off, "outputs_checked": self.outputs, "errors": self.worst}
        return timing.join(parts), extra

    def _laps(self) -> int:
        """Return the laps: two where the baseline's one round alone takes long."""
        return min(2, self.budget.laps) if self.round_seconds > LONG_ROUND else self.budget.laps

    def _rebuilds(self) -> bool:
        """Whether each lap may build both sides anew: only where that costs next to nothing."""
        on_gpu = self.task.device.startswith("cuda")
        return on_gpu and not (
            self.bench.prepared or self.pair.as_called or self.pair.state is not None
        )

    def _learn_types(self) -> None:
        """Run the baseline once: its outputs fix the types, and the bytes of a slot."""
        bench = self.bench
        slot = trees.clone(bench.values[0])
        state = None if self.pair.state is None else self._state()
        subject = Subject(self.pair.baseline, [slot], state)
        outputs = subject.run(0)
        wait = _waiter(self.task.device)
        wait()
        start = time.perf_counter()
        subject.run(0)
        wait()
        self.round_seconds = time.perf_counter() - start
        subject.restore()
        outputs = subject.run(0)
        self.output_bytes = trees.nbytes(outputs)
        check.judge(
            self.oracle, self.pair.baseline, check.observed(outputs, state), (0,), None,
            self.rule, is_baseline=True,
        )  # fmt: skip
        subject.close()

    def _state(self) -> Any:
        from .sides import make_state

        return make_state(self.pair, self.bench.device, self.bench.size, self.bench.seed)

    def _lap(self, budget: Budget, lap: int) -> Samples:
        """Lay slots, build both sides, time `budget`'s blocks, check every output of the last ones.

        Odd laps build the second side first: who is built first is up to 0.2 % slower
        (docs/spread.md).
        """
        bench = self.bench
        bench.slots.clear()
        self.engine._release(self.task.device)
        bench.lay_slots(self._slot_count())
        order = (1, 0) if lap % 2 else (0, 1)
        built = {side: bench.subject(self.sides[side][0]) for side in order}
        subjects = built[0], built[1]
        try:
            bout = self._bout(subjects, budget, order)
            self.engine.progress(f"time on the {bout.clock} clock")
            samples = timing.measure(bout, budget, self.rng)
            for subject, (side, precision), window in zip(
                subjects, self.sides, bout.windows, strict=True
            ):
                self._verify(subject, side, precision, window.calls)
                self.one_off[subject.name] = subject.one_off
            if lap == 0 or not self._rebuilds():
                samples.details.update(bout.other())
        finally:
            for subject in subjects:
                subject.close()
        return samples

    def _slot_count(self) -> int:
        if self.bench.prepared and self.pair.as_called:
            return 1  # what is prepared owns its inputs; their values still change in place
        if not self.task.device.startswith("cuda"):
            return VALUE_SETS
        import torch

        l2 = torch.cuda.get_device_properties().L2_cache_size
        return self.bench.slots_for(self.output_bytes, l2, torch.cuda.mem_get_info()[0])

    def _bout(
        self, subjects: tuple[Subject, Subject], budget: Budget, order: tuple[int, int]
    ) -> timing.Bout:
        if self.task.device.startswith("cuda"):
            from .cuda import CudaBout

            return CudaBout(self.bench, subjects, budget, order)
        from .host import HostBout

        return HostBout(self.bench, subjects, budget)

    def _verify(
        self, subject: Subject, side: Side, precision: Precision | None, calls: int
    ) -> None:
        """Compare the outputs of the last timed calls, every slot's, with the reference."""
        pattern, slots = self.bench.pattern, len(self.bench.slots)
        if self.pair.state is not None:
            turns = tuple(pattern[call % slots] for call in range(calls))
            found = check.observed(subject.outputs[(calls - 1) % slots], subject.state)
            self._compare(side, found, turns, precision)
            return
        for outputs, turn in zip(subject.outputs, pattern, strict=True):
            self._compare(side, check.observed(outputs, None), (turn,), precision)

    def _compare(
        self, side: Side, found: check.Named, turns: tuple[int, ...], precision: Precision | None
    ) -> None:
        try:
            fits = check.judge(self.oracle, side, found, turns, precision, self.rule)
        except numerics.Wrong as error:
            raise numerics.Wrong(f"{error}\nThis is the output of a timed call.") from None
        self.outputs += 1
        name = side.__name__
        self.worst[name] = max(self.worst.get(name, 0.0), *(f.worst for f in fits))


def _waiter(device: str) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None


def _version(package: str) -> str | None:
    try:
        return str(importlib.import_module(package).__version__)
    except ImportError:
        return None


def _inner(side: Side) -> Side:
    """Return the callable to check in this process: a process side's own function."""
    return getattr(side, "side", side)


__all__ = ["Engine", "PageError", "SideError"]
