"""Checking under compute-sanitizer, which a script replaces here."""

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
def report(tmp_path, monkeypatch):
    """Put a compute-sanitizer on PATH that writes this report."""

    def write(text):
        (tmp_path / "report").write_text(text)
        script = tmp_path / nvidia_tools.SANITIZER
        script.write_text(SCRIPT.format(report=tmp_path / "report"))
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return write


@pytest.fixture
def worker(report):
    """Return a function that starts a worker and asks it while this report is written."""
    started = []

    def ask(text):
        report(text)
        started.append(SanitizedWorker("memcheck", {"CUDA_VISIBLE_DEVICES": ""}))
        return started[0].ask(FactsTask(device="cpu"), 60.0, lambda text: None), started[0]

    yield ask
    started[0].close()
    assert not os.path.exists(started[0]._log)


def test_a_clean_report_changes_no_reply(worker):
    reply, process = worker(CLEAN)
    assert reply.error is None
    assert process.alive


def test_a_reported_error_fails_the_page_and_ends_the_process(worker):
    reply, process = worker(FAULT)
    assert reply.error == "page"
    assert reply.message.splitlines() == [
        "memcheck found an error in a kernel:",
        "Invalid __global__ read of size 4 bytes",
        "at copy+0x90 in copy.cu:12",
        "by thread (31,0,0) in block (7,0,0)",
        "ERROR SUMMARY: 1 error",
    ]
    assert not process.alive


def test_a_long_report_is_cut(worker):
    reply, _ = worker("".join(f"========= fault {n}\n" for n in range(40)))
    assert reply.message.splitlines()[-2:] == ["fault 11", "..."]


def test_a_missing_sanitizer_is_refused(pytester, monkeypatch):
    monkeypatch.setenv("PATH", "")
    result = pytester.runpytest("--aisp-sanitize")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--aisp-sanitize: {MISSING_SANITIZER}"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--aisp-sanitize=leakcheck"], "*--aisp-sanitize=leakcheck: choose one of memcheck, *"),
        (["--aisp-sanitize"], "*--aisp-sanitize needs a GPU; there is none here"),
        (["--aisp-sanitize", "--aisp-aa"], "*--aisp-sanitize cannot be combined with --aisp-aa*"),
        (["--aisp-sanitize", "--pdb"], "*--aisp-sanitize cannot be combined with --pdb: *"),
    ],
)
def test_illegal_values_and_combinations_are_refused(
    report, pytester, monkeypatch, arguments, message
):
    report(CLEAN)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = pytester.runpytest(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])
