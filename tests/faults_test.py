"""If a side crashes or hangs, or a run is interrupted, other cases keep their verdicts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from worker_processes import alive_workers, wait_for

from pytest_aisp.results.messages import CheckTask, DrawTask, PrepareTask, case_fields
from pytest_aisp.worker import client
from pytest_aisp.worker.client import WorkerProcess

IMPORTS = "import ctypes, os, signal, sys, time"
ERROR = "E       AssertionError: doubled at n=33:"
DIED = f"{ERROR} the worker process ended"
# By page: the expression of its optimized side, and lines of the failure.
FAULTS = {
    "exits": ("os._exit(3)", [f"{DIED} with exit code 3 during: check doubled"]),
    "leaves": ("sys.exit(4)", [f"{DIED} with exit code 4 during: check doubled"]),
    "kills": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        [f"{DIED} by SIGKILL during: check doubled"],
    ),
    "crashes": (
        "ctypes.string_at(0)",
        [
            f"{DIED} by SIGSEGV during: check doubled",
            "*Segmentation fault*",
            'E         File "*ch99/crashes_test.py", line * in doubled',
        ],
    ),
    "hangs": (
        "time.sleep(1000)",
        [
            f"{ERROR} no answer within 2 s during: check doubled",
            "E       allow more time with -o aisp_timeout_multiplier=2",
        ],
    ),
    "fills": (
        "torch.empty(1 << 50)",
        [
            f"{ERROR} out of memory: * during: check doubled",
            "E           return torch.empty(1 << 50)",
        ],
    ),
}
HEALTHY = ("first", "middle", "zenith")
WORKERS = {"alone": [], "n2": ["-n2"]}


def limited(path):
    """Give the page's case a time limit of one second, which the option doubles."""
    marked = path.read_text().replace("@compare(", "@pytest.mark.aisp_timeout(1)\n@compare(")
    path.write_text(marked)


@pytest.fixture(params=WORKERS)
def run(request, page, pytester, read_junit, module_cache):
    """A run of all faulty pages and of healthy ones, with and without xdist workers."""
    if request.param not in module_cache:
        for name, (optimized, _) in FAULTS.items():
            page(optimized, defs=IMPORTS, name=f"{name}_test.py")
        limited(page(FAULTS["hangs"][0], defs=f"{IMPORTS}\nimport pytest", name="hangs_test.py"))
        for name in HEALTHY:
            page(name=f"{name}_test.py")
        page(defs=f"{IMPORTS}\n\ndef added(x):\n    os._exit(5)", name="baseline_test.py")
        options = ["--aisp-check", "-o", "aisp_timeout_multiplier=2", "--junitxml=junit.xml"]
        result = pytester.runpytest_subprocess(*options, *WORKERS[request.param])
        result.stdout.fnmatch_lines(["=* 7 failed, 3 checked in *"])
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        assert alive_workers(pytester.path) == []
        module_cache[request.param] = read_junit(pytester.path / "junit.xml")
    return module_cache[request.param]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_its_case_with_side_size_cause_and_line(run, name):
    lines = run[name].failure.splitlines()
    pytest.LineMatcher(lines).fnmatch_lines(FAULTS[name][1])
    assert run[name].verdict == "fail"
    assert "pytest_aisp/" not in run[name].failure


def test_the_marker_sets_the_time_limit_of_a_case(run):
    """The marker gives one second, which the option doubles."""
    assert "no answer within 2 s during: check doubled" in run["hangs"].failure


def test_a_fault_of_the_baseline_names_the_baseline(run):
    line = f"{DIED} with exit code 5 during: check added"
    assert line in run["baseline"].failure.splitlines()


def test_all_other_cases_have_their_verdicts(run):
    assert [run[name].verdict for name in HEALTHY] == ["checked"] * 3


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
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, _, its_session, *_ = path.read_text().rpartition(")")[2].split()
            found += [int(path.parent.name)] * (state != "Z" and int(its_session) == session)
    return found


def check_task(path):
    """Return the task that checks a page."""
    return CheckTask(
        page=str(path),
        root=str(path.parent.parent),
        module="ch99.doubling_test",
        function="test_doubling",
        variant="doubled",
        size={"n": 1001},
    )


@pytest.fixture
def worker():
    """Return a function that starts a worker process."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(WorkerProcess()))


def quiet(text):
    """Ignore progress."""


PREPARE = {"side": "optimized", "clock": "host", "counted": 1, "slots": 2}
SANDBOXED = {"draw": (DrawTask, {"values": "values.pt"}), "prepare": (PrepareTask, PREPARE)}


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize("kind", SANDBOXED)
def test_an_error_in_a_sandboxed_side_names_its_size(page, worker, kind):
    path = page(defs="def inputs(device, n):\n    return (torch.zeros(3)[n],)")
    task_type, given = SANDBOXED[kind]
    task = task_type(**case_fields(check_task(path)) | {"at": "check"}, **given)
    reply = worker().ask(task, 500, quiet)
    assert (reply.error, reply.at) == ("side", "n=33")
    assert reply.message.endswith(f"with size 3, during: {kind}")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs python -P, of 3.11")
def test_modules_in_the_current_folder_replace_no_library(page, pytester, worker):
    pytester.makepyfile(statistics="raise ImportError('not me')")
    pytester.mkpydir("torch")
    reply = worker().ask(check_task(page()), 500, quiet)
    assert (reply.error, list(reply.result["sizes"])) == (None, ["n=33", "n=1001"])


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize(("optimized", "how"), LASTING.values(), ids=LASTING)
def test_a_thread_or_child_of_a_side_does_not_delay_the_reply(page, worker, optimized, how):
    path = page(optimized, defs=f"{IMPORTS}\nimport subprocess, threading")
    process = worker()
    start = time.monotonic()
    reply = process.ask(check_task(path), 500, quiet)
    assert time.monotonic() - start < 300
    message = f"the worker process {how} during: check doubled"
    assert (reply.error, reply.message, reply.at) == ("died", message, "n=33")
    wait_for(lambda: not members(process.pid))


SLOW = """#!{python}
import os, sys, time

time.sleep(2)
os.write(int(sys.argv[-1]), b'{{"type": "progress", "text": "ready"}}\\n')
time.sleep({seconds})
os.write(int(sys.argv[-1]), b'{{"type": "reply", "result": {{"found": 1}}}}\\n')
"""
LAST = """#!{python}
import os, sys, time

reply = b'{{"type": "reply", "result": {{"found": 1}}, "exhausted": {exhausted}}}\\n'
os.write(int(sys.argv[-1]), reply)
time.sleep(1000)
"""


@pytest.fixture
def interpreter(monkeypatch, tmp_path):
    """Replace the interpreter of worker processes with a script."""

    def write(script, **values):
        path = tmp_path / "python"
        path.write_text(script.format(python=sys.executable, **values))
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return write


@pytest.mark.parametrize(("seconds", "error"), [(0, None), (1000, "timeout")])
def test_the_time_limit_starts_when_the_process_is_ready(interpreter, worker, seconds, error):
    interpreter(SLOW, seconds=seconds)
    assert worker().ask(CheckTask(), 1.5, quiet).error == error


def test_a_longer_limit_also_allows_a_longer_start(interpreter, worker, monkeypatch):
    interpreter(SLOW, seconds=0)
    monkeypatch.setattr(client, "START_SECONDS", 0.2)
    late = "no answer within 0.7 s during: start\nallow more time with -o aisp_timeout_multiplier=2"
    assert worker().ask(CheckTask(), 0.5, quiet).message == late
    assert worker().ask(CheckTask(), 60, quiet).message == ""


@pytest.mark.parametrize(("exhausted", "alive"), [("false", True), ("true", False)])
def test_an_exhausted_process_is_ended(interpreter, worker, exhausted, alive):
    interpreter(LAST, exhausted=exhausted)
    process = worker()
    reply = process.ask(CheckTask(), 9, quiet)
    assert (reply.error, reply.result, process.alive) == (None, {"found": 1}, alive)


ENDLESS = """
def endless(x):
    while not os.path.getsize("kept/results.jsonl"):
        time.sleep(0.05)
    open("busy", "w").close()
    time.sleep(1000)
"""


def accept_interrupts():
    """Undo in a child that `nohup` and a shell's `&` ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def busy(request, page, pytester):
    """A running pytest whose first case is finished and whose second one never ends."""
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
            preexec_fn=accept_interrupts,
        )
        wait_for((pytester.path / "busy").exists)
        yield process
        process.kill()
        process.wait()
    for left in alive_workers(pytester.path):  # only where a test failed
        os.kill(left, signal.SIGKILL)


ENDS = {
    "n0-term": ("-n0", os.kill, signal.SIGTERM, ()),
    "n0-int": ("-n0", os.kill, signal.SIGINT, ()),
    "n2-term": ("-n2", os.kill, signal.SIGTERM, ()),
    "n2-int": ("-n2", os.kill, signal.SIGINT, pytest.mark.slow),
    "n2-group-term": ("-n2", os.killpg, signal.SIGTERM, pytest.mark.slow),
    "n2-group-int": ("-n2", os.killpg, signal.SIGINT, ()),
}


@pytest.mark.parametrize(
    ("busy", "send", "number"),
    [pytest.param(*end[:3], id=name, marks=end[3]) for name, end in ENDS.items()],
    indirect=["busy"],
)
def test_an_interrupted_run_keeps_finished_cases(busy, pytester, number, send):
    send(busy.pid, number)  # it leads its process group
    assert busy.wait(timeout=120) == pytest.ExitCode.INTERRUPTED
    pytest.LineMatcher((pytester.path / "log").read_text().splitlines()).fnmatch_lines(
        ["=* aisp =*", "first *doubled *checked", "!* KeyboardInterrupt* !*", "=* 1 checked in *"]
    )
    rows = (pytester.path / "kept" / "results.jsonl").read_text().splitlines()
    assert [json.loads(row)["verdict"] for row in rows] == ["checked"]
    ended = json.loads((pytester.path / "kept" / "manifest.json").read_text())
    assert (ended["complete"], ended["exit_code"]) == (False, pytest.ExitCode.INTERRUPTED)
    wait_for(lambda: alive_workers(pytester.path) == [])


@pytest.mark.parametrize("busy", ["-n0"], indirect=True)
def test_a_worker_process_dies_with_the_run(busy, pytester):
    assert alive_workers(pytester.path)
    busy.kill()
    busy.wait()
    wait_for(lambda: alive_workers(pytester.path) == [])
