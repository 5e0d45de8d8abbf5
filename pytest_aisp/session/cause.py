"""The cause of a loss, and the lines of a row that show the evidence of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..results.verdict import Cause
from .case_client import CaseClient
from .stored_result import Differences, StoredResult

SAME_CODE = "the code is as it was recorded"
NOT_RECORDED = "there is no stored result to compare with"
OTHER_CODE = "not all files of the code are known to be as they were recorded"


def cause_of(
    client: CaseClient, stored: StoredResult, found: Differences, sources: Mapping[str, str]
) -> Cause:
    """Return the cause of a loss, or an empty string if only the code can be the cause.

    Args:
        found: the differences from the stored result.
        sources: the current digest of each side's code, keyed by role.
    """
    if client.run.settings.aa:
        return "machine"  # both sides are the same code in the same process
    mine = stored.result
    if mine is None or stored.cause(found):
        return stored.cause(found)
    same = mine.with_syntax(sources, stored.text_sources).sources == sources
    return "machine" if same and not mine.files else ""


def evidence(client: CaseClient, stored: StoredResult, found: Differences) -> list[str]:
    """Return lines about the differences from the stored result, and about the machine.

    The lines describe the machine only if the code and the environment are unchanged.
    """
    mine = stored.result
    if client.run.settings.aa:
        return machine_lines(client)
    if mine is None:
        return [NOT_RECORDED]
    if mine.files and not stored.has_recorded_code:
        return [*found.lines(), OTHER_CODE]
    lines = [*found.lines(), *[SAME_CODE] * bool(mine.files)]
    if found.lines():
        return lines
    environments = client.run.stored(stored.path).environments
    boards = [environments.get(name, {}).get("board") for name in mine.environments]
    return lines + board_line(boards, client.environment().get("board")) + machine_lines(client)


def board_line(then: list[object], now: object) -> list[str]:
    """Return a line about the boards of the stored sessions and of this run, if they are known."""
    known = list(dict.fromkeys(str(board) for board in then if board))
    if not known or not now:
        return []
    if now in known:
        return [f"measured on board {now}, as the stored result"]
    return [f"measured on board {now}; the stored result is from board {', '.join(known)}"]


def machine_lines(client: CaseClient) -> list[str]:
    """Return lines about the disturbances and the GPU's clocks while the case was timed."""
    dropped = Counter(why for timing in client.timings for why in timing.dropped)
    lines = [
        f"{count} block{'s' * (count != 1)} measured again: {why}" for why, count in dropped.items()
    ]
    clocks = [mhz for timing in client.timings for mhz in timing.details.get("sm_mhz") or ()]
    if clocks:
        lines.append(f"the GPU's SM clock was {min(clocks)} to {max(clocks)} MHz")
    return lines
