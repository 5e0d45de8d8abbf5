"""`manifest.json`: what runs, on what, under which settings; asked without touching CUDA."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..bench import peaks as peaks_module
from ..common import device, git
from ..results.published import below
from .run import Run
from .settings import Settings

PACKAGES: tuple[str, ...] = (
    "torch",
    "triton",
    "numpy",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
)
PACKAGES += ("nvidia-cuda-nvrtc-cu12", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
PACKAGES += ("nvidia-cublas", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-ml-py")
PACKAGES += ("transformer-engine", "pytest-xdist", "pytest-timeout", "hypothesis")
VARIABLES = re.compile(
    r"CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|MODULE_LOADING"
    r"|CACHE_DISABLE|CACHE_MAXSIZE|HOME|PATH)|CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE"
    r"|(NCCL|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|NVSHMEM|UCX|GLOO)_[A-Z0-9_]+"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|(OMP|KMP|GOMP)_[A-Z0-9_]+"
    r"|LD_PRELOAD|MALLOC_[A-Z0-9_]+|PYTHONHASHSEED|CI"
)
"""Names of environment variables that change what is measured; no other is ever written down."""
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|PRIVATE|CERT|SIGNATURE")
LOGIN = re.compile(r"://[^/\s]*@")


def gather(config: Any, run: Run) -> dict[str, Any]:
    """Return what is known at the start of a run, in plain types."""
    from ..tools.host_health import version_of

    settings = run.settings
    now = datetime.datetime.now(datetime.timezone.utc)
    option = config.option
    workers = getattr(option, "numprocesses", None)
    return {
        "version": version_of("pytest-aisp") or "",
        "started": now.isoformat(timespec="seconds"),
        "mode": settings.mode,
        "root": str(settings.root),
        "workload": {
            "paths": [str(argument) for argument in config.args],
            "keyword": option.keyword,
            "markers": option.markexpr,
            "workers": workers if isinstance(workers, int) else None,
        },
        "options": _options(settings),
        "python": platform.python_version(),
        "pytest": version_of("pytest") or "",
        "platform": platform.platform(),
        "packages": {name: found for name in PACKAGES if (found := version_of(name))},
        "machine": {**run.machine.to_json(), "clocks": {} if run.timer else device.clocks()},
        "git": git_state(settings.root),
        "environment": environment(os.environ),
        "peaks": stored_peaks(settings, [run.machine.product]),
    }


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may be written down: listed ones that do not look like secrets."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if VARIABLES.fullmatch(name) and not SECRET.search(name) and not LOGIN.search(value)
    }


def stored_peaks(settings: Settings, products: Collection[str]) -> dict[str, Any]:
    """Return what is stored of the products' peaks, by product; nothing for one without."""
    found = {}
    for product in sorted(set(products)):
        path = peaks_module.path_of(settings.baselines, product)
        try:
            peaks = peaks_module.stored(path)
        except (peaks_module.PeaksError, OSError):
            continue  # the cases that need them say so
        if peaks is not None:
            facts = {"rates": dict(peaks.rates), "facts": dict(peaks.facts)}
            found[product] = {**facts, "from": below(str(path), str(settings.root))}
    return found


def git_state(root: Path) -> dict[str, Any] | None:
    """Return commit, branch, and whether tracked files differ; None outside of a repository."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    branch = _git(root, "symbolic-ref", "--short", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "branch": branch, "dirty": None if changed is None else bool(changed)}


def _git(root: Path, *words: str) -> str | None:
    said = git.told(root, *words)
    return None if said is None else said.strip()


def _options(settings: Settings) -> dict[str, Any]:
    return {f.name: _plain(getattr(settings, f.name)) for f in dataclasses.fields(settings)}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(v) for v in value] if isinstance(value, tuple) else value
