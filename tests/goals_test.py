"""Metrics beside time: energy, goodput, their limits, and process sides."""

from __future__ import annotations

import itertools
import json
import math
import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from pytest_aisp.results import store
from pytest_aisp.results.messages import CountTask
from pytest_aisp.results.metric_limits import METRICS, joules, pooled, shares, with_session
from pytest_aisp.session.cause import SAME_CODE
from pytest_aisp.util import device_state, process_group
from pytest_aisp.worker import metrics
from pytest_aisp.worker.metrics import CounterSteps, Uncountable

BODY = "pair.assert_equivalent()\npair.assert_speedup()\n"
ENERGY = BODY + "pair.assert_energy(at_most=0.8)"
GOODPUT = BODY + "pair.assert_goodput(at_least=0.5)"
NAME = "doubling_test.py::test_doubling[doubled-n1001]"
JOULES = {"baseline": 2e-3, "optimized": 1e-3, "noise": 0.01}


@pytest.fixture
def counting_gpu(gpu):
    """Simulate a GPU whose counters return the given amounts."""

    def install(**goals):
        gpu(added=2e-5, doubled=1e-5, details={"goals": goals})

    return install


def stored(pytester):
    file = pytester.path / "baselines/simulated-gpu/ch99.json"
    return store.load(file).results[NAME].goals


def test_energy_is_measured_on_request_and_when_recording(page, counting_gpu, pytester):
    page(body=ENERGY)
    counting_gpu(energy=JOULES)
    silent = pytester.runpytest_subprocess("-vv")
    silent.stdout.fnmatch_lines(["*: energy: measured with --aisp-energy, and when recording"])
    recorded = pytester.runpytest_subprocess("--aisp-update-expectations", "--aisp-processes=1")
    message = "energy: 2 mJ / 1 mJ a call, 0.5 of the baseline's against 0.8, noise 1.0%"
    recorded.stdout.fnmatch_lines([f"*: {message}"])
    assert stored(pytester) == {"energy": JOULES}
    counting_gpu(energy=JOULES | {"optimized": 1.1e-3})
    grown = pytester.runpytest_subprocess("--aisp-energy", "--aisp-artifacts=kept")
    words = "energy: 1.1 mJ against 1 mJ (stored in baselines/simulated-gpu/ch99.json), margin 6%"
    words += "; in 3 processes 1.1 mJ, 1.1 mJ, 1.1 mJ -> red"
    for result in (grown, pytester.runpytest_subprocess("--aisp-replay=kept")):
        result.stdout.fnmatch_lines([f"E       AssertionError: {words}", "*REGRESSED*"])
        assert result.ret == 1


def test_goodput_is_a_share_of_the_measured_time(page, counting_gpu, pytester):
    page(body=GOODPUT)
    counting_gpu(goodput={"baseline": 5e-6, "optimized": 8e-6})
    result = pytester.runpytest_subprocess("--aisp-update-expectations", "--aisp-processes=1")
    result.stdout.fnmatch_lines(["*: goodput: 25% / 80% at compute, against 50%"])
    assert result.ret == 0
    assert stored(pytester)["goodput"]["optimized"] == pytest.approx(0.8, rel=0.01)
    counting_gpu(goodput={"baseline": 5e-6, "optimized": 4e-6})
    missed = pytester.runpytest_subprocess()
    message = "goodput: 25% / 40% at compute, against 50% (assert_goodput on the page)"
    missed.stdout.fnmatch_lines(
        [f"E       AssertionError: {message}; in 3 processes 40%, 40%, 40% -> red"]
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("pair.assert_energy(at_most=0)", "at_most=0 of the baseline's energy: it must be above 0"),
        ("pair.assert_memory(at_most=0)", "at_most=0 of the baseline's memory: it must be above 0"),
        ("pair.assert_launches(at_most=0)", "at_most=0 launches: it must be above 0"),
        (
            "pair.assert_goodput(at_least=1.5)",
            "at_least=1.5 of the wall time: it must be above 0 and at most 1",
        ),
        (
            "pair.assert_memory(at_most=1, of='cached')",
            "assert_memory(of='cached'): choose one of allocated, reserved, fragmentation",
        ),
        (
            "pair.assert_goodput(at_least=0.5)",
            "assert_goodput() before assert_speedup(): goodput is a share of the call's time",
        ),
    ],
)
def test_wrong_arguments_are_refused(page, counting_gpu, pytester, call, message):
    page(body=f"pair.assert_equivalent()\n{call}")
    counting_gpu()
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines([f"*Error: {message}"])
    assert result.ret == 1


ALONE = "pair.assert_equivalent()\npair.assert_memory(at_most=0.9)"
ASKS = {
    "alone": ALONE + "\npair.assert_memory(at_most=0.9, of='reserved')",
    "ahead": ALONE + "\npair.assert_speedup()",
    "broken": ALONE + "\nassert not pair.variant",
    "more": ALONE,
}


@pytest.fixture
def judged(gpu, pytester):
    """Run pages whose variants take this many MiB; return the run, its cases, their verdicts."""

    def judge(mib, watts, *options):
        names = {"memory": 600 << 20, "reserved": 700 << 20}
        goals = {name: {"baseline": n, "optimized": mib << 20} for name, n in names.items()}
        details = {"goals": {**goals, "energy": JOULES}}
        gpu(added=2e-5, doubled=1e-5, details=details, environment={"power_limit_w": watts})
        run = pytester.runpytest_subprocess("--aisp-artifacts=kept", *options)
        results = json.loads((pytester.path / "kept/results.json").read_text())
        cases = {case["page"][len("ch99/") : -len("_test.py")]: case for case in results["cases"]}
        return run, cases, {name: case["verdict"] for name, case in cases.items()}

    return judge


def test_metrics_without_a_speedup_are_stored_judged_and_extended(page, judged, pytester):
    for name, body in ASKS.items():
        page(body=body, name=f"{name}_test.py")
    record = "--aisp-update-expectations", "--aisp-processes=1"
    run, cases, verdicts = judged(240, 700, *record)
    assert verdicts == dict.fromkeys(ASKS, "new") | {"broken": "fail"}
    key = "_test.py::test_doubling[[]doubled-n1001[]]"
    memory, reserved = "memory 600 MiB / 240 MiB", "reserved 700 MiB / 240 MiB"
    run.stdout.fnmatch_lines(
        [
            f"stored: ahead{key}: new -> ?.???x, {memory}",
            f"stored: alone{key}: new -> {memory}, {reserved}",
        ]
    )
    file = pytester.path / "baselines/simulated-gpu/ch99.json"
    results = {k.partition("_")[0]: result for k, result in store.load(file).results.items()}
    assert set(results) == {"alone", "ahead", "more"}  # nothing of a test that failed
    assert set(results["alone"].goals) == {"memory", "reserved"}
    assert (results["alone"].processes, results["ahead"].processes) == (0, 1)
    assert cases["alone"]["environment"]["power_limit_w"] == 700

    (pytester.path / "ch99/broken_test.py").unlink()
    page(body=ASKS["alone"] + "\npair.assert_energy(at_most=0.9)", name="more_test.py")
    *_, verdicts = judged(240, 700, *record)
    assert verdicts == {"alone": "pass", "ahead": "pass", "more": "new"}  # two goals more
    result = store.load(file).results[f"more{NAME[8:]}"]
    assert set(result.goals) == {"energy", "memory", "reserved"}

    before = file.read_text()
    run, cases, verdicts = judged(250, 700, *record)
    assert verdicts == dict.fromkeys(["alone", "ahead", "more"], "regressed")
    assert file.read_text() == before
    words = "memory: 250 MiB against 240 MiB (stored in baselines/simulated-gpu/ch99.json), margin"
    words += " 1% + 1.0 MiB; in 3 processes 250 MiB, 250 MiB, 250 MiB -> red"
    accept = f"*pytest --aisp-update-expectations=all 'ch99/alone{key}'"
    run.stdout.fnmatch_lines([f"E       AssertionError: {words}", accept])
    held = {"stored": 240 << 20, "margin": 0.01, "slack": 1 << 20, "limit": 0.9}
    assert cases["alone"]["goals"]["memory"].items() >= held.items()

    _, cases, verdicts = judged(250, 350)
    assert verdicts == dict.fromkeys(["alone", "ahead", "more"], "stale")
    unlike = "power_limit_w was 700 when stored, and is 350"
    assert cases["alone"]["reasons"] == [words, unlike, SAME_CODE]


def test_noise_counts_in_favor_of_the_side():
    amounts = {"baseline": 1.0, "optimized": 0.82, "noise": 0.03}
    assert not METRICS["energy"].missed(amounts, 0.8)
    assert METRICS["energy"].missed(amounts | {"noise": 0.01}, 0.8)
    before = {"baseline": 1.0, "optimized": 0.75, "noise": 0.02}
    assert not METRICS["energy"].worse(before, amounts)
    assert METRICS["energy"].worse(before | {"noise": 0.0}, amounts | {"noise": 0.0})


def test_amounts_of_several_processes_are_their_median_with_half_the_range_as_noise():
    counted = [{"baseline": 100.0, "optimized": value} for value in (40.0, 60.0, 50.0)]
    three = {"baseline": 100.0, "optimized": 50.0, "noise": 0.2, "processes": 3}
    assert pooled(counted) == three
    assert pooled(counted[:1]) == counted[0]
    assert pooled([counted[0]] * 3) == {**counted[0], "processes": 3}
    assert pooled([{**JOULES, "noise": 0.05}, JOULES])["noise"] == pytest.approx(0.05)
    none = {"baseline": 0.0, "optimized": 0.0}
    assert pooled([none, none]) == {**none, "processes": 2}


def test_amounts_of_several_sessions_are_their_mean():
    one, other = ({"baseline": 9.0, "optimized": each, "processes": 2} for each in (4.0, 7.0))
    both = {"baseline": 9.0, "optimized": 5.0, "noise": 0.3, "processes": 4}
    assert with_session(one, 2, other) == both
    assert with_session(one, 2, one) == {**one, "processes": 4}


MIB = 2**20
FREE = {"baseline": 2459.0 * MIB}


def of_mib(*amounts):
    return [{**FREE, "optimized": mib * MIB} for mib in amounts]


def is_red(metric, before, now, sessions=1):
    return metric.worse({"baseline": 9.0, **before}, {"baseline": 9.0, "optimized": now}, sessions)


def test_a_count_that_was_always_the_same_stays_exact():
    launches = METRICS["launches"]
    alike = pooled([{"baseline": 9.0, "optimized": 3.0}] * 8)
    for before in (alike, {"optimized": 3.0}):
        assert not is_red(launches, before, 3.0)
        assert is_red(launches, before, 4.0)
    unlike = pooled([{"baseline": 9.0, "optimized": each} for each in (3.0, 3.0, 4.0)])
    assert not is_red(launches, unlike, 4.0)
    assert is_red(launches, unlike, 5.0)


@pytest.mark.parametrize(
    ("recorded", "green", "red"),
    [((352,), 560, 580), ((352, 352), 470, 490), ((352, 480), 740, 750), ((352,) * 4, 430, 450)],
)
def test_the_margin_of_an_amount_follows_from_its_sessions(recorded, green, red):
    first, *others = of_mib(*recorded)
    before = first
    for sessions, other in enumerate(others, start=1):
        before = with_session(before, sessions, other)
    metric, sessions = METRICS["fragmentation"], len(recorded)
    assert not is_red(metric, before, green * MIB, sessions)
    assert is_red(metric, before, red * MIB, sessions)


@pytest.mark.parametrize("processes", [3, 8, 16])
def test_counts_that_scatter_are_seldom_red_and_twice_as_much_is_found(processes):
    rng, memory = random.Random(processes), METRICS["memory"]

    def draw(scale=1.0):
        return {"baseline": 1e9, "optimized": 5e8 * scale * math.exp(rng.gauss(0, 0.1))}

    def judged(before, scale=1.0):
        first, *votes = (memory.worse(before, draw(scale)) for _ in range(6))
        return first and sum(votes) >= 3

    records = [pooled([draw() for _ in range(processes)]) for _ in range(4000)]
    assert sum(map(judged, records)) < {3: 100, 8: 6, 16: 2}[processes]
    assert sum(judged(before, 2.0) for before in records) > {3: 3800, 8: 3990, 16: 3990}[processes]


DRAWN = """
from pytest_aisp.session import counting

count, amounts = counting._count, iter({amounts!r})

def drawn(*args):
    return {{**count(*args), **next(amounts)}}

counting._count = drawn
"""


@pytest.fixture
def counts(counting_gpu, pytester, monkeypatch):
    """Run pages whose processes count these amounts, one after the other."""
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")

    def run(metric, amounts, *options):
        counting_gpu(**{metric: amounts[0]})
        pytester.makepyfile(drawn=DRAWN.format(amounts=amounts))
        return pytester.runpytest_subprocess("-p", "drawn", "-vv", *options)

    return run


RECORD = "--aisp-update-expectations", "--aisp-artifacts=kept"


def test_fragmentation_of_another_board_is_no_loss(page, counts):
    page(body='pair.assert_equivalent()\npair.assert_memory(at_most=0.5, of="fragmentation")')
    assert counts("fragmentation", of_mib(352, 356), *RECORD, "--aisp-processes=2").ret == 0
    assert counts("fragmentation", of_mib(480)).ret == 0
    assert counts("fragmentation", of_mib(900, 352, 900, 480, 352)).ret == 0
    result = counts("fragmentation", of_mib(900, 352, 1000, 900, 800))
    words = "fragmentation: 850 MiB against 354 MiB (stored in *), margin 50% + 40.0 MiB"
    words += "; in 4 processes 352 MiB, 1000 MiB, 900 MiB, 800 MiB -> red"
    result.stdout.fnmatch_lines([f"E       AssertionError: {words}"])
    assert result.ret == 1


@pytest.mark.parametrize(("recorded", "exit_code"), [((3, 3, 3), 1), ((3, 4, 3), 0)])
def test_one_more_launch_is_red_unless_recorded_processes_differ(page, counts, recorded, exit_code):
    def launches(*amounts):
        return [{"baseline": 9, "optimized": each} for each in amounts]

    page(body="pair.assert_equivalent()\npair.assert_launches(at_most=5)")
    assert counts("launches", launches(*recorded), *RECORD, "--aisp-processes=3").ret == 0
    assert counts("launches", launches(4, 4, 4)).ret == exit_code


def test_a_replay_counts_the_votes_again(page, counting_gpu, pytester):
    counting_gpu(memory={"baseline": 100, "optimized": 80})
    page(body=BODY + "pair.assert_memory(at_most=0.5)")
    red = pytester.runpytest_subprocess("--aisp-artifacts=kept")
    words = "*memory: 100 B / 80 B * (assert_memory on the page); in 3 processes 80 B, * -> red"
    red.stdout.fnmatch_lines([words])
    again = pytester.runpytest_subprocess("--aisp-replay=kept")
    again.stdout.fnmatch_lines([words])
    assert (red.ret, again.ret) == (1, 1)
    page(body=BODY + "pair.assert_memory(at_most=0.9)")
    assert pytester.runpytest_subprocess("--aisp-replay=kept").ret == 0


def test_a_recording_counts_in_each_of_its_processes(page, counting_gpu, pytester):
    counting_gpu(memory={"baseline": 100, "optimized": 40})
    page(body=BODY + "pair.assert_memory(at_most=0.5)")
    update = ["--aisp-update-expectations", "--aisp-processes=3", "-vv"]
    result = pytester.runpytest_subprocess(*update, "--aisp-artifacts=kept")
    notes = ["*memory in process 1: 100 */ 40 *", "*memory in fresh process 2: 100 */ 40 *"]
    result.stdout.fnmatch_lines(notes)
    assert stored(pytester)["memory"] == {"baseline": 100, "optimized": 40, "processes": 3}
    again = pytester.runpytest_subprocess("--aisp-replay=kept", "-vv")
    assert again.ret == 0


def test_less_goodput_is_worse():
    assert METRICS["goodput"].missed({"baseline": 0.9, "optimized": 0.4}, 0.5)
    assert not METRICS["goodput"].missed({"baseline": 0.1, "optimized": 0.6}, 0.5)
    before, now = {"baseline": 0.1, "optimized": 0.6}, {"baseline": 0.1, "optimized": 0.58}
    assert not METRICS["goodput"].worse(before, now)
    assert METRICS["goodput"].worse(before, now | {"optimized": 0.56})


def test_goodput_is_at_most_one():
    assert shares({"baseline": 1.0, "optimized": 3.1}, [4.0, 3.0]) == {
        "baseline": 0.25,
        "optimized": 1.0,
    }


@pytest.mark.parametrize(
    ("value", "message"), [(2.5, "2.5 J"), (0.0021, "2.1 mJ"), (3e-6, "3 uJ"), (4.2e-8, "42 nJ")]
)
def test_joules_are_printed_with_a_fitting_unit(value, message):
    assert joules(value) == message


# The counter


def test_joules_count_between_counter_steps_after_the_ramp():
    shown = iter([100.0, 100.0, 130.0, 130.0, 150.0, 150.0, 170.0, 170.0])
    steps = CounterSteps(lambda: next(shown))
    for turn in range(8):
        steps.add(10, ramp=turn < 4)
    assert steps.joules_per_call == (170 - 150) / 20


def test_an_energy_counter_that_does_not_count_is_refused():
    steps = CounterSteps(lambda: 5.0)
    for _ in range(9):
        steps.add(1, ramp=False)
    with pytest.raises(Uncountable, match="energy counter does not count"):
        _ = steps.joules_per_call


class Clock:
    """A GPU at 100 W with a counter that steps every 0.1 s, as windows of 10 ms pass."""

    def __init__(self, monkeypatch, drift=0.0):
        self.now, self.drift = 0.0, drift
        monkeypatch.setattr(metrics.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(metrics, "energy_counter", lambda: self.read)

    def read(self):
        time = int(self.now * 10) / 10
        return 100.0 * time * (1 + self.drift * time)


class Call:
    """A window with a given number of calls."""

    def __init__(self, clock, calls):
        self.clock, self.calls, self.repeats = clock, calls, 2

    def __call__(self):
        self.clock.now += 0.01
        return 0.01 / self.calls / self.repeats


def trial_of(clock, *calls):
    @contextmanager
    def ready():
        yield SimpleNamespace(windows=[Call(clock, count) for count in calls])

    sides = [(len, None), (abs, None)]
    return SimpleNamespace(ready=ready, progress=lambda text: None, sides=sides, bench=None)


def test_energy_is_divided_by_the_calls_of_a_window(monkeypatch):
    amounts = metrics.count(CountTask(metric="energy"), trial_of(Clock(monkeypatch), 10, 20))
    assert amounts["baseline"] == pytest.approx(100 * 0.01 / 20, rel=0.01)
    assert amounts["optimized"] == pytest.approx(100 * 0.01 / 40, rel=0.01)
    assert amounts["noise"] < 0.01


def test_a_warming_gpu_adds_noise_to_both_sides_alike(monkeypatch):
    amounts = metrics.energy(trial_of(Clock(monkeypatch, drift=0.001), 10, 10))
    assert amounts["baseline"] == pytest.approx(amounts["optimized"], rel=0.01)
    assert 0.01 < amounts["noise"] < 0.03


def test_energy_is_summed_over_all_ranks(monkeypatch):
    clock = Clock(monkeypatch)
    two = SimpleNamespace(max=lambda value: value, sum=lambda value: 2 * value)
    monkeypatch.setattr(process_group, "_current", two)
    assert metrics.energy(trial_of(clock, 10, 10))["baseline"] == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize(("millijoules", "reads"), [(2500, 2.5), (None, None)])
def test_the_energy_counter_is_nvmls(monkeypatch, millijoules, reads):
    def counted(handle):
        if millijoules is None:
            raise RuntimeError("not supported")
        return millijoules

    telemetry = object.__new__(device_state.Telemetry)
    telemetry._nvml = SimpleNamespace(nvmlDeviceGetTotalEnergyConsumption=counted)
    telemetry._handle = "handle"
    assert telemetry.energy() == reads
    monkeypatch.setattr(metrics, "Telemetry", lambda index: telemetry)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    if reads is None:
        with pytest.raises(Uncountable, match="NVML does not report energy on this GPU"):
            metrics.energy_counter()
    else:
        assert metrics.energy_counter()() == reads


# Process sides

PROCESSES = """
import os

import torch

from pytest_aisp import Work, compare, fresh_process
from pytest_aisp.worker import metrics

def counted(bench, side):  # stands in for an allocator that reads its settings
    return float(len(os.environ.get("PYTORCH_ALLOC_CONF", ""))) + side(*bench.values[0]).numel()

metrics.COUNTERS["fragmentation"] = counted

def inputs(device, n):
    return (torch.randn(n, device=device),)

def reference(x):
    return 2 * x.double()

@fresh_process
def added(x):
    return x + x

@fresh_process(environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
def doubled(x):
    return 2 * x

@compare(
    baseline=added, optimized=[doubled], inputs=inputs, reference=reference, sizes=[{"n": 5}],
    check_sizes=[{"n": 3}],
    work=lambda n: Work(read=4 * n, write=4 * n), bound="host",
)
def test_doubling(pair):
    pair.assert_equivalent()
    pair.assert_memory(at_most=0.5, of="fragmentation")
"""


@pytest.fixture
def count(pytester, monkeypatch):
    """Ask an engine in this process for a goal's amount of each side in `PROCESSES`."""
    from pytest_aisp.worker.engine import Engine

    monkeypatch.setitem(metrics.COUNTERS, "fragmentation", metrics.COUNTERS["fragmentation"])
    numbers = itertools.count()

    def ask(goal, text=PROCESSES):
        path = pytester.path / f"counted{next(numbers)}_test.py"
        path.write_text(text)
        where = {"page": str(path), "root": str(pytester.path), "module": path.stem}
        case = {"function": "test_doubling", "variant": "doubled", "size": {"n": 5}}
        return Engine().count(CountTask(metric=goal, **where, **case))

    return ask


def test_process_sides_are_counted_in_their_own_environment(count):
    assert count("fragmentation") == {"baseline": 5.0, "optimized": 5.0 + 24}


def test_an_error_in_a_process_side_is_reported(count):
    from pytest_aisp.worker.process_timer import ProcessFailed

    text = PROCESSES.replace("return x + x", "raise ValueError('no memory at all')")
    with pytest.raises(ProcessFailed, match=r"added in a fresh process: .*no memory at all"):
        count("fragmentation", text)


def test_energy_of_process_sides_is_refused(count):
    with pytest.raises(Uncountable, match="the processes of a process side end before that"):
        count("energy")
