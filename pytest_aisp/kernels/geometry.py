"""How a kernel is launched, and what of that no GPU could do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..pages.signature import LaunchError

CLUSTER = 8
"""Blocks in a cluster that every GPU with clusters can schedule."""
LIMITS = {"grid": (2**31 - 1, 65535, 65535), "block": (1024, 1024, 64)}


@dataclass(frozen=True)
class Geometry:
    """How a kernel is launched: blocks, threads of a block, bytes of dynamic shared memory, ..."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int = 0
    cluster: tuple[int, ...] = ()
    cooperative: bool = False
    dependent: bool = False

    def __str__(self) -> str:
        said = [f"block {_by(self.block)}"]
        said += [f"cluster {_by(self.cluster)}"] * bool(self.cluster)
        said += [f"{self.shared} B dynamic"] * bool(self.shared)
        said += ["cooperative"] * self.cooperative + ["dependent"] * self.dependent
        return ", ".join(said)

    def config(self, core: Any) -> Any:
        """Return it as cuda.core takes it, which counts the grid in clusters."""
        grid = self.grid
        more: dict[str, Any] = {}
        if self.cluster:
            grid = tuple(n // c for n, c in zip(grid, self.cluster, strict=True))
            more["cluster"] = self.cluster
        if self.cooperative:
            more["is_cooperative"] = True
        if self.dependent:
            more["programmatic_stream_serialization"] = True
        return core.LaunchConfig(grid=grid, block=self.block, shmem_size=self.shared, **more)


def _by(dims: tuple[int, ...]) -> str:
    return "x".join(map(str, dims))


def geometry_of(name: str, where: Any) -> Geometry:
    if not isinstance(where, tuple) or len(where) not in (2, 3):
        raise LaunchError(f"{name}[{where!r}]: needs [grid, block] or [grid, block, shared_bytes]")
    grid, block = (dims if isinstance(dims, tuple) else (dims,) for dims in where[:2])
    for what, dims in (("grid", grid), ("block", block)):
        ints = 1 <= len(dims) <= 3 and all(isinstance(d, int) for d in dims)
        if not ints or not all(1 <= d <= m for d, m in zip(dims, LIMITS[what], strict=False)):
            needs = f"1 to 3 ints from 1 to at most {LIMITS[what]}"
            raise LaunchError(f"{name}: {what} is {dims!r}; needs {needs}")
    threads, shared = math.prod(block), (*where, 0)[2]
    if threads > 1024:
        raise LaunchError(f"{name}: block {block} has {threads} threads; needs at most 1024")
    if not isinstance(shared, int) or shared < 0:
        raise LaunchError(f"{name}: shared_bytes is {shared!r}; needs an int of at least 0")
    return Geometry(grid, block, shared)


def cluster_of(name: str, grid: tuple[int, ...], cluster: Any) -> tuple[int, ...]:
    """Return `cluster` with as many dimensions as `grid`; empty for none."""
    if cluster is None:
        return ()
    dims = cluster if isinstance(cluster, tuple) else (cluster,)
    dims += (1,) * (len(grid) - len(dims))
    if not all(isinstance(d, int) and d >= 1 for d in dims) or math.prod(dims) > CLUSTER:
        raise LaunchError(
            f"{name}: cluster is {cluster!r}; needs 1 to 3 ints from 1, together at most {CLUSTER}"
        )
    if len(dims) != len(grid) or any(n % c for n, c in zip(grid, dims, strict=True)):
        raise LaunchError(f"{name}: a grid of {grid} is no multiple of its cluster {cluster!r}")
    return dims
