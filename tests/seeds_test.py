"""benchmarks/seeds.py checks pages with several seeds, and counts refusals."""

from __future__ import annotations

import sys

import pytest
import seeds

PAGE = """
import torch
from pytest_aisp import Variant, Work, compare

def inputs(device, n):
    return (torch.randn(n, device=device),)

def divided(x):
    return x / 3

def multiplied(x):
    return x * (1 / 3)

def wrong(x):
    return x / 2.997

def broken(x):
    raise RuntimeError("no such library")

@compare(baseline=divided, optimized=[{sides}], inputs=inputs,
         reference=lambda x: x.double() / 3, sizes=[{{"n": 64}}], check_sizes=[{{"n": 33}}],
         work=lambda n: Work(read=4 * n, write=4 * n), bound="dram")
def test_third(pair):
    pair.assert_equivalent({rule})
"""


@pytest.mark.parametrize(
    ("sides", "rule", "lines", "status"),
    [
        ("multiplied", "", ["1 cases, 2 checks, 0 refused; 0 cases left out"], 0),
        (
            "multiplied, wrong",
            "",
            [
                "2 cases, 4 checks, 2 refused; 0 cases left out",
                "refused: test_third[wrong]: Wrong: wrong is wrong*(seed 1)",
                "refused: test_third[wrong]: Wrong: wrong is wrong*(seed 2)",
            ],
            1,
        ),
        (
            "multiplied",
            "rtol=0.01",
            [
                "1 cases, 2 checks, 2 refused; 0 cases left out",
                "refused: test_third[multiplied]: TooLoose: the tolerance (rtol=0.01, atol=0)*",
            ],
            1,
        ),
        (
            'broken, Variant(multiplied, gpu_only="symmetric memory")',
            "",
            [
                "0 cases, 0 checks, 0 refused; 2 cases left out",
                "left out: test_third[broken]: RuntimeError: no such library",
                "left out: test_third[multiplied]: needs ranks, a GPU or more time",
            ],
            0,
        ),
    ],
)
def test_every_case_of_a_folder_is_checked_with_each_seed(
    tmp_path, monkeypatch, capsys, sides, rule, lines, status
):
    tmp_path.joinpath("third_test.py").write_text(PAGE.format(sides=sides, rule=rule))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["seeds.py", str(tmp_path), "--seeds", "2"])
    assert seeds.main() == status
    out = capsys.readouterr().out
    assert all(part in out for line in lines for part in line.split("*"))
    assert out.splitlines()[-1].startswith(f"{lines[0][0] != '0':d} pages: {lines[0]}")


def test_cases_without_time_are_left_out(tmp_path, monkeypatch, capsys):
    tmp_path.joinpath("third_test.py").write_text(PAGE.format(sides="multiplied", rule=""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["seeds.py", str(tmp_path), "--seconds", "0"])
    assert seeds.main() == 0
    assert "0 pages: 0 cases, 0 checks, 0 refused; 1 cases left out" in capsys.readouterr().out
