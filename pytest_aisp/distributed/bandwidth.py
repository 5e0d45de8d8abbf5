"""Copies between every two GPUs, each held against its link and against the others of its kind.

One process, one buffer to send and one to receive a GPU, allocated once. A hop is timed by CUDA
events around a few copies on the source's stream, the median of several such windows.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Protocol

from ..results.row import duration
from ..timing import peaks
from ..util.cli_result import CliError, CliResult, columns, part_of, rate_text, size_text
from ..util.device import Machine
from ..util.locks import together
from . import topology
from .topology import Way

WINDOWS = 7
IN_WINDOW = 4 << 30
"""Bytes that a window copies, in 4 copies at the least and 64 at most."""
SLOW = 0.8
"""A hop below this share of the median of its kind is slow."""
FLOOR, FULL = 250e9, 450e9
"""The least bytes/s of an NVLink hop, on a way that has 450 GB/s; on a narrower way in proportion:
a bridge of 4 links can never carry 250 GB/s."""
ENOUGH = 256 << 20
"""Smaller copies do not fill a link, so that the floor says nothing of them."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Hop:
    """One measured way.

    Attributes:
        source, target: NVML's indices of the GPUs.
        both: whether both directions were busy at once; `rate` is then their sum.
        rate: bytes/s.
        kind, limit: as in `topology.Way`; `limit` in bytes/s of as many directions as `rate`.
        arrived: whether the target held what the source had sent.
        slow: why the hop is slow, or empty.
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
        """The reached part of the limit, or None where that is unknown."""
        return None if self.limit is None else self.rate / self.limit


class Copies(Protocol):
    """What copies between GPUs by number, and says how long it took."""

    def seconds(self, pairs: Sequence[Pair], copies: int) -> float: ...

    def arrived(self, pairs: Sequence[Pair]) -> bool: ...


class Copier:
    """Copies of `nbytes` between `devices`, timed by CUDA events."""

    def __init__(self, devices: Sequence[str], nbytes: int) -> None:
        import torch

        self._devices = devices
        self._send, self._receive = [], []
        for number, name in enumerate(devices):
            made = torch.empty(2, nbytes, dtype=torch.uint8, device=name)
            self._send.append(made[0].fill_(number + 1))
            self._receive.append(made[1])
        # Two streams a GPU: a copy waits for both of its GPUs' current streams, so that the two
        # directions would take turns on one.
        self._streams = [[torch.cuda.Stream(name) for name in devices] for _ in range(2)]

    def _copy(self, way: int, pair: Pair) -> None:
        import torch

        source, target = pair
        streams = self._streams[way]
        with torch.cuda.stream(streams[target]), torch.cuda.stream(streams[source]):
            self._receive[target].copy_(self._send[source], non_blocking=True)

    def seconds(self, pairs: Sequence[Pair], copies: int) -> float:
        """Return the seconds that `copies` copies along each of `pairs` took, all at once."""
        import torch

        for name in self._devices:
            torch.cuda.synchronize(name)
        first = self._streams[0][pairs[0][0]]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(first)
        for way, (source, _) in enumerate(pairs):
            self._streams[way][source].wait_event(start)
        for _ in range(copies):
            for way, pair in enumerate(pairs):
                self._copy(way, pair)
        for way, (source, _) in enumerate(pairs):
            done = torch.cuda.Event()
            done.record(self._streams[way][source])
            first.wait_event(done)
        end.record(first)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def arrived(self, pairs: Sequence[Pair]) -> bool:
        """Say whether a copy along each of `pairs` brings every byte, into emptied buffers."""
        import torch

        for _, target in pairs:
            self._receive[target].zero_()
        for name in self._devices:
            torch.cuda.synchronize(name)
        for way, pair in enumerate(pairs):
            self._copy(way, pair)
        for name in self._devices:
            torch.cuda.synchronize(name)
        extremes = [(s, self._receive[t].aminmax()) for s, t in pairs]
        return all(int(e.min) == int(e.max) == s + 1 for s, e in extremes)


def measure(
    copies: Copies, ways: Mapping[Pair, Way], nbytes: int, tell: Callable[[str], None]
) -> list[Hop]:
    """Return every ordered pair alone, and every pair in both directions at once.

    Args:
        ways: by the numbers that `copies` knows the GPUs by.
    """
    count = min(64, max(4, math.ceil(IN_WINDOW / nbytes)))
    found: list[Hop] = []
    plans = list(_plans(ways))
    for pairs in plans:
        way, both = ways[pairs[0]], len(pairs) == 2
        hop = Hop(way.source, way.target, both, 0.0, way.kind, way.limit)
        tell(part_of(hop.label, len(found), len(plans)))
        arrived = copies.arrived(pairs)  # also the first time that the way is used
        seconds = median(copies.seconds(pairs, count) for _ in range(WINDOWS))
        limit = None if way.limit is None else way.limit * len(pairs)
        rate = len(pairs) * nbytes * count / seconds
        found.append(replace(hop, rate=rate, limit=limit, arrived=arrived))
    return judged(found, nbytes)


def _plans(ways: Iterable[Pair]) -> Iterator[list[Pair]]:
    pairs = sorted(ways)
    yield from ([pair] for pair in pairs)
    yield from ([(a, b), (b, a)] for a, b in pairs if a < b)


def judged(hops: Sequence[Hop], nbytes: int) -> list[Hop]:
    """Return `hops` with the slow ones named: against the median of their kind, and the floor."""
    kinds: dict[tuple[str, bool], list[float]] = {}
    for hop in hops:
        kinds.setdefault((hop.kind, hop.both), []).append(hop.rate)
    return [replace(h, slow=_slow(h, median(kinds[h.kind, h.both]), nbytes)) for h in hops]


def _slow(hop: Hop, usual: float, nbytes: int) -> str:
    if hop.rate < SLOW * usual:
        return f"{hop.rate / usual:.0%} of the median of {hop.kind}, {rate_text(usual)}"
    least = _floor(hop)
    if nbytes >= ENOUGH and hop.rate < least:
        return f"below the {rate_text(least)} that {hop.kind} must reach"
    return ""


def _floor(hop: Hop) -> float:
    """Return the least rate of a hop: none over PCIe, nor where the links' rate is unknown."""
    if not hop.kind.startswith("NVLink") or hop.limit is None:
        return 0.0
    directions = 2 if hop.both else 1
    return min(FLOOR * directions, FLOOR / FULL * hop.limit)


def here(nbytes: int, tell: Callable[[str], None]) -> tuple[int, list[Hop]]:
    """Return how many GPUs are visible here, and the hops between them; they are leased meanwhile.

    Raises:
        Unanswerable: for fewer than two GPUs, GPUs that NVML does not know, or no memory.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        have = {0: "none is", 1: "one is"}[count]
        raise CliError(f"aisp bandwidth needs 2 GPUs; {have} visible here\n    aisp topology")
    known = topology.read()
    uuids = [f"GPU-{torch.cuda.get_device_properties(k).uuid}" for k in range(count)]
    gpus = [known.gpu(uuid) for uuid in uuids]
    lost = [uuid for uuid, gpu in zip(uuids, gpus, strict=True) if gpu is None]
    if lost:
        raise CliError(f"NVML does not know {lost[0]}: MIG slices have no links of their own")
    index = {k: gpu.index for k, gpu in enumerate(gpus) if gpu is not None}
    pairs = itertools.permutations(range(count), 2)
    ways = {(a, b): known.way(index[a], index[b]) for a, b in pairs}
    with together(uuids, tell):
        try:
            copier = Copier([f"cuda:{k}" for k in range(count)], nbytes)
        except torch.OutOfMemoryError:
            raise CliError(
                f"no room for two buffers of {size_text(nbytes)} on each GPU\n"
                "Take smaller ones, or see who holds the memory:\n"
                "    aisp bandwidth --size=256MiB\n    nvidia-smi"
            ) from None
        return count, measure(copier, ways, nbytes, tell)


def best(hops: Sequence[Hop], *, both: bool) -> Hop:
    """Return the fastest hop in one direction, or in both."""
    return max((h for h in hops if h.both is both), key=lambda hop: hop.rate)


def bandwidth_result(hops: Sequence[Hop], nbytes: int, *, as_json: bool) -> CliResult:
    """Return the lines and the exit code: 1 where a hop is slow or loses data."""
    bad = [hop for hop in hops if hop.slow or not hop.arrived]
    if as_json:
        plain = [asdict(hop) | {"share": hop.share} for hop in hops]
        text = json.dumps({"size": nbytes, "windows": WINDOWS, "hops": plain}, indent=1)
        return CliResult([text], int(bool(bad)))
    return CliResult([*_table(hops, nbytes), *_faults(bad)], int(bool(bad)))


def _table(hops: Sequence[Hop], nbytes: int) -> list[str]:
    heads = ("hop", "rate", "limit", "share", "kind", "")
    rows = [heads, *map(_row, hops)]
    size = size_text(nbytes)
    return [f"device-to-device copies of {size}, median of {WINDOWS} windows", *columns(rows)]


def _row(hop: Hop) -> tuple[str, ...]:
    limit = "?" if hop.limit is None else rate_text(hop.limit)
    share = "?" if hop.share is None else f"{hop.share:.0%}"
    mark = "slow" if hop.slow else ""
    return hop.label, rate_text(hop.rate), limit, share, hop.kind, mark if hop.arrived else "WRONG"


def _faults(bad: Sequence[Hop]) -> list[str]:
    if not bad:
        return ["no slow hop"]
    lines = [
        f"WRONG: {h.label}: the target does not hold what was sent" for h in bad if not h.arrived
    ]
    lines += [f"slow: {hop.label}: {rate_text(hop.rate)}, {hop.slow}" for hop in bad if hop.slow]
    advice = "Measure again with nothing else on the GPUs, then look at the links' errors:"
    return [*lines, advice, "    nvidia-smi nvlink -e"]


def rates(hops: Sequence[Hop], nbytes: int) -> tuple[dict[str, float], dict[str, str]]:
    """Return what is stored as peaks, ``peer`` and ``peer_both``, and how each was taken.

    Raises:
        Unanswerable: where a hop is slow (exit code 1), or copies are small: that is no peak.
    """
    if any(hop.slow or not hop.arrived for hop in hops):
        raise CliError("nothing is stored: a machine with a slow hop has no peaks", code=1)
    if nbytes < ENOUGH:
        raise CliError(
            f"nothing is stored: copies of {size_text(nbytes)} do not fill a link\n"
            "    aisp bandwidth --size=1GiB --store"
        )
    found = {"peer": best(hops, both=False), "peer_both": best(hops, both=True)}
    how = f"{size_text(nbytes)}, median of {WINDOWS} windows"
    facts = {key: f"{hop.label}, {hop.kind}, {how}" for key, hop in found.items()}
    return {key: hop.rate for key, hop in found.items()}, facts


def refuse_under_ci() -> None:
    """Refuse to store where CI is set, before anything is measured."""
    if os.environ.get("CI"):
        raise CliError(
            "--store is refused where CI is set: a gate must not move its own limits\n"
            "Store on the machine by hand and commit the file"
        )


def keep(
    baselines: Path,
    machine: Machine,
    count: int,
    rates: Mapping[str, float],
    facts: Mapping[str, str],
) -> list[str]:
    """Add `rates` of `count` GPUs of `machine` to their peaks; return what was written, in words.

    Args:
        facts: by rate, how it was taken; versions and the date are put behind.

    Raises:
        Unanswerable: where the GPUs are not of one product, or the file cannot be written.
    """
    if count > len(machine.gpus):
        raise CliError(
            f"nothing is stored: of {count} GPUs {len(machine.gpus)} are {machine.name}, and peaks"
            " belong to one product"
        )
    product = machine.with_count(count)
    path = peaks.path_of(baselines, product)
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    versions = ", ".join(f"{k} {v}" for k, v in machine.versions.items())
    told = {key: f"{how}, {versions}, {date}" for key, how in facts.items()}
    try:
        peaks.add(path, product, rates, {"name": f"{count} x {machine.name}", **told})
    except (peaks.PeaksError, OSError) as error:
        raise CliError(f"nothing is stored: {error}") from None
    return [f"stored in {path}: {key} {_amount(key, rates[key])}" for key in rates]


def _amount(key: str, rate: float) -> str:
    return duration(rate) if key in peaks.SECONDS else rate_text(rate)
