"""The controller's memory: every row, written as it arrives, stored where asked."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import platform
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from ..results import store
from ..results.artifacts import REPORT, Artifacts
from ..results.export import path_below
from ..results.merge import why_kept
from ..results.metric_limits import METRICS
from ..results.models import Result
from ..results.results_json import Canary, GitState, MachineFacts, Manifest, StoredPeaks, Workload
from ..results.row import Recording, Row, ratio
from ..results.store import StoreError
from ..results.verdict import environment_moved
from ..timing import peaks as peaks_module
from ..util import device, git
from .options import Settings
from .run_context import RunContext

BROKEN_OFF = (2, 3, 4)
"""Exit codes of pytest where a run was interrupted, by hand or by an error of its own or in use."""
NO_CASES = 5
"""Exit code of pytest where nothing was collected, or nothing was left of it."""


class Recorder:
    """Gather rows on the controller; nothing else writes stored results or rows."""

    def __init__(self, settings: Settings, hook: Any, config: Any) -> None:
        self.settings, self._hook, self._config = settings, hook, config
        self.rows: list[Row] = []
        self.changes: list[str] = []
        self.not_stored: list[str] = []
        self._refused: dict[str, list[str]] = {}
        self.canaries: list[Canary] = []
        self.crashes: list[str] = []
        self.without_canary: list[tuple[str, list[str]]] = []  # xdist workers, and their cases
        self.left_alone = ""
        self.artifacts = None if settings.artifacts is None else Artifacts(settings.artifacts)

    def finish(self, exit_code: int) -> None:
        """Write to the artifacts how the run ended; over an earlier run's, where a case did."""
        if self.artifacts is None:
            return
        if not self.artifacts.begun and exit_code in (*BROKEN_OFF, NO_CASES):
            self.left_alone = (
                f"{self.settings.artifacts} is as an earlier run left it: no case finished"
            )
            return
        facts: dict[str, Any] = {"exit_code": int(exit_code), "invalid": self.why_invalid()}
        facts |= {"complete": exit_code not in BROKEN_OFF}
        facts |= {"not_written": self.errors, "no_verdict": list(self.crashes)}
        no_canary = [f"worker {name!r}: {', '.join(keys)}" for name, keys in self.without_canary]
        facts |= {"no_canary": no_canary}
        facts |= {"verdicts": dict(Counter(row.verdict for row in self.rows))}
        peaks = stored_peaks(self.settings, {row.product for row in self.rows})
        self.artifacts.finish(facts, peaks, self._report)

    def _report(self, folder: Path) -> None:
        from ..report.html import write_report
        from ..report.run import ReportRun

        write_report(ReportRun.read(folder), folder / REPORT, pages_root=self.settings.root)

    def close(self) -> None:
        """Let other runs have the folder of artifacts."""
        if self.artifacts is not None:
            self.artifacts.release()

    def add(self, row: Row) -> None:
        """Take one case's row: to the artifacts, to the stored results, to the hook."""
        self.rows.append(row)
        if self.artifacts is not None:
            self.artifacts.add(row)
        if row.recorded and self.settings.update is not None:
            self._store(row)
        self._hook.pytest_aisp_result(config=self._config, row=row.to_json())

    def add_canary(self, canary: Canary) -> None:
        """Take one process's canary."""
        self.canaries.append(canary)
        if self.artifacts is not None:
            self.artifacts.add_canary(canary)

    def _store(self, row: Row) -> None:
        key, facts = self._session
        environment = {**row.environment, **facts}
        path = Path(row.file)
        try:
            result = _as_result(row.recorded, key)
            path.parent.mkdir(parents=True, exist_ok=True)
            changes = store.write(
                path,
                row.product,
                {row.key: result},
                {key: environment},
                replace=row.recorded.replace,
            )
            why = why_kept(store.load(path), row.key, result, {key: environment})
        except (StoreError, OSError, ValueError) as error:
            self._refused.setdefault(str(error), []).append(row.key)
            return
        for change in changes:
            before = "new" if change.old is None else _said(change.old)
            self.changes.append(f"{change.key}: {before} -> {_said(change.new)}")
        if why:
            self.not_stored.append(f"{row.key}: {why}; --aisp-update-expectations=all replaces it")

    @property
    def errors(self) -> list[str]:
        """What could not be written: each fault once, with all that it kept out."""
        refused = [f"{', '.join(keys)}: {fault}" for fault, keys in self._refused.items()]
        lacking = self.artifacts.error if self.artifacts is not None else None
        return [*refused, *([lacking] if lacking else [])]

    @functools.cached_property
    def _session(self) -> tuple[str, dict[str, Any]]:
        # One run, one key, one meaning, even past midnight or a commit; two runs in one second have
        # two keys. Whether they are two sessions, `merge` reads from the time in them.
        now = datetime.datetime.now(datetime.timezone.utc)
        facts = {"date": datetime.date.today().isoformat(), "commit": _commit(self.settings.root)}
        return now.strftime("%Y-%m-%dT%H%M%S.%fZ"), facts

    def why_invalid(self) -> list[str]:
        """Return why no verdict of this run counts; nothing for a valid run."""
        why = [f"canary): {canary}" for canary in self.canaries if canary.wrong]
        if environment_moved(self.rows):
            why.append(
                "environment moved): too many cases are off in one direction to be the code's doing"
            )
        return [f"RUN INVALID ({reason}; no verdict of this run counts" for reason in why]


def _commit(root: Path) -> str | None:
    for variable in ("GITHUB_SHA", "CI_COMMIT_SHA"):  # where the checkout came without its history
        if os.environ.get(variable):
            return os.environ[variable][:12]
    return (git.try_git(root, "rev-parse", "--short=12", "HEAD") or "").strip() or None


def _as_result(recorded: Recording, environment: str) -> Result:
    """Return the stored result of a row's `recorded` values, be they times, goals or both."""
    given = {name: value for name, value in asdict(recorded).items() if name != "replace"}
    return Result.of({**given, "environments": [environment]})


def _said(result: Result) -> str:
    """Return ``3.530x, memory 600 MiB / 240 MiB``: what there is of it."""
    parts = [] if result.value is None else [ratio(result.value)]
    parts += [f"{name} {METRICS[name].both(found)}" for name, found in result.goals.items()]
    return ", ".join(parts)


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


def build_manifest(config: Any, run: RunContext) -> Manifest:
    """Return what is known at the start of a run."""
    from ..tools.doctor import version_of

    settings = run.settings
    now = datetime.datetime.now(datetime.timezone.utc)
    option = config.option
    workers = getattr(option, "numprocesses", None)
    clocks = {} if run.timer else device.clocks()
    machine = msgspec.convert({**run.machine.to_json(), "clocks": clocks}, MachineFacts)
    return Manifest(
        version=version_of("pytest-aisp") or "",
        started=now.isoformat(timespec="seconds"),
        mode=settings.mode,
        root=str(settings.root),
        workload=Workload(
            paths=[str(argument) for argument in config.args],
            keyword=option.keyword,
            markers=option.markexpr,
            workers=workers if isinstance(workers, int) else None,
        ),
        options=_options(settings),
        python=platform.python_version(),
        pytest=version_of("pytest") or "",
        platform=platform.platform(),
        packages={name: found for name in PACKAGES if (found := version_of(name))},
        machine=machine,
        git=git_state(settings.root),
        environment=environment(os.environ),
        peaks=stored_peaks(settings, [run.machine.product]),
        complete=False,
        invalid=[],
    )


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may be written down: listed ones that do not look like secrets."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if VARIABLES.fullmatch(name) and not SECRET.search(name) and not LOGIN.search(value)
    }


def stored_peaks(settings: Settings, products: Collection[str]) -> dict[str, StoredPeaks]:
    """Return what is stored of the products' peaks, by product; nothing for one without."""
    found = {}
    for product in sorted(set(products)):
        path = peaks_module.path_of(settings.baselines, product)
        try:
            peaks = peaks_module.stored(path)
        except (peaks_module.PeaksError, OSError):
            continue  # the cases that need them say so
        if peaks is not None:
            origin = path_below(str(path), str(settings.root))
            found[product] = StoredPeaks(dict(peaks.rates), dict(peaks.facts), origin)
    return found


def git_state(root: Path) -> GitState | None:
    """Return commit, branch, and whether tracked files differ; None outside of a repository."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    branch = _git(root, "symbolic-ref", "--short", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return GitState(commit, branch, None if changed is None else bool(changed))


def _git(root: Path, *words: str) -> str | None:
    said = git.try_git(root, *words)
    return None if said is None else said.strip()


def _options(settings: Settings) -> dict[str, Any]:
    return {f.name: _plain(getattr(settings, f.name)) for f in dataclasses.fields(settings)}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(v) for v in value] if isinstance(value, tuple) else value
