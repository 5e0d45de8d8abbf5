"""The report as a file: complete without scripts, closed to what a case is called, small."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_runs import case, laid, made, timing

from pytest_aisp.cli import app
from pytest_aisp.report import data as report_data
from pytest_aisp.report import write as report
from pytest_aisp.report.html import Axis
from pytest_aisp.report.run import ReportRun, blocks_for, embedded
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


class Seen(HTMLParser):
    """What a browser without scripts reads: elements, and the text of the table's cells."""

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
    return report.html(
        report_data.report_data(ReportRun.of(results), [ReportRun.of(h) for h in history])
    )


def data_of(html):
    return json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])


def with_cases(*cases, **run):
    return {**made(0, **run), "cases": list(cases)}


def test_every_verdict_has_its_place_the_red_ones_first():
    assert set(report_data.ORDER) == {*ORDER, ""}
    assert set(report_data.ORDER[: len(RED)]) == set(RED)


def test_the_table_is_complete_without_scripts():
    results = made(26)
    rows = Seen(page(results)).rows[1:]
    assert len(rows) == 26
    for one, told in zip(data_of(page(results))["cases"], rows, strict=True):
        assert one["verdict"] in told
        assert one["variant"] in told
        assert f"n {one['size']['n']}" in told
        if "speedup" in one:
            assert f"{one['speedup'][0]:.3f}"[:4] in told
            assert one["bound"] in told
        else:
            assert "needs tcgen05" in told


def test_red_cases_stand_first_with_their_reason():
    cases = [case(0, verdict=v, reasons=[f"why {v}"]) for v in ("pass", "fail", "new", "wrong")]
    rows = Seen(page(with_cases(*cases))).rows[1:]
    assert [row.split()[0] for row in rows[:2]] == ["wrong", "fail"]
    assert "why wrong" in rows[0]
    assert all("why" not in row for row in rows[2:])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_case_may_be_called_anything(name, tmp_path):
    fields = ("page", "function", "variant", "baseline", "bound", "product", "chapter")
    one = case(4, id=f"x::{name}", **dict.fromkeys(fields, name), size={name: name})
    one |= {"reasons": [name], "notes": [name], "goals": {name: {"baseline": 1, "optimized": 1}}}
    one |= {"profile": {"tool": name, "files": [name]}}
    results = with_cases(one, invalid=[name], branch=name, mode=name)
    results["run"]["machine"]["name"] = name
    out = report.write(ReportRun.of(results, tmp_path), tmp_path / "report.html")
    html = out.read_text(encoding="utf-8")
    clean = name.replace("\ud800", "?")
    assert data_of(html)["cases"][0]["id"] == f"x::{clean}"
    plain = page(with_cases(case(4), invalid=["x"]))
    assert Seen(html).tags.count("script") == Seen(plain).tags.count("script") == 2
    assert Seen(html).tags.count("img") == 0
    assert clean.split()[0] in " ".join(Seen(html).rows)


def test_the_policy_names_the_scripts_that_are_there_and_nothing_else():
    html = page(made(3))
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', html)[1]
    script = re.search(r"</script>\n<script>(.*?)</script>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_nothing_is_loaded_from_elsewhere():
    html = page(made(13))
    assert {link[0] for link in Seen(html).links} == {"#", "d"}  # "data:,", the icon
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style


def test_only_what_is_named_is_taken_of_a_manifest():
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
    ("told", "words"),
    [
        ({"invalid": ["environment moved"]}, "This run is invalid: none of its verdicts counts."),
        ({"complete": False}, "This run did not end by itself: what it had finished is here."),
        ({"not_written": ["disk full"]}, "Something of this run is missing."),
        ({"no_verdict": ["a case"]}, "Cases without a verdict: their worker died."),
        ({"no_canary": ["worker 'gw0': a case"]}, "Verdicts without a canary: their worker ended"),
    ],
)
def test_what_is_wrong_with_a_run_is_said_before_any_number(told, words):
    html = page(made(3, **told))
    assert html.index(words) < html.index('id="tally"')
    assert all(line in html for lines in told.values() if lines for line in lines)
    assert words not in page(made(3))


def test_a_run_without_a_case_is_a_page_too():
    assert "No case ran." in page(made(0))


def test_a_partial_case_is_shown_with_what_it_has():
    html = page(with_cases({"id": "a_test.py::test_a[b]"}, {"no": "id"}, "nothing"))
    assert len(Seen(html).rows) == 2
    assert "a_test.py::test_a[b]" in html


def test_numbers_that_json_lacks_are_left_out():
    one = case(0, spread=math.nan, wall=math.inf, speedup={"value": math.nan, "low": 1, "high": 2})
    found = data_of(page(with_cases(one)))["cases"][0]
    assert not {"spread", "wall", "speedup"} & found.keys()


def test_a_word_in_a_number_s_place_is_left_out():
    one = case(0, speedup={"value": "2", "low": -1, "high": 2}, limit="copy", work=None, votes=3)
    one |= {"claim": "1.5", "stored": 2, "seconds": {"baseline": "fast"}, "profile": "there"}
    found = data_of(page(with_cases(one)))["cases"][0]
    assert not {"speedup", "seconds", "votes", "work"} & found.keys()


def wrong_samples(run):
    """Return what the report says of its cases' samples, none of which it shows."""
    cases = report_data.report_data(run)["cases"]
    assert not any("samples" in case for case in cases)
    return [case.get("samples_wrong") for case in cases]


def test_samples_that_are_missing_or_others_are_said(tmp_path):
    folder = laid(tmp_path / "run", made(3))
    there = folder / "samples"
    (there / "0000.json").unlink()
    (there / "0001.json").write_bytes((there / "0002.json").read_bytes())
    (there / "0002.json").write_text('{"timings": [')
    missing, foreign, torn = wrong_samples(ReportRun.read(folder))
    assert missing == (
        "samples/0000.json: its samples are missing: No such file or directory."
        " Copy the whole folder of the run, samples/ too."
    )
    for name, said in (("0001", foreign), ("0002", torn)):
        sha256 = ReportRun.read(folder).cases[int(name)]["samples"]["sha256"]
        found = hashlib.sha256((there / f"{name}.json").read_bytes()).hexdigest()
        assert said == (
            f"samples/{name}.json: these are not the samples that the run has written: SHA-256"
            f" {found[:12]}..., not {sha256[:12]}.... Copy the folder of the run again."
        )


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{"timings": [{"baseline": ["x"]}, 3]}', None),
        ('{"timings": 3}', "samples/0000.json: holds no samples."),
        ("3", "samples/0000.json: holds no samples."),
        ("{", "samples/0000.json: holds no samples."),
    ],
)
def test_a_file_that_holds_something_else_shows_nothing(tmp_path, text, wrong):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "0000.json").write_text(text)
    at = {"path": "samples/0000.json", "sha256": hashlib.sha256(text.encode()).hexdigest()}
    assert wrong_samples(ReportRun.of(with_cases(case(0, samples=at)), tmp_path)) == [wrong]


def test_of_what_was_timed_it_is_said_that_its_samples_were_not_kept():
    timed, untimed = case(0, samples=None), case(1, samples=None, speedup=None, seconds=None)
    said = ["its samples were not written: the disk refused them.", None]
    assert wrong_samples(ReportRun.of(with_cases(timed, untimed))) == said


def test_samples_are_looked_for_only_where_a_run_puts_them(tmp_path):
    unnamed = "the run does not say in which file its samples are."
    for at in ("samples/0000.json", {"path": "samples/0000.json"}, {"path": 3, "sha256": ""}, []):
        assert wrong_samples(ReportRun.of(with_cases(case(0, samples=at)), tmp_path)) == [unnamed]
    outside = with_cases(case(0, samples={"path": "../x.json", "sha256": "0"}))
    (said,) = wrong_samples(ReportRun.of(outside, tmp_path))
    assert said == "../x.json: samples lie below their run's folder, in samples/."
    assert wrong_samples(ReportRun.of(outside)) == [
        "its samples are not here, the results alone are."
    ]


def test_the_history_of_a_case_is_its_own_product_s():
    runs = [made(4, started=f"2026-11-{day:02}T00:00:00+00:00") for day in (3, 1)]
    other = made(4, started="2026-11-02T00:00:00+00:00")
    other["cases"] = [{**c, "product": "nvidia-b200"} for c in other["cases"]]
    found = data_of(page(made(4), *runs, other))["cases"][0]["history"]
    assert [(entry[0][:10], entry[-1]) for entry in found] == [
        ("2026-11-01", False),
        ("2026-11-03", False),
        ("2026-11-22", True),
    ]
    assert "history" not in data_of(page(made(4)))["cases"][0]


def test_code_is_read_from_the_page_and_links_lead_from_where_the_report_is(tmp_path):
    folder = laid(tmp_path / "run", made(3), pages=True)
    out = tmp_path / "elsewhere" / "report.html"
    out.parent.mkdir()
    found = data_of(report.write(ReportRun.read(folder), out, pages_root=folder).read_text())
    one = found["cases"][0]
    assert found["pages"][one["page"]]["title"] == "Doubling: one read instead of two."
    assert "+def doubled(x):" in one["diff"]
    assert set(found["pages"][one["page"]]["sides"]) == {"added", "doubled"}
    assert one["profile"]["files"] == ["../run/profile/a b#1.json"]
    assert one["command"] == f"pytest '{one['id']}'"


def test_the_code_of_the_first_cases_has_room(tmp_path, monkeypatch):
    folder = laid(tmp_path / "run", made(6), pages=True)
    monkeypatch.setattr(report_data, "CODE", 1500)
    cases = report_data.report_data(ReportRun.read(folder), pages_root=folder)["cases"]
    assert [bool(c.get("diff")) for c in cases].count(True) == 1
    assert [c.get("code_left_out", False) for c in cases] == [False, *[True] * 5]


def test_windows_are_in_the_order_in_which_they_ran():
    told = {"baseline": [1e-6, 4e-6, 6e-6, 7e-6], "optimized": [2e-6, 3e-6, 5e-6, 8e-6]}
    told |= {"orders": ["ABBA", "BAAB"], "laps": [0.1, 0.2], "dropped": ["hot"]}
    (found,) = embedded([{**told, "dropped_at": [1]}], 40)
    assert found["sides"] == "boobobbo"
    assert found["us"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found["laps"] == [1]
    assert found["dropped"] == [["hot", 1]]
    (found,) = embedded([told], 40)  # as it was recorded before places were
    assert found["dropped"] == [["hot", None]]


def test_samples_without_a_known_order_are_shown_side_by_side():
    (found,) = embedded([{"baseline": [1e-6, 2e-6], "optimized": [3e-6]}], 40)
    assert found["sides"] == "bo"


@pytest.mark.parametrize("most", [6, 8, 40])
def test_of_many_windows_whole_blocks_are_kept_the_extremes_among_them(most):
    told = timing((2e-5, 1e-5), blocks=200)
    (found,) = embedded([told], most)
    assert len(found["us"]) <= 4 * most
    assert found["kept"] == sorted(set(found["kept"]))
    for side, name in (("b", "baseline"), ("o", "optimized")):
        own = [us for us, s in zip(found["us"], found["sides"], strict=True) if s == side]
        assert len(own) == 2 * len(found["kept"])
        for end in (min, max):
            assert end(own) == pytest.approx(end(told[name]) * 1e6, rel=1e-4)


def test_more_cases_have_fewer_blocks():
    assert [blocks_for(n) for n in (0, 300, 2000, 99999)] == [40, 40, 12, 6]


@pytest.mark.parametrize(
    ("seen", "ticks"),
    [
        ([1.0, 1.05], [1.0, 1.02, 1.04]),
        ([0.9, 1.4], [0.9, 1.0, 1.1, 1.2, 1.3, 1.4]),
        ([1.0, 3.0], [1.0, 1.5, 2.0, 3.0]),
        ([0.5, 30.0], [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]),
        ([0.2, 300.0], [1.0, 10.0, 100.0]),
    ],
)
def test_the_axis_has_round_ticks(seen, ticks):
    axis = Axis.over([{"speedup": seen}])
    assert axis.ticks() == pytest.approx(ticks)


def test_300_cases_are_small_and_2000_still_a_page(tmp_path):
    folder = laid(tmp_path / "run", made(300), pages=True)
    history = [ReportRun.of(made(300, started=f"2026-11-{day:02}")) for day in range(1, 6)]
    out = report.write(ReportRun.read(folder), tmp_path / "report.html", history, folder)
    assert out.stat().st_size < 5e6
    assert len(Seen(out.read_text()).rows) == 301
    assert len(Seen(page(made(2000))).rows) == 2001


# The command


def test_the_command_says_where_the_report_is(tmp_path, capsys):
    folder = laid(tmp_path / "run", made(3))
    assert app.main(["report", str(folder), *[f"--history={folder}"] * 2, f"--pages={folder}"]) == 0
    size = (folder / "report.html").stat().st_size / 1e6
    assert capsys.readouterr().out == f"{folder}/report.html: 3 cases, {size:.2f} MB\n"
    assert app.main(["report", str(folder), f"--out={tmp_path}/x.html"]) == 0
    assert (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name *"),
        ("[]", "it lists no cases"),
        ('{"cases": []}', "its schema is None, understood is 1"),
        ('{"schema": 9, "cases": []}', "its schema is 9, understood is 1"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, text, why, capsys):
    (tmp_path / "results.json").write_text(text)
    assert app.main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    found = re.match(
        rf"{tmp_path}/results.json: not the results of a run \((.*)\)\n(.*)", said, re.S
    )
    assert re.fullmatch(re.escape(why).replace(r"\*", ".*"), found[1])
    assert found[2] == (
        "Give the folder that a run wrote:\n    pytest --aisp-artifacts=DIR <paths>\n"
    )


def test_a_killed_run_is_read_from_its_journal(tmp_path, monkeypatch):
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


def test_a_report_that_cannot_be_written_says_how_to_name_another(tmp_path):
    folder = laid(tmp_path / "run", made(1))
    with pytest.raises(CliError) as refused:
        report.report_result(folder, out=tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}: cannot be written ([Errno 21] Is a directory: '{tmp_path}')\n"
        "Name a file that can:\n"
        f"    aisp results report {folder} --out=report.html"
    )
