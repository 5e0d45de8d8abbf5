"""The command line and the ini file, read once into `Settings`."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from .options import (
    ARTIFACTS,
    EVERY_ARCH,
    IN_PROCESS,
    PROFILERS,
    RECORDED,
    SANITIZERS,
    SEEDS,
    STAMPED,
    Settings,
)


def read_settings(config: pytest.Config) -> Settings:
    """Return the settings of this session.

    Raises:
        pytest.UsageError: for an illegal value or combination.
    """
    get = config.getoption
    blocks, window = _iterations(get("aisp_iterations"))
    settings = Settings(
        ours=_is_ours(config),
        root=config.rootpath,
        pages=tuple(config.getini("aisp_pages")),
        baselines=config.rootpath / config.getini("aisp_baselines"),
        check=get("aisp_check") or get("aisp_sanitize") is not None,
        compile=_archs(get("aisp_compile")),
        aa=get("aisp_aa"),
        against=get("aisp_against"),
        replay=Path(get("aisp_replay")) if get("aisp_replay") else None,
        update=get("aisp_update_expectations"),
        artifacts=_folder(config),
        stamped=_stamped(config),
        warmup=_positive("--aisp-warmup", get("aisp_warmup")),
        blocks=blocks,
        window=window,
        processes=_positive("--aisp-processes", get("aisp_processes"))
        or (RECORDED if get("aisp_update_expectations") else 1),
        reproducible=get("aisp_reproducible"),
        seed=_seed(get("aisp_seed")),
        cold_start=get("aisp_cold_start"),
        in_process=next((option for option, name in IN_PROCESS.items() if get(name)), ""),
        untrusted=get("aisp_untrusted"),
        sanitize=_sanitizer(get("aisp_sanitize")),
        audit=get("aisp_audit") or get("aisp_update_expectations") is not None,
        energy=get("aisp_energy") or get("aisp_update_expectations") is not None,
        profile=_profiler(get("aisp_profile")),
        timeout=_timeout(config),
        suite_timeout=_seconds("--aisp-suite-timeout", get("aisp_suite_timeout"), above=0),
        confirm_budget=_seconds("--aisp-confirm-budget", get("aisp_confirm_budget")) or 0.0,
        missing=_word(config, "aisp_missing"),
        inconclusive=_word(config, "aisp_inconclusive"),
        strict_env=get("aisp_strict_env"),
    )
    refuse(settings, config)
    return settings


def _is_ours(config: pytest.Config) -> bool:
    given = vars(config.option)
    defaults = {"aisp_timeout_multiplier": 1.0, "aisp_confirm_budget": 600.0}
    if any(v not in (None, False, defaults.get(k)) for k, v in given.items() if k[:5] == "aisp_"):
        return True
    pages = [Path(p).resolve() for p in config.getini("aisp_pages")]
    collected = [_resolved(config, arg) for arg in config.args]
    return any(c.is_relative_to(p) or p.is_relative_to(c) for c in collected for p in pages)


def _resolved(config: pytest.Config, arg: str) -> Path:
    return (config.invocation_params.dir / str(arg).split("::")[0]).resolve()


def _iterations(text: str | None) -> tuple[int | None, float | None]:
    if text is None:
        return None, None
    blocks, cross, window = text.partition("x")
    try:
        count, seconds = int(blocks), float(window) * 1e-6 if cross else None
    except ValueError:
        count, seconds = 0, None
    if count < 1 or (seconds is not None and not 0 < seconds < math.inf):
        raise pytest.UsageError(
            f"--aisp-iterations={text}: give blocks, or blocks and microseconds, as in 20x400"
        )
    return count, seconds


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


def _folder(config: pytest.Config) -> Path | None:
    text: str | None = config.getoption("aisp_artifacts")
    if text == "":
        raise pytest.UsageError(
            "--aisp-artifacts=: give a folder, or nothing for one named after the moment\n"
            "    pytest --aisp-artifacts"
        )
    if text is None or text == STAMPED or _shows_only(config):
        return None
    return Path(text)


def _stamped(config: pytest.Config) -> Path | None:
    """Return where a folder named after the moment is made; by the ini file for what measures."""
    get, ini = config.getoption, str(config.getini("aisp_artifacts") or "")
    if _shows_only(config) or get("aisp_artifacts") not in (None, STAMPED):
        return None
    other = ("aisp_check", "aisp_compile", "aisp_replay", "aisp_sanitize")
    measures = not any(get(name) for name in other)
    if get("aisp_artifacts") == STAMPED or (ini and measures):
        return config.rootpath / (ini or ARTIFACTS)
    return None


def _shows_only(config: pytest.Config) -> bool:
    """Whether pytest runs nothing: its ``--collect-only``, ``--help`` and their like."""
    names = (
        "collectonly help version markers showfixtures show_fixtures_per_test cacheshow setupplan"
    )
    return any(config.getoption(name, None) for name in names.split())


def _sanitizer(tool: str | None) -> str:
    if tool is None:
        return ""
    if tool not in SANITIZERS:
        raise pytest.UsageError(f"--aisp-sanitize={tool}: legal are {', '.join(SANITIZERS)}")
    from ..worker import nvidia_tools

    if nvidia_tools.sanitizer_installed() is None:
        raise pytest.UsageError(f"--aisp-sanitize: {nvidia_tools.ABSENT}")
    return tool


def _profiler(tool: str | None) -> str:
    if tool is None or tool == PROFILERS[0]:
        return tool or ""
    if tool not in PROFILERS:
        raise pytest.UsageError(
            f"--aisp-profile={tool}: legal are {', '.join(PROFILERS)}\n    pytest --aisp-profile"
        )
    from ..worker import nvidia_tools

    if nvidia_tools.profiler_installed(tool) is None:
        raise pytest.UsageError(f"--aisp-profile={tool}: {nvidia_tools.absent_profiler(tool)}")
    return tool


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise pytest.UsageError(f"{name}={value} must be at least 1")
    return value


def _seed(value: int | None) -> int | None:
    if value is not None and not 0 < value < SEEDS:
        raise pytest.UsageError(f"--aisp-seed={value} must be between 1 and {SEEDS - 1}")
    return value


def _seconds(name: str, value: float | None, above: float | None = None) -> float | None:
    if value is not None and not (0 <= value < math.inf and value != above):
        least = "above 0" if above is not None else "0 or more"
        raise pytest.UsageError(f"{name}={value:g} must be {least} and finite")
    return value


def _timeout(config: pytest.Config) -> float:
    text = config.getini("aisp_timeout")
    multiplier: float = config.getoption("aisp_timeout_multiplier")
    if not 0 < multiplier < math.inf:
        raise pytest.UsageError(f"--aisp-timeout-multiplier={multiplier} must be above 0")
    try:
        seconds = float(text) * multiplier
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise pytest.UsageError(f"aisp_timeout = {text}: give seconds, as in 120")
    return seconds


def _word(config: pytest.Config, key: str) -> str:
    word = str(config.getini(key))
    if word not in ("pass", "fail"):
        raise pytest.UsageError(f"{key} = {word}: legal are pass and fail")
    return word


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
