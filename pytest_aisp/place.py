"""Where a case can be shown on this machine, and what it lacks to be timed."""

from __future__ import annotations

from dataclasses import dataclass

from .device import Machine
from .pair import Case
from .run import Run
from .skus import missing


@dataclass(frozen=True)
class Place:
    """Where a case can be shown: timed, checked, compiled, or (with a reason) not at all."""

    kind: str
    device: str
    need: str = ""
    archs: tuple[str, ...] = ()


def place_of(run: Run, case: Case, kernels: bool) -> Place:
    """Decide where `case` can be shown; `kernels` says that it launches CUDA C++."""
    archs = case.pair.archs(case.variant)
    checking = run.settings.check
    if case.kind == "cpu":
        if run.machine.arch == "cpu" or run.times_cpu or run.timer is not None:
            return Place("check" if checking else "time", "cpu", "--aisp-check" * checking)
        return Place("check", "cpu", "timed on a GPU machine only with -m cpu")
    if run.timer is not None and run.machine.arch in archs:
        return Place("check" if checking else "time", "cpu", "--aisp-check" * checking)
    if run.machine.arch in archs and len(run.machine.gpus) >= case.gpus:
        return Place("check" if checking else "time", "cuda", "--aisp-check" * checking)
    need = _need(case, run.machine)
    if kernels:
        return Place("compile", "cpu", need, archs)
    return Place("check", "cpu", need)


def _need(case: Case, machine: Machine) -> str:
    features = case.pair.features(case.variant)
    here = "there is none here"
    if machine.arch != "cpu":
        here = f"this GPU is {machine.arch} ({machine.name})"
    lacking = missing(features, machine.arch) if features else None
    if machine.arch != "cpu" and len(machine.gpus) < case.gpus:
        return f"needs {case.gpus} GPUs; this machine has {len(machine.gpus)}"
    if lacking:
        return f"needs {lacking}; {here}"
    return f"needs a GPU; {here}"
