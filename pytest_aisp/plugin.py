"""The plugin's hooks and fixtures. Each hook and fixture calls the module that does the work.

Only pytest, the standard library and the options are imported here. Hooks import all other modules
when a page needs them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

from .session import options
from .session.config import read_settings
from .session.options import COLLECTED, RECORDER, RUN, SETTINGS

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

    from .session.pair_fixture import PairUnderTest
    from .session.recorder import Recorder
    from .session.terminal import Status

MARKERS = {
    "aisp_pair(pair)": "set by @compare",
    "sm90": "runs on Hopper",
    "sm100": "runs on Blackwell B200, GB200",
    "sm103": "runs on Blackwell B300, GB300",
    "sm121": "runs on GB10",
    "aisp_cpu": "a size that is timed on the CPU",
    "aisp_product(name)": "the GPU product that a fleet runs the case on",
    "aisp_gpus(n)": "needs n GPUs, as in -m 'aisp_gpus(n=2)'",
    "aisp_timer": "pytest-benchmark's `benchmark` fixture uses the plugin's GPU timer",
    "aisp_timeout(seconds)": "time limit of one request to a worker process",
}


class Hooks:
    """Hooks for conftest files."""

    @pytest.hookspec(firstresult=True)
    def pytest_aisp_timer(self, config: pytest.Config) -> Mapping[str, object] | None:
        """Return a timer that replaces the plugin's own, or None.

        A timer is ``{"target": "module:function", "arch": ..., "product": ..., "options": {...}}``.
        The ``product`` must begin with ``simulated-``.
        """

    @pytest.hookspec(firstresult=True)
    def pytest_aisp_cuda_emulator(self, config: pytest.Config) -> str | None:
        """Return the name of a module that emulates CUDA C++ on the CPU, or None.

        The module has two functions. ``unsupported(cuda_module)`` returns a description of the
        features that cannot be emulated, or an empty string. ``install()`` makes this process
        emulate every launch.
        """

    @pytest.hookspec
    def pytest_aisp_result(self, config: pytest.Config, row: Mapping[str, object]) -> None:
        """Receive a case's result row when the case finishes.

        With xdist, only the controller process calls this hook.
        """


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> None:
    given = list(args)
    options.fill_in_values(args)
    if args != given:  # pytest has parsed the old arguments, and loads conftest files from them
        known = parser.parse_known_args(args, namespace=copy.copy(early_config.option))
        known.confcutdir = early_config.known_args_namespace.confcutdir
        early_config.known_args_namespace = known


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_parse(args: list[str]) -> None:
    options.fill_in_values(args)


def pytest_configure(config: pytest.Config) -> None:
    for marker, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{marker}: {meaning}")
    config.stash[SETTINGS] = settings = read_settings(config)
    if config.getoption("aisp_fleet"):
        from .fleet import setup

        setup.configure(config)
    if settings.ours:
        from .session import startup

        startup.configure(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    if (run := config.stash.get(RUN, None)) is not None:
        run.close()
    if (recorder := config.stash.get(RECORDER, None)) is not None:
        recorder.close()
        # Another hook may have changed the exit status since `pytest_sessionfinish`.
        if (session := config.pluginmanager.get_plugin("session")) is not None:
            session.exitstatus = _exit_code(session, recorder)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pair" in metafunc.fixturenames:
        from .session.collect import parametrize

        parametrize(metafunc)
    elif metafunc.definition.get_closest_marker("aisp_pair") is not None:
        name = metafunc.definition.name
        pytest.fail(
            f"{name} has @compare but does not take `pair`: nothing would be checked or timed\n"
            f"    def {name}(pair):",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if not report.passed and (cases := collector.config.stash.get(COLLECTED, None)) is not None:
        cases.fail(collector.path.name)
    return report


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> PairUnderTest:
    """The case under test. Call `assert_equivalent()`, then `assert_speedup()`."""
    from .session.pair_fixture import pair_under_test

    return pair_under_test(request)


@pytest.fixture
def aisp_device() -> str:
    """The device to use on this machine: ``cuda`` if there is a GPU, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def warmup() -> Callable[[Callable[[], object]], int]:
    """A function that calls `f` until its time is steady: ``warmup(f)`` returns the call count."""
    from .timing.schedule import warm

    return warm


@pytest.fixture
def cuda_graph() -> Callable[[Callable[[], object]], Callable[[], object]]:
    """A function that captures `f` in a CUDA graph. ``cuda_graph(f)`` returns the replay."""
    from .timing.cuda_graph import capture

    return capture


@pytest.fixture
def aisp_timer() -> Callable[..., float]:
    """A function that times `f`: ``aisp_timer(f)`` returns the median seconds per call.

    ``window`` is the length of a timing window in seconds. ``windows`` is the number of windows.
    """
    from statistics import median

    from .timing.cuda_graph import window_times
    from .timing.schedule import warm

    def timer(function: Callable[[], object], *, window: float = 1e-3, windows: int = 10) -> float:
        warm(function)
        return median(window_times(function, window=window, windows=windows))

    return timer


@pytest.fixture
def aisp_peaks(pytestconfig: pytest.Config) -> Mapping[str, float]:
    """The measured peak rates of this machine's product, by name, or an empty mapping."""
    from .timing.peaks import PeaksError, load
    from .util.device import Machine

    path = pytestconfig.stash[SETTINGS].baselines / Machine.here().product / "peaks.json"
    try:
        return load(path).rates if path.exists() else {}
    except PeaksError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    __tracebackhide__ = True
    if "pair" not in pyfuncitem.fixturenames:
        if pyfuncitem.get_closest_marker("aisp_timer") is not None:
            from .session.benchmark_plugin import lend_timer

            lend_timer(pyfuncitem.funcargs.get("benchmark"))
        return (yield)
    from .session.pair_fixture import run_body

    with run_body(pyfuncitem):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if item.get_closest_marker("aisp_pair") is None:
        return (yield)
    if item.config.pluginmanager.hasplugin("rerunfailures"):
        # A rerun could turn a red verdict green. Of several marks, only the first has an effect.
        item.add_marker(pytest.mark.flaky(reruns=0), append=False)
    try:
        if item.config.stash.get(RUN, None) is None:
            return (yield)
        from .session.startup import lock_machine

        with lock_machine(item):
            return (yield)
    except pytest.exit.Exception as stop:
        # Later cases get no verdict, so the run must not be green.
        stop.returncode = stop.returncode or pytest.ExitCode.INTERRUPTED
        raise


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if isinstance(item, pytest.Function) and item.get_closest_marker("aisp_pair") is not None:
        from .session.case_report import complete_report

        complete_report(item, call, report)
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> Status | None:
    row = getattr(report, "aisp", None)
    if row is None or report.when != "call":
        return None
    from .session.terminal import status

    return status(row, report.outcome)


def pytest_report_header(config: pytest.Config) -> list[str] | None:
    run = config.stash.get(RUN, None)
    if run is None or config.getoption("aisp_fleet"):  # a fleet has its own header, with its nodes
        return None
    from .session.terminal import header

    return header(run)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    recorder = session.config.stash.get(RECORDER, None)
    # An interrupted run is incomplete anyway, so the canary is skipped.
    if session.exitstatus != pytest.ExitCode.INTERRUPTED:
        if session.config.stash.get(RUN, None) is not None:
            from .session.canary import run_at_end
            from .session.unused_results import report_unused

            run_at_end(session)
            report_unused(session.config)
        session.exitstatus = _exit_code(session, recorder)
    if recorder is not None:
        recorder.finish(session.exitstatus)
        session.exitstatus = _exit_code(session, recorder)


def _exit_code(session: pytest.Session, recorder: Recorder | None) -> int:
    """Return pytest's exit code, or a worse code if a row is bad or the run is invalid."""
    code = session.exitstatus
    if recorder is None or code == pytest.ExitCode.INTERRUPTED:
        return code
    from .results.verdict import DISTURBED, INVALID_RUN, RED

    if recorder.why_invalid():
        return INVALID_RUN
    if code != pytest.ExitCode.OK:
        return code
    verdicts = {row.verdict for row in recorder.rows}
    if recorder.errors or not verdicts.isdisjoint(RED):
        return pytest.ExitCode.TESTS_FAILED
    return INVALID_RUN if DISTURBED in verdicts or recorder.not_replayed() else code


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    if (recorder := config.stash.get(RECORDER, None)) is not None:
        from .session.terminal import show_captured, show_summary

        show_captured(terminalreporter)
        show_summary(terminalreporter, recorder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    if not config.stash.get(SETTINGS, None) or not config.stash[SETTINGS].ours:
        return None
    from .util.device import Machine

    return len(Machine.here().gpus) or None
