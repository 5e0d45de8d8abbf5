"""The controller's memory: every row, written as it arrives, stored where asked."""

from __future__ import annotations

import datetime
import functools
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common import git
from ..results import store
from ..results.artifacts import REPORT, Artifacts
from ..results.goals import GOALS
from ..results.merging import why_kept
from ..results.row import ratio
from ..results.stored import Result
from ..results.stored_text import StoreError
from ..results.verdict import environment_moved
from .canary import Canary
from .manifest import stored_peaks
from .settings import Settings

BROKEN_OFF = (2, 3, 4)
"""Exit codes of pytest where a run was interrupted, by hand or by an error of its own or in use."""
NO_CASES = 5
"""Exit code of pytest where nothing was collected, or nothing was left of it."""


class Recorder:
    """Gather rows on the controller; nothing else writes stored results or rows."""

    def __init__(self, settings: Settings, hook: Any, config: Any) -> None:
        self.settings, self._hook, self._config = settings, hook, config
        self.rows: list[dict[str, Any]] = []
        self.changes: list[str] = []
        self.kept: list[str] = []
        self._refused: dict[str, list[str]] = {}
        self.canaries: list[dict[str, Any]] = []
        self.crashes: list[str] = []
        self.unguarded: list[tuple[str, list[str]]] = []  # workers without a canary, their cases
        self.left = ""
        self.artifacts = None if settings.artifacts is None else Artifacts(settings.artifacts)

    def finish(self, exit_code: int) -> None:
        """Write to the artifacts how the run ended; over an earlier run's, where a case did."""
        if self.artifacts is None:
            return
        if not self.artifacts.begun and exit_code in (*BROKEN_OFF, NO_CASES):
            self.left = f"{self.settings.artifacts} is as an earlier run left it: no case finished"
            return
        facts: dict[str, Any] = {"exit_code": int(exit_code), "invalid": self.why_invalid()}
        facts |= {"complete": exit_code not in BROKEN_OFF}
        facts |= {"not_written": self.errors, "no_verdict": list(self.crashes)}
        unguarded = [f"worker {worker!r}: {', '.join(keys)}" for worker, keys in self.unguarded]
        facts |= {"no_canary": unguarded}
        facts |= {"verdicts": dict(Counter(row["verdict"] for row in self.rows))}
        peaks = stored_peaks(self.settings, {row["product"] for row in self.rows})
        self.artifacts.finish(facts, peaks, self._report)

    def _report(self, folder: Path) -> None:
        from ..report import write
        from ..report.run import Run

        write.write(Run.read(folder), folder / REPORT, pages_root=self.settings.root)

    def close(self) -> None:
        """Let other runs have the folder of artifacts."""
        if self.artifacts is not None:
            self.artifacts.release()

    def add(self, row: dict[str, Any]) -> None:
        """Take one case's row: to the artifacts, to the stored results, to the hook."""
        self.rows.append(row)
        if self.artifacts is not None:
            self.artifacts.add(row)
        if row["recorded"] and self.settings.update is not None:
            self._store(row)
        self._hook.pytest_aisp_result(config=self._config, row=row)

    def add_canary(self, found: dict[str, Any]) -> None:
        """Take what became of one process's canary."""
        self.canaries.append(found)
        if self.artifacts is not None:
            self.artifacts.add_canary(found)

    def _store(self, row: Mapping[str, Any]) -> None:
        key, facts = self._session
        environment = {**row["environment"], **facts}
        replace = bool(row["recorded"]["replace"])
        path = Path(row["file"])
        try:
            result = _as_result(row["recorded"], key)
            path.parent.mkdir(parents=True, exist_ok=True)
            changes = store.write(
                path, row["product"], {row["key"]: result}, {key: environment}, replace=replace
            )
            why = why_kept(store.load(path), row["key"], result, {key: environment})
        except (StoreError, OSError, ValueError) as error:
            self._refused.setdefault(str(error), []).append(row["key"])
            return
        for change in changes:
            before = "new" if change.old is None else _said(change.old)
            self.changes.append(f"{change.key}: {before} -> {_said(change.new)}")
        if why:
            self.kept.append(f"{row['key']}: {why}; --aisp-update-expectations=all replaces it")

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
        why = [f"canary): {Canary(**found)}" for found in self.canaries if found["wrong"]]
        if environment_moved(self.rows):
            why.append(
                "environment moved): too many cases are off in one direction to be the code's doing"
            )
        return [f"RUN INVALID ({reason}; no verdict of this run counts" for reason in why]


def _commit(root: Path) -> str | None:
    for variable in ("GITHUB_SHA", "CI_COMMIT_SHA"):  # where the checkout came without its history
        if os.environ.get(variable):
            return os.environ[variable][:12]
    return (git.told(root, "rev-parse", "--short=12", "HEAD") or "").strip() or None


def _as_result(recorded: Mapping[str, Any], environment: str) -> Result:
    """Return the stored result of a row's `recorded` values, be they times, goals or both."""
    given = {name: value for name, value in recorded.items() if name != "replace"}
    given["values"] = tuple(tuple(v) for v in recorded.get("values", ()))
    return Result(**given, environments=(environment,))


def _said(result: Result) -> str:
    """Return ``3.530x, memory 600 MiB / 240 MiB``: what there is of it."""
    parts = [] if result.value is None else [ratio(result.value)]
    parts += [f"{name} {GOALS[name].both(found)}" for name, found in result.goals.items()]
    return ", ".join(parts)
