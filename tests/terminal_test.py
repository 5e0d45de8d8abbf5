"""Progress on the terminal, and messages about leases."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from pytest_aisp.util.gpu_lease import lease


@pytest.fixture
def on_a_terminal(pytester):
    """Run pytest on a pseudo-terminal and return what it wrote there."""

    def run(*args):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
        environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
        with subprocess.Popen(
            command, cwd=pytester.path, stdout=theirs, stderr=theirs, env=environment
        ) as process:
            os.close(theirs)
            written = b""
            while chunk := _read(ours):
                written += chunk
        os.close(ours)
        return process.returncode, written.decode(errors="replace")

    return run


def _read(fd):
    try:
        return os.read(fd, 4096)
    except OSError:  # the other end is closed
        return b""


def test_verbose_shows_progress_on_the_line_of_the_case(timed_page, on_a_terminal):
    timed_page()
    code, written = on_a_terminal("-v")
    assert code == 0
    case = "ch99/doubling_test.py::test_doubling[doubled-n1001]"
    shown = [part.rstrip() for part in written.split("\r") if part.startswith(case)]
    assert f"{case} check at n=33" in shown
    assert re.fullmatch(rf"{re.escape(case)} \S*NEW 2.0.*", shown[-1])
    assert len(re.sub(r"\x1b\[\d*m", "", shown[-1])) == 119  # the percentage ends the line


def test_without_v_no_progress_is_shown(timed_page, on_a_terminal):
    timed_page()
    code, written = on_a_terminal()
    assert code == 0
    assert "check at n=33" not in written


def test_a_wait_for_a_lease_is_announced(monkeypatch, tmp_path):
    monkeypatch.setenv("AISP_LEASES", str(tmp_path))
    said, done = [], threading.Event()

    def wait_for_it():
        with lease("GPU-1", waiting=said.append):
            done.set()

    with lease("GPU-1"):
        other = threading.Thread(target=wait_for_it)
        other.start()
        while not said:
            pass
        assert not done.is_set()
    other.join(10)
    assert done.is_set()
    assert said == ["wait for GPU-1, which another run holds"]


def test_a_free_lease_is_not_announced(monkeypatch, tmp_path):
    monkeypatch.setenv("AISP_LEASES", str(tmp_path))
    said = []
    with (
        lease("host", shared=True, waiting=said.append),
        lease("host", shared=True, waiting=said.append),
    ):
        pass
    assert said == []
