"""Votes on a suspect: the case measured again, each time in a fresh process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..bench.client import Bench
from ..results.row import ratio
from ..results.stored import HOST_CLOCKS
from ..results.verdict import VOTES, Reading
from .case_client import CaseClient
from .run import Failed, Unrecorded

Measure = Callable[[int, Bench], Reading]
"""Returns what process number so-and-so, a fresh one, says."""


@contextmanager
def voting(client: CaseClient, measure: Measure) -> Iterator[Callable[[], Reading | None]]:
    """Yield what returns each time what `measure` finds in a fresh process.

    It returns None when the run's budget for votes is spent, or the recording that is judged
    again holds no more. Where a clock of the GPU judges, as many as a verdict takes at least
    start together: importing torch is most of what a vote costs.
    """
    run, waiting, taken = client.run, list[Bench](), 0

    def process() -> Bench:
        if run.replay is not None:
            return run.replay
        if taken == 0 and client.ranks == 1 and _clock(client) not in HOST_CLOCKS:
            waiting.extend(client.fresh_bench() for _ in range(VOTES))
        return waiting.pop(0) if waiting else client.fresh_bench()

    def fresh() -> Reading | None:
        nonlocal taken
        if run.confirmed > run.settings.confirm_budget:
            client.row.notes.append("--aisp-confirm-budget is spent: no more votes in this run")
            return None
        bench = process()
        taken += 1
        return _vote(client, measure, bench)

    try:
        yield fresh
    finally:
        for bench in waiting:
            bench.close()


def _vote(client: CaseClient, measure: Measure, bench: Bench) -> Reading | None:
    run, row, verdict = client.run, client.row, client.row.verdict
    start = time.monotonic()
    number = len(row.timings) + len(row.against)
    name = f"vote of fresh process {number}"
    run.progress(f"vote {number} in a fresh process")
    try:
        found = measure(number, bench)
        said = f"{ratio(found.value)}, error {found.error:.2%}, {_clock(client)} clock"
        row.notes.append(f"{name}: {said}")
        return found
    except Unrecorded:  # the row has the reason
        row.verdict = verdict
        return None
    except Failed as failure:
        row.notes.append(f"{name}: {str(failure).splitlines()[0]}")
        raise
    finally:
        if run.replay is None:
            bench.close()
        run.confirmed += time.monotonic() - start


def _clock(client: CaseClient) -> str:
    return str((client.row.against or client.row.timings)[-1]["clock"])
