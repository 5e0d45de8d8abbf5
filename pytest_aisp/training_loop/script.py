"""A script, run as `python script.py` runs it, while its DataLoaders and optimizers are watched."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ..util.cli_result import CliError, CliResult
from .breakdown import Breakdown
from .find import Batches, breakdown, here, plain, text
from .stages import Stages
from .steps import Instruments, Loop, Plan

INTERRUPTED = 130
"""What a shell says of a process that Ctrl-C ended."""


class Enough(SystemExit):
    """Raised in the script where it asks for a batch after the last step that was wanted."""


class Source:
    """One DataLoader of the script, or its optimizer where it has none: its loop and its stages.

    Attributes:
        trained: how many optimizer steps were made in its loop.
    """

    def __init__(self, loader: Any, plan: Plan, instruments: Instruments) -> None:
        self.loader = loader
        self.loop = Loop(plan, instruments, ready=lambda: self.trained > 0)
        self.stages = None if loader is None else Stages(loader)
        self.trained = 0

    def figures(self, name: str) -> Breakdown:
        """Return the figures."""
        return breakdown(name, self.loop, self.loader, self.stages)


class Watched(Batches[Any]):
    """An iterator of a DataLoader whose watcher is told where it stands."""

    def __init__(self, watcher: Watcher, source: Source, make: Callable[[], Iterator[Any]]) -> None:
        self._watcher, self._source = watcher, source
        super().__init__(source.loop, make)

    def __next__(self) -> Any:
        try:
            batch = super().__next__()
        except StopIteration:
            self._watcher.left(self._source)
            raise
        self._watcher.entered(self._source)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # making it failed
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __del__(self) -> None:
        # A loop that breaks drops its iterator; what follows is in no step of it.
        self.close()
        self._watcher.left(self._source)


class Watcher:
    """Finds the loops of what runs while it is `installed`."""

    def __init__(self, plan: Plan, instruments: Instruments) -> None:
        self._plan, self._with = plan, instruments
        self._sources: dict[int, Source] = {}
        self._inside: list[Source] = []
        self._bare = Source(None, plan, instruments)
        self._marker: Any = None
        self._stopped = False
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Watch every DataLoader and every torch.optim.Optimizer, and put all back after it."""
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data import DataLoader

        original = DataLoader.__iter__

        def watched(loader: Any) -> Iterator[Any]:
            return self._watched(loader, lambda: original(loader))

        with self._stack:
            self._stack.callback(setattr, DataLoader, "__iter__", original)
            DataLoader.__iter__ = watched  # type: ignore[assignment,method-assign]
            self._stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
            try:
                yield
            finally:
                self._finish()

    def entered(self, source: Source) -> None:
        """Note that `source` has given a batch: what follows is its loop's work."""
        self.left(source)
        self._inside.append(source)
        self._enough(source.loop)

    def left(self, source: Source) -> None:
        """Note that `source` is not iterated any more."""
        if source in self._inside:
            self._inside.remove(source)

    def training(self, script: Path) -> Source:
        """Return the loop in which an optimizer stepped for the longest time.

        Raises:
            Unanswerable: where there is none.
        """
        loops = [s for s in (*self._sources.values(), self._bare) if s.trained]
        if not loops:
            raise CliError(self._nothing(script))
        return max(loops, key=lambda s: (sum(t.wait + t.body for t in s.loop.timed), s.trained))

    def _nothing(self, script: Path) -> str:
        return (
            f"{script}: no training loop was seen: {len(self._sources)} DataLoaders were iterated,"
            " no optimizer made a step\n"
            "a loop is what goes over a torch.utils.data.DataLoader and calls the step() of a"
            " torch.optim.Optimizer, or calls that alone; any other is watched in the script:\n"
            "from pytest_aisp import bottleneck; for batch in (watch := bottleneck(loader)): ..."
        )

    def _watched(self, loader: Any, make: Callable[[], Iterator[Any]]) -> Watched:
        if id(loader) not in self._sources:  # a source keeps its loader, so no id comes twice
            source = Source(loader, self._plan, self._with)
            if source.stages is not None:
                self._stack.enter_context(source.stages.attached())
            self._sources[id(loader)] = source
        return Watched(self, self._sources[id(loader)], make)

    def _stepped(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        source = self._inside[-1] if self._inside else self._bare
        source.trained += 1
        self._marker = self._marker or optimizer
        # Of several optimizers the first tells the steps: each steps once in an iteration.
        if source is self._bare and optimizer is self._marker:
            source.loop.asked()
            source.loop.got()
            self._enough(source.loop)

    def _enough(self, loop: Loop) -> None:
        if loop.done and not self._stopped:
            self._stopped = True
            raise Enough(0)

    def _finish(self) -> None:
        for source in [*self._inside, self._bare]:
            source.loop.left()
        self._bare.loop.ended()
        self._stopped = True


def run_script(
    script: Path,
    arguments: Sequence[str],
    *,
    plan: Plan,
    as_json: bool = False,
    instruments: Instruments | None = None,
) -> CliResult:
    """Run `script` and return where the time of its training loop's steps goes.

    The exit code is the script's.

    Raises:
        Unanswerable: where there is no such script, or no loop in it, or one that is too short.
    """
    if not script.is_file():
        raise CliError(f"{script}: no such script\naisp bottleneck train.py [its arguments]")
    watcher = Watcher(plan, instruments or here())
    with _stdout_is_stderr() if as_json else contextlib.nullcontext(), watcher.installed():
        code = run(script, arguments)
    try:
        found = watcher.training(script).figures(script.name)
    except CliError as error:
        raise CliError(_after(script, code, error), code or error.code) from None
    lines = [json.dumps(plain(found), indent=2)] if as_json else text(found)
    return CliResult(lines, code)


def _after(script: Path, code: int, error: CliError) -> str:
    if not code:
        return str(error)
    return f"{script} ended with exit code {code} before a step was timed\n{error}"


def run(script: Path, arguments: Sequence[str]) -> int:
    """Run `script` as Python does, and return the exit code that Python would end with."""
    with _started_as(script, arguments):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            return _code(ended.code)
        except BaseException as error:
            trace = _from(script, error.__traceback__)
            traceback.print_exception(type(error), error, trace)
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


@contextlib.contextmanager
def _started_as(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, path = sys.argv, sys.path
    # Python itself puts a script's folder first, so that it finds the modules beside it.
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def _code(code: object) -> int:
    """Return the exit code of a SystemExit, whose message, if it is one, goes to stderr."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _from(script: Path, trace: TracebackType | None) -> TracebackType | None:
    """Return `trace` from the script's first frame on: those before it are ours."""
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    return trace


@contextlib.contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """Send to stderr what the script and its processes print: stdout is one JSON object."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
