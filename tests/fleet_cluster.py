"""A Ray cluster of simulated nodes on this machine, for tests of fleets."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SERVER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(
    initialize_head=True,
    head_node_args={"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, **eval(sys.argv[1])},
)
nodes = {}
print(cluster.address, flush=True)
for line in sys.stdin:
    kind, name, *options = eval(line)
    if kind == "add":
        nodes[name] = cluster.add_node(node_name=name, **options[0])
    elif name in nodes:
        cluster.remove_node(nodes.pop(name), allow_graceful=False)
    elif name == "head":
        cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
    print("done", flush=True)
for node in [*nodes.values(), cluster.head_node]:
    node.kill_all_processes(check_alive=False, allow_graceful=False)
"""
"""A process of its own for the cluster: Ray never runs in the process of the tests."""
NEEDS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
"""An import of Ray would start threads of gRPC in the process of the tests, which forks."""
CONFTEST = """
import os


def pytest_aisp_timer(config):
    here = os.environ.get("AISP_FLEET_SIMULATED", "simulated-here:sm90")
    product, _, arch = here.partition(":")
    return {
        "target": "pytest_aisp.timing.fake_device:simulate",
        "arch": arch,
        "product": product,
        "options": {"seconds": {"added": 2e-5, "doubled": 1e-5}, "noise": {}, "session": 0.0},
        "environment": {"board": os.environ.get("BOARD", "here")},
    }
"""


class RayCluster:
    """A head without GPUs, and the nodes that `add` starts."""

    def __init__(self, folder: Path, **head: object) -> None:
        self._folder = folder
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        self._server = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SERVER), repr(head)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # what Ray kills is not of the tests
            env={**environment, "RAY_worker_niceness": "0"},
        )
        self.address = self._server.stdout.readline().strip()
        assert self.address, "Ray did not start"

    def add(self, name: str, product: str, *, gpus: int = 2, arch: str = "sm90", **variables):
        """Start a node with simulated GPUs."""
        own = {"AISP_LEASES": str(self._folder / f"leases-{name}"), "BOARD": name}
        own |= {"AISP_FLEET_FOLDER": str(self._folder / f"trees-{name}")}
        own |= {"AISP_FLEET_SIMULATED": f"{product}:{arch}", "RAY_worker_niceness": "0"}
        self._ask("add", name, {"num_cpus": 1, "num_gpus": gpus, "env_vars": {**own, **variables}})

    def kill(self, name: str) -> None:
        """Kill a node; kill the head if `name` is ``head``."""
        self._ask("kill", name)

    def _ask(self, *request: object) -> None:
        self._server.stdin.write(f"{request!r}\n")
        self._server.stdin.flush()
        assert self._server.stdout.readline().strip() == "done"

    def close(self) -> None:
        """Kill all nodes."""
        self._server.stdin.close()
        try:
            self._server.wait(30)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


def processes_of(folder: Path) -> list[int]:
    """Return the nodes' pytest processes and worker processes that run in `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command, where = (entry / "cmdline").read_bytes(), os.readlink(entry / "cwd")
        except OSError:  # it has ended meanwhile
            continue
        if b"pytest_aisp" in command and where.startswith(str(folder)):
            found.append(int(entry.name))
    return found


def stop(pid: int) -> None:
    """Freeze a process."""
    os.kill(pid, signal.SIGSTOP)
