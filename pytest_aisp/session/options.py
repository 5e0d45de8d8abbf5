"""Every option and ini key: declared, and read once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from .combinations import refuse
from .settings import SEEDS, Settings

EVERY_ARCH = "all"
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
"""Tools of compute-sanitizer: addresses, races in shared memory, reads of what was never written,
barriers."""
PROFILERS = ("torch", "nsys", "ncu")
"""torch's profiler, Nsight Systems, Nsight Compute."""
STAMPED = "<timestamp>"
"""The value of a bare `--aisp-artifacts`: a folder named after the moment."""
ARTIFACTS = "artifacts"
"""Where such folders are made, unless the ini file says otherwise."""
BARE = {
    "--aisp-update-expectations": "missing",
    "--aisp-compile": EVERY_ARCH,
    "--aisp-sanitize": SANITIZERS[0],
    "--aisp-profile": PROFILERS[0],
    "--aisp-artifacts": STAMPED,
}
"""Options with an optional value, and the value that they have without one."""
IN_PROCESS = {"--aisp-in-process": "aisp_in_process", "--pdb": "usepdb", "--trace": "trace"}
"""The options for which sides run inside pytest."""
RECORDED = 8
"""Processes that a result is recorded from."""


def add_options(parser: pytest.Parser) -> None:
    """Register the options and the ini keys."""
    group = parser.getgroup("aisp", "GPU performance pairs (pytest-aisp)")
    add = group.addoption
    add("--aisp-check", action="store_true", help="check only: prove results, time nothing")
    add(
        "--aisp-compile",
        metavar="ARCHS",
        nargs="?",
        const=EVERY_ARCH,
        help="assemble the kernels that pages launch, for sm90,sm100 (only after `=`; else all)",
    )
    add(
        "--aisp-against",
        metavar="REF",
        help="besides, judge each changed side against itself as it was at REF",
    )
    add("--aisp-aa", action="store_true", help="time each side against a copy of itself")
    add("--aisp-replay", metavar="FILE", help="judge the recorded samples in FILE again")
    add(
        "--aisp-update-expectations",
        metavar="missing|all",
        nargs="?",
        const="missing",
        help="record results for this product; `=all` also rewrites (the value only after `=`)",
    )
    add(
        "--aisp-artifacts",
        metavar="DIR",
        nargs="?",
        const=STAMPED,
        help=f"write results and samples to DIR (only after `=`; else {ARTIFACTS}/<UTC time>)",
    )
    add("--aisp-warmup", metavar="CALLS", type=int, help="least warm-up calls of each side")
    add(
        "--aisp-iterations",
        metavar="BLOCKS[xUS]",
        help="blocks to time, and optionally the least window in microseconds: 20x400",
    )
    add(
        "--aisp-processes",
        metavar="N",
        type=int,
        help="processes to record from (8), or to repeat an A/A trial in (1)",
    )
    add("--aisp-reproducible", action="store_true", help="fixed seeds, deterministic algorithms")
    add("--aisp-seed", metavar="N", type=int, help="draw the values of a run that failed again")
    add("--aisp-cold-start", action="store_true", help="fresh caches and context for each case")
    add("--aisp-in-process", action="store_true", help="run sides inside pytest, for debuggers")
    add(
        "--aisp-audit",
        action="store_true",
        help="let the profiler see which kernels each side launches, and for how long",
    )
    add("--aisp-energy", action="store_true", help="count energy where pages ask for it: 30 s each")
    add(
        "--aisp-untrusted",
        action="store_true",
        help="run the sides once more where they reach neither clock nor expected values",
    )
    add(
        "--aisp-sanitize",
        metavar="TOOL",
        nargs="?",
        const=SANITIZERS[0],
        help=f"check under compute-sanitizer: {', '.join(SANITIZERS)} (only after `=`)",
    )
    add(
        "--aisp-profile",
        metavar="TOOL",
        nargs="?",
        const=PROFILERS[0],
        help=f"profile both sides after their verdict: {', '.join(PROFILERS)} (only after `=`)",
    )
    add("--aisp-strict-env", action="store_true", help="`stale` is red")
    add("--aisp-timeout-multiplier", metavar="X", type=float, default=1.0, help="scale time limits")
    add("--aisp-suite-timeout", metavar="SECONDS", type=float, help="stop the run after SECONDS")
    add(
        "--aisp-confirm-budget",
        metavar="SECONDS",
        type=float,
        default=600.0,
        help="most seconds spent on votes in a run (600)",
    )
    parser.addini("aisp_pages", "folders that hold pages", type="paths", default=[])
    parser.addini("aisp_baselines", "folder of stored results", default="baselines")
    parser.addini("aisp_artifacts", "keep every run that measures, in a folder of its own in here")
    parser.addini("aisp_timeout", "seconds for one request to a bench process", default="120")
    parser.addini("aisp_missing", "what `new` does to the run: pass or fail", default="pass")
    parser.addini("aisp_inconclusive", "what `inconclusive` does: pass or fail", default="pass")


def keep_paths(args: list[str]) -> None:
    """Give bare options their value, so that they cannot swallow the path after them."""
    for index, arg in enumerate(args):
        if arg in BARE:
            args[index] = f"{arg}={BARE[arg]}"


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
