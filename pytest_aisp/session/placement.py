"""Where a case can be shown on this machine, and what it lacks to be timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..page.gpu_specs import missing_feature
from ..page.pair import Case
from ..util.device import Machine
from .run_context import RunContext

COMPILER = "compiler"
"""The device of a worker process that compiles: Triton's interpreter is off there."""


class Kernels(NamedTuple):
    """Which kernels of its own a case launches; only an emulator runs CUDA C++ on a CPU."""

    cuda: bool = False
    triton: bool = False
    emulated: bool = False


@dataclass(frozen=True)
class Placement:
    """Where a case can be shown: timed, checked, compiled, or (with a reason) not at all.

    Attributes:
        kind: ``time``, ``check``, ``compile`` or ``skip``.
        device: ``cuda``, ``cpu``, or the process that compiles.
        need: what it lacks to be timed, or why it is skipped.
        archs: what is compiled for.
    """

    kind: str
    device: str
    need: str = ""
    archs: tuple[str, ...] = ()


def placement_of(run: RunContext, case: Case, kernels: Kernels) -> Placement:
    """Decide where `case` can be shown, by the `kernels` of its own that it launches."""
    archs = case.pair.archs(case.variant)
    if run.settings.compile:
        return _assembled(run.settings.compile, case, archs, kernels)
    checking = run.settings.check
    if case.kind == "cpu" and case.variant.gpu_only:
        return Placement("skip", "cpu", f"{case.variant.gpu_only} has no form on a CPU")
    if case.kind == "cpu":
        if run.machine.arch == "cpu" or run.times_cpu or run.timer is not None:
            return Placement("check" if checking else "time", "cpu", "--aisp-check" * checking)
        return Placement("check", "cpu", "timed on a GPU machine only with -m aisp_cpu")
    if run.timer is not None and run.machine.arch in archs:
        return Placement("check" if checking else "time", "cpu", "--aisp-check" * checking)
    if run.machine.arch in archs and len(run.machine.gpus) >= case.gpus:
        return Placement("check" if checking else "time", "cuda", "--aisp-check" * checking)
    need = _need(case, run.machine)
    if kernels.emulated:
        return Placement("check", "cpu", f"{need}; its CUDA C++ kernels were emulated")
    if kernels.cuda:
        return Placement("compile", COMPILER, need, archs)
    if case.variant.gpu_only:
        return Placement("skip", "cpu", f"{need}; {case.variant.gpu_only} has no form on a CPU")
    return Placement("check", "cpu", need)


def _assembled(
    asked: tuple[str, ...], case: Case, archs: tuple[str, ...], kernels: Kernels
) -> Placement:
    """Return where a case is assembled, and for what."""
    mine = tuple(arch for arch in asked if arch in archs)
    if case.kind == "cpu":
        return Placement("skip", COMPILER, "a size for CPUs: no kernel is launched")
    if not any(kernels):
        return Placement("skip", COMPILER, "launches no kernel of its own: nothing to assemble")
    if not mine:
        features = ", ".join(case.pair.features(case.variant))
        why = f"needs {features} ({', '.join(archs)}); asked for {', '.join(asked)}"
        return Placement("skip", COMPILER, why)
    return Placement("compile", COMPILER, f"--aisp-compile={','.join(mine)}", mine)


def _need(case: Case, machine: Machine) -> str:
    features = case.pair.features(case.variant)
    here = "there is none here"
    if machine.arch != "cpu":
        here = f"this GPU is {machine.arch} ({machine.name})"
    lacking = missing_feature(features, machine.arch) if features else None
    if machine.arch != "cpu" and len(machine.gpus) < case.gpus:
        return f"needs {case.gpus} GPUs; this machine has {len(machine.gpus)}"
    if lacking:
        return f"needs {lacking}; {here}"
    return f"needs a GPU; {here}"
