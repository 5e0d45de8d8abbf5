"""Check that sides compute what the reference computes, before and after they are timed.

`check_sides` runs the sides on fresh memory and on fresh values at the same addresses. It refuses
changed inputs and outputs that alias inputs, and compares the outputs with the reference. Then it
applies the exact probe and the controls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ..isolation.monkeypatches import watching
from ..isolation.protections import enabled
from ..page.pair import Pair, Precision, Side, SideError, side_name, size_words
from ..util import pytree
from ..util.device_state import no_output, synchronizer
from ..util.process_group import current_group
from . import compare, numerics
from .compare import Comparison, compare_all, explain
from .controls import TooLoose, check_tolerance, draws_differ
from .diagnose import explain_tf32
from .exact_probe import exact_probe
from .input_remarks import input_remarks
from .inputs import STEPS, VALUE_SETS, BoundSide
from .mismatch import Mismatch, explain_cause
from .numerics import Leaf, NamedTensors, Rule, Wrong, WrongForm
from .reference import Reference, outputs_and_state, refusals

FEW_TERMS = 1024
"""A sum of at most this many terms hardly widens the error bound (2e-6 in fp32)."""
CLEARLY_WRONG = 30.0
"""A result that exceeds the bound by this factor is wrong, however exact the bound is."""


@dataclass
class CheckResult:
    """The result of a check, in plain types.

    Attributes:
        errors: the largest rms and the worst element of each side, in allowed deviations.
        controls: the result of each control.
        exact: the result of the exact integer probe, or the reason why it did not run.
        remarks: what a reader should know about the error bound.
        inputs: what a reader should look at in the inputs.
    """

    errors: dict[str, list[float]] = field(default_factory=dict)
    controls: list[str] = field(default_factory=list)
    exact: str = ""
    remarks: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)


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
    result = CheckResult(inputs=input_remarks(reference.pool) if controls else [])
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
            if controls and enabled("controls"):
                precisions = [precision for _, precision in sides]
                baseline = _scale_if_needed(reference, side, precisions, rule) or compared
        elif precision == sides[0][1] and rule.derived and enabled("ratio"):
            _check_ratio(reference, side, compared, baseline)
    if enabled("exact-probe"):
        result.exact = exact_probe(reference, [side for side, _ in sides])
    if controls and enabled("controls"):
        with reference.watch.phase("controls"):
            applied = check_tolerance(reference, [precision for _, precision in sides], rule)
            result.controls = [str(control) for control in applied]
            if reference.pool.scaled:
                result.controls.append("inputs scaled: two draws have nearly the same outputs")
    result.remarks = list(reference.bound.remarks)
    return result


def _scale_if_needed(
    reference: Reference, baseline: Side, precisions: Sequence[Precision | None], rule: Rule
) -> list[Comparison] | None:
    """Scale the inputs if two draws have nearly the same outputs, and check the baseline again.

    A side that remembers an answer could otherwise not be refused. If the baseline is wrong on
    scaled inputs, or if they change nothing, they are not used. `check_tolerance` then refuses the
    page. Return the comparisons on scaled inputs, or None if they are not used.
    """
    if current_group().world > 1 or draws_differ(reference, precisions):
        return None
    reference.scale_inputs(on=True)
    with contextlib.suppress(Wrong, SideError, *refusals()):
        compared = _check_side(reference, baseline, precisions[0], rule, is_baseline=True)
        if draws_differ(reference, precisions):
            return compared
    reference.scale_inputs(on=False)
    return None


def _check_terms(reference: Reference) -> None:
    """Refuse a declared sum with more terms than the inputs, because it widens the error bound."""
    pool, world = reference.pool, current_group().world
    tensors = [tensor for _, tensor in pytree.tensors(pool.value_set(0))]
    tensors += pytree.state_tensors(pool.new_state()).values()
    elements = world * sum(tensor.numel() for tensor in tensors)
    terms = pool.pair.work_at(pool.size, world).terms
    if terms and tensors and terms > max(elements, FEW_TERMS):
        raise TooLoose(
            f"Work(terms={terms}) at {size_words(pool.size)}: the inputs have only {elements}"
            " elements, and the error bound grows with terms\nDeclare the number of terms in the"
            " longest sum of one output element"
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
                " declare a lower Variant(precision=...) if that is on purpose"
            )


def _check_side(
    reference: Reference, side: Side, precision: Precision | None, rule: Rule, is_baseline: bool
) -> list[Comparison]:
    """Run a side and compare its results. If they are wrong, say what the errors look like."""
    try:
        return _run_side(reference, side, precision, rule, is_baseline)
    except Mismatch as error:
        cause = ""
        with no_output():  # the side runs again
            if precision is None and rule.derived:
                run = partial(_run_side, reference, side, rule=rule, is_baseline=False)
                cause = explain_tf32(reference, side, run, is_baseline=is_baseline)
            cause = cause or explain_cause(
                error, reference, side, precision, rule, is_baseline=is_baseline
            )
        raise Wrong(f"{error}\n{cause}" if cause else str(error)) from None


def _run_side(
    reference: Reference, side: Side, precision: Precision | None, rule: Rule, is_baseline: bool
) -> list[Comparison]:
    pool, pair = reference.pool, reference.pool.pair
    size = size_words(pool.size)
    turns = _turns(pair)
    if reference.state_changes:
        reference.expected(turns, every=True)
    elif reference.large and not is_baseline:
        turns = turns[::-1]  # the expected outputs that are kept are those of the last turn
    slot = pytree.clone(pool.value_set(turns[0]))
    if enabled("fresh-memory"):
        _poison_free_memory(slot)
    bound = BoundSide(side, [slot], pool.new_state())
    wait = synchronizer(pool.device)
    compared: list[Comparison] = []
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
            number = turn + 1 if pair.state is None else step
            compared += [replace(result, step=number) for result in results]
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
    tensors = [tensor for _, tensor in outputs]
    results = compare_all(tensors, leaves, rule)
    if rule.derived and _may_be_right(results) and reference.refine(turns, precision):
        refined = {leaf.path: leaf for leaf in reference.leaves(turns, precision)}
        leaves = [refined[leaf.path] for leaf in leaves]
        results = compare_all(tensors, leaves, rule)
    for tensor, leaf, result in zip(tensors, leaves, results, strict=True):
        if not result.ok and enabled("bound"):
            message = explain(side_name(side), reference.pool.size, result, rule)
            raise Mismatch(message, tensor, leaf, result, turns)
    return results


def _may_be_right(results: Sequence[Comparison]) -> bool:
    """Return whether some results exceed the bound, but none of them by so much that it is wrong.

    The bound comes from a few perturbed runs, and more of them make it more exact.
    """
    scores = [result.score for result in results if not result.ok]
    return bool(scores) and max(scores) < CLEARLY_WRONG


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
        raise WrongForm(
            f"{name} returned {len(outputs)} tensors at {size}, the reference {len(leaves)}"
        )
    for (path, tensor), leaf in zip(outputs, leaves, strict=True):
        if tensor.shape != leaf.value.shape:
            raise WrongForm(
                f"{name} returned {path} of shape {tuple(tensor.shape)} at {size},"
                f" the reference returned {tuple(leaf.value.shape)}"
            )
        if path != leaf.path and "view_as_real(" in path + leaf.path:  # one is complex
            raise WrongForm(f"{name} returned {path} at {size}, the reference {leaf.path}")
        dtype = reference.types.get(leaf.path)
        if dtype is not None and tensor.dtype != dtype:
            raise WrongForm(
                f"{name} returned {path} as {tensor.dtype} at {size}, the baseline as {dtype}"
            )
        if tensor.device.type != leaf.value.device.type:
            raise WrongForm(
                f"{name} returned {path} on {tensor.device} at {size},"
                f" the reference is on {leaf.value.device}"
            )


def _poison_free_memory(like: object) -> None:
    """Fill the memory that `empty` will return with NaN, so that it contains no earlier answer."""
    import torch

    tensors = [tensor for _, tensor in pytree.tensors(like) if tensor.numel()]
    pytree.poison([torch.empty_like(tensor) for tensor in tensors for _ in range(2)])
