"""`aisp links nccl` times collectives on several ranks. `nccl-env` explains NCCL's variables.

The ranks are started in the same way as for pages (`launcher.RankSet`), with NCCL on GPUs and Gloo
on CPUs.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from ..results.messages import CollectivesTask, Reply, Task
from ..results.row import duration
from ..timing.collectives import ONE_SHOT, OPS, SMALLEST, WINDOWS, bandwidths
from ..util.cli_result import CliError, CliResult, columns, rate_text, size_text
from ..util.device import Machine
from ..util.gpu_lease import lease_gpus
from .launcher import RankSet

SMALLEST_PEAK = 64 << 20
"""The smallest all-reduce that fills the links. Smaller all-reduces do not reach the peak."""
GLOO = "Gloo on a CPU (not a measurement of links)"


class SweepRow(TypedDict):
    """The measurement of one collective at one size. Sizes are in bytes, rates in bytes/s."""

    op: str
    size: int
    seconds: float
    clock: str
    algbw: float
    busbw: float


@dataclass(frozen=True)
class Sweep:
    """The measured collectives on `ranks` ranks.

    Attributes:
        device: ``cuda`` or ``cpu``.
        backend: the versions of NCCL and torch, and the GPU's name.
        notes: notes about features that were not available.
        latencies: seconds of the smallest ``all_reduce`` and of a ``barrier`` (`latencies`).
    """

    ranks: int
    device: str
    rows: Sequence[SweepRow]
    backend: Mapping[str, str]
    notes: Sequence[str]
    latencies: Mapping[str, float]

    def of(self, op: str) -> list[SweepRow]:
        """Return the rows of one collective in ascending order of size."""
        return [row for row in self.rows if row["op"] == op]

    @property
    def title(self) -> str:
        """A title that names the number of ranks, the device and the versions."""
        versions = [f"{k} {self.backend[k]}" for k in ("nccl", "torch") if self.backend.get(k)]
        where = self.backend.get("device") or GLOO
        return f"{self.ranks} ranks, {where}, {', '.join(versions)}"


def parse_ops(text: str) -> tuple[str, ...]:
    """Return the collectives named in ``all_reduce,all_gather``.

    Raises:
        ValueError: if a collective is unknown.
    """
    ops = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for op in ops:
        if op not in OPS:
            raise ValueError(f"unknown collective {op!r}; legal: {', '.join(OPS)}")
    return ops


def choose_ranks(machine: Machine, ranks: int | None) -> tuple[str, int]:
    """Return the device and the number of ranks.

    By default there is one rank per GPU, or two ranks on the CPU if there are fewer than two GPUs.

    Raises:
        CliError: if there are fewer than two ranks, or more ranks than GPUs.
    """
    have = len(machine.gpus)
    if ranks is not None and ranks < 2:
        raise CliError(f"--ranks={ranks}: a collective needs 2 ranks or more")
    if have < 2:
        return "cpu", ranks or 2
    if ranks is not None and ranks > have:
        raise CliError(f"--ranks={ranks}: this machine has {have} GPUs\nGive --ranks={have}")
    return "cuda", ranks or have


def measure_collectives(
    machine: Machine,
    ops: Sequence[str],
    sizes: Sequence[int],
    *,
    ranks: int | None,
    timeout: float,
    progress: Callable[[str], None],
) -> Sweep:
    """Start the ranks, measure the collectives, and stop the ranks.

    Args:
        timeout: the number of seconds without a message after which the ranks are stopped.

    Raises:
        CliError: if a rank fails. The message names the rank, and the exit code is 1.
    """
    device, count = choose_ranks(machine, ranks)
    task = CollectivesTask(device=device, ops=tuple(ops), sizes=tuple(sizes))
    reply = ask_ranks(machine, count, task, timeout, progress)
    backend = dict(reply.result)
    rows, notes, least = [], backend.pop("notes"), backend.pop("latencies")
    for row in backend.pop("rows"):
        algbw, busbw = bandwidths(row, count)
        rows.append(row | {"algbw": algbw, "busbw": busbw})
    return Sweep(count, device, rows, backend, notes, least)


def ask_ranks(
    machine: Machine, count: int, task: Task, timeout: float, progress: Callable[[str], None]
) -> Reply:
    """Start `count` ranks on the task's device, and return rank 0's reply.

    Raises:
        CliError: if a rank fails. The message names the rank, and the exit code is 1.
    """
    gpus = sorted(machine.gpus)[:count] if task.device == "cuda" else []
    with lease_gpus(gpus, progress):
        group = RankSet(count, {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})
        try:
            reply = group.ask(task, timeout, progress)
        finally:
            group.close()
    if reply.error is not None:
        message = reply.message
        if reply.error == "timeout":  # the last line recommends an option of pytest, not of aisp
            message = f"{message.splitlines()[0]}\nAllow more time with --timeout={2 * timeout:g}"
        raise CliError("\n".join(filter(None, (reply.trace.rstrip(), message))), code=1)
    return reply


def nccl_result(sweep: Sweep) -> CliResult:
    """Return a table of collectives by size, with one-shot all-reduce next to NCCL's."""
    one_shot = {row["size"]: row for row in sweep.of(ONE_SHOT)}
    heads = ["collective", "size", "time", "algbw", "busbw", "clock"]
    table = [heads + (["one-shot", "its busbw"] if one_shot else [])]
    for row in sweep.rows:
        if row["op"] == ONE_SHOT:
            continue
        rates = [rate_text(row["algbw"]), rate_text(row["busbw"])]
        cells = [row["op"], size_text(row["size"]), duration(row["seconds"]), *rates, row["clock"]]
        other = one_shot.get(row["size"]) if row["op"] == "all_reduce" else None
        if other is not None:
            cells += [duration(other["seconds"]), rate_text(other["busbw"])]
        elif one_shot:
            cells += ["", ""]
        table.append(cells)
    how = f"slowest rank, median of {WINDOWS} windows"
    lines = [f"{sweep.title}; {how}", *columns(table)]
    if sweep.latencies:
        least = [f"{what} {duration(sweep.latencies[key])}" for key, what in _least(sweep).items()]
        lines.append(f"beyond the start of a kernel: {', '.join(least)}")
    return CliResult([*lines, *sweep.notes])


def collective_peaks(sweep: Sweep) -> tuple[dict[str, float], dict[str, str]]:
    """Return the peak rates to store, and a description of each measurement.

    The peaks are ``busbw``, the bus bandwidth of the largest all-reduce, and the `latencies`.

    Raises:
        CliError: if the ranks used no GPU, or no large all-reduce was measured.
    """
    if sweep.device == "cpu":
        raise CliError(f"nothing is stored: {GLOO}")
    reduced = sweep.of("all_reduce")
    if not reduced or reduced[-1]["size"] < SMALLEST_PEAK:
        raise CliError(
            f"nothing is stored: the peak needs an all-reduce of {size_text(SMALLEST_PEAK)} or more"
            "\n    aisp links nccl --ops=all_reduce --sizes=4KiB:512MiB --store"
        )
    largest = reduced[-1]
    facts = {"busbw": size_text(largest["size"]), **_least(sweep)}
    rates = {"busbw": largest["busbw"], **sweep.latencies}
    return rates, {rate: f"{what}, {sweep.title}" for rate, what in facts.items()}


def _least(sweep: Sweep) -> dict[str, str]:
    """Return what each of the sweep's latencies is."""
    what = {
        "all_reduce": f"all-reduce of {size_text(SMALLEST)}",
        "barrier": "barrier in symmetric memory",
    }
    return {key: what[key] for key in sweep.latencies}


PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "NVSHMEM_")
INFINIBAND = Path("/sys/class/infiniband")

MEANINGS: dict[str, str] = json.loads(
    Path(__file__).with_name("nccl_variables.json").read_text(encoding="utf-8")
)
"""An explanation of each variable. The sources are NCCL's user guide ("Environment
Variables"), PyTorch's "ProcessGroupNCCL Environment Variables", pytorch/pytorch#136577 (multicast),
and NVSHMEM's "Environment Variables".
"""
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""The value of each variable that disables NVLink multicast.

The plugin does not change these variables for its ranks, and the output says so.
"""
MULTI_NODE_ADVICE = {
    "MASTER_ADDR": "the first node's address, the same on all: torchrun takes --rdzv-endpoint",
    "MASTER_PORT": "a free port there",
    "NCCL_SOCKET_IFNAME": "the network interface that connects the nodes",
    "GLOO_SOCKET_IFNAME": "the same for Gloo, with which the ranks agree on times",
    "NCCL_IB_HCA": "the adapters next to the GPUs, if there is InfiniBand or RoCE",
    "NCCL_IB_GID_INDEX": "on RoCE if connections fail: often 3",
}
"""The variables that ranks on several nodes need, in the order in which to set them."""


def nccl_env_result(environment: Mapping[str, str], version: str) -> CliResult:
    """Return an explanation of each variable in `environment` that affects NCCL.

    Args:
        version: the line that `nccl_version` returns.
    """
    names = sorted(name for name in environment if name.startswith(PREFIXES))
    lines = [version, "", "set here" if names else f"none of {', '.join(PREFIXES)}* is set here"]
    if names:
        rows = [(f"{name}={environment[name]}", _meaning(name, environment)) for name in names]
        lines += columns(rows)
    lines += ["", "for several nodes (advice; nothing was set)"]
    values = {
        n: f"is {environment[n]}" if n in environment else "not set" for n in MULTI_NODE_ADVICE
    }
    lines += columns([(name, values[name], text) for name, text in MULTI_NODE_ADVICE.items()])
    interfaces = [name for _, name in socket.if_nameindex()]
    lines.append(f"interfaces here: {', '.join(interfaces)}")
    adapters = sorted(p.name for p in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    lines.append(f"InfiniBand or RoCE adapters here: {', '.join(adapters) or 'none'}")
    return CliResult(lines)


def _meaning(name: str, environment: Mapping[str, str]) -> str:
    known = MEANINGS.get(name, "not in this table: see the library's documentation")
    respected = MULTICAST_OFF.get(name) == environment[name].strip()
    return known + (" (respected: the ranks get it unchanged)" if respected else "")


def nccl_version() -> str:
    """Return one line with the version of NCCL that the installed torch uses."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no NCCL: it was built without CUDA"
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return f"NCCL {version}, in torch {torch.__version__}"
