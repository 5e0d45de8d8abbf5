"""`aisp suite run`, `verify` and `replay`: the pytest commands that they run."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from fake_results import case, fake_catalog, result, stored

from pytest_aisp.cli import app, suite
from pytest_aisp.results import results_json
from pytest_aisp.tools import catalog
from pytest_aisp.util.cli_result import CliError
from pytest_aisp.worker import nvidia_tools

PAGE = "suites/ch10/gemm_test.py"


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Return the recorded pytest commands, and the class whose `codes` are their exit codes."""
    pages = fake_catalog(tmp_path, [case("ch10:gemm"), case("ch07:scan")])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(catalog, "collect", lambda *targets, tell: pages)
    ran = []

    class Process:
        codes = iter(())

        def __init__(self, command):
            ran.append(command)

        def wait(self):
            return next(self.codes, 0)

    monkeypatch.setattr(catalog, "Popen", Process)
    return ran, Process


def words(ran):
    """Return the arguments of each pytest command."""
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
def test_suite_run_translates_options_to_pytest(ran, capsys, given, expected):
    commands, _ = ran
    assert app.main(["bench", "run", *given]) == 0
    (command,) = words(commands)
    if "-k" in command:
        expected = [*expected, "a b", PAGE]
    assert command == expected
    shown = capsys.readouterr().out
    assert shown.startswith("$ python -m pytest ")
    assert shown.split()[-1] == expected[-1]


def test_full_profile_runs_pytest_for_each_installed_profiler(ran, monkeypatch, capsys):
    commands, process = ran
    monkeypatch.setattr(
        nvidia_tools, "profiler_installed", lambda name: "/bin/ncu" if name == "ncu" else None
    )
    process.codes = iter((0, 1))
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


def test_verify_runs_all_stages_and_returns_the_highest_exit_code(ran):
    commands, process = ran
    process.codes = iter((0, 2, 1))
    assert app.main(["verify", "--targets", "ch10", "--", "-q"]) == 2
    assert words(commands) == [
        ["--collect-only", "-q", "-q", PAGE],
        ["--aisp-check", "-q", PAGE],
        ["--aisp-compile", "-q", PAGE],
    ]


@pytest.mark.parametrize("command", [["bench", "run"], ["verify"], ["replay", "out"]])
def test_unknown_target_is_refused(ran, capsys, command):
    commands, _ = ran
    assert app.main([*command, "--targets", "ch10:gemn"]) == 2
    error = "unknown target 'ch10:gemn'; the nearest: ch10:gemm\n    aisp suite list\n"
    assert capsys.readouterr().err == error
    assert commands == []


@pytest.mark.parametrize("given", [["--targets"], ["--targets", "--profile=none"]])
def test_targets_option_without_words_is_refused(ran, capsys, given):
    assert app.main(["bench", "run", *given]) == 2
    assert (
        "--targets needs a chapter or a page, such as ch10 or ch10:gemm" in capsys.readouterr().err
    )
    assert ran[0] == []


def test_only_commands_that_run_pytest_take_its_arguments(capsys):
    assert app.main(["roofline", "--targets", "ch10", "--", "-x"]) == 2
    error = "this command does not run pytest: remove -- and the words after it"
    assert error in capsys.readouterr().err


def test_targets_end_at_the_next_option():
    given = ["a", "--targets", "b", "c", "--json", "--targets=d", "e", "--product", "f"]
    assert list(suite._repeat_option(given)) == [
        *("a", "--targets=b", "--targets=c", "--json", "--targets=d", "--targets=e"),
        *("--product", "f"),
    ]
    assert list(suite._repeat_option(["out", "-"])) == ["out", "-"]


def test_killed_pytest_gives_the_exit_code_of_a_shell(ran):
    ran[1].codes = iter((-signal.SIGKILL,))
    assert app.main(["bench", "run"]) == 137


def test_interrupt_waits_for_pytest_to_end(ran, monkeypatch):
    def interrupted(self):
        monkeypatch.setattr(ran[1], "wait", lambda self: 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(ran[1], "wait", interrupted)
    assert app.main(["bench", "run"]) == 2


def line(row):
    """Return a line of a journal."""
    return (
        json.dumps({**row, "schema": results_json.SCHEMA, "file": "", "page": "", "samples": None})
        + "\n"
    )


@pytest.fixture
def recorded(tmp_path):
    """Return a folder of artifacts with a row of each page."""
    rows = [case("ch10:gemm"), case("ch07:scan", "a/../b")]
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "results.jsonl").write_text("".join(map(line, rows)))
    return folder


def test_replay_selects_only_recorded_cases(ran, recorded, tmp_path, monkeypatch):
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


def test_replay_without_a_recorded_case_is_refused(ran, recorded, tmp_path, capsys):
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


def test_pytest_runs_and_its_exit_code_is_returned(tmp_path, capfd):
    (tmp_path / "red_test.py").write_text("def test_red():\n    assert 1 == 2\n")
    command = ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    assert catalog.run(command, lambda text: print(text, flush=True)) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == f"$ python -m pytest -q -p no:cacheprovider --rootdir={tmp_path} {tmp_path}"
    assert lines[-1].startswith("1 failed")
    assert Path(catalog.command_line(["a b"]).split("'")[1]).name == "a b"


@pytest.fixture
def completions(tmp_path, monkeypatch, capsys):
    """Return a function that completes a line, split into words as bash splits them."""
    pages = fake_catalog(tmp_path, [case("ch10:gemm"), case("ch10:group"), case("ch07:scan")])
    monkeypatch.setattr(catalog, "collect", lambda *targets: pages)
    monkeypatch.setenv("_AISP_COMPLETE", "complete_bash")

    def complete(line):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        assert app.main([]) == 0
        return capsys.readouterr().out.split()

    return complete


@pytest.mark.parametrize("command", ["bench run", "verify", "bench list-targets", "roofline"])
def test_shell_completes_the_targets_option(completions, command):
    words = ["--targets"] if "list" not in command else []
    assert completions(f"aisp {command} --tar") == words


@pytest.mark.parametrize(
    ("line", "expected"),
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
def test_shell_completes_targets(completions, line, expected):
    assert completions(f"aisp suite run {line}") == expected


def test_completion_is_empty_if_pytest_cannot_collect(completions, monkeypatch):
    def refused(*targets):
        raise CliError("pytest cannot collect here")

    monkeypatch.setattr(catalog, "collect", refused)
    assert completions("aisp suite run --targets ch") == []


@pytest.fixture
def repository(pytester, monkeypatch, commit):
    """A committed catalog of two pages: `gemm` imports a helper, and `scan` nothing."""
    cases = [case("ch10:gemm"), case("ch07:scan"), case("ch07:scan", "wide")]
    pages = fake_catalog(pytester.path, cases)
    monkeypatch.setattr(catalog, "collect", lambda *targets, tell: pages)
    files = {
        PAGE: "from .helper import twice\n",
        "suites/ch10/helper.py": "def twice(x):\n    return 2 * x\n",
        "suites/ch07/scan_test.py": SCAN,
    }
    for name, text in files.items():
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    commit()
    return pytester.path


GEMM = f"{PAGE}::test_gemm[tiled-n64]"
SCANS = [f"suites/ch07/scan_test.py::test_scan[{name}-n64]" for name in ("tiled", "wide")]
SCAN = """
def inputs(device, n):
    return (n,)

def tiled(x):
    return 2 * x

def wide(x):
    return x + x

@compare(baseline=sum, optimized=[tiled, wide], inputs=inputs)
def test_scan(pair):
    pair.assert_equivalent()
"""


def changed_cases(capsys, ref="HEAD"):
    assert app.main(["suite", "changed", ref]) == 0
    return capsys.readouterr().out.splitlines()


def test_suite_changed_names_the_cases_that_a_change_can_touch(repository, capsys, git):
    assert changed_cases(capsys) == []
    helper = repository / "suites/ch10/helper.py"
    helper.write_text(f"# a comment\n{helper.read_text()}")
    assert changed_cases(capsys) == []
    helper.write_text("def twice(x):\n    return x * 2\n")
    assert changed_cases(capsys) == [GEMM]
    git("checkout", "-q", "--", ".")
    page = repository / "suites/ch07/scan_test.py"
    page.write_text(SCAN.replace("x + x", "x + x + 0"))
    assert changed_cases(capsys) == SCANS[1:]
    page.write_text(SCAN.replace("(n,)", "(n, n)"))
    assert changed_cases(capsys) == SCANS


def test_suite_changed_knows_files_that_the_page_opened_when_it_was_recorded(
    repository, capsys, commit
):
    opened = repository / "suites/ch07/table.json"
    opened.write_text("2")
    files = dict.fromkeys(["suites/ch07/scan_test.py", "suites/ch07/table.json"], "0" * 40)
    stored(repository, {"scan_test.py::test_scan[tiled-n64]": result(2.0, files=files)})
    commit()
    assert changed_cases(capsys) == []
    opened.write_text("3")
    assert changed_cases(capsys) == SCANS
    opened.unlink()
    assert changed_cases(capsys) == SCANS


def test_suite_changed_names_the_cases_relative_to_the_working_directory(
    repository, capsys, monkeypatch
):
    (repository / PAGE).write_text("X = 2\n")
    monkeypatch.chdir(repository / "suites/ch07")
    assert changed_cases(capsys) == [f"../ch10/{GEMM.removeprefix('suites/ch10/')}"]


def test_suite_changed_names_the_page_if_it_cannot_be_imported(repository, capsys, monkeypatch):
    (repository / PAGE).write_text("x = (\n")
    pages = catalog.collect(tell=len)
    unread = [catalog.UnreadPage(PAGE, "failed", "SyntaxError")]
    monkeypatch.setattr(
        catalog, "collect", lambda *_, tell: msgspec.structs.replace(pages, unread=unread)
    )
    assert changed_cases(capsys) == [PAGE]


def test_suite_changed_names_all_cases_of_a_page_that_was_no_python(repository, capsys, commit):
    page = repository / "suites/ch07/scan_test.py"
    page.write_text("x = (\n")
    commit()
    page.write_text(SCAN)
    assert changed_cases(capsys) == SCANS


def test_suite_changed_names_new_pages_and_not_renamed_ones(repository, capsys, git):
    git("rm", "-q", "--cached", PAGE)
    git("commit", "-qm", "without the page")
    assert changed_cases(capsys) == [GEMM]
    git("mv", "suites/ch07/scan_test.py", "suites/ch07/old_test.py")
    git("commit", "-qm", "another name")
    git("mv", "suites/ch07/old_test.py", "suites/ch07/scan_test.py")
    assert changed_cases(capsys) == [GEMM]


def test_suite_changed_refuses_an_unknown_commit(repository, capsys):
    assert app.main(["suite", "changed", "nowhere"]) == 2
    assert "nowhere: there is no such commit in this clone" in capsys.readouterr().err
