"""Compute the reference of one pair at one size, and cache its results."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from ..page.pair import Precision, SideError
from ..util import pytree
from ..util.device_state import Stopwatch, free_bytes
from ..util.process_group import current_group
from . import numerics
from .error_bound import (
    ErrorBound,
    Pass,
    floating,
    perturb_all,
    promote_in_place,
    promoted,
    unfused_attention,
)
from .inputs import VALUE_SETS, InputPool
from .numerics import Expected, Leaf, NamedTensors
from .page_values import Inputs, seeded

if TYPE_CHECKING:
    import torch

    from .compare import Comparison
    from .controls import Control
    from .rounding import Rounding, Structure

_added = itertools.count(1000)
"""Indices for value sets that exist only temporarily."""
Turns: TypeAlias = tuple[int, ...]
"""Indices of the value sets on which the reference runs, one after another."""


@dataclass
class Reference:
    """The results of the reference for the values of `pool`.

    Attributes:
        exact: True if the page accepts only equal outputs. Nothing is perturbed in that case.
        types: the dtype in which the baseline returned each output, by path.
        large: True if the outputs are too large to be kept for more than one value set.
        initial_state: names of the tensors in a new state.
        controls: results of the negative controls, by precision, rule and types.
        baselines: the comparisons of the baseline's outputs, by side, precision and rule.
        bound: the error bound of the outputs.
    """

    pool: InputPool
    watch: Stopwatch = field(default_factory=Stopwatch)
    exact: bool = False
    types: dict[str, torch.dtype] = field(default_factory=dict)
    large: bool = False
    initial_state: frozenset[str] = frozenset()
    controls: dict[Hashable, list[Control]] = field(default_factory=dict)
    baselines: dict[Hashable, list[Comparison]] = field(default_factory=dict)
    _structure: Structure | None = None
    _passes: dict[Turns, Pass] = field(default_factory=dict)
    _leaves: dict[tuple[Turns, Precision | None], list[Leaf]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bound = ErrorBound(weakref.proxy(self))  # a cycle would keep the outputs in memory
        state = self.pool.new_state()
        self.initial_state = frozenset(() if state is None else pytree.state_tensors(state))

    @functools.cached_property
    def state_changes(self) -> bool:
        """True if the reference changes the state of any rank."""
        if self.pool.pair.state is None:
            return False
        states = self.pool.all_states()
        before = [pytree.clone(pytree.state_values(state)) for state in states]
        for turn in range(VALUE_SETS):
            self.evaluate(pytree.clone(self.pool.all_ranks(turn)), states)
        after = map(pytree.state_values, states)
        return not all(map(pytree.equal_values, before, after))

    def leaves(self, turns: Turns, precision: Precision | None) -> list[Leaf]:
        """Return the expected outputs after runs on the value sets `turns`, one after another.

        If the page has no state, or the reference only reads it, only the last turn matters.
        """
        turns = self._needed(turns)
        key = (turns, precision)
        if key not in self._leaves:
            expected = self.expected(turns)
            limit = numerics.WORST_BLOCK if precision in numerics.BLOCKED else numerics.WORST
            sigmas: Sequence[torch.Tensor | None] = [None] * len(expected)
            with self.watch.phase("reference"):
                if not self.exact:
                    sigmas = self.bound.sigmas(self._passes[turns], len(turns), precision)
            both = zip(expected, sigmas, strict=True)
            self._leaves[key] = [Leaf(one.path, one.value, sigma, limit) for one, sigma in both]
            if self.large:
                self.bound.forget()
        return self._leaves[key]

    def refine(self, turns: Turns, precision: Precision | None) -> bool:
        """Make the error bound more exact, or return False if that is impossible."""
        turns = self._needed(turns)
        if self.exact or not self.bound.refine(self._passes[turns], len(turns), precision):
            return False
        self._leaves = {key: leaves for key, leaves in self._leaves.items() if key[1] != precision}
        return True

    def expected(self, turns: Turns, *, every: bool = False) -> list[Expected]:
        """Return the reference's outputs after runs on the value sets `turns`.

        Args:
            every: True to cache the outputs after each turn, if there is enough memory. If they are
                not cached, a later request for them starts from the first turn again.
        """
        turns = self._needed(turns)
        if turns not in self._passes:
            if self.large:
                self._forget()
            every = every and self._fits_memory(len(turns))
            with self.watch.phase("reference"):
                made = self._run_and_trace(turns, every=every)
            self._passes |= {turns[:count]: made for count in made.expected}
            nbytes = sum(one.value.nbytes for one in made.expected[len(turns)])
            self.large = nbytes > 2 * self.pool.most_kept
        return self._passes[turns].expected[len(turns)]

    def values(self, turns: Turns) -> NamedTensors:
        """Return the reference's outputs without error bounds. The outputs are not cached."""
        turns = self._needed(turns)
        if turns in self._passes:
            return [(one.path, one.value) for one in self._passes[turns].expected[len(turns)]]
        for named in self.run(turns, None):
            outputs = named
        return outputs

    def scale_inputs(self, *, on: bool) -> None:
        """Scale all value sets except the first (`InputPool.scale`), and drop cached outputs."""
        self.pool.scale(on=on)
        self.controls.clear()
        self.baselines.clear()
        self._forget()

    @contextlib.contextmanager
    def added(self, values: Inputs) -> Iterator[int]:
        """Add a value set and yield its index. Afterwards, remove the set and its outputs."""
        turn = next(_added)
        self.pool.values[turn] = values
        try:
            yield turn
        finally:
            self.pool.values.pop(turn, None)
            self._passes.pop((turn,), None)
            self._leaves = {key: kept for key, kept in self._leaves.items() if key[0] != (turn,)}
            self.bound.forget((turn,))

    def _forget(self) -> None:
        self._passes.clear()
        self._leaves.clear()
        self.bound.forget()

    def _needed(self, turns: Turns) -> Turns:
        return turns if self.state_changes else turns[-1:]

    def _run_and_trace(self, turns: Turns, *, every: bool) -> Pass:
        """Run the reference for its outputs, and run it again to record its operations.

        The expected values come from the run without tracing, because tracing replaces composite
        operations. In this first run, the reference can also fill its own caches.
        """
        made = Pass(turns)
        for count, named in enumerate(self.run(turns, None), start=1):
            if every or count == len(turns):
                copy = self.pool.pair.state is not None  # the next turn changes the state in place
                made.expected[count] = [numerics.as_expected(*leaf, copy=copy) for leaf in named]
        if not self.exact:
            made.structure = self._structure or self._trace(made)
            if self.pool.pair.state is None:  # all values run through the same operations
                self._structure = made.structure
        return made

    def _trace(self, made: Pass) -> Structure:
        from .operations import decompositions
        from .rounding import Model, Rounding, Structure
        from .untraced import SeesOutside

        decompositions()  # its first call takes seconds, so it is not timed
        structure, same, start = Structure(), True, time.monotonic()
        try:
            with SeesOutside(structure):
                rounding = Rounding(Model(), structure)
                for count, named in enumerate(self.run(made.turns, rounding), start=1):
                    if count in made.expected:
                        rounding.record_origins(named)
                        same &= all(map(numerics.nearly_same, made.expected[count], named))
        except Exception as error:  # the reference itself ran before, so tracing is the reason
            structure.untraced = f"{type(error).__name__} is raised when it is traced"
        seconds = time.monotonic() - start
        self.bound.first_draws = 1 if seconds > numerics.LONG else self.bound.first_draws
        if seconds > numerics.SLOW:
            self.bound.slow = True
            self.bound.remark(
                f"the reference takes {seconds:.0f} s: the error bound comes from one perturbed run"
            )
        if not same:
            structure.untraced = "its results change when it is traced"
        if structure.random:
            turns = made.turns
            self._require_repeatable(turns, made.expected[len(turns)], structure.random)
        return structure

    def _require_repeatable(self, turns: Turns, first: list[Expected], operation: str) -> None:
        """Refuse a reference whose results depend on random numbers that it draws."""
        *_, again = self.run(turns, None, self.pool.seed + 1)
        both = zip(first, again, strict=True)
        if not all(numerics.same_values(one.value, value) for one, (_, value) in both):
            raise SideError(
                f"reference draws random numbers ({operation}), so its results differ from run to"
                " run; draw them in `inputs` and pass them to all sides"
            )

    def _fits_memory(self, count: int) -> bool:
        """Return whether the outputs after each of `count` turns fit in every rank's GPU memory.

        The estimate includes the values, their errors, and the memory of the run with gradients.
        """
        if not self.pool.device.startswith("cuda"):
            return True
        tensors = pytree.state_tensors(self.pool.new_state()).values()
        needed = 8 * 2 * sum(t.numel() for t in tensors) * (3 * count + current_group().world)
        return current_group().max(needed > free_bytes() / 2) == 0

    def learn_types(self, types: Iterable[tuple[str, torch.dtype]]) -> None:
        """Store the dtypes of outputs whose dtypes are not known yet."""
        new = {path: dtype for path, dtype in types if path not in self.types}
        if new:
            self.types.update(new)
            self._leaves.clear()

    def run(
        self,
        turns: Turns,
        rounding: Rounding | None,
        seed: int | None = None,
        perturb: int | None = None,
    ) -> Iterator[NamedTensors]:
        """Run the reference on each of `turns`. Yield this rank's outputs and state after each run.

        Args:
            rounding: the mode that perturbs intermediate values.
            seed: the seed of random numbers that the reference draws.
            perturb: the seed with which the inputs and the state are perturbed, or None.
        """
        promote = perturb is not None or (
            rounding is not None and rounding.perturbation is not None
        )
        states = self.pool.all_states()
        stored = [floating(pytree.state_tensors(s)) for s in states if s is not None]
        for tensors in stored:
            types = [tensor.dtype for tensor in tensors]
            if promote:
                promote_in_place(tensors)
            if rounding is not None:
                rounding.start(tensors, types)
            if perturb is not None:
                perturb_all(tensors, perturb + 1000)
        for turn in turns:
            given = self.pool.all_ranks(turn)
            ranks = promoted(given) if promote else pytree.clone(given)
            if rounding is not None:
                rounding.start(floating(ranks), [tensor.dtype for tensor in floating(given)])
            if perturb is not None:
                perturb_all(floating(ranks), perturb)
            with contextlib.ExitStack() as stack:
                stack.enter_context(seeded(self.pool.seed if seed is None else seed))
                if rounding is not None:
                    stack.enter_context(unfused_attention())
                    stack.enter_context(rounding)
                outputs = self.evaluate(ranks, states)
            yield outputs_and_state(outputs, states[current_group().rank])

    def evaluate(self, ranks: list[Inputs], states: list[object]) -> object:
        """Run the reference on the inputs and states of all ranks. Return this rank's outputs."""
        pair = self.pool.pair
        with self.watch.phase("reference"):
            if pair.multi_rank:
                arguments = (ranks,) if pair.state is None else (states, ranks)
                return self._own_part(pair.reference(*arguments))
            values = ranks[0] if pair.state is None else (states[0], *ranks[0])
            outputs: object = pair.reference(*values)
            return outputs

    def _own_part(self, outputs: object) -> object:
        """Return this rank's part of the outputs of all ranks."""
        if outputs is None:
            return None
        world = current_group().world
        if not isinstance(outputs, (list, tuple)) or len(outputs) != world:
            many = f" of {len(outputs)}" if isinstance(outputs, (list, tuple)) else ""
            raise SideError(
                f"reference must return a list with the outputs of each of {world} ranks; it"
                f" returned {type(outputs).__name__}{many}"
            )
        return outputs[current_group().rank]

    def without_slice(self, turn: int) -> list[torch.Tensor] | None:
        """Return the reference's outputs if a slice of the largest input tensor is set to zero.

        Return None if the page has a state, if no input is a floating-point tensor, or if the
        reference raises an error on these inputs.
        """
        if self.pool.pair.state is not None:
            return None
        ranks = pytree.clone(self.pool.all_ranks(turn))
        for values in ranks:
            tensors = [t for _, t in pytree.tensors(values) if t.is_floating_point() and t.dim()]
            if not tensors:
                return None
            largest = max(tensors, key=lambda t: t.numel()).detach()
            last = largest.shape[-1]
            largest[..., last - max(1, last // 16) :] = 0
        try:
            outputs = outputs_and_state(self.evaluate(ranks, []), None)
        except refusals():
            return None
        return [value for _, value in outputs]


def refusals() -> tuple[type[Exception], ...]:
    """Return the exception types that code raises if values violate its preconditions."""
    import torch

    not_factored = torch.linalg.LinAlgError  # type: ignore[attr-defined]
    return (ArithmeticError, AssertionError, IndexError, ValueError, not_factored)


def outputs_and_state(outputs: object, state: object) -> NamedTensors:
    """Return all tensors to compare: first the outputs, then the tensors of the state."""
    named = numerics.as_leaves(outputs) if outputs is not None else []
    if state is not None:
        tensors = pytree.state_tensors(state)
        named += [(name, tensor.detach()) for name, tensor in sorted(tensors.items())]
    return named
