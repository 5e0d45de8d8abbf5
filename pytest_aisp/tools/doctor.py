"""`aisp doctor`: what of this machine is well for measuring, what is not, and what to change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..common import device
from ..common.answers import Answer
from . import gpu_health, host_health
from .health import Finding, words


def look(root: Path = Path("/")) -> list[Finding]:
    """Return everything that there is to say of this machine."""
    cores = device.cores_here()
    return [
        *gpu_health.findings(device._nvml(), root, cores),
        *host_health.findings(root, cores=cores),
    ]


def answer(findings: Sequence[Finding], *, as_json: bool) -> Answer:
    """Return the findings; exit code 1 where something harms what is measured."""
    states = [finding.state for finding in findings]
    code = 1 if "harms" in states else 0
    if as_json:
        return Answer([json.dumps([asdict(finding) for finding in findings], indent=1)], code)
    harms, unread = states.count("harms"), states.count("unread")
    closing = f"{harms} of {len(findings)} harm what is measured" if harms else "nothing harms"
    closing += f"; {unread} could not be read" if unread else ""
    return Answer([*words(findings), closing], code)
