"""Rows: the records of single cases, with their samples and the texts made from them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Annotated, TypedDict

import msgspec
from msgspec import Meta, Struct, field

from .messages import Json
from .task_results import Amounts, ProfileResult

LETTERS = {
    "pass": (".", "PASSED"),
    "new": ("n", "NEW"),
    "improved": ("+", "IMPROVED"),
    "disturbed": ("~", "DISTURBED"),
    "stale": ("o", "STALE"),
    "inconclusive": ("?", "INCONCLUSIVE"),
    "checked": ("c", "CHECKED"),
    "compiled": ("k", "COMPILED"),
    "fail": ("F", "FAILED"),
    "regressed": ("r", "REGRESSED"),
    "wrong": ("W", "WRONG"),
    "invalid": ("!", "INVALID"),
}
"""Letter and word of each verdict in pytest's own summary."""


IN_BOTH = "@environments"
"""The suffix of a side's role in `Row.against` if the side was timed in two environments."""


class Profile(ProfileResult, omit_defaults=True):
    """The files that the profiler `tool` wrote below `folder`, or nothing without a profile."""

    tool: str = ""
    folder: str = ""

    def __bool__(self) -> bool:
        return bool(self.tool)


class Recording(Struct, omit_defaults=True, kw_only=True):
    """The fields of `models.Result` that ``--aisp-update-expectations`` stores for a case.

    Attributes:
        text_sources: today's digests of text, if the stored result has such digests.
        replace: True to replace an existing stored result.
    """

    baseline_us: float | None = None
    optimized_us: float | None = None
    share: float | None = None
    limit: str | None = None
    clock: str | None = None
    values: list[list[float]] = []
    sources: dict[str, str] = {}
    files: dict[str, str] = {}
    machine_code: dict[str, str] = {}
    choices: Mapping[str, object] = {}
    goals: dict[str, Amounts] = {}
    text_sources: dict[str, str] = {}
    replace: bool = False

    def __bool__(self) -> bool:
        return bool(self.sources)


class CaseRecord(Struct):
    """The facts about a finished case, without samples.

    Attributes:
        file, key: the file of the case's stored result, and its key in that file.
        page, function, variant, size, bound: the page and the test function, the case's parameters,
            and the resource that limits its speed.
        gpus: number of ranks that the sides run on.
        sweep: the key of `size` over which the page is a curve, or empty.
        baseline: name of the slow side.
        product, arch: the machine.
        need: the reason why the case could not be timed here, or empty.
        verdict: the verdict, or empty before there is one.
        cause: the cause of a red, stale or inconclusive verdict (see `verdict.Cause`), or empty.
        missed_limit: True if every failure is a missed claim or a missed limit of a metric.
        value, low, high: ln(speedup) with its 99 % interval, or None if nothing was timed.
        clock: the clock whose times the verdict uses.
        seconds: seconds per call by side, with the baseline first.
        predicted: seconds per call that each side's cost predicts at the machine's rates.
        unexplained: the sides whose time differs from the predicted time by more than a quarter,
            unless the page's section `Seen` names them.
        errors: the largest rms error of each side's timed outputs, as a share of the rms of the
            expected values. Sides that must be exact are left out.
        precisions: the precision that the page declares for each side.
        share, limit: the share of the machine's limit that the optimized side reaches, and the
            limit's name.
        claim, stored: the page's claim and the stored value, with which the speedup was compared.
        versus: ``library`` if the baseline is a library, else empty.
        origins: the places where ``claim``, ``stored`` and ``limit`` are written.
        work: the minimum bytes and operations of a call.
        sources: hashes of both sides' sources.
        unchanged: roles of changed sides that launch the same machine code as the old version, and
            so were not timed against the old version.
        machine_code: digests of the machine code that each side launches, by role, if the run
            recorded or compared the code.
        spread, session: spread of one process's ln(speedup), and spread from session to session.
        detectable: the smallest loss of ln(speedup) that is detected in 99 % of trials.
        votes: ln(speedup) of every fresh process that voted.
        trials: ln(speedup) and verdict of each repeated A/A trial.
        suspect: 1 for a case that was suspected to be slower than before, -1 for faster, else 0.
        reasons: a message for each missed limit, with the size of the miss and the place where
            the limit is written.
        notes, remarks: further facts. Notes are shown only with ``-vv``, remarks always.
        launch_bound: each launch-bound side's time without a graph, as a multiple of the time with
            a graph.
        goals: the amounts per call of ``baseline`` and ``optimized``, by metric.
        limits: the page's limits by metric.
        held: the optimized side's amount in the stored result, by metric.
        environment: versions and facts that the result depends on.
        wall: seconds that the whole case took.
    """

    nodeid: str
    file: str
    key: str
    page: str
    function: str
    variant: str
    size: dict[str, object]
    bound: str
    gpus: int = 1
    sweep: str = ""
    baseline: str = ""
    product: str = ""
    arch: str = ""
    need: str = ""
    verdict: str = ""
    cause: str = ""
    missed_limit: bool = False
    value: float | None = None
    low: float | None = None
    high: float | None = None
    clock: str = ""
    seconds: dict[str, float] = {}
    predicted: dict[str, float] = {}
    unexplained: list[str] = []
    errors: dict[str, float] = {}
    precisions: dict[str, str] = {}
    share: float | None = None
    limit: str = ""
    claim: int | float | str | None = None
    versus: str = ""
    stored: float | None = None
    origins: dict[str, str] = {}
    work: dict[str, int | float | Amounts] = {}
    sources: dict[str, str] = {}
    unchanged: list[str] = []
    machine_code: dict[str, str] = {}
    spread: float | None = None
    session: float | None = None
    detectable: float | None = None
    votes: list[float] = []
    trials: list[tuple[float, str]] = []
    suspect: int = 0
    reasons: list[str] = []
    notes: list[str] = []
    remarks: list[str] = []
    launch_bound: dict[str, float] = {}
    goals: dict[str, Amounts] = {}
    limits: Amounts = {}
    held: Amounts = {}
    profile: Profile = field(default_factory=Profile)
    recorded: Recording = field(default_factory=Recording)
    environment: dict[str, object] = {}
    wall: float = 0.0

    def to_json(self) -> dict[str, Json]:
        """Return the row in plain types. Raise TypeError for a value of another type."""
        plain: dict[str, Json] = msgspec.to_builtins(self)
        return plain

    @property
    def speedup(self) -> float | None:
        """Return the speedup of the optimized side as a factor."""
        return None if self.value is None else math.exp(self.value)

    def headline(self) -> str:
        """Return ``3.53x [3.51, 3.55] 92 % copy``, or `need` for an untimed case."""
        if self.value is None or self.low is None or self.high is None:
            return self.need
        text = f"{ratio(self.value)} [{bare(self.low)}, {bare(self.high)}]"
        text += f" {self.share:.0%} {self.limit}" if self.share is not None else ""
        return f"{text} simulated" if self.timer else text

    @property
    def timer(self) -> str:
        """Return the timer that a conftest provided instead of the plugin's own, or nothing."""
        return str(self.environment.get("timer") or "")

    def properties(self) -> list[tuple[str, float | str]]:
        """Return (name, value) pairs for JUnit: speedups as ratios, losses as shares, seconds.

        A claim is a speedup or a word such as ``neutral``. A metric has a value for each side.
        """
        found: dict[str, float | str | None] = {"verdict": self.verdict, "clock": self.clock}
        found["cause"] = self.cause
        found |= {"bound": self.bound, "product": self.product, "timer": self.timer}
        found |= {"share": self.share, "limit": self.limit}
        found |= {"speedup": self.speedup, "claim": self.claim}
        logs = {"speedup_low": self.low, "speedup_high": self.high, "stored": self.stored}
        found |= {name: math.exp(value) for name, value in logs.items() if value is not None}
        if self.detectable is not None:
            found["detectable_loss"] = 1 - math.exp(-self.detectable)
        sides = zip(("baseline", "optimized"), self.pair_seconds(), strict=False)
        found |= {f"seconds_{side}": seconds for side, seconds in sides}
        for goal, both in self.goals.items():
            found |= {f"{goal}_{side}": both[side] for side in ("baseline", "optimized")}
        return [(f"aisp_{name}", value) for name, value in found.items() if value not in (None, "")]

    def pair_seconds(self) -> tuple[float, ...]:
        """Return the seconds per call of baseline and variant, or nothing if there are none."""
        return tuple(self.seconds.values())


class SampleFile(Struct):
    """A case's samples: their path below the artifacts' folder, and the SHA-256 of the file."""

    path: Annotated[str, Meta(description="A path relative to the artifacts' folder.")]
    sha256: Annotated[
        str, Meta(description="Of the file.", extra_json_schema={"pattern": "^[0-9a-f]{64}$"})
    ]


class Samples(TypedDict):
    """The contents of a file of samples. `Row` explains each field."""

    checks: list[dict[str, Json]]
    timings: list[dict[str, Json]]
    against: list[dict[str, Json]]


class JournalLine(CaseRecord, kw_only=True):
    """A line of the journal: a case's record, and a reference to the file of its samples.

    Attributes:
        samples: the file of samples, or None if the file could not be written.
    """

    schema: int
    samples: SampleFile | None

    def with_samples(self, samples: Samples) -> Row:
        """Return the case's row with its samples."""
        return Row.of({**self.to_json(), **samples})


class Row(CaseRecord):
    """A case's record with the full replies of the processes that checked and timed it.

    Attributes:
        checks, timings: the replies, in the order in which they arrived.
        against: replies of processes that timed a changed side against its version at a commit, or
            a side in two environments (`IN_BOTH` is added to the role).
    """

    checks: list[dict[str, Json]] = []
    timings: list[dict[str, Json]] = []
    against: list[dict[str, Json]] = []

    @classmethod
    def of(cls, plain: Mapping[str, Json]) -> Row:
        """Return the row from `plain`, the result of `to_json`."""
        return msgspec.convert(plain, cls)

    def journal_line(self, schema: int, samples: SampleFile | None) -> JournalLine:
        """Return the case's line in the journal, without its samples."""
        record = {name: getattr(self, name) for name in CaseRecord.__struct_fields__}
        return JournalLine(**record, schema=schema, samples=samples)


def ratio(value: float) -> str:
    """Return ``3.53x`` for ln(3.53)."""
    return f"{bare(value)}x"


def bare(value: float) -> str:
    """Return ``3.530`` for ln(3.53)."""
    return digits(math.exp(value))


def digits(speedup: float) -> str:
    """Return a speedup with a suitable number of digits, such as ``3.530`` or ``12.0``."""
    return f"{speedup:.3f}" if speedup < 9.9995 else f"{speedup:.1f}"


def claim_text(claim: float | str | None, versus: str) -> str:
    """Return the text of a claim, such as ``1.5``, ``neutral``, or ``0.8 of library``."""
    if claim is None:
        return "-"
    return f"{claim} of {versus}" if versus and not isinstance(claim, str) else str(claim)


def size_text(gpus: int, size: Mapping[str, object]) -> str:
    """Return the number of GPUs if there are several, and the size, such as ``2 GPUs, n=4096``."""
    ranks = [f"{gpus} GPUs"] if gpus > 1 else []
    return ", ".join([*ranks, *(f"{name}={value}" for name, value in size.items())])


def rerun_command(case: str, options: Mapping[str, Json], seed: int = 0) -> str:
    """Return the command that runs `case` again. A `seed` of 0 is left out.

    Args:
        options: the settings of the run, as `Manifest.options` has them.
    """
    archs = options.get("compile") or ()
    archs = archs if isinstance(archs, (list, tuple)) else ()
    only_checks = options.get("check") and not options.get("sanitize")
    values = {
        "--aisp-check": "" if only_checks else None,
        "--aisp-sanitize": options.get("sanitize") or None,
        "--aisp-aa": "" if options.get("aa") else None,
        "--aisp-compile": ",".join(map(str, archs)) or None,
        "--aisp-against": options.get("against"),
        "--aisp-against-python": options.get("against_python"),
        "--aisp-untrusted": "" if options.get("untrusted") else None,
        "--aisp-reproducible": "" if options.get("reproducible") else None,
        "--aisp-seed": seed if seed and not archs else None,
    }
    given = [f"{k}={shlex.quote(str(v))}" if v else k for k, v in values.items() if v is not None]
    return " ".join(["pytest", shlex.quote(case), *given])


def duration(seconds: float) -> str:
    """Return a time with four digits and a suitable unit, such as ``128.2 us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


def amount(count: float) -> str:
    """Return a number of bytes with a suitable unit, such as ``1.2 GiB``."""
    if count < 1024:
        return f"{count:.0f} B"
    power = 3 if count >= 1 << 30 else 2 if count >= 1 << 20 else 1
    scaled = count / 1024**power
    return f"{scaled:.{0 if scaled >= 100 else 1}f} {('KiB', 'MiB', 'GiB')[power - 1]}"
