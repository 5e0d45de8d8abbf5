"""The commands that a failure ends with can be typed where pytest was run."""

from __future__ import annotations

import shlex

import pytest

MODE = "it's a/b $x"


@pytest.fixture
def odd(page, gpu, recorded, pytester):
    """Write a page that is slower than recorded; its case's id has a quote in it."""
    work = "lambda n, mode: Work(read=4 * n, write=4 * n)"
    path = page(check_sizes=f'[{{"n": 33, "mode": "{MODE}"}}]', work=work)
    text = path.read_text().replace("inputs(device, n)", "inputs(device, n, mode)")
    path.write_text(text.replace('{"n": 1001}', f'{{"n": 1001, "mode": "{MODE}"}}'))
    gpu(added=2e-5, doubled=1e-5)
    recorded()
    gpu(added=2e-5, doubled=1.2e-5)
    return path


def typed(result, word):
    """Return the words of the command after the line `word`."""
    at = next(n for n, line in enumerate(result.outlines) if line.endswith(word))
    return shlex.split(result.outlines[at + 1].removeprefix("E"))


@pytest.mark.parametrize("folder", [".", "ch99", "elsewhere"])
def test_printed_commands_work_where_pytest_was_started(odd, pytester, monkeypatch, folder):
    (pytester.path / "elsewhere").mkdir()
    monkeypatch.chdir(pytester.path / folder)
    first = pytester.runpytest_subprocess(odd, f"--rootdir={pytester.path}", "-n0")
    assert first.ret == 1
    path = {".": "ch99/", "ch99": "", "elsewhere": "../ch99/"}[folder]
    for word in ("reproduce:", "accept:"):
        [case] = [word for word in typed(first, word) if "::" in word]
        assert case.startswith(f"{path}doubling_test.py::test_doubling[doubled-n1001-modeit's")
    again = pytester.runpytest_subprocess("--collect-only", "-q", case)
    again.stdout.fnmatch_lines(["1 test collected in *"])
