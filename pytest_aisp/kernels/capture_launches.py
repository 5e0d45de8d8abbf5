"""What sides launch, written down instead of run: no GPU, no driver, no values.

`recorded` runs a side where a GPU of some arch is pretended (`standin`). Every kernel that it
launches is noted with its real meta-parameters, a tuned one with every configuration, and Triton's
are compiled for that arch on the way.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from ..checking.inputs import make_inputs, make_state
from ..page.pair import Pair, Side, Size, side_name
from ..util.process_group import SingleProcess, current_group, join
from . import cuda_cpp, tma
from .fake_gpu import fake_gpu
from .launch_config import check

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Triton's meta-parameters that are no parameters of the kernel."""

COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv"),
    *("P2POp", "batch_isend_irecv", "new_group"),
)
"""What of torch.distributed takes tensors and does nothing where ranks are pretended."""


@dataclass(frozen=True)
class Launch:
    """One kernel with its meta-parameters.

    Attributes:
        kernel: a `build.Kernel`, or the function inside a Triton kernel.
        how: the meta-parameters in words.
        grid: blocks, by dimension; threads: of a block.
        shared: bytes of a block: all of a Triton kernel, only the dynamic ones of CUDA C++.
        cubin: Triton's machine code, where it was compiled; fault: why it could not be.
    """

    kernel: Any
    name: str
    how: str
    grid: tuple[int, ...]
    threads: int = 0
    shared: int = 0
    cubin: bytes = b""
    fault: str = ""


@dataclass
class Launches:
    """What one side launches.

    Attributes:
        made: each different launch, once, in order.
        handed: functions that were handed to kernels.
        error: what ended the side, or None.
    """

    made: dict[tuple[Any, str], Launch] = field(default_factory=dict)
    handed: set[Any] = field(default_factory=set)
    error: Exception | None = None

    def add(self, launch: Launch) -> None:
        self.made.setdefault((launch.kernel, launch.how), launch)

    @property
    def kernels(self) -> set[Any]:
        """The kernels that were reached."""
        return {launch.kernel for launch in self.made.values()} | self.handed


def recorded(pair: Pair, side: Side, size: Size, arch: str, *, assemble: bool) -> Launches:
    """Return what `side` launches at `size` on a GPU of `arch`, compiled if `assemble`.

    A side that runs on several ranks is run as the first of each count of them.
    """
    found = Launches()
    for count in pair.gpus:
        with fake_gpu(arch), _first_of(count), _noting(found, assemble):
            try:
                _run(pair, side, size)
            except Exception as error:  # whatever a side does that needs values or a real GPU
                found.error = error
    return found


@contextlib.contextmanager
def _first_of(count: int) -> Iterator[None]:
    """Make this process seem to be the first of `count` ranks, between which nothing moves.

    Symmetric memory is memory like any other there, and all ranks have the first one's.
    """
    if count == 1:
        yield
        return
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    def buffer(rank: int, shape: Any, dtype: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    before, alone = current_group(), SingleProcess()
    alone.world = count
    answers: dict[str, Any] = {name: mock.MagicMock() for name in COLLECTIVES}
    answers |= {
        "is_initialized": lambda: True,
        "get_rank": lambda group=None: 0,
        "get_world_size": lambda group=None: count,
    }
    shared: dict[str, Any] = {
        "empty": torch.empty,
        "rendezvous": lambda tensor, group: mock.MagicMock(get_buffer=buffer),
    }
    try:
        join(alone)
        with mock.patch.multiple(dist, **answers), mock.patch.multiple(symmetric, **shared):
            yield
    finally:
        join(before)


def _run(pair: Pair, side: Side, size: Size) -> None:
    state = make_state(pair, "cuda", size, 0)
    arguments = make_inputs(pair, "cuda", size, 0)
    side = getattr(side, "side", side)  # a process side's own function
    made = side(*arguments) if state is None else side(state, *arguments)
    if inspect.isgenerator(made):
        run = next(made, None)
        if not callable(run):
            raise TypeError(f"{side_name(side)} must yield the callable to time, not {run!r}")
        run()


@contextlib.contextmanager
def _noting(found: Launches, assemble: bool) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        held.enter_context(mock.patch.object(cuda_cpp.Launch, "__call__", _cuda(found)))
        held.enter_context(mock.patch.object(cuda_cpp.Kernel, "clusters_at_once", _clusters))
        descriptor = type("TensorMapDescriptor", (), {})()
        held.enter_context(mock.patch.object(tma, "_encode", return_value=descriptor))
        if "triton" in sys.modules:
            from triton.runtime.autotuner import Autotuner
            from triton.runtime.jit import JITFunction

            run = _triton(found, JITFunction.run if assemble else None)
            held.enter_context(mock.patch.object(JITFunction, "run", run))
            held.enter_context(mock.patch.object(Autotuner, "run", _every_configuration))
        yield


def _cuda(found: Launches) -> Callable[..., None]:
    def launch(self: cuda_cpp.Launch, *args: Any) -> None:
        check(self.kernel.name, self.kernel.params, args, 0)
        at = self.geometry
        threads = math.prod(at.block)
        found.add(Launch(self.kernel, self.kernel.name, str(at), at.grid, threads, at.shared))

    return launch


def _clusters(self: cuda_cpp.Kernel, block: Any, shared: int = 0, *, cluster: Any) -> int:
    import torch

    processors = int(torch.cuda.get_device_properties(0).multi_processor_count)
    return processors // (math.prod(cluster) if isinstance(cluster, tuple) else int(cluster))


def _every_configuration(self: Any, *args: Any, **kwargs: Any) -> None:
    """Launch a tuned kernel in every configuration that pruning leaves, as tuning would."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    for config in self.prune_configs(kwargs):
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        self.fn.run(*args, **kwargs, **config.all_kwargs())
    self.nargs = None


def _triton(found: Launches, compiling: Callable[..., Any] | None) -> Callable[..., None]:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = {p.name: p.default for p in self.params if p.has_default}
        given |= {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        found.handed.update(value.fn for value in given.values() if hasattr(value, "fn"))
        blocks = tuple(grid(given) if callable(grid) else grid)
        how = _words(self, given)
        if (self.fn, how) in found.made and compiling is None:
            return
        compiled: dict[str, Any] = {}
        if compiling is not None:
            try:
                kernel = compiling(self, *args, grid=grid, warmup=True, **kwargs)
                threads = kernel.metadata.num_warps * kernel.metadata.warp_size
                compiled = {"cubin": kernel.asm["cubin"], "shared": kernel.metadata.shared}
                compiled["threads"] = threads
            except Exception as error:
                compiled["fault"] = str(error).strip() or type(error).__name__
        found.add(Launch(self.fn, self.__name__, how, blocks, **compiled))

    return run


def _words(kernel: Any, given: Mapping[str, Any]) -> str:
    names = [p.name for p in kernel.params if p.is_constexpr] + list(OPTIONS)
    kept = {name: given[name] for name in names if given.get(name) is not None}
    return ", ".join(f"{k}={getattr(v, '__name__', v)}" for k, v in kept.items())
