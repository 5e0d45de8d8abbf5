"""A killed xdist worker loses only the case that it was running."""

from __future__ import annotations

import json

import pytest
from worker_processes import alive_workers, wait_for

pytestmark = pytest.mark.new_processes
IMPORTS = "import os, signal, time"
# The parent of a worker process is the xdist worker, and it dies with its parent.
KILL = "(os.kill(os.getppid(), signal.SIGKILL), time.sleep(1000))"
HEALTHY = ("first", "middle", "zenith")
CULPRIT = "ch99/kills_test.py::test_doubling[doubled-n1001]"


def test_a_killed_xdist_worker_loses_only_its_case(page, gpu, pytester):
    gpu(added=2e-5, doubled=1e-5)
    for name in HEALTHY:
        page(name=f"{name}_test.py")
    update = ["--aisp-update-expectations", "--aisp-processes=1", "ch99/first_test.py"]
    assert pytester.runpytest_subprocess(*update).ret == 0
    stored = pytester.path / "baselines" / "simulated-gpu" / "ch99.json"
    before = stored.read_bytes()
    page(KILL, defs=IMPORTS, name="kills_test.py")
    result = pytester.runpytest_subprocess("-n2", "--aisp-artifacts=kept")
    culprit = CULPRIT.replace("[", "[[]")
    result.stdout.fnmatch_lines(
        [
            f"worker 'gw?' crashed while running '{culprit}'",
            "=* aisp =*",
            f"NO VERDICT: worker 'gw?' crashed while running '{culprit}'",
            "=* 1 failed, 1 passed, 2 new in *",
        ]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    rows = map(json.loads, (pytester.path / "kept" / "results.jsonl").read_text().splitlines())
    verdicts = {row["page"].rpartition("/")[2]: row["verdict"] for row in rows}
    assert verdicts == {"first_test.py": "pass", "middle_test.py": "new", "zenith_test.py": "new"}
    assert stored.read_bytes() == before
    wait_for(lambda: not alive_workers(pytester.path))


# The second page waits for the machine while the first page holds it.
TURNS = """
import os
import time

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    from pytest_aisp.session.options import RUN

    if "second" in item.nodeid:
        while not os.path.exists("held"):
            time.sleep(0.05)
        item.config.stash[RUN].progress = lambda text: open("said", "a").write(text)
    return (yield)
"""
HOLD = """
def hold(x):
    open("held", "w").close()
    while not os.path.exists("said"):
        time.sleep(0.05)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)
"""


@pytest.mark.slow
def test_a_killed_xdist_worker_releases_the_machine(page, gpu, pytester):
    gpu(added=2e-5, doubled=1e-5)
    with open(pytester.path / "conftest.py", "a") as conftest:
        conftest.write(TURNS)
    page("hold(x)", defs=f"{IMPORTS}\n{HOLD}", name="first_test.py", bound='"host"')
    page(name="second_test.py", bound='"host"')
    result = pytester.runpytest_subprocess("-n2")
    progress = (pytester.path / "said").read_text()
    assert progress.startswith("wait for host, which another run holds")
    result.stdout.fnmatch_lines(["worker 'gw?' crashed while running 'ch99/first_test.py::*'"])
    result.stdout.fnmatch_lines(["second *doubled *new", "=* 1 failed, 1 new in *"])
    wait_for(lambda: not alive_workers(pytester.path))


LATE = """


def pytest_handlecrashitem(crashitem, report, sched):
    from pytest_aisp.session.options import RUN

    sched.config.stash[RUN].started -= 1e6
"""


@pytest.mark.slow
def test_a_replacement_worker_has_only_the_remaining_time_of_the_run(page, gpu, pytester):
    gpu(added=2e-5, doubled=1e-5)
    with open(pytester.path / "conftest.py", "a") as conftest:
        conftest.write(LATE)
    page(KILL, defs=IMPORTS, name="first_test.py")
    page(name="second_test.py")
    result = pytester.runpytest_subprocess("-n1", "-o", "aisp_suite_timeout=100000")
    result.stdout.fnmatch_lines(["=* aisp =*", "NO VERDICT: worker 'gw0' crashed while running *"])
    result.stdout.fnmatch_lines(["!* aisp_suite_timeout: 100000 s have passed !*"])
    assert result.ret == pytest.ExitCode.INTERRUPTED
