"""A run as a whole: xdist, options, damaged stored files, sessions without pages."""

from __future__ import annotations

import json
import os
import sys

import pytest

WORKERS = {"alone": [], "n0": ["-n0"], "n2": ["-n2"]}
TIMES = {"added": 2e-5, "doubled": 1e-5}
SEEN = """
def pytest_aisp_result(config, row):
    with open("seen", "a") as file:
        file.write(f"{row['nodeid']} worker={hasattr(config, 'workerinput')}\\n")
"""


def append(pytester, text):
    conftest = pytester.path / "conftest.py"
    conftest.write_text((conftest.read_text() if conftest.exists() else "") + text)


# The same run with and without workers


@pytest.fixture(params=WORKERS)
def run(request, page, gpu, pytester, module_cache):
    """One run of a page of each kind: the result, the rows, and the lines of the hook."""
    if request.param not in module_cache:
        gpu(**TIMES)
        append(pytester, SEEN)
        page(name="new_test.py")
        page("torch.zeros_like(x)", name="wrong_test.py")
        page(name="checked_test.py", more="conditions=Conditions(needs='tcgen05'),")
        result = pytester.runpytest_subprocess("--aisp-artifacts=kept", *WORKERS[request.param])
        rows = (pytester.path / "kept" / "results.jsonl").read_text().splitlines()
        seen = (pytester.path / "seen").read_text().splitlines()
        module_cache[request.param] = result, [json.loads(row) for row in rows], seen
    return module_cache[request.param]


VERDICTS = ("checked", "new", "wrong")


def test_node_ids_and_verdicts_are_the_same_with_and_without_workers(run):
    _, rows, _ = run
    verdicts = {row["nodeid"]: row["verdict"] for row in rows}
    case = "ch99/{}_test.py::test_doubling[doubled-n1001]"
    assert verdicts == {case.format(verdict): verdict for verdict in VERDICTS}


def test_each_case_is_recorded_once_by_the_controller(run):
    _, rows, seen = run
    assert sorted(seen) == sorted(f"{row['nodeid']} worker=False" for row in rows)


def test_the_closing_table_is_the_same_with_and_without_workers(run):
    result, _, _ = run
    table = [line for line in result.outlines if line.split()[1:3] == ["doubled", "n=1001"]]
    assert sorted(line.split()[-1] for line in table) == sorted(VERDICTS)
    result.stdout.fnmatch_lines(["=* 1 failed, 1 *, 1 * in *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_it_runs_without_xdist(page, pytester):
    page()
    result = pytester.runpytest_subprocess("--aisp-check", "-p", "no:xdist")
    result.stdout.fnmatch_lines(["=* 1 checked in *"])


# Options


UPDATE = "--aisp-update-expectations"
REFUSED = [
    (["-o", "aisp_iterations=abc"], "aisp_iterations = abc: give blocks, or blocks and *"),
    (["-o", "aisp_iterations=0"], "aisp_iterations = 0: give blocks, or blocks and *"),
    (["-o", "aisp_iterations=20x"], "aisp_iterations = 20x: give blocks, or blocks and *"),
    (["-o", "aisp_iterations=9x0"], "aisp_iterations = 9x0: give blocks, or blocks and *"),
    (["-o", "aisp_warmup=0"], "aisp_warmup = 0: give a number at least 1, *"),
    (["--aisp-processes=0"], "*argument --aisp-processes: 0 must be at least 1"),
    (["--aisp-seed=0"], "*argument --aisp-seed: 0 must be between 1 and 2147483647"),
    (["--aisp-seed=2147483648"], "*argument --aisp-seed: 2147483648 must be between 1 and *"),
    (["--aisp-seed=1", "--aisp-compile"], "--aisp-seed cannot be combined with --aisp-compile: *"),
    (["--aisp-seed=1", "--aisp-replay=a"], "--aisp-seed cannot be combined with --aisp-replay: *"),
    (["--aisp-seed=1", UPDATE], f"--aisp-seed cannot be combined with {UPDATE}: *"),
    (["-o", "aisp_suite_timeout=0"], "aisp_suite_timeout = 0: give a number above 0, *"),
    (["-o", "aisp_suite_timeout=nan"], "aisp_suite_timeout = nan: give a number above 0, *"),
    (["-o", "aisp_confirm_budget=-1"], "aisp_confirm_budget = -1: give a number at least 0, *"),
    (["-o", "aisp_timeout_multiplier=0"], "aisp_timeout_multiplier = 0: give a number above 0, *"),
    (["-o", "aisp_timeout=abc"], "aisp_timeout = abc: give a number above 0, as in *"),
    (["-o", "aisp_timeout=0"], "aisp_timeout = 0: give a number above 0, as in *"),
    (["-o", "aisp_missing=maybe"], "aisp_missing = maybe: it must be pass or fail"),
    (["-o", "aisp_inconclusive=no"], "aisp_inconclusive = no: it must be pass or fail"),
    ([f"{UPDATE}=some"], f"{UPDATE}=some: choose one of missing, all"),
    (["--aisp-check", "--aisp-aa"], "--aisp-check cannot be combined with --aisp-aa: *"),
    (["--aisp-check", UPDATE], f"--aisp-check cannot be combined with {UPDATE}: *"),
    (["--aisp-aa", UPDATE], f"--aisp-aa cannot be combined with {UPDATE}: *"),
    (["--aisp-replay=kept", "--aisp-aa"], "--aisp-aa cannot be combined with --aisp-replay: *"),
    (["--dist", "each", "--tx", "2*popen"], "--dist each reports every case twice; *"),
    ([UPDATE, "-n2"], f"{UPDATE} cannot be combined with xdist: *"),
]


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=lambda v: " ".join(v) if isinstance(v, list) else ""
)
def test_illegal_options_are_refused(page, pytester, options, message):
    page()
    result = pytester.runpytest_inprocess(*options)  # refused before anything is set up
    result.stderr.fnmatch_lines([message if message.startswith("*") else f"ERROR: {message}"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_a_red_case_is_not_rerun(page, pytester):
    page("torch.zeros_like(x)")
    result = pytester.runpytest_subprocess("--aisp-check", "--reruns=2")
    result.stdout.fnmatch_lines(["=* 1 failed in *"])


def test_recording_is_refused_where_ci_is_set(page, pytester, monkeypatch):
    monkeypatch.setenv("CI", "1")
    page()
    result = pytester.runpytest_inprocess(UPDATE)
    result.stderr.fnmatch_lines(
        [
            f"ERROR: {UPDATE} is refused if CI is set: a gate must not change its own limits.",
            "Record on the machine by hand and commit the file",
        ]
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_refused_recording_with_workers_prints_the_command(page, pytester):
    page()
    result = pytester.runpytest_inprocess(UPDATE, "-n2")
    result.stderr.fnmatch_lines(["    pytest -n0 --aisp-update-expectations"])


def test_the_update_option_does_not_swallow_the_path_after_it(timed_page, page, pytester):
    page(name="first_test.py")
    timed_page(name="second_test.py", folder="ch98")
    result = pytester.runpytest_subprocess(UPDATE, "ch99", "--aisp-processes=1")
    result.stdout.fnmatch_lines(["stored: first_test.py::*: new -> ?.???x"])
    files = sorted(p.name for p in (pytester.path / "baselines").rglob("*") if p.is_file())
    assert files == ["ch99.json"]


def test_the_conftest_of_the_path_after_an_option_is_loaded(page, pytester):
    page()
    conftest = "def pytest_addoption(parser):\n    parser.addoption('--mine')\n"
    (pytester.path / "ch99/conftest.py").write_text(conftest)
    (pytester.path / "tests").mkdir()
    (pytester.path / "tests/conftest.py").write_text("assert False, 'not of the path'")
    pytester.makeini("[pytest]\ntestpaths = tests")
    for bare in ("--aisp-compile", "--aisp-artifacts"):
        result = pytester.runpytest_subprocess(bare, "ch99", "--mine=3", "--collect-only", "-q")
        assert result.ret == 0, result.stderr.str()
        result.stdout.fnmatch_lines(["ch99/doubling_test.py::*"])


# Stored results that cannot be used


@pytest.fixture
def recorded(page, gpu, pytester, module_cache):
    """Write a page in each folder named, and its results; return the stored files by folder."""

    def record(*folders):
        gpu(**TIMES)
        home = pytester.path / "baselines" / "simulated-gpu"
        if "text" not in module_cache:  # the results say nothing of the folder
            page(folder="ch99")
            assert pytester.runpytest_subprocess(UPDATE, "--aisp-processes=1").ret == 0
            module_cache["text"] = (home / "ch99.json").read_text()
        home.mkdir(parents=True, exist_ok=True)
        files = {folder: home / f"{folder}.json" for folder in folders}
        for folder, file in files.items():
            page(folder=folder)
            file.write_text(module_cache["text"])
        return files

    return record


DAMAGE = {
    "conflict": (
        lambda text: f"<<<<<<< HEAD\n{text}=======\n{text}>>>>>>> other\n",
        "has a merge conflict in line 1; keep one side, then record the rest:",
    ),
    "foreign": (
        lambda text: text.replace('"schema": 1', '"schema": 99'),
        "was written by a newer pytest-aisp (schema 99; this one reads 1 and 2)",
    ),
    "edited": (
        lambda text: text.replace('"baseline": "syntax:', '"baseline": "syntax:0'),
        "was not written by pytest-aisp: * its seal is wrong: the line was changed after a run *",
    ),
    "garbage": (lambda text: "hello", "is not JSON (*); restore the committed file:"),
    "truncated": (lambda text: text[:-40], "is truncated; restore the committed file:"),
}


@pytest.mark.parametrize("options", [[], [f"{UPDATE}=all", "--aisp-processes=1"]])
def test_a_damaged_stored_file_is_reported_and_kept(recorded, pytester, options):
    files = recorded(*DAMAGE)
    for name, file in files.items():
        file.write_text(DAMAGE[name][0](file.read_text()))
    before = {name: file.read_bytes() for name, file in files.items()}
    result = pytester.runpytest_subprocess(*options, *DAMAGE)
    for name, (_, message) in DAMAGE.items():
        message = f"E       AssertionError: */baselines/simulated-gpu/{name}.json {message}"
        result.stdout.fnmatch_lines([f"{name}/doubling_test.py *"])
        result.stdout.fnmatch_lines([">       pair.assert_speedup()", message])
    result.stdout.fnmatch_lines([f"=* {len(DAMAGE)} failed in *"])
    assert "pytest_aisp/" not in result.stdout.str()
    assert {name: file.read_bytes() for name, file in files.items()} == before


def test_results_that_cannot_be_written_fail_the_run(recorded, pytester):
    file = recorded("ch99")["ch99"]
    before = file.read_bytes()
    (file.parent / ".ch99.json.lock").mkdir()
    result = pytester.runpytest_subprocess(f"{UPDATE}=all", "--aisp-processes=1")
    result.stdout.fnmatch_lines(["NOT STORED: * could not be written and is unchanged: *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert file.read_bytes() == before


def test_a_file_in_place_of_the_baselines_folder_is_reported(timed_page, pytester):
    timed_page()
    (pytester.path / "baselines").write_text("hello")
    result = pytester.runpytest_subprocess(UPDATE, "--aisp-processes=1")
    result.stdout.fnmatch_lines(["E       AssertionError: * cannot be read: * Not a directory: *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


# Sessions of others


OTHERS = """
import os
import sys
from pathlib import Path

import pytest


@pytest.fixture
def aisp_device():
    return "mine"


@pytest.fixture
def aisp_timer():
    return "mine"


@pytest.fixture
def pair():
    return "mine"


def test_fixtures(aisp_device, aisp_timer, pair):
    assert (aisp_device, aisp_timer, pair) == ("mine",) * 3


def test_only_the_plugins_options_are_loaded():
    ours = {name for name in sys.modules if name.startswith("pytest_aisp")}
    own = ("options", "config")
    names = ("", ".plugin", ".session", *(f".session.{name}" for name in own))
    assert ours <= {f"pytest_aisp{name}" for name in names}
    assert "torch" not in sys.modules


def test_there_is_no_worker_process():
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not [c for c in children if "aisp" in Path(f"/proc/{c}/cmdline").read_text()]
"""


@pytest.fixture
def others(pytester):
    """A session without pages."""
    pytester.makeini("[pytest]\naddopts = -p no:randomly")
    pytester.makepyfile(test_others=OTHERS)


def test_a_session_without_pages_is_left_alone(others, pytester):
    pytester.makepyfile(test_others=OTHERS.replace("def test_fixtures(", "def no_fixtures("))
    # A process of its own: those of `runpytest_subprocess` know torch from the start.
    result = pytester.run(sys.executable, "-m", "pytest", "-v")
    result.stdout.no_fnmatch_line("*aisp: *")
    result.stdout.no_fnmatch_line("=* aisp =*")
    result.assert_outcomes(passed=2)


def test_a_users_fixture_overrides_ours(others, pytester):
    pytester.runpytest_subprocess("-k", "fixtures").assert_outcomes(passed=1, deselected=2)


def test_a_session_without_pages_keeps_its_number_of_workers(others, pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "1")
    result = pytester.runpytest_subprocess("-n", "auto", "-v", "-k", "fixtures")
    result.stdout.fnmatch_lines(["created: 1/1 worker"])
    result.assert_outcomes(passed=1)


def test_a_session_without_pages_may_use_dist_each(others, pytester):
    result = pytester.runpytest_subprocess("--dist=each", "--tx=2*popen", "-k", "fixtures")
    result.assert_outcomes(passed=2)


# How a run may be changed


LATE = """
def pytest_aisp_result(config, row):
    from pytest_aisp.plugin import RUN

    config.stash[RUN].started -= 1e6
"""


def test_the_suite_timeout_ends_the_run_and_keeps_finished_cases(page, pytester):
    page(name="first_test.py")
    page(name="second_test.py")
    append(pytester, LATE)
    options = ["--aisp-check", "--aisp-artifacts=kept", "-o", "aisp_suite_timeout=100000"]
    result = pytester.runpytest_subprocess(*options)
    result.stdout.fnmatch_lines(
        [
            "first *checked",
            "!* _pytest.outcomes.Exit: aisp_suite_timeout: 100000 s have passed !*",
            "=* 1 checked in *",
        ]
    )
    assert len((pytester.path / "kept/results.jsonl").read_text().splitlines()) == 1
    assert result.ret == pytest.ExitCode.INTERRUPTED


@pytest.mark.parametrize("workers", ["alone", "n2"])
def test_an_expired_suite_timeout_stops_the_first_case(page, pytester, workers):
    page()
    result = pytester.runpytest_subprocess("-o", "aisp_suite_timeout=0.001", *WORKERS[workers])
    result.stdout.fnmatch_lines(["*aisp_suite_timeout: 0.001 s have passed*"])
    assert result.ret == pytest.ExitCode.INTERRUPTED


def test_cold_start_gives_each_case_its_own_caches(page, pytester):
    note = "open('caches', 'a').write(os.environ['TRITON_CACHE_DIR'] + '\\n') and 2 * x"
    page(note, defs="import os", name="first_test.py")
    page(note, defs="import os", name="second_test.py")
    result = pytester.runpytest_subprocess("--aisp-cold-start", "--aisp-check")
    result.stdout.fnmatch_lines(["=* 2 checked in *"])
    caches = set((pytester.path / "caches").read_text().splitlines())
    assert len(caches) == 2
    assert not any(map(os.path.exists, map(os.path.dirname, caches)))


def test_reproducible_names_an_operation_that_is_not_deterministic(page, pytester):
    page("(2 * x).put_(torch.tensor([0], device=x.device), 2 * x[:1])")
    page(name="plain_test.py")
    result = pytester.runpytest_subprocess("--aisp-check", "--aisp-reproducible")
    result.stdout.fnmatch_lines(
        ["E       AssertionError: doubled at n=33: RuntimeError: put_* does not have a deter*"]
    )
    result.stdout.fnmatch_lines(["=* 1 failed, 1 checked in *"])


def test_a_test_with_compare_must_take_the_pair(page, pytester):
    page(body="pass")
    (path,) = pytester.path.glob("ch99/*_test.py")
    path.write_text(path.read_text().replace("def test_doubling(pair)", "def test_doubling()"))
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(
        [
            "*test_doubling has @compare but does not take `pair`: nothing would be checked or*",
            "*def test_doubling(pair):",
        ]
    )
    assert result.ret == pytest.ExitCode.INTERRUPTED


def test_vv_lists_the_negative_controls(page, pytester):
    page()
    result = pytester.runpytest_subprocess("--aisp-check", "-vv")
    result.stdout.fnmatch_lines(["*controls at n=33: noise refused; zeros refused; *"])


def wrong_value(pytester, *options):
    """Return the line about the first wrong value, and the arguments of the printed command."""
    output = pytester.runpytest_subprocess("--aisp-check", *options).stdout.str()
    line = next(line for line in output.splitlines() if "doubled is wrong at" in line)
    again = output.split("reproduce:")[1].splitlines()[1].split()
    return line, again[again.index("pytest") + 1 :]


def test_a_failure_prints_the_seed_of_its_values(page, pytester):
    page("2 * x + 1")
    first, again = wrong_value(pytester)
    assert again[0] == "'ch99/doubling_test.py::test_doubling[doubled-n1001]'"
    assert again[1] == "--aisp-check"
    assert again[2].startswith("--aisp-seed=")
    second, same = wrong_value(pytester, again[2])
    assert (second, same) == (first, again)
    assert wrong_value(pytester)[0] != first, "a run without it draws its own"


def test_a_reproducible_run_needs_no_seed(page, pytester):
    page("2 * x + 1")
    first, again = wrong_value(pytester, "--aisp-reproducible")
    assert again[1:] == ["--aisp-check", "--aisp-reproducible"]
    assert wrong_value(pytester, "--aisp-reproducible")[0] == first


@pytest.mark.parametrize("option", ["--aisp-in-process", "--pdb"])
def test_debuggers_run_the_sides_inside_pytest(page, pytester, option):
    page("2 * x if sys.argv[0].endswith('pytest/__main__.py') else x", defs="import sys")
    result = pytester.runpytest_subprocess("--aisp-check", option)
    result.stdout.fnmatch_lines(["=* 1 checked in *"])
