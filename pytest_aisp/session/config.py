"""Read the command line and the ini file into `Settings`. Contradictory options are an error."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from .options import (
    ARTIFACTS,
    EVERY_ARCH,
    IN_PROCESS,
    PROFILERS,
    RECORD_PROCESSES,
    SANITIZERS,
    TIMESTAMPED,
    UPDATES,
    Settings,
)


def read_settings(config: pytest.Config) -> Settings:
    """Return the settings of this session.

    Raises:
        pytest.UsageError: if a value or a combination of options is not allowed.
    """
    get = config.getoption
    blocks, window = _iterations(config)
    artifacts, timestamped = _artifact_folders(config)
    update = get("aisp_update_expectations")
    _one_of(UPDATE, update, UPDATES)
    multiplier = _number(config, "aisp_timeout_multiplier", above=0) or 1.0
    warmup = _number(config, "aisp_warmup", least=1)
    settings = Settings(
        ours=_is_ours(config),
        root=config.rootpath,
        pages=tuple(config.getini("aisp_pages")),
        baselines=config.rootpath / config.getini("aisp_baselines"),
        check=get("aisp_check") or get("aisp_sanitize") is not None,
        compile=_archs(get("aisp_compile")),
        aa=get("aisp_aa"),
        against=get("aisp_against"),
        against_python=get("aisp_against_python"),
        replay=Path(get("aisp_replay")) if get("aisp_replay") else None,
        update=update,
        artifacts=artifacts,
        timestamped=timestamped,
        warmup=None if warmup is None else int(warmup),
        blocks=blocks,
        window=window,
        processes=get("aisp_processes") or (RECORD_PROCESSES if update else 1),
        reproducible=get("aisp_reproducible"),
        seed=get("aisp_seed"),
        cold_start=get("aisp_cold_start"),
        in_process=next((option for option, name in IN_PROCESS.items() if get(name)), ""),
        untrusted=get("aisp_untrusted"),
        sanitize=_sanitizer(get("aisp_sanitize")),
        audit=get("aisp_audit") or update is not None,
        energy=get("aisp_energy") or update is not None,
        profile=_profiler(get("aisp_profile")),
        timeout=(_number(config, "aisp_timeout", above=0) or 120.0) * multiplier,
        timeout_multiplier=multiplier,
        suite_timeout=_number(config, "aisp_suite_timeout", above=0),
        confirm_budget=_number(config, "aisp_confirm_budget", least=0) or 0.0,
        wait=_number(config, "aisp_wait", least=0) or 0.0,
        missing=_pass_or_fail(config, "aisp_missing"),
        inconclusive=_pass_or_fail(config, "aisp_inconclusive"),
        strict_environment=config.getini("aisp_strict_env"),
    )
    _refuse_combinations(settings, config)
    return settings


def _is_ours(config: pytest.Config) -> bool:
    """Return whether this session may collect pages."""
    options = vars(config.option).items()
    if any(name.startswith("aisp_") and value not in (None, False) for name, value in options):
        return True
    if any(text.startswith("aisp_") for text in config.getoption("override_ini") or ()):
        return True
    pages = [Path(p).resolve() for p in config.getini("aisp_pages")]
    folder = config.invocation_params.dir
    collected = [(folder / str(arg).split("::")[0]).resolve() for arg in config.args]
    return any(c.is_relative_to(p) or p.is_relative_to(c) for c in collected for p in pages)


def _number(
    config: pytest.Config, key: str, *, least: float = 0.0, above: float | None = None
) -> float | None:
    """Return the number in the ini key `key`, or None if the key is empty."""
    text = str(config.getini(key)).strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (least <= number < math.inf) or (above is not None and number <= above):
        limit = f"at least {least:g}" if above is None else f"above {above:g}"
        raise pytest.UsageError(f"{key} = {text}: give a number {limit}, as in {key} = 120")
    return number


def _iterations(config: pytest.Config) -> tuple[int | None, float | None]:
    """Return the two numbers in ``aisp_iterations``: blocks, and minimum seconds per window."""
    text = str(config.getini("aisp_iterations")).strip()
    if not text:
        return None, None
    blocks, cross, window = text.partition("x")
    try:
        count, seconds = int(blocks), float(window) * 1e-6 if cross else None
    except ValueError:
        count, seconds = 0, None
    if count < 1 or (seconds is not None and not 0 < seconds < math.inf):
        raise pytest.UsageError(
            f"aisp_iterations = {text}: give blocks, or blocks and microseconds, as in 20x400"
        )
    return count, seconds


def _pass_or_fail(config: pytest.Config, key: str) -> str:
    word = str(config.getini(key))
    if word not in ("pass", "fail"):
        raise pytest.UsageError(f"{key} = {word}: it must be pass or fail")
    return word


def _one_of(option: str, value: str | None, legal: Sequence[str]) -> None:
    if value is not None and value not in legal:
        raise pytest.UsageError(
            f"{option}={value}: choose one of {', '.join(legal)}\n    pytest {option}={legal[0]}"
        )


def _archs(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    from ..page.gpu_specs import GPU_ARCHS

    if text == EVERY_ARCH:
        return GPU_ARCHS
    words = tuple(dict.fromkeys(text.split(",")))
    for word in words:
        if word not in GPU_ARCHS:
            legal = ", ".join(GPU_ARCHS)
            raise pytest.UsageError(
                f"--aisp-compile={text}: unknown arch {word!r}; legal: {legal}, or {EVERY_ARCH}\n"
                f"    pytest --aisp-compile={','.join(GPU_ARCHS[:2])}"
            )
    return words


def _artifact_folders(config: pytest.Config) -> tuple[Path | None, Path | None]:
    """Return (folder for artifacts, parent of a timestamped folder). At least one is None.

    If the parent comes from the ini key, it is used only in runs that measure.
    """
    option, ini = config.getoption("aisp_artifacts"), str(config.getini("aisp_artifacts") or "")
    if option == "":
        raise pytest.UsageError(
            "--aisp-artifacts=: give a folder, or nothing for a timestamped one\n"
            "    pytest --aisp-artifacts"
        )
    if _runs_nothing(config):
        return None, None
    if option not in (None, TIMESTAMPED):
        return Path(option), None
    other_modes = ("aisp_check", "aisp_compile", "aisp_replay", "aisp_sanitize")
    measures = not any(config.getoption(name) for name in other_modes)
    if option == TIMESTAMPED or (ini and measures):
        return None, config.rootpath / (ini or ARTIFACTS)
    return None, None


def _runs_nothing(config: pytest.Config) -> bool:
    """Return whether pytest only lists something, as with ``--collect-only`` or ``--help``."""
    names = (
        "collectonly help version markers showfixtures show_fixtures_per_test cacheshow setupplan"
    )
    return any(config.getoption(name, None) for name in names.split())


def _sanitizer(tool: str | None) -> str:
    _one_of("--aisp-sanitize", tool, SANITIZERS)
    if tool is None:
        return ""
    from ..worker import nvidia_tools

    if nvidia_tools.sanitizer_installed() is None:
        raise pytest.UsageError(f"--aisp-sanitize: {nvidia_tools.MISSING_SANITIZER}")
    return tool


def _profiler(tool: str | None) -> str:
    _one_of("--aisp-profile", tool, PROFILERS)
    if tool is None or tool == "torch":
        return tool or ""
    from ..worker import nvidia_tools

    if nvidia_tools.profiler_installed(tool) is None:
        raise pytest.UsageError(f"--aisp-profile={tool}: {nvidia_tools.missing_profiler(tool)}")
    return tool


COMPILE, REPLAY, UPDATE = "--aisp-compile", "--aisp-replay", "--aisp-update-expectations"
MODES = ("--aisp-sanitize", "--aisp-check", "--aisp-aa", COMPILE, REPLAY, UPDATE)
"""The options that choose what a run does. At most one of them may be given."""
IN_THIS_PROCESS, XDIST = "in-process", "xdist"
PYTHON = "--aisp-against-python"
CONFLICTS = [
    (UPDATE, IN_THIS_PROCESS, "stored results must come from separate processes"),
    (UPDATE, XDIST, "results are recorded on a quiet machine"),
    ("--aisp-profile", COMPILE, "it runs nothing, so there is nothing to profile"),
    ("--aisp-profile", REPLAY, "it runs nothing, so there is nothing to profile"),
    ("--aisp-profile", "--aisp-aa", "both sides would be the same"),
    ("--aisp-profile", "--aisp-sanitize", "only one tool can watch a kernel"),
    ("--aisp-against", COMPILE, "it runs nothing, so there is nothing to compare"),
    ("--aisp-against", REPLAY, "it runs nothing, so there is nothing to compare"),
    ("--aisp-against", "--aisp-aa", "both sides would be the same"),
    (PYTHON, "--aisp-against", "compare one thing at a time, the code or the environment"),
    *((PYTHON, mode, "the comparison needs a run that measures") for mode in MODES),
    (PYTHON, IN_THIS_PROCESS, "each environment needs a process"),
    ("--aisp-untrusted", COMPILE, "it runs nothing"),
    ("--aisp-untrusted", REPLAY, "it runs nothing"),
    ("--aisp-untrusted", IN_THIS_PROCESS, "untrusted sides need separate processes"),
    ("--aisp-audit", COMPILE, "it runs nothing, so there is nothing to list"),
    ("--aisp-sanitize", IN_THIS_PROCESS, "the sanitizer needs a separate process"),
    ("--aisp-seed", COMPILE, "it draws no values"),
    ("--aisp-seed", REPLAY, "it draws no values"),
    ("--aisp-seed", UPDATE, "a stored result is checked on secret values"),
]
"""Options that cannot be combined with certain other options, and the reason."""
ADVICE = {
    "--aisp-profile": "\nProfile in a separate run:\n    pytest --aisp-check --aisp-profile",
    UPDATE: "\nRecord alone:\n    pytest -n0 --aisp-update-expectations",
}


def _refuse_combinations(settings: Settings, config: pytest.Config) -> None:
    """Raise `pytest.UsageError` if options contradict each other or would overwrite results."""

    def given(option: str) -> object:
        if option == IN_THIS_PROCESS:
            return settings.in_process
        if option == XDIST:
            return config.getoption("numprocesses", 0) or config.getoption("tx", None)
        return config.getoption(option)

    for option, other, reason in CONFLICTS:
        if given(option) and given(other):
            name = settings.in_process if other == IN_THIS_PROCESS else other
            raise pytest.UsageError(
                f"{option} cannot be combined with {name}: {reason}{ADVICE.get(option, '')}"
            )
    same_mode = {"--aisp-check"} if settings.sanitize else set()
    modes = [option for option in MODES if given(option) and option not in same_mode]
    if len(modes) > 1:
        raise pytest.UsageError(f"{modes[0]} cannot be combined with {modes[1]}: choose one mode")
    if settings.update is not None and os.environ.get("CI"):
        raise pytest.UsageError(
            "--aisp-update-expectations is refused if CI is set: a gate must not change its own"
            " limits.\nRecord on the machine by hand and commit the file"
        )
    if settings.replay and settings.artifacts:
        recording, folder = settings.replay.resolve(), settings.artifacts.resolve()
        if folder in (recording, recording.parent):
            raise pytest.UsageError(
                f"--aisp-artifacts={settings.artifacts} would overwrite what --aisp-replay reads\n"
                "Give another folder"
            )
    if settings.ours:
        _refuse_reruns(config)


def _refuse_reruns(config: pytest.Config) -> None:
    """Raise `pytest.UsageError` for options of other plugins that run or report a case twice."""
    options = {
        "--force-reruns": config.getoption("force_reruns", None),
        "--reruns-mode=append": config.getoption("reruns_mode", None) == "append",
    }
    for option, given in options.items():
        if given:
            raise pytest.UsageError(
                f"{option} reruns cases too, and a rerun would turn a red verdict green\n"
                "Use --reruns, which does not rerun cases"
            )
    if config.getoption("dist", "no") == "each":
        raise pytest.UsageError("--dist each reports every case twice; use --dist load")
