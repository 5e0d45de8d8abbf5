"""Reading and publishing a run: complete, killed, malformed or of another version."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import shutil
from pathlib import Path

import jsonschema
import msgspec
import pytest

from pytest_aisp.results import export, results_json, run_reader
from pytest_aisp.results.artifacts import Artifacts, publish, stamped
from pytest_aisp.results.messages import TimeTask
from pytest_aisp.results.results_json import Manifest, StoredPeaks
from pytest_aisp.results.row import Row
from pytest_aisp.worker.client import ReplayError, ReplayWorker

DATA = Path(__file__).parent / "data" / "run"
ODD = "ch99/a_test.py::test_f[é/..\\|<b>\n\"',;= ☃" + "x" * 300 + "]"
MANIFEST = {"version": "0", "started": "2026-01-01T00:00:00+00:00", "mode": "measure", "root": ""}
MANIFEST |= {"workload": {}, "options": {}, "python": "", "pytest": "", "platform": ""}
MANIFEST |= {"packages": {}, "git": None, "environment": {}, "peaks": {}}
MANIFEST["machine"] = {"name": "a GPU", "product": "a-gpu", "arch": "sm90", "gpus": ["GPU-1"]}
MANIFEST["machine"] |= {"versions": {}, "facts": {}, "clocks": {}}
MANIFEST |= {"complete": False, "invalid": []}


def row(nodeid="ch99/a_test.py::test_f[v]", **changes):
    """Return the row of a case that was timed twice as fast."""
    key = nodeid.rpartition("/")[2] if nodeid != ODD else nodeid
    names = {"nodeid": nodeid, "key": key, "file": "baselines/a-gpu/ch99.json"}
    facts = {"page": "ch99/a_test.py", "function": "test_f", "variant": "v", "size": {"n": 1}}
    facts |= {"bound": "dram", "product": "a-gpu", "arch": "sm90", "verdict": "pass"}
    facts |= {"value": 0.7, "low": 0.69, "high": 0.71, "clock": "graph", "spread": 0.002}
    facts |= {"seconds": {"slow": 2e-5, "v": 1e-5}, "timings": [{"value": 0.7}]}
    return Row(**{**names, **facts, **changes})


@pytest.fixture
def write(tmp_path):
    """Write a run of these rows that was killed after the last one, and return its artifacts."""

    def write(*rows, folder=tmp_path / "run"):
        artifacts = Artifacts(folder)
        artifacts.start(msgspec.convert(MANIFEST, Manifest))
        for one in rows:
            artifacts.add(one)
        return artifacts

    return write


def refusal(folder):
    with pytest.raises(run_reader.RunError) as refused:
        run_reader.load(folder)
    return str(refused.value).replace(str(folder), "RUN")


# The schema


def strict(schema):
    """Return the schema with no more fields than it lists."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return {**{key: strict(value) for key, value in schema.items()}, **closed}


def test_the_schema_lists_every_field_of_a_run_and_no_others():
    jsonschema.Draft202012Validator.check_schema(results_json.schema())
    loaded = run_reader.load(DATA).plain()
    jsonschema.validate(loaded, strict(results_json.schema()))
    assert json.loads((DATA / "results.json").read_text()) == loaded


def test_the_committed_schema_is_the_models_own():
    file = Path(results_json.__file__).with_name("results-1.schema.json")
    generated = json.dumps(results_json.schema(), indent=2) + "\n"
    assert file.read_text() == generated, f"python -m pytest_aisp.results.results_json > {file}"


def test_a_case_without_its_verdict_is_not_valid():
    loaded = run_reader.load(DATA).plain()
    del loaded["cases"][0]["verdict"]
    with pytest.raises(jsonschema.ValidationError, match="'verdict' is a required property"):
        jsonschema.validate(loaded, results_json.schema())


def test_a_case_names_its_limits_and_where_they_are_written():
    cases = {case["page"].partition("/")[2]: case for case in run_reader.load(DATA).cases}
    kept, missed, wrong = (cases[f"{name}_test.py"] for name in ("kept", "missed", "wrong"))
    assert kept["claim"] == {"at_least": 1.5, "from": "at_least['sm90'] on the page"}
    assert kept["stored"] == {
        "speedup": pytest.approx(1.999, abs=1e-3),
        "from": "baselines/simulated-gpu/ch07.json",
    }
    assert kept["limit"]["from"] == "baselines/simulated-gpu/peaks.json"
    assert kept["speedup"]["low"] < kept["speedup"]["value"] < kept["speedup"]["high"]
    assert len(missed["votes"]) == 3
    assert wrong["speedup"] is wrong["seconds"] is wrong["limit"] is None
    assert cases["blackwell_test.py"]["not_timed"].startswith("needs tcgen05 (sm100, sm103); ")
    regressed = cases["regressed_test.py"]
    assert regressed["claim"]["from"] == "at_least of doubled on the page"
    assert cases["neutral_test.py"]["goals"]["memory"]["limit"] == 1.0


# Loading


def test_a_killed_run_keeps_what_it_had(write):
    artifacts = write(row(), row("ch99/a_test.py::test_f[w]"))
    whole = artifacts.path.read_bytes()
    artifacts.path.write_bytes(whole[:-99])
    artifacts.canaries.write_text('{"ca')
    run = run_reader.load(artifacts.folder)
    assert (run.manifest.complete, run.manifest.ended) == (False, None)
    assert [case["id"] for case in run.cases] == ["ch99/a_test.py::test_f[v]"]
    assert run.samples(run.cases[0])["timings"] == [{"value": 0.7}]
    assert run.lost == (
        "results.jsonl: its last line, of ch99/a_test.py::test_f[w], is incomplete and was left"
        " out",
        "canaries.jsonl: its last line is incomplete and was left out",
    )
    artifacts.path.write_bytes(whole[:20])
    assert run_reader.load(artifacts.folder).cases == []


def test_a_finished_run_is_complete_and_published(write):
    artifacts = write(row())
    artifacts.finish({"exit_code": 1, "invalid": ["moved"]}, {"a-gpu": StoredPeaks()})
    assert artifacts.error is None
    said = json.loads((artifacts.folder / "results.json").read_text())
    assert said == run_reader.load(artifacts.folder).plain()
    ended = said["run"]
    assert (ended["complete"], ended["exit_code"], ended["invalid"]) == (True, 1, ["moved"])
    assert ended["peaks"] == {"a-gpu": {"rates": {}, "facts": {}, "from": ""}}
    assert ended["ended"] > ended["started"]


def test_a_new_run_replaces_an_old_one_and_nothing_else(write):
    first = write(row(), row("ch99/a_test.py::test_f[w]"))
    first.finish({}, {})
    mine = first.folder / "samples" / "notes.json"
    mine.write_text("mine")
    again = write(row())
    assert sorted(file.name for file in mine.parent.iterdir()) == [
        "0001-ch99_a_test.py__test_f_v_.json",
        "notes.json",
    ]
    assert not (again.folder / "results.json").exists()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (shutil.rmtree, "RUN: there is no such folder\nTo make pytest write a run:"),
        (
            lambda run: (run / "manifest.json").unlink(),
            "RUN: holds no run: it has no manifest.json\nTo make pytest write a run:",
        ),
        (
            lambda run: (run / "manifest.json").write_text('{"name": "a web application"}'),
            "RUN/manifest.json: was not written by pytest-aisp: it lacks root\nTo make",
        ),
        (
            lambda run: (run / "manifest.json").write_text("[]"),
            "RUN/manifest.json: was not written by pytest-aisp: one of its lines is not a"
            " JSON object: []",
        ),
        (
            lambda run: (run / "manifest.json").write_text('{"root": "", "schema": 2}'),
            "RUN/manifest.json: was written by a newer pytest-aisp (schema 2; this one reads 1)\n"
            "    pip install --upgrade pytest-aisp",
        ),
        (
            lambda run: (run / "manifest.json").write_text('{"root": "", "schema": 1}'),
            "RUN/manifest.json: lacks complete, git, invalid, machine, peaks, started\nMeasure",
        ),
        (
            lambda run: (run / "results.jsonl").unlink(),
            "RUN/results.jsonl: cannot be read: No such file or directory\nTo make pytest",
        ),
        (
            lambda run: (run / "results.jsonl").write_text('{"nodeid": "a", "timings": []}\n'),
            "RUN/results.jsonl: was written by an older pytest-aisp (schema 0; this one reads 1)\n"
            "Measure again:\n    pytest --aisp-artifacts=DIR",
        ),
        (
            lambda run: (run / "results.jsonl").write_text('{"nodeid": "a", "schema": 2}\n'),
            "RUN/results.jsonl: was written by a newer pytest-aisp (schema 2; this one reads 1)",
        ),
        (
            lambda run: (run / "results.jsonl").write_text('{"nodeid": "a", "schema": 1}\n'),
            "RUN/results.jsonl: lacks bound, file, function, key, page, samples,",
        ),
        (
            lambda run: (run / "results.jsonl").write_bytes(b"\xff\xfe\n"),
            "RUN/results.jsonl: was not written by pytest-aisp: 'utf-8' codec can't decode",
        ),
    ],
)
def test_an_unreadable_run_is_refused_with_a_command_to_type(write, spoil, says):
    folder = write(row()).folder
    spoil(folder)
    assert refusal(folder).startswith(says)


def change_line(**fields):
    """Return what replaces fields of the only line of a journal; `...` removes one."""

    def change(run):
        [line] = map(json.loads, (run / "results.jsonl").read_text().splitlines())
        line = {name: value for name, value in {**line, **fields}.items() if value is not ...}
        (run / "results.jsonl").write_text(json.dumps(line) + "\n")

    return change


def change_manifest(**fields):
    """Return what replaces fields of a manifest; `...` removes one."""

    def change(run):
        manifest = {**json.loads((run / "manifest.json").read_text()), **fields}
        manifest = {name: value for name, value in manifest.items() if value is not ...}
        (run / "manifest.json").write_text(json.dumps(manifest))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            change_line(wall="long"),
            "results.jsonl: was not written by pytest-aisp: Expected `float`",
        ),
        (change_line(reasons="slow"), "Expected `array`, got `str` - at `$[0].reasons`"),
        (change_line(seconds={"v": "1"}), "Expected `float`, got `str` - at `$[0].seconds[...]`"),
        (change_line(key=...), "results.jsonl: lacks key\nMeasure again:"),
        (
            change_line(goals={"watts": {"baseline": 1, "optimized": 1}}),
            "results.jsonl: was not written by pytest-aisp: goals={'watts': {'baseline': 1,"
            " 'optimized': 1}} must be by memory or reserved or fragmentation or launches or energy"
            " or goodput, amounts of baseline and optimized, and noise and processes\n"
            "To make pytest write a run:\n    pytest --aisp-artifacts=DIR",
        ),
        (
            change_line(goals={"memory": {"optimized": 1}}),
            "goals={'memory': {'optimized': 1}} must be by memory or reserved",
        ),
        (change_manifest(complete="yes"), "Expected `bool`, got `str` - at `$.complete`"),
        (change_manifest(machine={}), "Object missing required field `arch` - at `$.machine`"),
        (change_manifest(peaks=...), "manifest.json: lacks peaks\nMeasure again:"),
        (
            lambda run: (run / "canaries.jsonl").write_text('{"wrong": 3}\n'),
            "canaries.jsonl: was not written by pytest-aisp: Expected `str`, got `int`",
        ),
    ],
)
def test_a_field_of_a_wrong_type_or_a_missing_one_is_named(write, change, says):
    folder = write(row()).folder
    change(folder)
    assert says in refusal(folder)


def test_fields_that_older_versions_did_not_write_have_defaults(write):
    folder = write(row()).folder
    change_line(gpus=..., remarks=..., profile=..., verdict=...)(folder)
    change_manifest(version=..., no_canary=..., exit_code=...)(folder)
    (folder / "canaries.jsonl").write_text('{"case": "v", "clock": "graph"}\n')
    run = run_reader.load(folder)
    assert (run.lines[0].gpus, run.lines[0].verdict, run.manifest.exit_code) == (1, "", None)
    assert run.canaries[0].wrong == ""
    assert "version" not in run.plain()["run"]


def test_fields_of_newer_versions_are_ignored_or_published_as_they_are(write):
    folder = write(row()).folder
    change_line(color="red")(folder)
    change_manifest(color="red")(folder)
    (folder / "canaries.jsonl").write_text('{"case": "v", "clock": "graph", "color": "red"}\n')
    run = run_reader.load(folder)
    assert "color" not in run.cases[0]
    assert run.plain()["run"]["color"] == run.plain()["canaries"][0]["color"] == "red"


def test_an_old_recording_without_a_manifest_is_called_old(write):
    folder = write(row()).folder
    (folder / "manifest.json").unlink()
    (folder / "results.jsonl").write_text('{"nodeid": "a", "timings": []}\n')
    assert "was written by an older pytest-aisp (schema 0; this one reads 1)" in refusal(folder)


def test_the_guides_python_reads_a_run(tmp_path, monkeypatch, capsys):
    guide = (Path(__file__).parents[1] / "docs/reference/results.md").read_text()
    shutil.copytree(DATA, tmp_path / "artifacts" / "latest")
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", guide, re.DOTALL)[1], {})
    assert "ch07/missed_test.py::test_doubling[doubled-n1001] fail 2.00" in capsys.readouterr().out


# Samples


def test_odd_case_ids_get_distinct_plain_file_names(write):
    artifacts = write(row(ODD), row(ODD.replace("é", "à"), timings=[{"value": 0.1}]))
    files = sorted(file.name for file in (artifacts.folder / "samples").iterdir())
    assert len(files) == 2
    assert all(run_reader.OURS.fullmatch(name) and len(name) < 120 for name in files)
    run = run_reader.load(artifacts.folder)
    assert [case["id"] for case in run.cases] == [ODD, ODD.replace("é", "à")]
    assert [row.timings[0]["value"] for row in run.rows()] == [0.7, 0.1]


@pytest.fixture
def replayed(write):
    """Ask a recording of one case for its timing, and return the answer."""

    def replayed(spoil):
        artifacts = write(row())
        [file] = (artifacts.folder / "samples").iterdir()
        spoil(artifacts.folder, file)
        task = TimeTask(page="ch99/a_test.py", function="test_f", case="v")
        return ReplayWorker(artifacts.path).ask(task, 1.0, print)

    return replayed


def test_recorded_samples_answer_a_task(replayed):
    assert replayed(lambda folder, file: None).result == {"value": 0.7}


def test_missing_samples_are_an_error(replayed):
    found = replayed(lambda folder, file: file.unlink())
    assert found.error == "page"
    assert found.message.startswith("the recording cannot be judged again: ")
    assert found.message.endswith(
        "0001-ch99_a_test.py__test_f_v_.json: its samples are missing: No such file or directory\n"
        "Copy the whole folder of the run, including samples/"
    )


def test_changed_samples_are_refused(replayed):
    found = replayed(lambda folder, file: file.write_text('{"timings": [{"value": 9}]}'))
    assert "the run wrote other samples: SHA-256 " in found.message
    assert found.message.endswith("Copy the folder of the run again")


def test_samples_outside_the_folder_are_refused(replayed, tmp_path):
    (tmp_path / "secret.json").write_text("{}")

    def spoil(folder, file):
        text = (folder / "results.jsonl").read_text()
        (folder / "results.jsonl").write_text(
            text.replace(f"samples/{file.name}", "../secret.json")
        )

    assert "../secret.json: samples lie below their run's folder" in replayed(spoil).message


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"checks": [], "timings": [{"va', "Unterminated string starting at: line 1 column 29"),
        ("[]", "Expected `object`, got `array`"),
        ('{"checks": [], "against": []}', "Object missing required field `timings`"),
        (
            '{"checks": [], "timings": 3, "against": []}',
            "Expected `array`, got `int` - at `$.timings`",
        ),
    ],
)
def test_malformed_samples_are_refused_with_a_command_to_type(write, text, cause):
    artifacts = write(row())
    [file] = (artifacts.folder / "samples").iterdir()
    file.write_text(text)
    samples = {"path": f"samples/{file.name}", "sha256": hashlib.sha256(text.encode()).hexdigest()}
    change_line(samples=samples)(artifacts.folder)
    with pytest.raises(run_reader.RunError) as refused:
        list(run_reader.load(artifacts.folder).rows())
    task = TimeTask(page="ch99/a_test.py", function="test_f", case="v")
    answer = ReplayWorker(artifacts.path).ask(task, 1.0, print)
    assert answer.error == "page"
    for message in (str(refused.value), answer.message):
        assert f"{file}: was not written by pytest-aisp: {cause}" in message
        assert message.endswith("\nMeasure again:\n    pytest --aisp-artifacts=DIR")


def test_samples_that_were_not_written_are_none(write, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_reader, "write", full)
    run = run_reader.load(write(row()).folder)
    assert run.cases[0]["samples"] is None
    with pytest.raises(run_reader.RunError, match="its samples could not be written"):
        run.samples(run.cases[0])


def test_a_recording_of_an_older_version_is_refused(tmp_path):
    old = tmp_path / "results.jsonl"
    old.write_text('{"nodeid": "a", "key": "a", "timings": []}\n')
    with pytest.raises(ReplayError, match=r"by an older pytest-aisp \(schema 0; this"):
        ReplayWorker(tmp_path)


# Folders named after the moment


def test_latest_points_at_the_newest_run(tmp_path):
    first, second = stamped(tmp_path / "made"), stamped(tmp_path / "made")
    assert first != second  # although within one second
    latest = tmp_path / "made" / "latest"
    assert latest.is_symlink()
    assert latest.resolve() == second
    assert sorted(path.name for path in latest.parent.iterdir()) == sorted(
        [first.name, second.name, "latest"]
    )


def test_without_symlinks_latest_is_a_file_with_the_name(tmp_path, write, monkeypatch):
    def no_links(*args, **how):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("os.symlink", no_links)
    stamped(tmp_path)
    folder = stamped(tmp_path)
    write(row(), folder=folder)
    assert (tmp_path / "latest").read_text() == f"{folder.name}\n"
    assert run_reader.load(tmp_path / "latest").path == folder
    [found] = ReplayWorker(tmp_path / "latest").rows.values()
    assert found.nodeid == "ch99/a_test.py::test_f[v]"


def test_a_folder_named_latest_is_left_alone(tmp_path):
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine").touch()
    with pytest.raises(OSError, match="latest is a folder; it has to be a link to the newest run"):
        stamped(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["latest", "mine"]


# Tables


def markdown(run):
    return export.markdown(run.manifest, run.typed_cases())


def test_the_table_lists_red_cases_first_with_reasons():
    text = markdown(run_reader.load(DATA))
    lines = text.splitlines()
    assert lines[0] == (
        "**1 fail, 1 regressed, 1 wrong, 1 new, 1 pass, 1 checked** on simulated-gpu,"
        " 2026-11-22T11:26:05+00:00 at 18375ef815b4 with uncommitted changes"
    )
    verdicts = [line.split(" | ")[0].strip("| ") for line in lines[4:]]
    assert verdicts == ["**fail**", "**regressed**", "**wrong**", "new", "pass", "checked"]
    assert "2.445x | 2.0" in lines[5]
    assert lines[9].endswith("| needs tcgen05 (sm100, sm103); this GPU is sm90 (simulated-gpu) |")


def test_a_killed_or_invalid_run_is_marked_above_the_table(write):
    run = run_reader.load(write().folder)
    run.manifest.invalid = ["RUN INVALID (environment moved)"]
    text = markdown(run)
    assert text.startswith(
        "**no cases** on a GPU, 2026-01-01T00:00:00+00:00; the run did not finish"
    )
    assert "**Invalid**: RUN INVALID (environment moved)" in text


def test_odd_characters_stay_in_their_cells(write):
    run = run_reader.load(write(row(ODD, variant="a|b\n<i>", reasons=["x\n| y"])).folder)
    [line] = [ln for ln in markdown(run).splitlines() if ln.startswith("| pass")]
    assert "| a\\|b &lt;i>, n=1 |" in line
    assert line.endswith("| x \\| y |")
    [flat] = csv.DictReader(io.StringIO(export.csv_text(run.typed_cases())))
    assert (flat["id"], flat["reasons"]) == (ODD, "x\n| y")


def test_two_thousand_cases_are_read_and_written(write, tmp_path):
    [line] = map(json.loads, write(row()).path.read_text().splitlines())
    many = [{**line, "nodeid": f"a::{n}", "key": f"{n}"} for n in range(2000)]
    text = "".join(f"{json.dumps(one)}\n" for one in many)
    (tmp_path / "run" / "results.jsonl").write_text(text)
    publish(run_reader.load(tmp_path / "run"))
    assert len((tmp_path / "run" / "results.md").read_text().splitlines()) == 2004
    rows = csv.DictReader(io.StringIO((tmp_path / "run" / "results.csv").read_text()))
    assert [r["speedup"][:5] for r in rows] == ["2.013"] * 2000
