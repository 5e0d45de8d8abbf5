"""The comment of `aisp ci gate` on a pull request, rendered as by GitHub and GitLab."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import fake_results
import pytest

from pytest_aisp.cli import app
from pytest_aisp.tools import ci_gate_comment

HOSTILE = [
    "a|b `c` ``d``",
    "\\| \\` x",
    "<img src=x onerror=alert(1)> & </code></table>",
    "-->\n\n/close\n/merge\n## heading",
    "@everyone #1 :tada: www.example.org https://example.org [a](b) ![i](j)",
    "*a* _b_ ~~c~~ $x$ \u202e \x00 \u2028/close",
    "`",
    "|",
    "ü" * 400,
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Write the folder of a run from rows; return its name."""
    monkeypatch.chdir(tmp_path)

    def write(name, *rows, **fields):
        fake_results.artifacts(tmp_path / name, list(rows), **fields)
        return name

    return write


def row(stem="gemm", verdict="pass", *, speedup=1.0, stored=2.0, case=None, **fields):
    """Return the row of a case whose speedup is `speedup` times the stored one."""
    value = None if stored is None else math.log(stored)
    middle = (value or 0.0) + math.log(speedup)
    timed = {"value": middle, "low": middle - 0.01, "high": middle + 0.01, "stored": value}
    made = fake_results.case(f"ch10:{stem}", **(case or {}))
    return fake_results.row(made, verdict, **{**timed, **fields})


@pytest.fixture
def comment(capsys):
    """Return the exit code, the lines of the comment, and its tables, cell by cell."""
    markdown_it = pytest.importorskip("markdown_it")
    parser = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table")

    def ask(*words):
        code = app.main(["ci", "gate", *words, "--comment=gate-comment.md"])
        capsys.readouterr()
        text = Path("gate-comment.md").read_text()
        assert len(text) <= 65_000  # GitHub refuses more than 65,536, and the CI adds a link
        return code, text.splitlines(), rendered(parser.parse(text))

    return ask


def rendered(tokens):
    """Return the tables as lists of rows, each cell as its visible text. Refuse other HTML."""
    tables = []
    for at, token in enumerate(tokens):
        if token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append([])
        elif token.type in ("td_open", "th_open"):
            tables[-1][-1].append(cell_text(tokens[at + 1].children))
        elif token.type == "html_block":
            assert token.content.strip() == ci_gate_comment.MARKER
    return tables


def cell_text(children):
    assert {token.type for token in children} <= {"text", "code_inline", "html_inline"}
    tags = [token.content for token in children if token.type == "html_inline"]
    assert tags in ([], ["<code>", "</code>"])
    shown = [token for token in children if token.type != "html_inline"]
    return "".join(token.content for token in shown)


def test_two_products_with_a_red_case_each(run, comment):
    slow = row("gemm", "regressed", speedup=0.8, cause="code", reasons=["slower than its old code"])
    untimed = {"value": None, "low": None, "high": None, "product": "nvidia-b200"}
    wrong = row("scan", "wrong", reasons=["3 elements differ"], **untimed)
    stale = row("old", "stale", speedup=0.9, product="nvidia-b200")
    h200 = run("h200", slow, row("tiled"), row("fused", "new", stored=None), code=1)
    b200 = run("b200", wrong, stale, code=1)
    code, lines, tables = comment(h200, b200, "--products=nvidia-h200,nvidia-b200,nvidia-b300")
    assert code == 1
    assert lines[:2] == ["<!-- aisp gate -->", "## Performance gate: red"]
    assert lines[3] == "2 red, 1 stale, 2 green (1 new, 1 pass) of 5 cases in 2 valid runs"
    runs, red, others = tables
    assert runs == [
        ["run", "products", "cases", "verdict"],
        ["h200", "nvidia-h200", "3", "1 of 3 cases are red"],
        ["b200", "nvidia-b200", "2", "1 of 2 cases are red"],
        ["-", "nvidia-b300", "0", "missing"],
    ]
    assert red[0] == list(ci_gate_comment.CASE_HEADS)
    assert red[1] == [
        "nvidia-h200",
        "gemm: tiled, n=64",
        "0.800x [0.792, 0.808] (1.600x, stored 2.000x)",
        "regressed",
        "code",
        "slower than its old code",
        "pytest 'suites/ch10/gemm_test.py::test_gemm[tiled-n64]'",
    ]
    assert red[2][:6] == [
        "nvidia-b200",
        "scan: tiled, n=64",
        "-",
        "wrong",
        "-",
        "3 elements differ",
    ]
    assert [line for line in lines if line.startswith("### ")] == [
        "### Red",
        "### Disturbed, stale and inconclusive",
    ]
    assert [cells[3:6] for cells in others[1:]] == [["stale", "-", "see its log"]]


def test_largest_loss_comes_first_and_stored_speedup_may_be_missing(run, comment):
    rows = [row(f"p{n}", "regressed", speedup=n / 10) for n in (8, 6, 7)]
    rows.append(row("q", "regressed", speedup=3.0, stored=None))
    rows.append(row("r", "regressed", speedup=3.0, low=-math.inf))
    _, _, (_, red) = comment(run("a", *rows, code=1))
    assert [cells[1].partition(":")[0] for cells in red[1:]] == ["q", "r", "p6", "p7", "p8"]
    assert [cells[2] for cells in red[1:3]] == [
        "- (3.000x, nothing stored)",
        "- (6.000x, no interval)",
    ]


def test_green_runs_have_one_table_and_name_the_commit(run, comment):
    folder = run("a", row("gemm"), row("scan", "improved"))
    manifest = json.loads(Path(folder, "manifest.json").read_text())
    manifest["git"] = {"commit": "c0ffee1234567890", "branch": "main", "dirty": False}
    Path(folder, "manifest.json").write_text(json.dumps(manifest))
    code, lines, tables = comment(folder)
    assert (code, lines[1], len(tables)) == (0, "## Performance gate: green", 1)
    counted = "2 green (1 improved, 1 pass) of 2 cases in 1 valid run, at `c0ffee123456`"
    assert lines[3] == counted


def test_an_empty_run_and_an_invalid_one(run, comment):
    invalid = run("b", row("gemm", "regressed"), canaries=[{"wrong": "a copy | differs"}])
    code, lines, (runs,) = comment(run("a"), invalid)
    assert (code, lines[1]) == (1, "## Performance gate: red")
    assert lines[3] == "0 green of 0 cases in 1 valid run"
    assert runs[1] == ["a", "", "0", "it contains no case"]
    why = "invalid, its verdicts do not count (canary: a copy | differs)"
    assert runs[2] == ["b", "nvidia-h200", "1", why]


def test_a_run_that_cannot_be_read_replaces_the_verdict(run, comment, capsys):
    good, old = run("a", row("gemm", "fail"), code=1), run("old", row())
    manifest = json.loads(Path(old, "manifest.json").read_text())
    Path(old, "manifest.json").write_text(json.dumps({**manifest, "schema": 99}))
    code, lines, (errors, runs, red) = comment(good, old, "nowhere|`", "--report-only")
    assert (code, lines[1]) == (2, "## Performance gate: no verdict")
    newer = "old/manifest.json: was written by a newer pytest-aisp (schema 99; this one reads 1)"
    assert errors == [["not readable"], [newer], ["nowhere|`: there is no such folder"]]
    assert (runs[1][0], red[1][1]) == ("a", "gemm: tiled, n=64")


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_names_and_messages_are_shown_as_they_are_and_do_nothing(run, comment, name):
    case = {
        "nodeid": f"suites/ch10/x_test.py::test_x[{name}]",
        "variant": name,
        "size": {"n": name},
    }
    slow = row("x", "fail", case=case, product=name, reasons=[name, "b"], speedup=0.9)
    code, lines, (runs, red) = comment(run("a", slow, code=1), f"--products={name}")
    assert code == 1
    shown = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    cut = shown if len(shown) <= 300 else f"{shown[:297]}..."
    assert (red[1][0], runs[1][1]) == (cut, cut)
    assert red[1][1].startswith(f"x: {shown}"[:297])
    assert red[1][5].startswith(f"{shown}; b"[:297])
    [_, test] = shlex.split(red[1][6])
    plain = shown == name and len(name) < 500
    assert test == (case["nodeid"] if plain else "suites/ch10/x_test.py")
    starts = ("| ", "## Performance gate: red", "### Red", "<!-- aisp gate -->", "1 red, 0 green")
    assert not [line for line in lines if line and not line.startswith(starts)]
    outside = re.sub(r"`[^`]*`|<code>.*?</code>", "", "\n".join(lines[1:]))
    assert not re.search(r"[<@:]\w|tada|everyone|example", outside)
    ElementTree.parse("gate-comment.svg")


def test_a_command_too_long_to_show_names_the_page(run, comment):
    case = {"nodeid": f"suites/ch10/x_test.py::test_x[{'a' * 700}]"}
    _, _, (_, red) = comment(run("a", row("x", "fail", case=case), code=1))
    assert red[1][6] == "pytest suites/ch10/x_test.py"
    case = {"nodeid": f"{'a' * 700}_test.py::test_x"}
    _, _, (_, red) = comment(run("b", row("x", "fail", case=case), code=1))
    assert red[1][6] == "-"


def test_the_command_repeats_what_the_run_compared_with(run, comment):
    folder = run("a", row("gemm", "regressed", speedup=0.9), code=1)
    manifest = json.loads(Path(folder, "manifest.json").read_text())
    manifest["options"] = {"against": "a b", "compile": [], "aa": False}
    Path(folder, "manifest.json").write_text(json.dumps(manifest))
    _, _, (_, red) = comment(folder)
    assert red[1][6].endswith("test_gemm[tiled-n64]' --aisp-against='a b'")


@pytest.mark.parametrize("reason", ["slow", "| `" * 500])
def test_many_red_cases_stay_below_the_limit_and_the_rest_is_counted(run, comment, reason):
    rows = [row(f"page{n}", "regressed", speedup=0.9, reasons=[reason]) for n in range(300)]
    old = [row(f"old{n}", "stale", speedup=0.9, reasons=[reason]) for n in range(100)]
    _, lines, tables = comment(run("a", *rows, *old, code=1))
    assert lines[3].startswith("300 red, 100 stale, 0 green of 400 cases")
    red, others = tables[1:]
    for shown, all_of_them, what in ((red, 300, "red cases"), (others, 100, "such cases")):
        more = all_of_them + 1 - len(shown)
        assert [line for line in lines if what in line] == [f"and {more} more {what}"] * (more > 0)
    assert len(red) > 20
    assert len(others) < 100
    assert sum(map(len, lines)) > 55_000


def test_the_plot_shows_the_worst_cases_first(run, comment):
    rows = [row(f"good{n}", speedup=1.01) for n in range(60)]
    slow = row("slow", "regressed", speedup=0.8, product="<b&\x07>")
    rows += [slow, row("unstored", stored=None), row("far", "stale", speedup=0.01)]
    comment(run("a", *rows, code=1))
    svg = "{http://www.w3.org/2000/svg}"
    drawn = ElementTree.parse("gate-comment.svg")
    texts = [element.text for element in drawn.iter(f"{svg}text")]
    cases = [text for text in texts if text and ": tiled" in text]
    assert cases[:2] == ["regressed <b& > slow: tiled, n=64", "stale nvidia-h200 far: tiled, n=64"]
    assert len(cases) == 40
    assert texts[0] == "Performance gate: red"
    assert texts[-1] == "and 22 more cases"
    points = [float(element.get("cx")) for element in drawn.iter(f"{svg}circle")]
    assert points[1] == ci_gate_comment.LEFT < points[0] < points[2]  # a factor of 100 is cut off
    middle = (ci_gate_comment.LEFT + ci_gate_comment.RIGHT) / 2
    assert points[0] < middle < points[2]
    ends = [(float(e.get("x1")), float(e.get("x2"))) for e in drawn.iter(f"{svg}line")][5:]
    assert ends[0][0] < points[0] < ends[0][1]


def test_a_plot_without_stored_results_says_so(run, comment):
    comment(run("a", row("gemm", "new", stored=None)))
    assert "no case has a stored result" in Path("gate-comment.svg").read_text()


def test_the_comment_is_named_and_the_verdict_still_printed(run, capsys):
    assert app.main(["ci", "gate", run("a", row()), "--comment=to/a.md"]) == 0
    output = capsys.readouterr()
    assert output.err == "wrote to/a.md and to/a.svg\n"
    assert output.out.startswith("green: 1 runs, 1 cases\n")
    assert app.main(["ci", "gate", "a", "--format=markdown"]) == 0
    assert capsys.readouterr().out == Path("to/a.md").read_text()


@pytest.mark.parametrize("name", ["a.svg", "."])
def test_a_name_that_is_no_file_of_markdown_is_refused(run, capsys, name):
    assert app.main(["ci", "gate", run("a", row()), f"--comment={name}"]) == 2
    error = f"--comment={name}: name a file of Markdown, such as gate-comment.md\n"
    assert capsys.readouterr().err == error


def test_a_comment_that_cannot_be_written_is_an_error_and_the_verdict_is_printed(run, capsys):
    Path("folder.md").mkdir()
    assert app.main(["ci", "gate", run("a", row()), "--comment=folder.md"]) == 2
    output = capsys.readouterr()
    assert output.err == "folder.md: cannot be written: Is a directory\n"
    assert output.out.startswith("green: 1 runs")


def test_more_missing_products_than_fit_are_counted(run, comment):
    products = ",".join(f"{'p' * 200}{number}" for number in range(400))
    _, lines, tables = comment(run("a", row("gemm", "fail"), code=1), f"--products={products}")
    runs, red = tables
    assert f"and {402 - len(runs)} more runs" in lines
    assert (len(runs) > 200, len(red), lines[-1]) == (True, 1, "and 1 more red cases")
