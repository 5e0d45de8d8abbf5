"""Progress on the terminal, and messages about leases."""

from __future__ import annotations

import os
import pty
import re
import threading
from types import SimpleNamespace

import pytest

from pytest_aisp.session import terminal
from pytest_aisp.util.gpu_lease import lease


@pytest.fixture
def on_a_terminal(pytester, zygote, worker_zygote, monkeypatch):
    """Run pytest on a pseudo-terminal and return what it wrote there."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")

    def run(*args):
        ours, theirs = pty.openpty()
        process = zygote.run(["-p", "no:cacheprovider", *args], theirs, theirs, worker_zygote)
        os.close(theirs)
        written = b""
        while chunk := _read(ours):
            written += chunk
        os.close(ours)
        return process.wait(), written.decode(errors="replace")

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


SECOND_TEST = """

@compare(
    baseline=added,
    optimized=[doubled],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 7}],
    check_sizes=[{"n": 5}],
    work=lambda n: Work(read=4 * n, write=4 * n),
    bound="dram",
)
def test_again(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
"""


def table_of(result):
    """Return the cells of the closing table, which columns of two spaces separate."""
    start = next(i for i, line in enumerate(result.outlines) if line.startswith("page  "))
    rows = [re.split(r" {2,}", line.strip()) for line in result.outlines[start:]]
    return [row for row in rows if len(row) == len(rows[0]) and not row[0].startswith("-")]


def test_rows_name_the_test_if_a_file_holds_several(timed_page, page, pytester):
    path = timed_page()
    page(name="alone_test.py")
    path.write_text(path.read_text() + SECOND_TEST)
    result = pytester.runpytest_subprocess("--aisp-artifacts=kept")
    names = ["alone", "doubling::test_doubling", "doubling::test_again"]
    assert [row[0] for row in table_of(result)[1:]] == names
    markdown = pytester.path.joinpath("kept", "results.md").read_text()
    assert all(f"| {name} |" in markdown for name in names)


def test_a_check_shows_the_sizes_it_checked(page, pytester):
    page(check_sizes='[{"n": n} for n in range(2, 9)]')
    result = pytester.runpytest_subprocess("--aisp-check")
    assert table_of(result) == [
        ["page", "variant", "size", "checked at", "verdict"],
        ["doubling", "doubled", "n=1001", "n=2; n=3; n=4; n=5; n=6; 2 more", "checked"],
    ]
    result = pytester.runpytest_subprocess("--aisp-check", "-v")
    result.stdout.fnmatch_lines(["* CHECKED at n=2; n=3; n=4; n=5; n=6; 2 more; not timed: *"])
    assert table_of(result)[1][3] == "n=2; n=3; n=4; n=5; n=6; n=7; n=8"
    quiet = pytester.runpytest_subprocess("--aisp-check", "-q")
    assert not [line for line in quiet.outlines if line.startswith("page  ")]


def test_a_check_shows_the_sizes_that_a_search_tried(page, pytester):
    search = "from hypothesis import strategies as st"
    page(defs=search, check_sizes="[{'n': 40}, {'n': st.integers(41, 43)}]")
    result = pytester.runpytest_subprocess("--aisp-check")
    first, *searched = table_of(result)[1][3].split("; ")
    assert first == "n=40"
    assert set(searched) <= {"n=41", "n=42", "n=43"}
    assert searched


@pytest.mark.parametrize(
    ("most", "named"), [(1, "test_a[x] and 2 more"), (None, "test_a[x], test_a[y], test_a[z]")]
)
def test_a_remark_of_several_cases_is_written_once(most, named):
    rows = [SimpleNamespace(key=f"test_a[{k}]", remarks=["changed"]) for k in "xyz"]
    rows[1].remarks.append("all inputs are equal")
    assert terminal._remarks(rows, most) == [
        f"{named}: changed",
        "test_a[y]: all inputs are equal",
    ]
