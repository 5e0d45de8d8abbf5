"""`compare`: the one declaration a page makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import pytest

from .gpu_specs import ARCHS, FEATURES
from .pair import (
    BOUNDS,
    MARK,
    OWNED,
    PRECISIONS,
    WORDS,
    Bound,
    Claims,
    Conditions,
    Pair,
    PairError,
    Side,
    Size,
    Variant,
    Work,
    as_words,
    is_plain,
    one_of,
    side_name,
)
from .sources import kernel_files

F = TypeVar("F", bound=Callable[..., Any])


def compare(
    *,
    baseline: Side,
    optimized: Sequence[Side | Variant],
    inputs: Callable[..., tuple[Any, ...]],
    reference: Callable[..., Any],
    sizes: Sequence[Size],
    work: Callable[..., Work],
    bound: Bound,
    check_sizes: Sequence[Mapping[str, Any]] = (),
    cpu_sizes: Sequence[Size] = (),
    state: Callable[..., Any] | None = None,
    at_least: Claims = 1.0,
    conditions: Conditions | None = None,
    **unknown: object,
) -> Callable[[F], F]:
    """Declare a pair on a test function that takes the `pair` fixture.

    Every optimized side becomes a case at every size. Nothing runs when the page is imported.

    Args:
        baseline: the side a competent engineer would write first; `f(*inputs)` returns new outputs.
            A generator function is *prepared*: it gets the inputs once and yields the callable to
            time; it may compute ahead only what depends on `state`.
        optimized: the sides to compare with it, each named by its idea.
        inputs: `inputs(device, **size)` returns the tuple of arguments of every side, seeded by the
            plugin; with `gpus` above 1 it may also take `rank` and `world`.
        reference: independent of the sides and more exact: it is given the same arguments and
            computes in float64.
        sizes: sizes timed on a GPU, one mapping of keywords each.
        work: `work(**size)` returns the `Work` that any implementation must do.
        bound: what limits the faster side. ``launch`` and ``host`` are judged as called and never
            captured in a graph by the harness; everything else by GPU time alone.
        check_sizes: small, odd sizes checked everywhere; values may be Hypothesis strategies.
        cpu_sizes: sizes that a CPU can time honestly.
        state: `state(device, **size)` builds what sides may change (model, optimizer, cache); sides
            and reference get it as first argument, and it is compared after one and after N steps.
        at_least: the claim: a speedup, ``"neutral"``, or ``"yardstick"`` for a library that may
            lose; everywhere or by arch (``sm90``, ``cpu``).
        conditions: features, GPUs, L2 and switches that the sides need: `Conditions`.

    Raises:
        PairError: for a declaration that cannot be meant, at the page's own line.
    """
    __tracebackhide__ = True
    try:
        _refuse(unknown)
        under = conditions or Conditions()
        gpus = under.gpus
        pair = Pair(
            baseline=baseline,
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
            needs=as_words(under.needs),
            gpus=tuple(gpus) if isinstance(gpus, Sequence) else (gpus,),
            l2=under.l2,
            owns=tuple(under.owns),
            environment=dict(under.environment),
        )
        validate(pair)
    except PairError as error:
        raise PairError(f"@compare: {error}") from None
    _tell_kernel_files(pair)
    return pytest.mark.aisp_pair(pair=pair)


def _refuse(unknown: Mapping[str, object]) -> None:
    """Refuse keywords that `compare` does not take; those that moved name their new place."""
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


def _variants(optimized: Sequence[Side | Variant]) -> tuple[Variant, ...]:
    if callable(optimized) or isinstance(optimized, Variant):
        raise PairError("optimized= is a list of sides, as in optimized=[tiled]")
    return tuple(s if isinstance(s, Variant) else Variant(s) for s in optimized)


def _tell_kernel_files(pair: Pair) -> None:
    """Tell the kernel files of each side what it needs: some features have targets of their own."""
    needs = [(pair.baseline, pair.needs), *((v.side, pair.features(v)) for v in pair.variants)]
    for side, features in needs:
        if any(any(FEATURES[feature].values()) for feature in features):
            for module in kernel_files([side], "/"):
                module.needs.update(features)


assert MARK == "aisp_pair"


__tracebackhide__ = True  # what a page's `when=` raises shows the page's lines, and none of these
OWNERS = {"NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"}
"""Variables of NVLink multicast, which can put a host's GPUs out of service where it is off."""


def validate(pair: Pair) -> None:
    """Raise `PairError` for what the author of `pair` cannot have meant."""
    _words(pair)
    _check_variants(pair)
    _sizes(pair)
    _claims(pair)


def _words(pair: Pair) -> None:
    one_of("bound", [pair.bound], BOUNDS)
    one_of("l2", [pair.l2], ("cold", "warm"))
    one_of("owns", pair.owns, OWNED)
    for variant in pair.variants:
        one_of("feature in needs", pair.features(variant), tuple(FEATURES))
        one_of("precision", [variant.precision] if variant.precision else [], PRECISIONS)
    if not pair.gpus or any(not isinstance(n, int) or n < 1 for n in pair.gpus):
        raise PairError(f"gpus={pair.gpus!r} must be a count of GPUs or several counts")


def _check_variants(pair: Pair) -> None:
    if not pair.variants:
        raise PairError("optimized=[] is empty: a pair needs at least one variant")
    fresh = [hasattr(s, "environment") for s in (pair.baseline, *(v.side for v in pair.variants))]
    if any(fresh) and not all(fresh):
        raise PairError("fresh_process on some sides only: put it on every side or on none")
    if any(fresh) and pair.spread:
        raise PairError("fresh_process with gpus= above 1: ranks are started once, not a sample")
    names = [side_name(pair.baseline), *(v.name for v in pair.variants)]
    for name in names:
        if names.count(name) > 1:
            raise PairError(f"two sides are called {name!r}; name each by its idea")
    if pair.environment and not pair.spread:
        raise PairError(
            "environment= is for the ranks of a page on several GPUs; a page on one has"
            " fresh_process(environment=...)"
        )
    if pair.spread:
        _reference(pair)
    if owners := sorted(pair.environment.keys() & OWNERS):
        raise PairError(f"environment= sets {owners[0]}, which is the machine's owner's to set")
    for variant in pair.variants:
        if not pair.archs(variant):
            needs = ", ".join(pair.features(variant))
            raise PairError(f"{variant.name!r}: no known GPU has all of {needs}")


def _reference(pair: Pair) -> None:
    given = ("ranks",) if pair.state is None else ("states", "ranks")
    try:
        inspect.signature(pair.reference).bind(*given)
    except TypeError:
        raise PairError(
            f"with gpus= above 1 the reference takes {' and '.join(given)}: what each rank has, as"
            f" lists with one entry a rank; it is\n    reference({', '.join(given)})"
        ) from None


def _sizes(pair: Pair) -> None:
    if not pair.sizes and not pair.cpu_sizes:
        raise PairError("sizes=[] and cpu_sizes=[] are both empty: nothing would run")
    for which in ("sizes", "check_sizes", "cpu_sizes"):
        for size in getattr(pair, which):
            _size(pair, which, size)
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


def _size(pair: Pair, which: str, size: object) -> None:
    if not isinstance(size, Mapping):
        raise PairError(f"{which}: {size!r} is not a mapping such as {{'n': 4096}}")
    if which != "check_sizes" and not is_plain(size):
        raise PairError(f"{which}: {dict(size)!r} holds something else than numbers and words")
    callables = {"inputs": pair.inputs, "work": pair.work, "state": pair.state}
    whens = {f"when of {v.name!r}": v.when for v in pair.variants}
    for name, function in {**callables, **whens}.items():
        if function is not None:
            made = name in ("inputs", "state")
            given = {"device", "rank", "world"} if made else {"world"} if name == "work" else set()
            if made and next(iter(inspect.signature(function).parameters), "") != "device":
                raise PairError(f"{name} takes the device first, as in def {name}(device, n)")
            _keys(which, name, function, set(size), given)


def _keys(
    which: str, name: str, function: Callable[..., Any], keys: set[str], given: set[str]
) -> None:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = sorted(keys - set(parameters))
    if unknown:
        takes = ", ".join(p for p in parameters if p not in given)
        raise PairError(f"{which} has the key {unknown[0]!r}, which {name} does not take ({takes})")
    required = {n for n, p in parameters.items() if p.default is p.empty} - given
    if required - keys:
        raise PairError(f"{which} lacks the key {min(required - keys)!r}, which {name} needs")


def _claims(pair: Pair) -> None:
    for claims in (pair.at_least, *(v.at_least for v in pair.variants)):
        table = claims if isinstance(claims, Mapping) else {"sm90": claims}
        counts = [f"{arch}-x{gpus}" for arch in ARCHS for gpus in pair.gpus[1:]]
        one_of("arch in at_least", list(table), [*ARCHS, *counts])
        for claim in table.values():
            if claim is not None and claim not in WORDS:
                _claim(claim)


def _claim(claim: object) -> None:
    if not isinstance(claim, (int, float)) or isinstance(claim, bool):
        raise PairError(f"at_least={claim!r} is neither a number nor 'neutral' or 'yardstick'")
    if not claim >= 1:
        raise PairError(
            f"at_least={claim} claims a slowdown; where nothing is gained say at_least='neutral',"
            " of a library that is there to compare with at_least='yardstick'"
        )
