"""Time one case in one process: build both sides, time them, and check the timed outputs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Protocol

from ..checking import check
from ..checking.controls import draws_differ
from ..checking.inputs import BoundSide
from ..checking.memoization import check_repeats
from ..checking.numerics import Rule
from ..checking.reference import Reference, outputs_and_state
from ..isolation.monkeypatches import watching
from ..isolation.protections import enabled
from ..kernels.capture_launches import merge_choices, record_choices
from ..page.pair import Precision, Side
from ..results.messages import Json, TimeTask
from ..util import pytree
from ..util.device_state import OtherProcesses, release, synchronizer
from ..util.process_group import current_group
from . import schedule
from .cross_check import KernelProfile
from .memory import drop_sent_tensors
from .neighbors import FEW, MANY, NAMED, NO_VERDICT, Neighbors, Slices, slice_reader
from .schedule import Budget, Samples
from .unseen_values import UnseenValues, ValueSource, supports
from .verify_outputs import OutputVerifier

PYTHON_CLOCKS = ("host", "cpu")
"""On these clocks, a side's Python code runs in every timed call and could look up an answer."""
LONG_ROUND = 3e-3
"""If a call of the baseline takes longer than this many seconds, a case gets at most two laps."""


class CheckedPairTimer(schedule.PairTimer, Protocol):
    """A pair timer whose clock can be compared with other clocks."""

    sides: tuple[BoundSide, BoundSide]

    @property
    def unseen(self) -> UnseenValues | None:
        """The source of new values for each call, or None if windows repeat their values."""

    def check_times(self) -> dict[str, object]:
        """Refuse a side if its clocks disagree or its L2 is not cold. May run the sides again."""

    def profile(self, seconds: Sequence[float]) -> dict[str, KernelProfile]:
        """Profile both sides. Refuse a side whose kernels run longer than its `seconds`."""

    def other_clock(self) -> dict[str, object]:
        """Return the times from the other clock, which the verdict does not use.

        May run the sides again.
        """

    def memory(self) -> dict[str, object]:
        """Return the bytes that a call of each side needs. May run the sides again."""


@dataclass
class Trial:
    """The measurement of one case: build both sides, time blocks in laps, check the outputs.

    Attributes:
        source: a source that draws values in another process, or None.
        one_off: seconds that preparation took, by side.
        kernels: the profile of each side, if profiles were requested.
        tuned: the configurations of each autotuned Triton kernel that were launched.
        known: the clock and the counted calls of the first lap, which later laps reuse.
        planted: the slowdown to plant in each side.
    """

    task: TimeTask
    reference: Reference
    sides: Sequence[tuple[Side, Precision | None]]
    budget: Budget
    rng: random.Random
    progress: Callable[[str], None]
    source: ValueSource | None = None
    one_off: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, KernelProfile] = field(default_factory=dict)
    tuned: dict[str, set[str]] = field(default_factory=dict)
    known: tuple[str, list[int]] | None = None

    def __post_init__(self) -> None:
        self.pool, self.pair = self.reference.pool, self.reference.pool.pair
        self.watch, self.rule = self.reference.watch, Rule(**self.task.rule)
        self.verifier = OutputVerifier(self.reference, self.sides, self.rule, self.task.device)
        self.planted = 0.0, self.task.planted
        self.names = " or ".join(dict.fromkeys(side.__name__ for side, _ in self.sides))
        self.on_gpu = self.task.device.startswith("cuda")
        self.unseen: UnseenValues | None = None
        if self.source is not None and supports(self.pool):
            self.unseen = UnseenValues(self.pool, self.source)
        self.neighbors = Neighbors(*self._readers())

    def _readers(self) -> tuple[Callable[[], Slices | None] | None, Callable[[], dict[str, float]]]:
        """Return the functions that find other processes on the GPU."""
        if not self.on_gpu:
            return None, dict
        import torch

        return slice_reader(), OtherProcesses(torch.cuda.current_device()).shares

    def run(self) -> tuple[Samples, dict[str, Json]]:
        """Measure the case. Return the samples, and other facts about the case for the row."""
        self._learn_types()
        with self.watch.phase("neighbors"):
            self.neighbors.before()
        details: dict[str, object] = {}
        if self._rebuilds():
            laps, budget = self.laps, self.budget.lap(self.laps)
            details = self._build_untimed(budget)
            parts = [self._lap(budget, first=0, checks=True)]
            budget = budget.exactly(len(parts[0].blocks))
            parts += [self._lap(budget, first=lap % 2) for lap in range(1, laps)]
        else:
            parts = [self._lap(self.budget, first=self.rng.randrange(2), checks=True)]
        self.neighbors.refuse(NO_VERDICT)
        parts[0].details.update(details | parts[0].details | self.neighbors.details())
        if self.tuned:
            parts[0].details["choices"] = merge_choices([self.tuned])
        extra: dict[str, Json] = {"one_off": self.one_off, "errors": self.verifier.worst}
        extra["relative"] = self.verifier.relative
        extra["outputs_checked"] = self.verifier.compared
        if self.kernels:
            extra["kernels"] = {name: asdict(profile) for name, profile in self.kernels.items()}
        return schedule.join(parts), extra

    @property
    def laps(self) -> int:
        """The number of times that both sides are built, after `ready` or `run` has begun."""
        if not self._rebuilds():
            return 1
        # The captures of long calls vary least (spread.md).
        return min(2, self.budget.laps) if self.round_seconds > LONG_ROUND else self.budget.laps

    def _rebuilds(self) -> bool:
        """Return whether each lap builds both sides again, which is done only if it is cheap."""
        pair = self.pair
        return self.on_gpu and not (self.pool.prepared or pair.as_called or pair.state is not None)

    def _learn_types(self) -> None:
        """Run the baseline to find its output types, the bytes per slot, and the time of a call."""
        slot, state = pytree.clone(self.pool.value_set(0)), self.pool.new_state()
        side = BoundSide(self.pair.baseline, [slot], state)
        side.run(0)
        wait = synchronizer(self.task.device)
        wait()
        start = time.perf_counter()
        side.run(0)
        wait()
        self.round_seconds = current_group().max(time.perf_counter() - start)
        side.restore()
        outputs = side.run(0)
        wait()  # a copy to the host may still be running
        self.output_bytes = pytree.nbytes(outputs)
        check.judge(
            self.reference, self.pair.baseline, outputs_and_state(outputs, state), (0,),
            self.pair.baseline_precision, self.rule, is_baseline=True,
        )  # fmt: skip
        side.close()
        self._scale_if_needed()

    def _scale_if_needed(self) -> None:
        """As in the check, scale the inputs if two draws have nearly the same outputs."""
        if self.pool.scaled or not enabled("controls") or current_group().world > 1:
            return
        precisions = [precision for _, precision in self.sides]
        if not draws_differ(self.reference, precisions):
            self.reference.scale_inputs(on=True)
            self.reference.scale_inputs(on=draws_differ(self.reference, precisions))

    def _build_untimed(self, budget: Budget) -> dict[str, object]:
        """Build both sides once without timing them, and return the timer's details.

        This chooses the clock, and makes the first lap start from the same memory layout as later
        laps. The layouts then differ only by the order in which the sides are built, and the effect
        of this order cancels (docs/explanation/spread.md).
        """
        self._lay_slots()
        with self.watch.phase("build"), self._built(budget) as timer:
            return timer.details()

    @contextmanager
    def ready(self) -> Iterator[CheckedPairTimer]:
        """Build both sides on their slots. Yield their timer, with the best clock for both."""
        self._learn_types()
        self._lay_slots()
        with self._built(self.budget) as timer:
            self.neighbors.before()
            yield timer
            self.neighbors.look(MANY)
            self.neighbors.refuse(NAMED)

    @contextmanager
    def _built(self, budget: Budget) -> Iterator[CheckedPairTimer]:
        with ExitStack() as sides, watching(self.names, self.pair.owns):
            yield self._build(sides, budget, first=0)

    def _lay_slots(self, *, drop_sent: bool = False) -> None:
        self.pool.slots.clear()
        if drop_sent and self.on_gpu:
            drop_sent_tensors()  # exclude them from the memory of the preparation
        release(self.task.device)
        self.pool.lay_slots(self._slot_count())

    def _build(self, sides: ExitStack, budget: Budget, first: int) -> CheckedPairTimer:
        """Build both sides, starting with `first`, and return their timer. `sides` closes them."""
        built: dict[int, BoundSide] = {}
        order = first, 1 - first
        with record_choices(self.tuned):
            for number in order:
                side, _ = self.sides[number]
                built[number] = sides.enter_context(closing(self.pool.bind(side)))
            pair = built[0], built[1]
            if not self.on_gpu:
                from .cpu_timer import CpuPairTimer

                return CpuPairTimer(self.pool, pair, budget, self.planted[1], self.unseen)
            from .cuda_timer import CudaPairTimer

            timer = CudaPairTimer(self.pool, pair, budget, order, self.known, self.planted)
            self.known = timer.clock, [w.counted for w in timer.windows]
            return timer

    def _lap(self, budget: Budget, first: int, *, checks: bool = False) -> Samples:
        """Create slots, build both sides, time the blocks, and check the last outputs.

        Args:
            first: the side to build first. The order can change a side's time by up to 1 %.
            checks: if True, also check other clocks, the L2, and single calls afterwards.
        """
        self._lay_slots(drop_sent=checks)
        first_process = checks and self.task.replicate == 0
        describes = self.task.versus != "old"  # of the case, not of its old code
        phase = self.watch.phase
        with ExitStack() as sides:
            with watching(self.names, self.pair.owns):
                with phase("build"):
                    timer = self._build(sides, budget, first)
                self.progress(f"time on the {timer.clock} clock")
                with phase("time"):
                    samples = schedule.measure(timer, budget, self.rng, first)
            with phase("neighbors"):
                chains = FEW if self._rebuilds() else MANY
                self.neighbors.after_lap(samples.baseline, samples.optimized, chains=chains)
            with phase("verify"):
                if timer.unseen is None:
                    self.verifier.verify_windows(timer)
                else:
                    self.verifier.verify_calls(timer, timer.unseen)
                self.one_off.update({side.name: side.one_off for side in timer.sides})
            if first_process:
                with phase("clocks"), self.neighbors.excusing():
                    samples.details.update(timer.check_times())
            if checks and self.task.audit:
                with phase("profile"), self.neighbors.excusing():
                    seconds = [median(samples.baseline), median(samples.optimized)]
                    self.kernels = timer.profile(seconds)
            if timer.clock in PYTHON_CLOCKS and timer.unseen is None and enabled("repeats"):
                with phase("repeats"), self.neighbors.excusing():
                    seed = self.pool.unseen_seed + 1  # a page cannot guess this seed
                    check_repeats(self.pool, timer.sides, synchronizer(self.task.device), seed)
            if checks:
                with phase("verify"):
                    self.verifier.verify_each_call(timer.sides[1])
            if checks and describes:
                with phase("other clock"):
                    samples.details.update(timer.other_clock())
            if first_process and describes:
                with phase("memory"):
                    samples.details.update(timer.memory())
        return samples

    def _slot_count(self) -> int:
        if self.pool.prepared and self.pair.as_called:
            return 1  # a prepared side has one slot, whose values change in place
        if self.unseen is not None:
            if count := self.unseen.slot_count(self.output_bytes, self.task.planted):
                return count
            self.unseen = None
        if not self.on_gpu:
            return self.pool.slots_for(self.output_bytes, l2_bytes=0, free_bytes=0)
        import torch

        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        free = current_group().min(torch.cuda.mem_get_info()[0])
        return self.pool.slots_for(self.output_bytes, l2_bytes, free)
