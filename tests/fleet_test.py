"""Fleets on a Ray cluster of simulated nodes: one run, its reports, and its faults."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path
from statistics import median

import pytest
from fleet_cluster import CONFTEST, NEEDS_RAY, RayCluster, processes_of, stop
from worker_processes import wait_for

from pytest_aisp.cli import app
from pytest_aisp.util.plugin_digest import PACKAGE

pytestmark = NEEDS_RAY
CLIENT_PORT = 10011
BUSY = pytest.mark.slow
"""Tests that start several processes for each seat, on a machine with few cores."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster that the tests of this file share. Each test adds the nodes that it needs."""
    folder = tmp_path_factory.mktemp("ray")
    for name in ("a1", "a2", "b1"):
        (folder / f"leases-{name}").mkdir()
    started = RayCluster(folder, ray_client_server_port=CLIENT_PORT)
    started.folder = folder
    yield started
    started.close()


@pytest.fixture(scope="module")
def products(cluster):
    """Add the nodes of products a and b."""
    cluster.add("a1", "simulated-a")
    cluster.add("b1", "simulated-b", arch="sm100", SECRET_OF_NODE="kept")
    return cluster


@pytest.fixture
def own_nodes(cluster):
    """Add nodes for one test, and kill them after it."""
    added = []

    def add(name, product, **options):
        (cluster.folder / f"leases-{name}").mkdir(exist_ok=True)
        cluster.add(name, product, **options)
        added.append(name)

    yield add
    for name in added:
        cluster.kill(name)


@pytest.fixture
def suite(pytester, page):
    """Write a suite: pages by their names, and a file of plain tests."""

    def write(*pages, tests=""):
        pytester.makeconftest(CONFTEST)
        for name in pages:
            page(name=f"{name}_test.py")
        page(name="unused_test.py").unlink()  # at least it writes the ini file
        if tests:
            (pytester.path / "plain_test.py").write_text(tests)
        return pytester.path

    return write


@pytest.fixture
def fleet(pytester, cluster):
    """Run a suite by a fleet of a product."""

    def run(product, *args):
        where = [f"--aisp-fleet={cluster.address}", f"--aisp-fleet-products={product}"]
        return pytester.runpytest_subprocess(*where, *args)

    return run


@pytest.fixture
def start(pytester, cluster):
    """Start a fleet run that goes on while the test does something else."""
    started = []

    def run(product, *args, address=None):
        command = [sys.executable, "-m", "pytest", f"--aisp-fleet={address or cluster.address}"]
        command += [f"--aisp-fleet-products={product}", *args]
        process = subprocess.Popen(
            command,
            cwd=pytester.path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


ENVIRONMENT = """
import os

import pytest


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONPATH", "AWS_SECRET_ACCESS_KEY"])
def test_is_not_set(name):
    assert name not in os.environ


def test_nothing_of_ray_is_left():
    assert not [name for name in os.environ if name.startswith("RAY_")]


def test_listed_variables_arrive():
    assert os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] == "1"


def test_runs_at_the_usual_priority():
    assert os.nice(0) == 0


def test_uncommitted_text_is_here(request):
    assert (request.config.rootpath / "note.txt").read_text() == "changed"


@pytest.mark.xfail(reason="known")
def test_known():
    assert False


def test_skips():
    pytest.skip("on purpose")


def test_cannot_be_pickled(record_property):
    record_property("odd", lambda: 1)
"""


def test_a_suite_runs_on_two_products(suite, products, fleet, commit, monkeypatch, capsys):
    folder = suite("kept", tests=ENVIRONMENT)
    (folder / "note.txt").write_text("committed")
    commit()
    (folder / "note.txt").write_text("changed")
    monkeypatch.delenv("OMP_NUM_THREADS")  # a fleet ships it, and Ray sets it
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    files = ("--aisp-artifacts=kept-run", "--junitxml=junit.xml", "--aisp-against=HEAD")
    result = fleet("simulated-a,simulated-b", "-v", *files)
    case = "ch99/kept_test.py::test_doubling[[]doubled-n1001@simulated-"
    result.stdout.fnmatch_lines_random(
        [
            "aisp: measure by the fleet at *: simulated-a, simulated-b",
            "aisp: a1: simulated-a x 2",
            f"[[]a1-*[]] [[]*[]] NEW 1.99* simulated {case}a[]]*",
            f"[[]b1-*[]] [[]*[]] NEW 1.99* simulated {case}b[]]*",
            "[[]a1-*[]] [[]*[]] SKIPPED *test_skips*",
            "*the report of plain_test.py::test_cannot_be_pickled cannot be sent*",
            "kept@simulated-a  doubled *",
            "canary: test_doubling[[]doubled-n1001[]] on the graph clock: *",
        ]
    )
    result.assert_outcomes(passed=7, failed=1, errors=1, skipped=1, xfailed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    rows = [json.loads(line) for line in Path("kept-run/results.jsonl").read_text().splitlines()]
    assert sorted(row["product"] for row in rows) == ["simulated-a", "simulated-b"]
    assert {Path(row["file"]).parents[2] for row in rows} == {folder}
    assert len({row["nodeid"] for row in rows}) == 2
    assert Path("kept-run/report.html").exists()
    assert len(list(ElementTree.parse("junit.xml").iter("testcase"))) == 13
    manifest = json.loads(Path("kept-run/manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["machine"]["name"] == "a fleet: a1 (simulated-a x 2), b1 (simulated-b x 2)"
    capsys.readouterr()
    app.main(["ci", "gate", "kept-run", "--products=simulated-a,simulated-b"])
    gate = capsys.readouterr().out
    assert "(simulated-a, simulated-b)" in gate
    assert "missing" not in gate
    wait_for(lambda: not processes_of(products.folder))
    assert not list(products.folder.glob("trees-*/*/tree"))


FAILS = """
import pytest


@pytest.mark.parametrize("number", range(40))
def test_fails(number):
    assert number != 3
"""


@BUSY
def test_selection_and_the_end_after_a_failure_are_this_sessions(suite, products, fleet):
    suite(tests=FAILS)
    result = fleet("simulated-a", "-k", "test_fails and not 30", "--maxfail=1")
    result.stdout.fnmatch_lines(["!* stopping after 1 failures !*"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes()["deselected"] == 1
    again = fleet("simulated-a", "--lf")
    again.assert_outcomes(failed=1)


def test_a_product_without_a_good_node_is_named_and_red(suite, fleet, own_nodes):
    own_nodes("slow", "simulated-none", RAY_worker_niceness="15")
    suite(tests="def test_it():\n    pass\n")
    result = fleet("simulated-none", "-o", "aisp_fleet_wait=1", "--junitxml=junit.xml")
    result.stdout.fnmatch_lines(
        [
            "aisp: slow is refused: Ray runs its workers at nice 15, and everything else would *",
            "aisp: Start Ray there with: RAY_worker_niceness=0 ray start ..., or aisp fleet start",
            "no node of simulated-none for 1 s (aisp_fleet_wait)",
            "    aisp fleet start --address=HEAD:6379",
            "=* 1 failed in *",
        ]
    )
    [missing] = ElementTree.parse("junit.xml").iter("property")
    assert missing.attrib == {"name": "aisp_missing", "value": "simulated-none"}


def test_a_node_with_other_code_of_the_plugin_is_refused_by_name(suite, fleet, own_nodes, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "lib/pytest_aisp")
    with open(tmp_path / "lib/pytest_aisp/timing/fake_device.py", "a") as file:
        file.write("\nCHANGED = True\n")
    own_nodes("changed", "simulated-other", PYTHONPATH=str(tmp_path / "lib"))
    suite(tests="def test_it():\n    pass\n")
    result = fleet("simulated-other", "-o", "aisp_fleet_wait=1")
    here = version("pytest-aisp")
    result.stdout.fnmatch_lines(
        [
            f"aisp: changed is refused: it has pytest-aisp {here}, with other code",
            "aisp: Install the same on both, for example one wheel",
            "no node of simulated-other for 1 s (aisp_fleet_wait)",
            "=* 1 failed in *",
        ]
    )


SLEEPS = """
import os
import time

import pytest


@pytest.mark.parametrize("number", range({count}))
def test_sleeps(number):
    open({folder!r} + f"/{{os.environ['BOARD']}}-{{number}}", "w").close()
    time.sleep({seconds})
"""


def sleeps(folder, count, seconds):
    (folder / "begun").mkdir(exist_ok=True)
    return SLEEPS.format(count=count, seconds=seconds, folder=str(folder / "begun"))


def begun(folder, board):
    return list((folder / "begun").glob(f"{board}-*"))


@BUSY
def test_a_node_killed_in_a_case_loses_nothing(suite, own_nodes, start, cluster, pytester):
    for name in ("k1", "k2", "k3"):
        own_nodes(name, "simulated-k", gpus=1)
    names = [f"p{number}" for number in range(4)]
    suite(*names, tests=sleeps(pytester.path, 16, 1.0))
    run = start("simulated-k", "-v", "--junitxml=junit.xml")
    wait_for(lambda: len(begun(pytester.path, "k2")) > 2)
    cluster.kill("k2")
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert "fleet: k2 lost a worker: " in output
    cases = [
        (case.attrib["classname"], case.attrib["name"])
        for case in ElementTree.parse("junit.xml").iter("testcase")
    ]
    assert len(cases) == len(set(cases)) == 20
    assert "NO CANARY" not in output


KILLS = """
import os
import shutil
import signal

import pytest


@pytest.mark.parametrize("number", range(6))
def test_it(number):
    if number == 2:
        os.kill({victim}, signal.SIGKILL)
"""


@BUSY
@pytest.mark.parametrize("victim", ["os.getpid()", "os.getppid()"], ids=["pytest", "worker"])
def test_a_case_that_kills_its_nodes_is_given_up_after_two(suite, own_nodes, fleet, victim):
    for name in ("d1", "d2", "d3"):
        own_nodes(name, "simulated-d", gpus=1)
    suite(tests=KILLS.format(victim=victim))
    result = fleet("simulated-d", "-v")
    result.stdout.fnmatch_lines(
        ["given up: d? and d? were lost while they ran it", "=* 1 failed, 5 passed in *"]
    )


@BUSY
def test_a_late_node_takes_work_and_ctrl_c_leaves_no_process(
    suite, own_nodes, start, cluster, pytester
):
    own_nodes("l1", "simulated-l", gpus=1)
    suite(tests=sleeps(pytester.path, 500, 0.3))
    run = start("simulated-l")
    wait_for(lambda: begun(pytester.path, "l1"))
    own_nodes("l2", "simulated-l", gpus=2)
    wait_for(lambda: begun(pytester.path, "l2"))
    assert processes_of(cluster.folder)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == pytest.ExitCode.INTERRUPTED, output
    assert "KeyboardInterrupt" in output
    wait_for(lambda: not processes_of(cluster.folder))


@BUSY
def test_a_killed_driver_leaves_no_process(suite, own_nodes, start, cluster, pytester):
    own_nodes("s1", "simulated-s", gpus=1)
    suite(tests=sleeps(pytester.path, 500, 0.3))
    run = start("simulated-s")
    wait_for(lambda: begun(pytester.path, "s1"))
    run.kill()
    wait_for(lambda: not processes_of(cluster.folder))


@BUSY
def test_a_node_that_hangs_is_avoided(suite, own_nodes, start, cluster, pytester):
    for name in ("h1", "h2"):
        own_nodes(name, "simulated-h", gpus=1)
    suite(tests=sleeps(pytester.path, 60, 1.0))
    run = start("simulated-h", "-v")
    wait_for(lambda: begun(pytester.path, "h1") and begun(pytester.path, "h2"))
    there = {p: os.readlink(f"/proc/{p}/cwd") for p in processes_of(cluster.folder)}
    [pid] = [p for p, folder in there.items() if "trees-h1" in folder]
    actor = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    stop(pid)
    stop(actor)
    output, _ = run.communicate(timeout=180)
    assert run.returncode == 0, output
    assert "fleet: h1 lost a worker: it was silent for 30 s" in output
    assert "=== 60 passed in " in output


@BUSY
def test_two_fleets_share_a_cluster(suite, own_nodes, start, pytester):
    own_nodes("t1", "simulated-t", gpus=1)
    suite(tests=sleeps(pytester.path, 5, 0.5))
    runs = [start("simulated-t"), start("simulated-t")]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs


@BUSY
def test_a_full_disk_on_a_node_is_named_and_its_cases_run_elsewhere(suite, own_nodes, fleet):
    own_nodes("full", "simulated-f", gpus=1, AISP_FLEET_FOLDER="/proc/no-space")
    own_nodes("free", "simulated-f", gpus=1)
    suite(tests=FAILS.replace("number != 3", "True"))
    result = fleet("simulated-f", "-v")
    result.stdout.fnmatch_lines(
        ["fleet: full lost a worker: ShippingError: the working tree cannot be unpacked in *"]
    )
    result.assert_outcomes(passed=40)


@pytest.fixture
def new_cluster(tmp_path):
    """Start clusters with one node each, to kill their heads."""
    started = []

    def new(node, product, **head):
        (tmp_path / f"leases-{node}").mkdir()
        started.append(RayCluster(tmp_path, **head))
        started[-1].add(node, product, gpus=1)
        return started[-1]

    yield new
    for cluster in started:
        cluster.close()


@BUSY
def test_a_run_whose_head_is_gone_goes_on_elsewhere(suite, start, new_cluster, pytester):
    first = new_cluster("g1", "simulated-g")
    suite("kept", tests=sleeps(pytester.path, 60, 0.5))
    run = start("simulated-g", "-v", "--junitxml=junit.xml", address=first.address)
    wait_for(lambda: len(begun(pytester.path, "g1")) > 5)
    first.kill("head")
    output, _ = run.communicate(timeout=120)
    assert run.returncode == pytest.ExitCode.INTERRUPTED, output
    kept = int(re.search(r"(\d+) of 61 cases are kept; go on with: aisp fleet resume", output)[1])
    assert kept > 4
    first.close()
    wait_for(lambda: not processes_of(pytester.path.parent))
    second = new_cluster("g2", "simulated-g")
    resume = [sys.executable, "-m", "pytest_aisp.cli", "fleet", "resume"]
    resumed = pytester.run(*resume, f"--address={second.address}")
    assert resumed.ret == 0
    resumed.stdout.fnmatch_lines(["=* 60 passed, 1 new in *"])
    assert len(list(ElementTree.parse("junit.xml").iter("testcase"))) == 61
    assert len(begun(pytester.path, "g2")) <= 60 - kept + 1
    again = pytester.run(*resume)
    again.stderr.fnmatch_lines(["no fleet run was interrupted here*"])


@BUSY
def test_a_fleet_is_used_from_outside_the_cluster(suite, own_nodes, cluster, start):
    own_nodes("c1", "simulated-c", gpus=1)
    host = cluster.address.partition(":")[0]
    suite(tests=FAILS)
    for _ in range(3):
        run = start("simulated-c", "-v", address=f"ray://{host}:{CLIENT_PORT}")
        output, _ = run.communicate(timeout=120)
        if "did not start a server for this client in time" not in output:
            break
    assert "=== 1 failed, 39 passed in " in output


@BUSY
def test_a_recording_uses_two_boards(suite, own_nodes, fleet, pytester):
    for name in ("r1", "r2"):
        own_nodes(name, "simulated-r", gpus=1)
    suite("kept")
    result = fleet("simulated-r", "--aisp-update-expectations", "--aisp-processes=2")
    assert result.ret == 0
    stored = json.loads((pytester.path / "baselines/simulated-r/ch99.json").read_text())
    assert {facts["board"] for facts in stored["environments"].values()} == {"r1", "r2"}
    [case] = stored["results"].values()
    assert len(case["values"]) == 2


TIMED = """
import os
import time

import pytest


@pytest.mark.parametrize("number", range({count}))
def test_timed(number):
    begun = time.time()
    time.sleep(0.3)
    with open({file!r}, "a") as log:
        log.write(f"{{os.getpid()}} {{begun}} {{time.time()}}\\n")
"""


def resident(pid):
    """Return the memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@BUSY
def test_a_thousand_cases_keep_sixteen_gpus_busy(
    suite, own_nodes, start, pytester, record_property
):
    for number in range(4):
        own_nodes(f"m{number}", "simulated-m", gpus=4)
    file = pytester.path / "times"
    file.touch()
    suite(tests=TIMED.format(count=1000, file=str(file)))
    run = start("simulated-m", "-q")
    memory = []
    for count in (300, 900):
        wait_for(lambda count=count: len(file.read_text().splitlines()) > count)
        memory.append(resident(run.pid))
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    spans, busy, gaps = {}, 0.0, []
    for line in file.read_text().splitlines():
        pid, begin, end = line.split()
        if pid in spans:
            gaps.append(float(begin) - spans[pid][1])
        spans[pid] = spans.get(pid, (float(begin),))[0], float(end)
        busy += float(end) - float(begin)
    total = sum(last - first for first, last in spans.values())
    figures = {"seats": len(spans), "share busy": round(busy / total, 3)}
    figures["ms a case"] = round(median(gaps) * 1e3, 1)
    figures["MiB"] = [round(each) for each in memory]
    record_property("figures", str(figures))
    print(figures)
    assert len(spans) == 16
    assert busy / total >= 0.9, figures
    assert median(gaps) < 0.02, figures
    assert memory[1] - memory[0] < 8, figures


LOGS = """


import time

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    begun = time.time()
    time.sleep(3)
    try:
        return (yield)
    finally:
        with open({file!r}, "a") as log:
            log.write(f"{{begun}} {{time.time()}}\\n")
"""


@BUSY
def test_cases_on_the_hosts_clock_take_turns_on_a_node(suite, own_nodes, fleet, page, pytester):
    own_nodes("w1", "simulated-w", gpus=2)
    suite()
    for name in ("first", "second"):
        page(name=f"{name}_test.py", bound='"host"')
    file = pytester.path / "times"
    with open(pytester.path / "conftest.py", "a") as conftest:
        conftest.write(LOGS.format(file=str(file)))
    result = fleet("simulated-w", "-v")
    assert result.ret == 0
    assert {"[w1-1]", "[w1-2]"} <= {line.partition(" ")[0] for line in result.outlines}
    (_, end), (begin, _) = sorted(
        tuple(map(float, line.split())) for line in file.read_text().splitlines()
    )
    assert end <= begin
