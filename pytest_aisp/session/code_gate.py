"""Compare the code of a case with an old version: the sources and the launched machine code."""

from __future__ import annotations

from dataclasses import replace

from ..page.gpu_specs import LIMITS
from ..results.messages import ChangedTask, PageSource
from ..results.task_results import ChangedResult
from ..results.verdict import NOT_COMPARED, Decision
from ..util.git import GitError
from .case_client import CaseClient
from .measurement import Timing
from .placement import COMPILER
from .stored_result import Differences, StoredResult

UNCHANGED = "unchanged, because it launches the same machine code"
COMPILERS = ("torch", "triton")
"""The facts that show the versions of NVRTC, which torch installs, and of Triton with its ptxas."""


def sides_to_time(client: CaseClient, stored: StoredResult, timing: Timing) -> list[str]:
    """Return the sides that must be timed against their old version, because their code changed.

    The old version is the one at the commit of ``--aisp-against``. Without that option, it is the
    recorded version. A side with the same machine code and the same host code as before is not
    timed, but added to `client.unchanged`.
    """
    settings = client.run.settings
    if client.run.replay is not None:
        changed = client.ask(client.task(ChangedTask, past=None), ChangedResult)
        return _without_unchanged(client, changed, "in the replayed run")
    against = settings.against is not None
    then = "at the commit" if against else "when it was recorded"
    try:
        if not against and not settings.aa and settings.update is None:
            client.remarks += stored.unlisted_remark()
            client.past = stored.recorded_tree(client.location.page, timing.sources)
    except GitError as error:
        client.remarks.append(f"changed, but {NOT_COMPARED} {then}: {error}")
    if client.past is None:
        return []
    if why := client.past.unreached(client.location.page):
        client.remarks.append(f"{NOT_COMPARED} {then}: {why}")
        return []
    source = client.past_page()
    if source is None:
        return []
    listed = stored.result.files if stored.result is not None else {}
    opened = tuple(sorted({*stored.opened, *stored.lent, *listed}))
    changed = client.ask(client.task(ChangedTask, past=source, opened=opened), ChangedResult)
    if changed.why:
        client.remarks.append(f"{NOT_COMPARED} {then}: {changed.why}")
    if changed.kernels_alone:
        changed.why_timed = _launched(client, source, opened).why_timed
    return _without_unchanged(client, changed, client.past.label)


def _without_unchanged(client: CaseClient, changed: ChangedResult, where: str) -> list[str]:
    for role, why in changed.why_timed.items():
        version = f"{client.side_name(role)} against its version {where}"
        client.notes.append(f"{version}: {f'timed, because {why}' if why else UNCHANGED}")
        if not why:
            client.unchanged.append(role)
    return [role for role in changed.roles() if role not in client.unchanged]


def _launched(
    client: CaseClient, past: PageSource | None, opened: tuple[str, ...] = ()
) -> ChangedResult:
    """Return the machine code that the sides launch, as found by a process without a GPU.

    The result is empty if the kernels cannot be compiled on this machine.
    """
    run, arch = client.run, client.machine.arch
    if run.replay is None and (run.settings.in_process or arch not in LIMITS):
        return ChangedResult()
    run.progress("compare machine code")
    task = client.task(ChangedTask, past=past, arch=arch, opened=opened)
    reply = run.worker(COMPILER).ask(task, client.timeout, run.progress)
    if reply.error is not None:
        why = (reply.message.splitlines() or [reply.error])[0]
        client.notes.append(f"its machine code is not known: {why}")
        return ChangedResult()
    return reply.read(ChangedResult)


def machine_code(client: CaseClient) -> dict[str, str]:
    """Return a digest of the machine code that each side launches, if it is known."""
    if client.machine_code is None:
        client.machine_code = _launched(client, None).machine_code
    return client.machine_code


def with_compiler(
    client: CaseClient, stored: StoredResult, found: Differences, decision: Decision
) -> Differences:
    """Return the differences from the stored result, including differences of the compilers.

    If the source files are unchanged, but a side launches different machine code, then NVRTC,
    Triton or ptxas has changed. This is checked only if the speedup differs from the stored one, or
    if a fact of `COMPILERS` does. Without a loss, a remark names the side.
    """
    mine = stored.result
    missed = {decision.outcomes.get(name) for name in ("record", "improvement")} & {"red", "open"}
    other = {fact.partition(" was ")[0] for fact in found.environment} & {*COMPILERS}
    if not missed and not (other and client.run.settings.update is None):
        return found
    if mine is None or not mine.machine_code or not stored.has_recorded_code:
        return found
    now = machine_code(client)
    facts = [
        f"{client.side_name(role)} has other machine code than when stored, from the same source"
        for role, digest in mine.machine_code.items()
        if now.get(role, digest) != digest
    ]
    if not missed:
        client.remarks += facts
        return found
    return replace(found, environment=[*found.environment, *facts])
