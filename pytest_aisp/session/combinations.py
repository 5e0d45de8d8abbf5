"""Combinations of options that would lie or lose something, each refused with its reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .settings import Settings

UPDATES = ("missing", "all")


def refuse(settings: Settings, config: pytest.Config) -> None:
    """Refuse combinations that would lie or lose something."""
    if settings.update is not None:
        _refuse_update(settings, config)
    if settings.profile:
        _refuse_profile(settings)
    runs = {"--aisp-against": settings.against, "--aisp-untrusted": settings.untrusted}
    for option, wanted in {**runs, "--aisp-audit": config.getoption("aisp_audit")}.items():
        if wanted and settings.compile:
            raise pytest.UsageError(
                f"{option} cannot be combined with --aisp-compile: it runs sides"
            )
    if settings.replay and settings.artifacts and _same(settings.replay, settings.artifacts):
        raise pytest.UsageError(
            f"--aisp-artifacts={settings.artifacts} would write over what --aisp-replay reads\n"
            "Give another folder"
        )
    if settings.against is not None and (settings.replay or settings.aa):
        other = "--aisp-replay" if settings.replay else "--aisp-aa"
        raise pytest.UsageError(f"--aisp-against cannot be combined with {other}: it times sides")
    if settings.sanitize and settings.in_process:
        raise pytest.UsageError(
            f"--aisp-sanitize cannot be combined with {settings.in_process}: it needs a process"
        )
    if settings.untrusted and (settings.in_process or settings.replay):
        other = "--aisp-replay" if settings.replay else "a run inside pytest (--pdb, --trace)"
        raise pytest.UsageError(
            f"--aisp-untrusted cannot be combined with {other}: it needs processes of its own"
        )
    if settings.seed is not None:
        _refuse_seed(settings)
    check = "--aisp-sanitize" if settings.sanitize else "--aisp-check"
    modes: dict[str, object] = {check: settings.check, "--aisp-aa": settings.aa}
    modes["--aisp-compile"] = settings.compile
    modes |= {"--aisp-replay": settings.replay, "--aisp-update-expectations": settings.update}
    given = [name for name, value in modes.items() if value]
    if len(given) > 1:
        raise pytest.UsageError(f"{given[0]} cannot be combined with {given[1]}: choose one mode")
    if settings.ours:
        _refuse_reruns(config)
    if settings.ours and config.getoption("dist", "no") == "each":
        raise pytest.UsageError("--dist each reports every case twice; use --dist load")


def _same(recording: Path, folder: Path) -> bool:
    """Whether `recording`, a folder or its file, is what a run to `folder` writes over."""
    return folder.resolve() in (recording.resolve(), recording.resolve().parent)


def _refuse_seed(settings: Settings) -> None:
    """Refuse a known seed where nothing is drawn from it, or where no side may know it."""
    why = {
        "--aisp-compile": (settings.compile, "it draws no values"),
        "--aisp-replay": (settings.replay, "it draws no values"),
        "--aisp-update-expectations": (
            settings.update,
            "a record is checked on secret values",
        ),
    }
    for other, (given, reason) in why.items():
        if given:
            raise pytest.UsageError(f"--aisp-seed cannot be combined with {other}: {reason}")


def _refuse_profile(settings: Settings) -> None:
    """Refuse modes in which no two sides run, or in which something else watches them."""
    why = {
        "--aisp-compile": (settings.compile, "it runs sides"),
        "--aisp-replay": (settings.replay, "it runs sides"),
        "--aisp-aa": (settings.aa, "both sides would be the same"),
        "--aisp-sanitize": (settings.sanitize, "a kernel has one watcher"),
    }
    for other, (given, reason) in why.items():
        if given:
            raise pytest.UsageError(
                f"--aisp-profile cannot be combined with {other}: {reason}\n"
                "Profile in a run of its own:\n"
                f"    pytest --aisp-check --aisp-profile={settings.profile}"
            )


def _refuse_reruns(config: pytest.Config) -> None:
    """Refuse what makes pytest-rerunfailures overrule that cases are never rerun."""
    for option, given in (
        ("--force-reruns", config.getoption("force_reruns", None)),
        ("--reruns-mode=append", config.getoption("reruns_mode", None) == "append"),
    ):
        if given:
            raise pytest.UsageError(
                f"{option} reruns cases too, and a rerun would turn a red verdict green\n"
                "Use --reruns, which leaves cases alone"
            )


def _refuse_update(settings: Settings, config: pytest.Config) -> None:
    if settings.update not in UPDATES:
        raise pytest.UsageError(
            f"--aisp-update-expectations={settings.update}: legal are {' and '.join(UPDATES)}"
        )
    if settings.in_process:
        raise pytest.UsageError(
            f"--aisp-update-expectations cannot be combined with {settings.in_process}: what is"
            " stored comes from processes of its own"
        )
    if _workers(config):
        raise pytest.UsageError(
            "--aisp-update-expectations cannot be combined with xdist: results are recorded on a"
            " quiet machine.\nRecord without -n:\n    pytest -n0 --aisp-update-expectations"
        )
    if os.environ.get("CI"):
        raise pytest.UsageError(
            "--aisp-update-expectations is refused where CI is set: a gate must not move its own"
            " limits.\nRecord on the machine by hand and commit the file"
        )


def _workers(config: pytest.Config) -> bool:
    return bool(config.getoption("numprocesses", 0)) or bool(config.getoption("tx", None))
