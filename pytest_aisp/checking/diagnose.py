"""Find out why a side's result is wrong, by running the side again under other conditions."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from ..isolation.global_state import restore, snapshot
from ..page.pair import Precision, Side, SideError, side_name
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
"""Switches of torch.backends by device, with the parts of torch.backends that they switch."""


def explain_tf32(reference: Reference, side: Side, run: Run, *, is_baseline: bool) -> str:
    """Return a line of text if `side`, whose results are wrong, computes in TF32; else nothing.

    With several ranks nothing is run again, because the results of the other ranks may be right.
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
