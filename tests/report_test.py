"""The report as a file: complete without scripts, safe for any case name, small."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
from fnmatch import fnmatchcase
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_runs import case, laid, made, timeline, timing

from pytest_aisp.cli import app
from pytest_aisp.report import data as report_data
from pytest_aisp.report import html as report
from pytest_aisp.report.data import Timing, bars_for, blocks_for, thinned
from pytest_aisp.report.html import Axis
from pytest_aisp.report.run import VERDICTS, ReportCase, ReportRun, lenient
from pytest_aisp.results import run_reader
from pytest_aisp.results.verdict import ORDER, RED
from pytest_aisp.util.cli_result import CliError

HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<!--<script>",
    "'`${x}` {{data}} &lt;",
    "이름 😀 \u2028 \u202e",
    "half \ud800",
    "a/b?c=d#e%20",
    "line\nbreak",
)


class Parsed(HTMLParser):
    """The elements, and the text of the table's rows, that a browser without scripts shows."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.links, self.rows, self._in = [], [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        named = dict(attrs)
        self.links += [named[name] for name in ("href", "src") if named.get(name)]
        if tag == "tr":
            self.rows.append("")
        self._in = tag

    def handle_data(self, data):
        if self.rows and self._in not in ("script", "style"):
            self.rows[-1] += f" {data}"


def page(results, *history):
    run = ReportRun.of(results)
    return report.render(run, report_data.report_data(run, [ReportRun.of(h) for h in history]))


def data_of(html):
    return json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])


def with_cases(*cases, **run):
    return {**made(0, **run), "cases": list(cases)}


def test_verdicts_of_the_report_are_all_verdicts_with_red_ones_first():
    assert set(VERDICTS) == {*ORDER, ""}
    assert set(VERDICTS[: len(RED)]) == set(RED)


def test_table_is_complete_without_scripts():
    results = made(26)
    rows = Parsed(page(results)).rows[1:]
    assert len(rows) == 26
    for one, row in zip(data_of(page(results))["cases"], rows, strict=True):
        assert one["verdict"] in row
        assert one["variant"] in row
        assert f"n {one['size']['n']}" in row
        if "speedup" in one:
            assert f"{one['speedup']['value']:.3f}"[:4] in row
            assert one["bound"] in row
        else:
            assert "needs tcgen05" in row


def test_red_cases_come_first_with_their_reason():
    cases = [case(0, verdict=v, reasons=[f"why {v}"]) for v in ("pass", "fail", "new", "wrong")]
    rows = Parsed(page(with_cases(*cases))).rows[1:]
    assert [row.split()[0] for row in rows[:2]] == ["wrong", "fail"]
    assert "why wrong" in rows[0]
    assert all("why" not in row for row in rows[2:])


@pytest.mark.parametrize("name", HOSTILE)
def test_case_may_have_any_name(name, tmp_path):
    fields = ("page", "function", "variant", "baseline", "bound", "product", "chapter")
    one = case(4, id=f"x::{name}", **dict.fromkeys(fields, name), size={name: name})
    one |= {"reasons": [name], "notes": [name], "goals": {name: {"baseline": 1, "optimized": 1}}}
    one |= {"profile": {"tool": name, "folder": name, "files": [name]}}
    results = with_cases(one, invalid=[name], branch=name, mode=name)
    results["run"]["machine"]["name"] = name
    out = report.write_report(ReportRun.of(results, tmp_path), tmp_path / "report.html")
    html = out.read_text(encoding="utf-8")
    clean = name.replace("\ud800", "?")
    assert data_of(html)["cases"][0]["id"] == f"x::{clean}"
    plain = page(with_cases(case(4), invalid=["x"]))
    assert Parsed(html).tags.count("script") == Parsed(plain).tags.count("script") == 2
    assert Parsed(html).tags.count("img") == 0
    assert clean.split()[0] in " ".join(Parsed(html).rows)


def test_report_loads_nothing_and_allows_only_its_own_script():
    html = page(made(13))
    assert {link[0] for link in Parsed(html).links} == {"#", "d"}  # "data:,", the icon
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    assert not re.search(r"url\(|@import", style)
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', html)[1]
    script = re.search(r"</script>\n<script>(.*?)</script>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_report_leaks_no_other_field_of_a_run():
    results = made(3)
    results["run"] |= {"options": {"x": "hunter2"}, "surplus": "hunter2"}
    results["run"]["environment"] = {"API_TOKEN": "hunter2"}
    results["run"]["machine"] |= {"surplus": "hunter2", "facts": {"host": "hunter2"}}
    results["run"]["packages"]["private"] = "hunter2"
    results["run"]["git"]["remote"] = "https://hunter2@example.org"
    results["surplus"] = results["cases"][0]["surplus"] = "hunter2"
    results["cases"][0]["environment"] = {"surplus": "hunter2"}
    assert "hunter2" not in page(results)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"invalid": ["environment moved"]}, "This run is invalid: none of its verdicts counts."),
        (
            {"complete": False},
            "This run was interrupted. The report shows the cases that had finished.",
        ),
        ({"not_written": ["disk full"]}, "Parts of this run are missing."),
        ({"no_verdict": ["a case"]}, "Cases without a verdict: their worker died."),
        ({"no_canary": ["worker 'gw0': a case"]}, "Verdicts without a canary: their worker ended"),
    ],
)
def test_problems_of_a_run_are_shown_before_any_number(fields, text):
    html = page(made(3, **fields))
    assert html.index(text) < html.index('id="tally"')
    assert all(escape(line) in html for lines in fields.values() if lines for line in lines)
    assert text not in page(made(3))


def test_run_without_cases_has_a_report():
    assert "No case ran." in page(made(0))


def test_incomplete_case_is_shown_with_the_fields_it_has():
    html = page(with_cases({"id": "a_test.py::test_a[b]"}, {"no": "id"}, "nothing"))
    assert len(Parsed(html).rows) == 2
    assert "a_test.py::test_a[b]" in html


@pytest.mark.parametrize(
    "fields",
    [
        {"spread": math.nan, "wall": math.inf, "speedup": {"value": math.nan, "low": 1, "high": 2}},
        {"speedup": {"value": "2", "low": -1, "high": 2}, "limit": "copy", "work": None},
        {"claim": "1.5", "stored": 2, "seconds": {"baseline": "fast"}, "votes": 3, "profile": "x"},
    ],
)
def test_malformed_fields_of_a_case_are_left_out(fields):
    found = data_of(page(with_cases(case(0, **fields))))["cases"][0]
    assert not fields.keys() & found.keys()


def sample_errors(run):
    """Return the error that the report shows for each case's samples. It shows no samples."""
    cases = report_data.report_data(run).cases
    assert not any(case.processes for case in cases)
    return [case.samples_error for case in cases]


def test_missing_and_replaced_samples_are_reported(tmp_path):
    folder = laid(tmp_path / "run", made(3))
    samples = folder / "samples"
    (samples / "0000.json").unlink()
    (samples / "0001.json").write_bytes((samples / "0002.json").read_bytes())
    (samples / "0002.json").write_text('{"timings": [')
    run = ReportRun.read(folder)
    missing, *replaced = sample_errors(run)
    assert missing == (
        "samples/0000.json: its samples are missing: No such file or directory."
        " Copy the whole folder of the run, including samples/."
    )
    for number, error in enumerate(replaced, 1):
        sha256 = run.cases[number].samples["sha256"]
        found = hashlib.sha256((samples / f"000{number}.json").read_bytes()).hexdigest()
        assert error == (
            f"samples/000{number}.json: the run wrote other samples: SHA-256"
            f" {found[:12]}..., not {sha256[:12]}.... Copy the folder of the run again."
        )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"checks": [], "timings": [{"baseline": ["x"]}], "against": []}', ""),
        ('{"checks": []}', "Object missing required field `timings`"),
        ("3", "Expected `object`, got `int`"),
    ],
)
def test_malformed_samples_are_not_shown(tmp_path, text, error):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "0000.json").write_text(text)
    file = {"path": "samples/0000.json", "sha256": hashlib.sha256(text.encode()).hexdigest()}
    [shown] = sample_errors(ReportRun.of(with_cases(case(0, samples=file)), tmp_path))
    cause = f"samples/0000.json: was not written by pytest-aisp: {error}"
    assert shown == (error and f"{cause}. Measure again: pytest --aisp-artifacts=DIR.")


def test_timed_case_without_samples_is_reported():
    timed, untimed = case(0, samples=None), case(1, samples=None, speedup=None, seconds=None)
    errors = ["its samples could not be written.", ""]
    assert sample_errors(ReportRun.of(with_cases(timed, untimed))) == errors


def test_samples_are_read_only_from_the_folder_of_the_run(tmp_path):
    unknown = "the run does not say which file holds its samples."
    for file in ("samples/0000.json", {"path": "samples/0000.json"}, {"path": 3, "sha256": ""}, []):
        run = ReportRun.of(with_cases(case(0, samples=file)), tmp_path)
        assert sample_errors(run) == [unknown]
    outside = with_cases(case(0, samples={"path": "../x.json", "sha256": "0"}))
    (error,) = sample_errors(ReportRun.of(outside, tmp_path))
    assert error == "../x.json: samples lie below their run's folder, in samples/."
    assert sample_errors(ReportRun.of(outside)) == ["only its results are here, not its samples."]


def test_errors_and_precisions_of_sides_are_in_the_data():
    known = {"errors": {"added": 1e-7, "doubled": 3e-4}, "precisions": {"doubled": "tf32"}}
    new, old = data_of(page(with_cases(case(0, **known), case(1))))["cases"]
    assert {name: new[name] for name in known} == known
    assert not known.keys() & old.keys()
    malformed = {"errors": {"added": "small"}, "precisions": ["tf32"]}
    (left,) = data_of(page(with_cases(case(0, **malformed))))["cases"]
    assert not malformed.keys() & left.keys()


def test_history_shows_only_results_of_the_same_product():
    runs = [made(4, started=f"2026-11-{day:02}T00:00:00+00:00") for day in (3, 1)]
    other = made(4, started="2026-11-02T00:00:00+00:00")
    other["cases"] = [{**c, "product": "nvidia-b200"} for c in other["cases"]]
    history = data_of(page(made(4), *runs, other))["cases"][0]["history"]
    assert [(entry["started"][:10], entry["current"]) for entry in history] == [
        ("2026-11-01", False),
        ("2026-11-03", False),
        ("2026-11-22", True),
    ]
    assert "history" not in data_of(page(made(4)))["cases"][0]


def test_code_comes_from_the_page_and_links_are_relative_to_the_report(tmp_path):
    folder = laid(tmp_path / "run", made(3), pages=True)
    out = tmp_path / "elsewhere" / "report.html"
    out.parent.mkdir()
    found = data_of(report.write_report(ReportRun.read(folder), out, pages_root=folder).read_text())
    one = found["cases"][0]
    assert found["pages"][one["page"]]["title"] == "Doubling: one read instead of two."
    assert "+def doubled(x):" in one["diff"]
    assert set(found["pages"][one["page"]]["sides"]) == {"added", "doubled"}
    assert one["profile"]["files"] == ["../run/profile/a b#1.json"]
    assert one["command"] == f"pytest '{one['id']}'"


def timelines(folder, cases):
    return [case.timeline for case in report_data.report_data(ReportRun.of(cases, folder)).cases]


def test_timeline_comes_from_the_profile_of_the_case(tmp_path):
    folder = laid(tmp_path / "run", made(1))
    [found] = timelines(folder, made(1))
    assert (found.calls, found.baseline.count, found.optimized.count) == (3, 9, 6)
    shown = data_of(report.write_report(ReportRun.read(folder), tmp_path / "x.html").read_text())
    assert shown["cases"][0]["timeline"]["optimized"]["bars"][1] == [7, 1, 2, 2.5]
    assert timelines(folder, with_cases(case(0, profile=None))) == [None]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "3",
        "x" * 300_000,
        json.dumps(timeline(1, 1) | {"calls": 0}),
        json.dumps(timeline(1, 1)).replace('"names": ["Memcpy', '"names": [], "other": ["'),
        json.dumps(timeline(1, 1)).replace("2.5", "-2.5"),
    ],
)
def test_malformed_timeline_is_left_out(tmp_path, text):
    folder = laid(tmp_path / "run", made(1))
    (folder / "profile" / "timeline.json").write_text(text)
    assert timelines(folder, made(1)) == [None]


@pytest.mark.parametrize("place", ["../elsewhere", "nul\0", "nosuch", ""])
def test_timeline_is_read_only_below_the_folder_of_the_run(tmp_path, place):
    folder = laid(tmp_path / "run", made(1))
    (folder / "profile").rename(tmp_path / "elsewhere")
    moved = case(0, profile={"tool": "torch", "folder": place, "files": []})
    assert timelines(folder, with_cases(moved)) == [None]


def test_counters_come_from_the_profile_of_the_case(tmp_path):
    folder = laid(tmp_path / "run", made(1))
    (folder / "profile" / "baseline.counters.json").write_text('{"kernels": 0}')
    [found] = report_data.report_data(ReportRun.of(made(1), folder)).cases
    assert {role: one.occupancy for role, one in found.counters.items()} == {"optimized": 0.5}


def test_reports_of_more_cases_show_fewer_bars():
    assert [bars_for(n) for n in (0, 75, 300, 9999)] == [200, 200, 50, 40]


def test_code_beyond_the_limit_is_left_out(tmp_path, monkeypatch):
    folder = laid(tmp_path / "run", made(6), pages=True)
    monkeypatch.setattr(report_data, "MAX_CODE", 1500)
    cases = report_data.report_data(ReportRun.read(folder), pages_root=folder).cases
    assert [bool(c.diff) for c in cases].count(True) == 1
    assert [c.code_left_out for c in cases] == [False, *[True] * 5]


def test_windows_are_in_the_order_of_measurement():
    plain = {"baseline": [1e-6, 4e-6, 6e-6, 7e-6], "optimized": [2e-6, 3e-6, 5e-6, 8e-6]}
    plain |= {"orders": ["ABBA", "BAAB"], "laps": [0.1, 0.2], "dropped": ["hot"]}
    (process,) = thinned([lenient(Timing, {**plain, "dropped_at": [1]})], 40)
    assert process.sides == "boobobbo"
    assert process.us == [1, 2, 3, 4, 5, 6, 7, 8]
    assert process.laps == [1]
    assert process.dropped == [("hot", 1)]
    (process,) = thinned([lenient(Timing, plain)], 40)  # from before places were recorded
    assert process.dropped == [("hot", None)]


def test_samples_of_unknown_order_are_shown_side_by_side():
    (process,) = thinned([Timing(baseline=[1e-6, 2e-6], optimized=[3e-6])], 40)
    assert process.sides == "bo"


@pytest.mark.parametrize("most", [6, 8, 40])
def test_thinning_keeps_whole_blocks_and_the_extremes(most):
    plain = timing((2e-5, 1e-5), blocks=200)
    (process,) = thinned([lenient(Timing, plain)], most)
    assert len(process.us) <= 4 * most
    assert process.shown == sorted(set(process.shown))
    for side, name in (("b", "baseline"), ("o", "optimized")):
        times = [us for us, s in zip(process.us, process.sides, strict=True) if s == side]
        assert len(times) == 2 * len(process.shown)
        for extreme in (min, max):
            assert extreme(times) == pytest.approx(extreme(plain[name]) * 1e6, rel=1e-4)


def test_reports_of_more_cases_show_fewer_blocks():
    assert [blocks_for(n) for n in (0, 300, 2000, 99999)] == [40, 40, 12, 6]


@pytest.mark.parametrize(
    ("speedup", "ticks"),
    [
        ([1.0, 1.05], [1.0, 1.02, 1.04]),
        ([0.9, 1.4], [0.9, 1.0, 1.1, 1.2, 1.3, 1.4]),
        ([1.0, 3.0], [1.0, 1.5, 2.0, 3.0]),
        ([0.5, 30.0], [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]),
        ([0.2, 300.0], [1.0, 10.0, 100.0]),
    ],
)
def test_axis_has_round_ticks(speedup, ticks):
    interval = {"value": speedup[0], "low": speedup[0], "high": speedup[1]}
    axis = Axis.over([lenient(ReportCase, {"speedup": interval})])
    assert axis.ticks() == pytest.approx(ticks)


def test_report_of_300_cases_is_small_and_2000_cases_work(tmp_path):
    folder = laid(tmp_path / "run", made(300), pages=True)
    history = [ReportRun.of(made(300, started=f"2026-11-{day:02}")) for day in range(1, 6)]
    out = report.write_report(ReportRun.read(folder), tmp_path / "report.html", history, folder)
    assert out.stat().st_size < 5e6
    assert len(Parsed(out.read_text()).rows) == 301
    assert len(Parsed(page(made(2000))).rows) == 2001


# The command

LEVELS = [
    {"name": "L1", "working_set": 16384, "bandwidth": 3.1e13, "latency": 2.1e-8},
    {"name": "DRAM", "working_set": 2 << 30, "bandwidth": 4.5e12, "latency": 3.4e-7},
]


def test_command_adds_the_memory_hierarchy_from_a_file(tmp_path):
    folder, file = laid(tmp_path / "run", made(1)), tmp_path / "levels.json"
    file.write_text(json.dumps({"levels": LEVELS, "near": 265, "far": 310}))
    assert app.main(["report", str(folder), f"--hierarchy={file}"]) == 0
    assert data_of((folder / "report.html").read_text())["hierarchy"]["levels"] == LEVELS
    assert app.main(["report", str(folder)]) == 0
    assert data_of((folder / "report.html").read_text())["hierarchy"] is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Input data was truncated"),
        ('{"levels": [], "near": 1, "far": 2}', "it lists no levels"),
        (
            json.dumps({"levels": [LEVELS[0] | {"latency": 0}], "near": 1, "far": 2}),
            "a level has no bandwidth or no latency",
        ),
    ],
)
def test_file_that_is_no_memory_hierarchy_is_refused(tmp_path, text, reason, capsys):
    folder, file = laid(tmp_path / "run", made(1)), tmp_path / "levels.json"
    file.write_text(text)
    assert app.main(["report", str(folder), f"--hierarchy={file}"]) == 2
    assert capsys.readouterr().err == (
        f"{file}: not a memory hierarchy ({reason})\n"
        f"Measure it:\n    aisp machine peak --hierarchy --json > {file}\n"
    )


def test_command_prints_the_path_of_the_report(tmp_path, capsys):
    folder = laid(tmp_path / "run", made(3))
    assert app.main(["report", str(folder), *[f"--history={folder}"] * 2, f"--pages={folder}"]) == 0
    size = (folder / "report.html").stat().st_size / 1e6
    assert capsys.readouterr().out == f"{folder}/report.html: 3 cases, {size:.2f} MB\n"
    assert app.main(["report", str(folder), f"--out={tmp_path}/x.html"]) == 0
    assert (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name *"),
        ("[]", "it lists no cases"),
        ('{"cases": []}', "its schema is None, this version reads 1"),
        ('{"schema": 0, "cases": []}', "its schema is 0, this version reads 1"),
    ],
)
def test_file_that_is_not_a_run_is_refused(tmp_path, text, reason, capsys):
    (tmp_path / "results.json").write_text(text)
    assert app.main(["report", str(tmp_path)]) == 2
    assert fnmatchcase(
        capsys.readouterr().err,
        f"{tmp_path}/results.json: not the results of a run ({reason})\n"
        "Give the folder that a run wrote:\n    pytest --aisp-artifacts=DIR <paths>\n",
    )


def test_results_of_a_newer_version_are_refused(tmp_path, capsys):
    (tmp_path / "results.json").write_text('{"schema": 9, "cases": []}')
    assert app.main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path}/results.json: was written by a newer pytest-aisp"
        " (schema 9; this one reads 1)\n    pip install --upgrade pytest-aisp\n"
    )


def test_killed_run_is_read_from_its_journal(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(Path(__file__).parent / "data" / "run", folder)
    (folder / "results.json").unlink()
    assert len(ReportRun.read(folder).cases) == 6
    load, read = run_reader.load, []
    monkeypatch.setattr(run_reader, "load", lambda path: read.append(path) or load(path))
    assert app.main(["report", str(folder)]) == 0
    assert read == [folder]
    assert (folder / "results.json").exists()
    with pytest.raises(CliError, match="nosuch"):
        ReportRun.read(tmp_path / "nosuch")


def test_error_of_an_unwritable_report_shows_the_option(tmp_path):
    folder = laid(tmp_path / "run", made(1))
    with pytest.raises(CliError) as refused:
        report.report_result(folder, out=tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}: cannot be written ([Errno 21] Is a directory: '{tmp_path}')\n"
        "Name a file that can be written:\n"
        f"    aisp results report {folder} --out=report.html"
    )
