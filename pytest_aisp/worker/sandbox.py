"""Sides that are not trusted: one process runs them, another knows what is expected.

The performer gets values and hands back outputs; whoever asked it for a number of calls times the
answer. The referee makes the values and the expected outputs, and never runs a side. Under
``--aisp-untrusted`` a page's sides may do what they like to the process that judges them at first:
here neither clock, nor comparison, nor expected value is in their reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..checking import check
from ..checking.inputs import UNSEEN, VALUE_SETS, BoundSide, make_inputs, make_state
from ..checking.numerics import NamedTensors, Rule, Wrong
from ..checking.reference import Reference, outputs_and_state
from ..page.pair import Pair, Precision, Side, side_name
from ..timing.schedule import MOST_STEPS
from ..util import pytree
from ..util.device_state import synchronizer


class SandboxedSide:
    """A side ready to be asked for calls, in a process of its own.

    Args:
        clock: ``graph`` captures `counted` calls, everything else calls as called.
        slots: copies of the inputs, as many as were timed.

    Attributes:
        unit: calls in one unit of work.
    """

    def __init__(
        self,
        pair: Pair,
        side: Side,
        size: dict[str, Any],
        device: str,
        seed: int,
        *,
        clock: str,
        counted: int,
        slots: int,
    ) -> None:
        values = [make_inputs(pair, device, size, seed + k) for k in range(VALUE_SETS)]
        self._slots = [pytree.clone(values[k % VALUE_SETS]) for k in range(slots)]
        self._subject = BoundSide(side, self._slots, make_state(pair, device, size, seed))
        self._device, self._wait = device, synchronizer(device)
        self._graph: Any = None
        self.unit = 1
        self._subject.round()
        if clock == "graph":
            from ..timing.cuda_graph import capture_graph

            self.unit = counted
            self._graph = capture_graph(lambda: self._subject.cycle(counted))
        self._subject.restore()
        self._wait()

    def work(self, units: int) -> None:
        """Run `units` units and wait for them; a state is put back every few steps."""
        often = max(1, MOST_STEPS // self.unit)
        for number in range(units):
            if self._subject.state is not None and number % often == 0:
                self._subject.restore()
            if self._graph is not None:
                self._graph.replay()
            else:
                self._subject.run(number % len(self._slots))
        self._wait()

    def show(self, values: Path, outputs: Path, kept: Sequence[int]) -> None:
        """Run one unit on `values`, in place, and write what that gave for the slots `kept`.

        With a state it is the state after the unit's steps, begun where it began.
        """
        import torch

        last = torch.load(values, map_location=self._device, weights_only=False)
        for slot in self._slots:
            pytree.copy_into(slot, last)
        self._subject.restore()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._subject.cycle(1 if self._subject.state is not None else len(self._slots))
        self._wait()
        if self._subject.state is not None:
            kept = [(self.unit - 1) % len(self._slots)]
        found = [outputs_and_state(self._subject.outputs[k], self._subject.state) for k in kept]
        torch.save([[(path, t.detach().cpu()) for path, t in named] for named in found], outputs)


def draw(oracle: Reference, values: Path) -> None:
    """Write the value set that no side has seen."""
    import torch

    torch.save(pytree.map_tensors(_bare, oracle.pool.value_set(UNSEEN)), values)


def _bare(tensor: Any) -> Any:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def compare(
    oracle: Reference,
    side: Side,
    precision: Precision | None,
    outputs: Path,
    steps: int,
    rule: Rule,
    *,
    is_baseline: bool,
) -> int:
    """Compare what a performer wrote with the oracle; return how many outputs there were.

    Raises:
        Wrong: for a wrong output, or a file that holds none.
    """
    for found in (shown := _read(outputs, side)):
        moved = [(path, tensor.to(oracle.pool.device)) for path, tensor in found]
        check.judge(oracle, side, moved, (UNSEEN,) * steps, precision, rule, is_baseline)
    return len(shown)


def _read(outputs: Path, side: Side) -> list[NamedTensors]:
    import torch

    try:
        shown = torch.load(outputs, weights_only=True)  # nothing in it is run
        if not shown or not all(_is_named(named) for named in shown):
            raise ValueError("no outputs in it")
    except Exception as error:
        raise Wrong(f"{side_name(side)} left no outputs that can be read: {error}") from None
    return list(shown)


def _is_named(named: Any) -> bool:
    import torch

    return all(isinstance(path, str) and type(t) is torch.Tensor for path, t in named)


def seconds_apart(work: Callable[[int], float], unit: int, *, least: float, times: int) -> float:
    """Return the least seconds per call that `work` was seen to take.

    Args:
        work: does so many units and returns the seconds that the asker waited.
        unit: calls in a unit.
        least: seconds that one question must last, so that asking does not count.
        times: how often it is asked.
    """
    units = 1
    while (seen := work(units)) < least:
        units *= 2 if seen > least / 10 else 10
    return min(work(units) for _ in range(times)) / (units * unit)
