"""Run a wrong side again to find the cause of the error, and the smallest size that fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from random import Random

from ..isolation.global_state import restore, snapshot
from ..page.pair import Precision, Side, SideError, Size, side_name
from ..page.sources import triton_kernels
from ..util.process_group import current_group
from .numerics import Wrong
from .reference import Reference

Run = Callable[["Precision | None"], object]
"""A function that checks a side again, with the given precision."""

_SWITCHES: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {
        "cuda.matmul.allow_tf32": ("cuda.matmul",),
        "cudnn.allow_tf32": ("cudnn.conv", "cudnn.rnn"),
    },
    "cpu": {f"mkldnn.{kind}.fp32_precision": (f"mkldnn.{kind}",) for kind in ("matmul", "conv")},
}
"""The TF32 switches of each device in torch.backends, and the backends that a switch affects."""


def explain_tf32(reference: Reference, side: Side, run: Run, *, is_baseline: bool) -> str:
    """Return a line of advice if the wrong `side` computes in TF32, or an empty string.

    With several ranks, nothing is run again, because a rank with right results does not call this
    function and the other ranks would wait forever.
    """
    device = reference.pool.device.partition(":")[0]
    on = [name for name, parts in _SWITCHES[device].items() if any(map(_is_on, parts))]
    dots = device == "cuda" and _calls_dot(side)
    fp32 = "torch.float32" in map(str, reference.types.values())
    if not fp32 or current_group().world > 1 or not (on or dots) or not _passes(run, "tf32"):
        return ""
    declared = "baseline=" * is_baseline + f"Variant({side_name(side)}, precision='tf32')"
    if on and _passes_without_tf32(device, run):
        switches = " and ".join(f"torch.backends.{name}" for name in on)
        return (
            f"this looks like TF32: {switches} {'is' if len(on) == 1 else 'are'} on, and without"
            f" TF32 {side_name(side)} is right; declare {declared} or switch TF32 off"
        )
    if dots:
        return (
            "this looks like TF32, in which tl.dot multiplies fp32 values by default; declare"
            f" {declared} or write tl.dot(..., input_precision='ieee')"
        )
    return ""


def _passes(run: Run, precision: Precision | None) -> bool:
    import torch

    try:
        run(precision)
    except (Wrong, SideError, torch.OutOfMemoryError):
        return False
    return True


def _passes_without_tf32(device: str, run: Run) -> bool:
    before = snapshot()
    names = [_setting(part) for parts in _SWITCHES[device].values() for part in parts]
    restore({**before, **dict.fromkeys(names, "ieee")})
    try:
        return _passes(run, None)
    finally:
        restore(before)


def _is_on(part: str) -> bool:
    return snapshot()[_setting(part)] == "tf32"


def _setting(part: str) -> str:
    return f"torch's {part}.fp32_precision"


def _calls_dot(side: Side) -> bool:
    """Return whether a Triton kernel of `side` calls `tl.dot`."""
    return any("dot(" in inspect.getsource(kernel) for kernel in triton_kernels([side], "/"))


EXAMPLES = 20
"""Number of sizes that the search for a failure tries."""


def smallest_failure(
    strategies: Mapping[str, object], check: Callable[[Size], object], seed: int
) -> Exception | None:
    """Try 20 sizes. Return the failure at the smallest failing size, or None if all pass.

    With several ranks, all ranks check the sizes that rank 0 draws, and failures are not shrunk.
    The next size in shrinking depends on whether the last size failed, and ranks may disagree about
    that.

    Args:
        strategies: a value or a Hypothesis strategy for each size key.
        check: a function that raises an error if a side is wrong at the given size.
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
