"""`aisp peak`: the best rates of this machine, measured as a recording run does, and stored."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from ..bench import peaks
from ..bench.client import BenchProcess
from ..bench.leases import lease, together
from ..bench.peaks import SECONDS, Peaks, PeaksError
from ..common.answers import Answer, Unanswerable, columns
from ..common.device import Machine
from ..results.messages import Task
from ..results.row import duration
from .roofline import rate_text

TIMEOUT = 120.0
"""Seconds a bench process may be silent: it says nothing until all is measured."""


def measure(machine: Machine, tell: Callable[[str], None]) -> Peaks:
    """Return the peaks of `machine`'s first GPU, or of its CPU, from a process of its own.

    Raises:
        Unanswerable: where they cannot be measured; exit code 1.
    """
    device = "cuda" if machine.gpus else "cpu"
    gpu, interpret = next(iter(machine.gpus), ""), None if machine.gpus else "1"
    environment = {"CUDA_VISIBLE_DEVICES": gpu, "TRITON_INTERPRET": interpret}
    with _leased(machine, tell), contextlib.closing(BenchProcess(environment)) as bench:
        tell(f"measure the peaks of {machine.product}")
        reply = bench.ask(Task(kind="peaks", device=device), TIMEOUT, tell)
    if reply.error is not None:
        said = f"{reply.trace}\n" if reply.trace else ""
        raise Unanswerable(
            f"{said}the peaks of {machine.product} could not be measured: {reply.message}\n"
            "See what is wrong with the machine:\n    aisp doctor",
            code=1,
        )
    return Peaks(machine.product, reply.result["rates"], dict(reply.result["facts"]))


@contextlib.contextmanager
def _leased(machine: Machine, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold the GPU alone, or the host where it is what is measured."""
    if machine.gpus:
        with together(machine.gpus[:1], tell):
            yield
        return
    with lease("host", waiting=tell):
        yield


def answer(measured: Peaks, *, as_json: bool) -> Answer:
    """Return the rates with the kernel that reached each; exit code 1 where the clocks were low."""
    code = 1 if _throttled(measured) else 0
    if as_json:
        plain = {"product": measured.product, "rates": measured.rates, "facts": measured.facts}
        return Answer([json.dumps(plain, indent=1)], code)
    rows = [(key, amount(key, rate), measured.facts.get(key, "")) for key, rate in _rates(measured)]
    lines = [f"{measured.product}: {measured.facts.get('name', '')}", *columns(rows)]
    if (why := _throttled(measured)) is not None:
        lines.append(f"the GPU was slower than it should be: {why}\n    aisp doctor")
    return Answer(lines, code)


def _rates(measured: Peaks) -> list[tuple[str, float]]:
    return sorted(measured.rates.items(), key=lambda rate: peaks.RATES.index(rate[0]))


def amount(key: str, rate: float) -> str:
    """Return a rate in its unit."""
    return duration(rate) if key in SECONDS else rate_text(key, rate)


def _throttled(measured: Peaks) -> str | None:
    why = measured.facts.get("throttled", "no")
    return None if why == "no" else why


def keep(measured: Peaks, baselines: Path) -> list[str]:
    """Store what was measured in the place of what was; return each rate, old and new, in words.

    Raises:
        Unanswerable: where the clocks were low, or the file is something else or cannot be written.
    """
    path = peaks.path_of(baselines, measured.product)
    if (why := _throttled(measured)) is not None:
        raise Unanswerable(f"nothing is stored: {why}\n    aisp doctor", code=1)
    try:
        before = peaks.load(path).rates if path.exists() else {}
        peaks.save(path, measured)
    except (PeaksError, OSError) as error:
        raise Unanswerable(f"nothing is stored: {error}") from None
    was = {key: f"{amount(key, rate)} -> " for key, rate in before.items()}
    return [f"stored in {path}: {k} {was.get(k, '')}{amount(k, r)}" for k, r in _rates(measured)]
