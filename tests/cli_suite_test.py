"""`aisp suite run`, `verify`, `replay`: which pytest command stands for what was asked."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from fake_results import case, fake_catalog

from pytest_aisp.cli import app, suite
from pytest_aisp.results import export
from pytest_aisp.tools import catalog
from pytest_aisp.util.cli_result import CliError
from pytest_aisp.worker import nvidia_tools

PAGE = "suites/ch10/gemm_test.py"


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Two pages in a folder; the commands that would have been run, each ending with a code."""
    told = fake_catalog(tmp_path, [case("ch10:gemm"), case("ch07:scan")])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(catalog, "collect", lambda *targets, tell: told)
    ran = []

    class Ended:
        codes = iter(())

        def __init__(self, command):
            ran.append(command)

        def wait(self):
            return next(self.codes, 0)

    monkeypatch.setattr(catalog, "Popen", Ended)
    monkeypatch.setattr(ran_codes := Ended, "codes", iter(()))
    return ran, ran_codes


def words(ran):
    """Return what pytest is given, command by command."""
    assert all(command[:3] == [sys.executable, "-m", "pytest"] for command in ran)
    return [command[3:] for command in ran]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["suites"]),
        (["--targets", "ch10:gemm"], [PAGE]),
        (["--targets=ch10:gemm", "ch07"], [PAGE, "suites/ch07/scan_test.py"]),
        (["--targets", "ch10", "ch07", "--profile=none"], [PAGE, "suites/ch07/scan_test.py"]),
        (["--targets", "ch10", "--targets", "ch10:gemm", "--", "-x", "-k", "a b"], ["-x", "-k"]),
        (["--profile", "minimal", "--targets", "ch10"], ["--aisp-profile=torch", PAGE]),
        (["--artifacts-dir", "out", "--targets", "ch10"], ["--aisp-artifacts=out", PAGE]),
    ],
)
def test_what_pytest_is_given(ran, capsys, given, expected):
    commands, _ = ran
    assert app.main(["bench", "run", *given]) == 0
    (command,) = words(commands)
    if "-k" in command:
        expected = [*expected, "a b", PAGE]
    assert command == expected
    shown = capsys.readouterr().out
    assert shown.startswith("$ python -m pytest ")
    assert shown.split()[-1] == expected[-1]


def test_a_full_profile_is_a_run_for_each_profiler_that_is_installed(ran, monkeypatch, capsys):
    commands, ended = ran
    monkeypatch.setattr(
        nvidia_tools, "profiler_installed", lambda name: "/bin/ncu" if name == "ncu" else None
    )
    ended.codes = iter((0, 1))
    line = ["bench", "run", "--targets", "ch10", "--profile", "full", "--artifacts-dir", "out"]
    assert app.main([*line, "--", "-x"]) == 1
    assert words(commands) == [
        ["--aisp-profile=torch", "--aisp-artifacts=out", "-x", PAGE],
        ["--aisp-profile=ncu", "--aisp-artifacts=out/ncu", "-x", PAGE],
    ]
    assert capsys.readouterr().out.splitlines() == [
        f"$ python -m pytest --aisp-profile=torch --aisp-artifacts=out -x {PAGE}",
        f"$ python -m pytest --aisp-profile=ncu --aisp-artifacts=out/ncu -x {PAGE}",
    ]
    assert catalog.measure_commands(["p"], "full", None, []) == [
        *(["--aisp-profile=torch", "p"], ["--aisp-profile=ncu", "p"])
    ]


def test_verify_goes_on_after_a_stage_and_ends_as_the_worst(ran):
    commands, ended = ran
    ended.codes = iter((0, 2, 1))
    assert app.main(["verify", "--targets", "ch10", "--", "-q"]) == 2
    assert words(commands) == [
        ["--collect-only", "-q", "-q", PAGE],
        ["--aisp-check", "-q", PAGE],
        ["--aisp-compile", "-q", PAGE],
    ]


@pytest.mark.parametrize("command", [["bench", "run"], ["verify"], ["replay", "out"]])
def test_an_unknown_target_runs_nothing(ran, capsys, command):
    commands, _ = ran
    assert app.main([*command, "--targets", "ch10:gemn"]) == 2
    said = "unknown target 'ch10:gemn'; the nearest: ch10:gemm\n    aisp suite list\n"
    assert capsys.readouterr().err == said
    assert commands == []


@pytest.mark.parametrize("given", [["--targets"], ["--targets", "--profile=none"]])
def test_targets_without_a_word_are_refused(ran, capsys, given):
    assert app.main(["bench", "run", *given]) == 2
    assert "--targets needs a chapter or a page, as ch10 or ch10:gemm" in capsys.readouterr().err
    assert ran[0] == []


def test_only_runs_hand_anything_to_pytest(capsys):
    assert app.main(["roofline", "--targets", "ch10", "--", "-x"]) == 2
    said = "this command does not run pytest: remove -- and the words after it"
    assert said in capsys.readouterr().err


def test_targets_end_at_the_next_option():
    given = ["a", "--targets", "b", "c", "--json", "--targets=d", "e", "--product", "f"]
    assert list(suite._repeat_option(given)) == [
        *("a", "--targets=b", "--targets=c", "--json", "--targets=d", "--targets=e"),
        *("--product", "f"),
    ]
    assert list(suite._repeat_option(["out", "-"])) == ["out", "-"]


def test_a_run_that_a_signal_ended_says_so_as_a_shell_does(ran):
    ran[1].codes = iter((-signal.SIGKILL,))
    assert app.main(["bench", "run"]) == 137


def test_an_interrupt_waits_for_pytest_to_close_its_run(ran, monkeypatch):
    def interrupted(self):
        monkeypatch.setattr(ran[1], "wait", lambda self: 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(ran[1], "wait", interrupted)
    assert app.main(["bench", "run"]) == 2


def line(row):
    """Return a line of a journal."""
    return (
        json.dumps({**row, "schema": export.SCHEMA, "file": "", "page": "", "samples": None}) + "\n"
    )


@pytest.fixture
def recorded(tmp_path):
    """A folder of artifacts with a row of each page."""
    rows = [case("ch10:gemm"), case("ch07:scan", "a/../b")]
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "results.jsonl").write_text("".join(map(line, rows)))
    return folder


def test_replay_names_what_was_recorded_and_nothing_else(ran, recorded, tmp_path, monkeypatch):
    commands, _ = ran
    scan = "suites/ch07/scan_test.py::test_scan[a/../b-n64]"
    gemm = f"{PAGE}::test_gemm[tiled-n64]"
    assert app.main(["replay", "out", "--", "-q"]) == 0
    assert app.main(["replay", "out", "--targets", "ch07:scan"]) == 0
    (tmp_path / "suites").mkdir()
    monkeypatch.chdir(tmp_path / "suites")
    assert app.main(["replay", str(recorded), "--targets", "ch10"]) == 0
    assert words(commands) == [
        ["--aisp-replay=out", "-q", gemm, scan],
        ["--aisp-replay=out", scan],
        [f"--aisp-replay={recorded}", gemm.removeprefix("suites/")],
    ]


def test_a_folder_without_a_recording_is_refused(ran, recorded, tmp_path, capsys):
    assert app.main(["replay", "nowhere"]) == 2
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("--aisp-replay=nowhere: no run to judge again: ")
    assert last.startswith("    pytest --aisp-artifacts")
    (recorded / "results.jsonl").write_text(line(case("ch10:gemm")))
    assert app.main(["replay", "out", "--targets", "ch07"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "out has no case of these targets",
        "    aisp suite replay out",
    ]
    assert ran[0] == []


def test_pytest_is_really_run_and_its_exit_code_returned(tmp_path, capfd):
    (tmp_path / "red_test.py").write_text("def test_red():\n    assert 1 == 2\n")
    command = ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    assert catalog.run(command, lambda text: print(text, flush=True)) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == f"$ python -m pytest -q -p no:cacheprovider --rootdir={tmp_path} {tmp_path}"
    assert lines[-1].startswith("1 failed")
    assert Path(catalog.command_line(["a b"]).split("'")[1]).name == "a b"


@pytest.fixture
def completes(tmp_path, monkeypatch, capsys):
    """What bash would offer for a line that ends where the cursor is; words as bash cuts them."""
    told = fake_catalog(tmp_path, [case("ch10:gemm"), case("ch10:group"), case("ch07:scan")])
    monkeypatch.setattr(catalog, "collect", lambda *targets: told)
    monkeypatch.setenv("_AISP_COMPLETE", "complete_bash")

    def offered(line):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        assert app.main([]) == 0
        return capsys.readouterr().out.split()

    return offered


@pytest.mark.parametrize("command", ["bench run", "verify", "bench list-targets", "roofline"])
def test_a_shell_completes_the_option_of_targets(completes, command):
    words = ["--targets"] if "list" not in command else []
    assert completes(f"aisp {command} --tar") == words


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("--targets ", ["ch07", "ch10"]),
        ("--targets ch1", ["ch10"]),
        ("--targets ch10", ["ch10", "ch10:gemm", "ch10:group"]),
        ("--targets ch10:gr", ["ch10:group"]),
        ("--targets=ch10:gr", ["ch10:group"]),
        ("--targets ch10 : gr", ["group"]),
        ("--targets ch10 :", ["gemm", "group"]),
        ("--targets ch10 ", ["ch07"]),
        ("--targets ch10:gemm ch10:g", ["ch10:group"]),
        ("--targets=ch10 ch0", ["ch07"]),
        ("--targets ch12:g", []),
        ("--targets ch10 --profile=none c", []),
        ("--targets ch10 -- c", []),
        ("--targets ch10 --prof", ["--profile"]),
    ],
)
def test_a_shell_completes_targets(completes, line, offered):
    assert completes(f"aisp suite run {line}") == offered


def test_where_nothing_can_be_collected_a_shell_is_offered_nothing(completes, monkeypatch):
    def refused(*targets):
        raise CliError("pytest cannot collect here")

    monkeypatch.setattr(catalog, "collect", refused)
    assert completes("aisp suite run --targets ch") == []
