"""`aisp links nccl`: time collectives on ranks; `nccl-env`: explain the variables that are set.

The ranks are the ones that pages use (`launcher.RankSet`): NCCL on GPUs, Gloo on CPUs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from ..results.messages import CollectivesTask
from ..results.row import duration
from ..timing.collectives import ONE_SHOT, OPS, WINDOWS, bandwidths
from ..util.cli_result import CliError, CliResult, columns, rate_text, size_text
from ..util.device import Machine, lease_gpus
from .launcher import RankSet

SMALLEST_PEAK = 64 << 20
"""A smaller all-reduce does not fill the links, so its busbw is no peak."""
GLOO = "Gloo on a CPU (not a measurement of links)"


class SweepRow(TypedDict):
    """One collective at one size: bytes, seconds of a call, bandwidths in bytes/s."""

    op: str
    size: int
    seconds: float
    clock: str
    algbw: float
    busbw: float


@dataclass(frozen=True)
class Sweep:
    """What the ranks measured.

    Attributes:
        device: ``cuda`` or ``cpu``.
        backend: versions of NCCL and torch, and the GPU's name.
        notes: what was not available.
    """

    ranks: int
    device: str
    rows: Sequence[SweepRow]
    backend: Mapping[str, str]
    notes: Sequence[str]

    def of(self, op: str) -> list[SweepRow]:
        """Return the rows of one collective in ascending order of size."""
        return [row for row in self.rows if row["op"] == op]

    @property
    def title(self) -> str:
        """The ranks, the device and the versions."""
        versions = [f"{k} {self.backend[k]}" for k in ("nccl", "torch") if self.backend.get(k)]
        where = self.backend.get("device") or GLOO
        return f"{self.ranks} ranks, {where}, {', '.join(versions)}"


def parse_ops(text: str) -> tuple[str, ...]:
    """Return the collectives named in ``all_reduce,all_gather``.

    Raises:
        ValueError: for an unknown collective.
    """
    ops = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for op in ops:
        if op not in OPS:
            raise ValueError(f"unknown collective {op!r}; legal: {', '.join(OPS)}")
    return ops


def choose_ranks(machine: Machine, ranks: int | None) -> tuple[str, int]:
    """Return the device and the number of ranks: one per GPU, or two on a CPU without two GPUs.

    Raises:
        CliError: for fewer than two ranks, or more than the machine has GPUs.
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
    """Start the ranks, measure, and stop them.

    Args:
        timeout: seconds that the ranks may be silent.

    Raises:
        CliError: with exit code 1 if a rank fails; the message names it.
    """
    device, count = choose_ranks(machine, ranks)
    gpus = sorted(machine.gpus)[:count] if device == "cuda" else []
    task = CollectivesTask(device=device, ops=tuple(ops), sizes=tuple(sizes))
    with lease_gpus(gpus, progress):
        group = RankSet(count, {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})
        try:
            reply = group.ask(task, timeout, progress)
        finally:
            group.close()
    if reply.error is not None:
        message = reply.message
        if reply.error == "timeout":  # its last line names an option of pytest
            message = f"{message.splitlines()[0]}\nGive it longer with --timeout={2 * timeout:g}"
        raise CliError("\n".join(filter(None, (reply.trace.rstrip(), message))), code=1)
    backend = dict(reply.result)
    rows, notes = [], backend.pop("notes")
    for row in backend.pop("rows"):
        algbw, busbw = bandwidths(row, count)
        rows.append(
            SweepRow(
                op=row["op"],
                size=row["size"],
                seconds=row["seconds"],
                clock=row["clock"],
                algbw=algbw,
                busbw=busbw,
            )
        )
    return Sweep(count, device, rows, backend, notes)


def nccl_result(sweep: Sweep) -> CliResult:
    """Return the table of collectives by size, with one-shot beside NCCL's all-reduce."""
    one_shot = {row["size"]: row for row in sweep.of(ONE_SHOT)}
    heads = ["collective", "size", "time", "algbw", "busbw", "clock"]
    table = [heads + (["one-shot", "its busbw"] if one_shot else [])]
    for row in sweep.rows:
        if row["op"] == ONE_SHOT:
            continue
        rates = [rate_text(row["algbw"]), rate_text(row["busbw"])]
        cells = [row["op"], size_text(row["size"]), duration(row["seconds"]), *rates, row["clock"]]
        if one_shot:
            beside = one_shot.get(row["size"]) if row["op"] == "all_reduce" else None
            cells += (
                [duration(beside["seconds"]), rate_text(beside["busbw"])] if beside else ["", ""]
            )
        table.append(cells)
    how = f"slowest rank, median of {WINDOWS} windows"
    return CliResult([f"{sweep.title}; {how}", *columns(table), *sweep.notes])


def collective_peaks(sweep: Sweep) -> tuple[dict[str, float], dict[str, str]]:
    """Return the peaks to store, and how each was measured.

    They are ``busbw`` of the largest all-reduce, and ``all_reduce``, seconds of the smallest.

    Raises:
        CliError: without a GPU, or without a large all-reduce.
    """
    if sweep.device == "cpu":
        raise CliError(f"nothing is stored: {GLOO}")
    reduced = sweep.of("all_reduce")
    if not reduced or reduced[-1]["size"] < SMALLEST_PEAK:
        raise CliError(
            f"nothing is stored: the peak needs an all-reduce of {size_text(SMALLEST_PEAK)} or more"
            "\n    aisp links nccl --ops=all_reduce --sizes=4KiB:512MiB --store"
        )
    first, last = reduced[0], reduced[-1]
    rates = {"busbw": last["busbw"], "all_reduce": first["seconds"]}
    rows = {"busbw": last, "all_reduce": first}
    return rates, {k: f"{size_text(row['size'])}, {sweep.title}" for k, row in rows.items()}


PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "NVSHMEM_")
INFINIBAND = Path("/sys/class/infiniband")

# NCCL's user guide ("Environment Variables"), PyTorch's "ProcessGroupNCCL Environment Variables",
# pytorch/pytorch#136577 (multicast) and NVSHMEM's "Environment Variables".
MEANINGS = {
    "NCCL_DEBUG": "what NCCL prints: VERSION, WARN, INFO or TRACE",
    "NCCL_DEBUG_SUBSYS": "which parts of NCCL print with NCCL_DEBUG=INFO: INIT, NET, GRAPH, TUNING",
    "NCCL_DEBUG_FILE": "file that NCCL prints to, %h the host and %p the process",
    "NCCL_SOCKET_IFNAME": "network interfaces for starting up and for sockets; ^ leaves out",
    "NCCL_SOCKET_FAMILY": "AF_INET or AF_INET6 only",
    "NCCL_IB_HCA": "InfiniBand or RoCE adapters to use, as mlx5_0:1; ^ leaves out",
    "NCCL_IB_DISABLE": "1: sockets between nodes, no InfiniBand or RoCE",
    "NCCL_IB_GID_INDEX": "entry of the GID table, which RoCE may need",
    "NCCL_IB_TC": "traffic class of InfiniBand or RoCE packets",
    "NCCL_IB_SL": "service level of InfiniBand packets",
    "NCCL_IB_TIMEOUT": "InfiniBand's timeout, an exponent",
    "NCCL_IB_RETRY_CNT": "how often InfiniBand sends again",
    "NCCL_IB_QPS_PER_CONNECTION": "queue pairs of a connection: more spread over more paths",
    "NCCL_NET": "which network module: IB, Socket or a plugin's name",
    "NCCL_NET_PLUGIN": "library with a network plugin",
    "NCCL_NET_GDR_LEVEL": "how far a GPU and an adapter may be apart for GPUDirect RDMA",
    "NCCL_CROSS_NIC": "whether rings and trees may use different adapters on different nodes",
    "NCCL_P2P_DISABLE": "1: no direct copies between GPUs, shared memory of the host instead",
    "NCCL_P2P_LEVEL": "how far two GPUs may be apart for direct copies: NVL, PIX, PXB, PHB, SYS",
    "NCCL_SHM_DISABLE": "1: no shared memory between processes of a node",
    "NCCL_NVLS_ENABLE": "0: no reductions inside NVSwitch (NVLink SHARP, which uses multicast)",
    "NCCL_MNNVL_ENABLE": "whether NVLink may span nodes: 0 no, 1 yes, 2 where it is there",
    "NCCL_CUMEM_ENABLE": "whether NCCL allocates with CUDA's virtual memory functions",
    "NCCL_ALGO": "algorithms that NCCL may choose from: Ring, Tree, NVLS and others",
    "NCCL_PROTO": "protocols that NCCL may choose from: LL, LL128, Simple; LL128 not everywhere",
    "NCCL_MIN_CTAS": "least blocks that a collective occupies the GPU with",
    "NCCL_MAX_CTAS": "most blocks that a collective occupies the GPU with",
    "NCCL_MIN_NCHANNELS": "least channels, the older name of NCCL_MIN_CTAS",
    "NCCL_MAX_NCHANNELS": "most channels, the older name of NCCL_MAX_CTAS",
    "NCCL_NTHREADS": "threads of NCCL's blocks",
    "NCCL_BUFFSIZE": "bytes of the buffer between two GPUs",
    "NCCL_TOPO_FILE": "file with the topology, in place of what NCCL detects",
    "NCCL_TOPO_DUMP_FILE": "file that the detected topology is written to",
    "NCCL_GRAPH_FILE": "file with rings and trees, in place of what NCCL computes",
    "NCCL_TUNER_PLUGIN": "library that chooses algorithm and protocol",
    "NCCL_CONF_FILE": "file that more variables are read from",
    "NCCL_COLLNET_ENABLE": "1: reductions inside InfiniBand switches (SHARP)",
    "NCCL_LAUNCH_MODE": "PARALLEL or GROUP: how one process launches on several GPUs",
    "NCCL_GRAPH_MIXING_SUPPORT": "0: a captured and a plain collective never run at once",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what follows a failed or late collective; 0: nothing",
    "TORCH_NCCL_BLOCKING_WAIT": "1: wait() blocks the host and raises when it times out",
    "TORCH_NCCL_ENABLE_MONITORING": "1: a thread ends the process when its watchdog hangs",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "seconds after which a watchdog counts as hung",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "collectives that the flight recorder keeps",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1: the flight recorder is written out on a timeout",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "where the flight recorder writes, the rank behind it",
    "TORCH_NCCL_DESYNC_DEBUG": "1: says which ranks are behind when a collective times out",
    "TORCH_NCCL_ENABLE_TIMING": "1: events around every collective, which cost time",
    "TORCH_NCCL_HIGH_PRIORITY": "1: collectives on streams of high priority",
    "TORCH_NCCL_CUDA_EVENT_CACHE": "1: events are used again",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1: tensors are kept alive without recordStream",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1: communicators are made in the background",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1: symmetric memory without NVLink multicast",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1: two ranks on one GPU, for tests",
    "NVSHMEM_DISABLE_NVLS": "1: NVSHMEM without NVLink SHARP and multicast",
    "NVSHMEM_SYMMETRIC_SIZE": "bytes of the symmetric heap",
    "NVSHMEM_DEBUG": "what NVSHMEM prints: VERSION, WARN, INFO, ABORT or TRACE",
    "NVSHMEM_DISABLE_P2P": "1: no direct access between GPUs",
    "NVSHMEM_BOOTSTRAP": "how processes find each other: MPI, UID, PMI and others",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "network interface for starting up by UID",
    "NVSHMEM_REMOTE_TRANSPORT": "what carries data between nodes: ibrc, ucx, ibdevx, none",
    "NVSHMEM_HCA_LIST": "InfiniBand or RoCE adapters to use",
    "NVSHMEM_IB_GID_INDEX": "entry of the GID table, which RoCE may need",
}
"""What each variable does, in one line."""
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Values that keep NVLink multicast off. No rank of ours changes them, and the output says so."""
MULTI_NODE_ADVICE = {
    "MASTER_ADDR": "the first node's address, the same on all: torchrun takes --rdzv-endpoint",
    "MASTER_PORT": "a free port there",
    "NCCL_SOCKET_IFNAME": "the interface that the nodes reach each other by",
    "GLOO_SOCKET_IFNAME": "the same for Gloo, which agrees on times between ranks",
    "NCCL_IB_HCA": "the adapters beside the GPUs, where there is InfiniBand or RoCE",
    "NCCL_IB_GID_INDEX": "on RoCE where connections fail: often 3",
}
"""What ranks on several nodes need, in the order to set it."""


def nccl_env_result(environment: Mapping[str, str], version: str) -> CliResult:
    """Explain the variables of `environment` that concern NCCL, without changing any.

    Args:
        version: `nccl_version`.
    """
    found = sorted(name for name in environment if name.startswith(PREFIXES))
    lines = [version, "", "set here" if found else f"none of {', '.join(PREFIXES)}* is set here"]
    if found:
        meanings = [(f"{name}={environment[name]}", _meaning(name, environment)) for name in found]
        lines += columns(meanings)
    lines += ["", "for several nodes (advice; nothing was set)"]
    values = {
        n: f"is {environment[n]}" if n in environment else "not set" for n in MULTI_NODE_ADVICE
    }
    lines += columns([(name, values[name], text) for name, text in MULTI_NODE_ADVICE.items()])
    names = (name for _, name in socket.if_nameindex())
    lines.append(f"interfaces here: {', '.join(names)}")
    adapters = sorted(p.name for p in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    lines.append(f"InfiniBand or RoCE adapters here: {', '.join(adapters) or 'none'}")
    return CliResult(lines)


def _meaning(name: str, environment: Mapping[str, str]) -> str:
    known = MEANINGS.get(name, "not in this table: see the library's documentation")
    respected = MULTICAST_OFF.get(name) == environment[name].strip()
    return known + (" (respected: the ranks get it as it is)" if respected else "")


def nccl_version() -> str:
    """Return one line with the version of NCCL in this torch."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no NCCL: it was built without CUDA"
    found = ".".join(map(str, torch.cuda.nccl.version()))
    return f"NCCL {found}, in torch {torch.__version__}"
