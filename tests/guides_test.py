"""What the guides show works: their lines of pytest and Python, their blocks of code."""

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
"""A block of commands; those in a language are run where they are tested."""
ELSEWHERE = ("bench", "out", "artifacts/latest")
"""Folders of whoever reads the guide."""


def shown(program):
    """Return the guides' lines that run `program`, as words."""
    lines = {
        line.partition("#")[0].strip()
        for guide in GUIDES
        for block in BLOCK.findall(guide.read_text())
        for line in block.splitlines()
        if line.startswith(f"{program} ")
    }
    return [shlex.split(line) for line in sorted(lines)]


@pytest.mark.parametrize("words", shown("pytest"), ids=" ".join)
def test_a_line_of_pytest_is_understood_and_its_pages_are_there(words, pytestconfig):
    if any(word.startswith("--benchmark") for word in words):
        pytest.importorskip("pytest_benchmark")
        pytest.skip("their options are shown to work in benchmarks_test.py")
    known = pytestconfig._parser.parse(words[1:])
    for path in known.file_or_dir:
        assert path in ELSEWHERE or (ROOT / path).exists()


@pytest.mark.parametrize("words", shown("python"), ids=" ".join)
def test_a_line_of_python_runs_something_that_is_there(words):
    if words[1] == "-m":
        assert importlib.util.find_spec(words[2])
    else:
        assert (ROOT / words[1]).exists()
    for word in words[2:]:
        assert not word.startswith(("docs/", "benchmarks/")) or (ROOT / word).exists()


def code(guide, language):
    text = (ROOT / "docs" / guide).read_text()
    return re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)[1]


def test_the_settings_and_the_hook_of_the_gate_are_taken(page, gpu, pytester):
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


def test_what_the_guide_to_ranks_shows_adds_up(monkeypatch):
    block = code("how-to/several-gpus.md", "python")
    assert [n.name for n in ast.parse(block).body] == ["inputs", "reference", "summed"]
    shared = []
    names = {"torch": torch, "dist": SimpleNamespace(all_reduce=shared.append)}
    exec(block, names)
    ranks = [names["inputs"]("cpu", rank, 2, 5) for rank in range(2)]
    wanted = names["reference"](ranks)
    outputs = [names["summed"](*mine) for mine in ranks]
    total = sum(part.clone() for part in shared)  # what all_reduce would leave everywhere
    assert all(output is part for output, part in zip(outputs, shared, strict=True))
    for rank in range(2):
        torch.testing.assert_close(total.double(), wanted[rank], rtol=1e-6, atol=1e-6)
