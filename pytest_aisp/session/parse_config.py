"""The command line and the ini file, read once into `Settings`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from .combinations import refuse
from .options import ARTIFACTS, EVERY_ARCH, IN_PROCESS, PROFILERS, RECORDED, SANITIZERS, STAMPED
from .settings import SEEDS, Settings


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
    from ..pages.skus import GPU_ARCHS

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
    from ..bench import sanitizer

    if sanitizer.installed() is None:
        raise pytest.UsageError(f"--aisp-sanitize: {sanitizer.ABSENT}")
    return tool


def _profiler(tool: str | None) -> str:
    if tool is None or tool == PROFILERS[0]:
        return tool or ""
    if tool not in PROFILERS:
        raise pytest.UsageError(
            f"--aisp-profile={tool}: legal are {', '.join(PROFILERS)}\n    pytest --aisp-profile"
        )
    from ..bench import nsight

    if nsight.installed(tool) is None:
        raise pytest.UsageError(f"--aisp-profile={tool}: {nsight.absent(tool)}")
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
