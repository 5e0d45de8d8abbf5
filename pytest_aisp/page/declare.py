"""`compare`: the one declaration a page makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import pytest

from . import declared
from .pair import MARK, Bound, Claims, Owned, Pair, PairError, Side, Size, Variant, Work, as_words
from .skus import FEATURES
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
    needs: str | Sequence[str] = (),
    gpus: int | Sequence[int] = 1,
    l2: Literal["cold", "warm"] = "cold",
    owns: Sequence[Owned] = (),
    environment: Mapping[str, str] | None = None,
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
        needs: features without which no side runs, as in ``"tma"``.
        gpus: ranks that the sides run on; several counts make cases of each.
        l2: ``cold`` (the working set rotates through five L2 caches) or ``warm``.
        owns: what the page varies itself and the harness must leave alone.
        environment: variables with which the page's ranks start, for what a process decides once;
            pages that ask for the same ones share ranks. With `gpus` above 1 only.

    Raises:
        PairError: for a declaration that cannot be meant, at the page's own line.
    """
    __tracebackhide__ = True
    try:
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
            needs=as_words(needs),
            gpus=tuple(gpus) if isinstance(gpus, Sequence) else (gpus,),
            l2=l2,
            owns=tuple(owns),
            environment=dict(environment or {}),
        )
        declared.check(pair)
    except PairError as error:
        raise PairError(f"@compare: {error}") from None
    _tell_kernel_files(pair)
    return pytest.mark.aisp_pair(pair=pair)


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
