"""False alarms and misses of the whole decision, on the simulated device.

    python benchmarks/error_rates.py            quick: 1,500 case-runs a noise model
    python benchmarks/error_rates.py --code     the code gate (`--aisp-against`) instead
    python benchmarks/error_rates.py --environments   the gate of `--aisp-against-python` instead
    python benchmarks/error_rates.py --canary   how often a run's canary misbehaves by chance
    python benchmarks/error_rates.py --full     15,000 and 2,000 planted losses, the table of
    docs/explanation/verdict.md

A suite of 250 different cases is recorded as on a real GPU model: 8 processes in each of two
sessions. Then the suite is run many times in new sessions. The code that judges real runs judges
these runs, too: screen, vote, claim gate and record gate. In a run, either no case has changed, or
every case is slower by the smallest loss that its row can detect.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pool
from typing import NamedTuple

from pytest_aisp.isolation.interference import Cause
from pytest_aisp.results import stats, verdict
from pytest_aisp.session import canary
from pytest_aisp.timing.fake_device import Noise, Process, hold
from pytest_aisp.timing.schedule import Budget, PairTimer, Samples, join
from pytest_aisp.timing.schedule import measure as schedule_measure

CASES, PROCESSES = 250, 8
BUDGET = Budget()
SESSION = 0.0010

# Windows, captures and processes have the noise of spread.md. Each model adds to it.
MEASURED = Noise(window=0.0020, capture=0.0015, process=0.0004)
MODELS = {
    "white": MEASURED,
    "drift 1 %/s": replace(MEASURED, drift=0.01, unlike=0.2),
    "ramp 2 %": replace(MEASURED, ramp=0.02, unlike=0.2),
    "heavy tail t(4)": replace(MEASURED, heavy=True),
    "clock steps 1 %": replace(MEASURED, step=0.01, step_chance=0.02, unlike=0.2),
    "process bias 0.2 %": replace(MEASURED, process=0.0020),
    "rogue processes 5 %": replace(MEASURED, rogue=0.05),
    "session bias 0.3 %": replace(MEASURED, session=0.0030),
    "throttling 2 %": replace(MEASURED, throttle=0.02),
    "dips of 10 %": replace(MEASURED, dip=0.5),
    "captures that scatter 4 times as recorded": MEASURED,
    "placement 0.5 %": replace(MEASURED, placement=0.0050),
    "clock of 1 us": replace(MEASURED, resolution=1e-6),
}
RESTLESS = {"captures that scatter 4 times as recorded": 4.0}
"""The scatter of captures in later sessions, as a multiple of the recorded sessions' scatter."""


@dataclass
class Recorded:
    """One case as in the file of stored results for a GPU model."""

    seconds: tuple[float, float]
    noise: Noise
    sessions: list[list[float]]

    @property
    def value(self) -> float:
        return sum(sum(s) / len(s) for s in self.sessions) / len(self.sessions)

    @property
    def own(self) -> float:
        return stats.rms(stats.trimmed_spread(s) for s in self.sessions)


def measure(case: Recorded, session: Session, rng: random.Random) -> verdict.Reading:
    """Return the reading of one fresh process in this session."""
    noise = replace(case.noise, capture=case.noise.capture * session.restless)
    samples = Process(case.seconds, noise, rng, -session.shift).measure(BUDGET)
    return verdict.Reading(samples.value, samples.error)


class Session(NamedTuple):
    """The effect of one session on a case: a shift of ln(speedup), and noisier captures."""

    shift: float
    restless: float = 1.0

    @classmethod
    def draw(cls, noise: Noise, restless: float, rng: random.Random) -> Session:
        """Draw a session. The shift is Student-t(4), because shifts are rare and large."""
        chi = math.sqrt(rng.gammavariate(2, 2) / 4) * math.sqrt(2)
        return cls((noise.session or SESSION) * rng.gauss(0, 1) / chi, restless)


def record(noise: Noise, cases: int, rng: random.Random) -> list[Recorded]:
    """Record a suite of different cases whose noise levels vary by a quarter."""
    suite = []
    for _ in range(cases):
        scale = math.exp(rng.gauss(0, 0.25))
        mine = replace(
            noise,
            window=noise.window * scale,
            capture=noise.capture * scale,
            process=noise.process * scale,
        )
        times = 10 ** rng.uniform(-5.7, -3), 10 ** rng.uniform(-5.7, -3)
        case = Recorded(times, mine, [])
        for _ in range(2):
            session = Session.draw(noise, 1.0, rng)
            case.sessions.append([measure(case, session, rng).value for _ in range(PROCESSES)])
        suite.append(case)
    return suite


def judge(
    case: Recorded,
    spread: float,
    session_sd: float,
    session: Session,
    planted: bool,
    rng: random.Random,
) -> str:
    """Return the verdict of one case-run in `session`."""
    first = measure(case, session, rng)
    spread = verdict.effective_spread(spread, first)
    margin = verdict.record_margin(spread, session_sd, "graph")
    gates = [
        verdict.claim_gate(math.exp(case.value - 6 * spread - margin), spread),
        *verdict.record_gates(case.value, margin),
    ]
    loss = verdict.detectable(gates, spread, session_sd) if planted else 0.0

    def less(reading: verdict.Reading) -> verdict.Reading:
        return reading._replace(value=reading.value - loss)

    decision = verdict.decide(less(first), gates, lambda: less(measure(case, session, rng)))
    return verdict.verdict_of(decision, stored=True, same_environment=True)


def judge_code(
    case: Recorded, spread: float, session: Session, planted: bool, rng: random.Random
) -> str:
    """Return the verdict on a changed side against its old version, both in one process."""
    same = replace(case, seconds=(case.seconds[0], case.seconds[0]))
    session = session._replace(shift=0.0)  # both sides are built in one process
    first = measure(same, session, rng)
    gate = verdict.code_gate(spread, first)
    loss = verdict.DETECTABLE_CODE * verdict.effective_spread(spread, first) if planted else 0.0

    def less(reading: verdict.Reading) -> verdict.Reading:
        return reading._replace(value=reading.value - loss)

    decision = verdict.decide(less(first), [gate], lambda: less(measure(same, session, rng)))
    return "regressed" if decision.outcomes["code"] == "red" else "pass"


class Both:
    """The same side in two simulated processes. The windows alternate between the processes."""

    clock = "graph"

    def __init__(self, there: PairTimer, here: PairTimer) -> None:
        self.timers = there, here
        self.windows = there.windows[0], here.windows[0]

    def refresh(self, *, last: bool) -> None:
        pass

    def disturbance(self) -> Cause | None:
        return next(filter(None, [timer.disturbance() for timer in self.timers]), None)

    def details(self) -> dict[str, object]:
        return {}


def measure_environments(case: Recorded, noise: Noise, rng: random.Random) -> verdict.Reading:
    """Return the reading of a side in one process of each environment, as the plugin times it."""
    budget, parts, seed = BUDGET.lap(), list[Samples](), str(rng.random())
    options = {"seconds": {"side": case.seconds[0]}, "noise": asdict(noise)}
    for lap in range(BUDGET.laps):
        both = Both(*(hold("side", options, seed, other=there, lap=lap) for there in (True, False)))
        parts.append(schedule_measure(both, budget, rng, lap % 2))
        budget = budget.exactly(len(parts[0].blocks))
    samples = join(parts)
    return verdict.Reading(samples.value, samples.error)


def judge_environments(
    case: Recorded, spread: float, session: Session, planted: bool, rng: random.Random
) -> str:
    """Return the verdict on a side in two environments. All processes run in one session."""
    noise = replace(case.noise, capture=case.noise.capture * session.restless)
    spread = max(spread, verdict.DEFAULT_SPREAD["graph"])
    first = measure_environments(case, noise, rng)
    loss = verdict.DETECTABLE_CODE * verdict.effective_spread(spread, first) if planted else 0.0

    def less(reading: verdict.Reading) -> verdict.Reading:
        return reading._replace(value=reading.value - loss)

    gate = verdict.code_gate(spread, first)
    votes = (less(measure_environments(case, noise, rng)) for _ in range(verdict.ATTEMPTS))
    decision = verdict.decide(less(first), [gate], lambda: next(votes))
    return "regressed" if decision.outcomes["code"] == "red" else "pass"


def judge_canary(case: Recorded, spread: float, session: Session, rng: random.Random) -> str:
    """Return the error that a run's canary reports on this case, or ``pass``."""
    noise = replace(case.noise, capture=case.noise.capture * session.restless)
    times = case.seconds[1], case.seconds[1]

    def itself(planted: float, fresh: bool) -> tuple[verdict.Reading, float]:
        samples = Process(times, noise, rng, planted=planted).measure(BUDGET)
        counted, calls = samples.details["counted"][1], samples.details["calls"][1]
        return verdict.Reading(samples.value, samples.error), calls / counted - 1

    case_canary = canary.Canary("case", "graph")
    measured = measure(case, session, rng)
    canary.judge(case_canary, verdict.effective_spread(spread, measured), itself)
    return " ".join(case_canary.wrong.split()[:2]) or "pass"


def trial(args: tuple[str, int, int, int, int, str]) -> tuple[str, Counter[str], Counter[str]]:
    """Record one suite of `name`'s noise and run it; return the verdicts, unchanged and planted."""
    name, seed, cases, runs, losses, gate = args
    rng = random.Random(f"{name}{seed}")
    suite = record(MODELS[name], cases, rng)
    owns = [case.own for case in suite]
    assumed = verdict.UNKNOWN_SESSION["graph"]
    pool = stats.session_spread([case.sessions for case in suite], assumed)
    session_sds = [stats.case_session_spread(case.sessions, pool) for case in suite]
    spreads = [stats.pooled_spread(own, 2 * PROCESSES, owns) for own in owns]
    verdicts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for planted, count in ((False, runs), (True, losses)):
        for _ in range(count):
            for case, spread, session_sd in zip(suite, spreads, session_sds, strict=True):
                session = Session.draw(MODELS[name], RESTLESS.get(name, 1.0), rng)
                if gate == "canary":
                    outcome = judge_canary(case, spread, session, rng)
                elif gate:
                    judged = judge_code if gate == "code" else judge_environments
                    outcome = judged(case, spread, session, planted, rng)
                else:
                    outcome = judge(case, spread, session_sd, session, planted, rng)
                verdicts[planted][outcome] += 1
    return name, verdicts[0], verdicts[1]


def table(
    suites: int, cases: int, runs: int, losses: int, jobs: int = 2, *, gate: str = ""
) -> list[list[str]]:
    """Return the rows of the table, one per noise model."""
    work = [(n, seed, cases, runs, losses, gate) for n in MODELS for seed in range(suites)]
    unchanged = {name: Counter[str]() for name in MODELS}
    planted = {name: Counter[str]() for name in MODELS}
    with Pool(jobs) as pool:
        for name, clean, lost in pool.imap_unordered(trial, work):
            unchanged[name] += clean
            planted[name] += lost
    if gate == "canary":
        return [canary_row(name, unchanged[name]) for name in MODELS]
    return [row(name, unchanged[name], planted[name]) for name in MODELS]


def canary_row(name: str, errors: Counter[str]) -> list[str]:
    """Return one row: runs, false differences, planted slowdowns not seen, and their share."""
    differs, blind = errors["a side"], errors["a planted"]
    return [
        name,
        str(errors.total()),
        str(differs),
        str(blind),
        f"{(differs + blind) / errors.total():.3%}",
    ]


def row(name: str, clean: Counter[str], lost: Counter[str]) -> list[str]:
    """Return one row: runs, red, improved, red suites of 250, planted, missed."""
    red = sum(clean[v] for v in verdict.RED)
    suites = 1 - (1 - red / clean.total()) ** 250
    missed = lost.total() - sum(lost[v] for v in verdict.RED)
    return [
        *(name, str(clean.total()), str(red), str(clean["improved"]), f"{suites:.1%}"),
        *(str(lost.total()), str(missed), f"{missed / max(1, lost.total()):.2%}"),
    ]


HEADS = ("noise", "unchanged", "red", "improved", "red suites of 250", "planted", "missed", "")
CANARY_HEADS = ("noise", "runs", "differs from itself", "planted not seen", "invalid")


def show(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("| " + " | ".join(heads) + " |")
    print("|" + " --- |" * len(heads))
    for cells in rows:
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--code", action="store_true", help="the gate against a commit instead")
    parser.add_argument("--environments", action="store_true", help="the gate of two environments")
    parser.add_argument("--canary", action="store_true", help="each run's canary instead")
    options = parser.parse_args()
    sizes = (6, CASES, 10, 2) if options.full else (1, CASES, 6, 1)
    gate = next((g for g in ("canary", "code", "environments") if getattr(options, g)), "")
    if gate == "canary":
        sizes = (*sizes[:3], 0)
    show(CANARY_HEADS if gate == "canary" else HEADS, table(*sizes, gate=gate))


if __name__ == "__main__":
    main()
