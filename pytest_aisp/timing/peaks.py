"""Peaks: what this machine does at best, and the limit that sets for a page's work.

Each direction has its own ceiling: an H200 reads at 4.3, copies at 4.2 and fills at 4.6 TB/s, so
one "bandwidth" would call an honest fill a lie. `survey` measures them; data sheets are not asked.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..page.pair import Work

SCHEMA = 1
TOLERANCE = 1.05
"""A share of the limit above this is no measurement of the declared work."""
PCIE = ("h2d", "d2h")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32"}
"""Types of the matrix products, the longest last: a hot chip lowers its clocks."""
LINKS = ("peer", "busbw")
"""What a rank of several GPUs sends at: a copy to a peer, and the largest all-reduce's busbw."""
SECONDS = ("launch", "graph_node", "all_reduce")
RATES = ("copy", "read", "write", *DTYPES, "fp8", *PCIE, *LINKS, "peer_both", *SECONDS)


class PeaksError(ValueError):
    """Peaks or a work that cannot be used; the message says why and what is legal."""


@dataclass(frozen=True)
class Peaks:
    """The best rates of one product; a rate that the machine does not have is absent.

    Attributes:
        product: as in `device.Machine`.
        rates: ``copy`` (read plus written), ``read``, ``write``: bytes/s through DRAM; ``fp32``,
            ``tf32``, ``bf16``, ``fp16``, ``fp8``: FLOP/s of matrix products; ``h2d``, ``d2h``:
            bytes/s from and to pinned memory; ``launch``, ``graph_node``: seconds that a tiny
            kernel costs the host, and takes inside a graph. Of several GPUs (``nvidia-h200-x2``)
            ``peer``: bytes/s of the best copy to another GPU, ``peer_both``: of both directions
            together (`bandwidth`); ``busbw``: bytes/s of the largest all-reduce, ``all_reduce``:
            seconds of the smallest (`nccl`).
        facts: which kernel was fastest, and GPU, versions, clocks and date.
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
    """The least seconds that the declared work takes, and the rate that sets them."""

    name: str
    seconds: float


def limit_of(work: Work, bound: str, peaks: Peaks) -> Limit | None:
    """Return the limit of `work`, or None where nothing is declared or a rate is not measured.

    It is the slowest of three resources that work at the same time. Memory: what is both read and
    written at the copy rate, the surplus at its own, ``2 min(r, w) / copy + |r - w| / read`` or
    ``/ write``. Arithmetic: the sum over types. The wire, where it is the bound: PCIe at its faster
    direction, since `Work` does not say which, and links between GPUs (``nvlink``, ``latency``) at
    the faster of a copy and an all-reduce. L2 is not measured, so pages bound by it have no limit;
    launches and latencies are no resource, so pages bound by them have a small share.
    """
    resources = (_traffic(work, bound), work.flops, _wire(work, bound, peaks))
    used = [{k: amount for k, amount in r.items() if amount} for r in resources]
    if not any(used) or any(k not in peaks.rates for r in used for k in r):
        return None
    times = [{k: amount / peaks.rates[k] for k, amount in r.items()} for r in used]
    slowest = max(times, key=lambda parts: sum(parts.values()))
    return Limit(max(slowest, key=lambda k: slowest[k]), sum(slowest.values()))


def share(limit: Limit, seconds: float) -> float:
    """Return the reached part of the limit's speed: 0.5 means twice the least time."""
    return limit.seconds / seconds if seconds > 0 else math.inf


def implausible(limit: Limit, seconds: float) -> bool:
    """Say whether `seconds` is less than the declared work can take on this machine.

    Only for cold buffers: what stays in a cache is faster than DRAM and no lie. Nor does a link
    accuse anyone: a switch that reduces sends less than is counted, and a GPU has other links yet.
    """
    return limit.name not in LINKS and share(limit, seconds) > TOLERANCE


def _traffic(work: Work, bound: str) -> dict[str, float]:
    if bound == "l2":
        return {"l2": work.read + work.write}
    both = min(work.read, work.write)
    return {"copy": 2 * both, "read": work.read - both, "write": work.write - both}


def _wire(work: Work, bound: str, peaks: Peaks) -> dict[str, float]:
    wires = {"pcie": PCIE, "nvlink": LINKS, "latency": LINKS}.get(bound)
    if wires is None:
        return {}
    return {max(wires, key=lambda k: peaks.rates.get(k, 0.0)): work.wire}


def joined(one: Peaks | None, several: Peaks | None) -> Peaks | None:
    """Return the peaks of one GPU together with the link rates of several, where they are known."""
    if one is None or several is None:
        return one or several
    links = {key: rate for key, rate in several.rates.items() if key in LINKS}
    return Peaks(several.product, {**one.rates, **links}, one.facts)


def add(
    path: str | Path, product: str, rates: Mapping[str, float], facts: Mapping[str, str]
) -> None:
    """Put `rates` and `facts` among the peaks in `path`; what else is there stays.

    Raises:
        PeaksError: as `save` does.
    """
    before = load(path) if Path(path).exists() else Peaks(product, {})
    save(path, Peaks(product, {**before.rates, **rates}, {**before.facts, **facts}))


def path_of(baselines: Path, product: str) -> Path:
    """Return the file of a product's peaks."""
    return baselines / product / "peaks.json"


def stored(path: Path) -> Peaks | None:
    """Return the peaks stored in `path`, or None where there is no such file; raises as `load`."""
    return load(path) if path.exists() else None


def load(path: str | Path) -> Peaks:
    """Return the peaks stored in `path`.

    Raises:
        FileNotFoundError: when there are none.
        PeaksError: when the file is damaged or is something else.
    """
    try:
        stored = json.loads(Path(path).read_bytes())
        if stored["schema"] != SCHEMA:
            raise PeaksError(f"schema {stored['schema']!r}")
        return Peaks(str(stored["product"]), dict(stored["rates"]), dict(stored["facts"]))
    except (ValueError, KeyError, TypeError) as error:
        raise PeaksError(
            f"{path} is no peaks file of schema {SCHEMA} ({type(error).__name__}: {error});"
            f" restore it, or remove it to measure again:\n  git checkout -- {path}"
        ) from error


def save(path: str | Path, peaks: Peaks) -> None:
    """Write `peaks` to `path` at once or not at all, one rate a line, four significant digits.

    Raises:
        PeaksError: when `path` holds anything but peaks of the same product; it stays as it is.
    """
    path = Path(path)
    if path.exists() and (before := load(path).product) != peaks.product:
        raise PeaksError(f"{path} holds the peaks of {before}, not of {peaks.product}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(_text(peaks))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _text(peaks: Peaks) -> str:
    stored = {"schema": SCHEMA, "product": peaks.product, "facts": dict(peaks.facts)}
    stored["rates"] = {key: float(rate) for key, rate in peaks.rates.items()}
    text = json.dumps(stored, indent=1, sort_keys=True) + "\n"
    return re.sub(r"(?<=: )[\d.e+-]+(?=,?\n)", lambda number: f"{float(number[0]):.4g}", text)
