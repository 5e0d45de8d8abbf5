"""Capture calls in CUDA graphs, replay and time the graphs, and count their nodes."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from ..checking.inputs import BoundSide
from ..isolation.protections import enabled
from ..page.pair import ROLES, SideError
from ..util.device_state import no_gc
from ..util.process_group import current_group
from .cpu_timer import HostWindow
from .cross_check import Clocks, read_clocks
from .schedule import Window, calls_for

if TYPE_CHECKING:
    import torch
    from torch.cuda import _POOL_HANDLE

T = TypeVar("T")
WARMUP = 3
"""Number of calls before a callable is captured."""
SCARCE = 1 / 4
"""If less than this share of memory is free, or less memory than the allocator's cache holds, the
cache is emptied before a capture. A capture needs about as much memory as earlier calls left in the
cache.
"""
abandoned: list[_POOL_HANDLE] = []
"""Memory pools of failed captures.

In some versions of torch, a failed capture leaves other state behind, too. So a process with a
failed capture gets no further tasks.
"""


class Uncapturable(RuntimeError):
    """A side cannot be captured in a CUDA graph. The message is the error from CUDA."""


class Uncounted(RuntimeError):
    """The nodes of a graph cannot be counted on this machine. The message gives the reason."""


class GraphWindow:
    """Time K calls in one CUDA graph. The time includes `extra` calls, but is divided by K only.

    An untimed replay precedes each timed replay on the stream. `before` runs between the two.
    """

    repeats = 2
    before: Callable[[], object] | None = None

    def __init__(self, side: BoundSide, counted: int, extra: int = 0) -> None:
        import torch

        self.side, self.counted, self.calls = side, counted, counted + extra
        self._graph = capture_graph(lambda: side.cycle(counted, extra))
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self) -> float:
        self._graph.replay()
        self.side.restore()
        if self.before is not None:
            self.before()
        current_group().start_window("cuda")
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        seconds = float(self._start.elapsed_time(self._end)) * 1e-3
        return current_group().slowest(seconds) / self.counted

    def replay(self) -> None:
        """Replay the graph once. Nothing is timed."""
        self._graph.replay()

    def nodes(self) -> dict[str, int]:
        """Return the number of nodes of each type in the graph. May raise `Uncounted`."""
        return count_nodes(self._graph)

    def clocks(self, seconds: float) -> Clocks:
        """Replay the graph for at least `seconds`, and time the replays with each clock."""
        replays = math.ceil(seconds / max(self(), 1e-9) / self.counted)

        def work() -> None:
            for _ in range(replays):
                self._graph.replay()

        return read_clocks(work, self._start, self._end)


def window_times(function: Callable[[], object], *, window: float, windows: int) -> list[float]:
    """Time a warm callable in `windows` windows, and return the seconds per call of each window.

    On a GPU, a window is the replay of a CUDA graph. On a CPU, or if `function` cannot be captured,
    windows are timed with the host's clock.
    """
    import torch

    side = BoundSide(function, [()])
    make: Callable[[int], Window] = functools.partial(HostWindow, side, device="cpu")
    if torch.cuda.is_available():
        try:
            GraphWindow(side, 1)
            make = functools.partial(GraphWindow, side)
        except Uncapturable:
            make = functools.partial(HostWindow, side)
    timed = make(calls_for(make(1)(), window, 1))
    timed()
    return [timed() for _ in range(windows)]


def on_all_ranks(make: Callable[[], T]) -> T:
    """Return the result of `make`, which captures a graph on every rank.

    Raises:
        Uncapturable: on every rank, if the capture fails on any rank.
    """
    made: list[T] = []
    refusal = None
    try:
        made.append(make())
    except Uncapturable as error:
        refusal = str(error)
    refusal = current_group().first_message(refusal)
    if refusal is not None:
        raise Uncapturable(refusal)
    return made[0]


def capture_graph(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture the work of `run` on a side stream. The graph keeps its nodes for counting.

    Raises:
        Uncapturable: if CUDA refuses the capture.
        torch.OutOfMemoryError: if there is not enough memory.
    """
    import torch

    _refuse_waiting(run)
    graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    pool = torch.cuda.graph_pool_handle()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if free < max(SCARCE * total, cached):
        torch.cuda.empty_cache()  # cached memory cannot be returned during a capture
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), no_gc():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            run()
            graph.capture_end()
            graph.instantiate()
        except torch.OutOfMemoryError:  # another clock would need as much memory
            _abandon(graph, pool)
            raise
        except Exception as error:
            _abandon(graph, pool)
            raise Uncapturable(str(error) or type(error).__name__) from error
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def _refuse_waiting(run: Callable[[], object]) -> None:
    """Run once and refuse any wait for the GPU, because a wait would make the capture fail."""
    import torch

    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise Uncapturable(str(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _abandon(graph: torch.cuda.CUDAGraph, pool: _POOL_HANDLE) -> None:
    """End a failed capture as far as possible. The process is not used again afterwards."""
    import torch

    abandoned.append(pool)
    with suppress(RuntimeError):  # an invalidated capture raises when it ends
        graph.capture_end()
    # Up to torch 2.11 a CUDA error skips this cleanup (pytorch/pytorch#180395). Without this
    # cleanup, the allocator returns no memory until the process ends.
    with suppress(RuntimeError):  # the allocator has already ended this capture
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
    torch.cuda.synchronize()
    # A successful capture resets PyTorch's random generator, but a failed capture does not.
    empty = torch.cuda.CUDAGraph()
    empty.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device="cuda")
    empty.capture_end()


def capture(step: Callable[[], T], *, pool: _POOL_HANDLE | None = None) -> Callable[[], T]:
    """Capture `step` in a CUDA graph and return a callable that replays it.

    `step` first runs three times on a side stream, to create lazily created objects before the
    capture. The callable returns `step`'s outputs, which every replay overwrites. The callable
    keeps `step` and the graph's tensors alive. Without a GPU, the callable is `step` itself, so
    that a page's results can be checked on any machine.

    Args:
        pool: memory that several graphs share (`torch.cuda.graph_pool_handle()`). Replay such
            graphs one after the other. By default, each graph has its own memory.

    Source: PyTorch's notes on CUDA graphs ("CUDA semantics").
    """
    import torch

    if not torch.cuda.is_available():
        return step
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        outputs = step()

    return functools.partial(_replay, graph, outputs, step)


def _replay(graph: torch.cuda.CUDAGraph, outputs: T, step: Callable[[], T]) -> T:
    graph.replay()
    return outputs


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all captures. With more streams, cuBLAS would keep more workspaces."""
    import torch

    return torch.cuda.Stream(device)


PREFIX = "CU_GRAPH_NODE_TYPE_"
NODE_NAMES = {
    "HOST": "host node",
    "GRAPH": "child graph",
    "EMPTY": "empty node",
    "WAIT_EVENT": "event wait",
}
"""Readable names of node types. Other types are named by the driver's constant in lower case."""
IDLE = frozenset(
    (
        *("host node", "child graph", "empty node", "event wait", "event record"),
        *("mem alloc", "mem free", "ext semas signal", "ext semas wait"),
    )
)
"""Node types that neither compute nor move data.

A child graph does not count as a node, because the nodes inside it are counted.
"""


def count_nodes(graph: torch.cuda.CUDAGraph) -> dict[str, int]:
    """Return the number of nodes of each type. Capture the graph with ``keep_graph=True``.

    The nodes of child graphs are included. Kernels that a kernel launches, graphs that are launched
    on the device, and the bodies of conditional nodes are not included.

    Raises:
        Uncounted: if cuda.bindings is missing, or torch or the driver cannot list the nodes.

    Source: the CUDA driver API, "Graph Management".
    """
    try:
        driver = import_module("cuda.bindings.driver")
        counts = _count(driver, driver.CUgraph(graph.raw_cuda_graph()))
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise Uncounted((str(error) or type(error).__name__).splitlines()[0]) from error
    return dict(sorted(counts.items()))


def _count(driver: ModuleType, graph: object) -> Counter[str]:
    def call(function: str, *args: object) -> tuple[Any, ...]:
        status, *results = getattr(driver, function)(*args)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise Uncounted(f"{function}: {status.name}")
        return tuple(results)

    _, size = call("cuGraphGetNodes", graph)
    nodes, _ = call("cuGraphGetNodes", graph, size) if size else ((), 0)
    counts: Counter[str] = Counter()
    for node in nodes:
        (kind,) = call("cuGraphNodeGetType", node)
        counts[node_name(kind.name)] += 1
        if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH:
            (child,) = call("cuGraphChildGraphNodeGetGraph", node)
            counts += _count(driver, child)
    return counts


def node_name(constant: str) -> str:
    """Return the readable name of the driver's constant for a node type."""
    short = constant.removeprefix(PREFIX)
    return NODE_NAMES.get(short, short.lower().replace("_", " "))


def contradiction(nodes: Mapping[str, int]) -> str:
    """Return the reason why a graph with these nodes must not be timed, or an empty string."""
    if not enabled("graph-nodes"):
        return ""
    callbacks, total = nodes.get("host node", 0), sum(nodes.values())
    if callbacks and current_group().world == 1:  # NCCL uses host nodes for networks
        return (
            f"{callbacks} of the {total} nodes in its graph call back to the CPU, which a graph"
            " clock cannot time; declare bound='host' to time it as called"
        )
    if not nodes.keys() - IDLE:
        return (
            f"nothing computes in its graph of {total} nodes, so a replay does nothing;"
            " launch the work on the current stream at every call"
        )
    return ""


def check_nodes(windows: Iterable[GraphWindow]) -> dict[str, object]:
    """Return each side's nodes per call by type, or the reason why they cannot be counted.

    Refuse a graph that calls back to the CPU, or that computes nothing.
    """
    by_role = {}
    for role, window in zip(ROLES, windows, strict=True):
        try:
            nodes = window.nodes()
        except Uncounted as error:
            return {"no graph_nodes": str(error)}
        if wrong := contradiction(nodes):
            raise SideError(f"{window.side.name}: {wrong}")
        by_role[role] = {kind: count / window.calls for kind, count in nodes.items()}
    return {"graph_nodes": by_role}
