"""Set up a fleet run: refuse conflicting options, connect to Ray, and accept or refuse nodes."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..session.options import MACHINE, PRODUCTS, SETTINGS
from ..session.recorder import environment
from ..util.device import Machine
from .connection import HeadGone, NoCluster, RayProcess
from .nodes import VERSIONS, RayNode, arch_of_product, differences, refusal
from .probe import Facts, probe
from .scheduler_types import Node

OPTION = "--aisp-fleet"
CONFLICTS = {
    "aisp_compile": "it needs no GPU: run it here",
    "aisp_replay": "it measures nothing: run it here",
    "aisp_sanitize": "run it on a node",
    "aisp_profile": "profiles stay on the machine: run it on a node",
    "aisp_against_python": "both environments are of one machine: run it on a node",
    "aisp_in_process": "sides would run on a node, where no debugger is",
    "usepdb": "tests run on nodes, where no debugger is",
    "trace": "tests run on nodes, where no debugger is",
    "numprocesses": "a fleet has its own processes",
    "tx": "a fleet has its own processes",
    "reruns": "a rerun would turn a red verdict green",
}
"""The options that a fleet refuses, by their `dest` in pytest's parser, with the reason."""
ONLY_HERE = (
    *("aisp_fleet", "aisp_fleet_products", "aisp_fleet_resume", "aisp_artifacts", "xmlpath"),
    "aisp_fleet_span_nodes",
    *("maxfail", "keyword", "lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip"),
    *("cacheclear", "durations", "basetemp", "numprocesses", "tx", "dist", "deselect"),
    "file_or_dir",
)
"""The options that are not sent to nodes, by their `dest` in pytest's parser."""
PROBE_SECONDS = 70.0


@dataclass
class Nodes:
    """The nodes of the cluster.

    Attributes:
        accepted: the nodes that can get work.
        archs: the arch of each accepted product.
        lines: a line about each node for pytest's header.
        refused: a line about each refused node.
    """

    accepted: list[Node] = field(default_factory=list)
    archs: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)

    def judge(self, event: tuple[Any, ...]) -> Node | None:
        """Accept or refuse the node that `event` reports. Return an accepted node, or None."""
        kind, ray_node, fact, *when = event
        name = self._unique(ray_node)
        why = fact if kind == "refused" else refusal(ray_node, fact, now=when[0])
        if why:
            self.refused.append(f"{name} is refused: {why}")
            self.lines.append(self.refused[-1])
            return None
        versions = "; ".join(str(fact[name]) for name in (*VERSIONS, "driver"))
        node = Node(ray_node.id, name, fact["product"], ray_node.gpus, versions)
        self.accepted.append(node)
        self.archs[node.product] = fact["arch"]
        self.lines.append(_line(node, fact))
        return node

    def _unique(self, node: RayNode) -> str:
        name = node.name if node.name not in self._names else f"{node.name}-{node.id[:6]}"
        self._names.add(name)
        return name


def _line(node: Node, facts: Facts) -> str:
    different = differences(facts, versions_here())
    texts = [f"driver {facts['driver']}"] if facts["driver"] else []
    return "; ".join([f"{node.name}: {node.product} x {node.gpus}", *texts, *different])


@functools.cache
def versions_here() -> Mapping[str, str | None]:
    """Return the versions on this machine that a node's versions are compared with."""
    facts = probe()
    return {name: facts[name] for name in VERSIONS}


def refuse_options(config: pytest.Config) -> None:
    """Raise `pytest.UsageError` for an option that a fleet does not support."""
    for name, why in CONFLICTS.items():
        if config.getoption(name, None):
            option = "--" + name.replace("_", "-").replace("usepdb", "pdb")
            raise pytest.UsageError(f"{OPTION} cannot be combined with {option}: {why}")
    if config.getoption("aisp_fleet_span_nodes") and config.getoption("aisp_cold_start"):
        raise pytest.UsageError(
            f"{OPTION}-span-nodes cannot be combined with --aisp-cold-start: the fresh caches are"
            " on one node"
        )


def connect(address: str) -> tuple[RayProcess, Nodes]:
    """Connect to the cluster, and wait for the facts of its current nodes.

    Raises:
        pytest.UsageError: if the cluster cannot be reached.
    """
    try:
        ray = RayProcess(address)
    except NoCluster as error:
        raise pytest.UsageError(f"{OPTION}={address}: {error}") from None
    nodes, expected, told = Nodes(), 1 << 30, 0
    deadline = time.monotonic() + PROBE_SECONDS
    try:
        while told < expected and time.monotonic() < deadline:
            for kind, *rest in ray.events(1.0):
                if kind == "listed":
                    expected = rest[0]
                elif kind in ("node", "refused"):
                    told += 1
                    nodes.judge((kind, *rest))
    except HeadGone as error:
        ray.close()
        raise pytest.UsageError(f"{OPTION}={address}: {error}") from None
    return ray, nodes


def choose_products(config: pytest.Config, nodes: Nodes) -> dict[str, str]:
    """Return the arch of each product of the run. Unknown products have an empty arch.

    Raises:
        pytest.UsageError: if there is no product.
    """
    text = config.getoption("aisp_fleet_products")
    given = [word.strip() for word in (text or "").split(",") if word.strip()]
    if text is not None and not given:
        raise pytest.UsageError(
            f"{OPTION}-products=: name products, separated by commas\n"
            f"    pytest {OPTION} {OPTION}-products=nvidia-h200,nvidia-b200"
        )
    products = given or sorted(nodes.archs)
    if not products:
        reasons = "\n".join(nodes.refused) or "none has a GPU that Ray can give"
        raise pytest.UsageError(
            f"{OPTION}: no node of the cluster can measure\n{reasons}\nStart one:\n"
            "    aisp fleet start --address=HEAD:6379"
        )
    return {name: nodes.archs.get(name) or arch_of_product(name) for name in products}


def fleet_machine(products: Mapping[str, str], nodes: Nodes) -> Machine:
    """Return a `Machine` for the manifest and the report, with the nodes at the start of the run.

    The machine's product is the first product of the run. Each result row has the product and the
    facts of the node that measured it.
    """
    product, arch = next(iter(products.items()))
    chosen = [node for node in nodes.accepted if node.product in products]
    named = sorted(f"{node.name} ({node.product} x {node.gpus})" for node in chosen)
    return Machine(arch, product, f"a fleet: {', '.join(named) or 'no node yet'}")


def patience(config: pytest.Config) -> float:
    """Return the seconds to wait if a product has no node.

    Raises:
        pytest.UsageError: if the ini key is not a number of seconds.
    """
    text = str(config.getini("aisp_fleet_wait"))
    if re.fullmatch(r"\d+(\.\d+)?", text.strip()) is None:
        raise pytest.UsageError(
            f"aisp_fleet_wait = {text}: give seconds, as in aisp_fleet_wait = 300"
        )
    return float(text)


def node_options(config: pytest.Config) -> dict[str, object]:
    """Return the options for pytest on a node. Only options with plain values are sent."""
    plain = (str, int, float, bool, type(None))

    def is_plain(value: object) -> bool:
        return isinstance(value, plain) or (isinstance(value, list) and all(map(is_plain, value)))

    options = vars(config.option).items()
    return {name: v for name, v in options if name not in ONLY_HERE and is_plain(v)}


def spec(config: pytest.Config, top: Path, digest: str, files: list[str]) -> dict[str, Any]:
    """Return the settings for pytest on a node, except the seat and the elapsed time."""
    root, folder = config.rootpath, Path(config.invocation_params.dir)
    inside = folder if folder.is_relative_to(top) else root
    return {
        "top": str(top),
        "digest": digest,
        "root": os.path.relpath(root, top),
        "folder": os.path.relpath(inside, top),
        "inifile": None if config.inipath is None else str(config.inipath),
        "options": node_options(config),
        "files": files,
        "variables": shipped_variables(os.environ),
    }


def shipped_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that are sent to nodes.

    The variables are the ones in the manifest, without paths of this machine. All of them affect
    measurements, and none contains a secret.
    """
    own = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "LD_PRELOAD")
    return {k: v for k, v in environment(variables).items() if k not in own}


def configure(config: pytest.Config) -> None:
    """Connect to the cluster, and register the plugin that runs the cases on it."""
    if hasattr(config, "workerinput"):
        return
    from .driver import FleetRun

    refuse_options(config)
    patience(config)
    address = config.getoption("aisp_fleet")
    ray, nodes = connect(address)
    config.add_cleanup(ray.close)
    config.stash[PRODUCTS] = products = choose_products(config, nodes)
    config.stash[MACHINE] = fleet_machine(products, nodes)
    run = FleetRun(config, config.stash[SETTINGS], ray, nodes)
    config.pluginmanager.register(run, "aisp-fleet")
