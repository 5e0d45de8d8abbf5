"""Helpers of the plugin's own tests: pages written to disk, a simulated GPU, whole output lines."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ["HYPOTHESIS_NO_PLUGINS"] = "1"  # selenium brings trio, whose plugin each run imports
os.environ["OMP_NUM_THREADS"] = "1"  # the tensors are small, and further threads mostly wait
import hypothesis
import pytest
import torch  # once, at module level: pytester's in-process runs would load it twice and crash
from zygote import COMPILER_MODULES, RUN_MODULES, WORKER_MODULES, Zygote

from pytest_aisp.isolation import monkeypatches
from pytest_aisp.tools import commit_runs
from pytest_aisp.worker.client import interpreter

if not torch.cuda.is_available():  # read when triton is imported: pages with kernels run here too
    os.environ["TRITON_INTERPRET"] = "1"
hypothesis.settings.register_profile("busy", deadline=None)  # no test is about its own speed
hypothesis.settings.load_profile("busy")

PAGE = '''
    """Doubling."""

    import torch

    from pytest_aisp import Conditions, Variant, Work, compare

    CALLS = []


    def inputs(device, n):
        return (torch.randn(n, device=device),)


    def reference(x):
        return 2 * x.double()


    def added(x):
        return x + x


    def doubled(x):
        return {optimized}


    {defs}


    @compare(
        baseline=added,
        optimized={variants},
        inputs=inputs,
        reference=reference,
        sizes=[{{"n": 1001}}],
        check_sizes={check_sizes},
        work={work},
        bound={bound},
        at_least={at_least},
        {more}
    )
    def test_doubling(pair):
        {body}
'''
BODY = "pair.assert_equivalent()\npair.assert_speedup()"
PARTS = {
    "optimized": "2 * x",
    "defs": "",
    "variants": "[doubled]",
    "check_sizes": '[{"n": 33}]',
    "work": "lambda n: Work(read=4 * n, write=4 * n)",
    "bound": '"dram"',
    "at_least": "1.0",
    "more": "",
}
INI = """
    [pytest]
    addopts = --import-mode=importlib -p no:randomly -p no:benchmark
    aisp_pages = .
    python_files = *_test.py
"""


@pytest.fixture(autouse=True, scope="session")
def original_functions() -> None:
    """Store the original functions that the plugin watches, before a test replaces some."""
    monkeypatches.remember()


@pytest.fixture(autouse=True)
def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset CI. A test that is about CI sets it itself."""
    monkeypatch.delenv("CI", raising=False)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of tests that are about processes."""
    text = "new_processes: start new processes of xdist and workers instead of forking warm ones"
    config.addinivalue_line("markers", text)


def pytest_collection_finish() -> None:
    """Exclude collected items from garbage collection, because each engine task collects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Return the process from which runs of pytest are forked."""
    started = Zygote.new(*RUN_MODULES)
    yield started
    started.close()


@pytest.fixture(scope="session")
def worker_zygote() -> Iterator[Zygote]:
    """Return the process from which worker processes are forked."""
    modules = (*WORKER_MODULES, "torch.distributed.run")
    started = Zygote.new(*modules, *monkeypatches.watched_modules())
    yield started
    started.close()


@pytest.fixture(scope="session")
def compiler_zygote() -> Iterator[Zygote]:
    """Return the process from which worker processes that compile kernels are forked."""
    modules = (*COMPILER_MODULES, *monkeypatches.watched_modules())
    started = Zygote.new(*modules, without="TRITON_INTERPRET")
    yield started
    started.close()


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fork a module's worker processes from a process that has imported what they need."""
    from pytest_aisp.worker import client

    zygote = Zygote.new(*WORKER_MODULES, "torch._dynamo", *monkeypatches.watched_modules())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "Popen", zygote.worker)
        patch.setenv("AISP_LEASES", str(tmp_path_factory.mktemp("leases")))
        yield
    zygote.close()


@pytest.fixture
def forked_processes(
    zygote: Zygote, worker_zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fork what a test starts without `pytester`: ranks, worker processes, runs that collect."""
    from pytest_aisp.distributed import launcher
    from pytest_aisp.tools import catalog
    from pytest_aisp.worker import client

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "pytest"]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            code = zygote.run(command[3:], out.fileno(), err.fileno()).wait()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), err.read())

    monkeypatch.setattr(client, "Popen", worker_zygote.worker)
    monkeypatch.setattr(launcher, "Popen", worker_zygote.launcher)
    monkeypatch.setattr(catalog, "subprocess", SimpleNamespace(run=run))


@pytest.fixture
def pytester(
    pytester: pytest.Pytester,
    zygote: Zygote,
    worker_zygote: Zygote,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> pytest.Pytester:
    """Fork runs of `runpytest_subprocess`, and their processes unless `new_processes`.

    The module of a test whose runs compile kernels uses the fixture `compiler_zygote`.
    """
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)  # a run that a test starts is not in an xdist worker
    popen = pytester.popen
    compiles = "compiler_zygote" in request.fixturenames
    zygotes = worker_zygote, request.getfixturevalue("compiler_zygote") if compiles else None
    new_processes = request.node.get_closest_marker("new_processes") is not None
    pytest_itself = [sys.executable, "-mpytest"]

    def start(command: Any, *pipes: Any, **how: Any) -> Any:
        forks = list(command[:2]) == pytest_itself and not pipes
        if not forks or how.get("stdin") is not pytester.CLOSE_STDIN:
            return popen(command, *pipes, **how)
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", os.getcwd(), prepend=os.pathsep)
            files = how["stdout"].fileno(), how["stderr"].fileno()
            return zygote.run(command[2:], *files, *(() if new_processes else zygotes))

    monkeypatch.setattr(pytester, "popen", start)
    return pytester


@pytest.fixture
def runs(
    pytester: pytest.Pytester,
    zygote: Zygote,
    worker_zygote: Zygote,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> list[list[str]]:
    """Fork each pytest in a worktree instead of starting it; return the options of each."""
    found: list[list[str]] = []

    class Forked:
        def __init__(self, command: list[str], *, cwd: Path, env: Any, **pipes: Any) -> None:
            self.file = tmp_path / f"{len(found)}.txt"
            start = [*interpreter(), "-m", "pytest"]
            assert command[: len(start)] == start
            found.append(command[len(start) :])
            with monkeypatch.context() as patch, self.file.open("wb") as file:
                patch.chdir(cwd)
                for name, value in env.items():
                    patch.setenv(name, value)
                pipe = file.fileno()
                self.process = zygote.run(found[-1], pipe, pipe, worker_zygote)

        def communicate(self) -> tuple[str, None]:
            self.process.wait()
            return self.file.read_text(), None

    monkeypatch.setattr(commit_runs, "Popen", Forked)
    return found


@pytest.fixture
def page(pytester: pytest.Pytester) -> Callable[..., Any]:
    """Write `doubling_test.py` in a folder of pages and return its path.

    Args: `optimized` is the expression that the variant returns, `body` the test's body, `defs`
    functions that replace those above them, `more` further keywords of `compare` (see `PARTS`).
    """
    pytester.makeini(textwrap.dedent(INI))

    def write(
        optimized: str = "2 * x",
        *,
        body: str = BODY,
        name: str = "doubling_test.py",
        folder: str = "ch99",
        text: str = PAGE,
        **parts: str,
    ) -> Any:
        path = pytester.path / folder / name
        path.parent.mkdir(exist_ok=True)
        slots = {**PARTS, **parts, "optimized": optimized, "body": body.replace("\n", "\n    ")}
        slots["defs"] = textwrap.dedent(slots["defs"]).strip()
        path.write_text(textwrap.dedent(text).format(**slots))
        return path

    return write


@pytest.fixture
def gpu(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., None]:
    """Simulate a GPU in this session: `gpu(added=2e-5, doubled=1e-5, noise={...})`."""
    # Runs on a simulated GPU need no lock of the real machine and must not wait for one.
    monkeypatch.setenv("AISP_LEASES", str(tmp_path_factory.mktemp("leases")))

    def install(
        *,
        noise: dict[str, float] | None = None,
        session: float = 0.0,
        details: dict[str, Any] | None = None,
        environment: dict[str, Any] | None = None,
        **seconds: float,
    ) -> None:
        options = {"seconds": seconds, "noise": noise or {}, "session": session}
        timer = {
            "target": "pytest_aisp.timing.fake_device:simulate",
            "arch": "sm90",
            "product": "simulated-gpu",
            "options": {**options, "details": details or {}},
            "environment": environment or {},
        }
        pytester.makeconftest(f"def pytest_aisp_timer(config):\n    return {timer!r}\n\n\n")

    return install


@pytest.fixture
def timed_page(page: Callable[..., Any], gpu: Callable[..., None]) -> Callable[..., Any]:
    """Write a page, and simulate a GPU on which `doubled` is twice as fast as `added`."""

    def write(*args: str, **parts: str) -> Any:
        gpu(added=2e-5, doubled=1e-5)
        return page(*args, **parts)

    return write


RECORDED: dict[str, str] = {}
"""Stored results by the text of the pages and of the simulated GPU's conftest.py."""


@pytest.fixture
def recorded(pytester: pytest.Pytester) -> Callable[[], None]:
    """Store results of the pages in ch99 from three processes. Cached for equal pages."""

    def record() -> None:
        files = [pytester.path / "conftest.py", *sorted((pytester.path / "ch99").glob("*_test.py"))]
        key = "\n".join(f"{file.name}\n{file.read_text()}" for file in files)
        stored = pytester.path / "baselines" / "simulated-gpu" / "ch99.json"
        if key in RECORDED:
            stored.parent.mkdir(parents=True)
            stored.write_text(RECORDED[key])
            return
        done = pytester.runpytest_subprocess("--aisp-update-expectations", "--aisp-processes=3")
        assert done.ret == 0
        RECORDED[key] = stored.read_text()

    return record


@pytest.fixture
def lines() -> Callable[[pytest.RunResult], str]:
    """Return a run's whole output as one text."""
    return lambda result: "\n".join(result.outlines + result.errlines)


class Outcome(NamedTuple):
    """A case's verdict, and its failure as the terminal shows it."""

    verdict: str
    failure: str


@pytest.fixture(scope="module")
def module_cache() -> dict[str, Any]:
    """Return a cache for what a file's tests share, such as a run that takes seconds."""
    return {}


@pytest.fixture
def fresh_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the test import modules and change the import path. Afterwards, drop these modules."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in sys.modules.keys() - before:
        del sys.modules[name]


@pytest.fixture
def read_junit() -> Callable[[Path], dict[str, Outcome]]:
    """Read the outcome of each page's case from a JUnit file."""

    def read(junit: Path) -> dict[str, Outcome]:
        return {
            case.attrib["classname"].rpartition(".")[2].removesuffix("_test"): _outcome(case)
            for case in ElementTree.parse(junit).iter("testcase")
        }

    return read


def _outcome(case: Any) -> Outcome:
    named = {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
    failures = [f.text or "" for kind in ("failure", "error") for f in case.iter(kind)]
    return Outcome(named.get("aisp_verdict", ""), "\n".join(failures))


GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]


@pytest.fixture
def git(pytester):
    """Run git in the session's folder; the first call makes a repository."""

    def run(*args):
        if not (pytester.path / ".git").exists():
            subprocess.run([*GIT, "init", "-q", "-b", "main"], cwd=pytester.path, check=True)
            (pytester.path / ".gitignore").write_text("kept\n__pycache__\n")
        done = subprocess.run(
            [*GIT, *args], cwd=pytester.path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    return run


@pytest.fixture
def commit(git):
    """Commit everything in the session's folder."""

    def run():
        git("add", "-A")
        git("commit", "-qm", "a commit")

    return run
