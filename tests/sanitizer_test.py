"""Checking under compute-sanitizer, with a script in its place that says what it is told to."""

from __future__ import annotations

import os

import pytest

from pytest_aisp.results.messages import FactsTask
from pytest_aisp.worker import nvidia_tools
from pytest_aisp.worker.nvidia_tools import MISSING_SANITIZER, SanitizedWorker

SCRIPT = """#!/bin/sh
[ "$1 $2 $3 $5 $6" = "--tool memcheck --log-file --report-api-errors no" ] || exit 9
cp {report} $4
shift 6
exec "$@"
"""
CLEAN = """========= COMPUTE-SANITIZER
========= ERROR SUMMARY: 0 errors
"""
FAULT = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at copy+0x90 in copy.cu:12
=========     by thread (31,0,0) in block (7,0,0)
========= ERROR SUMMARY: 1 error
"""


@pytest.fixture
def reports(tmp_path, monkeypatch):
    """Return what sets the report of the compute-sanitizer on PATH."""

    def says(report):
        (tmp_path / "report").write_text(report)
        script = tmp_path / nvidia_tools.SANITIZER
        script.write_text(SCRIPT.format(report=tmp_path / "report"))
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return says


@pytest.fixture
def bench():
    started = []

    def start():
        started.append(SanitizedWorker("memcheck", {"CUDA_VISIBLE_DEVICES": ""}))
        return started[-1]

    yield start
    for one in started:
        one.close()
        assert not os.path.exists(one._log)


def ask(bench):
    return bench.ask(FactsTask(device="cpu"), 60.0, lambda doing: None)


def test_a_clean_report_changes_no_answer(reports, bench):
    reports(CLEAN)
    assert ask(bench()).error is None


def test_a_finding_is_an_error_of_the_page_and_ends_the_process(reports, bench):
    reports(FAULT)
    watched = bench()
    reply = ask(watched)
    assert reply.error == "page"
    assert reply.message.splitlines() == [
        "memcheck found an error in a kernel:",
        "Invalid __global__ read of size 4 bytes",
        "at copy+0x90 in copy.cu:12",
        "by thread (31,0,0) in block (7,0,0)",
        "ERROR SUMMARY: 1 error",
    ]
    assert not watched.alive


def test_a_long_report_is_cut(reports, bench):
    reports("".join(f"========= fault {n}\n" for n in range(40)))
    lines = ask(bench()).message.splitlines()
    assert lines[-2:] == ["fault 11", "..."]


def test_where_it_is_not_installed_the_error_says_where_to_get_it(pytester, monkeypatch):
    monkeypatch.setenv("PATH", "")
    result = pytester.runpytest("--aisp-sanitize")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--aisp-sanitize: {MISSING_SANITIZER}"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--aisp-sanitize=leakcheck"], "*--aisp-sanitize=leakcheck: choose one of memcheck, *"),
        (["--aisp-sanitize"], "*--aisp-sanitize needs a GPU; there is none here"),
        (["--aisp-sanitize", "--aisp-aa"], "*--aisp-sanitize cannot be combined with --aisp-aa*"),
        (["--aisp-sanitize", "--pdb"], "*--aisp-sanitize cannot be combined with --pdb: *"),
    ],
)
def test_what_it_cannot_do_is_refused(reports, pytester, monkeypatch, arguments, words):
    reports(CLEAN)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = pytester.runpytest(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([words])
