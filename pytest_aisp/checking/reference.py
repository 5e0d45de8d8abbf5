"""Compute the reference of one pair at one size, and cache its results."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..page.pair import SideError
from ..util import pytree
from ..util.device_state import Stopwatch, free_bytes
from ..util.process_group import current_group
from . import numerics
from .inputs import VALUE_SETS, InputPool, Inputs
from .numerics import Expected, Leaf, NamedTensors

if TYPE_CHECKING:
    import torch

    from .controls import Control


@dataclass
class Reference:
    """The results of the reference for the values of `pool`.

    Attributes:
        exact: True if the page accepts only equality. Nothing is then perturbed.
        types: the type in which the baseline returned each output, by path.
        initial_state: names of the tensors in a new state.
        controls: results of the negative controls, by precision, rule and types.
    """

    pool: InputPool
    watch: Stopwatch = field(default_factory=Stopwatch)
    exact: bool = False
    types: dict[str, torch.dtype] = field(default_factory=dict)
    initial_state: frozenset[str] = frozenset()
    controls: dict[Hashable, list[Control]] = field(default_factory=dict)
    _expected: dict[tuple[int, ...], list[Expected]] = field(default_factory=dict)
    _leaves: dict[tuple[tuple[int, ...], str | None], list[Leaf]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        state = self.pool.new_state()
        self.initial_state = frozenset(() if state is None else pytree.state_tensors(state))

    @functools.cached_property
    def state_changes(self) -> bool:
        """True if the reference changes the state of any rank."""
        if self.pool.pair.state is None:
            return False
        states = self.pool.all_states()
        before = [pytree.clone(_state_values(state)) for state in states]
        for turn in range(VALUE_SETS):
            self.evaluate(pytree.clone(self.pool.all_ranks(turn)), states)
        after = map(_state_values, states)
        return not all(_equal(old, new) for old, new in zip(before, after, strict=True))

    def leaves(self, turns: tuple[int, ...], precision: str | None) -> list[Leaf]:
        """Return the expected outputs after runs on the value sets `turns`, one after another.

        Without a state, or if the reference only reads the state, only the last turn matters.
        """
        key = (self._needed(turns), precision)
        if key not in self._leaves:
            expected = self.expected(turns)
            limit = numerics.WORST_BLOCK if precision in numerics.BLOCKED else numerics.WORST
            with self.watch.phase("reference"):
                self._leaves[key] = [
                    Leaf(one.path, one.value, self._sigma(one, precision, len(key[0])), limit)
                    for one in expected
                ]
        return self._leaves[key]

    def expected(self, turns: tuple[int, ...], *, every: bool = False) -> list[Expected]:
        """Return the reference's outputs after runs on the value sets `turns`.

        With `every`, the outputs after each turn are computed and cached in the same pass, if there
        is enough memory. Otherwise later requests for them start again from the first turn.
        """
        turns = self._needed(turns)
        if turns not in self._expected:
            every = every and self._fits_memory(len(turns))
            counts = range(1, len(turns) + 1) if every else [len(turns)]
            with self.watch.phase("reference"):
                results = self._evaluate_turns(turns, every=every)
            self._expected |= {turns[:n]: found for n, found in zip(counts, results, strict=True)}
        return self._expected[turns]

    def _needed(self, turns: tuple[int, ...]) -> tuple[int, ...]:
        return turns if self.state_changes else turns[-1:]

    def _evaluate_turns(self, turns: tuple[int, ...], *, every: bool) -> list[list[Expected]]:
        """Return the outputs after each turn, or only after the last."""
        lengths: list[int] = []

        def run(probe: int | None) -> NamedTensors:
            outputs: list[NamedTensors] = []
            for count, named in enumerate(self._run(turns, probe), start=1):
                if count == len(turns):
                    outputs.append(named)
                elif every:  # copied, because the next turn changes the state in place
                    outputs.append([(path, tensor.detach().clone()) for path, tensor in named])
            lengths[:] = map(len, outputs)
            return [leaf for named in outputs for leaf in named]

        leaves = iter(numerics.sensitivity(run, 0 if self.exact else numerics.PROBES))
        return [list(itertools.islice(leaves, length)) for length in lengths]

    def _fits_memory(self, count: int) -> bool:
        """Return whether the outputs after each of `count` turns fit in every rank's GPU memory.

        The estimate includes the values, their sensitivities, and the run itself with gradients.
        """
        if not self.pool.device.startswith("cuda"):
            return True
        tensors = pytree.state_tensors(self.pool.new_state()).values()
        needed = 8 * 2 * sum(t.numel() for t in tensors) * (3 * count + current_group().world)
        return current_group().max(needed > free_bytes() / 2) == 0

    def learn_types(self, types: Iterable[tuple[str, torch.dtype]]) -> None:
        """Store the types of outputs whose types are not known yet."""
        new = {path: dtype for path, dtype in types if path not in self.types}
        if new:
            self.types.update(new)
            self._leaves.clear()

    def _sigma(self, one: Expected, precision: str | None, steps: int) -> torch.Tensor | None:
        dtype = str(self.types.get(one.path, one.value.dtype)).removeprefix("torch.")
        if one.squares is None or dtype not in numerics.UNIT:
            return None
        work = self.pool.pair.work_at(self.pool.size, current_group().world)
        return numerics.allowed(
            one.value, one.squares, dtype=dtype, precision=precision, work=work, steps=steps
        )

    def _run(self, turns: tuple[int, ...], probe: int | None) -> Iterator[NamedTensors]:
        """Run the reference on each of `turns`. Yield this rank's outputs and state after each."""
        states = self.pool.all_states()
        if self.pool.pair.state is not None and probe is not None:
            for state in states:
                _perturb_in_place(pytree.state_tensors(state), probe)
        for turn in turns:
            outputs = self.evaluate(_promoted(self.pool.all_ranks(turn), probe), states)
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

    def without_slice(self, turn: int) -> list[Leaf] | None:
        """Return the outputs with a slice of the largest input set to zero.

        Return None if there is no such input, or if the reference raises an error for it.
        """
        if self.pool.pair.state is not None:
            return None
        ranks = pytree.clone(self.pool.all_ranks(turn))
        for values in ranks:
            floating = [t for _, t in pytree.tensors(values) if t.is_floating_point() and t.dim()]
            if not floating:
                return None
            largest = max(floating, key=lambda t: t.numel()).detach()
            last = largest.shape[-1]
            largest[..., last - max(1, last // 16) :] = 0
        try:
            outputs = outputs_and_state(self.evaluate(ranks, []), None)
        except refusals():
            return None
        return [Leaf(path, value.double(), None) for path, value in outputs]


def refusals() -> tuple[type[Exception], ...]:
    """Return the types of errors that code raises if values violate its preconditions."""
    import torch

    not_factored = torch.linalg.LinAlgError  # type: ignore[attr-defined]
    return (ArithmeticError, AssertionError, IndexError, ValueError, not_factored)


def _state_values(state: object) -> dict[str, object]:
    """Return the tensors, numbers and strings of `state` by name."""
    leaves = pytree.leaves(state)
    plain = {path: leaf for path, leaf in leaves if isinstance(leaf, (int, float, str))}
    return {**plain, **pytree.state_tensors(state)}


def _equal(old: dict[str, object], new: dict[str, object]) -> bool:
    import torch

    def same(a: object, b: object) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return torch.equal(a.double(), b.double())  # a reference may change a model's dtype
        return type(a) is type(b) and a == b

    return old.keys() == new.keys() and all(same(old[name], new[name]) for name in old)


def outputs_and_state(outputs: object, state: object) -> NamedTensors:
    """Return all tensors to compare: first the outputs, then the tensors of the state."""
    named = numerics.as_leaves(outputs) if outputs is not None else []
    if state is not None:
        tensors = pytree.state_tensors(state)
        named += [(name, tensor.detach()) for name, tensor in sorted(tensors.items())]
    return named


def _promoted(ranks: list[Inputs], probe: int | None) -> list[Inputs]:
    """Copy the inputs of all ranks. With a probe, the copy is in float64 and perturbed."""
    import torch

    if probe is None:
        return pytree.clone(ranks)
    generator = _generators(probe)

    def perturbed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        moved = tensor.detach().to(torch.float64, copy=True)
        numerics.perturb(moved, generator(tensor))
        return moved.requires_grad_(tensor.requires_grad)

    return pytree.map_tensors(perturbed, ranks)


def _perturb_in_place(tensors: dict[str, torch.Tensor], probe: int) -> None:
    import torch

    generator = _generators(probe + 1000)
    sharing = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    with torch.no_grad():
        for tensor in tensors.values():
            if not tensor.is_floating_point():
                continue
            alone = sharing[tensor.untyped_storage().data_ptr()] == 1
            if torch.finfo(tensor.dtype).eps > numerics.STEP / 16 and alone:
                tensor.data = tensor.double()  # bf16 would round the perturbation away
            numerics.perturb(tensor, generator(tensor))


def _generators(probe: int) -> Callable[[torch.Tensor], torch.Generator]:
    """Return a function that gives each device its own generator, seeded by `probe`."""
    import torch

    @functools.cache
    def on_device(device: torch.device) -> torch.Generator:
        return torch.Generator(device=device).manual_seed(probe)

    return lambda tensor: on_device(tensor.device)
