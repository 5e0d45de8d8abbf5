"""A page on several ranks: correct pages, and pages on which one rank does something wrong."""

from __future__ import annotations

import contextlib
import os
import tempfile
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from worker_processes import ANY_LOAD, alive_workers, wait_for

from pytest_aisp.distributed.launcher import Nodes, RankSet
from pytest_aisp.results.messages import CheckTask, Task, TimeTask
from pytest_aisp.session.run_context import Failed, RunContext
from pytest_aisp.util.cpu_load import read_cpu
from pytest_aisp.util.device import Machine
from pytest_aisp.util.process_group import Ranks

PAGE = '''
    """Summing: the same sum."""

    import os
    import signal
    import time

    import torch
    import torch.distributed as dist

    from pytest_aisp import Conditions, Work, compare


    def inputs(device, n):
        return (torch.randn(n, device=device),)


    def reference(ranks):
        total = sum(x.double() for (x,) in ranks)
        return [total] * len(ranks)


    def summed(x):
        out = x.clone()
        dist.all_reduce(out)
        return out


    def other(x):
        {does}
        return summed(x)


    @compare(
        baseline=summed,
        optimized=[other],
        inputs=inputs,
        reference=reference,
        sizes=[{{"n": 1001}}],
        check_sizes=[{{"n": 33}}],
        work=lambda n: Work(wire=4 * n, terms=2),
        bound="latency",
        conditions=Conditions(gpus={gpus}),
    )
    def test_summing(pair):
        pair.assert_equivalent()
        pair.assert_speedup()
'''
LAST = "if dist.get_rank() == 1: "
AT = "during: check other"
# By page: what its optimized side does, and a line of the failure.
FAULTS = {
    "raises": (LAST + "raise ValueError('no')", f"other at n=33: rank 1: ValueError: no, {AT}"),
    "raise_all": ("raise ValueError('no')", f"other at n=33: ValueError: no, {AT}"),
    "exits": (LAST + "os._exit(3)", f"other at n=33: rank 1 ended with exit code 3 {AT}"),
    "crashes": (
        "if dist.get_rank() == 0: os.kill(os.getpid(), signal.SIGSEGV)",
        f"other at n=33: rank 0 ended by SIGSEGV {AT}",
    ),
    "hangs": (
        LAST + "time.sleep(1000)",
        "other at n=33: no answer within 12 s during: rank 1: check other, in other"
        " (hangs_test.py:30); rank 0 waits for it",
    ),
    "wrong": (LAST + "return summed(x) + 1", "rank 1: other is wrong at n=33*"),
    "wrong_all": ("return summed(x) + 1", "E       AssertionError: other is wrong at n=33*"),
    "alone": ("return 2 * x", "E       AssertionError: rank 0: other is wrong at n=33*"),
    "three": (
        "return summed(x)",
        "reference must return a list with the outputs of each of 2 ranks; it returned Tensor",
    ),
}
# Rank 0 starts a collective without the others. It must not affect the next page, which is healthy.
UNEVEN = "dist.get_rank() or dist.all_reduce(x.clone(), async_op=True); raise ValueError('no')"
FAULTS["yields"] = (UNEVEN, f"other at n=33: ValueError: no, {AT}")
HEALTHY = ("first", "zenith")


# By page: what its optimized side does at the sizes that a search draws, and the failure.
SEARCHES = {
    "searched": ("pass", ""),
    "wrong_above": ("return summed(x) + (x.numel() > 40)", "other is wrong at n=4[1-9]: *"),
    "one_above": (LAST + "return summed(x) + (x.numel() > 40)", "rank 1: other is wrong at n=4?*"),
}


def write(folder: Path, name: str, does: str = "pass", gpus: int = 2) -> Path:
    path = folder / "ch99" / f"{name}_test.py"
    path.parent.mkdir(exist_ok=True)
    text = textwrap.dedent(PAGE).format(does=does, gpus=gpus)
    if name == "three":
        text = text.replace("return [total] * len(ranks)", "return total")
    path.write_text(text)
    return path


@pytest.fixture
def run(page, pytester, read_junit, module_cache):
    """A run of every faulty page and of healthy ones among them."""
    if "outcome" not in module_cache:
        page()
        for name, (does, _) in FAULTS.items():
            write(pytester.path, name, does)
        for name in HEALTHY:
            write(pytester.path, name)
        options = ["--aisp-check", "-o", "aisp_timeout=12", "--junitxml=junit.xml", "ch99"]
        module_cache["result"] = pytester.runpytest_subprocess(*options)
        module_cache["folder"] = pytester.path
        module_cache["outcome"] = read_junit(pytester.path / "junit.xml")
    return module_cache


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fails_and_names_the_rank(run, name):
    outcome = run["outcome"][name]
    pytest.LineMatcher(outcome.failure.splitlines()).fnmatch_lines(["*" + FAULTS[name][1] + "*"])
    assert outcome.verdict == ("wrong" if name in ("wrong", "wrong_all", "alone") else "fail")


def test_healthy_pages_pass_between_faulty_ones(run):
    assert [run["outcome"][name].verdict for name in HEALTHY] == ["checked"] * 2
    assert run["result"].ret == pytest.ExitCode.TESTS_FAILED


def test_no_rank_survives_the_run(run):
    wait_for(lambda: alive_workers(run["folder"]) == [])  # the system ends them one after another


def test_a_failure_of_all_ranks_names_no_rank(run):
    for name in ("raise_all", "wrong_all"):
        assert "rank" not in run["outcome"][name].failure.splitlines()[-1]
        assert "rank 0:" not in run["outcome"][name].failure


def task(path: Path, kind: type[Task] = CheckTask, **more: object) -> Task:
    where = {"page": str(path), "root": str(path.parents[1]), "module": f"ch99.{path.stem}"}
    case = {"function": "test_summing", "variant": "other", "size": {"n": 1001}, "gpus": 2}
    return kind(**{"at": "check", **where, **case, **more})


SHORT = {"blocks": 4, "least": 4, "seconds": 0.05, "window": 1e-3}
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def ranks(forked_processes):
    started = []

    def start(count: int, nodes: Nodes | None = None) -> RankSet:
        started.append(RankSet(count, ENVIRONMENT, nodes))
        return started[-1]

    yield start
    for one in started:
        one.close()


def quiet(text: str) -> None:
    """Ignore progress."""


def test_ranks_answer_several_tasks_and_end_together(ranks, tmp_path):
    path = write(tmp_path, "twice")
    pair_of_ranks = ranks(2)
    for _ in range(2):
        assert pair_of_ranks.ask(task(path), 60, quiet).error is None
    assert len(pair_of_ranks.pids) == 3
    os.kill(pair_of_ranks.pids[2], 9)
    wait_for(lambda: pair_of_ranks.ask(task(path), 60, quiet).error == "died")
    assert not pair_of_ranks.alive
    for pid in pair_of_ranks.pids:
        wait_for(lambda pid=pid: not running(pid))


def test_child_processes_end_with_their_rank(ranks, tmp_path):
    started = tmp_path / "started"
    sleeper = "import subprocess; each = subprocess.Popen(['sleep', '1000']).pid"
    record = f"open({str(started)!r}, 'a').write(f'{{each}}\\n'); time.sleep(1000)"
    pair_of_ranks = ranks(2)
    reply = pair_of_ranks.ask(task(write(tmp_path, "parent", f"{sleeper}; {record}")), 5, quiet)
    assert reply.error == "timeout"
    children = [int(pid) for pid in started.read_text().split()]
    assert len(children) == 2
    for pid in children:
        wait_for(lambda pid=pid: not running(pid))


def test_ranks_start_inside_torchrun_and_with_a_long_tmpdir(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "7")
    folder = tmp_path / ("a" * 90)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    pair_of_ranks = ranks(2)
    assert pair_of_ranks.ask(task(write(tmp_path, "inside")), 60, quiet).error is None
    pair_of_ranks.close()
    assert list(folder.iterdir()) == []
    assert not os.path.exists(pair_of_ranks._folder)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_of_two_launchers_measure_together(ranks, tmp_path, unused_port, monkeypatch):
    """Two launchers stand for two machines; each sees its own rank alone."""
    path = write(tmp_path, "apart")
    # No test is about its own speed: waiting for a core is no disturbance here.
    monkeypatch.syspath_prepend(ANY_LOAD)
    nodes = [ranks(1, Nodes(f"127.0.0.1:{unused_port}", 2, number)) for number in range(2)]
    replies = {}

    def ask(number: int) -> None:
        # Each launcher has drawn a seed. All ranks use the first launcher's.
        # Two ranks on a busy machine scatter more than what an answer remembered by value saves.
        timing = task(path, TimeTask, seed=number, budget=SHORT, without=("repeats",))
        tasks = (task(path, seed=number), timing)
        replies[number] = [nodes[number].ask(one, 120, quiet) for one in tasks]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reply.message for number in range(2) for reply in replies[number]] == [""] * 4
    (checked, timed), (there, timed_there) = ([r.result for r in replies[n]] for n in range(2))
    assert checked["sizes"] == there["sizes"]
    # The slowest rank's time is everyone's, and so is every choice that follows from it.
    assert timed["clock"] == "cpu"
    for key in ("blocks", "baseline", "optimized", "orders"):
        assert timed[key] == timed_there[key]
    assert timed["details"]["ranks"] == 2
    assert "launch_skew" not in timed["details"]  # the clocks of two machines differ


def test_the_cpu_time_of_other_machines_is_not_subtracted_from_the_load_here(monkeypatch):
    """Otherwise the ranks there would hide other processes that disturb the ranks here."""
    group = object.__new__(Ranks)
    group.rank, group.world = 3, 4
    monkeypatch.setattr(group, "_gather", lambda value: [[1.0], [2.0], [4.0], [8.0]])
    monkeypatch.setattr("pytest_aisp.util.cpu_load.current_group", lambda: group)
    for share, own in (("2", 12.0), ("4", 15.0), ("1", 8.0)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", share)
        assert read_cpu().own == own


@pytest.mark.parametrize("number", [0, 1])
def test_a_machine_that_never_joins_ends_the_wait(
    ranks, tmp_path, unused_port, monkeypatch, number
):
    monkeypatch.setattr("pytest_aisp.distributed.launcher.START_SECONDS", 1.0)
    endpoint = f"127.0.0.1:{unused_port}"
    alone = ranks(1, Nodes(endpoint, 2, number))
    reply = alone.ask(task(write(tmp_path, "alone")), 3, quiet)
    assert reply.error == "timeout"
    assert reply.message.splitlines()[0] == (
        f"no answer within 3 s during: 1 of 1 ranks did not start; launcher {number} waits until"
        f" the launchers of all 2 machines (0 to 1) reach {endpoint}"
    )
    assert not alone.alive


def test_a_machine_that_is_lost_ends_the_task_of_the_others(ranks, tmp_path, unused_port):
    reached = tmp_path / "reached"
    last = f"if dist.get_rank() == 1: open({str(reached)!r}, 'w').close(); time.sleep(1000)"
    path = write(tmp_path, "lost", last)
    nodes = [ranks(1, Nodes(f"127.0.0.1:{unused_port}", 2, number)) for number in range(2)]
    replies = {}

    def ask(number: int) -> None:
        replies[number] = nodes[number].ask(task(path), 120, quiet)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    wait_for(reached.exists)
    nodes[1].kill()
    for thread in threads:
        thread.join()
    assert replies[0].error == "died"
    assert replies[0].message == (
        "rank 0 lost its connection to a rank of another machine\n"
        "See what the launcher of that machine says: the rank or the machine has failed"
    )
    assert "by peer" in replies[0].trace
    assert not nodes[0].alive


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_failed_start_is_reported(ranks, monkeypatch):
    monkeypatch.setattr(
        "pytest_aisp.distributed.launcher.RankSet._arguments", lambda self: ["--no-such-option"]
    )
    reply = ranks(2).ask(CheckTask(), 60, quiet)
    assert reply.error == "died"
    assert reply.message == "the ranks' launcher ended before every rank had started"
    assert "no-such-option" in reply.trace


def test_a_gpu_only_variant_is_skipped_with_the_reason(page, pytester):
    page()
    path = write(pytester.path, "symmetric")
    text = path.read_text().replace("[other]", "[Variant(other, gpu_only='symmetric memory')]")
    path.write_text(text.replace("import Conditions", "import Variant, Conditions"))
    result = pytester.runpytest_subprocess("-rs", "ch99/symmetric_test.py")
    result.stdout.fnmatch_lines(
        ["SKIPPED * needs a GPU; there is none here; symmetric memory does not exist on a CPU"]
    )


def test_untrusted_sides_on_ranks_are_refused(page, pytester):
    page()
    write(pytester.path, "hostile")
    result = pytester.runpytest_subprocess(
        "--aisp-untrusted", "--aisp-check", "ch99/hostile_test.py"
    )
    result.stdout.fnmatch_lines(
        ["*--aisp-untrusted: the sides run on 2 ranks, which cannot be sandboxed;*"]
    )
    result.stdout.fnmatch_lines(["INVALID *"])


@pytest.mark.parametrize(
    ("gpus", "worker", "leased"),
    [(1, 0, ["b"]), (1, 1, ["a"]), (2, 0, ["a", "b"]), (2, 1, ["a", "b"])],
)
def test_a_case_leases_all_its_gpus_in_one_order(monkeypatch, gpus, worker, leased):
    """A case waits for the holder of each GPU, and cases never wait for each other in a ring."""
    from pytest_aisp.session import run_context

    taken = []

    def lease(name, **_):
        taken.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(run_context, "lease", lease)
    settings = SimpleNamespace(check=False, compile=())
    run = RunContext(
        settings, Machine("sm90", "nvidia-h200", "H200", ("b", "a")), xdist_worker=worker
    )
    case = SimpleNamespace(kind="gpu", gpus=gpus, pair=SimpleNamespace(as_called=False))
    with run.machine_locks(case):
        pass
    assert taken == ["host", *leased]


def test_ranks_see_the_leased_gpus():
    settings = SimpleNamespace(reproducible=False, seed=None, cold_start=False)
    run = RunContext(settings, Machine("sm90", "nvidia-h200", "H200", ("b", "a", "c")))
    assert run.environment("cuda", 2)["CUDA_VISIBLE_DEVICES"] == "a,b"
    assert run.environment("cuda")["CUDA_VISIBLE_DEVICES"] == "b"


def test_ranks_cannot_run_inside_pytest():
    run = RunContext(SimpleNamespace(in_process="--pdb"), Machine("cpu", "cpu", "CPU"))
    with pytest.raises(Failed, match="2 ranks cannot run inside pytest; leave out --pdb"):
        run.start("cpu", 2)


@pytest.fixture
def searched(page, pytester, read_junit, module_cache):
    """A run of pages whose sizes are drawn."""
    if "searched" not in module_cache:
        page()
        for name, (does, _) in SEARCHES.items():
            path = write(pytester.path, name, does)
            text = path.read_text().replace('{"n": 33}', '{"n": 33}, {"n": st.integers(34, 49)}')
            path.write_text(
                text.replace(
                    "import torch\n", "import torch\nfrom hypothesis import strategies as st\n", 1
                )
            )
        pytester.runpytest_subprocess("--aisp-check", "--junitxml=junit.xml", "ch99")
        module_cache["searched"] = read_junit(pytester.path / "junit.xml")
    return module_cache["searched"]


@pytest.mark.parametrize("name", SEARCHES)
def test_ranks_search_the_same_sizes(searched, name):
    message = SEARCHES[name][1]
    assert searched[name].verdict == ("wrong" if message else "checked")
    if message:
        lines = searched[name].failure.splitlines()
        pytest.LineMatcher(lines).fnmatch_lines(["*AssertionError: " + message])


def test_ranks_start_with_the_environment_of_their_page(page, pytester, read_junit):
    page()
    sees = "assert os.environ.get('AISP_MODE') == {}"
    for name, mode in {"first": None, "middle": "'a'", "next": "'b'", "zenith": None}.items():
        path = write(pytester.path, name, sees.format(mode))
        declared = f'environment={{"AISP_MODE": {mode}}},' if mode else ""
        path.write_text(
            path.read_text().replace("Conditions(gpus=2", f"Conditions(gpus=2,{declared}")
        )
    result = pytester.runpytest_subprocess("--aisp-check", "ch99")
    result.stdout.fnmatch_lines(["*= 5 checked in *"])
