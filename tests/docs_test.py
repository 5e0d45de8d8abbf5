"""The documents match the code: tables, links, commands, options, pages."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import curves
import fake_results
import ladder
import pytest
import typer
from _pytest.fixtures import FixtureFunctionDefinition

from pytest_aisp import plugin
from pytest_aisp.cli import app
from pytest_aisp.tools import catalog, history_changes, stored_results

ROOT = Path(__file__).parents[1]
SHOWN = re.compile(r"^(?:\$ )?(aisp .*?)(?: +[#>|].*)?$", re.MULTILINE)
"""An `aisp` command line in a block, without its comment and its redirection."""
NAMED = re.compile(r"`(aisp [a-z][^`]*)`")
"""An `aisp` command in running text. Its arguments may be missing."""
READMES = [ROOT / "README.md", ROOT / "README.ko.md"]
DOCUMENTS = [
    *READMES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "ci/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
CHAPTERS = sorted((ROOT / "suites").glob("ch*/README.md"))


def test_readme_without_a_place_for_the_table_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("nothing")
    found = fake_results.fake_catalog(tmp_path, [])
    with pytest.raises(ValueError, match="has no place for the table: add <!-- results -->"):
        stored_results.rewrite(tmp_path / "README.md", found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_every_link_leads_to_a_file(document):
    for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", tmp_path]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "index.html").exists()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_every_option_in_a_document_exists(document, pytestconfig):
    known = {name for action in pytestconfig._parser._anonymous.options for name in action.names()}
    for group in pytestconfig._parser._groups:
        known |= {name for option in group.options for name in option.names()}
    named = set(re.findall(r"--aisp-[a-z-]+[a-z]", document.read_text()))
    assert named <= known


@pytest.mark.parametrize(
    "content",
    [
        lambda text: re.findall(r"^(#+) ", bare(text), re.MULTILINE),
        lambda text: [uncommented(block) for block in re.findall(BLOCK, text)],
        lambda text: [len(section.split("\n- ")) for section in sections(text)],
        lambda text: [line.count("|") for line in text.splitlines() if line.startswith("| ")],
        lambda text: [sorted(re.findall(r"\]\(([^)]+)\)", part)) for part in sections(text)],
        lambda text: [sorted(re.findall(r"`([^`]+)`", part)) for part in sections(bare(text))],
        lambda text: [numbers(part) for part in sections(bare(text))],
    ],
    ids=["headings", "blocks", "points", "tables", "links", "code", "numbers"],
)
def test_korean_readme_has_the_content_of_the_english_one(content):
    english, korean = (readme.read_text() for readme in READMES)
    assert content(korean.replace("(README.md)", "(README.ko.md)")) == content(english)


OPTIONS = (ROOT / "docs/reference/options.md").read_text()
FIXTURES = (ROOT / "docs/reference/fixtures.md").read_text()


def listed(text, pattern):
    """Return the names that open a row of a table and match `pattern`, in order."""
    return re.findall(rf"^\| `({pattern})[^`]*` \|", text, re.MULTILINE)


def test_options_page_lists_exactly_the_visible_options(pytestconfig):
    [group] = [each for each in pytestconfig._parser._groups if each.name == "aisp"]
    visible = [
        option.names()[0]
        for option in group.options
        if option.attrs().get("help") != argparse.SUPPRESS
    ]
    assert sorted(listed(OPTIONS, "--aisp-[a-z-]+")) == sorted(visible)


def test_options_page_lists_exactly_the_ini_keys_with_defaults(pytestconfig):
    rows = re.findall(r"^\| `(aisp_\w+)` \| (.*?) \|", OPTIONS, re.MULTILINE)
    registered = {
        name: default
        for name, (_, _, default) in pytestconfig._parser._inidict.items()
        if name.startswith("aisp_")
    }
    shown = {
        name: f"`{str(default).lower()}`" if default not in (None, "", []) else "none"
        for name, default in registered.items()
    }
    assert sorted(rows) == sorted(shown.items())


def test_fixtures_page_lists_exactly_the_fixtures_markers_and_hooks():
    fixtures, markers, hooks = FIXTURES.split("\n## ")[1:]
    defined = {
        name for name, value in vars(plugin).items() if isinstance(value, FixtureFunctionDefinition)
    }
    assert sorted(listed(fixtures, r"\w+")) == sorted(defined)
    rows = re.findall(r"^\| `([^`]+)` \|", markers, re.MULTILINE)
    assert sorted(rows) == sorted(plugin.MARKERS)
    assert sorted(listed(hooks, "pytest_aisp_[a-z_]+")) == sorted(
        name for name in vars(plugin.Hooks) if name.startswith("pytest_")
    )


[README_PAGE] = re.findall(r"```python\n(.*?)```", READMES[0].read_text(), re.DOTALL)
README_RED = re.search(r"```text\n(.*?)```", READMES[0].read_text(), re.DOTALL)[1]


def test_red_test_in_the_readme_is_the_output_of_pytest(pytester):
    right, wrong = "return x.sum(dim=1)", "return x[:, :63].sum(dim=1)"
    assert README_PAGE.count(right) == 1
    pytester.mkdir("bench").joinpath("row_sums_test.py").write_text(
        README_PAGE.replace(right, wrong)
    )
    seed = re.search(r"--aisp-seed=\d+", README_RED)[0]
    options = ("-k", "cpu", seed, "-p", "no:randomly", "-oaisp_wait=0")
    result = pytester.runpytest_subprocess("bench", *options)
    assert without_numbers(README_RED) in without_numbers(result.stdout.str())


def without_numbers(printed):
    """Join printed lines into one, with a placeholder for each measured number."""
    joined = " ".join(re.sub(r"^E +", "", line) for line in printed.splitlines())
    return re.sub(r"-?\d+\.\d+(e[+-]\d+)?", "NUMBER", " ".join(joined.split()))


BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def bare(text):
    """Return a document without its code blocks."""
    return BLOCK.sub("", text)


def uncommented(block):
    """Return the lines of a block without comments, which are translated."""
    return [re.sub(r" +# .*", "", line) for line in block.splitlines()]


def sections(text):
    return re.split(r"^#+ .*", text, flags=re.MULTILINE)


def numbers(text):
    """Return the numbers in a text, sorted, without those in links and code."""
    return sorted(re.findall(r"\d[\d.,]*\d|\d", re.sub(r"\]\([^)]+\)|`[^`]+`", "", text)))


def commands_of(document):
    """Return the `aisp` command lines in the blocks of `document`, and those in its text."""
    text = document.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    running_text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    shown = [line for block in blocks for line in SHOWN.findall(block)]
    return [shlex.split(line)[1:] for line in shown], [
        n.split()[1:] for n in NAMED.findall(running_text)
    ]


LINES = sorted({tuple(line) for document in DOCUMENTS for line in commands_of(document)[0]})
TESTED_ELSEWHERE = {
    "diagnose",
    "bisect",
    "predictions",
    "show",
    "topology",
    "bandwidth",
    "nccl",
    "peak",
    "bottleneck",
    "checksums",
    "judge",
    "fleet",
}
"""Commands that need GPUs, a cluster, a script, a problem, or staged files. They have own tests."""


def leaves(command):
    """Yield the commands without commands of their own."""
    inner = getattr(command, "commands", {}).values()
    yield from [leaf for each in inner for leaf in leaves(each)] if inner else [command]


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_every_command_line_in_the_documents_parses(line):
    command, called = typer.main.get_command(app.build()), []
    for leaf in leaves(command):
        leaf.callback = lambda **options: called.append(options)
    command.main(list(line), prog_name="aisp", standalone_mode=False)
    assert len(called) == 1


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_every_command_in_the_text_exists_with_its_options(document):
    for words in commands_of(document)[1]:
        command = typer.main.get_command(app.build())
        while words and words[0] in getattr(command, "commands", {}):
            command, words = command.commands[words[0]], words[1:]
        legal = {name for option in command.params for name in option.opts}
        assert command.name != "aisp" or words[0] in legal, words
        named = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert named - {"--"} <= legal, words


def commit_twice(folder):
    """Commit the stored results in `folder` as origin/main, then make an empty commit."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (
        ["init", "-q"],
        ["add", "baselines"],
        ["commit", "-qm", "stored"],
        ["update-ref", "refs/remotes/origin/main", "HEAD"],
        ["commit", "-qm", "none", "--allow-empty"],
    ):
        subprocess.run([*git, *words], check=True)


@pytest.mark.parametrize(
    "line", [x for x in LINES if not TESTED_ELSEWHERE & {*x[:2]}], ids=" ".join
)
def test_command_line_in_the_documents_runs(line, tmp_path, monkeypatch, capsys):
    """Runs with a given list of pages. Other tests are about collecting and running pytest."""
    if line[1] == "export":
        pytest.importorskip("pytest_benchmark")
    names = ("ch03:threads", "ch10:gemm", "ch10:split_k")
    cases = [fake_results.case(name) for name in names]
    found = fake_results.fake_catalog(tmp_path, cases)
    fake_results.stored(tmp_path, {cases[1]["key"]: fake_results.result(2.0)}, chapter="ch10")
    (tmp_path / "suites").mkdir()
    again = {"kept_test.py::test_doubling[doubled-n1001]": fake_results.result(2.0)}
    fake_results.stored(tmp_path, again, product="simulated-gpu")  # what the run has measured
    for folder in ("out", "mon", "tue", "artifacts/latest"):
        shutil.copytree(ROOT / "tests/data/run", tmp_path / folder)
    history_changes.add_result([tmp_path / "mon"], tmp_path / "history")
    commit_twice(tmp_path)
    shutil.rmtree(tmp_path / "baselines/simulated-gpu")  # with two, none could be chosen
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(catalog, "collect", lambda targets=None, *, tell: found)
    monkeypatch.setattr(catalog, "Popen", lambda command: SimpleNamespace(wait=lambda: 0))
    code = app.main(list(line))
    said = capsys.readouterr()
    finds = line[1] == "gate" or "HARMS " in said.out  # that run has red cases
    assert (code, said.err) == (1 if finds else 0, "")
    assert said.out


def test_every_command_is_in_the_documents():
    alone = {"bottleneck", "judge"}
    shown = {line[: 1 if line[0] in alone else 2] for line in LINES}
    groups = {(name, word) for name, (_, words) in app.GROUPS.items() for word in words}
    assert groups | {(name,) for name in alone} <= shown


PAGES = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/tutorial/write-a-page.md").read_text(), re.DOTALL
)


@pytest.mark.parametrize(
    ("page", "cases"),
    list(zip([README_PAGE, *PAGES], [2, 2, 1], strict=True)),
    ids=["readme", "tutorial", "tutorial with state"],
)
def test_page_in_a_document_is_checked(pytester, page, cases):
    pytester.makepyfile(page_test=page)
    result = pytester.runpytest_subprocess("--aisp-check", "-p", "no:randomly")
    result.stdout.fnmatch_lines([f"*= {cases} checked in *"])


def test_state_of_the_tutorial_page_is_compared(pytester):
    page = PAGES[1].replace("lerp_(x, 0.25)", "lerp_(x, 0.26)")
    pytester.makepyfile(page_test=page)
    result = pytester.runpytest_subprocess("--aisp-check", "-p", "no:randomly")
    result.stdout.fnmatch_lines(["E * in_place is wrong at n=*: state*average*, expected *"])


def test_every_marker_is_registered(pytestconfig):
    registered = "\n".join(pytestconfig.getini("markers"))
    assert all(marker.partition("(")[0] in registered for marker in plugin.MARKERS)


def test_fixtures_for_ordinary_tests_work(pytester):
    pytester.makepyfile(
        """
        import torch


        def test_them(aisp_device, warmup, cuda_graph, aisp_timer, aisp_peaks):
            x = torch.ones(64, 64, device=aisp_device)
            assert warmup(lambda: x @ x) >= 3
            assert torch.equal(cuda_graph(lambda: x @ x)(), x @ x)
            assert 0 < aisp_timer(lambda: x @ x) < 1
            assert all(rate > 0 for rate in aisp_peaks.values())
        """
    )
    assert pytester.runpytest_subprocess().ret == 0


def test_ladder_in_the_readme_is_up_to_date(tmp_path):
    pytest.importorskip("cuda.core")
    page, readme = ROOT / "suites/ch10/gemm_test.py", ROOT / "suites/ch10/README.md"
    copy = tmp_path / "README.md"
    copy.write_text(readme.read_text())
    command = [sys.executable, ROOT / "benchmarks/ladder.py", page, "test_gemm", "--write"]
    # In a process of its own: this one may run Triton's interpreter, which compiles nothing.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    subprocess.run([*command, copy], check=True, env=environment)
    assert copy.read_text() == readme.read_text()


@pytest.fixture
def run_script(monkeypatch, capsys):
    """Return a function that runs a script and returns its exit code and its output."""

    def run(script, *arguments):
        monkeypatch.syspath_prepend(str(ROOT))  # afterwards, the path is as before
        monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, arguments)])
        return script.main(), capsys.readouterr().out

    return run


WITH_CURVES = [path.parent for path in CHAPTERS if "<!-- curves -->" in path.read_text()]
QUICK = ("ch08", "ch12")


@pytest.mark.parametrize(
    "folder",
    [pytest.param(f, marks=[pytest.mark.slow] * (f.name not in QUICK)) for f in WITH_CURVES],
    ids=lambda folder: folder.name,
)
def test_curves_in_the_readmes_are_up_to_date(run_script, folder):
    assert run_script(curves, folder, "--check") == (0, "")


def test_a_changed_curve_and_a_readme_without_marks_are_refused(run_script, tmp_path):
    chapter = tmp_path / "suites" / "ch12"
    shutil.copytree(ROOT / "suites/ch12", chapter)
    (chapter / "curves" / "launch_cost-nvidia-h200.svg").write_text("old")
    (chapter / "curves" / "gone.svg").write_text("old")
    code, said = run_script(curves, chapter, "--check")
    gone = f"{chapter}/curves/launch_cost-nvidia-h200.svg, {chapter}/curves/gone.svg"
    assert f"out of date: {gone}; run python benchmarks/curves.py CHAPTERS" in said
    assert code == 1
    (chapter / "README.md").write_text("no marks")
    with pytest.raises(SystemExit, match="lacks the marks of the curves: <!-- curves --> and <!--"):
        run_script(curves, chapter)


def test_readme_without_a_place_for_the_ladder_is_refused(run_script, tmp_path):
    (tmp_path / "README.md").write_text("no marks")
    arguments = (ROOT / "suites/ch10/gemm_test.py", "test_gemm", "--write", tmp_path / "README.md")
    with pytest.raises(SystemExit, match="lacks the marks of the table: <!-- ladder --> and <!--"):
        run_script(ladder, *arguments)
