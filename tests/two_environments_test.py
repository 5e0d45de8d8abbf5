"""`--aisp-against-python`: each side is timed in two environments at once."""

from __future__ import annotations

import json
import sys
from importlib import metadata

import msgspec
import pytest

from pytest_aisp.checking.numerics import Wrong
from pytest_aisp.page.pair import PageError
from pytest_aisp.page.sources import PACKAGE
from pytest_aisp.results import run_reader
from pytest_aisp.results.messages import HoldTask, ReleaseTask, WindowTask
from pytest_aisp.results.verdict import Finding, case_cause
from pytest_aisp.session.other_environment import OPTION, Found, find
from pytest_aisp.util.device import Machine
from pytest_aisp.worker.engine import Engine
from pytest_aisp.worker.server import Server

SECONDS = {"added": 2e-5, "doubled": 1e-5}
NEEDED = metadata.version("pytest-aisp")
ONLY_HERE = """
import os, sys
HERE = "site-packages" in os.environ["PYTHONPATH"] or "pytest_aisp.plugin" in sys.modules
"""
"""The other interpreter does not get the folders of today's libraries."""


@pytest.fixture
def run(pytester):
    """Run pytest with another interpreter, which by default is the same one. Keep the artifacts."""

    def start(*options, python=sys.executable):
        return pytester.runpytest_subprocess(
            f"{OPTION}={python}", "--aisp-artifacts=kept", *options
        )

    return start


@pytest.fixture
def interpreter(tmp_path):
    """Write an interpreter that is the script `text`."""

    def write(text):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def finds(interpreter):
    """Return what `find` says about an interpreter that the probe describes by `found`."""

    def call(cuda_of_driver=None, **found):
        plain = {"python": "3.11.7", "safe_path": True, "torch": "2.11.0", "folder": PACKAGE}
        path = interpreter(f"echo '{json.dumps({**plain, 'version': NEEDED, **found})}'")
        versions = {"cuda": cuda_of_driver} if cuda_of_driver else {}
        with pytest.raises(pytest.UsageError) as refused:
            find(str(path), Machine("sm90", "nvidia-h200", "H200", versions=versions))
        return str(refused.value).replace(f"{OPTION}={path}: ", "").replace(str(path), "python")

    return call


def rows(pytester):
    return list(run_reader.load(pytester.path / "kept").rows())


def test_a_loss_in_todays_environment_is_red(page, gpu, run, pytester):
    gpu(**SECONDS, **{"doubled@other": 0.98e-5})
    page()
    result = run()
    assert result.ret == 1
    speed = f"doubled runs at 0.98*x of its speed with {sys.executable} (the same versions)"
    result.stdout.fnmatch_lines(
        [
            f"E  *{speed}: margin 0.70%; votes of fresh processes: 0.9*, 0.9*, 0.9* -> red",
            "E  *cause: environment",
            f"E  *pytest *doubled-n1001* {OPTION}={sys.executable}*",
        ]
    )
    result.stdout.no_fnmatch_line("*added runs at*")
    [row] = rows(pytester)
    assert (row.verdict, row.cause) == ("regressed", "environment")
    optimized = ["optimized@environments"] * 4
    assert [one["side"] for one in row.against] == ["baseline@environments", *optimized]
    again = pytester.runpytest_subprocess("--aisp-replay=kept")
    assert again.ret == 1
    again.stdout.fnmatch_lines(
        ["E  *doubled runs at 0.98*x of its speed in the other environment *"]
    )


def test_the_direct_comparison_decides_the_cause():
    findings = [Finding("regressed", (), cause) for cause in ("machine", "environment")]
    assert case_cause(findings, "regressed") == "environment"


def test_equal_environments_and_gains_are_green(page, gpu, run, pytester):
    gpu(**SECONDS, **{"doubled@other": 1.5e-5})
    page()
    result = run("-vv")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["*added against its speed with *x; detects 1.5%", "*doubled against its *: 1.50*x; *"]
    )
    baseline, _ = rows(pytester)[0].against
    assert set(baseline["orders"]) == {"ABBA", "BAAB"}
    assert baseline["firsts"] == [0] * 5 + [1] * 5 + [0] * 5 + [1] * 5
    assert baseline["details"]["python"] == sys.executable


@pytest.mark.new_processes
def test_the_versions_that_differ_are_named(page, gpu, run, interpreter, pytester):
    gpu(**SECONDS)
    page()
    extra = pytester.mkdir("extra")
    (extra / "sitecustomize.py").write_text("import triton\n\ntriton.__version__ = '3.5.0'\n")
    python = interpreter(f'PYTHONPATH="$PYTHONPATH:{extra}" exec {sys.executable} "$@"')
    result = run("-vv", python=python)
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"*added against its speed with {python} (triton 3.5.0 -> *): *"])
    there, here = rows(pytester)[0].against[0]["details"]["versions"]["triton"]
    assert there == "3.5.0" != here


@pytest.mark.parametrize(
    ("optimized", "defs", "named"),
    [
        ("2 * x if HERE else x.no_such_method()", "", "doubled is not timed with *no_such_method*"),
        ("2 * x if HERE else 3 * x", "", "doubled is not timed with *doubled is wrong at n=1001*"),
        ("2 * x", "assert HERE, 'the page needs it'", "added is not timed with *AssertionError: *"),
    ],
    ids=["raises", "wrong", "page"],
)
def test_a_side_that_one_environment_cannot_run_is_named(
    page, gpu, run, pytester, optimized, defs, named
):
    gpu(**SECONDS, **{"doubled@other": 0.5e-5})
    page(optimized, defs=ONLY_HERE + defs)
    result = run()
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"*doubled-n1001]: {named}"])
    timed = [] if defs else ["baseline@environments"]
    assert [one["side"] for one in rows(pytester)[0].against] == timed


def test_a_case_on_several_gpus_is_named(page, gpu, run):
    gpu(**SECONDS)
    reference = "def reference(ranks):\n    return [2 * x.double() for (x,) in ranks]"
    page(defs=reference, more="conditions=Conditions(gpus=2),", bound='"nvlink"')
    result = run()
    assert result.ret == 0
    named = "*: cases on several GPUs are timed in one environment only"
    result.stdout.fnmatch_lines([f"*: not timed with {sys.executable}{named}"])


def fields(path):
    """Return the fields of the tasks about the page `path`."""
    names = {"module": "held_doubling", "function": "test_doubling", "variant": "doubled"}
    return {"page": str(path), "root": str(path.parent), "size": {"n": 33}, **names}


def held_by(page, optimized="2 * x"):
    """Hold `doubled` in this process. Return an engine, and the fields of its tasks."""
    engine, place = Engine(), fields(page(optimized))
    held = engine.answer(HoldTask(**place, side="optimized", budget={"window": 1e-4, "warmup": 1}))
    assert (held.clock, held.laps) == ("cpu", 1)
    return engine, place


def test_a_held_side_is_timed_window_by_window(page):
    engine, place = held_by(page)
    for copy, refresh in ((0, ""), (1, "values"), (0, "last")):
        answer = engine.answer(WindowTask(**place, copy=copy, refresh=refresh))
        assert 0 < answer.seconds < 1
    assert engine.answer(ReleaseTask(**place))["counted"]


def test_an_output_of_a_timed_window_that_is_wrong_is_found(page):
    """At the first, the side is right."""
    engine, place = held_by(page, "CALLS.append(x) or (2 if len(CALLS) < 9 else 3) * x")
    for copy in (0, 1):
        engine.answer(WindowTask(**place, copy=copy))
    with pytest.raises(Wrong, match="doubled is wrong"):
        engine.answer(ReleaseTask(**place))
    with pytest.raises(PageError, match="no side is held that could answer 'window'"):
        engine.answer(WindowTask(**place, copy=0))


def test_a_process_is_not_replaced_before_its_last_lap(page):
    place, server = fields(page()), Server(lambda text: None)
    server.engine.cache.exhausted = True
    timer = {"target": "pytest_aisp.timing.fake_device:simulate"}
    timer["options"] = {"seconds": {"doubled": 1e-5}}
    holds = [HoldTask(**place, side="optimized", timer=timer, lap=lap) for lap in (0, 1)]
    released = [ReleaseTask(**place, last=False), ReleaseTask(**place)]
    tasks = [holds[0], WindowTask(**place, copy=0), released[0], holds[1], released[1]]
    assert [server.answer(task).exhausted for task in tasks] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("python", "says"),
    [
        ("/no/such/python", "no such interpreter: No such file or directory"),
        ("/tmp", "no such interpreter: Permission denied"),
        ("/bin/true", "not a usable Python: it printed no versions"),
    ],
)
def test_what_is_no_interpreter_is_refused(timed_page, run, python, says):
    timed_page()
    result = run(python=python)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    hint = ["Give the Python of an environment:", f"    pytest {OPTION}=/old/venv/bin/python"]
    result.stderr.fnmatch_lines([f"ERROR: {OPTION}={python}: {says}", *hint])


INSTALL = f"Install the same version there:\n    python -m pip install pytest-aisp=={NEEDED}"


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"folder": ""}, f"it has no pytest-aisp; this run needs {NEEDED} there\n{INSTALL}"),
        (
            {"folder": "/nowhere", "version": "0.0.9"},
            f"it has pytest-aisp 0.0.9, and this run needs {NEEDED}\n{INSTALL}",
        ),
        (
            {"folder": "/nowhere"},
            f"it has pytest-aisp {NEEDED}, with files that differ from those here\n{INSTALL}",
        ),
        (
            {"lacks": "no module msgspec"},
            f"its pytest-aisp cannot be imported: no module msgspec\n{INSTALL}",
        ),
        (
            {"torch": ""},
            "it has no torch\nInstall it there:\n    python -m pip install torch",
        ),
        (
            {"cuda": None, "cuda_of_driver": "13.0"},
            "its torch 2.11.0 was built without CUDA, and the cases run on a GPU",
        ),
        (
            {"cuda": "13.0", "cuda_of_driver": "12.4"},
            "its torch 2.11.0 needs a driver for CUDA 13.0, and this driver supports CUDA 12.4:"
            " both environments must work with one driver",
        ),
    ],
    ids=["no plugin", "another version", "other code", "no msgspec", "no torch", "no CUDA", "CUDA"],
)
def test_an_environment_that_cannot_be_compared_is_refused(finds, found, says):
    assert finds(**found) == says


def test_an_older_cuda_works_with_a_newer_driver(interpreter):
    found = Found("3.11.7", safe_path=True, folder=PACKAGE, torch="2.9", cuda="12.8")
    path = interpreter(f"echo '{msgspec.json.encode(found).decode()}'")
    machine = Machine("sm90", "nvidia-h200", "H200", versions={"cuda": "13.0"})
    assert find(str(path), machine).found == found


@pytest.mark.parametrize(
    "option",
    [
        "--aisp-against=HEAD",
        "--aisp-check",
        "--aisp-compile",
        "--aisp-aa",
        "--aisp-replay=kept",
        "--aisp-update-expectations",
        "--aisp-in-process",
    ],
)
def test_options_that_compare_nothing_else_are_refused(page, run, option):
    page()
    result = run(option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"*{OPTION} cannot be combined with {option.partition('=')[0]}: *"]
    )
