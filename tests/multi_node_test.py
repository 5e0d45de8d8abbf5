"""Ranks of one case on several machines: pytest on one, a rank server on the other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import re
import shutil
import socket
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks_test import ENVIRONMENT, LAST, SHORT, quiet, task, write
from worker_processes import ANY_LOAD, alive_workers, wait_for

from pytest_aisp.distributed import multi_node
from pytest_aisp.distributed.launcher import LOST_HINT, merged
from pytest_aisp.distributed.multi_node import (
    Machines,
    RankServer,
    SpanningRanks,
    Unreachable,
    gloo_interface,
)
from pytest_aisp.results.messages import PageSource, Reply, TimeTask, timeout_reply
from pytest_aisp.session.case_client import CaseClient
from pytest_aisp.session.placement import Kernels, Placement, placement_of
from pytest_aisp.session.run_context import RunContext
from pytest_aisp.util.device import Machine
from pytest_aisp.util.gpu_lease import lease

HOST = "127.0.0.1"


class Lost(Exception):
    """A machine whose rank server is gone."""


def lost(number, why):
    raise Lost(number, why)


@pytest.fixture
def two(tmp_path, forked_processes, worker_zygote):
    """Two folders that stand for the trees of two machines, and the rank server of the second."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (tmp_path / "leases").mkdir()
    started = []

    def start(**variables) -> SimpleNamespace:
        """Start the server, after the pages were written into `here`."""
        shutil.copytree(here, there)
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "pytest_aisp.fleet.rank_server", str(theirs.fileno())]
        leases = {"AISP_LEASES": str(tmp_path / "leases")}
        server = worker_zygote.rank_server(
            [*command, str(os.getpid())],
            cwd=str(there),
            env={**os.environ, **leases, **variables},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        key = b"secret"
        ours.send_bytes(pickle.dumps({"host": HOST, "key": key, "tree": str(there)}))
        _, port = pickle.loads(ours.recv_bytes())
        machines = Machines("n1", HOST, 1, [RankServer("n2", HOST, port)], key, str(here), lost)
        started.append(server)
        return SimpleNamespace(machines=machines, server=server)

    yield SimpleNamespace(here=here, there=there, start=start)
    for server in started:
        server.kill()
        server.wait()


@pytest.fixture
def spanning():
    """Start spanning ranks, and end them after the test."""
    started = []

    def start(machines, **variables):
        started.append(SpanningRanks(machines, {**ENVIRONMENT, **variables}))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


KEEPS_FILE = "open(os.path.dirname(__file__) + f'/ran-{dist.get_rank()}', 'w').close()"


def test_ranks_of_two_machines_check_and_time_each_in_its_own_tree(
    two, spanning, tmp_path, monkeypatch
):
    page = write(two.here, "span", KEEPS_FILE)
    # No test is about its own speed: waiting for a core is no disturbance here.
    monkeypatch.syspath_prepend(ANY_LOAD)
    old = tmp_path / "old"
    shutil.copytree(two.here, old)
    ranks = spanning(two.start(PYTHONPATH=ANY_LOAD).machines)
    assert ranks.ask(task(page), 120, quiet).message == ""
    assert sorted(file.name for file in two.here.glob("ch99/ran-*")) == ["ran-0"]
    assert sorted(file.name for file in two.there.glob("ch99/ran-*")) == ["ran-1"]
    past = PageSource(
        page=str(old / "ch99" / page.name), root=str(old), module="aisp_past_1.ch99.x"
    )
    against = {"versus": "old", "side": "optimized", "past": past}
    timing = task(page, TimeTask, budget=SHORT, without=("repeats",), **against)
    reply = ranks.ask(timing, 120, quiet)
    assert reply.message == ""
    assert reply.result["details"]["ranks"] == 2
    # The other machine has the old code in a folder of its own.
    assert sorted(file.name for file in old.glob("ch99/ran-*")) == ["ran-0"]
    ranks.close()
    wait_for(lambda: not alive_workers(two.there))


FAULTS = {
    "raises": (LAST + "raise ValueError(__file__)", "rank 1: ValueError: {page}, during: *"),
    "raises_here": ("if dist.get_rank() == 0: raise ValueError('no')", "rank 0: ValueError: no*"),
    "exits": (LAST + "os._exit(3)", "rank 1 ended with exit code 3 during: check other"),
    "wrong": (LAST + "return summed(x) + 1", "rank 1: other is wrong at n=33*"),
    "hangs": (LAST + "time.sleep(1000)", "*rank 1: check other, in other (hangs_test.py:30)*"),
    "hangs_here": (
        "if dist.get_rank() == 0: time.sleep(1000)",
        "*rank 0: check other, in other (hangs_here_test.py:30)*",
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "hangs_here")) for name in FAULTS],
)
def test_a_fault_on_one_machine_names_the_rank_and_ends_all(two, spanning, name):
    does, expected = FAULTS[name]
    page = write(two.here, name, does)
    ranks = spanning(two.start().machines)
    reply = ranks.ask(task(page), 15, quiet)
    lines = reply.message.splitlines()
    pytest.LineMatcher(lines[:1]).fnmatch_lines([expected.format(page=page)])
    assert not ranks.alive
    wait_for(lambda: not alive_workers(two.there))


def test_two_ranks_on_each_machine_are_four(two, spanning, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    gpus = (
        "open(os.path.dirname(__file__) + '/gpus', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    gloo = "assert os.environ['GLOO_SOCKET_IFNAME']"
    page = write(two.here, "four", f"{KEEPS_FILE}; {gloo}; {gpus}", 4)
    page.write_text(page.read_text() + "\n\nassert dist.get_world_size() == 4\n")
    bad = write(two.here, "bad", "if dist.get_rank() == 3: return summed(x) + 1", 4)
    machines = two.start(CUDA_VISIBLE_DEVICES="GPU-c,GPU-d").machines
    ranks = spanning(changed(machines, share=2), CUDA_VISIBLE_DEVICES="GPU-a,GPU-b")
    assert ranks.ask(task(page, gpus=4), 120, quiet).message == ""
    assert sorted(file.name for file in two.there.glob("ch99/ran-*")) == ["ran-2", "ran-3"]
    assert (two.here / "ch99/gpus").read_text() == "GPU-a,GPU-b"
    assert (two.there / "ch99/gpus").read_text() == "GPU-c,GPU-d"
    reply = ranks.ask(task(bad, gpus=4), 120, quiet)
    assert reply.message.startswith("rank 3: other is wrong at n=33"), reply.message
    assert reply.error == "wrong"


def test_a_lost_machine_is_no_failure_of_the_case(two, spanning):
    page = write(two.here, "lost", f"{KEEPS_FILE}; time.sleep(1000)")
    started = two.start()
    ranks = spanning(started.machines)

    def kill(text):
        if text.startswith("check other"):
            wait_for(lambda: list(two.there.glob("ch99/ran-1")))
            started.server.kill()

    with pytest.raises(Lost, match="its rank server has ended") as found:
        ranks.ask(task(page), 120, kill)
    assert found.value.args[0] == 1
    assert not ranks.alive
    wait_for(lambda: not alive_workers(two.there))


def test_an_interrupted_task_ends_the_ranks_of_all_machines(two, spanning):
    page = write(two.here, "interrupted", f"{KEEPS_FILE}; time.sleep(1000)")
    ranks = spanning(two.start().machines)

    def interrupt(text):
        if text.startswith("check other"):
            wait_for(lambda: list(two.there.glob("ch99/ran-1")))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ranks.ask(task(page), 1000, interrupt)
    wait_for(lambda: not alive_workers(two.there))
    assert not ranks.alive


def test_a_server_that_is_gone_before_the_ranks_start_is_lost(two, spanning):
    started = two.start()
    started.server.kill()
    started.server.wait()
    with pytest.raises(Lost, match=r"its rank server has ended: .*refused"):
        spanning(started.machines)


def test_gloo_uses_the_interface_that_has_the_address_of_the_node(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert gloo_interface(HOST) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert gloo_interface("203.0.113.7") == {}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert gloo_interface(HOST) == {}


def test_no_other_process_gets_the_port_before_the_launcher_listens(two, spanning):
    ranks = spanning(two.start().machines)
    host, _, port = ranks.nodes.endpoint.partition(":")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, int(port)))


LOST = Reply(error="died", message=f"rank 0 lost its connection\n{LOST_HINT}")
DONE = Reply(result={"errors": {"other": 0.1}})


@pytest.mark.parametrize(
    ("mine", "waits", "says"),
    [
        (DONE, True, "n3 sent no reply"),
        (LOST, True, "rank 0 lost its connection"),
        (timeout_reply(5, "check other", ""), True, "no answer within 5 s"),
        (Reply(error="wrong", message="rank 0: other is wrong"), False, "rank 0: other is wrong"),
    ],
    ids=["done", "lost", "timeout", "wrong"],
)
def test_a_fleet_has_the_time_to_notice_that_a_silent_machine_died(monkeypatch, mine, waits, says):
    """A short `aisp_timeout` must not make the death of a node a failure of the case."""
    monkeypatch.setattr(multi_node, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(multi_node, "GRACE_SECONDS", 0.1)
    ranks = object.__new__(SpanningRanks)
    servers = [RankServer(name, HOST, 1) for name in ("n2", "n3")]
    ranks._machines = Machines("n1", HOST, 1, servers, b"", "/tree", lost)
    ranks._connections, ranks._replies, ranks._failed = {1: None, 2: None}, {1: DONE}, float("inf")
    waited = []
    monkeypatch.setattr(ranks, "_hear", waited.append)
    monkeypatch.setattr(multi_node.time, "monotonic", lambda: sum(waited))
    ranks._wait(mine, 0.2)
    assert (sum(waited) >= 1.0) == waits
    assert says in ranks._combined(mine, 5).message


def test_the_largest_error_of_all_machines_counts():
    worse = Reply(result={"errors": {"other": 0.2}})
    assert merged([DONE, worse]).result == worse.result


def changed(machines, **fields):
    values = {name: getattr(machines, name) for name in machines.__dataclass_fields__}
    return Machines(**{**values, **fields})


def test_closed_ports_between_two_machines_are_named(two):
    machines = two.start().machines
    machines.check()
    with socket.create_server((HOST, 0)) as closed:
        port = closed.getsockname()[1]
    remedy = "Open the ports between both, or start Ray with --node-ip-address=ADDRESS of a network"
    with pytest.raises(Unreachable) as found:
        changed(machines, servers=[RankServer("n2", HOST, port)]).check()
    first, second = str(found.value).splitlines()
    assert re.match(r"n1 cannot reach n2 at 127\.0\.0\.1: .*[Cc]onnection refused", first)
    assert second == f"{remedy} that both share"
    rejected = r"n1 cannot reach n2 at 127\.0\.0\.1: digest sent was rejected"
    with pytest.raises(Unreachable, match=rejected):
        changed(machines, key=b"other").check()
    machines.check()  # the server goes on


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "http"])
def test_a_stranger_does_not_keep_others_from_the_server(two, says):
    """A port scanner, for example."""
    machines, checked = two.start().machines, threading.Event()

    def check():
        machines.check()
        checked.set()

    with socket.create_connection((HOST, machines.servers[0].port)) as stranger:
        stranger.sendall(says)
        threading.Thread(target=check, daemon=True).start()
        assert checked.wait(20)


def test_a_machine_that_cannot_connect_back_is_named(two, monkeypatch):
    machines = two.start().machines
    with socket.create_server((HOST, 0)) as closed:
        address = closed.getsockname()
    unused = SimpleNamespace(getsockname=lambda: address)
    monkeypatch.setattr(socket, "create_server", lambda where: contextlib.nullcontext(unused))
    with pytest.raises(Unreachable, match=r"n2 cannot reach n1 at 127\.0\.0\.1: .*refused"):
        machines.check()


def test_a_case_holds_the_leases_of_all_machines(two, tmp_path, monkeypatch):
    machines = two.start(CUDA_VISIBLE_DEVICES="GPU-b,GPU-a").machines
    monkeypatch.setenv("AISP_LEASES", str(tmp_path / "leases"))
    said = []
    with machines.leases(gpus=True, shared=True, waiting=said.append):
        assert locked("GPU-a")
        assert locked("GPU-b")
        assert locked("host")
    wait_for(lambda: not locked("GPU-a"))
    with machines.leases(gpus=False, shared=True, waiting=said.append):
        assert not locked("GPU-a")
    assert said == []
    wait_for(lambda: not locked("host"))
    other = lease("host")
    other.__enter__()

    def release(text):
        said.append(text)
        other.__exit__(None, None, None)

    with machines.leases(gpus=True, shared=True, waiting=release):
        pass
    assert said == ["n2: wait for host, which another run holds"]


def locked(name):
    with open(Path(os.environ["AISP_LEASES"]) / f"{name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_machine_whose_leases_cannot_be_written_is_named(two):
    machines = two.start(AISP_LEASES="/proc/none/leases").machines
    held = machines.leases(gpus=True, shared=True, waiting=quiet)
    with pytest.raises(OSError, match=r"^n2: .*No such file"), held:
        pass


# The session on the first machine


def of_two_machines(gpus):
    machines = Machines("n1", HOST, len(gpus), [RankServer("n2", HOST, 1)], b"", "/tree", lost)
    settings = SimpleNamespace(compile=(), check=False, untrusted=False, in_process="")
    return RunContext(settings, Machine("sm90", "nvidia-h200", "H200", gpus), machines=machines)


def test_a_case_is_timed_if_all_machines_together_have_enough_gpus():
    variant = SimpleNamespace(gpu_only="")
    pair = SimpleNamespace(archs=lambda variant: ("sm90",), features=lambda variant: ())
    case = SimpleNamespace(gpus=4, kind="gpu", pair=pair, variant=variant)
    run = of_two_machines(("a", "b"))
    assert placement_of(run, case, Kernels()).kind == "time"
    run.machines = None
    placement = placement_of(run, case, Kernels())
    assert (placement.kind, placement.need) == ("check", "needs 4 GPUs; this machine has 2")


def test_a_result_is_stored_for_the_product_of_all_machines():
    run = of_two_machines(("a", "b"))
    run.settings.timeout, run.settings.baselines = 1.0, Path("baselines")
    case, location = SimpleNamespace(gpus=4), SimpleNamespace(chapter="ch04")
    client = CaseClient(run, case, location, Placement("time", "cuda"))
    assert client.path == Path("baselines/nvidia-h200-2x2/ch04.json")


def test_a_case_takes_the_leases_here_before_those_of_other_machines(monkeypatch):
    taken = []

    def lease_here(name, **_):
        taken.append(name)
        return contextlib.nullcontext()

    def lease_there(self, *, gpus, shared, waiting):
        taken.append((gpus, shared))
        return contextlib.nullcontext()

    monkeypatch.setattr("pytest_aisp.session.run_context.lease", lease_here)
    monkeypatch.setattr(Machines, "leases", lease_there)
    run = of_two_machines(("b", "a"))
    for as_called in (False, True):
        case = SimpleNamespace(kind="gpu", gpus=4, pair=SimpleNamespace(as_called=as_called))
        with run.machine_locks(case):
            pass
    assert taken == ["host", "a", "b", (True, True), "host", "a", "b", (True, False)]


def test_the_links_of_a_record_say_how_many_machines_there_are(monkeypatch):
    from pytest_aisp.distributed import topology

    monkeypatch.setattr(
        topology, "route_kinds", lambda uuids: "NVLink 4 x18" if uuids[1:] else None
    )
    assert of_two_machines(("a", "b")).links(4) == "NVLink 4 x18 in each of 2 machines"
    assert of_two_machines(("a",)).links(2) == "unknown in each of 2 machines"
