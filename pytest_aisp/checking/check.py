"""Check that sides compute what the reference computes, before and after they are timed.

`check_sides` runs the sides on fresh memory and on fresh values at the same addresses. It refuses
changed inputs and outputs that alias inputs, and compares the outputs with the reference. Then it
applies the exact probe and the controls. `smallest_failure` searches for the smallest size that
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from ..isolation.monkeypatches import watching
from ..isolation.protections import enabled
from ..page.pair import Pair, Precision, Side, SideError, Size, side_name, size_words
from ..util import pytree
from ..util.device_state import synchronizer
from ..util.process_group import current_group
from . import compare, numerics
from .compare import Comparison, compare_all, explain
from .controls import TooLoose, check_tolerance, exact_probe
from .inputs import STEPS, VALUE_SETS, BoundSide
from .numerics import Leaf, NamedTensors, Rule, Wrong
from .reference import Reference, outputs_and_state

FEW_TERMS = 1024
"""A sum of at most this many terms hardly widens the error bound (2e-6 in fp32)."""
EXAMPLES = 20
"""Number of sizes that a search tries."""


@dataclass
class CheckResult:
    """The result of a check, in plain types.

    Attributes:
        errors: the largest rms and the worst element of each side, in allowed deviations.
        controls: the result of each control.
        exact: the result of the exact integer probe, or the reason why it did not run.
    """

    errors: dict[str, list[float]] = field(default_factory=dict)
    controls: list[str] = field(default_factory=list)
    exact: str = ""


def check_sides(
    reference: Reference,
    sides: Sequence[tuple[Side, Precision | None]],
    rule: Rule,
    *,
    controls: bool = True,
    progress: Callable[[str], None] = lambda name: None,
) -> CheckResult:
    """Check every side of `sides` against the reference. The baseline comes first.

    Without `controls`, the tolerance is not checked. This is for sizes found by a search, which may
    be too small for any control to apply. `progress` is called with the name of each side.

    Raises:
        Wrong: if a result is wrong.
        SideError: if a side breaks a rule of the comparison.
        TooLoose, CannotTell: if a control shows that the tolerance or the inputs are unsuitable.
    """
    result = CheckResult()
    baseline: list[Comparison] = []
    for number, (side, precision) in enumerate(sides):
        progress(side_name(side))
        if number == 0 and enabled("work") and rule.derived:
            _check_terms(reference)
        compared = _check_side(reference, side, precision, rule, number == 0)
        errors = [max(c.rms for c in compared), max(c.worst for c in compared)]
        result.errors[side_name(side)] = errors
        if number == 0:
            baseline = compared
        elif precision is None and rule.derived and enabled("ratio"):
            _check_ratio(reference, side, compared, baseline)
    if enabled("exact-probe"):
        result.exact = exact_probe(reference, [side for side, _ in sides])
    if controls and enabled("controls"):
        with reference.watch.phase("controls"):
            applied = check_tolerance(reference, [precision for _, precision in sides], rule)
            result.controls = [str(control) for control in applied]
    return result


def _check_terms(reference: Reference) -> None:
    """Refuse a declared sum with more terms than the inputs, because it widens the error bound."""
    pool, world = reference.pool, current_group().world
    tensors = [tensor for _, tensor in pytree.tensors(pool.values[0])]
    tensors += pytree.state_tensors(pool.new_state()).values()
    elements = world * sum(tensor.numel() for tensor in tensors)
    terms = pool.pair.work_at(pool.size, world).terms
    if tensors and terms > max(elements, FEW_TERMS):
        raise TooLoose(
            f"Work(terms={terms}) at {size_words(pool.size)}: the longest sum, but the inputs have"
            f" {elements} elements; the derived bound grows with it"
        )


def _check_ratio(
    reference: Reference,
    side: Side,
    compared: Sequence[Comparison],
    baseline: Sequence[Comparison],
) -> None:
    by_output = {(c.path, c.step): c for c in baseline}
    for own in compared:
        base = by_output.get((own.path, own.step), own)  # the baseline may lack this tensor
        limit = max(numerics.BASELINE_FACTOR * base.rms, numerics.BASELINE_FLOOR)
        if own.rms > limit * (1 + own.scatter + base.scatter):
            raise Wrong(
                f"{side_name(side)} is less exact than its baseline at"
                f" {size_words(reference.pool.size)}:"
                f" {own.path} has an rms error of {own.rms:.3g} allowed deviations, limit"
                f" {limit:.3g} (1.5 x the baseline's {base.rms:.3g}, at least 0.8);"
                " declare Variant(precision=...) if that is on purpose"
            )


def _check_side(
    reference: Reference, side: Side, precision: Precision | None, rule: Rule, is_baseline: bool
) -> list[Comparison]:
    pool, pair = reference.pool, reference.pool.pair
    size = size_words(pool.size)
    slot = pytree.clone(pool.values[0])
    if enabled("fresh-memory"):
        _poison_free_memory(slot)
    bound = BoundSide(side, [slot], pool.new_state())
    wait = synchronizer(pool.device)
    compared: list[Comparison] = []
    turns = _turns(pair)
    if reference.state_changes:
        reference.expected(turns, every=True)
    try:
        for step, turn in enumerate(turns, start=1):
            pytree.copy_into(slot, pool.value_set(turn))
            with watching(bound.name, pair.owns):
                outputs = bound.run(0)
            wait()
            if outputs is None and bound.state is None and enabled("returned"):
                raise SideError(f"{bound.name} returned None at {size}; a side returns its outputs")
            compare.check_unchanged(bound.name, slot, pool.value_set(turn), size)
            compare.check_outputs(bound.name, outputs, [slot], size)
            named = outputs_and_state(outputs, bound.state)
            results = judge(reference, side, named, turns[:step], precision, rule, is_baseline)
            compared += [replace(result, step=step) for result in results]
    finally:
        bound.close()
    return compared


def _turns(pair: Pair) -> tuple[int, ...]:
    """Return the value sets on which a side is checked, one after another at the same address."""
    if pair.state is not None:
        return tuple(k % VALUE_SETS for k in range(STEPS if enabled("steps") else 1))
    return (0, 1) if enabled("fresh-values") else (0,)


def judge(
    reference: Reference,
    side: Side,
    outputs: NamedTensors,
    turns: tuple[int, ...],
    precision: Precision | None,
    rule: Rule,
    is_baseline: bool = False,
) -> list[Comparison]:
    """Compare a side's outputs with the reference. Raise `Wrong` at the first mismatch."""
    has_state = reference.pool.pair.state is not None
    if is_baseline and not has_state and not reference.types:
        expected = reference.expected(turns)
        if len(expected) == len(outputs):
            pairs = zip(expected, outputs, strict=True)
            reference.learn_types((one.path, tensor.dtype) for one, (_, tensor) in pairs)
    if has_state:  # this side's optimizer may make additional tensors
        reference.learn_types((path, tensor.dtype) for path, tensor in outputs)
    leaves = reference.leaves(turns, precision)
    if has_state:
        leaves, outputs = _in_both(reference, side, leaves, outputs)
    _check_form(reference, side, outputs, leaves)
    results = compare_all([tensor for _, tensor in outputs], leaves, rule)
    for result in results:
        if not result.ok and enabled("bound"):
            raise Wrong(explain(side_name(side), reference.pool.size, result, rule))
    return results


def _in_both(
    reference: Reference, side: Side, leaves: Sequence[Leaf], outputs: NamedTensors
) -> tuple[list[Leaf], NamedTensors]:
    """Return the outputs that both have. Only tensors that an optimizer creates may be missing."""
    by_path = dict(outputs)
    for leaf in leaves:
        optional = leaf.path.startswith("state") and ".grad" not in leaf.path
        if leaf.path not in by_path and (leaf.path in reference.initial_state or not optional):
            raise Wrong(f"{side_name(side)} has no {leaf.path}, which the reference has")
    shared = [leaf for leaf in leaves if leaf.path in by_path]
    return shared, [(leaf.path, by_path[leaf.path]) for leaf in shared]


def _check_form(
    reference: Reference, side: Side, outputs: NamedTensors, leaves: Sequence[Leaf]
) -> None:
    if not enabled("form"):
        return
    name, size = side_name(side), size_words(reference.pool.size)
    if len(outputs) != len(leaves):
        raise Wrong(
            f"{name} returned {len(outputs)} tensors at {size}, the reference {len(leaves)}"
        )
    for (path, tensor), leaf in zip(outputs, leaves, strict=True):
        if tensor.shape != leaf.value.shape:
            raise Wrong(
                f"{name} returned {path} of shape {tuple(tensor.shape)} at {size},"
                f" the reference returned {tuple(leaf.value.shape)}"
            )
        if path != leaf.path and "view_as_real(" in path + leaf.path:  # one is complex
            raise Wrong(f"{name} returned {path} at {size}, the reference {leaf.path}")
        dtype = reference.types.get(leaf.path)
        if dtype is not None and tensor.dtype != dtype:
            raise Wrong(
                f"{name} returned {path} as {tensor.dtype} at {size}, the baseline as {dtype}"
            )
        if tensor.device.type != leaf.value.device.type:
            raise Wrong(
                f"{name} returned {path} on {tensor.device} at {size},"
                f" the reference is on {leaf.value.device}"
            )


def _poison_free_memory(like: object) -> None:
    """Fill the memory that `empty` will return with NaN, so that it contains no earlier answer."""
    import torch

    tensors = [tensor for _, tensor in pytree.tensors(like) if tensor.numel()]
    pytree.poison([torch.empty_like(tensor) for tensor in tensors for _ in range(2)])


def smallest_failure(
    strategies: Mapping[str, object], check: Callable[[Size], object], seed: int
) -> Exception | None:
    """Return the failure of the smallest size that fails, or None if none of 20 fails.

    With several ranks, all ranks check the sizes that rank 0 draws, and failures are not shrunk.
    Shrinking chooses sizes by which ones failed, and a size may fail on only one of the ranks.

    Args:
        strategies: a value or a Hypothesis strategy for each size key.
        check: raises an error if a side is wrong at the given size.
    """
    if current_group().world > 1:
        sizes: list[Size] = []
        _search(strategies, sizes.append, seed)
        sizes.sort(key=lambda size: [(isinstance(v, str), v) for v in size.values()])
        return _first_failure(current_group().broadcast(sizes), check)
    failures: dict[str, Exception] = {}

    def fails(size: Size) -> bool:
        failure = _first_failure([size], check)
        if failure is not None:
            failures[repr(size)] = failure
        return failure is not None

    smallest = _search(strategies, fails, seed)
    return None if smallest is None else failures[repr(smallest)]


def _first_failure(sizes: Iterable[Size], check: Callable[[Size], object]) -> Exception | None:
    for size in sizes:
        try:
            check(size)
        except Exception as error:
            return error
    return None


def _search(
    strategies: Mapping[str, object], fails: Callable[[Size], object], seed: int
) -> Size | None:
    from hypothesis import HealthCheck, Phase, find, settings
    from hypothesis import strategies as st
    from hypothesis.errors import NoSuchExample

    fixed = {
        k: v if isinstance(v, st.SearchStrategy) else st.just(v) for k, v in strategies.items()
    }
    rules = settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    try:
        return find(
            st.fixed_dictionaries(fixed),
            lambda size: bool(fails(size)),
            settings=rules,
            random=Random(seed),
        )
    except NoSuchExample:
        return None
