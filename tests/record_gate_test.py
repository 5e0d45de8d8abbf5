"""A changed side is compared with its recorded version, which is built from git blobs."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from conftest import BODY
from pytest_aisp.results import run_reader
from pytest_aisp.session.cause import NOT_RECORDED, OTHER_CODE, SAME_CODE
from pytest_aisp.util.git import GitSnapshot, SnapshotError

SECONDS = {"added": 2e-5, "doubled": 1e-5, "doubled@old": 0.99e-5, "added@old": 2e-5}
RECORD = "--aisp-update-expectations", "--aisp-processes=5"
OLD, NEW = "def doubled(x):\n    return 2 * x", "def doubled(x):\n    return x * 2"
HELPER = "def twice(x):\n    return 2 * x\n"
MACHINE = "E  *cause: machine"
LOSS = "E  *doubled runs at 0.99*x of its version in baselines/simulated-gpu/ch99.json: *"
STORED = "baselines/simulated-gpu/ch99.json"


@pytest.fixture
def recorded(page, gpu, commit, pytester):
    """Record a page on a simulated GPU, and commit it. A changed `doubled` is 1 % slower."""

    def write(*args, details=None, environment=None, **parts):
        gpu(**SECONDS, details=details, environment=environment)
        path = page(*args, **parts)
        for name, text in {"helper.py": HELPER, "tuning.json": '{"factor": 2}'}.items():
            (path.parent / name).write_text(text)
        commit()
        assert pytester.runpytest_subprocess(*RECORD).ret == 0
        commit()
        return path

    return write


@pytest.fixture
def run(pytester):
    """Run pytest without options, and keep its artifacts."""
    return lambda *options: pytester.runpytest_subprocess("--aisp-artifacts=kept", *options)


def change(path, old=OLD, new=NEW):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def against(pytester):
    [row] = run_reader.load(pytester.path / "kept").rows()
    return row.against


def assert_loss(result):
    assert result.ret == 1
    result.stdout.fnmatch_lines([LOSS, "*REGRESSED*"])


def assert_not_compared(result, why):
    assert result.ret == 0
    line = f"*: changed, but not compared with its version when it was recorded: {why}"
    result.stdout.fnmatch_lines([line])
    result.stdout.no_fnmatch_line("unchanged code: *")


def test_a_loss_of_one_percent_is_red_without_any_option(recorded, run, pytester):
    change(recorded())
    assert_loss(run())
    again = pytester.runpytest_subprocess("--aisp-replay=kept")
    assert again.ret == 1
    again.stdout.fnmatch_lines(["E  *doubled runs at 0.99*x of its version in the replayed run: *"])


def test_many_small_losses_add_up(recorded, run, commit, gpu):
    path = recorded()
    for number in range(5):  # each step is 0.2 %, too small for the commit gate
        gpu(**{**SECONDS, "doubled": 0.99e-5 * 1.002 ** (number + 1)})
        change(path, *((OLD, NEW) if number % 2 == 0 else (NEW, OLD)))
        commit()
        assert run("--aisp-against=HEAD").ret == 0
    assert_loss(run())


@pytest.mark.parametrize("added", ["", "# a comment\n"], ids=["unchanged", "a comment"])
def test_unchanged_sides_are_not_timed_again(recorded, run, pytester, added):
    path = recorded()
    path.write_text(added + path.read_text())
    result = run()
    assert result.ret == 0
    assert against(pytester) == []
    line = "unchanged code: 1 case; only the environment and the machine are compared *"
    result.stdout.fnmatch_lines([line])


def test_code_as_fast_as_before_is_green(recorded, run, gpu, pytester):
    change(recorded())
    gpu(**{**SECONDS, "doubled@old": 1e-5})
    result = run()
    assert result.ret == 0
    result.stdout.no_fnmatch_line("unchanged code: *")
    assert [one["side"] for one in against(pytester)] == ["optimized"]


def test_a_file_that_the_page_reads_counts(recorded, run):
    defs = "import json\nfrom pathlib import Path\n\nHERE = Path(__file__).parent\n"
    read = "json.loads((HERE / 'tuning.json').read_text())['factor']"
    path = recorded("FACTOR * x", defs=f"{defs}FACTOR = {read}\n")
    change(path.with_name("tuning.json"), "2", "2.0")
    assert_loss(run())


def test_a_helper_that_was_deleted_since_is_restored(recorded, run, commit):
    path = recorded("twice(x)", defs="from .helper import twice")
    path.with_name("helper.py").unlink()
    change(path, "from .helper import twice", HELPER)
    commit()
    assert_loss(run())


def test_a_file_in_the_place_of_a_folder_is_restored(recorded, run, commit):
    path = recorded("twice(x)", defs="from .helper import twice")
    helper = path.with_name("helper.py")
    helper.unlink()
    helper.mkdir()
    (helper / "note.txt").write_text("a folder")
    change(path, "from .helper import twice", HELPER)
    commit()
    assert_loss(run())


def test_a_page_that_was_moved_is_found(recorded, run, git, commit, pytester):
    path = recorded()
    pytester.mkdir("pages")
    git("mv", "ch99", "pages/ch99")
    change(pytester.path / "pages" / "ch99" / path.name)
    commit()
    assert_loss(run("-o", "aisp_pages=pages"))


def test_a_recorded_page_that_cannot_be_imported_any_more_is_not_compared(
    recorded, run, monkeypatch
):
    monkeypatch.setenv("LIBRARY_OF_THEN", "1")
    path = recorded(defs="import os\n\nos.environ['LIBRARY_OF_THEN']\n")
    monkeypatch.delenv("LIBRARY_OF_THEN")
    change(path, "os.environ['LIBRARY_OF_THEN']", "")
    result = run()
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "*: not compared with its version when it was recorded: the old page cannot be"
            " imported: KeyError: 'LIBRARY_OF_THEN'"
        ]
    )


def test_a_loss_of_unchanged_code_in_the_same_environment_is_of_the_machine(recorded, run, gpu):
    recorded()
    gpu(**{**SECONDS, "doubled": 1.5e-5})
    assert_cause(run(), 1, "E  *the code is as it was recorded", "E  *cause: machine")


def test_a_loss_in_another_environment_is_of_the_environment(recorded, run, gpu):
    recorded()
    gpu(**{**SECONDS, "doubled": 1.5e-5}, environment={"driver": "580"})
    lines = "stale: *driver was None when stored, and is 580", "stale: *: cause: environment"
    assert_cause(run(), 0, *lines)


def test_a_loss_with_another_choice_of_the_tuner_is_of_the_tuner(recorded, run, gpu):
    recorded(details={"choices": {"kernel": ["BLOCK=128"]}})
    gpu(**{**SECONDS, "doubled": 1.5e-5}, details={"choices": {"kernel": ["BLOCK=64"]}})
    tuned = "E  *kernel is tuned differently than in the stored result: BLOCK=64, stored BLOCK=128"
    assert_cause(run(), 1, tuned, "E  *cause: tuner")


def test_a_loss_of_changed_code_is_of_the_code(recorded, run, gpu, pytester):
    change(recorded())
    gpu(**{**SECONDS, "doubled": 1.5e-5})
    assert_cause(run(), 1, "E  *doubled runs at 0.66*", "E  *cause: code")
    [row] = run_reader.load(pytester.path / "kept").rows()
    assert row.cause == "code"
    assert ("aisp_cause", "code") in row.properties()


def test_a_loss_of_changed_code_that_is_as_fast_as_before_is_of_the_machine(recorded, run, gpu):
    change(recorded())
    gpu(**{**SECONDS, "doubled": 1.5e-5, "doubled@old": 1.5e-5})
    assert_cause(run(), 1, "E  *cause: machine")


BOARD = {"board": "aaaa"}
CLAIM = "E  *against 1.800x (at_least on the page)*-> red"


@pytest.mark.parametrize(
    ("board", "line"),
    [
        ("bbbb", "measured on board bbbb; the stored result is from board aaaa"),
        ("aaaa", "measured on board aaaa, as the stored result"),
    ],
)
def test_a_loss_of_the_machine_names_the_board_and_what_slowed_it(recorded, run, gpu, board, line):
    recorded(environment=BOARD, at_least="1.8")
    slow = {**SECONDS, "doubled": 1.5e-5}
    clocks = {"sm_mhz": [1305, 1980]}
    gpu(**slow, noise={"throttle": 0.05}, details=clocks, environment={"board": board})
    lines = f"E  *{line}", "E  *block* measured again: thermal slowdown (simulated)"
    mhz = "E  *the GPU's SM clock was 1305 to 1980 MHz"
    assert_cause(run(), 1, CLAIM, "E  *the code is as it was recorded", *lines, mhz, MACHINE)


def test_a_claim_that_recorded_code_misses_in_another_environment(recorded, run, gpu):
    recorded(at_least="1.8")
    gpu(**{**SECONDS, "doubled": 1.5e-5}, environment={"driver": "580"})
    line = "E  *driver was None when stored, and is 580"
    assert_cause(run(), 1, CLAIM, line, "E  *cause: environment")


def test_a_claim_that_was_raised_is_missed_by_the_code(recorded, run):
    change(recorded(), "at_least=1.0", "at_least=3.0")
    assert_cause(run(), 1, "E  *against 3.000x*-> red", f"E  *{OTHER_CODE}", "E  *cause: code")


def test_a_new_case_that_misses_its_claim_is_of_the_code(page, gpu, pytester):
    gpu(**SECONDS)
    page(at_least="3.0")
    assert_cause(pytester.runpytest_subprocess(), 1, f"E  *{NOT_RECORDED}", "E  *cause: code")


def test_a_limit_that_recorded_code_misses_is_of_the_machine(recorded, run, gpu):
    body = f"{BODY}\npair.assert_memory(at_most=0.5)"
    recorded(body=body, details={"goals": {"memory": {"baseline": 100, "optimized": 40}}})
    gpu(**SECONDS, details={"goals": {"memory": {"baseline": 100, "optimized": 80}}})
    missed = "E  *memory: *(assert_memory on the page)*-> red"
    assert_cause(run(), 1, missed, "E  *the code is as it was recorded", MACHINE)


def test_a_wrong_result_is_of_the_code(timed_page, pytester):
    timed_page("3 * x")
    result = pytester.runpytest_subprocess()
    assert_cause(result, 1, "E  *doubled is wrong *", "E  *cause: code", "E  *reproduce:")


def test_a_failed_assertion_and_an_error_of_a_side_are_of_the_code(timed_page, run, pytester):
    timed_page(body=f"{BODY}\nassert pair.speedup > 3")
    assert run().ret == 1
    timed_page("x.no_such_method()", name="raising_test.py")
    assert_cause(run(), 1, "E  *cause: code", "E  *reproduce:")
    rows = run_reader.load(pytester.path / "kept").rows()
    assert {row.cause for row in rows} == {"code"}


@pytest.mark.parametrize(
    ("environment", "cause"), [({"driver": "580"}, "environment"), ({}, "machine")]
)
def test_an_error_of_recorded_code_is_not_of_the_code(
    recorded, run, gpu, pytester, monkeypatch, environment, cause
):
    monkeypatch.setenv("LIBRARY", "2")
    recorded("os.environ['LIBRARY'] and 2 * x", defs="import os")
    monkeypatch.delenv("LIBRARY")
    gpu(**SECONDS, environment=environment)
    assert_cause(run(), 1, "E  *KeyError: 'LIBRARY', *", f"E  *cause: {cause}")
    [row] = run_reader.load(pytester.path / "kept").rows()
    assert (row.cause, row.reasons[-1]) == (cause, SAME_CODE)


def test_votes_without_a_majority_are_noise(page, gpu, pytester):
    """Without noise, each vote is below the claim by less than the margin of a red vote."""
    quiet = dict.fromkeys(["window", "capture", "process"], 0.0)
    gpu(added=2e-5, doubled=1.004e-5, noise=quiet)
    page(at_least="2.0")
    result = pytester.runpytest_subprocess()
    assert_cause(result, 0, "inconclusive: *-> open", "inconclusive: *cause: noise")


def test_without_enough_votes_the_cause_is_not_known(page, gpu, pytester):
    gpu(added=2e-5, doubled=1.004e-5)
    page(at_least="2.0")
    result = pytester.runpytest_subprocess("-o", "aisp_confirm_budget=0")
    assert_cause(result, 0, "inconclusive: *-> open")
    result.stdout.no_fnmatch_line("*cause: *")


def assert_cause(result, code, *lines):
    assert result.ret == code
    result.stdout.fnmatch_lines(list(lines))


def test_recording_again_compares_nothing(recorded, run, pytester):
    change(recorded())
    assert run("--aisp-update-expectations=all").ret == 0
    assert against(pytester) == []


def test_a_result_that_names_no_files_is_not_compared(recorded, run, pytester, monkeypatch):
    path = recorded()
    without_files(pytester.path / STORED)
    assert run().ret == 0  # unchanged code needs none
    change(path)
    assert_not_compared(run(), "the stored result does not name its files; record it again")


def without_files(path):
    """Remove the blobs from stored results, as earlier versions wrote them."""
    from pytest_aisp.results import store

    data = json.loads(path.read_text())
    for key, row in data["results"].items():
        del row["files"], row["seal"]
        plain = {k: v for k, v in row.items() if k != "speedup"}
        row["seal"] = store._seal(key, store._row(store.Result.of(plain)))
    path.write_text(json.dumps(data))


def test_outside_of_a_repository_nothing_is_compared(recorded, run, pytester):
    change(recorded())
    shutil.rmtree(pytester.path / ".git")
    assert_not_compared(run(), f"{pytester.path} is in no git repository")


def test_without_git_nothing_is_compared(recorded, run, monkeypatch, tmp_path):
    change(recorded())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_not_compared(run(), "git cannot be run: *'git'")


def test_a_moved_page_with_two_candidates_is_not_guessed(tmp_path):
    files = {f"{folder}/page_test.py": "0" * 40 for folder in ("one", "two")}
    why = "the stored result does not name three/page_test.py"
    with pytest.raises(SnapshotError, match=why):
        GitSnapshot.of_files(tmp_path, files, tmp_path / "three" / "page_test.py", "")


def clone_of(pytester, commit, git, tmp_path):
    commit()
    source, clone = f"file://{pytester.path}", tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth=1", source, str(clone)], check=True)
    return clone


def test_a_shallow_clone_fetches_what_it_lacks(recorded, pytester, commit, git, tmp_path):
    change(recorded())
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    clone = clone_of(pytester, commit, git, tmp_path)
    assert_loss(pytester.runpytest_subprocess(f"--rootdir={clone}", str(clone)))


def test_a_shallow_clone_without_its_remote_says_what_to_do(
    recorded, pytester, commit, git, tmp_path
):
    change(recorded())
    clone = clone_of(pytester, commit, git, tmp_path)
    subprocess.run(["git", "remote", "remove", "origin"], cwd=clone, check=True)
    result = pytester.runpytest_subprocess(f"--rootdir={clone}", str(clone))
    assert_not_compared(result, "this clone lacks the recorded code")
    result.stdout.fnmatch_lines(["*git fetch --unshallow*"])
