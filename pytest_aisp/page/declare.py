"""`compare`, the decorator with which a page declares its baseline and optimized versions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import pytest

from .cost import Costs, cost_at, place_of, validate_costs
from .gpu_specs import ARCHS, FEATURES
from .pair import (
    BOUNDS,
    CLAIM_WORDS,
    OWNED,
    PRECISIONS,
    VERSUS,
    Bound,
    CheckSize,
    Claims,
    Conditions,
    Pair,
    PairError,
    Side,
    Size,
    Sweep,
    Variant,
    Versus,
    Work,
    as_tuple,
    is_plain,
    require_known,
    side_name,
    validate_sweep,
)
from .sources import kernel_files

TestFunction = TypeVar("TestFunction", bound=Callable[..., object])
MULTICAST_SWITCHES = {"NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST"}
MULTICAST_SWITCHES |= {"NVSHMEM_DISABLE_NVLS"}
"""Variables that only the machine's owner may set, because NVLink multicast can hang the GPUs."""

__tracebackhide__ = True  # an error in a page's `when=` shows only the page's lines


def compare(
    *,
    baseline: Side | Variant,
    optimized: Sequence[Side | Variant],
    inputs: Callable[..., tuple[Any, ...]],
    reference: Callable[..., Any],
    sizes: Sequence[Size],
    work: Callable[..., Work],
    bound: Bound,
    check_sizes: Sequence[CheckSize] = (),
    cpu_sizes: Sequence[Size] = (),
    state: Callable[..., Any] | None = None,
    at_least: Claims = 1.0,
    versus: Versus | None = None,
    costs: Costs | None = None,
    sweep: Sweep | None = None,
    conditions: Conditions | None = None,
    **unknown: object,
) -> Callable[[TestFunction], TestFunction]:
    """Declare a pair on a test function that takes the `pair` fixture.

    Every optimized side becomes a case at every size. Nothing runs when the page is imported.

    Args:
        baseline: the first version that a competent engineer would write. The function takes the
            inputs and returns new outputs. A generator function is called once, and only the
            callable that it yields is timed. Before the yield, a generator function may compute
            only values that depend on `state` alone. For a function that computes in a lower
            precision, write ``Variant(f, precision="tf32")``.
        optimized: the sides to compare with the baseline. Name each side after its idea.
        inputs: `inputs(device, **size)` returns the arguments of every side as a tuple. The plugin
            sets the random seed. If `gpus` is above 1, `inputs` may also take `rank` and `world`.
        reference: a function that takes the arguments of a side and computes the result in float64,
            without calling the sides.
        sizes: the sizes to time on a GPU. Each size is a mapping of keyword arguments.
        work: `work(**size)` returns the `Work` that any implementation must do.
        bound: the resource that limits the faster side. With ``launch`` or ``host``, the verdict
            is about the time of ordinary calls, and the harness never captures sides in a graph.
            With any other bound, the verdict is about GPU time alone.
        check_sizes: small, odd sizes to check on every machine. The values may be Hypothesis
            strategies.
        cpu_sizes: the sizes to time on a CPU.
        state: `state(device, **size)` builds the objects that sides may change (model, optimizer,
            cache). The sides and the reference get the state as their first argument. A side's
            state is compared with the reference's after each of three steps.
        at_least: the claim: a speedup, ``"neutral"``, or ``"yardstick"`` for a library that may
            be slower. Give one claim for all archs, or a mapping keyed by arch (``sm90``, ``cpu``).
        versus: ``"library"`` if the baseline is a library. A claim may then be below 1, as in
            ``at_least=0.8`` for a kernel that reaches 0.8 of the library's speed.
        costs: one function per side, which takes a size's keys and returns the `Cost` of a call.
            The plugin predicts the side's time from the `Cost`.
        sweep: the key of `sizes` that varies along a curve, as in ``Sweep("block")``.
        conditions: the features, GPUs, L2 state and settings that the sides need.

    Raises:
        PairError: if the declaration is invalid. The traceback shows the page's own line.
    """
    __tracebackhide__ = True
    try:
        _refuse_unknown_keywords(unknown)
        given = conditions or Conditions()
        first = _baseline(baseline)
        pair = Pair(
            baseline=first.side,
            baseline_precision=first.precision,
            variants=_variants(optimized),
            inputs=inputs,
            reference=reference,
            sizes=tuple(sizes),
            check_sizes=tuple(check_sizes),
            cpu_sizes=tuple(cpu_sizes),
            work=work,
            bound=bound,
            state=state,
            at_least=at_least,
            versus=versus,
            needs=as_tuple(given.needs),
            gpus=tuple(given.gpus) if isinstance(given.gpus, Sequence) else (given.gpus,),
            l2=given.l2,
            owns=tuple(given.owns),
            environment=dict(given.environment),
            costs=costs or {},
            sweep=sweep,
        )
        validate(pair)
    except PairError as error:
        raise PairError(f"@compare: {error}") from None
    _set_kernel_file_needs(pair)
    return pytest.mark.aisp_pair(pair=pair)  # `pair.MARK`


def _refuse_unknown_keywords(unknown: Mapping[str, object]) -> None:
    __tracebackhide__ = True
    names = [each.name for each in fields(Conditions)]
    for name in unknown:
        if name not in names:
            raise TypeError(f"compare() got an unexpected keyword argument {name!r}")
    if unknown:
        given = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
        raise PairError(
            f"{min(unknown)}= is one of the conditions of a page: {', '.join(names)}\n"
            f"    conditions=Conditions({given})"
        )


_BELONGS = {
    "needs": "in conditions=Conditions(needs=...), because every case runs the baseline",
    "when": "on each variant",
    "at_least": "on compare() or on a variant, because a claim is about an optimized side",
    "sass": "on a variant",
    "gpu_only": "on each variant",
    "marks": "on the test function, as in @pytest.mark.skipif(...)",
}
"""The arguments of `Variant` that a baseline does not accept, and where to write them."""


def _baseline(baseline: Side | Variant) -> Variant:
    if not isinstance(baseline, Variant):
        return Variant(baseline)
    plain = Variant(baseline.side)
    for name, place in _BELONGS.items():
        if getattr(baseline, name) != getattr(plain, name):
            raise PairError(
                f"baseline=Variant({name}=...): a baseline declares only its precision; write"
                f" {name}= {place}"
            )
    return baseline


def _variants(optimized: Sequence[Side | Variant]) -> tuple[Variant, ...]:
    if callable(optimized) or isinstance(optimized, Variant):
        raise PairError("optimized= is a list of sides, as in optimized=[tiled]")
    return tuple(s if isinstance(s, Variant) else Variant(s) for s in optimized)


def _set_kernel_file_needs(pair: Pair) -> None:
    """Add each side's features to its kernel files. Some features need a special target."""
    needs = [(pair.baseline, pair.needs), *((v.side, pair.features(v)) for v in pair.variants)]
    for side, features in needs:
        if any(any(FEATURES[feature].values()) for feature in features):
            for module in kernel_files([side], "/"):
                module.needs.update(features)


def validate(pair: Pair) -> None:
    """Raise `PairError` if the declaration of `pair` is invalid."""
    _validate_words(pair)
    _validate_sides(pair)
    _validate_ranks(pair)
    _validate_sizes(pair)
    _validate_claims(pair)
    _validate_costs(pair)
    if pair.sweep is not None:
        validate_sweep(pair.sweep, (*pair.sizes, *pair.cpu_sizes))


def _validate_costs(pair: Pair) -> None:
    sides = [pair.baseline, *(v.side for v in pair.variants)]
    validate_costs(pair.costs, sides)
    for side, function in pair.costs.items():
        for size in (*pair.sizes, *pair.cpu_sizes):
            name = f"the cost of {side_name(side)}"
            _validate_keys(f"{place_of(function)}: sizes", size, name, function, {"world"})
            for gpus in pair.gpus:
                cost_at(pair, side, size, gpus)


def _validate_words(pair: Pair) -> None:
    require_known("bound", [pair.bound], BOUNDS)
    require_known("l2", [pair.l2], ("cold", "warm"))
    require_known("owns", pair.owns, OWNED)
    require_known("versus", as_tuple(pair.versus or ()), VERSUS)
    require_known("precision", as_tuple(pair.baseline_precision or ()), PRECISIONS)
    for variant in pair.variants:
        require_known("feature in needs", pair.features(variant), tuple(FEATURES))
        require_known("precision", as_tuple(variant.precision or ()), PRECISIONS)


def _validate_sides(pair: Pair) -> None:
    if not pair.variants:
        raise PairError("optimized=[] is empty: a pair needs at least one variant")
    for side in (pair.baseline, *(v.side for v in pair.variants)):
        if not callable(side):
            raise PairError(f"a side is a function; {side!r} is not")
    names = [side_name(pair.baseline), *(v.name for v in pair.variants)]
    for name in names:
        if names.count(name) > 1:
            raise PairError(f"two sides are called {name!r}; name each by its idea")
    for variant in pair.variants:
        if not pair.archs(variant):
            needs = ", ".join(pair.features(variant))
            raise PairError(f"{variant.name!r}: no known GPU has all of {needs}")


def _validate_ranks(pair: Pair) -> None:
    if not pair.gpus or any(not isinstance(n, int) or n < 1 for n in pair.gpus):
        raise PairError(f"gpus={pair.gpus!r} must be a count of GPUs or several counts")
    sides = [pair.baseline, *(v.side for v in pair.variants)]
    fresh = [hasattr(side, "environment") for side in sides]
    if any(fresh) and not all(fresh):
        raise PairError("fresh_process on some sides only: put it on every side or on none")
    if any(fresh) and pair.multi_rank:
        raise PairError("fresh_process with gpus= above 1: ranks start once, not for every sample")
    if pair.environment and not pair.multi_rank:
        raise PairError(
            "environment= is for the ranks of a page on several GPUs; a page on one GPU has"
            " fresh_process(environment=...)"
        )
    if switches := sorted(pair.environment.keys() & MULTICAST_SWITCHES):
        raise PairError(f"environment= sets {switches[0]}, which only the machine's owner may set")
    if pair.multi_rank:
        _validate_rank_reference(pair)


def _validate_rank_reference(pair: Pair) -> None:
    parameters = ("ranks",) if pair.state is None else ("states", "ranks")
    try:
        inspect.signature(pair.reference).bind(*parameters)
    except TypeError:
        raise PairError(
            f"with gpus= above 1 the reference takes {' and '.join(parameters)}, lists with one"
            f" entry per rank:\n    reference({', '.join(parameters)})"
        ) from None


def _validate_sizes(pair: Pair) -> None:
    if not pair.sizes and not pair.cpu_sizes:
        raise PairError("sizes=[] and cpu_sizes=[] are both empty: no case would run")
    for size in pair.sizes:
        _validate_size(pair, "sizes", size)
    for check_size in pair.check_sizes:
        _validate_size(pair, "check_sizes", check_size)
    for size in pair.cpu_sizes:
        _validate_size(pair, "cpu_sizes", size)
    if not pair.cpu_sizes and not any(map(is_plain, pair.check_sizes)):
        raise PairError(
            "check_sizes= is missing: give a small odd size that a laptop can check,"
            ' as in check_sizes=[{"n": 33}]'
        )
    if len({tuple(s) for s in (*pair.sizes, *pair.cpu_sizes)}) > 1:
        raise PairError("sizes and cpu_sizes must all have the same keys, in the same order")
    cases = [case.id for case in pair.cases()]
    if len(set(cases)) < len(cases):
        raise PairError(f"two cases have the id {max(cases, key=cases.count)!r}")


def _validate_size(pair: Pair, argument: str, size: CheckSize) -> None:
    if not isinstance(size, Mapping):
        raise PairError(f"{argument}: {size!r} is not a mapping such as {{'n': 4096}}")
    if argument != "check_sizes" and not is_plain(size):
        raise PairError(f"{argument}: the values of {dict(size)!r} must be numbers or text")
    for name in ("inputs", "state"):
        if (function := getattr(pair, name)) is not None:
            if next(iter(inspect.signature(function).parameters), "") != "device":
                raise PairError(f"{name} takes the device first, as in def {name}(device, n)")
            _validate_keys(argument, size, name, function, {"device", "rank", "world"})
    _validate_keys(argument, size, "work", pair.work, {"world"})
    for variant in pair.variants:
        if variant.when is not None:
            _validate_keys(argument, size, f"when of {variant.name!r}", variant.when, set())


def _validate_keys(
    argument: str, size: CheckSize, name: str, function: Callable[..., object], extra: set[str]
) -> None:
    """Check that `function` has a parameter for each key of `size`. `extra` keys are optional."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    if unknown := sorted(size.keys() - parameters.keys()):
        names = ", ".join(p for p in parameters if p not in extra)
        raise PairError(
            f"{argument} has the key {unknown[0]!r}, which {name} does not take ({names})"
        )
    required = {n for n, p in parameters.items() if p.default is p.empty} - extra
    if missing := sorted(required - size.keys()):
        keys = ", ".join(size) or "none"
        raise PairError(
            f"{argument} lacks the key {missing[0]!r}, which {name} needs; keys: {keys}"
        )


def _validate_claims(pair: Pair) -> None:
    counts = [f"{arch}-x{gpus}" for arch in ARCHS for gpus in pair.gpus[1:]]
    for claims in (pair.at_least, *(v.at_least for v in pair.variants if v.at_least is not None)):
        table = claims if isinstance(claims, Mapping) else {"sm90": claims}
        require_known("arch in at_least", list(table), [*ARCHS, *counts])
        for claim in table.values():
            if claim not in CLAIM_WORDS:
                _validate_speedup(claim, pair.versus)


def _validate_speedup(claim: object, versus: Versus | None) -> None:
    if not isinstance(claim, (int, float)) or isinstance(claim, bool):
        raise PairError(f"at_least={claim!r} is neither a number nor 'neutral' or 'yardstick'")
    if versus is not None and not claim > 0:
        raise PairError(f"at_least={claim} must be above 0, as in at_least=0.8")
    if versus is None and not claim >= 1:
        raise PairError(
            f"at_least={claim} claims a slowdown; write at_least='neutral' if nothing is gained, "
            "or at_least='yardstick' for a library that is there to compare with; if the baseline"
            " is the library, and the claim is a share of its speed, add versus='library'"
        )
