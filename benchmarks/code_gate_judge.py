"""Judge a recording of `code_gate.py` with the code that judges real runs. Needs no GPU, no torch.

Each recorded trial is the first value of one case-run. Its votes are trials of the same kernel and
kind from other processes, one per process. The trial seeds the random generator that draws the
votes, so a recording has the same verdicts on every machine.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, stdev
from typing import Any

from pytest_aisp.results import stats, verdict
from pytest_aisp.results.verdict import Reading
from pytest_aisp.timing.schedule import ROBUST_CLOCKS

CASES = 250
"""Cases in a suite."""
SURE = 0.05
"""Probability that a printed limit is wrong."""
ROUNDED = 2e-6
"""Rounding of recorded shares."""

Process = tuple[int, int]
"""The number of the file, and the number of the process in it."""


@dataclass(frozen=True)
class Trial:
    """One recorded trial. `planted` is the share of calls not counted, or 0 if unchanged."""

    kernel: str
    process: Process
    number: int
    planted: float
    reading: Reading
    seconds: float
    clock: str


@dataclass
class Recording:
    """The content of one or several files.

    Attributes:
        spent: the seconds that each trial took, from the line before it to its own line.
    """

    environments: list[dict[str, Any]] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
    errors: int = 0

    @property
    def kernels(self) -> list[str]:
        """Kernels with an unchanged trial, the fastest first."""
        times = defaultdict(list)
        for trial in self.trials:
            if not trial.planted:
                times[trial.kernel].append(trial.seconds)
        return sorted(times, key=lambda kernel: median(times[kernel]))


def read(paths: Sequence[Path]) -> Recording:
    """Return the content of the files. A stopped recording may end in half a line."""
    recording = Recording()
    for number, path in enumerate(paths):
        last: dict[str, Any] = {"process": None}
        for row in _rows(path):
            process = number, row["process"]
            if row["kind"] == "trial":
                recording.trials.append(trial_of(row, process))
                if last["process"] == row["process"] and last["number"] == row["number"] - 1:
                    recording.spent.append(row["after"] - last["after"])
            elif row["kind"] == "other":
                recording.others.append({**row, "process": process})
            elif row["kind"] == "environment":
                recording.environments.append(row)
            else:
                recording.errors += 1
            last = row
    return recording


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}:{number} is not a line of a recording") from None


def trial_of(row: Mapping[str, Any], process: Process) -> Trial:
    """Return a trial with its value computed from the raw blocks and laps."""
    firsts = list(map(int, row.get("firsts", "")))  # missing in older recordings
    robust = row["clock"] in ROBUST_CLOCKS
    value = stats.process_value(row["blocks"], firsts, robust=robust)
    # Laps of older recordings also had different numbers of blocks. Use their recorded error.
    error = stats.process_error(row["blocks"], len(row["laps"]), firsts) if firsts else row["error"]
    reading = Reading(value, error)
    planted = row["planted"] if row["asked"] else 0.0
    return Trial(
        row["kernel"], process, row["number"], planted, reading, row["seconds"], row["clock"]
    )


def lap_table(paths: Sequence[Path]) -> str:
    """Return by kernel how the order of building affects unchanged trials of four laps.

    The columns are the sd of the middle half of all blocks; the rms over laps of a lap's
    ln(speedup); half the mean difference between laps of the two orders in one trial; and the sd of
    laps 2 to 4 with equal weight for both orders. Lap 1 is left out because in recordings without
    `firsts` it used different memory.
    """
    values_by_kernel: dict[str, list[list[float]]] = defaultdict(list)
    for row in itertools.chain.from_iterable(map(_rows, paths)):
        if row["kind"] == "trial" and not row["asked"] and len(row["laps"]) == 4:
            _, b, c, d = row["laps"]
            values = stats.process_value(row["blocks"], robust=False), (b + d) / 4 + c / 2
            values_by_kernel[row["kernel"]].append([*values, (b + d) / 4 - c / 2, *row["laps"]])
    rows = []
    for kernel, trials in values_by_kernel.items():
        together, alike, order, *laps = zip(*trials, strict=True)
        spread = stdev(together), stats.rms(map(stats.rms, laps)), stats.rms(order), stdev(alike)
        rows.append((kernel, str(len(trials)), *(f"{value:.2%}" for value in spread)))
    return table(("kernel", "trials", "all blocks", "a lap", "order", "orders alike"), rows)


def spreads(trials: Iterable[Trial]) -> dict[str, float]:
    """Return by kernel the spread to store: one value per process, one session per file."""
    values: dict[str, dict[Process, float]] = defaultdict(dict)
    clocks: dict[str, str] = {}
    for trial in trials:
        if not trial.planted:
            values[trial.kernel].setdefault(trial.process, trial.reading.value)
            clocks[trial.kernel] = trial.clock
    owns = {kernel: _own_spread(by_process) for kernel, by_process in values.items()}
    pool = {k: own for k, own in owns.items() if own is not None}
    spread = {}
    for kernel, by_process in values.items():
        clock, own = clocks[kernel], owns[kernel]
        others = [other for name, other in pool.items() if clocks[name] == clock]
        spread[kernel] = verdict.DEFAULT_SPREAD[clock]
        if own is not None:
            spread[kernel] = stats.pooled_spread(own, len(by_process), others)
    return spread


def _own_spread(values: Mapping[Process, float]) -> float | None:
    sessions: dict[int, list[float]] = defaultdict(list)
    for (session, _), value in values.items():
        sessions[session].append(value)
    spreads = [stats.trimmed_spread(v) for v in sessions.values() if len(v) >= 3]
    return stats.rms(spreads) if spreads else None


class VotePool:
    """The trials of all processes, from which votes are drawn."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        self._kinds: dict[tuple[str, bool], dict[Process, list[Reading]]] = {}
        for trial in trials:
            kind = self._kinds.setdefault((trial.kernel, trial.planted > 0), {})
            kind.setdefault(trial.process, []).append(trial.reading)

    def votes(self, trial: Trial, rng: random.Random) -> Iterator[Reading]:
        """Yield one random trial from each of the other processes, in random order."""
        kind = self._kinds[trial.kernel, trial.planted > 0]
        left = [process for process in kind if process != trial.process]
        while left:
            process = left.pop(_below(len(left), rng))
            yield kind[process][_below(len(kind[process]), rng)]

    def is_too_small(self, trial: Trial) -> bool:
        """Return whether the other processes are too few for a majority of votes."""
        return len(self._kinds[trial.kernel, trial.planted > 0]) <= verdict.VOTES

    def outcome(self, trial: Trial, spread: float, rng: random.Random) -> verdict.Outcome:
        """Return the outcome of the code gate."""
        gate = verdict.code_gate(spread, trial.reading)
        votes = self.votes(trial, rng)
        decision = verdict.decide(trial.reading, [gate], lambda: next(votes, None))
        return decision.outcomes["code"]


def _below(count: int, rng: random.Random) -> int:
    return int(rng.random() * count)  # the only draw that is the same in every Python version


@dataclass
class Judged:
    """One recording and the outcomes of its trials.

    Attributes:
        outcomes: the outcomes, in the order of the trials.
        kinds: for each trial, `unchanged`; `planted` if the planted slowdown was detectable, else
            `below`; or `unvoted` if it was detectable and the first value was a suspect, but too
            few processes planted it for votes.
    """

    recording: Recording
    spread: dict[str, float]
    outcomes: list[verdict.Outcome]
    kinds: list[str]

    def count(self, kernel: str | None = None) -> Counter[str]:
        """Count the trials of one kernel, or of all, by kind and outcome."""
        counts: Counter[str] = Counter()
        rows = zip(self.recording.trials, self.outcomes, self.kinds, strict=True)
        for trial, outcome, kind in rows:
            if kernel in (None, trial.kernel):
                counts[kind] += 1
                counts[f"{kind} voted"] += outcome != "clear"
                counts[f"{kind} red"] += outcome == "red"
        return counts


def judge(recording: Recording) -> Judged:
    """Judge every trial once. Trials with a detectable slowdown vote only on each other."""
    spread = spreads(recording.trials)
    if any(row.get("plan", {}).get("python") for row in recording.environments):
        # The plugin has no spread of two environments. It assumes the clock's default.
        spread = {t.kernel: verdict.DEFAULT_SPREAD[t.clock] for t in recording.trials}
    enough = [not t.planted or detectable(t, spread[t.kernel]) for t in recording.trials]
    counted = [t for t, yes in zip(recording.trials, enough, strict=True) if yes]
    all_, only = VotePool(recording.trials), VotePool(counted)
    outcomes = [
        (only if yes else all_).outcome(t, spread[t.kernel], _rng(t))
        for t, yes in zip(recording.trials, enough, strict=True)
    ]
    kinds = []
    for trial, yes, outcome in zip(recording.trials, enough, outcomes, strict=True):
        kind = "unchanged" if not trial.planted else "planted" if yes else "below"
        unvoted = kind == "planted" and outcome == "open" and only.is_too_small(trial)
        kinds.append("unvoted" if unvoted else kind)
    return Judged(recording, spread, outcomes, kinds)


def detectable(trial: Trial, spread: float) -> bool:
    """Return whether the planted slowdown is at least 1 % and large enough to detect."""
    least = max(math.log1p(verdict.PLANTED), verdict.DETECTABLE_CODE * spread)
    return math.log1p(trial.planted) >= least - ROUNDED


def _rng(trial: Trial) -> random.Random:
    return random.Random(f"{trial.kernel} {trial.process} {trial.number}")


class Suites:
    """Suites of `CASES` cases resampled from the unchanged trials.

    A suite's first values come from one process, and its kernels are drawn evenly.
    """

    def __init__(self, judged: Judged) -> None:
        self._spread = judged.spread
        unchanged = [t for t in judged.recording.trials if not t.planted]
        self._pool = VotePool(unchanged)
        self._by_process: dict[Process, list[Trial]] = defaultdict(list)
        for trial in unchanged:
            self._by_process[trial.process].append(trial)
        self.processes = list(self._by_process)
        self._weights = {p: self._even(trials) for p, trials in self._by_process.items()}
        self._suspects = {p: list(map(self._suspect, v)) for p, v in self._by_process.items()}

    def _suspect(self, trial: Trial) -> Trial | None:
        """Return `trial` if its case would need votes."""
        gate = verdict.code_gate(self._spread[trial.kernel], trial.reading)
        clear = gate.decide(trial.reading, []) == "clear"
        return None if clear else trial

    @staticmethod
    def _even(trials: Sequence[Trial]) -> list[float]:
        counts = Counter(trial.kernel for trial in trials)
        return [1 / counts[trial.kernel] for trial in trials]

    def red(self, process: Process, rng: random.Random) -> bool:
        """Return whether one suite, measured in `process`, has a red case."""
        drawn = rng.choices(self._suspects[process], self._weights[process], k=CASES)
        suspects = (trial for trial in drawn if trial is not None)
        return any(self._pool.outcome(t, self._spread[t.kernel], rng) == "red" for t in suspects)

    def share(self, count: int, processes: Sequence[Process], rng: random.Random) -> float:
        """Return the share of `count` suites that are red."""
        picked = (processes[_below(len(processes), rng)] for _ in range(count))
        return sum(self.red(process, rng) for process in picked) / count

    def limit(self, count: int, records: int, rng: random.Random) -> float:
        """Return the 95th percentile of the red share over resampled recordings of this size."""
        shares = []
        for _ in range(records):
            again = [self.processes[_below(len(self.processes), rng)] for _ in self.processes]
            shares.append(self.share(max(1, count // records), again, rng))
        return sorted(shares)[math.ceil((1 - SURE) * records) - 1]


def upper_limit(seen: int, count: int) -> float:
    """Return the 95 % upper limit (Clopper and Pearson) of a share seen `seen` times in `count`."""
    low, high = seen / count, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        chance = sum(_chance(k, count, middle) for k in range(seen + 1))
        low, high = (middle, high) if chance > SURE else (low, middle)
    return high


def _chance(seen: int, count: int, share: float) -> float:
    if not 0 < share < 1:
        return float(seen == count * round(share))
    ways = math.lgamma(count + 1) - math.lgamma(seen + 1) - math.lgamma(count - seen + 1)
    return math.exp(ways + seen * math.log(share) + (count - seen) * math.log1p(-share))


def digest(judged: Judged) -> str:
    """Return 12 hex digits of a hash over all verdicts in order."""
    return hashlib.sha256(" ".join(judged.outcomes).encode()).hexdigest()[:12]


# Other tools ---------------------------------------------------------------------------------

WAYS = [("do_bench", field, limit) for field in ("mean", "median") for limit in (1, 2, 5)]
STORED_WAYS = [
    *WAYS,
    *(("pytest-benchmark", field, limit) for field in ("min", "mean") for limit in (1, 5)),
]
"""Tool, statistic, threshold in per cent."""


def fails(new: Mapping[str, Any], old: Mapping[str, Any], field: str, limit: float) -> bool:
    """Return whether `field` grew by more than `limit` per cent.

    The rule of ``--benchmark-compare-fail=field:limit%``:
    https://pytest-benchmark.readthedocs.io/en/latest/comparing.html
    """
    return bool(new[field] / old[field] * 100 - 100 > limit)


Comparison = tuple[dict[str, Any], dict[str, Any], bool]
"""The old row, the new row, and whether a slowdown was planted between them."""


def in_one_process(rows: Iterable[Mapping[str, Any]]) -> list[Comparison]:
    """Compare what `do_bench` measured in one process. Either copy may be the old one."""
    graphs_of: dict[Any, dict[str, Any]] = defaultdict(dict)
    for row in rows:
        if row["way"] == "do_bench":
            graphs_of[row["kernel"], row["process"]][row["graph"]] = row
    return [
        (graphs[old], graphs[new], new == "slow")
        for graphs in graphs_of.values()
        for old, new in (("old", "same"), ("same", "old"), ("old", "slow"), ("same", "slow"))
        if old in graphs and new in graphs
    ]


def against_stored(rows: Iterable[Mapping[str, Any]], way: str) -> list[Comparison]:
    """Compare each process's rows with the rows that each other process would have stored."""
    by_kernel: dict[str, dict[Process, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["way"] == way:
            by_kernel[row["kernel"]][row["process"]][row["graph"]] = row
    pairs = []
    for processes in by_kernel.values():
        known = [graphs for graphs in processes.values() if {"old", "slow"} <= graphs.keys()]
        for before, after in itertools.permutations(known, 2):
            pairs += [(before["old"], after[name], name == "slow") for name in ("old", "slow")]
    return pairs


def tally(comparisons: Sequence[Comparison], field: str, limit: float) -> tuple[int, int, int, int]:
    """Return the numbers of unchanged comparisons, false alarms, planted ones, and misses."""
    red = [(planted, fails(new, old, field, limit)) for old, new, planted in comparisons]
    planted = [failed for slow, failed in red if slow]
    unchanged = [failed for slow, failed in red if not slow]
    return len(unchanged), sum(unchanged), len(planted), len(planted) - sum(planted)


# The tables -------------------------------------------------------------------------------------

HEADS = (
    *("kernel", "us", "clock", "spread", "detects", "unchanged", "voted on", "red"),
    *("planted", "share planted", "missed"),
)
OTHER_HEADS = ("judged by", "unchanged", "false alarms", "", "planted", "missed", "")


def report(judged: Judged, suites: int) -> str:
    """Return all tables of a recording as Markdown."""
    parts = [where(judged.recording), table(HEADS, kernel_rows(judged)), totals(judged)]
    parts.append(suite_words(Suites(judged), suites))
    if judged.recording.others:
        parts.append(table(OTHER_HEADS, comparison_rows(judged)))
    return "\n\n".join(parts) + "\n"


def where(recording: Recording) -> str:
    """Return the machines, one line per file."""
    lines = []
    for facts in recording.environments:
        versions = {**facts["versions"], "torch": facts["torch"], "triton": facts["triton"]}
        words = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
        lines.append(f"{facts['device'] or facts['product']}, {words}, {facts['date']}")
    return "\n".join(lines) or "The recording does not name its machine."


def kernel_rows(judged: Judged) -> list[list[str]]:
    """Return one row per kernel, the fastest first, and their sums."""
    rows = [_kernel_row(judged, kernel) for kernel in judged.recording.kernels]
    count = judged.count()
    sums = [str(count[k]) for k in ("unchanged", "unchanged voted", "unchanged red")]
    missed = count["planted"] - count["planted red"]
    return [*rows, ["all", "", "", "", "", *sums, str(count["planted"]), "", str(missed)]]


def _kernel_row(judged: Judged, kernel: str) -> list[str]:
    trials = [t for t in judged.recording.trials if t.kernel == kernel]
    rows = zip(judged.recording.trials, judged.kinds, strict=True)
    shares = [t.planted for t, kind in rows if t.kernel == kernel and kind == "planted"]
    spread, count = judged.spread[kernel], judged.count(kernel)
    return [
        kernel,
        f"{1e6 * median(t.seconds for t in trials):.3g}",
        "/".join(sorted({t.clock for t in trials})),
        f"{spread:.2%}",
        f"{-math.expm1(-verdict.DETECTABLE_CODE * spread):.2%}",
        *(str(count[k]) for k in ("unchanged", "unchanged voted", "unchanged red")),
        str(count["planted"]),
        f"{min(shares):.2%} to {max(shares):.2%}" if shares else "",
        str(count["planted"] - count["planted red"]),
    ]


def totals(judged: Judged) -> str:
    """Return the sums in words, with their limits."""
    count, processes = judged.count(), {t.process for t in judged.recording.trials}
    unchanged, red = count["unchanged"], count["unchanged red"]
    planted, missed = count["planted"], count["planted"] - count["planted red"]
    lines = [
        f"{unchanged} unchanged case-runs in {len(processes)} processes: {red} were red"
        f" (with 95 % confidence, at most {upper_limit(red, max(1, unchanged)):.2%}).",
        f"{planted} planted losses: {missed} were missed"
        f" (with 95 % confidence, at most {upper_limit(missed, max(1, planted)):.2%}).",
        f"{count['below']} planted losses smaller than their row detects:"
        f" {count['below'] - count['below red']} were missed."
        f" {judged.recording.errors} trials failed.",
        f"Every verdict in order: {digest(judged)}.",
    ]
    if count["unvoted"]:
        lines.insert(2, f"Planted in too few processes to vote on: {count['unvoted']}.")
    if spent := sorted(judged.recording.spent):
        most = spent[math.ceil((1 - SURE) * len(spent)) - 1]
        lines.append(f"The median trial took {median(spent):.2f} s.")
        lines.append(f"95 % of the trials took at most {most:.2f} s.")
    return "\n".join(lines)


def suite_words(suites: Suites, count: int) -> str:
    """Return the share of red resampled suites in words. `count` seeds the generator."""
    rng = random.Random(count)
    share = suites.share(count, suites.processes, rng)
    limit = suites.limit(2 * count, 200, rng)
    return (
        f"{count} resampled suites of {CASES} unchanged cases: {share:.2%} were red"
        f" (with 95 % confidence, at most {limit:.2%})."
    )


def comparison_rows(judged: Judged) -> list[list[str]]:
    """Return a row for the code gate, and a row for each other way to judge."""
    count, others = judged.count(), judged.recording.others
    ours = (
        count["unchanged"],
        count["unchanged red"],
        count["planted"],
        count["planted"] - count["planted red"],
    )
    rows = [_comparison_row("the code gate", ours)]
    for way, name, limit in WAYS:
        counts = tally(in_one_process(others), name, limit)
        rows.append(_comparison_row(f"`{way}` {name}, one process, {limit} %", counts))
    for way, name, limit in STORED_WAYS:
        counts = tally(against_stored(others, way), name, limit)
        label = f"{way} `{name}:{limit}%`" if way != "do_bench" else f"`{way}` {name}, stored,"
        rows.append(_comparison_row(label + f" {limit} %" * (way == "do_bench"), counts))
    return rows


def _comparison_row(name: str, counts: tuple[int, int, int, int]) -> list[str]:
    unchanged, alarms, planted, missed = counts
    return [
        *(name, str(unchanged), str(alarms), _share(alarms, unchanged)),
        *(str(planted), str(missed), _share(missed, planted)),
    ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])
