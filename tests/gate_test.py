"""`aisp ci gate`: one verdict for several runs, in each output format."""

from __future__ import annotations

import json
from pathlib import Path

import fake_results
import pytest

from pytest_aisp.cli import app

WHY = "1.668x against 2.000x, margin 10.0% -> red"
PAGE = "import os\n\n\ndef test_other(): ...\n\n\n@os\n@os\ndef test_gemm(pair):\n    pass\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Write the folder of a run, verdicts by page; return its name."""
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "suites/ch10/gemm_test.py"
    page.parent.mkdir(parents=True)
    page.write_text(PAGE)

    def write(name, product="nvidia-h200", *, code=0, canary="", more=(), **verdicts):
        folder = tmp_path / name
        rows = [
            fake_results.row(
                fake_results.case(f"ch10:{stem}"),
                verdict,
                product=product,
                value=0.5,
                low=0.49,
                high=0.51,
                reasons=[] if verdict == "pass" else [WHY],
            )
            for stem, verdict in verdicts.items()
        ]
        canaries = [{"wrong": canary}] if canary else []
        fake_results.artifacts(folder, [*rows, *more], canaries, code=code)
        return name

    return write


@pytest.fixture
def gate(capsys):
    """Return the exit code and the lines of `aisp ci gate`."""

    def ask(*words):
        code = app.main(["gate", *words])
        output = capsys.readouterr()
        assert output.err == ""
        return code, output.out.splitlines()

    return ask


def test_green_runs_are_green(run, gate):
    folders = run("a", gemm="pass", code=0), run("b", "nvidia-b200", gemm="new", split_k="stale")
    code, lines = gate(*folders, "--products=nvidia-h200,nvidia-b200")
    assert (code, lines[0]) == (0, "green: 2 runs, 3 cases")
    assert lines[1:] == ["a (nvidia-h200): green", "b (nvidia-b200): green"]


@pytest.mark.parametrize("verdict", ["fail", "regressed", "wrong", "invalid"])
def test_one_red_case_makes_the_gate_red(run, gate, verdict):
    code, lines = gate(run("a", gemm="pass"), run("b", "nvidia-b200", gemm=verdict, code=1))
    assert (code, lines[0]) == (1, "red: 2 runs, 2 cases")
    assert lines[2] == "b (nvidia-b200): 1 of 1 cases are red"
    nodeid = "suites/ch10/gemm_test.py::test_gemm[tiled-n64]"
    assert lines[3] == f"    {verdict} {nodeid}: {WHY}"


def test_verdicts_of_an_invalid_run_do_not_count(run, gate):
    moved = [fake_results.row(fake_results.case("ch10:a"), suspect=1)] * 6
    invalid = {
        run("canary", gemm="regressed", canary="a copy differs"): "canary: a copy differs",
        run("moved", more=moved): "environment moved",
        run("ended", gemm="pass", code=17): "pytest ended with exit code 17",
    }
    for folder, why in invalid.items():
        code, lines = gate(folder, run(f"{folder}-green", gemm="pass"), "--products=nvidia-h200")
        assert (code, lines[0].partition(":")[0]) == (17, "invalid")
        assert f"invalid, its verdicts do not count ({why})" in lines[1]
    assert gate(*invalid, run("red", gemm="fail"))[0] == 1


@pytest.mark.parametrize(
    ("verdicts", "code", "why"),
    [
        ({}, 0, "it contains no case"),
        ({"gemm": "pass"}, 2, "pytest ended with exit code 2"),
        ({"gemm": "pass"}, None, "pytest was killed"),
        ({"gemm": "pass"}, 1, "pytest ended with exit code 1, but no case is red"),
    ],
)
def test_an_unfinished_run_is_red(run, gate, verdicts, code, why):
    found, lines = gate(run("a", code=code, **verdicts))
    assert found == 1
    assert lines[1].endswith(f": {why}")


def test_an_expected_product_that_no_run_timed_is_red(run, gate):
    untimed = {"product": "nvidia-b200", "value": None}
    checked = fake_results.row(fake_results.case("ch10:a"), "checked", **untimed)
    folder = run("a", gemm="pass", more=[checked])
    code, lines = gate(folder, "--products=nvidia-h200,nvidia-b200,nvidia-b300")
    assert code == 1
    assert lines[2:] == [f"missing: no run timed nvidia-{name}" for name in ("b200", "b300")]


def test_a_product_with_counted_goals_only_is_not_missing(run, gate):
    untimed = {"value": None, "low": None, "high": None, "seconds": {}}
    goals = {"memory": {"baseline": 2.0, "optimized": 1.0}}
    case = fake_results.row(fake_results.case("ch10:gemm"), goals=goals, **untimed)
    assert gate(run("h200", more=[case]), "--products=nvidia-h200") == (
        0,
        ["green: 1 runs, 1 cases", "h200 (nvidia-h200): green"],
    )


def test_an_incomplete_last_line_is_left_out(run, gate):
    folder = run("a", gemm="pass", code=None)
    with Path(folder, "results.jsonl").open("a") as file:
        file.write('{"nodeid": "suites/ch10/ge')
    code, lines = gate(folder)
    assert (code, lines[0]) == (1, "red: 1 runs, 1 cases")


def test_github_annotations_are_at_the_line_of_the_test(run, gate):
    folders = run("a", gemm="regressed"), run("b", gone="fail"), run("c", canary="50% off,\nmore")
    code, lines = gate(*folders, "--format=github", "--products=nvidia-b200")
    assert code == 1
    title = "title=regressed on nvidia-h200%3A test_gemm[tiled]"
    assert lines == [
        f"::error file=suites/ch10/gemm_test.py,line=9,{title}::{WHY.replace('%', '%25')}",
        "::error file=suites/ch10/gone_test.py,line=1,"
        f"title=fail on nvidia-h200%3A test_gone[tiled]::{WHY.replace('%', '%25')}",
        "::error title=Performance gate::c: invalid, its verdicts do not count"
        " (canary: 50%25 off,%0Amore)",
        "::error title=Performance gate::no run timed nvidia-b200",
    ]
    assert gate(run("d", gemm="pass"), "--format=github")[1][0].startswith("::notice ")


def test_gitlab_gets_a_code_quality_report_and_json_has_everything(run, gate):
    folder = run("a", gemm="regressed", split_k="pass")
    [issue] = json.loads("\n".join(gate(folder, "--format=gitlab")[1]))
    place = {"path": "suites/ch10/gemm_test.py", "lines": {"begin": 9}}
    assert (issue["location"], issue["severity"]) == (place, "major")
    assert issue["description"].endswith(WHY)
    found = json.loads("\n".join(gate(folder, "--format=json")[1]))
    assert (found["verdict"], found["exit_code"]) == ("red", 1)
    assert found["runs"][0]["red"][0]["reasons"] == [WHY]


def test_a_missing_folder_is_an_error(run, capsys):
    assert app.main(["gate", run("a", gemm="pass"), "b"]) == 2
    assert "b: there is no such folder" in capsys.readouterr().err


def test_every_unreadable_run_is_named(run, capsys):
    Path("c").mkdir()
    assert app.main(["gate", "b", run("a", gemm="pass"), "c"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "b: there is no such folder" in output.err
    assert "c: holds no run: it has no manifest.json" in output.err


REPORT_ONLY = [("fail", "red, did not block (report only)"), ("pass", "green (report only)")]
REPORT_ONLY += [("disturbed", "invalid, did not block (report only)")]


@pytest.mark.parametrize(("verdict", "headline"), REPORT_ONLY)
def test_report_only_exits_with_0_and_says_so_first(run, gate, verdict, headline):
    folder = run("a", gemm=verdict)
    code, lines = gate(folder, "--report-only")
    assert (code, lines[0]) == (0, f"{headline}: 1 runs, 1 cases")
    code, lines = gate(folder, "--report-only", "--format=github")
    assert (code, lines[0]) == (0, f"::notice title=Performance gate::{headline}")
    assert all(line.startswith("::warning ") for line in lines[1:])
    code, lines = gate(folder, "--report-only", "--format=markdown")
    assert (code, lines[1]) == (0, f"## Performance gate: {headline}")
    found = json.loads("\n".join(gate(folder, "--report-only", "--format=json")[1]))
    assert (found["exit_code"], found["report_only"]) == (0, True)
    issues = json.loads("\n".join(gate(folder, "--report-only", "--format=gitlab")[1]))
    assert {issue["severity"] for issue in issues} <= {"info"}


def test_report_only_without_a_run_is_an_error(run, capsys):
    assert app.main(["gate", "b", "--report-only"]) == 2
    assert "b: there is no such folder" in capsys.readouterr().err
