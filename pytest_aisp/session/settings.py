"""What the command line and the ini file say, as one frozen `Settings`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
