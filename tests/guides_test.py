"""The command lines and the code in the guides work."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""A block of commands. Blocks in a language have tests of their own."""
READERS_FOLDERS = ("bench", "out", "artifacts/latest")
"""Folders of the reader."""


def command_lines(program):
    """Return the command lines in the guides that run `program`, split into words."""
    lines = {
        line.partition("#")[0].strip()
        for guide in GUIDES
        for block in BLOCK.findall(guide.read_text())
        for line in block.splitlines()
        if line.startswith(f"{program} ")
    }
    return [shlex.split(line) for line in sorted(lines)]


@pytest.mark.parametrize("words", command_lines("pytest"), ids=" ".join)
def test_pytest_line_parses_and_its_paths_exist(words, pytestconfig):
    if any(word.startswith("--benchmark") for word in words):
        pytest.importorskip("pytest_benchmark")
        pytest.skip("tests/pytest_benchmark_test.py runs them")
    known = pytestconfig._parser.parse(words[1:])
    for path in known.file_or_dir:
        assert path in READERS_FOLDERS or (ROOT / path).exists()


@pytest.mark.parametrize("words", command_lines("python"), ids=" ".join)
def test_python_line_runs_an_existing_file_or_module(words):
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2])
    else:
        assert (ROOT / words[1]).exists()
    for word in words[2:]:
        assert not word.startswith(("docs/", "benchmarks/")) or (ROOT / word).exists()


def code(guide, language):
    text = (ROOT / "docs" / guide).read_text()
    return re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)[1]


def test_settings_and_hook_of_the_gate_guide_work(page, gpu, pytester):
    gpu(added=2e-5, doubled=1e-5)
    page(folder="bench")
    (pytester.path / "tox.ini").unlink()
    plugins = pytester.path / "pyproject.toml"
    plugins.write_text(code("how-to/gate.md", "toml"))
    hook = code("how-to/gate.md", "python")
    with (pytester.path / "conftest.py").open("a") as file:
        file.write(f"\n\n{hook}")
    result = pytester.runpytest_subprocess("-s", "bench")
    case = "bench/doubling_test.py::test_doubling[[]doubled-n1001[]]"
    result.stdout.fnmatch_lines([f"*{case} new 0.69*", "*1 new*"])
    assert "configfile: pyproject.toml" in result.stdout.str()


def test_example_of_the_multi_gpu_guide_is_correct(monkeypatch):
    block = code("how-to/several-gpus.md", "python")
    assert [n.name for n in ast.parse(block).body] == ["inputs", "reference", "summed"]
    shared = []
    names = {"torch": torch, "dist": SimpleNamespace(all_reduce=shared.append)}
    exec(block, names)
    ranks = [names["inputs"]("cpu", rank, 2, 5) for rank in range(2)]
    expected = names["reference"](ranks)
    outputs = [names["summed"](*mine) for mine in ranks]
    total = sum(part.clone() for part in shared)  # what all_reduce gives to every rank
    assert all(output is part for output, part in zip(outputs, shared, strict=True))
    for rank in range(2):
        torch.testing.assert_close(total.double(), expected[rank], rtol=1e-6, atol=1e-6)


def test_the_index_links_every_document():
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", (docs / "index.md").read_text()))
    documents = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert linked == documents - {"index.md"}
