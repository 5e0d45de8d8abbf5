"""What is expected of one pair at one size: the reference, run once and kept."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..page.pair import SideError
from ..util import pytree
from ..util.device_state import Stopwatch, free_bytes
from ..util.process_group import current_group
from . import numerics
from .inputs import VALUE_SETS, InputPool
from .numerics import Leaf

if TYPE_CHECKING:
    import torch

    from .controls import Control

Named = list[tuple[str, "torch.Tensor"]]


@dataclass
class Reference:
    """What the reference says of `bench`'s values, computed once and kept.

    Attributes:
        exact: whether the page accepts equality alone; then nothing is perturbed.
        types: by output path, the type in which the baseline returned it.
        begins: names of the tensors with which a state begins.
        controls: what the negative controls said, by precision, rule and types.
    """

    bench: InputPool
    watch: Stopwatch = field(default_factory=Stopwatch)
    exact: bool = False
    types: dict[str, torch.dtype] = field(default_factory=dict)
    begins: frozenset[str] = frozenset()
    controls: dict[tuple[Any, ...], list[Control]] = field(default_factory=dict)
    _known: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)
    _leaves: dict[tuple[Any, ...], list[Leaf]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        state = self.bench.new_state()
        self.begins = frozenset(pytree.state_tensors(state)) if state is not None else frozenset()

    @functools.cached_property
    def carries(self) -> bool:
        """Whether the reference leaves a state, of any rank, that is not as it began."""
        pair, bench = self.bench.pair, self.bench
        if pair.state is None:
            return False
        states = bench.every_state() if pair.multi_rank else [bench.new_state()]
        begun = [pytree.clone(_held(state)) for state in states]
        with self.watch.phase("reference"):
            for turn in range(VALUE_SETS):
                if pair.multi_rank:
                    pair.reference(states, list(_promoted(tuple(bench.everyone(turn)), None)))
                else:
                    pair.reference(states[0], *_promoted(bench.value_set(turn), None))
        return not all(_same(b, _held(s)) for b, s in zip(begun, states, strict=True))

    def leaves(self, turns: tuple[int, ...], precision: str | None) -> list[Leaf]:
        """Return the expected outputs after running on value sets `turns`, one after the other.

        Without a state, or with one that the reference only reads, the last turn alone matters.
        """
        known = self.known(turns)
        key = (turns if self.carries else turns[-1:], precision)
        if key not in self._leaves:
            work = self.bench.pair.work_at(self.bench.size, current_group().world)
            with self.watch.phase("reference"):
                most = numerics.WORST_BLOCK if precision in numerics.BLOCKED else numerics.WORST
                self._leaves[key] = [
                    Leaf(
                        path,
                        value,
                        self._sigma(path, value, squares, precision, work, len(key[0])),
                        most,
                    )
                    for path, value, squares in known
                ]
        return self._leaves[key]

    def known(self, turns: tuple[int, ...]) -> list[Any]:
        """Return path, value and squared sensitivity of each expected output after `turns`."""
        turns = turns if self.carries else turns[-1:]
        if turns not in self._known:
            with self.watch.phase("reference"):
                [self._known[turns]] = self._expected(turns, every=False)
        return self._known[turns]

    def foresee(self, turns: tuple[int, ...]) -> None:
        """Learn what is expected after each of `turns` in one go, where a state carries over.

        One after the other every turn would be run again for each that follows. Where memory may
        not hold all of it they are.
        """
        if not self.carries or len(turns) < 2 or turns in self._known or not self._room(len(turns)):
            return
        with self.watch.phase("reference"):
            for count, found in enumerate(self._expected(turns, every=True), start=1):
                self._known[turns[:count]] = found

    def _expected(self, turns: tuple[int, ...], *, every: bool) -> list[list[Any]]:
        """Return path, value, squared sensitivity of what is there after each turn, or the last."""
        lengths: list[int] = []

        def run(probe: int | None) -> Named:
            found: list[Named] = []
            for count, named in enumerate(self._after(turns, probe), start=1):
                if count == len(turns):
                    found.append(named)
                elif every:  # the next turn changes a state in its place
                    found.append([(path, tensor.detach().clone()) for path, tensor in named])
            lengths[:] = map(len, found)
            return [leaf for named in found for leaf in named]

        leaves = iter(numerics.sensitivity(run, 0 if self.exact else numerics.PROBES))
        return [list(itertools.islice(leaves, length)) for length in lengths]

    def _room(self, count: int) -> bool:
        """Whether what is expected after each of `count` turns fits the GPU, of any rank, at once.

        Of a state and its gradients there are the value, its sensitivity, and a run's own.
        """
        if not self.bench.device.startswith("cuda"):
            return True
        held = pytree.state_tensors(self.bench.new_state()).values()
        needed = 8 * 2 * sum(t.numel() for t in held) * (3 * count + current_group().world)
        return current_group().max(needed > free_bytes() / 2) == 0

    def learn(self, types: Iterable[tuple[str, torch.dtype]]) -> None:
        """Learn in which type the sides return what is not known yet."""
        new = {path: dtype for path, dtype in types if path not in self.types}
        if new:
            self.types.update(new)
            self._leaves.clear()

    def _sigma(
        self, path: str, value: Any, squares: Any, precision: str | None, work: Any, steps: int
    ) -> torch.Tensor | None:
        dtype = str(self.types.get(path, value.dtype)).removeprefix("torch.")
        if squares is None or dtype not in numerics.UNIT:
            return None
        return numerics.allowed(
            value, squares, dtype=dtype, precision=precision, work=work, steps=steps
        )

    def _after(self, turns: tuple[int, ...], probe: int | None) -> Iterator[Named]:
        """Run the reference on each of `turns`; yield what it returns and its state, as it is."""
        pair, bench = self.bench.pair, self.bench
        if pair.multi_rank:
            yield from self._after_everyone(turns, probe)
            return
        state = bench.new_state()
        if state is not None and probe is not None:
            _perturb_in_place(pytree.state_tensors(state), probe)
        for turn in turns:
            values = _promoted(bench.value_set(turn), probe)
            outputs = pair.reference(*(values if state is None else (state, *values)))
            yield outputs_and_state(outputs, state)

    def _after_everyone(self, turns: tuple[int, ...], probe: int | None) -> Iterator[Named]:
        """Run the reference on the inputs and states of all ranks, and yield this rank's."""
        pair, bench = self.bench.pair, self.bench
        states = bench.every_state() if pair.state is not None else []
        if probe is not None:
            for state in states:
                _perturb_in_place(pytree.state_tensors(state), probe)
        for turn in turns:
            ranks = list(_promoted(tuple(bench.everyone(turn)), probe))
            outputs = pair.reference(*([states] if states else []), ranks)
            yield outputs_and_state(
                self._mine(outputs), states[current_group().rank] if states else None
            )

    def _mine(self, outputs: Any) -> Any:
        """Return this rank's part of what the reference returned for all of them."""
        if outputs is None:
            return None
        if not isinstance(outputs, (list, tuple)) or len(outputs) != current_group().world:
            many = f" of {len(outputs)}" if isinstance(outputs, (list, tuple)) else ""
            raise SideError(
                f"reference must return what each of {current_group().world} ranks holds, as a"
                f" list with one entry a rank; it returned {type(outputs).__name__}{many}"
            )
        return outputs[current_group().rank]

    def dropped(self, turn: int, precision: str | None) -> list[Leaf] | None:
        """Return what the reference says with a slice of the largest input zeroed, or None."""
        pair, bench = self.bench.pair, self.bench
        if pair.state is not None:
            return None
        ranks = pytree.clone(bench.everyone(turn))
        for values in ranks:
            floating = [t for _, t in pytree.tensors(values) if t.is_floating_point() and t.dim()]
            if not floating:
                return None
            largest = max(floating, key=lambda t: t.numel()).detach()
            last = largest.shape[-1]
            largest[..., last - max(1, last // 16) :] = 0
        return [Leaf(path, value.double(), None) for path, value in self.expected_of(ranks)]

    def expected_of(self, ranks: list[tuple[Any, ...]]) -> Named:
        """Return what the reference says, without a state, of these inputs, one tuple a rank."""
        pair = self.bench.pair
        with self.watch.phase("reference"):
            made = (
                self._mine(pair.reference(ranks)) if pair.multi_rank else pair.reference(*ranks[0])
            )
        return outputs_and_state(made, None)


def _held(state: Any) -> dict[str, Any]:
    """Return by name what `state` holds: its tensors, and the numbers and words beside them."""
    beside = {
        path: leaf for path, leaf in pytree.leaves(state) if isinstance(leaf, (int, float, str))
    }
    return {**beside, **pytree.state_tensors(state)}


def _same(these: dict[str, Any], those: dict[str, Any]) -> bool:
    import torch

    def equal(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return torch.equal(one.double(), other.double())  # a reference may convert a model
        return type(one) is type(other) and bool(one == other)

    return these.keys() == those.keys() and all(equal(these[n], those[n]) for n in these)


def outputs_and_state(outputs: Any, state: Any) -> Named:
    """Return what is compared: the outputs, then every tensor of the state."""
    found = numerics.as_leaves(outputs) if outputs is not None else []
    if state is not None:
        held = pytree.state_tensors(state)
        found += [(name, tensor.detach()) for name, tensor in sorted(held.items())]
    return found


def _promoted(values: tuple[Any, ...], probe: int | None) -> tuple[Any, ...]:
    """Return a copy of `values`; for a probe in float64 and perturbed."""
    if probe is None:
        return pytree.clone(values)
    import torch

    generator = _generators(probe)

    def perturbed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        moved = tensor.detach().to(torch.float64, copy=True)
        numerics.perturb(moved, generator(tensor))
        return moved.requires_grad_(tensor.requires_grad)

    return pytree.map_tensors(perturbed, values)


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
    """Return what gives each tensor's device its own generator, seeded by `probe`."""
    import torch

    made: dict[Any, torch.Generator] = {}

    def generator(like: torch.Tensor) -> torch.Generator:
        if like.device not in made:
            made[like.device] = torch.Generator(device=like.device).manual_seed(probe)
        return made[like.device]

    return generator
