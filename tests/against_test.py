"""`--aisp-against=REF`: only changed sides are judged, each against its version at the commit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pytest_aisp.results import run_reader
from pytest_aisp.results.messages import PageSource, Reply, TimeTask

SLOWER = {"added": 2e-5, "doubled": 1e-5, "doubled@old": 0.98e-5, "added@old": 2e-5}
NOT_COMPARED = "*: not compared with its version at the commit:"
HELPER = "def twice(x):\n    return 2 * x\n"


@pytest.fixture
def committed(page, gpu, commit):
    """A committed page on a simulated GPU. If `doubled` is changed, it is 2 % slower."""
    gpu(**SLOWER)
    path = page()
    commit()
    return path


@pytest.fixture
def compare(pytester):
    """Run pytest with `--aisp-against=HEAD`."""
    return lambda *options: pytester.runpytest_subprocess("--aisp-against=HEAD", *options)


OLD, NEW = "def doubled(x):\n    return 2 * x", "def doubled(x):\n    return x * 2"


def change(path, old=OLD, new=NEW):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def assert_regressed(result):
    assert result.ret == 1
    result.stdout.fnmatch_lines(["E  *doubled runs at 0.98*x of its version at *"])


def test_a_side_that_became_slower_is_red_and_names_the_commits(committed, git, compare):
    sha = git("rev-parse", "--short=8", "HEAD")
    change(committed)
    result = compare()
    assert_regressed(result)
    commits = f"{sha}..{sha} + uncommitted changes"
    result.stdout.fnmatch_lines([f"E  *of its version at {commits}: *", "*REGRESSED*"])


def test_a_replay_judges_the_comparison_with_the_commit_too(committed, compare, pytester):
    change(committed)
    assert_regressed(compare("--aisp-artifacts=kept"))
    again = pytester.runpytest_subprocess("--aisp-replay=kept")
    assert again.ret == 1
    again.stdout.fnmatch_lines(
        ["E  *doubled runs at 0.98*x of its version in the replayed run: *-> red"]
    )


def test_a_replay_of_unchanged_sides_compares_nothing(committed, compare, pytester):
    assert compare("--aisp-artifacts=kept").ret == 0
    again = pytester.runpytest_subprocess("--aisp-replay=kept", "-vv")
    assert again.ret == 0
    assert "its version at" not in again.stdout.str()


def test_unchanged_sides_are_not_timed_again(committed, compare, pytester):
    (committed.parent / "other.txt").write_text("not a page")
    assert compare("--aisp-artifacts=kept").ret == 0
    [row] = run_reader.load(pytester.path / "kept").rows()
    assert row.against == []


def test_only_the_changed_baseline_is_compared(committed, compare):
    change(committed, "return x + x", "return x.add(x)")
    result = compare("-vv")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*added against its version at *: 1.0*x; detects 1.5%"])
    result.stdout.no_fnmatch_line("*doubled against its version*")


def test_a_changed_helper_counts_as_a_change(page, gpu, commit, compare):
    gpu(**SLOWER)
    helper = page("twice(x)", defs="from .helper import twice").with_name("helper.py")
    helper.write_text(HELPER)
    commit()
    change(helper, "2 * x", "x * 2")
    assert_regressed(compare())


def test_the_old_side_imports_the_old_library_from_pythonpath(page, gpu, commit, compare, pytester):
    gpu(**SLOWER)
    page("twice(x)", defs="from aged.ops import twice")
    library = pytester.path / "src" / "aged" / "ops.py"
    library.parent.mkdir(parents=True)
    library.with_name("__init__.py").write_text("")
    library.write_text(HELPER)
    commit()
    (pytester.path / "conftest.py").open("a").write("# changed\n")
    assert compare("-o", "pythonpath=src").ret == 0  # the same in the old and the new tree
    change(library, "2 * x", "x * 2")
    assert_regressed(compare("-o", "pythonpath=src"))


def test_an_old_page_that_imports_the_current_library_is_not_compared(
    page, gpu, commit, compare, pytester
):
    gpu(**SLOWER)
    library = pytester.mkdir("lib") / "aged_ops.py"
    imports = f"import sys\nsys.path.insert(0, {str(library.parent)!r})\nfrom aged_ops import twice"
    page("twice(x)", defs=imports)
    library.write_text(HELPER)
    commit()
    change(library, "2 * x", "x * 2")
    result = compare()
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"{NOT_COMPARED} the old page imports aged_ops *"])
    result.stdout.no_fnmatch_line("*against its version at*")


def test_a_side_that_imports_the_current_helper_when_called_is_not_compared(
    page, gpu, commit, compare
):
    gpu(**SLOWER)
    late = "def twice(x):\n    import math\n    from ch99.late import twice\n    return twice(x)"
    helper = page("twice(x)", defs=late).with_name("late.py")
    helper.write_text(HELPER)
    commit()
    change(helper, "2 * x", "x * 2")
    result = compare()
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"{NOT_COMPARED} doubled imports ch99.late when *"])


def test_a_renamed_page_is_compared_under_its_old_name(committed, git, compare):
    moved = committed.with_name("twice_test.py")
    git("mv", str(committed), str(moved))
    change(moved)
    assert_regressed(compare())


def test_a_new_page_is_not_compared(committed, page, compare):
    page("x * 2", name="new_test.py")
    assert compare().ret == 0


def test_an_old_page_that_fails_to_import_gives_no_verdict(committed, commit, compare):
    change(committed, "import torch", "import torch, a_library_that_was_dropped")
    commit()
    change(committed, "import torch, a_library_that_was_dropped", "import torch")
    result = compare()
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"{NOT_COMPARED} the old page cannot be imported: *"])


BROKEN = """
from pytest_aisp.timing import fake_device

def simulate(baseline, *rest):
    if baseline.endswith("@old"):
        raise RuntimeError("cannot run any more")
    return fake_device.simulate(baseline, *rest)
"""


def test_an_old_side_that_fails_gives_no_verdict(committed, compare, pytester):
    change(committed)
    pytester.makepyfile(broken=BROKEN)
    change(pytester.path / "conftest.py", "pytest_aisp.timing.fake_device", "broken")
    result = compare("-vv")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["*doubled is not compared with *: *RuntimeError: cannot run any more*"]
    )


def test_an_unknown_commit_is_refused_with_the_command_to_fetch_it(committed, pytester):
    result = pytester.runpytest_subprocess("--aisp-against=origin/nowhere")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            "ERROR: --aisp-against=origin/nowhere: there is no such commit in this clone",
            "A shallow clone lacks it; fetch it first:",
            "    git fetch --depth=1 origin nowhere",
        ]
    )


def test_a_shallow_clone_that_has_the_commit_works(committed, commit, pytester, tmp_path):
    change(committed)
    commit()
    clone = tmp_path / "clone"
    source = f"file://{pytester.path}"
    subprocess.run(["git", "clone", "-q", "--depth=2", source, str(clone)], check=True)
    root = f"--rootdir={clone}"
    assert_regressed(pytester.runpytest_subprocess(root, str(clone), "--aisp-against=HEAD~1"))


def test_a_project_in_a_folder_of_a_sparse_clone_works(
    committed, git, commit, compare, pytester, monkeypatch
):
    folder = pytester.mkdir("bench")
    for name in ("tox.ini", "conftest.py", "ch99"):
        git("mv", name, f"bench/{name}")
    commit()
    git("sparse-checkout", "set", "bench")
    change(folder / "ch99" / committed.name)
    monkeypatch.chdir(folder)
    assert_regressed(compare())


def test_it_is_refused_outside_a_repository(page, compare, pytester, monkeypatch):
    page()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(pytester.path.parent))
    result = compare()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --aisp-against=HEAD: * is in no git repository"])


@pytest.mark.parametrize("other", ["--aisp-aa", "--aisp-replay=kept"])
def test_modes_without_both_sides_are_refused(committed, compare, other):
    result = compare(other)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    name = other.partition("=")[0]
    result.stderr.fnmatch_lines([f"ERROR: --aisp-against cannot be combined with {name}: *"])


def test_a_cold_start_keeps_the_old_tree(committed, compare):
    change(committed)
    assert_regressed(compare("--aisp-cold-start"))


@pytest.mark.parametrize("attribute", ["export-ignore", "export-subst"])
def test_gitattributes_do_not_change_the_old_tree(committed, commit, compare, pytester, attribute):
    (pytester.path / ".gitattributes").write_text(f"ch99 {attribute}\nch99/** {attribute}\n")
    change(committed, "import torch", "# $Format:%H$\nimport torch")
    commit()
    change(committed)
    assert_regressed(compare())


def test_links_that_lead_out_of_the_repository_are_left_out(
    committed, commit, compare, pytester, tmp_path
):
    (pytester.path / "data").symlink_to(tmp_path)
    (pytester.path / "loop").symlink_to("loop")
    commit()
    change(committed)
    assert_regressed(compare())


@pytest.mark.parametrize("tracked", [True, False])
def test_a_page_behind_a_link_out_of_the_repository_is_not_compared(
    committed, commit, compare, pytester, tmp_path, tracked
):
    outside = tmp_path / "outside"
    outside.mkdir()
    committed.rename(outside / committed.name)
    (pytester.path / "linked").symlink_to(outside)
    if tracked:
        commit()
    (pytester.path / "conftest.py").open("a").write("# changed\n")
    result = compare(f"linked/{committed.name}")
    assert result.ret == 0
    assert ("the commit: linked was a link out of " in result.stdout.str()) is tracked


CLEANER = """
import shutil, pytest
from pytest_aisp.session.options import RUN

def pytest_runtest_setup(item):
    shutil.rmtree(item.config.stash[RUN].past.tree)
"""


def test_a_deleted_old_tree_is_an_error(committed, compare, pytester):
    change(committed)
    (pytester.path / "conftest.py").open("a").write(CLEANER)
    result = compare()
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "E  *ch99/doubling_test.py is in *, but no longer in */tree",
            "E  *Something removed it; run the same command again",
        ]
    )


PROCESSES = """
import torch

from pytest_aisp import Work, compare, fresh_process

AGE = "then"

def inputs(device, n):
    return (torch.randn(n, device=device),)

def reference(x):
    return 2 * x.double()

@fresh_process
def added(x):
    return x + x

@fresh_process
def doubled(x):
    AGES.append(AGE)
    return 2 * x

AGES = []

@compare(
    baseline=added, optimized=[doubled], inputs=inputs, reference=reference, sizes=[{"n": 5}],
    check_sizes=[{"n": 3}], work=lambda n: Work(read=4 * n, write=4 * n), bound="host",
)
def test_doubling(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
"""


def test_processes_of_an_old_side_import_the_old_page(pytester, monkeypatch):
    from pytest_aisp.util.cpu_load import CpuLoad
    from pytest_aisp.worker import client
    from pytest_aisp.worker.engine import Engine

    ages: list[set[str]] = []

    class WorkerInThisProcess:
        outputs = ()

        def __init__(self, environment):
            self.null = os.open(os.devnull, os.O_RDONLY)

        def fileno(self):
            return self.null

        def ask(self, task, seconds, progress):
            result = Engine().sample(task)
            page = sys.modules[task.past.module if task.past else task.module]
            ages.append(set(page.AGES))
            page.AGES.clear()
            return Reply(result=result)

        def close(self):
            os.close(self.null)

    monkeypatch.setattr(client, "WorkerProcess", WorkerInThisProcess)
    monkeypatch.setattr(CpuLoad, "look", lambda load: None)
    today, old = pytester.mkdir("today"), pytester.mkdir("old")
    (today / "aged_test.py").write_text(PROCESSES.replace('"then"', '"now"'))
    (old / "aged_test.py").write_text(PROCESSES)
    past = PageSource(page=str(old / "aged_test.py"), root=str(old), module="aisp_past_aged")
    place = {"page": str(today / "aged_test.py"), "root": str(today), "module": "aged_test"}
    case = {"function": "test_doubling", "variant": "doubled", "size": {"n": 5}}
    rule = {"exact": False, "rtol": None, "atol": None}
    Engine().time(TimeTask(**place, **case, rule=rule, versus="old", side="optimized", past=past))
    first, second = ages[:2]
    assert first | second == {"then", "now"}
    assert len(first) == len(second) == 1


@pytest.mark.parametrize(("ini", "code"), [("pass", 0), ("fail", 1)])
def test_an_inconclusive_comparison_fails_the_run_if_the_ini_file_says_so(
    committed, compare, ini, code
):
    change(committed)
    result = compare("-o", "aisp_confirm_budget=0", "-o", f"aisp_inconclusive={ini}")
    start = "E  *" if code else "inconclusive: *"
    result.stdout.fnmatch_lines([f"{start}doubled runs at 0.9*x *-> open"])
    assert result.ret == code
