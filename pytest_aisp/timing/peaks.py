"""Peaks are the best rates measured on this machine. Peaks limit the speed of a page's work.

Each direction has its own rate: an H200 reads at 4.3, copies at 4.2 and fills at 4.6 TB/s. With a
single "bandwidth" for all directions, a correct fill could look too fast.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..page.cost import memory_rates
from ..page.pair import Work

SCHEMA = 1
TOLERANCE = 1.05
"""A side that is faster than the limit by more than this factor skips declared work."""
PCIE = ("h2d", "d2h")
UNITS = ("l2", "shared", "atomics", "sfu", "blocks")
"""Rates of single units of a GPU, which are no limit, because other units may do the work."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32"}
"""Types of the matrix products. The slowest type is last, because a hot GPU lowers its clocks."""
LINKS = ("peer", "busbw")
"""Rates at which a rank sends: in a copy to a peer, and in the largest all-reduce (busbw)."""
MEETINGS = ("all_reduce", "barrier")
SECONDS = ("launch", "host_step", "sync", "graph_node", *MEETINGS)
MEMORY = ("copy", "read", "write", *UNITS[:2])
ASSUMED = "assumed:"
"""The fact of a rate that is another product's begins with this word."""
LATENCY = "in_flight"
"""The rate that limits a kernel whose loads have too few bytes in flight (Little's law)."""
MATRIX = (*DTYPES, "fp8", "int8")
RATES = (*MEMORY, LATENCY, *MATRIX, *UNITS[2:], *PCIE, "pcie_both", *LINKS, "peer_both", *SECONDS)


class PeaksError(ValueError):
    """The peaks cannot be used. The message says why, and what is allowed."""


@dataclass(frozen=True)
class Peaks:
    """The best rates of one GPU or CPU model. Rates that do not apply to the machine are missing.

    Attributes:
        product: name of the model, as in `device.Machine`.
        rates: In bytes/s: ``copy`` (read plus written), ``read`` and ``write`` for DRAM. ``h2d``,
            ``d2h`` and ``pcie_both`` (both directions at once) for copies of pinned memory. ``l2``
            and ``shared`` for reads of data that stays there. ``in_flight``: the bytes/s read from
            DRAM, divided by the bytes that each SM has in flight. In FLOP/s: matrix products
            by type. In operations/s: ``atomics`` (additions in the L2), ``sfu`` (exponentials) and
            ``blocks`` (blocks of a kernel that does nothing). In seconds: a tiny kernel's cost on
            the host (``launch``) and in a graph (``graph_node``), a call of torch that launches
            nothing (``host_step``), and `Tensor.item` (``sync``). A machine with several GPUs has
            more rates. In bytes/s: copies to a ``peer`` or in both directions (``peer_both``), and
            the largest all-reduce (``busbw``). In seconds, beyond the start of a kernel: the
            smallest ``all_reduce``, and a ``barrier`` in symmetric memory.
        facts: the fastest kernel of each rate, and the GPU, versions, clocks and date.
    """

    product: str
    rates: Mapping[str, float]
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, rate in self.rates.items():
            if key not in RATES:
                raise PeaksError(f"unknown rate {key!r}; legal: {', '.join(RATES)}")
            if not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
                raise PeaksError(f"{key}={rate!r} must be a number > 0")


@dataclass(frozen=True)
class Limit:
    """The minimum time that the declared work can take, and the rate that determines it."""

    name: str
    seconds: float


def limit_of(work: Work, bound: str, peaks: Peaks) -> Limit | None:
    """Return the limit of `work`, or None if nothing is declared or a rate was not measured.

    The limit is the time of the slowest of three resources, which work at the same time. The time
    of memory uses the copy rate for equal bytes read and written, and the read or write rate for
    the remaining bytes. Pages bound by the L2 use the L2's rate. The time of arithmetic is the sum
    over types. The third resource is the link, at its faster rate, for pages that are bound by a
    link.
    """
    memory, wire = memory_rates(work.read, work.write), dict[str, float]()
    if bound == "l2":
        memory = {"l2": work.read + work.write}
    if links := {"pcie": PCIE, "nvlink": LINKS, "latency": LINKS}.get(bound):
        wire = {max(links, key=lambda k: peaks.rates.get(k, 0.0)): work.wire}
    resources = (memory, work.flops, wire)
    used = [{k: amount for k, amount in r.items() if amount} for r in resources]
    if not any(used) or any(k not in peaks.rates for r in used for k in r):
        return None
    times = [{k: amount / peaks.rates[k] for k, amount in r.items()} for r in used]
    slowest = max(times, key=lambda parts: sum(parts.values()))
    return Limit(max(slowest, key=lambda k: slowest[k]), sum(slowest.values()))


def share(limit: Limit, seconds: float) -> float:
    """Return the limit's time divided by `seconds`: 0.5 means twice the minimum time."""
    return limit.seconds / seconds if seconds > 0 else math.inf


def implausible(limit: Limit, seconds: float, most: float = TOLERANCE) -> bool:
    """Return whether `seconds` is too short for the declared work with cold buffers.

    The time is too short if the side exceeds the limit's rate by more than the factor `most`. A
    link's time is never too short, because a switch may do the reduction, and a GPU has several
    links. The L2's time is never too short, because the L1 may serve some reads.
    """
    return limit.name not in (*LINKS, *UNITS) and share(limit, seconds) > most


def joined(one: Peaks | None, several: Peaks | None) -> Peaks | None:
    """Return the peaks of one GPU, plus the peaks of the links if they are known."""
    if one is None or several is None:
        return one or several
    links = {key: rate for key, rate in several.rates.items() if key in (*LINKS, *MEETINGS)}
    facts = {key: fact for key, fact in several.facts.items() if key in links}
    return Peaks(several.product, {**one.rates, **links}, {**one.facts, **facts})


def with_peer(several: Peaks | None, pair: Peaks | None) -> Peaks | None:
    """Return the peaks `several`, with the rate `peer` of two GPUs if it lacks its own.

    With NVLink through a switch, the rate between two GPUs does not depend on the number of GPUs.
    """
    if several is None or pair is None or "peer" in several.rates:
        return several
    if "peer" not in pair.rates or "NVLink" not in pair.facts.get("peer", ""):
        return several
    why = f"{ASSUMED} GPUs of {several.product} copy to each other at the rate of {pair.product}"
    rates = {**several.rates, "peer": pair.rates["peer"]}
    return Peaks(several.product, rates, {**several.facts, "peer": why})


def add(path: Path, product: str, rates: Mapping[str, float], facts: Mapping[str, str]) -> None:
    """Add `rates` and `facts` to the peaks in `path`. Raises the errors of `save`."""
    before = stored(path) or Peaks(product, {})
    save(path, Peaks(product, {**before.rates, **rates}, {**before.facts, **facts}))


def path_of(baselines: Path, product: str) -> Path:
    """Return the file with a product's peaks."""
    return baselines / product / "peaks.json"


def stored(path: Path) -> Peaks | None:
    """Return the peaks in `path`, or None if there is no such file. May raise `PeaksError`."""
    return load(path) if path.exists() else None


def load(path: Path) -> Peaks:
    """Return the peaks stored in `path`.

    Raises:
        FileNotFoundError: if there is no such file.
        PeaksError: if the file is damaged or is not a peaks file.
    """
    try:
        stored = json.loads(path.read_bytes())
        if stored["schema"] != SCHEMA:
            raise PeaksError(f"schema {stored['schema']!r}")
        return Peaks(str(stored["product"]), dict(stored["rates"]), dict(stored["facts"]))
    except (ValueError, KeyError, TypeError) as error:
        raise PeaksError(
            f"{path} is not a peaks file of schema {SCHEMA} ({type(error).__name__}: {error});"
            f" restore it, or remove it to measure again:\n  git checkout -- {path}"
        ) from error


def save(path: Path, peaks: Peaks) -> None:
    """Write `peaks` to `path` atomically, one rate per line, with four significant digits.

    Raises:
        PeaksError: if `path` exists but has no peaks of this product. The file is not changed.
    """
    if path.exists() and (before := load(path).product) != peaks.product:
        raise PeaksError(f"{path} holds the peaks of {before}, not of {peaks.product}")
    rates = {key: float(rate) for key, rate in peaks.rates.items()}
    content = {"schema": SCHEMA, "product": peaks.product, "facts": peaks.facts, "rates": rates}
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    text = re.sub(r"(?<=: )[\d.e+-]+(?=,?\n)", lambda number: f"{float(number[0]):.4g}", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
