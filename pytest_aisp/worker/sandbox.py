"""Run untrusted sides in one process, and keep the expected results in another one.

The sandboxed process receives input values and returns outputs. The pytest process times the
answers. A third process draws the values, compares the outputs, and never runs a side. So with
``--aisp-untrusted``, a side cannot access the clock, the comparison, or the expected values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..checking import check
from ..checking.compare import check_outputs
from ..checking.inputs import UNSEEN, VALUE_SETS, BoundSide
from ..checking.numerics import NamedTensors, Rule, Wrong
from ..checking.page_values import make_inputs, make_state
from ..checking.reference import Reference, outputs_and_state
from ..page.pair import Pair, Precision, Side, Size, side_name, size_words
from ..results.messages import CompareTask, PrepareTask
from ..timing.cuda_graph import capture_graph
from ..timing.schedule import MOST_STEPS
from ..util import pytree
from ..util.device_state import synchronizer

if TYPE_CHECKING:
    import torch


class SandboxedSide:
    """A side that was prepared in the sandboxed process.

    Attributes:
        unit: calls in one unit of work. A unit is one replay of a graph of ``task.counted`` calls,
            or one call without a graph.
    """

    def __init__(self, pair: Pair, side: Side, size: Size, seed: int, task: PrepareTask) -> None:
        device, self._size = task.device, size
        values = [make_inputs(pair, device, size, seed + k) for k in range(VALUE_SETS)]
        self._slots = [pytree.clone(values[k % VALUE_SETS]) for k in range(task.slots)]
        self._bound = BoundSide(side, self._slots, make_state(pair, device, size, seed))
        self._device, self._wait = device, synchronizer(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.unit = 1
        self._bound.round()
        if task.clock == "graph":
            self.unit = task.counted
            self._graph = capture_graph(lambda: self._bound.cycle(task.counted))
        self._bound.restore()
        self._wait()

    def work(self, units: int) -> None:
        """Run `units` units of work and wait for them. The state is restored every few steps."""
        restore_every = max(1, MOST_STEPS // self.unit)
        for number in range(units):
            if self._bound.state is not None and number % restore_every == 0:
                self._bound.restore()
            if self._graph is not None:
                self._graph.replay()
            else:
                self._bound.run(number % len(self._slots))
        self._wait()

    def show(self, values: Path, outputs: Path, slots: Sequence[int]) -> None:
        """Run one unit on `values` and write the outputs of `slots`.

        If the side has a state, write only the last step's outputs and the resulting state.
        """
        import torch

        inputs = torch.load(values, map_location=self._device, weights_only=False)
        for slot in self._slots:
            pytree.copy_into(slot, inputs)
        has_state = self._bound.state is not None
        self._bound.restore()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._bound.cycle(1 if has_state else len(self._slots))
        self._wait()
        if has_state:
            slots = [(self.unit - 1) % len(self._slots)]
        check_outputs(self._bound.name, self._bound.outputs, self._slots, size_words(self._size))
        found = [outputs_and_state(self._bound.outputs[k], self._bound.state) for k in slots]
        torch.save([[(path, t.detach().cpu()) for path, t in named] for named in found], outputs)


def draw(reference: Reference, values: Path) -> None:
    """Write values that no side has received before."""
    import torch

    def detached(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    torch.save(pytree.map_tensors(detached, reference.pool.value_set(UNSEEN)), values)


def compare(
    reference: Reference, side: Side, precision: Precision | None, task: CompareTask
) -> int:
    """Compare the outputs that a sandboxed side wrote with the reference. Return their number.

    Raises:
        Wrong: if an output is wrong, or the file contains no outputs.
    """
    shown = _read(Path(task.outputs), side)
    turns, rule = (UNSEEN,) * task.steps, Rule(**task.rule)
    for named in shown:
        outputs = [(path, tensor.to(reference.pool.device)) for path, tensor in named]
        is_baseline = task.side == "baseline"
        check.judge(reference, side, outputs, turns, precision, rule, is_baseline=is_baseline)
    return len(shown)


def _read(outputs: Path, side: Side) -> list[NamedTensors]:
    import torch

    try:
        shown = torch.load(outputs, weights_only=True)  # runs no code from the file
        if not shown or not all(_is_named(named) for named in shown):
            raise ValueError("no outputs in it")
    except Exception as error:
        raise Wrong(f"{side_name(side)} left no outputs that can be read: {error}") from None
    return list(shown)


def _is_named(named: NamedTensors) -> bool:
    import torch

    return all(isinstance(path, str) and type(t) is torch.Tensor for path, t in named)


def seconds_per_call(
    work: Callable[[int], float], unit: int, *, at_least: float, times: int
) -> float:
    """Return the shortest measured time of `work`, in seconds per call.

    Args:
        work: a function that runs a number of units and returns the seconds until the answer.
        unit: the number of calls in a unit.
        at_least: the minimum seconds per request, which makes the time spent in the pipe
            negligible.
        times: the number of measurements.
    """
    units = 1
    while (seconds := work(units)) < at_least:
        units *= 2 if seconds > at_least / 10 else 10
    return min(work(units) for _ in range(times)) / (units * unit)
