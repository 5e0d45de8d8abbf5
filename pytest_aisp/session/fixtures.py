"""The `pair` fixture and its neighbours: what a test body sees."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ..page.pair import Case, Pair
from ..results.verdict import RED, Finding
from ..worker.loader import pair_of
from .case import CaseRun, EndOfBody
from .case_row import build_row
from .options import LOCK_ERROR, RUN, SETTINGS
from .pair_fixture import PairUnderTest
from .placement import Kernels
from .run_context import RunContext

CASE = pytest.StashKey[CaseRun]()


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make one parameter a case, with the marks of what it needs."""
    pair = pair_of(metafunc.function)
    if pair is None:
        return
    if _touched_gpu():
        _refuse(
            metafunc.definition,
            "the page touches the GPU when imported: a page is imported on every machine\n"
            "Move what needs a device into inputs or a side",
        )
    if metafunc.cls is not None:
        _refuse(metafunc.definition, "@compare goes on a function of the page, not on a method")
    others = [m for m in metafunc.definition.iter_markers("parametrize")]
    if others:
        _refuse(
            metafunc.definition,
            "@compare with @pytest.mark.parametrize has no stored key\n"
            "Put the parameter into sizes",
        )
    params = [pytest.param(c, marks=_marks(pair, c), id=c.id) for c in pair.cases()]
    metafunc.parametrize("pair", params, indirect=True)


def _touched_gpu() -> bool:
    """Return whether an import initialised CUDA in this process, where nothing of ours does."""
    import sys

    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _refuse(item: pytest.Item, message: str) -> NoReturn:
    """Fail with one line that points at the test in its page, and no line of ours."""
    path, line, _ = item.location
    pytest.fail(f"{path}:{(line or 0) + 1}: {message}", pytrace=False)


def _marks(pair: Pair, case: Case) -> list[Any]:
    mark = pytest.mark
    names = ("aisp_cpu",) if case.kind == "cpu" else pair.archs(case.variant)
    marks = [getattr(mark, name) for name in names]
    marks += [mark.aisp_gpus(n=case.gpus)] if case.gpus > 1 else []
    return [*marks, *case.variant.marks]


def pair_under_test(request: pytest.FixtureRequest) -> PairUnderTest:
    """Return what the `pair` fixture gives to a test body."""
    item, config = request.node, request.config
    case = getattr(request, "param", None)
    if not isinstance(case, Case):
        _refuse(item, "the fixture `pair` needs @compare on the test")
    if (why := item.stash.get(LOCK_ERROR, None)) is not None:
        _refuse(item, why)
    if CASE in item.stash:
        _refuse(
            item,
            "this case was judged in this run before: a rerun turns no red verdict green\n"
            "Leave cases out of what reruns tests",
        )
    run = config.stash.get(RUN, None)
    if run is None:  # a page outside aisp_pages, in a session that gave no option of ours
        from . import startup

        startup.configure(config)
        run = config.stash[RUN]
    if run.settings.cold_start:
        run.end_workers()
    case_run = CaseRun(run, case, where_is(item, config), _kernels(case, run))
    if case_run.placement.kind == "skip":
        pytest.skip(case_run.placement.need)
    if (marker := item.get_closest_marker("aisp_timeout")) is not None:
        case_run.client.timeout = float(marker.args[0]) * run.settings.timeout_multiplier
    if reruns := config.getoption("reruns", None):
        case_run.notes.append(f"--reruns={reruns} leaves cases alone: the first verdict stands")
    item.stash[CASE] = case_run
    run.printed(0)  # what an earlier case's threads or profiler have printed since is not its own
    return PairUnderTest(case_run, request.session)


def chapter_of(path: Path, config: pytest.Config) -> str:
    """Return the name that the results of the page at `path` are stored under: its folder's."""
    settings = config.stash[SETTINGS]
    bases = [p for p in settings.pages if path.is_relative_to(p)] or [config.rootpath]
    folder = path.parent.relative_to(bases[0]) if path.is_relative_to(bases[0]) else path.parent
    return ".".join(folder.parts) or bases[0].name


def where_is(item: Any, config: pytest.Config) -> dict[str, str]:
    """Return what a worker process must know to find an item's page and test."""
    return {
        "nodeid": item.nodeid,
        "typed": _typed(item, config),
        "page": str(item.path),
        "module": item.module.__name__,
        "function": item.originalname,
        "folder": chapter_of(Path(item.path), config),
    }


def _typed(item: Any, config: pytest.Config) -> str:
    """Return an item's id, which is relative to the root, as one types it where pytest was run."""
    path, colons, case = item.nodeid.partition("::")
    return f"{os.path.relpath(config.rootpath / path, config.invocation_params.dir)}{colons}{case}"


def _kernels(case: Case, run: RunContext) -> Kernels:
    """Return which kinds of kernels of its own the case launches."""
    from ..page.sources import kernel_files, triton_kernels

    sides, root = [case.pair.baseline, case.variant.side], str(run.settings.root)
    modules = kernel_files(sides, root)
    emulated = False
    if modules and run.emulator and not case.variant.gpu_only and not run.settings.in_process:
        emulated = not any(map(importlib.import_module(run.emulator).unsupported, modules))
    return Kernels(bool(modules), bool(triton_kernels(sides, root)), emulated)


@contextlib.contextmanager
def call_body(item: pytest.Function) -> Iterator[None]:
    """Run a test body: where nothing is timed it ends early, and it must judge its pair."""
    __tracebackhide__ = True
    start = time.monotonic()
    pair = item.funcargs.get("pair")
    try:
        with contextlib.suppress(EndOfBody):
            yield
            if isinstance(pair, PairUnderTest):
                _ended(item, pair)
    finally:
        if isinstance(pair, PairUnderTest):
            pair._case.run.progress("")
            pair._case.wall = time.monotonic() - start


def _ended(item: pytest.Function, pair: PairUnderTest) -> None:
    """Refuse a body that ended without judging its pair, or a speedup that its page claims."""
    case = pair._case
    if not pair.judged:
        _refuse(item, "this page never judged its pair\nEnd the body with pair.assert_speedup()")
    if case.timing is None and case.claim is not None:  # judged by metrics, and never timed
        if case.claim not in (1.0, "yardstick"):
            _refuse(
                item,
                f"this page never judged what it claims, {case.claim} by {case.claim_origin}\n"
                "Call pair.assert_speedup(), or claim nothing",
            )
        case.claim = None


def attach(item: pytest.Item, call: Any, report: pytest.TestReport) -> None:
    """Put the case's row into its report, and its numbers into JUnit's properties."""
    case_run = item.stash.get(CASE, None)
    if case_run is None:
        return
    if report.skipped and not case_run.findings:
        return
    if report.failed:
        _fail(item, call, case_run, report)
    if report.failed or hasattr(report, "wasxfail"):
        case_run.recorded = {}
    if case_run.run.settings.profile:
        _profile(case_run)
    row = build_row(case_run)
    report.aisp = row.to_json()  # type: ignore[attr-defined]
    # JUnit reads the properties of the teardown report, which are the item's.
    item.user_properties += row.properties()
    report.user_properties += row.properties()


def _fail(item: pytest.Item, call: Any, case: CaseRun, report: pytest.TestReport) -> None:
    """Make the verdict as red as the test: a body may assert more than its pair's claims."""
    pair = getattr(item, "funcargs", {}).get("pair")
    error = call.excinfo.value if call.excinfo else None
    ours = error is not None and error is getattr(pair, "refusal", None)
    # Ours and not red: `new` or `inconclusive`, which fail the run by the ini file.
    if case.verdict in RED or (ours and case.verdict):
        return
    text = call.excinfo.exconly(tryshort=True) if call.excinfo else report.longreprtext
    case.findings.append(Finding("fail", (text.partition("\n")[0],)))


def _profile(case_run: CaseRun) -> None:
    """Profile the case's sides; a run that does not ask for it imports none of what that takes."""
    from .profiling import profile

    try:
        profile(case_run)
    except pytest.fail.Exception as late:  # pytest-timeout, whose clock goes on after the verdict
        case_run.remarks.append(f"not profiled: {late.msg}")


def time_one(function: Callable[[], Any], *, window: float = 1e-3, windows: int = 10) -> float:
    """Return the median seconds of a call of `function`, a window of at least `window` seconds."""
    from statistics import median

    from ..timing.microbench import warm, window_times

    warm(function)
    return median(window_times(function, window=window, windows=windows))


def rates(config: pytest.Config) -> Mapping[str, float]:
    """Return the stored peaks of this machine's product, or nothing."""
    from ..timing.peaks import PeaksError, load
    from ..util.device import Machine

    path = config.stash[SETTINGS].baselines / Machine.here().product / "peaks.json"
    try:
        return load(path).rates if path.exists() else {}
    except PeaksError as error:
        pytest.fail(str(error), pytrace=False)
