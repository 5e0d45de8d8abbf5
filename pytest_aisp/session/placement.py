"""Decide whether a case is timed, checked, compiled or skipped on this machine, and why."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..page.gpu_specs import missing_feature
from ..page.pair import Case
from ..page.sources import kernel_files, triton_kernels
from ..util.device import Machine
from .run_context import RunContext

COMPILER = "compiler"
"""The device of a worker process that only compiles, with Triton's interpreter turned off."""


class Kernels(NamedTuple):
    """The kinds of kernels that a case launches.

    Attributes:
        emulated: whether an emulator runs the CUDA C++ kernels on the CPU.
    """

    cuda: bool = False
    triton: bool = False
    emulated: bool = False


def kernels_of(run: RunContext, case: Case) -> Kernels:
    """Return the kinds of kernels that `case` launches."""
    sides, root = [case.pair.baseline, case.variant.side], str(run.settings.root)
    modules = kernel_files(sides, root)
    emulated = False
    if modules and run.emulator and not case.variant.gpu_only and not run.settings.in_process:
        emulated = not any(map(importlib.import_module(run.emulator).unsupported, modules))
    return Kernels(bool(modules), bool(triton_kernels(sides, root)), emulated)


@dataclass(frozen=True)
class Placement:
    """Where and how a case runs.

    Attributes:
        kind: ``time``, ``check``, ``compile`` or ``skip``.
        device: ``cuda``, ``cpu`` or `COMPILER`.
        need: the reason why the case is not timed, or empty.
        archs: the archs to compile for.
    """

    kind: str
    device: str
    need: str = ""
    archs: tuple[str, ...] = ()


def placement_of(run: RunContext, case: Case, kernels: Kernels) -> Placement:
    """Decide where and how `case` runs. It launches `kernels`."""
    archs, machine = case.pair.archs(case.variant), run.machine
    if run.settings.compile:
        return _compiled(run.settings.compile, case, archs, kernels)
    check = run.settings.check
    full = Placement("check" if check else "time", "cpu", "--aisp-check" if check else "")
    if case.kind == "cpu":
        if case.variant.gpu_only:
            return Placement("skip", "cpu", f"{case.variant.gpu_only} does not exist on a CPU")
        if kernels.emulated:
            return Placement("check", "cpu", "its CUDA C++ kernels were emulated")
        if kernels.cuda:
            return Placement("skip", "cpu", "its CUDA C++ kernels run on a CPU only emulated")
        if machine.arch == "cpu" or run.times_cpu or run.timer is not None:
            return full
        return Placement("check", "cpu", "timed on a GPU machine only with -m aisp_cpu")
    if machine.arch in archs:
        if run.timer is not None:
            return full
        if len(machine.gpus) * run.nodes >= case.gpus:
            return replace(full, device="cuda")
    need = _need(case, machine)
    if kernels.emulated:
        return Placement("check", "cpu", f"{need}; its CUDA C++ kernels were emulated")
    if kernels.cuda:
        return Placement("compile", COMPILER, need, archs[:1] if check else archs)
    if case.variant.gpu_only:
        return Placement("skip", "cpu", f"{need}; {case.variant.gpu_only} does not exist on a CPU")
    return Placement("check", "cpu", need)


def _compiled(
    wanted: tuple[str, ...], case: Case, archs: tuple[str, ...], kernels: Kernels
) -> Placement:
    """Return the placement of a case in a run that compiles for the `wanted` archs."""
    both = tuple(arch for arch in wanted if arch in archs)
    if case.kind == "cpu":
        return Placement("skip", COMPILER, "a size for CPUs: no kernel is launched")
    if not any(kernels):
        return Placement("skip", COMPILER, "launches no kernel of the page: nothing to assemble")
    if not both:
        features = ", ".join(case.pair.features(case.variant))
        why = f"needs {features} ({', '.join(archs)}); asked for {', '.join(wanted)}"
        return Placement("skip", COMPILER, why)
    return Placement("compile", COMPILER, f"--aisp-compile={','.join(both)}", both)


def _need(case: Case, machine: Machine) -> str:
    """Return a message that names what `case` needs and this machine lacks."""
    if machine.arch == "cpu":
        here = "there is none here"
    elif len(machine.gpus) < case.gpus:
        return f"needs {case.gpus} GPUs; this machine has {len(machine.gpus)}"
    else:
        here = f"this GPU is {machine.arch} ({machine.name})"
    features = case.pair.features(case.variant)
    lacking = missing_feature(features, machine.arch) if features else None
    return f"needs {lacking or 'a GPU'}; {here}"
