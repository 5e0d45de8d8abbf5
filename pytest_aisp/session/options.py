"""Command-line options and ini keys. `config.read_settings` reads them into `Settings`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ..distributed.multi_node import Machines
    from ..util.device import Machine
    from .recorder import Recorder
    from .run_context import RunContext
    from .unused_results import CollectedCases


SETTINGS: pytest.StashKey[Settings] = pytest.StashKey()
RUN: pytest.StashKey[RunContext] = pytest.StashKey()
RECORDER: pytest.StashKey[Recorder] = pytest.StashKey()
COLLECTED: pytest.StashKey[CollectedCases] = pytest.StashKey()
MACHINE: pytest.StashKey[Machine] = pytest.StashKey()
"""The key under which a fleet run stores the machine to use instead of this one."""
MACHINES: pytest.StashKey[Machines] = pytest.StashKey()
"""The key under which pytest on a node stores the machines on which its cases have ranks."""
PRODUCTS: pytest.StashKey[Mapping[str, str]] = pytest.StashKey()
"""The key under which a fleet run stores the arch of each product, empty if unknown."""
LOCK_ERROR: pytest.StashKey[str] = pytest.StashKey()
"""The key under which a test item stores why the machine could not be locked for it."""

EVERY_ARCH = "all"
UPDATES = ("missing", "all")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
PROFILERS = ("torch", "nsys", "ncu")
TIMESTAMPED = "<timestamp>"
"""The default value of `--aisp-artifacts`, which means a folder named after the time."""
ARTIFACTS = "artifacts"
"""The parent of timestamped folders, unless the ini file sets another one."""
WITHOUT_VALUE = {
    "--aisp-update-expectations": UPDATES[0],
    "--aisp-compile": EVERY_ARCH,
    "--aisp-sanitize": SANITIZERS[0],
    "--aisp-profile": PROFILERS[0],
    "--aisp-artifacts": TIMESTAMPED,
    "--aisp-fleet": "auto",
}
"""The options whose value is optional, each with its default value."""
IN_PROCESS = {"--aisp-in-process": "aisp_in_process", "--pdb": "usepdb", "--trace": "trace"}
"""The options that make the sides run inside the pytest process."""
RECORD_PROCESSES = 8
"""The number of processes that measure a result to be stored."""
MAX_SEED = 2**31 - 1


def add_options(parser: pytest.Parser) -> None:
    """Register the options and the ini keys."""
    group = parser.getgroup("aisp", "GPU performance pairs (pytest-aisp)")

    def flag(name: str, text: str) -> None:
        group.addoption(name, action="store_true", help=text)

    def value(name: str, metavar: str, text: str, type: Callable[[str], object] = str) -> None:
        group.addoption(name, metavar=metavar, type=type, help=text)

    # No `choices`: argparse would reject a path that follows an option without a value.
    def optional_value(name: str, metavar: str, text: str) -> None:
        const = WITHOUT_VALUE[name]
        text = f"{text} (default {const}; give another as {name}={metavar})"
        group.addoption(name, metavar=metavar, nargs="?", const=const, help=text)

    flag("--aisp-check", "check results only, time nothing")
    optional_value("--aisp-compile", "ARCHS", "compile each page's kernels for these archs")
    value("--aisp-against", "REF", "judge changed sides against REF, not against the record")
    python = "--aisp-against-python"
    group.addoption(python, metavar="PYTHON", default=None, help=argparse.SUPPRESS)
    flag("--aisp-aa", "time each side against a copy of itself")
    value("--aisp-replay", "FOLDER", "judge the samples of a recorded run again")
    update = "--aisp-update-expectations"
    optional_value(update, "|".join(UPDATES), "store results for this product")
    optional_value("--aisp-artifacts", "FOLDER", "keep results and samples in FOLDER")
    processes = f"processes to record from ({RECORD_PROCESSES}), or to repeat an A/A trial in (1)"
    value("--aisp-processes", "N", processes, _whole_number(1))
    flag("--aisp-reproducible", "fixed seeds, deterministic algorithms")
    seed = "use the input values of a run that failed"
    value("--aisp-seed", "N", seed, _whole_number(1, MAX_SEED))
    group.addoption("--aisp-cold-start", action="store_true", help=argparse.SUPPRESS)
    flag("--aisp-in-process", "run sides inside pytest, for debuggers")
    group.addoption("--aisp-audit", action="store_true", help=argparse.SUPPRESS)
    flag("--aisp-energy", "measure energy if a page asks for it (30 s per case)")
    flag("--aisp-untrusted", "run sides again in a process without the clock and the answers")
    optional_value("--aisp-sanitize", "TOOL", "check under compute-sanitizer")
    optional_value("--aisp-profile", "TOOL", "profile both sides after the verdict")
    optional_value("--aisp-fleet", "ADDRESS", "run the cases on the nodes of a Ray cluster")
    products = "--aisp-fleet-products"
    group.addoption(products, metavar="PRODUCTS", default=None, help=argparse.SUPPRESS)
    span = "--aisp-fleet-span-nodes"
    group.addoption(span, action="store_true", help=argparse.SUPPRESS)
    group.addoption("--aisp-fleet-resume", action="store_true", help=argparse.SUPPRESS)

    add_ini = parser.addini
    add_ini("aisp_pages", "folders that hold pages", type="paths", default=[])
    add_ini("aisp_baselines", "folder of stored results", default="baselines")
    add_ini("aisp_artifacts", "keep every measuring run in a timestamped folder in here")
    add_ini("aisp_timeout", "seconds for one request to a worker process", default="120")
    add_ini("aisp_timeout_multiplier", "scale every time limit by this", default="1")
    add_ini("aisp_suite_timeout", "stop the run after this many seconds", default="")
    add_ini("aisp_confirm_budget", "maximum seconds that a run spends on votes", default="600")
    add_ini("aisp_wait", "maximum seconds that a case waits for a disturbed machine", default="60")
    add_ini("aisp_warmup", "minimum warm-up calls of each side", default="")
    add_ini(
        "aisp_iterations",
        "blocks to time, and the shortest window in microseconds: 20 or 20x400",
        default="",
    )
    add_ini("aisp_fleet_wait", "seconds to wait for a node of a product", default="300")
    add_ini("aisp_strict_env", "whether `stale` is red", type="bool", default=False)
    add_ini("aisp_missing", "what `new` does to the run: pass or fail", default="pass")
    add_ini("aisp_inconclusive", "what `inconclusive` does: pass or fail", default="pass")


def _whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse type: an integer from `least` to `most`."""

    def convert(text: str) -> int:
        number = int(text)
        if number < least or (most is not None and number > most):
            limits = f"at least {least}" if most is None else f"between {least} and {most}"
            raise argparse.ArgumentTypeError(f"{text} must be {limits}")
        return number

    return convert


def fill_in_values(args: list[str]) -> None:
    """Add default values to options without one, so that argparse does not take the next path."""
    for index, arg in enumerate(args):
        if arg in WITHOUT_VALUE:
            args[index] = f"{arg}={WITHOUT_VALUE[arg]}"


@dataclass(frozen=True)
class Settings:
    """The settings of a session. `add_options` describes each option and ini key.

    Attributes:
        ours: whether this session may collect pages. It needs an ``--aisp-*`` option, or a path
            below one of `pages`.
        compile: the archs to compile for.
        artifacts: the folder for the run's results and samples, or None.
        timestamped: the folder in which to make a timestamped folder for `artifacts`, or None.
        warmup, blocks, window: the timing budget, if the ini file sets it. The window is in
            seconds.
        seed: seed of the input values, or None for a secret seed.
        in_process: the option, such as ``--pdb``, that makes the sides run inside pytest, or empty.
        sanitize, profile: the sanitizer and the profiler to use, or empty.
        timeout: the time limit of one request to a worker process, in seconds. It already includes
            `timeout_multiplier`.
    """

    ours: bool
    root: Path
    pages: tuple[Path, ...]
    baselines: Path
    check: bool
    compile: tuple[str, ...]
    aa: bool
    against: str | None
    against_python: str | None
    replay: Path | None
    update: str | None
    artifacts: Path | None
    timestamped: Path | None
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
    timeout_multiplier: float
    suite_timeout: float | None
    confirm_budget: float
    wait: float
    missing: str
    inconclusive: str
    strict_environment: bool

    @property
    def mode(self) -> str:
        """The mode of the run in one word."""
        modes: dict[str, object] = {"check": self.check, "compile": self.compile, "aa": self.aa}
        modes |= {"replay": self.replay, "record": self.update}
        return next((name for name, on in modes.items() if on), "measure")

    @property
    def profiles(self) -> Path:
        """The folder for profiles. It is inside `artifacts` if that is set."""
        return self.artifacts / "profile" if self.artifacts else self.root / "aisp-profile"
