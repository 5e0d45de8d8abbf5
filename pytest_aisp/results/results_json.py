"""The types of `results.json`, of its manifest and of its canaries, and their JSON Schema.

Version 1 may gain fields. Existing fields keep their names and meanings. A field with a default may
be missing when a file is read.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field

from .messages import Json
from .row import SampleFile, ratio
from .task_results import Amounts
from .verdict import ORDER

SCHEMA = 1
"""The version number in `results.json`, in the manifest, and in each line of the journal."""
NEWER_FIELDS = {
    "Manifest": {"no_canary", "timer"},
    "Case": {"cause", "gpus", "predicted", "sweep", "unchanged", "unexplained"}
    | {"errors", "precisions"},
    "Claim": {"versus"},
    "Goal": {"noise", "stored", "margin", "slack"},
}
"""Fields that were added to version 1 later. A valid file may lack them."""
MODES = ["measure", "check", "compile", "aa", "replay", "record"]
UTC = Meta(description="UTC, ISO 8601.", extra_json_schema={"format": "date-time"})


def about(text: str) -> Meta:
    """Return metadata that makes `text` the description of a field in the schema."""
    return Meta(description=text)


class Workload(Struct):
    """What the run was asked to do."""

    paths: Annotated[list[str], about("Arguments that are paths or node ids.")] = []
    keyword: Annotated[str, about("-k")] = ""
    markers: Annotated[str, about("-m")] = ""
    workers: Annotated[int | None, about("xdist workers; null without xdist.")] = None


class MachineFacts(Struct, kw_only=True):
    """The machine of the run. It is described by its first visible GPU, or else by its CPU."""

    arch: Annotated[str, about("`sm90`, or `cpu`.")]
    product: Annotated[str, about("The product that stored results belong to.")]
    name: Annotated[str, about("The name that the driver reports.")]
    gpus: Annotated[list[str], about("UUIDs.")] = []
    versions: Annotated[dict[str, str], about("Driver and CUDA.")] = {}
    facts: Annotated[
        dict[str, Json], about("Power limit in watts, MIG, NUMA node, CPU; null if unknown.")
    ] = {}
    clocks: Annotated[
        dict[str, int | None],
        about("MHz of SM and memory at the start, and their maxima; empty without a GPU."),
    ] = {}


class GitState(Struct):
    """State of the repository that contains `root`."""

    commit: Annotated[str | None, about("The full hash.")] = None
    branch: Annotated[str | None, about("Null if none is checked out.")] = None
    dirty: Annotated[bool | None, about("Whether tracked files differ from the commit.")] = None


class StoredPeaks(Struct):
    """The best rates of one product."""

    rates: Annotated[
        dict[str, Annotated[float, Meta(gt=0)]],
        about("Bytes/s, FLOP/s or seconds by name, such as `copy`, `bf16`, `launch` or `busbw`."),
    ] = {}
    facts: Annotated[dict[str, Json], about("Which kernel was fastest, on what, and when.")] = {}
    origin: Annotated[str, about("The file, relative to `root` if below it.")] = field(
        name="from", default=""
    )


class Manifest(Struct, kw_only=True):
    """What ran, on which machine, and how it ended: `manifest.json`."""

    schema: Literal[1] = 1
    version: Annotated[str, about("Version of pytest-aisp.")] = ""
    started: Annotated[str, UTC]
    mode: Annotated[
        str, Meta(description="What the run was asked to do.", extra_json_schema={"enum": MODES})
    ] = "measure"
    root: Annotated[str, about("pytest's root directory. Paths of pages are relative to it.")]
    workload: Workload = field(default_factory=Workload)
    options: Annotated[
        dict[str, Json], about("Every setting, from the command line and the ini file.")
    ] = {}
    python: Annotated[str, about("Version.")] = ""
    pytest: Annotated[str, about("Version.")] = ""
    platform: Annotated[str, about("System, release and architecture.")] = ""
    packages: Annotated[
        dict[str, str], about("Versions of the installed packages that affect results.")
    ] = {}
    machine: MachineFacts
    timer: Annotated[
        str,
        about("The timer that a conftest provides instead of the plugin's own, or empty."),
    ] = ""
    git: GitState | None
    environment: Annotated[
        dict[str, str],
        about("Environment variables on a list, without names that suggest a secret."),
    ] = {}
    peaks: Annotated[
        dict[str, StoredPeaks],
        about("Peak rates of the machine by product, for rooflines; empty if not measured."),
    ]
    ended: Annotated[str | None, UTC] = None
    complete: Annotated[
        bool, about("True if the run ended normally; false if it was killed or interrupted.")
    ]
    exit_code: Annotated[int | None, about("The exit code of pytest.")] = None
    invalid: Annotated[
        list[str], about("Why no verdict of this run counts; empty for a valid run.")
    ]
    not_written: Annotated[list[str], about("What could not be written, and why.")] = []
    no_verdict: Annotated[list[str], about("Cases whose xdist worker died.")] = []
    no_canary: Annotated[list[str], about("xdist workers that ended before their canary.")] = []
    verdicts: Annotated[
        dict[str, int], about("The number of cases with each verdict; empty if killed.")
    ] = {}


class Canary(Struct):
    """The canary of one process: a side timed against itself, unchanged and slowed down."""

    case: Annotated[str, about("Id of the case whose optimized side was used.")] = ""
    clock: Annotated[str, about("By which clock.")] = ""
    same: Annotated[float | None, about("ln(speedup) of the side against its copy.")] = None
    votes: Annotated[
        list[float], about("ln(speedup) of the side against its copy in fresh processes.")
    ] = []
    planted: Annotated[float, about("Share of extra calls in the slowed copy.")] = 0.0
    seen: Annotated[
        list[float], about("ln(speedup) of each attempt to detect the extra calls.")
    ] = []
    wrong: Annotated[str, about("What misbehaved, or empty.")] = ""

    def __str__(self) -> str:
        if self.wrong:
            return f"{self.case} on the {self.clock} clock: {self.wrong}"
        return (
            f"{self.case} on the {self.clock} clock: against itself {ratio(self.same or 0.0)},"
            f" with {self.planted:.1%} planted {ratio(self.seen[-1])}"
        )


Verdict = Annotated[str, Meta(extra_json_schema={"enum": [*ORDER, ""]})]


class Speedup(Struct):
    """Times faster, with its 99 % interval."""

    value: Annotated[float, about("Baseline's time over the optimized side's.")]
    low: Annotated[float, about("Lower end.")]
    high: Annotated[float, about("Upper end.")]


class Seconds(Struct):
    """Seconds per call, medians."""

    baseline: float
    optimized: float


class Limit(Struct):
    """The machine's limit."""

    name: Annotated[str, about("As `copy`.")]
    share: Annotated[
        float, about("Share of the limit that the optimized side reaches, such as 0.92.")
    ]
    origin: Annotated[str, about("The file of peaks.")] = field(name="from")


class Claim(Struct, omit_defaults=True):
    """What the page promises."""

    at_least: Annotated[int | float | str, about("A speedup, `neutral`, or `yardstick`.")]
    origin: Annotated[str, about("Where that is written.")] = field(name="from")
    versus: Annotated[str, about("`library` if the baseline is a library.")] = ""


class StoredSpeedup(Struct):
    """The result that was stored for this product before."""

    speedup: Annotated[float, about("Times faster.")]
    origin: Annotated[str, about("The file.")] = field(name="from")


class Trial(Struct):
    """One repeated A/A trial."""

    speedup: float
    verdict: Verdict


class Goal(Struct, kw_only=True, omit_defaults=True):
    """The amount of one metric per call, and the page's limit."""

    baseline: int | float
    optimized: int | float
    noise: Annotated[
        float | msgspec.UnsetType,
        about("Relative noise of both amounts; absent if they do not vary."),
    ] = msgspec.UNSET
    limit: Annotated[
        int | float | None,
        about(
            "The page's limit: at most this share of the baseline's memory or energy, at most this"
            " number of launches, at least this goodput."
        ),
    ]
    stored: Annotated[int | float | None, about("The optimized side's stored amount.")]
    margin: Annotated[
        float, about("A change above this share plus `slack` is a loss. Noise adds to it.")
    ]
    slack: Annotated[int | float, about("An additional allowed loss, in the metric's own unit.")]


class ProfileFiles(Struct):
    """What a profiler wrote."""

    tool: Annotated[str, about("`torch`, `nsys` or `ncu`.")]
    folder: Annotated[str, about("A path relative to the artifacts' folder if possible.")]
    files: Annotated[list[str], about("Paths, likewise.")]


class Case(Struct, kw_only=True):
    """One case: a variant at a size, on one machine."""

    id: Annotated[str, about("pytest's node id, unique in a run.")]
    key: Annotated[str, about("Key of the stored result.")]
    page: Annotated[str, about("The page's path, relative to `root` if below it.")]
    chapter: Annotated[str, about("Name of the page's folder.")]
    function: Annotated[str, about("Name of the test function.")]
    baseline: Annotated[str, about("Name of the baseline; empty if nothing was timed.")]
    variant: Annotated[str, about("Name of the optimized side.")]
    size: Annotated[dict[str, Json], about("The case's size, as declared.")]
    gpus: Annotated[int, Meta(ge=1, description="Ranks that its sides run on, one per GPU.")]
    sweep: Annotated[str, about("The key of `size` over which the page is a curve, or empty.")] = ""
    product: Annotated[str, about("The product that the stored result belongs to.")]
    arch: Annotated[str, about("`sm90`, `cpu`, ...")]
    bound: Annotated[str, about("What the page says bounds it, such as `dram`.")]
    clock: Annotated[str, about("`graph`, `queue`, `host`, `cpu`, `process`; empty if not timed.")]
    verdict: Annotated[Verdict, about("Empty if the case ended before it had a verdict.")]
    not_timed: Annotated[str, about("Why it could not be timed here, or empty.")]
    speedup: Speedup | None
    seconds: Seconds | None
    predicted: Annotated[
        Seconds | None, about("What the sides' costs predict at the machine's rates.")
    ] = None
    unexplained: Annotated[list[str], about("Sides over 25 % off the predicted time.")] = []
    errors: Annotated[
        dict[str, float], about("By side, rms error of timed outputs over the rms expected.")
    ] = {}
    precisions: Annotated[dict[str, str], about("By side, its declared lower precision.")] = {}
    work: Annotated[
        dict[str, int | float | Amounts],
        about(
            "The least work of a call: `read`, `write` and `wire` in bytes,"
            " `flops` by format, `terms`; empty if nothing was timed."
        ),
    ]
    spread: Annotated[float | None, about("The standard deviation of a process's ln(speedup).")]
    session: Annotated[
        float | None, about("The session-to-session standard deviation of ln(speedup).")
    ]
    detectable: Annotated[
        float | None, about("The smallest loss found in 99 % of trials: 0.011 is 1.1 %.")
    ]
    suspect: Annotated[
        int,
        Meta(
            description="1: slower than it was, 0: not suspect, -1: faster.",
            extra_json_schema={"enum": [-1, 0, 1]},
        ),
    ]
    votes: Annotated[list[float], about("Speedup of every fresh process.")]
    trials: Annotated[list[Trial], about("Speedup and verdict of each repeated A/A trial.")]
    limit: Limit | None
    claim: Claim | None
    stored: StoredSpeedup | None
    goals: Annotated[
        dict[str, Goal],
        about(
            "What a call takes, if the page asks: `memory` (bytes beyond the inputs), `reserved`"
            " and `fragmentation` (bytes), `launches`, `energy` (joules), `goodput` (share)."
        ),
    ]
    profile: ProfileFiles | None
    cause: Annotated[str, about("What made it red, stale or inconclusive; empty if unknown.")]
    reasons: Annotated[
        list[str], about("What was missed, by how much, and where the limit came from.")
    ]
    notes: Annotated[list[str], about("Further facts.")]
    remarks: Annotated[list[str], about("Facts that a table shows next to the case.")]
    launch_bound: Annotated[
        dict[str, float], about("By side, how many times longer a call takes without a graph.")
    ]
    environment: Annotated[
        dict[str, Json], about("Libraries, driver, power limit: what the result depends on.")
    ]
    sources: Annotated[dict[str, str], about("Hashes of both sides' sources.")]
    unchanged: Annotated[list[str], about("Changed sides with the same machine code.")] = []
    wall: Annotated[float, about("Seconds the whole case took.")]
    samples: SampleFile | None


class Results(Struct):
    schema: Literal[1]
    run: Manifest
    cases: Annotated[list[Case], about("The cases, in the order in which they finished.")]
    canaries: Annotated[list[Canary], about("One for each process that timed.")]
    lost: Annotated[list[str], about("The lines that a killed run left half written.")]


def schema() -> dict[str, Json]:
    """Return the JSON Schema of `results.json`."""
    definitions = msgspec.json.schema(Results)["$defs"]
    for name, model in definitions.items():
        for described in model["properties"].values():
            described.pop("default", None)  # defaults only fill in missing fields of old files
        model["required"] = sorted(model["properties"].keys() - NEWER_FIELDS.get(name, set()))
    results = definitions.pop("Results")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:pytest-aisp:results-{SCHEMA}",
        **results,
        "title": f"results.json of pytest-aisp, version {SCHEMA}",
        "description": "A run and its cases. Within version 1 fields may be added; those that are"
        " here keep their names and meanings.",
        "$defs": definitions,
    }


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
