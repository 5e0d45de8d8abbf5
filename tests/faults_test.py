"""What a side may do to its process, and a user to the run: the other cases keep their verdicts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from worker_processes import alive_workers, wait_for

from pytest_aisp.results.messages import CheckTask, DrawTask, PrepareTask, case_fields
from pytest_aisp.worker import client
from pytest_aisp.worker.client import WorkerProcess

pytestmark = pytest.mark.new_processes
IMPORTS = "import ctypes, os, signal, sys, time"
DIED = "E       AssertionError: doubled at n=33: the worker process ended"
# By page: what its optimized side does, and a line of the failure.
FAULTS = {
    "exits": ("os._exit(3)", f"{DIED} with exit code 3 during: check doubled"),
    "leaves": ("sys.exit(4)", f"{DIED} with exit code 4 during: check doubled"),
    "kills": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        f"{DIED} by SIGKILL during: check doubled",
    ),
    "crashes": ("ctypes.string_at(0)", f"{DIED} by SIGSEGV during: check doubled"),
    "hangs": (
        "time.sleep(1000)",
        "E       AssertionError: doubled at n=33: no answer within 8 s during: check doubled",
    ),
    "fills": (
        "torch.empty(1 << 50)",
        "E       AssertionError: doubled at n=33: out of memory: * during: check doubled",
    ),
}
HEALTHY = ("first", "middle", "zenith")
WORKERS = {"alone": [], "n2": ["-n2"]}


@pytest.fixture(params=WORKERS)
def run(request, page, pytester, read_junit, module_cache):
    """A run of every faulty page and of healthy ones among them, with and without workers."""
    if request.param not in module_cache:
        for name, (optimized, _) in FAULTS.items():
            page(optimized, defs=IMPORTS, name=f"{name}_test.py")
        for name in HEALTHY:
            page(name=f"{name}_test.py")
        page(defs=f"{IMPORTS}\n\ndef added(x):\n    os._exit(5)", name="baseline_test.py")
        options = ["--aisp-check", "-o", "aisp_timeout=8", "--junitxml=junit.xml"]
        module_cache[request.param] = {
            "result": pytester.runpytest_subprocess(*options, *WORKERS[request.param]),
            "left": alive_workers(pytester.path),
            "told": read_junit(pytester.path / "junit.xml"),
        }
    return module_cache[request.param]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_red_and_names_side_size_and_what_happened(run, name):
    told = run["told"][name]
    pytest.LineMatcher(told.failure.splitlines()).fnmatch_lines([FAULTS[name][1]])
    assert told.verdict == "fail"


def test_a_fault_of_the_baseline_names_the_baseline(run):
    line = f"{DIED} with exit code 5 during: check added"
    assert line in run["told"]["baseline"].failure.splitlines()


def test_every_other_case_has_its_verdict(run):
    assert [run["told"][name].verdict for name in HEALTHY] == ["checked"] * 3
    run["result"].stdout.fnmatch_lines(["=* 7 failed, 3 checked in *"])
    assert run["result"].ret == pytest.ExitCode.TESTS_FAILED


def test_no_worker_process_is_left(run):
    assert run["left"] == []


def test_a_crash_shows_the_line_of_the_side_and_none_of_ours(run):
    failure = run["told"]["crashes"].failure
    lines = ["*Segmentation fault*", 'E         File "*ch99/crashes_test.py", line * in doubled']
    pytest.LineMatcher(failure.splitlines()).fnmatch_lines(lines)
    assert "pytest_aisp/" not in failure


def test_out_of_memory_shows_the_line_that_asked_for_it(run):
    assert "E           return torch.empty(1 << 50)" in run["told"]["fills"].failure.splitlines()


def test_a_hang_says_how_to_give_it_longer(run):
    line = "E       give it longer with -o aisp_timeout_multiplier=2"
    assert line in run["told"]["hangs"].failure.splitlines()


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_the_marker_sets_the_limit_of_a_case(page, pytester, workers):
    page("time.sleep(1000)", defs=f"{IMPORTS}\nimport pytest").write_text(
        (pytester.path / "ch99/doubling_test.py")
        .read_text()
        .replace("@compare(", "@pytest.mark.aisp_timeout(1)\n@compare(")
    )
    options = ["--aisp-check", "-o", "aisp_timeout_multiplier=2", workers]
    result = pytester.runpytest_subprocess(*options)
    result.stdout.fnmatch_lines(["*doubled at n=33: no answer within 2 s during: check doubled"])


CRASHES = "os.kill(os.getpid(), signal.SIGSEGV)"
LASTING = {
    "thread": (
        "threading.Thread(target=time.sleep, args=(1000,)).start(), sys.exit(3)",
        "exited, but a thread of a side keeps it alive",
    ),
    "fork": (f"os.fork() and {CRASHES} or time.sleep(1000)", "ended by SIGSEGV"),
    "spawn": (
        f"subprocess.Popen(['sleep', '1000'], close_fds=False), {CRASHES}",
        "ended by SIGSEGV",
    ),
}


def members(session: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, _, its_session, *_ = path.read_text().rpartition(")")[2].split()
            found += [int(path.parent.name)] * (state != "Z" and int(its_session) == session)
    return found


def checked(path):
    """Return the task that checks a page."""
    return CheckTask(
        page=str(path),
        root=str(path.parent.parent),
        module="ch99.doubling_test",
        function="test_doubling",
        variant="doubled",
        size={"n": 1001},
    )


PREPARE = {"side": "optimized", "clock": "host", "counted": 1, "slots": 2}
SANDBOXED = {"draw": (DrawTask, {"values": "values.pt"}), "prepare": (PrepareTask, PREPARE)}


@pytest.mark.parametrize("kind", SANDBOXED)
def test_what_is_run_apart_says_at_which_size(page, kind):
    path = page(defs="def inputs(device, n):\n    return (torch.zeros(3)[n],)")
    task_type, given = SANDBOXED[kind]
    task = task_type(**case_fields(checked(path)) | {"at": "check"}, **given)
    bench = WorkerProcess()
    try:
        reply = bench.ask(task, 500, lambda text: None)
    finally:
        bench.close()
    assert (reply.error, reply.at) == ("side", "n=33")
    assert reply.message.endswith(f"with size 3, during: {kind}")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs python -P, of 3.11")
def test_a_module_in_the_current_folder_takes_nobodys_place(page, pytester):
    pytester.makepyfile(statistics="raise ImportError('not me')")
    pytester.mkpydir("torch")
    bench = WorkerProcess()
    try:
        reply = bench.ask(checked(page()), 500, lambda text: None)
    finally:
        bench.close()
    assert (reply.error, list(reply.result["sizes"])) == (None, ["n=33", "n=1001"])


@pytest.mark.parametrize("what", LASTING)
def test_what_outlives_a_side_keeps_nobody_waiting(page, what):
    optimized, how = LASTING[what]
    path = page(optimized, defs=f"{IMPORTS}\nimport subprocess, threading")
    bench = WorkerProcess()
    try:
        since = time.monotonic()
        reply = bench.ask(checked(path), 500, lambda text: None)
        assert time.monotonic() - since < 300
        message = f"the worker process {how} during: check doubled"
        assert (reply.error, reply.message, reply.at) == ("died", message, "n=33")
        wait_for(lambda: not members(bench.pid))
    finally:
        bench.close()


SLOW = """#!{python}
import os, sys, time

time.sleep(2)
os.write(int(sys.argv[-1]), b'{{"type": "progress", "text": "ready"}}\\n')
time.sleep({answers_after})
os.write(int(sys.argv[-1]), b'{{"type": "reply", "result": {{"found": 1}}}}\\n')
"""


@pytest.mark.parametrize(("answers_after", "error"), [(0, None), (1000, "timeout")])
def test_the_limit_counts_from_when_the_process_is_ready(
    monkeypatch, tmp_path, answers_after, error
):
    python = tmp_path / "python"
    python.write_text(SLOW.format(python=sys.executable, answers_after=answers_after))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    bench = WorkerProcess()
    try:
        assert bench.ask(CheckTask(), 1.5, lambda text: None).error == error
    finally:
        bench.close()


def test_a_longer_limit_is_longer_for_the_start_too(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text(SLOW.format(python=sys.executable, answers_after=0))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(client, "START_SECONDS", 0.2)
    said = []
    for seconds in (0.5, 60):
        bench = WorkerProcess()
        try:
            said.append(bench.ask(CheckTask(), seconds, lambda text: None).message)
        finally:
            bench.close()
    late = "no answer within 0.7 s during: start\ngive it longer with -o aisp_timeout_multiplier=2"
    assert said == [late, ""]


LAST = """#!{python}
import os, sys, time

reply = b'{{"type": "reply", "result": {{"found": 1}}, "exhausted": {exhausted}}}\\n'
os.write(int(sys.argv[-1]), reply)
time.sleep(1000)
"""


@pytest.mark.parametrize(("exhausted", "alive"), [("false", True), ("true", False)])
def test_a_process_that_is_exhausted_is_asked_no_more(monkeypatch, tmp_path, exhausted, alive):
    python = tmp_path / "python"
    python.write_text(LAST.format(python=sys.executable, exhausted=exhausted))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    bench = WorkerProcess()
    try:
        reply = bench.ask(CheckTask(), 9, lambda text: None)
        assert (reply.error, reply.result, bench.alive) == (None, {"found": 1}, alive)
    finally:
        bench.close()


ENDLESS = """
def endless(x):
    while not os.path.getsize("kept/results.jsonl"):  # the other case may be another worker's
        time.sleep(0.05)
    open("busy", "w").close()
    time.sleep(1000)
"""


def hears_interrupts():
    """Undo in a child what `nohup` and a shell's `&` hand down: an ignored SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def busy(request, page, pytester):
    """A running pytest whose first case is finished, and whose second one never ends."""
    page(name="first_test.py")
    page("endless(x)", defs=f"{IMPORTS}\n{ENDLESS}", name="second_test.py")
    command = [sys.executable, "-m", "pytest", request.param]
    command += ["--aisp-check", "--aisp-artifacts=kept"]
    with open(pytester.path / "log", "wb") as log:
        process = pytester.popen(
            command,
            log,
            subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=hears_interrupts,
        )
        wait_for((pytester.path / "busy").exists)
        yield process
        process.kill()
        process.wait()
    for left in alive_workers(pytester.path):  # only where a test failed
        os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("busy", "send"),
    [("-n0", os.kill), ("-n2", os.kill), ("-n2", os.killpg)],
    ids=["n0", "n2", "n2-group"],
    indirect=["busy"],
)
def test_an_interrupt_keeps_what_is_finished(busy, pytester, number, send):
    send(busy.pid, number)  # a process started in a session of its own leads its group
    assert busy.wait(timeout=120) == pytest.ExitCode.INTERRUPTED
    pytest.LineMatcher((pytester.path / "log").read_text().splitlines()).fnmatch_lines(
        ["=* aisp =*", "first *doubled *checked", "!* KeyboardInterrupt* !*", "=* 1 checked in *"]
    )
    rows = (pytester.path / "kept" / "results.jsonl").read_text().splitlines()
    assert [json.loads(row)["verdict"] for row in rows] == ["checked"]
    ended = json.loads((pytester.path / "kept" / "manifest.json").read_text())
    assert (ended["complete"], ended["exit_code"]) == (False, pytest.ExitCode.INTERRUPTED)
    wait_for(lambda: alive_workers(pytester.path) == [])  # a worker's goes when the kernel ends it


@pytest.mark.parametrize("busy", ["-n0"], indirect=True)
def test_a_worker_process_dies_with_the_run(busy, pytester):
    assert len(alive_workers(pytester.path)) == 1
    busy.kill()
    busy.wait()
    wait_for(lambda: alive_workers(pytester.path) == [])
