"""`aisp nccl`: start ranks, have them run collectives, say how fast they were.

The ranks are those of pages (`ranks.RankSet`): NCCL on GPUs, Gloo on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..bench.collectives import ONE_SHOT, OPS, WINDOWS, bandwidths
from ..bench.leases import together
from ..common.answers import Answer, Unanswerable, columns, rate_text, size_text
from ..common.device import Machine
from ..results.messages import Task
from ..results.row import duration
from .launcher import RankSet

LEAST_STORED = 64 << 20
"""An all-reduce of fewer bytes does not fill the links: its busbw is no peak."""
GLOO = "Gloo on a CPU (not a measurement of links)"


@dataclass(frozen=True)
class Sweep:
    """What the ranks answered.

    Attributes:
        rows: plain rows of `collectives.sweep`, with `algbw` and `busbw` in bytes/s.
        device: ``cuda`` or ``cpu``.
        facts: backend, versions, name of the GPU.
        notes: what was not available, in words.
    """

    ranks: int
    device: str
    rows: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]
    notes: Sequence[str]

    def of(self, op: str) -> list[Mapping[str, Any]]:
        """Return the rows of one collective, the sizes ascending."""
        return [row for row in self.rows if row["op"] == op]

    @property
    def title(self) -> str:
        """What the numbers were taken on and with."""
        versions = [f"{k} {self.facts[k]}" for k in ("nccl", "torch") if self.facts.get(k)]
        where = self.facts.get("device") or GLOO
        return f"{self.ranks} ranks, {where}, {', '.join(versions)}"


def parse_ops(text: str) -> tuple[str, ...]:
    """Return the collectives named in ``all_reduce,all_gather``.

    Raises:
        ValueError: for one that is none.
    """
    ops = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for op in ops:
        if op not in OPS:
            raise ValueError(f"unknown collective {op!r}; legal: {', '.join(OPS)}")
    return ops


def place(machine: Machine, ranks: int | None) -> tuple[str, int]:
    """Return where and how many ranks run: one a GPU, or two on a CPU with fewer than two GPUs.

    Raises:
        Unanswerable: for fewer than two ranks, or more than the machine has GPUs.
    """
    have = len(machine.gpus)
    if ranks is not None and ranks < 2:
        raise Unanswerable(f"--ranks={ranks}: a collective needs 2 ranks or more")
    if have < 2:
        return "cpu", ranks or 2
    if ranks is not None and ranks > have:
        raise Unanswerable(f"--ranks={ranks}: this machine has {have} GPUs\nGive --ranks={have}")
    return "cuda", ranks or have


def run(
    machine: Machine,
    ops: Sequence[str],
    sizes: Sequence[int],
    *,
    ranks: int | None,
    timeout: float,
    tell: Callable[[str], None],
) -> Sweep:
    """Start the ranks, ask them, end them.

    Args:
        timeout: seconds that the ranks may be silent.

    Raises:
        Unanswerable: with exit code 1 where a rank fails; the message names it.
    """
    device, count = place(machine, ranks)
    gpus = sorted(machine.gpus)[:count] if device == "cuda" else []
    task = Task(kind="collectives", device=device, sweep={"ops": list(ops), "sizes": list(sizes)})
    with together(gpus, tell):
        started = RankSet(count, {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})
        try:
            reply = started.ask(task, timeout, tell)
        finally:
            started.close()
    if reply.error is not None:
        raise Unanswerable(_fault(reply.error, reply.message, reply.trace, timeout), code=1)
    result = dict(reply.result)
    rows = [_with_bandwidths(row, count) for row in result.pop("rows")]
    return Sweep(count, device, rows, result, result.pop("notes"))


def _fault(error: str, message: str, trace: str, timeout: float) -> str:
    if error == "timeout":  # its last line names an option of pytest
        message = message.splitlines()[0] + f"\nGive it longer with --timeout={2 * timeout:g}"
    return "\n".join(part for part in (trace.rstrip(), message) if part)


def _with_bandwidths(row: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    algbw, busbw = bandwidths(row, ranks)
    return {**row, "algbw": algbw, "busbw": busbw}


def answer(sweep: Sweep) -> Answer:
    """Return the table: each collective by size, one-shot beside NCCL's all-reduce."""
    shots = {row["size"]: row for row in sweep.of(ONE_SHOT)}
    heads = ["collective", "size", "time", "algbw", "busbw", "clock"]
    heads += ["one-shot", "its busbw"] if shots else []
    rows = [heads]
    for row in sweep.rows:
        if row["op"] != ONE_SHOT:
            rows.append([*_cells(row), *(_beside(row, shots) if shots else [])])
    how = f"slowest rank, median of {WINDOWS} windows"
    return Answer([f"{sweep.title}; {how}", *columns(rows), *sweep.notes])


def _cells(row: Mapping[str, Any]) -> list[str]:
    size, seconds = size_text(row["size"]), duration(row["seconds"])
    return [
        row["op"],
        size,
        seconds,
        rate_text(row["algbw"]),
        rate_text(row["busbw"]),
        row["clock"],
    ]


def _beside(row: Mapping[str, Any], shots: Mapping[int, Mapping[str, Any]]) -> list[str]:
    shot = shots.get(row["size"]) if row["op"] == "all_reduce" else None
    return ["", ""] if shot is None else [duration(shot["seconds"]), rate_text(shot["busbw"])]


def rates(sweep: Sweep) -> tuple[dict[str, float], dict[str, str]]:
    """Return what is stored as peaks: ``busbw`` of the largest all-reduce, ``all_reduce`` seconds.

    Raises:
        Unanswerable: where there is no all-reduce large enough, or no GPU.
    """
    if sweep.device == "cpu":
        raise Unanswerable(f"nothing is stored: {GLOO}")
    reduced = sweep.of("all_reduce")
    if not reduced or reduced[-1]["size"] < LEAST_STORED:
        raise Unanswerable(
            f"nothing is stored: the peak needs an all-reduce of {size_text(LEAST_STORED)} or more"
            "\n    aisp nccl --ops=all_reduce --sizes=4KiB:512MiB --store"
        )
    first, last = reduced[0], reduced[-1]
    values = {"busbw": last["busbw"], "all_reduce": first["seconds"]}
    words = {
        k: f"{size_text(r['size'])}, {sweep.title}"
        for k, r in zip(values, (last, first), strict=True)
    }
    return values, words
