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
from ..checking.inputs import VALUE_SETS, BoundSide
from ..checking.memoization import check_repeats
from ..checking.numerics import Rule
from ..checking.reference import Reference, outputs_and_state
from ..isolation.monkeypatches import watching
from ..isolation.protections import enabled
from ..kernels.capture_launches import merge_choices, record_choices
from ..page.pair import Precision, Side
from ..results.messages import Json, TimeTask
from ..util import pytree
from ..util.device_state import release, synchronizer
from ..util.process_group import current_group
from . import schedule
from .cross_check import KernelProfile
from .memory import drop_sent_tensors
from .schedule import Budget, Samples
from .verify_outputs import OutputVerifier

PYTHON_CLOCKS = ("host", "cpu")
"""On these clocks, a side's Python code runs in every timed call."""
LONG_ROUND = 3e-3
"""A case gets at most two laps if a call of the baseline takes longer (in seconds)."""


class CheckedPairTimer(schedule.PairTimer, Protocol):
    """A pair timer whose clock can be compared with other clocks."""

    sides: tuple[BoundSide, BoundSide]

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
        one_off: seconds that preparation took, by side.
        kernels: the profile of each side, if profiles were requested.
        tuned: the configurations that were launched, by autotuned Triton kernel.
        known: the clock and the counted calls of the first lap, which later laps reuse.
    """

    task: TimeTask
    reference: Reference
    sides: Sequence[tuple[Side, Precision | None]]
    budget: Budget
    rng: random.Random
    progress: Callable[[str], None]
    one_off: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, KernelProfile] = field(default_factory=dict)
    tuned: dict[str, set[str]] = field(default_factory=dict)
    known: tuple[str, list[int]] | None = None

    def __post_init__(self) -> None:
        self.pool, self.pair = self.reference.pool, self.reference.pool.pair
        self.watch, self.rule = self.reference.watch, Rule(**self.task.rule)
        self.verifier = OutputVerifier(self.reference, self.sides, self.rule, self.task.device)
        self.names = " or ".join(dict.fromkeys(side.__name__ for side, _ in self.sides))
        self.on_gpu = self.task.device.startswith("cuda")

    def run(self) -> tuple[Samples, dict[str, Json]]:
        """Measure the case. Return the samples, and the other facts about it for the row."""
        self._learn_types()
        details: dict[str, object] = {}
        if self._rebuilds():
            # The captures of long calls vary least (spread.md).
            laps = min(2, self.budget.laps) if self.round_seconds > LONG_ROUND else self.budget.laps
            budget = self.budget.lap(laps)
            details = self._build_untimed(budget)
            parts = [self._lap(budget, first=0, checks=True)]
            budget = budget.exactly(len(parts[0].blocks))
            parts += [self._lap(budget, first=lap % 2) for lap in range(1, laps)]
        else:
            parts = [self._lap(self.budget, first=self.rng.randrange(2), checks=True)]
        parts[0].details.update(details | parts[0].details)
        if self.tuned:
            parts[0].details["choices"] = merge_choices([self.tuned])
        extra: dict[str, Json] = {"one_off": self.one_off, "errors": self.verifier.worst}
        extra["outputs_checked"] = self.verifier.compared
        if self.kernels:
            extra["kernels"] = {name: asdict(profile) for name, profile in self.kernels.items()}
        return schedule.join(parts), extra

    def _rebuilds(self) -> bool:
        """Return whether each lap builds both sides again. This is done only if it is cheap."""
        pair = self.pair
        return self.on_gpu and not (self.pool.prepared or pair.as_called or pair.state is not None)

    def _learn_types(self) -> None:
        """Run the baseline to find its output types, the bytes per slot, and the time of a call."""
        slot, state = pytree.clone(self.pool.values[0]), self.pool.new_state()
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
            self.reference, self.pair.baseline, outputs_and_state(outputs, state), (0,), None,
            self.rule, is_baseline=True,
        )  # fmt: skip
        side.close()

    def _build_untimed(self, budget: Budget) -> dict[str, object]:
        """Build both sides once without timing them, and return the timer's details.

        This chooses the clock. It also makes the first lap start from the same memory layout as the
        later laps. The layouts then differ only by the order in which the sides are built, and that
        effect cancels (docs/explanation/spread.md).
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
            yield timer

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
        order, planted = (first, 1 - first), self.task.planted
        with record_choices(self.tuned):
            for number in order:
                side, _ = self.sides[number]
                built[number] = sides.enter_context(closing(self.pool.bind(side)))
            pair = built[0], built[1]
            if not self.on_gpu:
                from .cpu_timer import CpuPairTimer

                return CpuPairTimer(self.pool, pair, budget, planted)
            from .cuda_timer import CudaPairTimer

            timer = CudaPairTimer(self.pool, pair, budget, order, self.known, planted)
            self.known = timer.clock, [w.counted for w in timer.windows]
            return timer

    def _lap(self, budget: Budget, first: int, *, checks: bool = False) -> Samples:
        """Create slots, build both sides, time the blocks, and check the last outputs.

        Args:
            first: the side to build first. Its place in memory can change its time by up to 1 %.
            checks: if True, also check other clocks, the L2, and single calls afterwards.
        """
        self._lay_slots(drop_sent=checks)
        first_process = checks and self.task.replicate == 0
        phase = self.watch.phase
        with ExitStack() as sides:
            with watching(self.names, self.pair.owns):
                with phase("build"):
                    timer = self._build(sides, budget, first)
                self.progress(f"time on the {timer.clock} clock")
                with phase("time"):
                    samples = schedule.measure(timer, budget, self.rng, first)
            with phase("verify"):
                self.verifier.verify_windows(timer)
                self.one_off.update({side.name: side.one_off for side in timer.sides})
            if first_process:
                with phase("clocks"):
                    samples.details.update(timer.check_times())
            if checks and self.task.audit:
                with phase("profile"):
                    seconds = [median(samples.baseline), median(samples.optimized)]
                    self.kernels = timer.profile(seconds)
            if timer.clock in PYTHON_CLOCKS and enabled("repeats"):
                with phase("repeats"):
                    seed = self.pool.unseen_seed + 1  # a page cannot guess this seed
                    check_repeats(self.pool, timer.sides, synchronizer(self.task.device), seed)
            if checks:
                with phase("verify"):
                    self.verifier.verify_each_call(timer.sides[1])
                with phase("other clock"):
                    samples.details.update(timer.other_clock())
            if first_process:
                with phase("memory"):
                    samples.details.update(timer.memory())
        return samples

    def _slot_count(self) -> int:
        if self.pool.prepared and self.pair.as_called:
            return 1  # a prepared side has one slot, whose values change in place
        if not self.on_gpu:
            return VALUE_SETS
        import torch

        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        free = current_group().min(torch.cuda.mem_get_info()[0])
        return self.pool.slots_for(self.output_bytes, l2_bytes, free)
