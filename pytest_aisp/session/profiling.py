"""`--aisp-profile`: after its verdict, a case's sides once more under a profiler.

Nothing that goes wrong here is the case's fault: it is said in a remark, and changes no verdict.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..page.pair import ROLES
from ..results.messages import ProfileTask
from ..results.row import Profile
from ..worker import nvidia_tools
from .case_client import CaseClient
from .run_context import Failed

if TYPE_CHECKING:
    from .case import CaseRun

SEED = 0
"""The values shown here are no secret: the task is written beside the report."""
LONGEST = 120
"""Characters of a folder's name: file systems take 255 bytes."""


def profile(case: CaseRun) -> None:
    """Profile both sides of `case` and link what was written in its row.

    Cases whose sides were not shown to be right are left alone: they would fail here, too.
    """
    tool = case.run.settings.profile
    shown = case.timing is not None or case.verdict in ("checked", "compiled") or case.metrics
    if not shown:
        return
    try:
        _profile(case, tool)
    except Exception as error:  # whatever it is, the verdict stands, and the run goes on
        case.remarks.append(f"not profiled ({tool}): {error}")
    finally:
        case.run.progress("")


def folder_of(client: CaseClient) -> Path:
    """Return the folder of the case's profiles, named after chapter, page, test and case."""
    place = client.location
    full = f"{place.chapter}.{place.page.stem}.{place.function}.{client.case.id}"
    name = re.sub(r"[^\w.=,-]", "_", full)[:LONGEST]
    if name != full:
        name += f"-{zlib.crc32(full.encode()):08x}"
    return client.run.settings.profiles / name


def _profile(case: CaseRun, tool: str) -> None:
    client = case.client
    if (why := _why_not(client, tool)) is not None:
        raise Failed(why)
    client.run.check_time()
    folder = folder_of(client)
    found = _by_torch(client, folder) if tool == "torch" else _by_nsight(client, tool, folder)
    case.profile = Profile(tool=tool, folder=str(folder), **found)
    case.notes.append(f"profile ({tool}): {folder}")
    case.notes += _words(found)


def _why_not(client: CaseClient, tool: str) -> str | None:
    """Return why this case cannot be profiled by `tool`, or None."""
    if client.placement.kind not in ("time", "check"):
        return "its kernels are only assembled here, nothing runs"
    if hasattr(client.case.pair.baseline, "environment"):
        return "each of its samples is a process of its own"
    torch_does = "\n    pytest --aisp-profile=torch"
    if tool != "torch" and client.ranks > 1:
        return f"its sides run on {client.ranks} ranks, {tool} is put around one{torch_does}"
    if tool != "torch" and client.placement.device != "cuda":
        return f"it runs on the CPU, {tool} is for GPUs{torch_does}"
    return None


def _task(client: CaseClient, **changes: Any) -> ProfileTask:
    at = "case" if client.placement.kind == "time" else "check"
    return client.task(ProfileTask, at=at, seed=SEED, **changes)


def _by_torch(client: CaseClient, folder: Path) -> dict[str, Any]:
    """Profile both sides in a fresh worker process, one that measures nothing."""
    task = _task(client, folder=str(folder.absolute()))
    worker = client.fresh_worker()
    try:
        reply = worker.ask(task, client.timeout, client.run.progress)
    finally:
        worker.close()
    if reply.error is not None:
        raise Failed(reply.message)
    return dict(reply.result)


def _by_nsight(client: CaseClient, tool: str, folder: Path) -> dict[str, Any]:
    environment = client.run.environment(client.placement.device)
    files = {}
    for role in ROLES:
        client.run.progress(f"profile {role} under {tool}")
        task = _task(client, side=role)
        where = folder.absolute()
        files[role] = nvidia_tools.profile_side(tool, task, where, environment, client.timeout)
    return {"files": files}


def _words(found: dict[str, Any]) -> list[str]:
    words = [f"profile: {found['words']}"] if "words" in found else []
    for role, held in found.get("memory", {}).items():
        sizes = [
            f"{when} {', '.join(f'{k} {n / 2**20:.4g} MiB' for k, n in held[when].items())}"
            for when in ("before", "after")
        ]
        words.append(f"profile: memory of {role}: {'; '.join(sizes)}")
    return words
