"""Prove that sides compute what the reference says, before and after they are timed.

`check_sides` runs the sides against an `Oracle` under the rules (fresh memory, fresh values at the
same addresses, inputs unchanged, nothing aliased), then the exact probe and the controls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..isolation.monkeypatches import watching
from ..isolation.protections import enabled
from ..page.pair import Pair, Precision, Side, SideError, side_name, size_words
from ..util import pytree
from ..util.device_state import synchronizer
from ..util.process_group import current_group
from . import compare, numerics
from .compare import Comparison, compare_all, explain
from .controls import TooLoose, check_tolerance
from .inputs import STEPS, VALUE_SETS, BoundSide
from .numerics import Leaf, Rule, Wrong
from .reference import Named, Reference, outputs_and_state

if TYPE_CHECKING:
    import torch

FEW_TERMS = 1024
"""Terms of a sum that widen no bound worth mentioning: 2e-6 in fp32."""


@dataclass
class Checked:
    """What checking found, in plain types.

    Attributes:
        fits: by side, the worst rms and the worst element in allowed deviations.
        controls: each control in words.
        exact: whether the exact integer probe ran, or why not.
    """

    fits: dict[str, list[float]] = field(default_factory=dict)
    controls: list[str] = field(default_factory=list)
    exact: str = ""


def check_sides(
    oracle: Reference,
    sides: Sequence[tuple[Side, Precision | None]],
    rule: Rule,
    *,
    controls: bool = True,
    tell: Callable[[str], None] = lambda name: None,
) -> Checked:
    """Check every side of `sides` against the oracle; the baseline comes first.

    Without `controls` the sides are checked, the tolerance is not: a size found by search may be
    too small for any control to apply. `tell` is told which side is being checked.

    Raises:
        Wrong: for a wrong result; SideError: for a side that breaks a rule of comparing;
        TooLoose, CannotTell: when a control condemns the tolerance or the inputs.
    """
    result = Checked()
    base: list[Comparison] = []
    for number, (side, precision) in enumerate(sides):
        tell(side_name(side))
        if number == 0 and enabled("work") and not (rule.given or rule.exact):
            _check_terms(oracle)
        fits = _check_side(oracle, side, precision, rule, number == 0)
        result.fits[side_name(side)] = [max(f.rms for f in fits), max(f.worst for f in fits)]
        if number == 0:
            base = fits
        elif precision is None and not rule.given and not rule.exact and enabled("ratio"):
            _check_ratio(oracle, side, fits, base)
    if enabled("exact-probe"):
        result.exact = _exact_probe(oracle, [side for side, _ in sides])
    if controls and enabled("controls"):
        with oracle.watch.phase("controls"):
            found = check_tolerance(oracle, [precision for _, precision in sides], rule)
            result.controls = [str(control) for control in found]
    return result


def _check_terms(oracle: Reference) -> None:
    """Refuse a sum that would be longer than there are numbers: its length widens the bound."""
    bench = oracle.bench
    held = [t for _, t in pytree.tensors(bench.values[0])]
    held += pytree.state_tensors(bench.new_state()).values()
    most = sum(tensor.numel() for tensor in held)
    terms = bench.pair.work_at(bench.size, current_group().world).terms
    most *= current_group().world
    if held and terms > max(most, FEW_TERMS):
        raise TooLoose(
            f"Work(terms={terms}) at {size_words(bench.size)}: the longest sum, but the inputs have"
            f" {most} elements; the derived bound grows with it"
        )


def _check_ratio(
    oracle: Reference, side: Side, fits: Sequence[Comparison], base: Sequence[Comparison]
) -> None:
    others = {(f.path, f.step): f for f in base}
    for fit in fits:
        other = others.get((fit.path, fit.step), fit)  # what only this side's optimizer has
        limit = max(numerics.BASELINE_FACTOR * other.rms, numerics.BASELINE_FLOOR)
        if fit.rms > limit * (1 + fit.scatter + other.scatter):
            raise Wrong(
                f"{side_name(side)} is less exact than its baseline at"
                f" {size_words(oracle.bench.size)}:"
                f" {fit.path} has an rms error of {fit.rms:.3g} allowed deviations, limit"
                f" {limit:.3g} (1.5 x the baseline's {other.rms:.3g}, at least 0.8);"
                " declare Variant(precision=...) where that is on purpose"
            )


def _check_side(
    oracle: Reference, side: Side, precision: Precision | None, rule: Rule, is_baseline: bool
) -> list[Comparison]:
    bench, pair = oracle.bench, oracle.bench.pair
    slot = pytree.clone(bench.values[0])
    if enabled("fresh-memory"):
        _poison_free_memory(slot)
    subject = BoundSide(side, [slot], bench.new_state())
    wait = synchronizer(bench.device)
    fits: list[Comparison] = []
    turns: list[int] = []
    oracle.foresee(tuple(_turns(pair)))
    try:
        for turn in _turns(pair):
            pytree.copy_into(slot, bench.value_set(turn))
            with watching(subject.name, pair.owns):
                outputs = subject.run(0)
            wait()
            turns.append(turn)
            _check_manners(subject, slot, bench.value_set(turn), outputs, size_words(bench.size))
            found = outputs_and_state(outputs, subject.state)
            judged = judge(oracle, side, found, tuple(turns), precision, rule, is_baseline)
            fits += [replace(fit, step=len(turns)) for fit in judged]
    finally:
        subject.close()
    return fits


def _turns(pair: Pair) -> list[int]:
    """Return which value sets a side is checked on, one after the other at one address."""
    if pair.state is not None:
        return [k % VALUE_SETS for k in range(STEPS if enabled("steps") else 1)]
    return [0, 1] if enabled("fresh-values") else [0]


def judge(
    oracle: Reference,
    side: Side,
    found: Named,
    turns: tuple[int, ...],
    precision: Precision | None,
    rule: Rule,
    is_baseline: bool = False,
) -> list[Comparison]:
    """Compare what a side produced with the oracle; raise `Wrong` at the first mismatch."""
    if is_baseline and not oracle.types:
        oracle.learn((path, tensor.dtype) for path, tensor in _matched(oracle, found, turns))
    if oracle.bench.pair.state is not None:  # what only this side's optimizer makes
        oracle.learn((path, tensor.dtype) for path, tensor in found)
    leaves = oracle.leaves(turns, precision)
    if oracle.bench.pair.state is not None:
        leaves, found = _shared(oracle, side, leaves, found)
    _check_form(oracle, side, found, leaves)
    fits = compare_all([tensor for _, tensor in found], leaves, rule)
    for fit in fits:
        if not fit.ok and enabled("bound"):
            raise Wrong(explain(side_name(side), oracle.bench.size, fit, rule))
    return fits


def _shared(
    oracle: Reference, side: Side, leaves: Sequence[Leaf], found: Named
) -> tuple[list[Leaf], Named]:
    """Pair what both have; only what an optimizer made lazily may be absent."""
    by_name = dict(found)
    for leaf in leaves:
        needed = leaf.path in oracle.begins or leaf.path[:5] != "state" or ".grad" in leaf.path
        if leaf.path not in by_name and needed:
            raise Wrong(f"{side_name(side)} has no {leaf.path}, which the reference has")
    shared = [leaf for leaf in leaves if leaf.path in by_name]
    return shared, [(leaf.path, by_name[leaf.path]) for leaf in shared]


def _matched(oracle: Reference, found: Named, turns: tuple[int, ...]) -> Iterator[Any]:
    """Yield the baseline's outputs under the reference's paths."""
    if oracle.bench.pair.state is not None:
        yield from found
        return
    expected = oracle.known(turns)
    if len(expected) == len(found):
        yield from ((path, got) for (path, _, _), (_, got) in zip(expected, found, strict=True))


def _check_form(oracle: Reference, side: Side, found: Named, leaves: Sequence[Leaf]) -> None:
    if not enabled("form"):
        return
    name, size = side_name(side), size_words(oracle.bench.size)
    if len(found) != len(leaves):
        raise Wrong(f"{name} returned {len(found)} tensors at {size}, the reference {len(leaves)}")
    for (path, tensor), leaf in zip(found, leaves, strict=True):
        if tensor.shape != leaf.value.shape:
            raise Wrong(
                f"{name} returned {path} of shape {tuple(tensor.shape)} at {size},"
                f" the reference says {tuple(leaf.value.shape)}"
            )
        if path != leaf.path and "view_as_real(" in path + leaf.path:  # complex and real
            raise Wrong(f"{name} returned {path} at {size}, the reference {leaf.path}")
        dtype = oracle.types.get(leaf.path)
        if dtype is not None and tensor.dtype != dtype:
            raise Wrong(
                f"{name} returned {path} as {tensor.dtype} at {size}, the baseline as {dtype}"
            )
        if tensor.device.type != leaf.value.device.type:
            raise Wrong(
                f"{name} returned {path} on {tensor.device} at {size},"
                f" the reference is on {leaf.value.device}"
            )


def _check_manners(subject: BoundSide, slot: Any, values: Any, outputs: Any, size: str) -> None:
    """Refuse a side that returns nothing, changes its inputs or returns a view of them."""
    if outputs is None and subject.state is None and enabled("returned"):
        raise SideError(f"{subject.name} returned None at {size}; a side returns its outputs")
    compare.check_unchanged(subject.name, slot, values, size)
    compare.check_outputs(subject.name, outputs, [slot], size)


def _poison_free_memory(like: Any) -> None:
    """Leave NaN in the memory that the allocator hands out next: `empty` holds no answer."""
    import torch

    held = [torch.empty_like(t) for _, t in pytree.tensors(like) for _ in range(2) if t.numel()]
    pytree.poison(held)


def _exact_probe(oracle: Reference, sides: Sequence[Side]) -> str:
    """Run every side on small integers, where a linear operation has one right answer."""
    import torch

    bench, pair = oracle.bench, oracle.bench.pair
    if pair.state is not None:
        return "n/a: the page has a state"
    ranks = [_integers(values, rank) for rank, values in enumerate(bench.everyone(0))]
    expected = oracle.expected_of(pytree.clone(ranks))
    if current_group().max(any(not _is_exact(value) for _, value in expected)):
        return "n/a: not exact on small integers"
    if pair.multi_rank and current_group().max(not _fits(oracle, expected)):
        return "n/a: ranks round what they add"
    for side in sides:
        subject = BoundSide(side, [pytree.clone(ranks[current_group().rank])])
        try:
            found = numerics.as_leaves(subject.run(0))
            synchronizer(bench.device)()
            wanted = [Leaf(path, want.double(), None) for path, want in expected]
            for fit in compare_all([got for _, got in found], wanted, Rule(exact=True)):
                if not fit.ok:
                    message = explain(side_name(side), bench.size, fit, Rule(exact=True))
                    raise Wrong(f"{message}, on small integers, where every sum is exact")
        finally:
            subject.close()
    return "bit for bit" if any(torch.is_floating_point(v) for _, v in expected) else "integers"


def _is_exact(value: torch.Tensor) -> bool:
    scaled = value.double() * 16
    return bool(((scaled == scaled.round()) & (scaled.abs() < 2**24)).all())


def _fits(oracle: Reference, expected: Named) -> bool:
    """Return whether the outputs' types hold every integer up to the largest expected value.

    What one rank adds is then as exact as the sum of all.
    """
    for path, value in expected:
        unit = numerics.UNIT.get(str(oracle.types.get(path)).removeprefix("torch."), 2.0**-24)
        if value.numel() and float(value.double().abs().amax()) > 1 / unit:
            return False
    return True


def _integers(values: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """Return `values` of `rank` as small integers: -2 to 2, three of four of them zero."""
    import torch

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        made: torch.Tensor = pytree.clone(tensor.detach())
        generator = torch.Generator(device=tensor.device).manual_seed(11 + rank)
        draws = torch.randint(-8, 9, tensor.shape, generator=generator, device=tensor.device)
        made.copy_(torch.where(draws.abs() <= 2, draws, 0))
        return made.requires_grad_(tensor.requires_grad)

    return pytree.map_tensors(drawn, values)
