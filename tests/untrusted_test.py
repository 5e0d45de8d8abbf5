"""`--aisp-untrusted`: cheats inside the measuring process are detected from outside."""

from __future__ import annotations

import math
import time

import pytest
from worker_processes import ANY_LOAD

from pytest_aisp.checking.numerics import Wrong
from pytest_aisp.isolation import monkeypatches
from pytest_aisp.results.messages import PerformTask, PrepareTask, TimeTask
from pytest_aisp.session import sandbox_and_profile
from pytest_aisp.timing import cpu_timer
from pytest_aisp.util import cpu_load
from pytest_aisp.worker import sandbox
from pytest_aisp.worker.engine import Engine

# Each side returns a wrong answer that passes, because it runs where it is judged.
HOSTILE = {
    "replaces the comparison": """
    def doubled(x):
        from pytest_aisp.isolation import monkeypatches
        from pytest_aisp.checking import check, compare

        def kind(found, leaves, rule):
            right = [leaf.value.to(got.dtype) for got, leaf in zip(found, leaves)]
            return compare.compare_all(right, leaves, rule)

        check.compare_all, check.exact_probe = kind, lambda reference, sides: ""
        monkeypatches.replaced = lambda: None
        return torch.zeros_like(x)
    """,
    "switches the protections off": """
    def doubled(x):
        from pytest_aisp.isolation import protections

        protections._disabled = frozenset(protections.PROTECTIONS)
        return torch.zeros_like(x)
    """,
    "computes with the reference that it finds": """
    import gc

    def doubled(x):
        from pytest_aisp.checking.reference import Reference

        for thing in gc.get_objects():
            if isinstance(thing, Reference):
                return thing.pool.pair.reference(x).float()
        return torch.zeros_like(x)
    """,
}


def test_sides_that_attack_the_checks_fail_in_a_sandbox(page, pytester, read_junit):
    for number, defs in enumerate(HOSTILE.values()):
        page(defs=defs, name=f"hostile{number}_test.py")
    trusting = pytester.runpytest_subprocess("--aisp-check")
    assert trusting.ret == 0
    options = ["--aisp-check", "--aisp-untrusted", "--junitxml=junit.xml"]
    result = pytester.runpytest_subprocess(*options)
    assert result.ret == 1
    outcomes = read_junit(pytester.path / "junit.xml")
    assert [case.verdict for case in outcomes.values()] == ["wrong"] * len(HOSTILE)
    for case in outcomes.values():
        assert "doubled is wrong at n=33: output[" in case.failure


def test_an_honest_pair_passes_in_a_sandbox(page, pytester):
    page()
    result = pytester.runpytest_subprocess("--aisp-untrusted", "-vv", "--aisp-check")
    assert result.ret == 0
    for role in ("baseline", "optimized"):
        result.stdout.fnmatch_lines([f"*: {role} sandboxed: its outputs are right"])


STATE = """
import torch

from pytest_aisp import Work, compare

def inputs(device, n):
    return (torch.randn(n, device=device),)

def state(device, n):
    return {"total": torch.randn(n, device=device)}

def reference(state, x):
    state["total"].add_(x)
    return 2 * state["total"]

def added(state, x):
    state["total"].add_(x)
    return state["total"] + state["total"]

def doubled(state, x):
    state["total"] += x
    return 2 * state["total"]

@compare(
    baseline=added, optimized=[doubled], inputs=inputs, state=state, reference=reference,
    sizes=[{"n": 1001}], check_sizes=[{"n": 33}], bound="dram",
    work=lambda n: Work(read=8 * n, write=8 * n),
)
def test_doubling(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
"""


def test_a_state_is_compared_in_a_sandbox(page, pytester):
    page().write_text(STATE)
    result = pytester.runpytest_subprocess("--aisp-untrusted", "--aisp-check", "-vv")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*: optimized sandboxed: its outputs are right"])


@pytest.mark.parametrize("option", ["--aisp-in-process", "--aisp-replay=x"])
def test_modes_without_processes_are_refused(page, pytester, option):
    page()
    result = pytester.runpytest_subprocess("--aisp-untrusted", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--aisp-untrusted cannot be combined with *"])


CLOCK = """
def doubled(x):
    import time

    from pytest_aisp.timing import cpu_timer
    from pytest_aisp.isolation import monkeypatches

    monkeypatches.replaced = lambda: None
    cpu_timer.now_ns = lambda: time.perf_counter_ns() // 100
    return 2 * x
"""


def test_a_replaced_clock_is_detected_from_outside(page, monkeypatch):
    monkeypatch.setattr(cpu_load, "STOLEN", math.inf)
    for module, name in ((cpu_timer, "now_ns"), (monkeypatches, "replaced")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restores them
    path = page(defs=CLOCK)
    engine, module = Engine(), "untrusted_clock"
    common = {"page": str(path), "root": str(path.parent), "module": module, "variant": "doubled"}
    common |= {"function": "test_doubling", "size": {"n": 1001}, "side": "optimized"}
    short = {"blocks": 4, "least": 2, "seconds": 0.01, "window": 2e-4, "warmup": 3}
    timing = engine.time(TimeTask(budget=short, **common))
    prepare = PrepareTask(clock="cpu", counted=1, slots=2, **common)
    unit = engine.prepare(prepare).unit

    def work(units):
        start = time.perf_counter()
        engine.perform(PerformTask(units=units, **common))
        return time.perf_counter() - start

    seconds = sandbox.seconds_per_call(work, unit, at_least=0.01, times=3)
    assert sandbox_and_profile.contradicts(seconds, min(timing.optimized), "cpu")
    assert not sandbox_and_profile.contradicts(seconds, seconds, "cpu")


def test_seconds_per_call_doubles_the_work_until_the_pipe_does_not_count():
    requests = []

    def work(units):
        requests.append(units)
        return 0.001 + 0.0001 * units

    assert sandbox.seconds_per_call(work, 10, at_least=0.1, times=2) == pytest.approx(
        1.0e-5, rel=0.02
    )
    assert requests[:3] == [1, 10, 100]
    assert requests.count(requests[-1]) == 3


def test_files_of_a_sandboxed_side_are_never_executed(tmp_path):
    (tmp_path / "outputs.pt").write_bytes(b"os.system")

    def doubled(x):
        return 2 * x

    with pytest.raises(Wrong, match="doubled left no outputs that can be read"):
        sandbox._read(tmp_path / "outputs.pt", doubled)


def test_an_honest_pair_is_timed_in_a_sandbox(page, pytester):
    # Whether both times agree depends on how busy this machine is, so they are not compared.
    pytester.makeconftest(
        "import sys\nfrom pytest_aisp.session import sandbox_and_profile\n"
        f"sandbox_and_profile.LIMIT = {{}}\nsys.path.insert(0, {ANY_LOAD!r})\n"
    )
    page("x + x", more="cpu_sizes=[{'n': 99}],", at_least='"yardstick"')
    result = pytester.runpytest_subprocess("--aisp-untrusted", "-vv", "-k", "cpu")
    for role in ("baseline", "optimized"):
        result.stdout.fnmatch_lines([f"*: {role} sandboxed: its outputs are right"])
