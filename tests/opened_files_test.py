"""Files that a page opens or imports count, even if their names are built at run time."""

from __future__ import annotations

import json
import textwrap
from types import SimpleNamespace

import pytest

from pytest_aisp.session.stored_result import StoredResult
from pytest_aisp.worker.loader import load_page
from pytest_aisp.worker.opened_files import OpenedFiles

SECONDS = {"added": 2e-5, "doubled": 1e-5, "doubled@old": 0.99e-5, "added@old": 2e-5}
RECORD = "--aisp-update-expectations", "--aisp-processes=3"
STORED = "baselines/simulated-gpu/ch99.json"
LOSS = f"E  *doubled runs at 0.9*x of its version in {STORED}: *"
HEAD = """
import importlib
import json
from pathlib import Path

HERE, STEM = Path(__file__).parent, "{stem}"


def load(path):
    return json.loads((HERE / path).read_text())["factor"]


def module():
    return importlib.import_module(f".{{STEM}}", __package__)


"""
KINDS = {
    "constant": ("FACTOR = load(f'{STEM}.json')", "FACTOR * x", "json"),
    "table": ("TABLE = {'f': [load(f'{STEM}.json')]}", "TABLE['f'][0] * x", "json"),
    "called": ("", "load(f'{STEM}.json') * x", "json"),
    "imported": ("MODULES = [module()]", "MODULES[0].twice(x)", "py"),
    "late": ("", "module().twice(x)", "py"),
}
HELPER = "def twice(x):\n    return 2 * x\n"
DATA = '{"factor": 2}'


@pytest.fixture
def write(page, gpu):
    """Write a page on a simulated GPU, with a module and a data file of the same name."""

    def write(kind, **more):
        gpu(**SECONDS)
        define, optimized, _ = KINDS[kind]
        defs = HEAD.format(stem=f"{kind}_data") + define
        path = page(optimized, name=f"{kind}_test.py", defs=defs, **more)
        path.with_name(f"{kind}_data.py").write_text(HELPER)
        path.with_name(f"{kind}_data.json").write_text(DATA)
        return path

    return write


@pytest.fixture
def record(pytester, commit):
    def record():
        commit()
        assert pytester.runpytest_subprocess(*RECORD).ret == 0
        commit()

    return record


def stored(pytester):
    return json.loads((pytester.path / STORED).read_text())


def change(pytester, kind):
    """Change the file that a page opens. Neither the page nor a name in it changes."""
    path = pytester.path / "ch99" / f"{kind}_data.{KINDS[kind][2]}"
    text = path.read_text().replace('"factor": 2', '"factor": 2.0').replace("2 * x", "x * 2")
    assert text != path.read_text()
    path.write_text(text)


def test_a_loss_behind_a_name_that_is_built_at_run_time_is_red(write, record, pytester):
    for kind in KINDS:
        write(kind)
    record()
    for kind in KINDS:
        change(pytester, kind)
    result = pytester.runpytest_subprocess()
    assert result.parseoutcomes() == {"failed": len(KINDS)}
    result.stdout.fnmatch_lines([LOSS] * len(KINDS))


def test_a_file_that_a_stored_result_does_not_list_is_named(write, record, pytester, commit):
    write("called")
    record()
    assert "not listed" not in pytester.runpytest_subprocess().stdout.str()
    forget(pytester.path / STORED, "ch99/called_data.json")
    commit()
    change(pytester, "called")
    result = pytester.runpytest_subprocess()
    assert result.ret == 0
    remark = f"*: the page opens ch99/called_data.json, not listed in {STORED}: *; record it again"
    result.stdout.fnmatch_lines([remark])


def forget(path, name):
    """Remove a file from stored results, as versions wrote them that found names in code only."""
    from pytest_aisp.results import store

    data = json.loads(path.read_text())
    for key, row in data["results"].items():
        del row["files"][name], row["seal"]
        plain = {k: v for k, v in row.items() if k != "speedup"}
        row["seal"] = store._seal(key, store._row(store.Result.of(plain)))
    path.write_text(json.dumps(data))


def test_a_remark_about_many_files_names_the_first(tmp_path):
    run = SimpleNamespace(settings=SimpleNamespace(root=tmp_path), stored=lambda path: table)
    result = SimpleNamespace(files={"page.py": ""}, value=0.5)
    table = SimpleNamespace(results={"key": result})
    opened = ["page.py", *(f"{letter}.json" for letter in "edcba")]
    found = StoredResult(run, tmp_path / "ch01.json", "key", None, opened)
    [remark] = found.unlisted_remark()
    assert remark.startswith("the page opens a.json, b.json, c.json and 2 more, not listed in ch01")
    result.files = dict.fromkeys(opened, "")
    assert StoredResult(run, tmp_path / "ch01.json", "key", None, opened).unlisted_remark() == []


OUTPUT = """
import os
import tempfile


def doubled(x):
    for name in ("written", "ignored", ".hidden"):
        path = HERE / f"{STEM}.{name}"
        if name != "ignored":
            path.write_text("2")
        path.read_text()
    with tempfile.TemporaryDirectory(dir=HERE) as folder:
        path = Path(folder, f"{STEM}.json")
        path.write_text("2")
        os.replace(path, HERE / f"{STEM}.moved")
        assert (HERE / f"{STEM}.moved").read_text() == "2"
    return 2 * x
"""


def test_output_and_caches_are_no_part_of_the_code(page, gpu, record, git, pytester):
    gpu(**SECONDS)
    path = page(defs=HEAD.format(stem="output") + OUTPUT)
    git("status")
    with (pytester.path / ".gitignore").open("a") as ignored:
        ignored.write("*.ignored\n")
    path.with_name("output.ignored").write_text("1")
    record()
    [result] = stored(pytester)["results"].values()
    assert [*result["files"]] == ["ch99/doubling_test.py"]
    assert "not listed" not in pytester.runpytest_subprocess().stdout.str()


@pytest.fixture(scope="module")
def opened():
    return OpenedFiles()


@pytest.fixture
def run(opened, tmp_path, fresh_imports):
    """Import a page and call its function `side`. Return the files that it opened and was lent."""
    names = iter("abcdefgh")
    for table in (opened.opened, opened.lent, opened.written):
        table.clear()

    def run(text):
        name = next(names)
        path = tmp_path / f"page_{tmp_path.name}_{name}.py"
        path.write_text(textwrap.dedent(HEAD.format(stem="data")) + textwrap.dedent(text))
        opened.watch(str(path), str(tmp_path))
        page = load_page(str(path), str(tmp_path), path.stem)
        page.side()
        return opened.of_page(str(path), str(tmp_path))

    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(DATA)
    return run


CACHED = """
    import functools
    from pathlib import Path

    EXTENSION = "json"
    TWO = Path(__file__).with_name(f"two.{EXTENSION}").read_text()


    @functools.cache
    def load(name):
        return Path(__file__).with_name(f"{name}.{EXTENSION}").read_text()
"""


def test_a_helper_opens_files_for_all_of_its_pages(run, tmp_path):
    helper = f"helper_{tmp_path.name}"
    (tmp_path / f"{helper}.py").write_text(textwrap.dedent(CACHED))
    text = f"""
        import {helper} as helper

        def side():
            return helper.load("on" "e")
    """
    assert run(text) == (["one.json", "two.json"], [])
    assert run(text) == (["two.json"], ["one.json"])  # the helper has kept what it read
    assert run("def side():\n    pass") == ([], [])


def test_files_whose_names_are_in_the_code_are_left_out(run):
    text = """
        def side():
            return load("one.json"), load(STEM.replace("data", "two") + ".json")
    """
    assert run(text) == (["two.json"], [])


def test_a_module_counts_with_and_without_its_bytecode(run, tmp_path):
    module = f"late_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(
        CACHED.replace("    ", "", 1) and textwrap.dedent(CACHED)
    )
    text = f"""
        import sys

        def side():
            importlib.import_module("late" + "_{tmp_path.name}")
            del sys.modules["late" + "_{tmp_path.name}"]
    """
    expected = ([f"{module}.py", "two.json"], [])
    assert run(text) == expected  # compiles the module
    assert run(text) == expected  # reads its bytecode


def test_odd_arguments_of_open_disturb_nothing(run):
    text = r"""
        import os

        def side():
            descriptor = os.open(os.fsencode(HERE / f"on{'e'}.json"), os.O_RDONLY)
            open(descriptor).close()
            try:
                open("a\0b")
            except ValueError:
                pass
            try:
                open(f"{STEM}.missing")
            except FileNotFoundError:
                pass
    """
    assert run(text) == (["one.json"], [])
