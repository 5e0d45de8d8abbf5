"""`aisp links diagnose` on real Gloo ranks on this CPU, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
from nccl_test import NO_GPU, machine_is

from pytest_aisp.cli import app

ONE_SHIFTED = """
    import sys, torch.distributed as dist
    from pytest_aisp.util import process_group
    rank, file = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    now = process_group.time_ns
    process_group.time_ns = lambda: now() + rank * SHIFT
    print(*process_group.Ranks(rank, 2, lambda number: None).clock_offset())
"""
PATIENCE = 300
"""Seconds for two processes that import torch: on a busy machine, that takes minutes."""


@pytest.mark.parametrize("shift", [0.0, -10.0])
def test_the_offset_of_a_clock_is_found_within_its_error(tmp_path, shift):
    code = textwrap.dedent(ONE_SHIFTED).replace("SHIFT", str(int(shift * 1e9)))
    commands = [[sys.executable, "-c", code, str(k), str(tmp_path / "meet")] for k in range(2)]
    started = [subprocess.Popen(c, stdout=subprocess.PIPE, text=True) for c in commands]
    (zero, error), (offset, same) = (
        map(float, process.communicate(timeout=PATIENCE)[0].split()) for process in started
    )
    assert zero == 0.0
    assert 0 < error == same
    assert offset == pytest.approx(shift, abs=error)
    assert (offset == 0.0) is (shift == 0.0)


PAGE = '''
    """Summing: the same sum."""

    import os
    import time

    import torch
    import torch.distributed as dist

    from pytest_aisp import Conditions, Work, compare


    def inputs(device, n):
        return (torch.randn(n, device=device),)


    def reference(ranks):
        total = sum(x.double() for (x,) in ranks)
        return [total] * len(ranks)


    def summed(x):
        out = x.clone()
        dist.all_reduce(out)
        return out


    def late(x):
        if dist.get_rank() == 1:
            time.sleep(0.1)
        return summed(x)


    def chained(x):
        rank, received = dist.get_rank(), torch.empty_like(x)
        if rank:
            dist.recv(received, rank - 1)
        time.sleep(0.05)
        if rank + 1 < dist.get_world_size():
            dist.send(x, rank + 1)
        return summed(x)


    def alone(x):
        return x.clone()


    def copied(x):
        return x.clone()


    def crashes(x):
        if dist.get_rank() == 2:
            os._exit(3)
        return summed(x)


    groups = []


    def smaller(x):
        groups.extend([] if groups else [dist.new_group([0, 1])])
        return summed(x)


    @compare(
        baseline=summed,
        optimized=[late, chained, alone, crashes, smaller],
        inputs=inputs,
        reference=reference,
        sizes=[{"n": 1001}],
        check_sizes=[{"n": 33}],
        work=lambda n: Work(wire=4 * n, terms=2),
        bound="latency",
        conditions=Conditions(gpus=3),
    )
    def test_summing(pair):
        pair.assert_equivalent()
        pair.assert_speedup()


    @compare(
        baseline=alone,
        optimized=[copied],
        inputs=inputs,
        reference=lambda x: x.double(),
        sizes=[{"n": 1001}],
        check_sizes=[{"n": 33}],
        work=lambda n: Work(read=4 * n, write=4 * n),
        bound="dram",
    )
    def test_one(pair):
        pair.assert_equivalent()
        pair.assert_speedup()
'''
CASE = "ch99/sum_test.py::test_summing[{}-n1001]"


@pytest.fixture
def pages(forked_processes, tmp_path, monkeypatch):
    """A folder with the page above, on a machine without a GPU."""
    machine_is(monkeypatch, NO_GPU)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ch99").mkdir()
    (tmp_path / "ch99" / "sum_test.py").write_text(textwrap.dedent(PAGE))
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = --import-mode=importlib\npython_files = *_test.py\n"
    )
    return tmp_path


def test_a_planted_delay_on_gloo_names_its_rank(pages, capsys):
    assert app.main(["links", "diagnose", CASE.format("late"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["clock_error"] > 0
    assert list(found["sides"]) == ["summed", "late"]
    late = found["sides"]["late"]
    assert (late["verdict"], late["late"]) == ("straggler", [1])
    assert late["ranks"][0]["wait"] > 0.05


def test_a_chain_of_ranks_on_gloo_is_a_dependency(pages, capsys):
    assert app.main(["links", "diagnose", CASE.format("chained")]) == 1
    out = capsys.readouterr().out
    assert out.startswith(
        "3 ranks, Gloo on a CPU (not a measurement of links); clocks agree within"
    )
    assert "\nchained: 30 calls, collectives in each: 1\nrank  waits for the last" in out
    chained = out.partition("\nchained")[2]
    assert "\ndependency: rank 2 waits " in chained
    assert "the ranks arrive in the order 0 -> 1 -> 2" in chained


def test_the_loop_of_all_reduces_runs_without_a_page(pages, capsys):
    assert app.main(["diagnose", "--ranks=2"]) in (0, 1)  # this machine may be busy
    out = capsys.readouterr().out
    assert out.startswith("2 ranks, Gloo")
    assert "all_reduces: 30 calls, collectives in each: 3" in out
    assert "contention: not looked for" in out


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("alone", "alone: it calls no collective of torch.distributed"),
        ("crashes", "rank 2 ended with exit code 3 during: record crashes"),
        ("smaller", "smaller uses a process group of only some ranks, which is not supported"),
    ],
)
def test_cases_that_cannot_be_diagnosed(pages, capsys, variant, message):
    assert app.main(["links", "diagnose", CASE.format(variant)]) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks=1"], "--ranks=1: a collective needs 2 ranks or more"),
        (["x", "--ranks=2"], "--ranks is for the loop; a case has its own number of ranks"),
        (["ch99/gone_test.py::test_x"], "unknown case 'ch99/gone_test.py::test_x'\n"),
        (
            ["ch99/sum_test.py::test_summing[lat-n1001]"],
            f"unknown case 'ch99/sum_test.py::test_summing[lat-n1001]';"
            f" the nearest: {CASE.format('late')}\n    pytest --collect-only -q",
        ),
        (
            ["ch99/sum_test.py::test_one[copied-n1001]"],
            "ch99/sum_test.py::test_one[copied-n1001] has one rank, and a collective needs two",
        ),
    ],
)
def test_arguments_that_are_refused(pages, capsys, arguments, message):
    assert app.main(["links", "diagnose", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_page_that_cannot_be_imported_says_why(pages, capsys):
    (pages / "ch99" / "bad_test.py").write_text("import nothing_like_this\n")
    assert app.main(["links", "diagnose", "ch99/bad_test.py::test_x"]) == 2
    assert "No module named 'nothing_like_this'" in capsys.readouterr().err
