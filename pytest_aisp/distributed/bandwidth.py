"""`aisp links bandwidth`: copy between every pair of GPUs, and name the slow links.

Each rate is compared with the limit of its link and with other links of the same kind. One process
allocates a send and a receive buffer on each GPU. A window is several copies, timed together by
CUDA events on the stream of the source GPU. The rate comes from the median time of several windows.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from ..results.row import duration
from ..timing import peaks
from ..util.cli_result import CliError, CliResult, columns, rate_text, size_text, with_progress
from ..util.device import Machine
from ..util.gpu_lease import lease_gpus
from .topology import Route, read_topology

WINDOWS = 7
WINDOW_BYTES = 4 << 30
"""Target for the bytes that one window copies. A window has at least 4 and at most 64 copies."""
SLOW_SHARE = 0.8
"""A hop is slow if its rate is below this share of the median rate of hops of the same kind."""
SLOW_SHARE_BOTH = 0.6
"""The same for hops in both directions at once. On two machines with four H200s, no hop in one
direction was slow, but hops in both directions reached 520 to 770 GB/s, in the same order on both.
"""
NVLINK_FLOOR, NVLINK_FULL = 250e9, 450e9
"""`NVLINK_FLOOR` is the lowest acceptable rate of a hop whose links carry `NVLINK_FULL` in total.

If the links carry less, the floor is proportionally lower. For example, a bridge of 4 links cannot
carry 250 GB/s.
"""
FULL_RATE_BYTES = 256 << 20
"""Smaller copies do not fill a link, so the floor does not apply to them."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Hop:
    """The measured rate between two GPUs.

    Attributes:
        source, target: the indices of the GPUs in NVML.
        both: True if both directions were busy at once. `rate` is then the sum of both.
        rate: bytes/s.
        kind: the kind of route, as in `topology.Route.kind`.
        limit: the highest possible rate in bytes/s, or None if the limit is unknown. If `both` is
            True, this is the sum of both directions.
        arrived: True if the target received what the source had sent.
        slow: the reason why the hop is considered slow, or an empty string.
    """

    source: int
    target: int
    both: bool
    rate: float
    kind: str
    limit: float | None
    arrived: bool = True
    slow: str = ""

    @property
    def label(self) -> str:
        return f"GPU {self.source} {'<->' if self.both else '->'} GPU {self.target}"

    @property
    def share(self) -> float | None:
        """The rate as a share of the limit, or None if the limit is unknown."""
        return None if self.limit is None else self.rate / self.limit


class CudaCopier:
    """Copies of `nbytes` between `devices`, timed by CUDA events."""

    def __init__(self, devices: Sequence[str], nbytes: int) -> None:
        import torch

        self._devices = devices
        self._send, self._receive = [], []
        for number, name in enumerate(devices):
            buffers = torch.empty(2, nbytes, dtype=torch.uint8, device=name)
            self._send.append(buffers[0].fill_(number + 1))
            self._receive.append(buffers[1])
        # Use two streams per GPU. A copy waits for the current streams of both GPUs. With one
        # stream per GPU, copies in opposite directions would take turns.
        self._streams = [[torch.cuda.Stream(name) for name in devices] for _ in range(2)]

    def _copy(self, direction: int, pair: Pair) -> None:
        import torch

        source, target = pair
        streams = self._streams[direction]
        with torch.cuda.stream(streams[target]), torch.cuda.stream(streams[source]):
            self._receive[target].copy_(self._send[source], non_blocking=True)

    def _synchronize(self) -> None:
        import torch

        for name in self._devices:
            torch.cuda.synchronize(name)

    def seconds(self, pairs: Sequence[Pair], copies: int) -> float:
        """Return the seconds for `copies` copies per pair, with all pairs copying in parallel."""
        import torch

        self._synchronize()
        first = self._streams[0][pairs[0][0]]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(first)
        for direction, (source, _) in enumerate(pairs):
            self._streams[direction][source].wait_event(start)
        for _ in range(copies):
            for direction, pair in enumerate(pairs):
                self._copy(direction, pair)
        for direction, (source, _) in enumerate(pairs):
            done = torch.cuda.Event()
            done.record(self._streams[direction][source])
            first.wait_event(done)
        end.record(first)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def arrived(self, pairs: Sequence[Pair]) -> bool:
        """Copy along each of `pairs` into cleared buffers. Return True if all bytes arrive."""
        for _, target in pairs:
            self._receive[target].zero_()
        self._synchronize()
        for direction, pair in enumerate(pairs):
            self._copy(direction, pair)
        self._synchronize()
        extremes = [(s, self._receive[t].aminmax()) for s, t in pairs]
        return all(int(e.min) == int(e.max) == s + 1 for s, e in extremes)


def measure(
    copier: CudaCopier, routes: Mapping[Pair, Route], nbytes: int, progress: Callable[[str], None]
) -> list[Hop]:
    """Measure each direction of each route alone, then both directions at once.

    Args:
        routes: the routes, keyed by the indices of `copier`'s devices.
    """
    count = min(64, max(4, math.ceil(WINDOW_BYTES / nbytes)))
    pairs = sorted(routes)
    plan = [[pair] for pair in pairs] + [[(a, b), (b, a)] for a, b in pairs if a < b]
    hops: list[Hop] = []
    for directions in plan:
        route = routes[directions[0]]
        limit = None if route.limit is None else route.limit * len(directions)
        hop = Hop(route.source, route.target, len(directions) == 2, 0.0, route.kind, limit)
        progress(with_progress(hop.label, len(hops), len(plan)))
        arrived = copier.arrived(directions)  # also warms up the route
        seconds = median(copier.seconds(directions, count) for _ in range(WINDOWS))
        rate = len(directions) * nbytes * count / seconds
        hops.append(replace(hop, rate=rate, arrived=arrived))
    return flag_slow_hops(hops, nbytes)


def flag_slow_hops(hops: Sequence[Hop], nbytes: int) -> list[Hop]:
    """Return `hops`, with `slow` set where the rate is too low.

    A rate is too low if it is far below the median of the hop's kind, or below the hop's floor.
    """
    kinds: dict[tuple[str, bool], list[float]] = {}
    for hop in hops:
        kinds.setdefault((hop.kind, hop.both), []).append(hop.rate)
    return [replace(h, slow=_why_slow(h, median(kinds[h.kind, h.both]), nbytes)) for h in hops]


def _why_slow(hop: Hop, usual: float, nbytes: int) -> str:
    if hop.rate < (SLOW_SHARE_BOTH if hop.both else SLOW_SHARE) * usual:
        return f"{hop.rate / usual:.0%} of the median of {hop.kind}, {rate_text(usual)}"
    floor = _floor(hop)
    if nbytes >= FULL_RATE_BYTES and hop.rate < floor:
        return f"below the {rate_text(floor)} that {hop.kind} must reach"
    return ""


def _floor(hop: Hop) -> float:
    """Return the lowest acceptable rate of a hop, or 0 for PCIe and for unknown link rates."""
    if not hop.kind.startswith("NVLink") or hop.limit is None:
        return 0.0
    directions = 2 if hop.both else 1
    return min(NVLINK_FLOOR * directions, NVLINK_FLOOR / NVLINK_FULL * hop.limit)


def measure_visible_gpus(nbytes: int, progress: Callable[[str], None]) -> tuple[int, list[Hop]]:
    """Lease the visible GPUs, and return their number and the measured hops between them.

    Raises:
        CliError: if there are fewer than two GPUs, a GPU is unknown to NVML, or memory runs out.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        have = {0: "none is", 1: "one is"}[count]
        raise CliError(
            f"aisp links bandwidth needs 2 GPUs; {have} visible here\n    aisp links topology"
        )
    known = read_topology()
    uuids = [f"GPU-{torch.cuda.get_device_properties(k).uuid}" for k in range(count)]
    indices = []
    for uuid in uuids:
        gpu = known.gpu(uuid)
        if gpu is None:
            raise CliError(f"NVML does not know {uuid}: MIG slices have no separate links")
        indices.append(gpu.index)
    pairs = itertools.permutations(range(count), 2)
    routes = {(a, b): known.route(indices[a], indices[b]) for a, b in pairs}
    with lease_gpus(uuids, progress):
        try:
            copier = CudaCopier([f"cuda:{k}" for k in range(count)], nbytes)
        except torch.OutOfMemoryError:
            raise CliError(
                f"no room for two buffers of {size_text(nbytes)} on each GPU\n"
                "Take smaller ones, or find out who holds the memory:\n"
                "    aisp links bandwidth --size=256MiB\n    nvidia-smi"
            ) from None
        return count, measure(copier, routes, nbytes, progress)


def bandwidth_result(hops: Sequence[Hop], nbytes: int, *, as_json: bool) -> CliResult:
    """Return the output of the command. The exit code is 1 if a hop is slow or loses data."""
    bad = [hop for hop in hops if hop.slow or not hop.arrived]
    code = 1 if bad else 0
    if as_json:
        plain = [asdict(hop) | {"share": hop.share} for hop in hops]
        document = {"size": nbytes, "windows": WINDOWS, "hops": plain}
        return CliResult([json.dumps(document, indent=1)], code)
    title = f"device-to-device copies of {size_text(nbytes)}, median of {WINDOWS} windows"
    table = columns([("hop", "rate", "limit", "share", "kind", ""), *map(_hop_row, hops)])
    return CliResult([title, *table, *_describe_bad_hops(bad)], code)


def _hop_row(hop: Hop) -> tuple[str, ...]:
    limit = "?" if hop.limit is None else rate_text(hop.limit)
    share = "?" if hop.share is None else f"{hop.share:.0%}"
    mark = "slow" if hop.slow else ""
    return hop.label, rate_text(hop.rate), limit, share, hop.kind, mark if hop.arrived else "WRONG"


def _describe_bad_hops(bad: Sequence[Hop]) -> list[str]:
    if not bad:
        return ["no slow hop"]
    lines = [
        f"WRONG: {h.label}: the target does not hold the sent data" for h in bad if not h.arrived
    ]
    lines += [f"slow: {hop.label}: {rate_text(hop.rate)}, {hop.slow}" for hop in bad if hop.slow]
    advice = "Measure again with nothing else on the GPUs, then look at the links' errors:"
    return [*lines, advice, "    nvidia-smi nvlink -e"]


def peer_peaks(hops: Sequence[Hop], nbytes: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return the peak rates ``peer`` and ``peer_both``, and a description of each measurement.

    Raises:
        CliError: if a hop is slow (exit code 1), or the copies are too small to reach the peak.
    """
    if any(hop.slow or not hop.arrived for hop in hops):
        raise CliError("nothing is stored: a machine with a slow hop has no peaks", code=1)
    if nbytes < FULL_RATE_BYTES:
        raise CliError(
            f"nothing is stored: copies of {size_text(nbytes)} do not fill a link\n"
            "    aisp links bandwidth --size=1GiB --store"
        )
    rates, facts = {}, {}
    for key, both in (("peer", False), ("peer_both", True)):
        hop = max((h for h in hops if h.both is both), key=lambda hop: hop.rate)
        rates[key] = hop.rate
        facts[key] = f"{hop.label}, {hop.kind}, {size_text(nbytes)}, median of {WINDOWS} windows"
    return rates, facts


def refuse_under_ci() -> None:
    """Raise `CliError` for ``--store`` if the variable CI is set."""
    if os.environ.get("CI"):
        raise CliError(
            "--store is refused if CI is set: a gate must not change its own limits\n"
            "Store on the machine by hand and commit the file"
        )


def store_peaks(
    baselines: Path,
    machine: Machine,
    count: int,
    rates: Mapping[str, float],
    facts: Mapping[str, str],
) -> list[str]:
    """Add `rates`, measured on `count` GPUs of `machine`, to the stored peaks of these GPUs.

    Return one line of text for each rate.

    Args:
        facts: a description of each measurement. This function adds the versions and the date.

    Raises:
        CliError: if the GPUs are different products, or the file cannot be written.
    """
    if count > len(machine.gpus):
        raise CliError(
            f"nothing is stored: only {len(machine.gpus)} of {count} GPUs are {machine.name}, but"
            " peaks belong to one product"
        )
    product = machine.with_count(count)
    path = peaks.path_of(baselines, product)
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    versions = ", ".join(f"{k} {v}" for k, v in machine.versions.items())
    dated = {key: f"{how}, {versions}, {date}" for key, how in facts.items()}
    try:
        peaks.add(path, product, rates, {"name": f"{count} x {machine.name}", **dated})
    except (peaks.PeaksError, OSError) as error:
        raise CliError(f"nothing is stored: {error}") from None
    texts = {k: duration(r) if k in peaks.SECONDS else rate_text(r) for k, r in rates.items()}
    return [f"stored in {path}: {key} {text}" for key, text in texts.items()]
