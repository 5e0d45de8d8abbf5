"""The recorder, which writes a run's artifacts, stored results and manifest.

Under xdist, it exists only in the controller.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
import pytest

from ..results import store
from ..results.artifacts import REPORT, Artifacts
from ..results.export import path_below
from ..results.merge import Change, recorded_result, why_kept
from ..results.metric_limits import METRICS
from ..results.models import Result
from ..results.results_json import Canary, GitState, MachineFacts, Manifest, StoredPeaks, Workload
from ..results.row import Row, ratio
from ..results.store import StoreError
from ..results.verdict import NOT_RECORDED, environment_moved
from ..timing import peaks as peaks_module
from ..util import device, git
from .options import Settings
from .run_context import RunContext
from .unused_results import is_selected

INCOMPLETE = (
    pytest.ExitCode.INTERRUPTED,
    pytest.ExitCode.INTERNAL_ERROR,
    pytest.ExitCode.USAGE_ERROR,
)
NO_CASES = pytest.ExitCode.NO_TESTS_COLLECTED


class Recorder:
    """Collects rows in the controller. Nothing else writes rows and stored results.

    Attributes:
        changes: a message for each change that was written to stored results.
        not_stored: a message for each result that was not stored, with the reason.
        crashes: the reports of xdist workers that crashed.
        without_canary: the xdist workers that ended before their canary, with their cases' keys.
        unused: the stored results that no collected case uses, each with its file.
        left_alone: the reason why the artifacts of an earlier run were kept, or empty.
        recorded_invalid: the reasons why the run that is replayed was invalid, if it was.
        recorded_red: the ids of the red cases of the run that is replayed.
    """

    def __init__(self, settings: Settings, config: pytest.Config) -> None:
        self.settings, self._config = settings, config
        self.rows: list[Row] = []
        self.changes: list[str] = []
        self.not_stored: list[str] = []
        self._refused: dict[str, list[str]] = {}
        self._sessions: dict[object, tuple[str, dict[str, str | None]]] = {}
        self.canaries: list[Canary] = []
        self.crashes: list[str] = []
        self.without_canary: list[tuple[str, list[str]]] = []
        self.unused: set[str] = set()
        self.left_alone = ""
        self.recorded_invalid: list[str] = []
        self.recorded_red: list[str] = []
        self.artifacts = None if settings.artifacts is None else Artifacts(settings.artifacts)

    def finish(self, exit_code: int) -> None:
        """Complete the artifacts at the end of the run, if any case finished."""
        if self.artifacts is None:
            return
        if not self.artifacts.begun and exit_code in (*INCOMPLETE, NO_CASES):
            folder = self.settings.artifacts
            self.left_alone = f"{folder} still holds the earlier run: no case finished"
            return
        facts = {
            "exit_code": int(exit_code),
            "complete": exit_code not in INCOMPLETE,
            "invalid": self.why_invalid(),
            "not_written": self.errors,
            "no_verdict": list(self.crashes),
            "no_canary": [f"worker {w!r}: {', '.join(keys)}" for w, keys in self.without_canary],
            "verdicts": dict(Counter(row.verdict for row in self.rows)),
        }
        peaks = stored_peaks(self.settings, {row.product for row in self.rows})
        self.artifacts.finish(facts, peaks, self._report)

    def _report(self, folder: Path) -> None:
        from ..report.html import write_report
        from ..report.run import ReportRun

        write_report(ReportRun.read(folder), folder / REPORT, pages_root=self.settings.root)

    def close(self) -> None:
        """Unlock the folder of artifacts, so that other runs can use it."""
        if self.artifacts is not None:
            self.artifacts.release()

    def add(self, row: Row) -> None:
        """Write a case's row to the artifacts and to the stored results. Call the result hook."""
        self.rows.append(row)
        samples = None if self.artifacts is None else self.artifacts.add(row)
        if row.recorded and self.settings.update is not None:
            self._store(row, None if samples is None else samples.sha256)
        self._config.hook.pytest_aisp_result(config=self._config, row=row.to_json())

    def add_session(self, row: Row) -> None:
        """Store another session of a case that was already reported, measured on another board."""
        if row.recorded:
            # Only add this session, because with =all the first one has already replaced old
            # results.
            row.recorded.replace = False
            self._store(row, None)

    def add_canary(self, canary: Canary) -> None:
        """Add one process's canary."""
        self.canaries.append(canary)
        if self.artifacts is not None:
            self.artifacts.add_canary(canary)

    def _store(self, row: Row, samples: str | None) -> None:
        key, facts = self._session(row.environment.get("board"))
        environment = {**row.environment, **facts}
        path = Path(row.file)
        try:
            result = recorded_result(row.recorded, key, samples)
            path.parent.mkdir(parents=True, exist_ok=True)
            changes = store.write(
                path,
                row.product,
                {row.key: result},
                {key: environment},
                replace=row.recorded.replace,
                texts={row.key: row.recorded.text_sources},
            )
            why = why_kept(store.load(path), row.key, result, {key: environment})
        except (StoreError, OSError, ValueError) as error:
            self._refused.setdefault(str(error), []).append(row.key)
            return
        for change in changes:
            self.changes.append(f"{change.key}: {_describe_change(change)}")
        if why:
            self.not_stored.append(f"{row.key}: {why}; --aisp-update-expectations=all replaces it")

    @property
    def errors(self) -> list[str]:
        """The write errors, each with the keys of all affected cases."""
        errors = [f"{', '.join(keys)}: {error}" for error, keys in self._refused.items()]
        if self.artifacts is not None and self.artifacts.error:
            errors.append(self.artifacts.error)
        return errors

    def _session(self, board: object) -> tuple[str, dict[str, str | None]]:
        """Return the key and the facts of the environment of `board`.

        The key and the facts stay the same during a run. Only a fleet has several boards. The key
        contains the time with microseconds, so that runs have different keys. `merge` uses this
        time to decide whether two runs are two sessions.
        """
        if board not in self._sessions:
            now = datetime.datetime.now(datetime.timezone.utc)
            commit = _commit(self.settings.root)
            facts = {"date": datetime.date.today().isoformat(), "commit": commit}
            self._sessions[board] = now.strftime("%Y-%m-%dT%H%M%S.%fZ"), facts
        return self._sessions[board]

    def why_invalid(self) -> list[str]:
        """Return the reasons why this run's verdicts are invalid, or nothing for a valid run."""
        reasons = [f"canary): {canary}" for canary in self.canaries if canary.wrong]
        if environment_moved(self.rows):
            reasons.append(
                "environment moved): too many cases moved in one direction for the code to be "
                "the cause"
            )
        found = [f"RUN INVALID ({reason}; no verdict of this run counts" for reason in reasons]
        return list(dict.fromkeys([*self.recorded_invalid, *found]))

    def not_replayed(self) -> list[str]:
        """Return lines about the cases that this replay could not judge, or nothing."""
        lacking = [
            row.nodeid
            for row in self.rows
            if row.verdict == "inconclusive"
            and any(r.startswith(NOT_RECORDED) for r in row.reasons)
        ]
        known = {row.nodeid for row in self.rows}
        gone = [i for i in self.recorded_red if i not in known and is_selected(self._config, i)]
        lines = [f"{nodeid}: {NOT_RECORDED} too few samples" for nodeid in lacking]
        return lines + [f"{nodeid}: red in the recorded run, and not run again" for nodeid in gone]


def _commit(root: Path) -> str | None:
    for variable in ("GITHUB_SHA", "CI_COMMIT_SHA"):  # a CI checkout may lack the history
        if os.environ.get(variable):
            return os.environ[variable][:12]
    return (git.try_git(root, "rev-parse", "--short=12", "HEAD") or "").strip() or None


def _describe_change(change: Change) -> str:
    if change.only_digests:
        old = change.old
        same = old is not None and old.sources == change.new.sources
        what = "the blobs of its files" if same else "digests of the syntax"
        return f"{_describe(change.new)} is kept, with {what}"
    before = "new" if change.old is None else _describe(change.old)
    return f"{before} -> {_describe(change.new)}"


def _describe(result: Result) -> str:
    """Return a result as text, such as ``3.530x, memory 600 MiB / 240 MiB``."""
    parts = [] if result.value is None else [ratio(result.value)]
    parts += [f"{name} {METRICS[name].both(amounts)}" for name, amounts in result.goals.items()]
    return ", ".join(parts)


PACKAGES: tuple[str, ...] = ("torch", "triton", "numpy", "cuda-core", "cuda-bindings")
PACKAGES += ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cudnn-cu12")
PACKAGES += ("nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
PACKAGES += ("nvidia-ml-py", "transformer-engine", "pytest-xdist", "pytest-timeout", "hypothesis")
VARIABLES = re.compile(
    r"CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|MODULE_LOADING"
    r"|CACHE_DISABLE|CACHE_MAXSIZE|HOME|PATH)|CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE"
    r"|(NCCL|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|NVSHMEM|UCX|GLOO)_[A-Z0-9_]+"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|(OMP|KMP|GOMP)_[A-Z0-9_]+"
    r"|LD_PRELOAD|MALLOC_[A-Z0-9_]+|PYTHONHASHSEED|CI"
)
"""The environment variables that affect measurements. No others are stored."""
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|PRIVATE|CERT|SIGNATURE")
LOGIN = re.compile(r"://[^/\s]*@")


def build_manifest(config: pytest.Config, run: RunContext) -> Manifest:
    """Return the manifest for the start of a run."""
    from ..tools.host_findings import version_of

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
        options=msgspec.to_builtins(settings, enc_hook=str),
        python=platform.python_version(),
        pytest=version_of("pytest") or "",
        platform=platform.platform(),
        packages={name: version for name in PACKAGES if (version := version_of(name))},
        machine=machine,
        timer=run.timer["target"] if run.timer else "",
        git=git_state(settings.root),
        environment=environment(os.environ),
        peaks=stored_peaks(settings, [run.machine.product]),
        complete=False,
        invalid=[],
    )


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that match `VARIABLES`, without those that may contain secrets."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if VARIABLES.fullmatch(name) and not SECRET.search(name) and not LOGIN.search(value)
    }


def stored_peaks(settings: Settings, products: Collection[str]) -> dict[str, StoredPeaks]:
    """Return the stored peaks, keyed by product. Products without stored peaks are left out."""
    stored = {}
    for product in sorted(set(products)):
        path = peaks_module.path_of(settings.baselines, product)
        try:
            peaks = peaks_module.stored(path)
        except (peaks_module.PeaksError, OSError):
            continue  # the cases that need these peaks report this error
        if peaks is not None:
            origin = path_below(str(path), str(settings.root))
            stored[product] = StoredPeaks(dict(peaks.rates), dict(peaks.facts), origin)
    return stored


def git_state(root: Path) -> GitState | None:
    """Return the commit, the branch, and whether tracked files changed, or None if not in git."""
    commit = git.try_git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    branch = git.try_git(root, "symbolic-ref", "--short", "HEAD")
    changes = git.try_git(root, "status", "--porcelain", "--untracked-files=no")
    return GitState(
        commit.strip(),
        None if branch is None else branch.strip(),
        None if changes is None else bool(changes.strip()),
    )
