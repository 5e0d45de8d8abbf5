"""One case being timed in one process: build both sides, time them, check what was timed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from ..checking import check, compare, numerics
from ..checking.inputs import VALUE_SETS, BoundSide, slot_order
from ..checking.memoization import check_repeats
from ..checking.numerics import Rule
from ..checking.reference import Named, Reference, outputs_and_state
from ..isolation.monkeypatches import watching
from ..isolation.protections import enabled
from ..kernels import autotune
from ..page.pair import Precision, Side, size_words
from ..results.messages import TimeTask
from ..util import pytree
from ..util.device_state import release, synchronizer
from ..util.process_group import current_group
from . import schedule
from .memory import let_go
from .schedule import Budget, Samples

PYTHON_RUNS = ("host", "cpu")
"""Clocks on which a side's Python runs at every timed call."""
LONG_ROUND = 3e-3
"""Seconds of a call above which two laps must do: its captures scatter least (spread.md)."""
FURTHER_CALLS = 4
"""Calls after the last window that are compared one by one."""


class WatchedPairTimer(schedule.PairTimer, Protocol):
    """A bout whose clock can be held against others."""

    def check_times(self) -> dict[str, Any]:
        """Refuse a side of which several clocks tell different times, or an L2 that is not cold.

        Returns what was found, of JSON types; may run the sides again.
        """

    def profile(self, seconds: Sequence[float]) -> dict[str, Any]:
        """Return by side what it launches; refuse one that is at work for longer than told."""

    def memory(self) -> dict[str, Any]:
        """Return by side the bytes that a call needs; may run the sides again."""


@dataclass
class Trial:
    """One case being timed: laps of slots, subjects, bout, blocks, and a check of each output.

    Attributes:
        worst: by side, the worst element of its timed outputs in allowed deviations.
        one_off: by side, the seconds that preparing it took.
        outputs: how many outputs of timed calls were compared.
        kernels: by side, what it launches, where that was asked for.
        tuned: by tuned Triton kernel, the configurations it was launched in.
        known: clock and counted calls of the first lap, with which the others are built.
    """

    task: TimeTask
    oracle: Reference
    sides: Sequence[tuple[Side, Precision | None]]
    budget: Budget
    rng: random.Random
    progress: Callable[[str], None]
    worst: dict[str, float] = field(default_factory=dict)
    one_off: dict[str, float] = field(default_factory=dict)
    outputs: int = 0
    kernels: dict[str, Any] = field(default_factory=dict)
    tuned: dict[str, set[str]] = field(default_factory=dict)
    known: tuple[str, list[int]] | None = None

    def __post_init__(self) -> None:
        self.bench, self.pair = self.oracle.bench, self.oracle.bench.pair
        self.watch, self.rule = self.oracle.watch, Rule(**self.task.rule)

    def run(self) -> tuple[Samples, dict[str, Any]]:
        """Return the samples, and what else the row says of this measurement."""
        self._learn_types()
        notes: dict[str, Any] = {}
        if self._rebuilds():
            share = self.budget.lap(self._laps())
            notes = self._settle(share)
            parts = [self._lap(share, first=0, looks=True)]
            share = share.exactly(len(parts[0].blocks))
            parts += [self._lap(share, first=lap % 2) for lap in range(1, self._laps())]
        else:
            parts = [self._lap(self.budget, first=self.rng.randrange(2), looks=True)]
        parts[0].details.update(notes | parts[0].details)
        if self.tuned:
            parts[0].details["choices"] = autotune.merge_choices([self.tuned])
        extra = {"one_off": self.one_off, "outputs_checked": self.outputs, "errors": self.worst}
        extra |= {"kernels": self.kernels} if self.kernels else {}
        return schedule.join(parts), extra

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
        slot = pytree.clone(bench.values[0])
        state = bench.new_state()
        subject = BoundSide(self.pair.baseline, [slot], state)
        outputs = subject.run(0)
        wait = synchronizer(self.task.device)
        wait()
        start = time.perf_counter()
        subject.run(0)
        wait()
        self.round_seconds = current_group().max(time.perf_counter() - start)
        subject.restore()
        outputs = subject.run(0)
        wait()  # a copy to the host may still be under way
        self.output_bytes = pytree.nbytes(outputs)
        check.judge(
            self.oracle, self.pair.baseline, outputs_and_state(outputs, state), (0,), None,
            self.rule, is_baseline=True,
        )  # fmt: skip
        subject.close()

    def _settle(self, budget: Budget) -> dict[str, Any]:
        """Build both sides once, untimed, and return what the bout says of it.

        It chooses the clock, and leaves the memory as each lap finds it: what the laps then lie in
        differs by the order of building alone, and cancels (docs/explanation/spread.md).
        """
        self._lay()
        built: dict[int, BoundSide] = {}
        try:
            with watching(self._names(), self.pair.owns), self.watch.phase("build"):
                return self._build(built, budget, first=0).details()
        finally:
            for subject in built.values():
                subject.close()

    @contextmanager
    def ready(self) -> Iterator[WatchedPairTimer]:
        """Yield both sides built on their slots, on the best clock that both can use."""
        self._learn_types()
        self._lay()
        built: dict[int, BoundSide] = {}
        try:
            with watching(self._names(), self.pair.owns):
                yield self._build(built, self.budget, first=0)
        finally:
            for subject in built.values():
                subject.close()

    def _lay(self, looks: bool = False) -> None:
        self.bench.slots.clear()
        if looks and self.task.device.startswith("cuda"):
            let_go()  # what preparing keeps is counted from here on
        release(self.task.device)
        self.bench.lay_slots(self._slot_count())

    def _names(self) -> str:
        return " or ".join(dict.fromkeys(side.__name__ for side, _ in self.sides))

    def _build(self, built: dict[int, BoundSide], budget: Budget, first: int) -> WatchedPairTimer:
        """Fill `built` with both sides, `first` first, and return their bout."""
        with autotune.record_choices(self.tuned):
            for side in (first, 1 - first):
                built[side] = self.bench.subject(self.sides[side][0])
            return self._bout((built[0], built[1]), budget, (first, 1 - first))

    def _lap(self, budget: Budget, first: int, *, looks: bool = False) -> Samples:
        """Lay slots, build both sides, time `budget`'s blocks, check every output of the last ones.

        Args:
            first: who is built first: where its memory lies then is worth up to 1 %.
            looks: whether to look at other clocks, the L2 and single calls afterwards.
        """
        self._lay(looks)
        built: dict[int, BoundSide] = {}
        names = self._names()
        try:
            with watching(names, self.pair.owns):
                with self.watch.phase("build"):
                    bout = self._build(built, budget, first)
                self.progress(f"time on the {bout.clock} clock")
                with self.watch.phase("time"):
                    samples = schedule.measure(bout, budget, self.rng, first)
            with self.watch.phase("verify"):
                self._verify_all(built, bout, names)
            if looks and self.task.replicate == 0:
                with self.watch.phase("clocks"):
                    samples.details.update(bout.check_times())
            if looks and self.task.audit:
                with self.watch.phase("profile"):
                    told = [median(samples.baseline), median(samples.optimized)]
                    self.kernels = bout.profile(told)
            if bout.clock in PYTHON_RUNS and enabled("repeats"):
                with self.watch.phase("repeats"):
                    self._check_repeats((built[0], built[1]))
            if looks:
                with self.watch.phase("verify"):
                    self._verify_each_call(built[1])
                with self.watch.phase("other clock"):
                    samples.details.update(bout.other())
            if looks and self.task.replicate == 0:
                with self.watch.phase("memory"):
                    samples.details.update(bout.memory())
        finally:
            for subject in built.values():
                subject.close()
        return samples

    def _check_repeats(self, subjects: tuple[BoundSide, BoundSide]) -> None:
        seed = self.bench.unseen_seed + 1  # as secret as the values that no side has seen
        check_repeats(self.bench, subjects, synchronizer(self.task.device), seed)

    def _verify_all(
        self, built: Mapping[int, BoundSide], bout: schedule.PairTimer, names: str
    ) -> None:
        """Compare what the last timed calls left: inputs, outputs and states of both sides."""
        synchronizer(
            self.task.device
        )()  # who is late, `check_times` says: no luck of reading decides
        size = size_words(self.bench.size)
        for slot, turn in zip(self.bench.slots, self.bench.pattern, strict=True):
            compare.check_unchanged(names, slot, self.bench.value_set(turn), size)
        for number, (side, precision) in enumerate(self.sides):
            compare.check_outputs(side.__name__, built[number].outputs, self.bench.slots, size)
            self._verify(built[number], side, precision, bout.windows[number])
            self.one_off[built[number].name] = built[number].one_off

    def _slot_count(self) -> int:
        if self.bench.prepared and self.pair.as_called:
            return 1  # what is prepared owns its inputs; their values still change in place
        if not self.task.device.startswith("cuda"):
            return VALUE_SETS
        import torch

        l2 = torch.cuda.get_device_properties().L2_cache_size
        free = current_group().min(torch.cuda.mem_get_info()[0])
        return self.bench.slots_for(self.output_bytes, l2, free)

    def _bout(
        self, subjects: tuple[BoundSide, BoundSide], budget: Budget, order: tuple[int, int]
    ) -> WatchedPairTimer:
        if self.task.device.startswith("cuda"):
            from .cuda_timer import CudaPairTimer

            planted = self.task.planted
            bout = CudaPairTimer(self.bench, subjects, budget, order, self.known, planted)
            self.known = bout.clock, [w.counted for w in bout.windows]
            return bout
        from .cpu_timer import CpuPairTimer

        return CpuPairTimer(self.bench, subjects, budget, self.task.planted)

    def _verify(
        self, subject: BoundSide, side: Side, precision: Precision | None, window: schedule.Window
    ) -> None:
        """Compare the outputs of the last timed calls, every called slot's, with the reference."""
        if not enabled("timed-outputs"):
            return
        pattern, slots = self.bench.pattern, len(self.bench.slots)
        order = slot_order(window.counted, slots, window.calls - window.counted)
        if self.pair.state is not None:
            turns = tuple(pattern[slot] for slot in order)
            found = outputs_and_state(subject.outputs[order[-1]], subject.state)
            self._compare(side, found, turns, precision)
            return
        for slot in sorted(set(order)):
            found = outputs_and_state(subject.outputs[slot], None)
            self._compare(side, found, (pattern[slot],), precision)

    def _verify_each_call(self, subject: BoundSide) -> None:
        """Call the second side a few times more, on other values each time, and compare each call.

        Inside a window values stay the same: who works at every second call only is right by the
        end of it.
        """
        if self.pair.state is not None or not enabled("every-call"):
            return
        side, precision = self.sides[1]
        wait = synchronizer(self.task.device)
        for call in range(FURTHER_CALLS):
            turn = call % VALUE_SETS
            pytree.copy_into(self.bench.slots[0], self.bench.value_set(turn))
            found = outputs_and_state(subject.run(0), None)
            wait()
            self._compare(side, found, (turn,), precision)

    def _compare(
        self, side: Side, found: Named, turns: tuple[int, ...], precision: Precision | None
    ) -> None:
        try:
            fits = check.judge(self.oracle, side, found, turns, precision, self.rule)
        except numerics.Wrong as error:
            raise numerics.Wrong(f"{error}\nThis is the output of a timed call.") from None
        self.outputs += 1
        name = side.__name__
        self.worst[name] = max(self.worst.get(name, 0.0), *(f.worst for f in fits))
