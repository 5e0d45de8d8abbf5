"""Watch a training loop: `bottleneck(loader)` in Python, `aisp bottleneck` for a whole script."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from ..util.cli_result import CliError, CliResult
from .breakdown import Breakdown, Loader, device_name
from .loop import Instruments, Loop, Plan
from .stages import Stages, is_dataloader

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

T = TypeVar("T")
INTERRUPTED = 130
"""The exit code that a shell reports if Ctrl-C ended the process."""


def bottleneck(
    loader: Iterable[T],
    *,
    steps: int | None = None,
    warmup: int = 5,
    profiled: int = 10,
) -> Watch[T]:
    """Return a watched version of `loader`.

    Iterate over the result instead of `loader`, for any number of epochs, and then call `report`.

    A step lasts from one request for a batch to the next. The loop gets the same batches in the
    same order. During an iteration over a `torch.utils.data.DataLoader`, timed versions replace the
    transforms and the collate function.

    Args:
        loader: any iterable.
        steps: the maximum number of steps to time. The default is all steps.
        warmup: the number of steps at the start that are not measured.
        profiled: the number of untimed steps that run under torch.profiler after the warm-up, if a
            GPU is used.
    """
    return Watch(loader, Plan(warmup, profiled, steps))


class Source:
    """A loop, together with the loader of its batches.

    Attributes:
        loader: the loader, or None if calls of the optimizer separate the steps.
        trained: the number of optimizer steps that the loop made.
    """

    def __init__(
        self,
        loader: Iterable[object] | None,
        plan: Plan,
        instruments: Instruments,
        *,
        needs_optimizer: bool = False,
    ) -> None:
        self.loader = loader
        self.trained = 0
        self.loop = Loop(plan, instruments, ready=lambda: self.trained > 0 or not needs_optimizer)
        self.stages = Stages(loader) if is_dataloader(loader) else None

    def breakdown(self, name: str) -> Breakdown:
        """Return the figures, or raise `CliError` if no step was timed."""
        loop = self.loop
        if not loop.timed:
            raise CliError(
                f"the loop ended after {len(loop.warm) + loop.profiled} steps, before any step was"
                f" timed: the first {loop.plan.warmup} are warm-up, and with a GPU"
                f" {loop.plan.profiled} more are profiled\n"
                "let it run longer, or ask for fewer: --warmup=1 --profiled=1,"
                " or bottleneck(loader, warmup=1, profiled=1)"
            )
        gpu, note = loop.gpu_step()
        return Breakdown(
            name,
            device_name(),
            None if self.loader is None else Loader.of(self.loader),
            tuple(loop.timed),
            tuple(loop.warm),
            loop.drained,
            gpu,
            note,
            self.stages.read() if self.stages else (),
        )


class Watch(Generic[T]):
    """An iterable that measures the loop around it."""

    def __init__(
        self, loader: Iterable[T], plan: Plan, instruments: Instruments | None = None
    ) -> None:
        self.loader = loader
        self._source = Source(loader, plan, instruments or Instruments())

    def __iter__(self) -> Iterator[T]:
        loop, stages = self._source.loop, self._source.stages
        with stages.attached() if stages else contextlib.nullcontext():
            try:
                batches = loop.begin_epoch(lambda: iter(self.loader))
                loop.request()
                for batch in batches:
                    loop.receive()
                    yield batch
                    loop.request()
                loop.end_epoch()
            finally:
                loop.leave()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def measured(self) -> Breakdown:
        """Return the figures, or raise `CliError` if no step has been timed yet."""
        return self._source.breakdown(type(self.loader).__name__)

    def report(self) -> str:
        """Return the figures and the advice as text."""
        return "\n".join(self.measured().report())

    def to_json(self) -> dict[str, object]:
        """Return the figures and the advice as plain types. Times are in seconds."""
        return self.measured().to_json()


class ScriptBatches(Iterator[object]):
    """An iterator over a script's DataLoader that reports each request and each batch."""

    def __init__(
        self, finder: LoopFinder, source: Source, make: Callable[[], Iterator[object]]
    ) -> None:
        self._finder, self._source = finder, source
        self._batches = source.loop.begin_epoch(make)

    def __next__(self) -> object:
        self._source.loop.request()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._source.loop.end_epoch()
            self._finder.leave(self._source)
            raise
        self._source.loop.receive()
        self._finder.enter(self._source)
        return batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        if name == "_batches":  # creating the iterator failed
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __del__(self) -> None:
        # A loop that ends with `break` drops its iterator. Later work is not part of a step.
        self._source.loop.leave()
        self._finder.leave(self._source)


class StepsDone(SystemExit):
    """Raised to end the script when the step after the last timed step begins."""


class LoopFinder:
    """Watches every DataLoader and optimizer of a script to find its training loop."""

    def __init__(self, plan: Plan, instruments: Instruments) -> None:
        self._plan, self._instruments = plan, instruments
        self._sources: dict[int, Source] = {}
        self._inside: list[Source] = []
        self._no_loader = Source(None, plan, instruments, needs_optimizer=True)
        self._first_optimizer: Optimizer | None = None
        self._stopped = False
        self._restore = contextlib.ExitStack()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Watch while the block runs, and restore everything afterwards."""
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data import DataLoader

        original = DataLoader.__iter__

        def watched(loader: DataLoader[object]) -> Iterator[object]:
            return self._watched(loader, lambda: original(loader))

        with self._restore:
            self._restore.callback(setattr, DataLoader, "__iter__", original)
            DataLoader.__iter__ = watched  # type: ignore[assignment,method-assign]
            self._restore.callback(register_optimizer_step_post_hook(self._stepped).remove)
            try:
                yield
            finally:
                for source in [*self._inside, self._no_loader]:
                    source.loop.leave()
                self._no_loader.loop.end_epoch()
                self._stopped = True

    def enter(self, source: Source) -> None:
        """Record that `source` returned a batch, so the script is now inside its loop."""
        self.leave(source)
        self._inside.append(source)
        self._stop_if_done(source.loop)

    def leave(self, source: Source) -> None:
        """Record that the script has left the loop of `source`."""
        if source in self._inside:
            self._inside.remove(source)

    def training_loop(self, script: Path) -> Source:
        """Return the longest loop in which an optimizer made a step."""
        sources = [s for s in (*self._sources.values(), self._no_loader) if s.trained]
        if not sources:
            raise CliError(
                f"{script}: no training loop found: it iterated {len(self._sources)} DataLoaders,"
                " and no optimizer made a step\n"
                "A loop must call step() of a torch.optim.Optimizer, usually while it iterates a"
                " torch.utils.data.DataLoader. Watch any other loop with pytest_aisp.bottleneck:\n"
                "for batch in (watch := bottleneck(loader)): ..."
            )
        return max(sources, key=lambda s: (sum(t.wait + t.body for t in s.loop.timed), s.trained))

    def _watched(
        self, loader: DataLoader[object], make: Callable[[], Iterator[object]]
    ) -> ScriptBatches:
        # ids stay unique because the source keeps its loader alive
        if id(loader) not in self._sources:
            source = Source(loader, self._plan, self._instruments, needs_optimizer=True)
            if source.stages is not None:
                self._restore.enter_context(source.stages.attached())
            self._sources[id(loader)] = source
        return ScriptBatches(self, self._sources[id(loader)], make)

    def _stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        source = self._inside[-1] if self._inside else self._no_loader
        source.trained += 1
        self._first_optimizer = self._first_optimizer or optimizer
        # With several optimizers, each optimizer steps in every iteration. Only the first one
        # separates the loop's steps.
        if source is self._no_loader and optimizer is self._first_optimizer:
            source.loop.request()
            source.loop.receive()
            self._stop_if_done(source.loop)

    def _stop_if_done(self, loop: Loop) -> None:
        if loop.done and not self._stopped:
            self._stopped = True
            raise StepsDone(0)


def bottleneck_result(
    script: Path,
    arguments: Sequence[str],
    *,
    plan: Plan,
    as_json: bool = False,
    instruments: Instruments | None = None,
) -> CliResult:
    """Run `script`, and return the breakdown of its training loop and the script's exit code."""
    if not script.is_file():
        raise CliError(f"{script}: no such script\naisp bottleneck train.py [its arguments]")
    finder = LoopFinder(plan, instruments or Instruments())
    with _stdout_to_stderr() if as_json else contextlib.nullcontext(), finder.installed():
        code = _run(script, arguments)
    try:
        breakdown = finder.training_loop(script).breakdown(script.name)
    except CliError as error:
        if not code:
            raise
        early = f"{script} ended with exit code {code} before a step was timed"
        raise CliError(f"{early}\n{error}", code) from None
    lines = [json.dumps(breakdown.to_json(), indent=2)] if as_json else breakdown.report()
    return CliResult(lines, code)


def _run(script: Path, arguments: Sequence[str]) -> int:
    """Run `script` as its own program, and return the exit code that Python would return."""
    argv, path = sys.argv, sys.path
    # Like Python, put the script's folder first, so that the script can import files from that
    # folder.
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *path]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback.print_exception(type(error), error, _from(script, error.__traceback__))
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    finally:
        sys.argv, sys.path = argv, path
    return 0


def _from(script: Path, trace: TracebackType | None) -> TracebackType | None:
    """Return `trace` without the frames above the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    return trace


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send the output of the script and its children to stderr, so that stdout is only JSON."""
    sys.stdout.flush()
    original = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(original, 1)
        os.close(original)
