"""`aisp suite bisect`: repositories with commits, runs of pytest in a worktree, and messages."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_results import fake_catalog

from pytest_aisp.cli import app
from pytest_aisp.results.messages import Reply
from pytest_aisp.tools import catalog, commit_runs
from pytest_aisp.tools.commit_runs import CommitRuns, Measurement, SideChange

CASE = "ch99/doubling_test.py::test_doubling[doubled-n1001]"
FAST = {"added": 2e-5, "doubled": 1e-5, "doubled@old": 1e-5}


@pytest.fixture
def bisect(capsys):
    """Return the exit code, the lines on stdout and the text on stderr of `aisp suite bisect`."""

    def run(*words, case=CASE):
        code = app.main(["suite", "bisect", case, *words])
        output = capsys.readouterr()
        return code, output.out.splitlines(), output.err

    return run


@pytest.fixture
def history(page, gpu, git, pytester):
    """Commit a page on a simulated GPU, then one version after another; return the commits.

    A version is the code of `doubled` and its time. If the code is None, another file changes.
    """

    def write(*versions):
        shas = []
        for number, (optimized, seconds) in enumerate([("2 * x", 1e-5), *versions]):
            gpu(**{**FAST, "doubled": seconds})
            if optimized is None:
                (pytester.path / "notes.txt").write_text(str(number))
            else:
                page(optimized)
            git("add", "-A")
            git("commit", "-qm", f"commit {number}")
            shas.append(git("rev-parse", "--short=8", "HEAD"))
        return shas

    return write


@pytest.fixture
def original_measure():
    return CommitRuns.measure


@pytest.fixture
def simulated(original_measure, pytester, monkeypatch):
    """Replace the runs of pytest: the time of `doubled` is the number in its code, ``# 1.05``.

    Return the subjects of the measured commits. A callable at `at` runs before that measurement.
    Commits in `broken` cannot be measured.
    """

    class Measured(list):
        def __init__(self):
            super().__init__()
            self.at, self.broken, self.arch = {}, (), ""

    measured = Measured()

    def seconds(runs, commit):
        runs.tree.check_out(commit)
        text = (runs.tree.root / runs.page(commit)).read_text()
        return float(text.rpartition("# time ")[2].split()[0])

    def measure(runs, commit, against):
        measured.at.get(len(measured), lambda: None)()
        measured.append(commit.subject)
        if commit.subject in measured.broken:
            return Measurement(broken="no compiler")
        value = math.log(seconds(runs, against) / seconds(runs, commit))
        outcome = "red" if value < -0.01 else "clear"
        sides = {"optimized": SideChange("doubled", [value], 0.001, outcome)}
        return Measurement("gpu", sides, arch=measured.arch)

    monkeypatch.setattr(CommitRuns, "measure", measure)
    case = SimpleNamespace(function="test_doubling", variant="doubled", size={"n": 1001})
    monkeypatch.setattr(CommitRuns, "require_case", lambda runs, commit: case)
    pages = fake_catalog(pytester.path, [])
    monkeypatch.setattr(catalog, "collect", lambda *targets, tell: pages)
    return measured


@pytest.fixture
def commit_times(page, git, pytester):
    """Commit a page whose `doubled` takes each of the times; return the commits.

    If a time is None, the commit changes another file.
    """

    def write(*times):
        shas = []
        for time in times:
            if time is None:
                (pytester.path / f"{len(shas)}.txt").write_text("")
            else:
                page(f"({time}, 2 * x)[1]  # time {time}")
            git("add", "-A")
            git("commit", "-qm", f"commit {len(shas)}")
            shas.append(git("rev-parse", "--short=8", "HEAD"))
        return shas

    return write


def left(git):
    """Return the worktrees of the repository, and the files that searches keep."""
    kept = Path(git("rev-parse", "--absolute-git-dir")) / "aisp-bisect"
    return git("worktree", "list").splitlines(), list(kept.glob("*"))


def test_a_loss_is_found_with_its_commit_and_diff(history, bisect, runs, git):
    shas = history(
        (None, 1e-5),
        ("x * 2", 1e-5),
        ("2 * (", 1e-5),
        ("x * 2 + 0", 1.05e-5),
        ("x * 2 + 0  # a comment", 1.05e-5),
        ("x * 2 + 0 + 0", 1.05e-5),
    )
    code, lines, error = bisect(f"--good={shas[0]}")
    assert (code, error) == (0, "")
    date = git("show", "-s", "--format=%as", "HEAD")
    assert lines[0] == "6 commits, 4 of them change files of the case"
    broken = f"{shas[3]} {date} t: commit 3: skipped, it cannot be measured: SyntaxError: *"
    pytest.LineMatcher(lines).fnmatch_lines(
        [
            f"{shas[6]} {date} t: commit 6: doubled 0.95?x [[]0.9*, 0.9*[]]",
            broken,
            f"{shas[4]} {date} t: commit 4, against {shas[2]}: doubled 0.95?x *",
            "doubled: a loss of 4.*% (99 % interval *% to *%) in all",
            "doubled: a loss of 4.*% (99 % interval *% to *%) in one of these commits, *:",
            f"    {shas[3]} {date} t: commit 3",
            f"    {shas[4]} {date} t: commit 4",
            "--- a/ch99/doubling_test.py",
            "-    return x * 2",
            "+    return x * 2 + 0",
            "SASS of doubled: not known: the side launches no kernel of CUDA C++ or Triton",
            "5 runs of pytest",
        ]
    )
    assert len(runs) == 6  # and one to collect the case at the good commit
    assert [len(each) for each in left(git)] == [1, 0]
    assert git("status", "--porcelain") == ""


KERNEL = """
extern "C" __global__ void scale(const float* x, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;  // time TIME
  if (i < n) out[i] = x[i];
}
"""
LAUNCHES = """
from pytest_aisp import cuda_module

kernels = cuda_module("scale.cu")

def launched(x):
    out = torch.empty_like(x)
    kernels.scale[4, 256](x, out, x.numel())
    return out
"""


@pytest.fixture
def kernels(page, commit, simulated, bisect):
    """Commit two versions of a kernel, and return the lines about its SASS."""
    pytest.importorskip("cuda.bindings", reason="needs NVRTC: pip install cuda-core cuda-bindings")
    simulated.arch = "sm90"

    def found(old, new, optimized="launched(x)"):
        for time, change in ("1", (old, old)), ("1.1", (old, new)):
            path = page(f"{optimized}  # time {time}", defs=LAUNCHES)
            path.with_name("scale.cu").write_text(KERNEL.replace(*change))
            commit()
        code, lines, _ = bisect("--good=HEAD~1")
        assert code == 0
        [start] = [n for n, line in enumerate(lines) if line.startswith("SASS of doubled:")]
        return lines[start:-2]

    return found


def test_the_difference_of_the_sass_is_shown(kernels):
    lines = kernels("out[i] = x[i]", "out[i] = 3.0f * x[i]")
    assert lines[:3] == ["SASS of doubled:", "--- a/scale", "+++ b/scale"]
    assert any(line.startswith("+    FMUL ") for line in lines)
    assert not any("/*" in line for line in lines)


@pytest.mark.parametrize(
    ("new", "optimized", "why"),
    [
        ("1.0f * x[i]", "launched(x)", "the same in both versions"),
        ("missing[i]", "launched(x)", "not known: scale.cu cannot be compiled"),
        ("0.5f", "launched(x)[0].item()", "not known: on a fake GPU it raises RuntimeError"),
    ],
)
def test_sass_that_does_not_differ_or_is_not_known_is_one_line(kernels, new, optimized, why):
    assert kernels("= x[i]", f"= {new}", optimized) == [f"SASS of doubled: {why}"]


def test_sass_is_not_known_if_the_worker_fails(kernels, monkeypatch):
    class Failing:
        def __init__(self, environment):
            assert environment["TRITON_INTERPRET"] is None

        def ask(self, task, seconds, progress):
            return Reply(error="page", message="no page\nmore")

        def close(self):
            pass

    monkeypatch.setattr(commit_runs, "WorkerProcess", Failing)
    assert kernels("= x[i]", "= 0.5f") == ["SASS of doubled: not known: no page"]


def test_equal_commits_are_refused_after_two_runs(history, bisect, runs, git):
    shas = history(("x * 2", 1e-5))
    code, _, error = bisect(f"--good={shas[0]}", "--bad=HEAD")
    assert code == 2
    sees = f"between {shas[0]} and {shas[1]}, the code gate sees no loss: doubled "
    assert error.startswith(f"there is nothing to search: {sees}")
    assert len(runs) == 3
    assert [len(each) for each in left(git)] == [1, 0]


def test_a_case_that_does_not_exist_is_refused_with_those_that_do(history, bisect, runs):
    shas = history(("x * 2", 1e-5))
    case = CASE.replace("1001", "1002")
    code, _, error = bisect(f"--good={shas[0]}", case=case)
    assert (code, len(runs)) == (2, 1)
    assert error.splitlines() == [f"there is no case {case} at {shas[0]}", f"    {CASE}"]


def test_a_page_that_the_good_commit_lacks_is_refused(commit_times, bisect, runs, page, commit):
    shas = commit_times(1, 2)
    page("x * 2", name="new_test.py")
    commit()
    code, _, error = bisect(f"--good={shas[0]}", case="ch99/new_test.py::test_doubling[doubled]")
    assert (code, runs) == (2, [])
    assert error == f"there is no ch99/new_test.py at {shas[0]}; give a later commit\n"


def test_commits_that_do_not_touch_the_case_need_no_run(commit_times, bisect, simulated, git):
    shas = commit_times(1, None, None, 1.1, None, None, None, None)
    code, lines, _ = bisect(f"--good={shas[0]}")
    assert (code, lines[0]) == (0, "7 commits, 1 of them change files of the case")
    assert simulated == ["commit 3"]
    assert any(line.endswith("t: commit 3") for line in lines)
    assert "SASS of doubled: not known on this machine" in lines


def test_a_search_without_a_change_of_the_case_is_refused(commit_times, bisect, simulated, page):
    shas = commit_times(1, None, None)
    code, _, error = bisect(f"--good={shas[0]}")
    assert (code, simulated) == (2, [])
    assert error == "there is nothing to search: no commit changes a file that the case uses\n"


def test_a_page_without_a_case_is_refused(commit_times, bisect):
    commit_times(1, 2)
    code, _, error = bisect("--good=HEAD~1", case="ch99/doubling_test.py")
    assert code == 2
    assert error.splitlines() == [
        "ch99/doubling_test.py is no case; list those of a page:",
        "    pytest --collect-only -q ch99/doubling_test.py",
    ]


def interrupt():
    raise KeyboardInterrupt


def sigterm():
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("stop", [interrupt, sigterm])
def test_an_interrupted_search_continues_even_after_the_history_was_rewritten(
    commit_times, bisect, simulated, git, stop
):
    shas = commit_times(1, 1.0001, 1.0002, 1.0003, 1.1, 1.1001)
    simulated.at[2] = stop
    code, _, error = bisect(f"--good={shas[0]}")
    assert code == 2
    assert error.startswith("interrupted; 2 measurements are kept in ")
    assert error.endswith("\nThe same command continues the search\n")
    assert [len(each) for each in left(git)] == [1, 1]
    git("commit", "-q", "--amend", "-m", "another subject")
    simulated.at.clear()
    del simulated[:]
    code, lines, _ = bisect(f"--good={shas[0]}")
    assert code == 0
    assert lines[0].startswith("continue with 2 measurements of an interrupted search: ")
    assert simulated == ["commit 4", "commit 4"]  # against the good commit, and against commit 3
    assert lines[-1] == "2 runs of pytest"
    assert [len(each) for each in left(git)] == [1, 0]


def test_a_continued_search_tries_again_what_could_not_be_measured(commit_times, bisect, simulated):
    shas = commit_times(1, 1.0001, 1.0002, 1.1)
    simulated.broken, simulated.at[2] = ["commit 2"], interrupt
    assert bisect(f"--good={shas[0]}")[0] == 2
    assert simulated == ["commit 3", "commit 2"]
    simulated.broken, simulated.at = (), {}
    code, lines, _ = bisect(f"--good={shas[0]}")
    assert (code, simulated[2:]) == (0, ["commit 2", "commit 3"])
    assert any(line.endswith("in this commit:") for line in lines)


def test_a_damaged_file_of_measurements_is_named(commit_times, bisect, simulated, git):
    shas = commit_times(1, 1.1, 1.2)
    simulated.at[1] = interrupt
    bisect(f"--good={shas[0]}")
    [file] = left(git)[1]
    file.write_text(file.read_text()[:20])
    code, _, error = bisect(f"--good={shas[0]}")
    assert code == 2
    assert error.startswith(f"{file}: the measurements cannot be read: ")
    assert error.endswith(f"\nTo begin again:\n    rm {file}\n")


def test_several_commits_are_each_named_with_their_loss(commit_times, bisect, simulated):
    shas = commit_times(1, 1.05, 1.0501, 1.1, 1.1001)
    code, lines, _ = bisect(f"--good={shas[0]}")
    assert code == 0
    losses = [line for line in lines if line.startswith("doubled: a loss of")]
    assert [line.split()[4] for line in losses] == ["9.10%", "4.76%", "4.54%"]
    assert losses[1].endswith("in this commit:")
    named = [line.split()[0] for line in lines if line.startswith("    ")]
    assert named[:1] == [shas[1]]
    assert shas[3] in named


MOVED = "ch98/moved_test.py"


@pytest.fixture
def move(git, pytester):
    """Commit the page with a new name in another folder; return the commit."""

    def run(old="ch99/doubling_test.py", new=MOVED):
        (pytester.path / new).parent.mkdir(exist_ok=True)
        git("mv", old, new)
        git("commit", "-qm", "another name")
        return git("rev-parse", "--short=8", "HEAD")

    return run


def test_a_page_that_was_moved_is_followed(commit_times, move, bisect, simulated, page, commit):
    good, slow = commit_times(1, 1.1)
    move()
    page("(1.2, 2 * x)[1]  # time 1.2", name="moved_test.py", folder="ch98")
    commit()
    code, lines, _ = bisect(f"--good={good}", case=CASE.replace("ch99/doubling_test.py", MOVED))
    assert (code, lines[0]) == (0, "3 commits, 2 of them change files of the case")
    assert simulated == ["a commit", "commit 1", "a commit"]
    losses = [line for line in lines if line.endswith("in this commit:")]
    assert [line.split()[4] for line in losses] == ["9.09%", "8.33%"]
    assert any(line.startswith(f"    {slow} ") for line in lines)
    assert {"+++ b/ch99/doubling_test.py", f"+++ b/{MOVED}"} <= set(lines)


def test_a_page_that_is_moved_and_slower_at_once_is_measured(
    history, move, gpu, bisect, runs, git, pytester
):
    [good] = history()
    move()
    gpu(**{**FAST, "doubled": 1.05e-5})
    path = pytester.path / MOVED
    path.write_text(path.read_text().replace("return 2 * x\n", "return x * 2 + 0\n"))
    git("commit", "-qa", "--amend", "-m", "moved and slower")
    code, lines, error = bisect(f"--good={good}", case=CASE.replace("ch99/doubling_test.py", MOVED))
    assert (code, error) == (0, "")
    wanted = ["rename from ch99/doubling_test.py", f"rename to {MOVED}", "+    return x * 2 + 0"]
    pytest.LineMatcher(lines).fnmatch_lines(["doubled: a loss of 4.*% * in this commit:", *wanted])


def test_a_page_whose_rename_git_does_not_see_cannot_be_measured(
    commit_times, move, bisect, monkeypatch, simulated, pytester, git, original_measure
):
    good, *_ = commit_times(1, 1.1)
    move()
    path = pytester.path / MOVED
    for number in range(2):  # in two steps, because git must see each of them
        lines = path.read_text().splitlines()
        half = [f"X{i} = {i}" for i in range(number * 50, number * 50 + 50)]
        path.write_text("\n".join([*half, *lines]) + "\n")
        git("commit", "-qam", "more")
    monkeypatch.setattr(CommitRuns, "measure", original_measure)
    code, _, error = bisect(f"--good={good}", case=CASE.replace("ch99/doubling_test.py", MOVED))
    last = git("rev-parse", "--short=8", "HEAD")
    why = f"git does not see that ch99/doubling_test.py was renamed to {MOVED}"
    assert (code, error) == (2, f"{last} cannot be measured: {why}\n")


@pytest.fixture
def merged(commit_times, git):
    """Commit to a branch that is merged without fast-forward; return the good
    commit, the one where the branch begins, and the one on the branch."""
    good, begin = commit_times(1, None)
    git("checkout", "-qb", "branch")
    slow = commit_times(1.1)[0]
    git("checkout", "-q", "main")
    git("merge", "-q", "--no-ff", "-m", "the merge", "branch")
    return good, begin, slow


def test_a_merge_is_one_commit_and_its_branch_can_be_searched(merged, bisect, simulated):
    good, begin, slow = merged
    code, lines, _ = bisect(f"--good={good}")
    assert code == 0
    assert any(line.endswith("t: the merge (a merge)") for line in lines)
    [advice] = [line for line in lines if line.startswith("To search its branch: ")]
    assert advice == f"To search its branch: --good={begin} --bad={slow}"
    code, lines, _ = bisect(*advice.split()[-2:])
    assert code == 0
    assert any(line.startswith(f"    {slow} ") for line in lines)


def test_a_good_commit_on_a_merged_branch_is_refused(merged, bisect, git):
    _, begin, slow = merged
    (code, _, error) = bisect(f"--good={slow}")
    assert code == 2
    assert error.splitlines() == [
        f"--good={slow} is on a branch that was merged before --bad=HEAD",
        "Only first parents are searched; give the commit where that line begins:",
        f"    --good={begin}",
    ]


def refused(bisect, *words, **more):
    code, lines, error = bisect(*words, **more)
    assert (code, lines) == (2, [])
    return error.splitlines()


def test_a_page_that_imports_todays_files_at_every_commit_is_refused(
    page, bisect, runs, git, commit, pytester
):
    library = pytester.mkdir("lib") / "aged_ops.py"
    library.write_text("")
    page(defs=f"import sys\nsys.path.insert(0, {str(library.parent)!r})\nimport aged_ops")
    commit()
    page("x * 2")
    commit()
    good = git("rev-parse", "--short=8", "HEAD~1")
    assert refused(bisect, f"--good={good}") == [
        f"at {good} the page imports today's lib/aged_ops.py",
        "Let pytest import from the repository, in its ini file:",
        "    pythonpath = src",
    ]
    assert len(runs) == 1
