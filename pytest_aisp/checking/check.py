"""Check that sides compute what the reference computes, before and after they are timed.

`check_sides` runs each side on newly allocated inputs, and then on new values at the same
addresses. It refuses a side that changes its inputs or returns a view of an input, and compares the
outputs with the reference. Then `check_sides` runs the exact probe (small integers) and the
negative controls (wrong answers).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ..isolation.monkeypatches import watching
from ..isolation.protections import enabled
from ..page.pair import Pair, Precision, Side, SideError, side_name, size_words
from ..util import pytree
from ..util.device_state import no_output, synchronizer
from ..util.process_group import current_group
from . import compare
from .compare import Comparison, compare_all, explain, less_exact
from .controls import TooLoose, check_tolerance, draws_differ, redrawn
from .diagnose import explain_tf32
from .exact_probe import exact_probe
from .input_remarks import input_remarks
from .inputs import STEPS, VALUE_SETS, BoundSide
from .mismatch import Mismatch, explain_cause
from .numerics import NamedTensors, Rule, Wrong
from .output_types import check_form, outputs_in_both
from .reference import Reference, outputs_and_state, refusals

FEW_TERMS = 1024
"""A sum of at most this many terms adds little to the error bound (2e-6 in fp32)."""
CLEARLY_WRONG = 30.0
"""A result that exceeds the bound by this factor is wrong, even if the bound is inexact."""
BORDERLINE = 2.0
"""A result that exceeds the bound by at most this factor is checked again on other values. The
output of a timed call may exceed the bound by this factor, because the timed call is not repeated.
"""
OTHER_DRAWS = 2
"""Number of other draws of the inputs on which a borderline result is checked."""


@dataclass
class CheckResult:
    """The picklable result of a check.

    Attributes:
        errors: the largest rms error of each side, and the error of the side's worst element, as
            multiples of the allowed deviation.
        controls: the result of each control.
        exact: the result of the exact integer probe, or the reason why it did not run.
        remarks: remarks about the error bound.
        inputs: remarks about suspicious inputs.
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
    """Check every side of `sides` against the reference. The first side must be the baseline.

    Args:
        controls: False to skip the negative controls. A size that a search found may be too small
            for any control to apply.
        progress: a function that is called with the name of each side.

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
        if number == 0:
            compared = _check_baseline(reference, side, precision, rule)
        else:
            compared = _check_side(reference, side, precision, rule, is_baseline=False)
        errors = [max(c.rms for c in compared), max(c.worst for c in compared)]
        result.errors[side_name(side)] = errors
        if number == 0:
            baseline = compared
            if controls and enabled("controls"):
                precisions = [precision for _, precision in sides]
                baseline = _scale_if_needed(reference, side, precisions, rule) or compared
        elif precision == sides[0][1] and rule.derived and enabled("ratio"):
            _check_ratio(reference, (sides[0][0], side), precision, (baseline, compared))
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


def _check_baseline(
    reference: Reference, side: Side, precision: Precision | None, rule: Rule
) -> list[Comparison]:
    """Check the baseline, unless the check of another variant did so on the same values."""
    key = (side, precision, rule)
    known = reference.baselines.get(key)
    if current_group().min(known is not None):  # the ranks run a side together, or not at all
        return reference.baselines[key]
    compared = _check_side(reference, side, precision, rule, is_baseline=True)
    reference.baselines[key] = compared
    return compared


def _scale_if_needed(
    reference: Reference, baseline: Side, precisions: Sequence[Precision | None], rule: Rule
) -> list[Comparison] | None:
    """Scale the inputs if two draws give nearly the same outputs, and check the baseline again.

    If all draws give the same outputs, a side that returns an old answer cannot be detected. If the
    baseline is wrong on scaled inputs, or if scaling changes nothing, scaled inputs are not used.
    Then `check_tolerance` refuses the page later. Return the comparisons on scaled inputs, or None.
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
    """Refuse a `Work(terms=)` above the number of input elements: the bound would be wider."""
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
    sides: tuple[Side, Side],
    precision: Precision | None,
    compared: tuple[Sequence[Comparison], Sequence[Comparison]],
) -> None:
    """Refuse a side that is less exact than its baseline.

    In both `sides` and `compared`, the first entry belongs to the baseline.
    """
    name = side_name(sides[1])
    if not (message := less_exact(name, reference.pool.size, *compared)):
        return
    for other in _other_values(reference):
        with contextlib.suppress(Mismatch):
            base, own = (_run_side(other, side, precision, Rule(), False) for side in sides)
            if not less_exact(name, other.pool.size, base, own):
                return
    raise Wrong(message)


def _other_values(reference: Reference) -> Iterator[Reference]:
    """Yield the reference for other draws of the inputs. Yield nothing if there are several ranks.

    With several ranks, a rank whose check has passed would not run the sides again, and the other
    ranks would wait forever.
    """
    if current_group().world == 1:
        yield from (redrawn(reference, draw) for draw in range(1, OTHER_DRAWS + 1))


def _check_side(
    reference: Reference, side: Side, precision: Precision | None, rule: Rule, is_baseline: bool
) -> list[Comparison]:
    """Run a side and compare its results. The error for a wrong result names a likely cause."""
    try:
        return _run_side(reference, side, precision, rule, is_baseline)
    except Mismatch as error:
        compared = _on_other_values(error, reference, side, precision, rule, is_baseline)
        if compared is not None:
            return compared
        cause = ""
        with no_output():  # the side runs again
            if precision is None and rule.derived:
                run = partial(_run_side, reference, side, rule=rule, is_baseline=False)
                cause = explain_tf32(reference, side, run, is_baseline=is_baseline)
            cause = cause or explain_cause(
                error, reference, side, precision, rule, is_baseline=is_baseline
            )
        raise Wrong(f"{error}\n{cause}" if cause else str(error)) from None


def _on_other_values(
    error: Mismatch,
    reference: Reference,
    side: Side,
    precision: Precision | None,
    rule: Rule,
    is_baseline: bool,
) -> list[Comparison] | None:
    """Check a side with a borderline result on other draws. Return None if all draws fail.

    Now and then, the rounding errors of a correct side exceed any bound by chance. A wrong side
    exceeds the bound on every draw of the inputs.
    """
    if not rule.derived or error.result.score > BORDERLINE:
        return None
    for other in _other_values(reference):
        with contextlib.suppress(Mismatch):
            compared = _run_side(other, side, precision, rule, is_baseline)
            reference.bound.remark(
                f"{side_name(side)} exceeded the error bound {error.result.score:.3g} times on one"
                " draw of the inputs, but not on another"
            )
            return compared
    return None


def _run_side(
    reference: Reference, side: Side, precision: Precision | None, rule: Rule, is_baseline: bool
) -> list[Comparison]:
    pool, pair = reference.pool, reference.pool.pair
    size = size_words(pool.size)
    turns = _turns(pair)
    if reference.state_changes:
        reference.expected(turns, every=True)
    elif reference.large and not is_baseline:
        turns = turns[::-1]  # only the expected outputs of the last turn are kept
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
            results = judge(
                reference, side, named, turns[:step], precision, rule, is_baseline, factor=1.0
            )
            number = turn + 1 if pair.state is None else step
            compared += [replace(result, step=number) for result in results]
    finally:
        bound.close()
    return compared


def _turns(pair: Pair) -> tuple[int, ...]:
    """Return the indices of the value sets that a side is checked on, in order.

    All value sets are written to the same addresses.
    """
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
    factor: float = BORDERLINE,
) -> list[Comparison]:
    """Compare a side's outputs with the reference. Raise `Wrong` at the first mismatch.

    Args:
        factor: the factor by which a result may exceed the derived bound.
    """
    has_state = reference.pool.pair.state is not None
    if is_baseline and not has_state and not reference.types:
        expected = reference.expected(turns)
        if len(expected) == len(outputs):
            pairs = zip(expected, outputs, strict=True)
            reference.learn_types((one.path, tensor.dtype) for one, (_, tensor) in pairs)
    if has_state:  # the optimizer of this side may create additional state tensors
        reference.learn_types((path, tensor.dtype) for path, tensor in outputs)
    leaves = reference.leaves(turns, precision)
    if has_state:
        leaves, outputs = outputs_in_both(reference, side, leaves, outputs)
    check_form(reference, side, outputs, leaves)
    tensors = [tensor for _, tensor in outputs]
    results = compare_all(tensors, leaves, rule)
    if rule.derived and _may_be_right(results) and reference.refine(turns, precision):
        refined = {leaf.path: leaf for leaf in reference.leaves(turns, precision)}
        leaves = [refined[leaf.path] for leaf in leaves]
        results = compare_all(tensors, leaves, rule)
    for tensor, leaf, result in zip(tensors, leaves, results, strict=True):
        borderline = rule.derived and result.score <= factor
        if not result.ok and not borderline and enabled("bound"):
            message = explain(side_name(side), reference.pool.size, result, rule)
            raise Mismatch(message, tensor, leaf, result, turns)
    return results


def _may_be_right(results: Sequence[Comparison]) -> bool:
    """Return whether some results exceed the bound, but none by more than `CLEARLY_WRONG`.

    The bound comes from a few perturbed runs of the reference. More runs make the bound more exact.
    """
    scores = [result.score for result in results if not result.ok]
    return bool(scores) and max(scores) < CLEARLY_WRONG


def _poison_free_memory(like: object) -> None:
    """Fill free memory with NaN, so that `torch.empty` does not return an earlier answer."""
    import torch

    tensors = [tensor for _, tensor in pytree.tensors(like) if tensor.numel()]
    pytree.poison([torch.empty_like(tensor) for tensor in tensors for _ in range(2)])
