"""Every option and ini key, declared; `reading` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .context import RunContext
    from .recorder import Recorder


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


SEEDS = 2**31
"""Seeds of values lie below this."""


@dataclass(frozen=True)
class Settings:
    """What the command line and the ini file say.

    Attributes:
        ours: whether this session collects pages: an ``--aisp-*`` option, or a path under `pages`.
        pages: folders that hold pages (ini ``aisp_pages``).
        baselines: folder of stored results (ini ``aisp_baselines``).
        check, aa, replay, update, compile: the mode; none of them is to measure.
            `compile` holds the archs to assemble for.
        against: commit with whose sides changed ones are compared besides, or None.
        artifacts: folder for the run's results and samples, or None; `stamped`: in which folder one
            named after the moment is made for them (ini ``aisp_artifacts``), or None.
        warmup, blocks, window: the measuring budget, where the command line sets it.
        processes: processes a result is recorded from, or an A/A trial is repeated in.
        audit: whether the profiler looks at the kernels of both sides too.
        sanitize: the tool of compute-sanitizer under which pages are checked, or empty.
        energy: whether `assert_energy` counts: it takes half a minute a case.
        profile: the profiler that looks at both sides after their verdict, or empty.
        reproducible, cold_start, untrusted: see ``pytest --help``.
        seed: from which values are drawn, or None for a secret one.
        in_process: the option for which sides run inside pytest, or empty.
        timeout: seconds for one request to a bench process, already multiplied.
        suite_timeout, confirm_budget: seconds, for the run and for its votes.
        missing, inconclusive: ``pass`` or ``fail``: what those verdicts do to the run.
        strict_env: whether a loss against a record of another environment is red.
    """

    ours: bool
    root: Path
    pages: tuple[Path, ...]
    baselines: Path
    check: bool
    compile: tuple[str, ...]
    aa: bool
    against: str | None
    replay: Path | None
    update: str | None
    artifacts: Path | None
    stamped: Path | None
    warmup: int | None
    blocks: int | None
    window: float | None
    processes: int
    reproducible: bool
    seed: int | None
    cold_start: bool
    in_process: str
    untrusted: bool
    sanitize: str
    audit: bool
    energy: bool
    profile: str
    timeout: float
    suite_timeout: float | None
    confirm_budget: float
    missing: str
    inconclusive: str
    strict_env: bool

    @property
    def mode(self) -> str:
        """What the run does, in one word."""
        modes: dict[str, object] = {"check": self.check, "compile": self.compile, "aa": self.aa}
        modes |= {"replay": self.replay, "record": self.update}
        return next((name for name, on in modes.items() if on), "measure")

    @property
    def profiles(self) -> Path:
        """The folder of profiles: in that of artifacts, or one of their own under the root."""
        return self.artifacts / "profile" if self.artifacts else self.root / "aisp-profile"


SETTINGS: pytest.StashKey[Settings] = pytest.StashKey()
RUN: pytest.StashKey[RunContext] = pytest.StashKey()
RECORDER: pytest.StashKey[Recorder] = pytest.StashKey()
NO_LEASE: pytest.StashKey[str] = pytest.StashKey()
"""On an item: why the machine could not be leased for it."""
