"""Goals beyond time, counted: what a call of each side takes of one of them.

Both sides of a pair are counted one after the other, each alone; a process side in a fresh process
of its own. What of a goal is good enough, `results.goals` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..pages.pair import Side
from ..proof.workbench import Workbench
from ..results.messages import Task
from . import energy, kernels, memory
from .energy import Uncountable
from .nodes import ROLES
from .processes import ask_fresh
from .trial import Trial

COUNTERS: dict[str, Callable[[Workbench, Side], float]] = {
    "memory": memory.allocated,
    "reserved": memory.reserved,
    "fragmentation": memory.fragmentation,
    "launches": kernels.launches,
    "goodput": kernels.computing,
}
"""By goal, what counts one side alone; of goodput, the seconds at compute."""


def count(task: Task, trial: Trial) -> dict[str, float]:
    """Return by role what a call takes of `task.goal`.

    Raises:
        Uncountable: for a goal that such a side has no figure of.
    """
    sides = [side for side, _ in trial.sides]
    if task.goal == "energy":
        if any(hasattr(side, "environment") for side in sides):
            raise Uncountable("assert_energy: a process side's processes end before 5 s of work do")
        return energy.joules(trial)
    counter = COUNTERS[task.goal]
    if task.side:  # in the process of a process side
        return {task.side: counter(trial.bench, sides[ROLES.index(task.side)])}
    if all(hasattr(side, "environment") for side in sides):
        asked = [(replace(task, side=role), side) for role, side in zip(ROLES, sides, strict=True)]
        baseline, optimized = ask_fresh(asked, trial.progress)
        return {**baseline, **optimized}
    return {r: counter(trial.bench, s) for r, s in zip(ROLES, sides, strict=True)}
