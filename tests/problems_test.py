"""Models in KernelBench's form are accepted as candidates for themselves."""

from __future__ import annotations

import json
from pathlib import Path

import problems
import pytest

FOLDER = Path(__file__).parent / "problems"
ELEMENTS = 20_000

GOOD = """
import torch

n = 40

class Model(torch.nn.Module):
    def forward(self, x):
        return {output}

def get_inputs():
    return [torch.rand(n, n)]

def get_init_inputs():
    return []
"""


def run(folder, capsys, *options):
    """Return the verdicts by problem, and what the script printed."""
    file = folder / "results.json"
    chosen = "--check-only", "--trusted", "--jobs=1", f"--json={file}"
    problems.main([str(folder), *chosen, *options])
    verdicts = {verdict["candidate"]: verdict for verdict in json.loads(file.read_text())}
    return verdicts, capsys.readouterr().out


@pytest.fixture
def folder(tmp_path):
    def write(**outputs):
        for name, output in outputs.items():
            tmp_path.joinpath(f"{name}.py").write_text(GOOD.format(output=output))
        return tmp_path

    return write


@pytest.mark.slow
def test_each_model_is_accepted_as_a_candidate_for_itself(forked, tmp_path, capsys):
    for file in FOLDER.glob("*.py"):
        tmp_path.joinpath(file.name).write_text(file.read_text())
    verdicts, printed = run(tmp_path, capsys, f"--elements={ELEMENTS}")
    assert len(verdicts) >= 24
    assert {verdict["reason"] for verdict in verdicts.values()} == {"accepted"}, printed
    assert f"{len(verdicts):5} accepted" in printed


def test_a_refusal_has_its_reason_and_costs_no_other_problem(forked, folder, capsys):
    at = folder(
        a_constant="x - x",
        b_random="torch.nn.functional.dropout(x)",
        c_crash='x if x.is_meta else __import__("os").abort()',
        d_raises="x @ x[1:]",
        e_honest="x + 1",
    )
    verdicts, printed = run(at, capsys)
    reasons = {name.split("/")[1]: verdict["reason"] for name, verdict in verdicts.items()}
    assert reasons.pop("e_honest") == "accepted"
    assert set(reasons.values()) == {"problem_error"}
    assert "    1 accepted" in printed
    assert "    4 problem_error" in printed


def test_bf16_is_refused(forked, folder, capsys):
    verdicts, _ = run(folder(a="x.sin() @ x"), capsys, "--candidate=bf16")
    assert [verdict["reason"] for verdict in verdicts.values()] == ["wrong_values"]


def test_problems_that_do_not_fit_the_budget_are_counted(folder, capsys):
    at = folder(a="x + 1", b="x + 2")
    problems.main([str(at), "--check-only", "--budget-seconds=0"])
    assert "    2 not started within the budget" in capsys.readouterr().out


def test_a_folder_without_problems_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="holds no problems"):
        problems.main([str(tmp_path)])


def test_the_sizes_of_a_problem_are_divided():
    assert problems.smaller(FOLDER / "triangular_matmul.py", ELEMENTS) == {"n": 128}
    small = problems.smaller(FOLDER / "transposed_conv.py", ELEMENTS)
    assert (small["inner"], small["stride"]) == (8, (2, 1))
