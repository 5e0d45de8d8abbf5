"""`aisp results compare`: metrics with direction and noise, the worst change first."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from pytest_aisp.cli import app
from pytest_aisp.results import diff, run_reader, store
from pytest_aisp.results.artifacts import Artifacts
from pytest_aisp.results.diff import Measured
from pytest_aisp.results.models import Result, Stored
from pytest_aisp.results.row import Row
from pytest_aisp.tools import compare_results
from pytest_aisp.util.cli_result import CliError

DATA = Path(__file__).parent / "data" / "run"
CASE = Measured(
    product="a-gpu",
    chapter="ch01",
    key="a_test.py::test_a[v-n1]",
    clock="graph",
    value=math.log(2.0),
    seconds={"baseline": 2e-5, "optimized": 1e-5},
    share=0.9,
    limit="copy",
    goals={"memory": {"baseline": 8 << 20, "optimized": 4 << 20}},
    spread=0.001,
    session=0.002,
    verdict="pass",
)


def outcomes(new, old=CASE):
    """Return the outcome of each metric."""
    found = diff.compare([old], [new])
    return {change.metric: change.outcome for change in found.changes}


def test_results_without_times_are_compared_by_their_metrics():
    sides = {"baseline": "0a", "optimized": "1b"}

    def stored(count):
        goals = {"memory": {"baseline": 8 << 20, "optimized": count << 20}}
        result = Result(environments=("one",), sources=sides, goals=goals)
        kept = Stored("a-gpu", {"one": {}}, {CASE.key: result})
        return list(diff.of_stored(kept, "ch01"))

    found = diff.compare(stored(4), stored(6))
    assert {c.metric: c.outcome for c in found.changes} == {
        "memory, baseline": "same",
        "memory, optimized": "worse",
    }
    assert found.apart == ()
    [(_, why)] = diff.compare([CASE], stored(4)).apart
    assert why == "not timed in NEW"


def test_every_metric_has_its_direction():
    found = diff.compare([CASE], [CASE])
    assert {change.metric: change.better for change in found.changes} == {
        "speedup": "higher",
        "baseline time": "lower",
        "optimized time": "lower",
        "share of copy": "higher",
        "memory, baseline": "lower",
        "memory, optimized": "lower",
    }
    assert (found.count("worse"), found.count("better"), found.count("same")) == (0, 0, 6)


def test_a_slower_optimized_side_is_worse_in_speedup_time_and_share():
    slower = {"baseline": 2e-5, "optimized": 1.1e-5}
    new = replace(CASE, value=math.log(2 / 1.1), seconds=slower, share=0.9 / 1.1)
    assert outcomes(new) == {
        "speedup": "worse",
        "optimized time": "worse",
        "share of copy": "worse",
        "baseline time": "same",
        "memory, baseline": "same",
        "memory, optimized": "same",
    }
    assert next(iter(outcomes(new))) == "speedup"  # it has the least noise
    back = outcomes(CASE, old=new)
    assert [back[name] for name in ("speedup", "optimized time")] == ["better", "better"]


@pytest.mark.parametrize(("loss", "outcome"), [(0.022, "same"), (0.0235, "worse")])
def test_the_noise_of_a_speedup_is_the_gates_margin(loss, outcome):
    margin = 10 * math.hypot(0.001, 0.002)
    assert diff.margin(CASE, CASE) == pytest.approx(margin, abs=1e-4)
    new = replace(CASE, value=CASE.value - loss)
    assert outcomes(new)["speedup"] == outcome
    [speedup] = [c for c in diff.compare([CASE], [new]).changes if c.metric == "speedup"]
    assert speedup.noise == pytest.approx(math.expm1(margin), abs=1e-4)
    assert speedup.change == pytest.approx(math.expm1(-loss))


def test_the_noisier_side_sets_the_margin():
    noisy = replace(CASE, spread=0.004)
    assert diff.margin(CASE, noisy) == diff.margin(noisy, CASE) > 0.04
    unknown = replace(CASE, spread=None, session=None)
    assert diff.margin(unknown, unknown) == pytest.approx(10 * math.hypot(0.0025, 0.01))
    assert diff.margin(unknown, CASE) == pytest.approx(diff.margin(CASE, CASE))


def test_times_have_more_noise_than_their_ratio():
    both = {side: 1.04 * seconds for side, seconds in CASE.seconds.items()}
    assert set(outcomes(replace(CASE, seconds=both)).values()) == {"same"}
    both = {side: 1.06 * seconds for side, seconds in CASE.seconds.items()}
    changed = outcomes(replace(CASE, seconds=both))
    assert (changed["baseline time"], changed["speedup"]) == ("worse", "same")


def test_counted_metrics_change_beyond_their_slack():
    def memory(count):
        return replace(CASE, goals={"memory": {"baseline": 8 << 20, "optimized": count}})

    assert outcomes(memory(5 << 20))["memory, optimized"] == "same"
    assert outcomes(memory(6 << 20))["memory, optimized"] == "worse"
    assert outcomes(memory(1 << 20))["memory, optimized"] == "better"
    from_nothing = diff.compare([memory(0)], [memory(9 << 20)]).changes[0]
    assert (from_nothing.outcome, from_nothing.change) == ("worse", None)


def test_the_worst_change_comes_first():
    slow, slower = (
        replace(CASE, key=key, value=CASE.value - loss) for key, loss in (("b", 0.1), ("c", 0.3))
    )
    old = [CASE, replace(CASE, key="b"), replace(CASE, key="c")]
    found = diff.compare(old, [CASE, slow, slower])
    assert [change.case.key for change in found.changes[:2]] == ["c", "b"]
    assert {change.outcome for change in found.changes[2:]} == {"same"}


@pytest.mark.parametrize(
    ("old", "new", "outcomes"),
    [
        ("pass", "wrong", ["worse"]),
        ("fail", "pass", ["better"]),
        ("pass", "new", []),
        ("fail", "regressed", []),
        ("", "fail", []),  # a stored result has no verdict
    ],
)
def test_a_case_that_turned_red_is_worse(old, new, outcomes):
    found = diff.compare([replace(CASE, verdict=old)], [replace(CASE, verdict=new)])
    assert [(turn.old, turn.new, turn.outcome) for turn in found.turned] == [
        (old, new, outcome) for outcome in outcomes
    ]


def test_a_case_that_is_no_longer_timed_because_it_is_wrong_is_worse():
    broken = diff.compare([replace(CASE, verdict="")], [replace(CASE, value=None, verdict="wrong")])
    assert [turn.outcome for turn in broken.turned] == ["worse"]
    assert broken.apart[0][1] == "not timed in NEW, where it is wrong"


def test_another_clock_or_limit_is_not_compared():
    host = diff.compare([CASE], [replace(CASE, clock="host")])
    assert {change.unit for change in host.changes} == {"memory"}
    assert host.apart[0][1] == "timed on the graph clock in OLD, on the host clock in NEW"
    assert "share of copy" not in outcomes(replace(CASE, limit="read"))
    assert "share of read" not in outcomes(replace(CASE, limit="read"))


def test_a_case_of_another_chapter_or_product_is_another_case():
    other = [replace(CASE, chapter="ch02"), replace(CASE, product="b-gpu")]
    found = diff.compare([CASE], other)
    assert (found.changes, found.only_old, found.only_new) == ((), (CASE,), tuple(other))


def output(old, new, form="text", root=Path(), *, every=False):
    found = compare_results.compare_result(str(old), str(new), form=form, every=every, root=root)
    return "\n".join(found.lines), found.code


def error_of(old, new, root=Path()):
    with pytest.raises(CliError) as error:
        compare_results.compare_result(str(old), str(new), root=root)
    assert error.value.code == 2
    return str(error.value)


@pytest.fixture
def run(tmp_path):
    """Write a copy of the recorded run with each line changed; return its folder."""

    def run(change, name="run", why=(), ended=True):
        artifacts = Artifacts(tmp_path / name)
        seen = run_reader.load(DATA)
        artifacts.start(structs.replace(seen.manifest, ended=None, complete=False, invalid=[]))
        for row in seen.rows():
            changed = change(row.to_json())
            if changed is not None:
                artifacts.add(Row.of(changed))
        if ended:
            artifacts.finish({"exit_code": 0, "invalid": list(why)}, {})
        return artifacts.folder

    return run


def slower(row):
    if row["value"] is not None and "kept" in row["page"]:
        name = list(row["seconds"])[1]
        row["value"] -= 0.5
        row["seconds"] = {**row["seconds"], name: row["seconds"][name] * math.exp(0.5)}
    return row


def test_a_run_against_itself_is_within_the_noise():
    text, code = output(DATA, DATA)
    assert text.startswith("OLD is the run ")
    assert text.endswith(
        "\n\n18 are the same within the noise (--all)\n\n0 worse, 0 better, 18 within the noise"
    )
    assert (len(text.splitlines()), code) == (6, 0)
    text, code = output(DATA, DATA, every=True)
    assert "--all" not in text
    assert (len(text.splitlines()), code) == (24, 0)


def test_a_slower_case_comes_first_in_every_format(run):
    new = run(slower)
    text, code = output(DATA, new)
    assert code == 1
    rows = text.splitlines()[3:]
    assert rows[0].split()[:3] == ["case", "metric", "better"]
    assert [row.startswith("WORSE  ") for row in rows[1:3]] == [True] * 2
    assert rows[3:5] == ["16 others are the same within the noise (--all)", ""]
    everything = output(DATA, new, every=True)[0].splitlines()[3:]
    assert [row.startswith("WORSE  ") for row in everything[1:-2]] == [True] * 2 + [False] * 16
    assert "ch07/kept_test.py::test_doubling[doubled-n1001] on simulated-gpu" in rows[1]
    assert "-39.3%" in rows[1] + rows[2]
    assert "+64.9%" in rows[1] + rows[2]
    assert text.endswith("2 worse, 0 better, 16 within the noise")
    marked, code = output(DATA, new, "markdown")
    assert (marked.splitlines()[0], code) == ("**2 worse, 0 better, 16 within the noise**", 1)
    assert "| **WORSE** | ch07/kept_test.py::test_doubling[doubled-n1001] on " in marked
    assert marked.count("\n| ") == 4
    assert marked.endswith("\n- 16 others are the same within the noise (--all)")
    assert output(DATA, new, "markdown", every=True)[0].count("\n| ") == 20
    plain, code = output(DATA, new, "json")
    found = json.loads(plain)
    assert (found["counts"], code) == ({"worse": 2, "better": 0, "same": 16}, 1)
    assert {metric["metric"] for metric in found["metrics"][:2]} == {"speedup", "optimized time"}
    assert found["metrics"][0].keys() == {
        *("product", "chapter", "case", "metric", "better", "unit", "old", "new", "change"),
        *("noise", "outcome"),
    }
    assert output(new, DATA)[1] == 0


def test_cases_of_one_side_and_invalid_runs_are_reported(run):
    new = run(lambda row: row if "kept" in row["page"] else None, why=["moved"])
    text, code = output(DATA, new)
    assert code == 0
    assert f"warning: {new}: the verdicts of this run do not count: moved" in text
    assert text.count("only in OLD: ") == 5
    killed = run(lambda row: row, name="killed", ended=False)
    text, _ = output(killed, DATA, "markdown")
    assert f"- warning: {killed}: the run did not finish; cases may be missing" in text


def test_sides_without_a_common_case_are_an_error(run):
    other = run(lambda row: {**row, "product": "nvidia-b200"})
    assert error_of(DATA, other).startswith(
        "nothing to compare: OLD is from simulated-gpu, NEW from nvidia-b200; times of different"
        " products cannot be compared\n"
    )
    pages = run(lambda row: {**row, "key": f"other{row['key']}"}, name="pages")
    message = error_of(DATA, pages)
    assert message.startswith(
        "nothing to compare: 6 cases in OLD, 6 in NEW, none of them timed in both\nOLD is the run"
    )
    assert message.endswith("\n    pytest --aisp-artifacts=DIR")
    untimed = run(lambda row: {**row, "value": None, "low": None, "goals": {}}, name="untimed")
    assert "n1001] on simulated-gpu is not timed in NEW, where it is " in error_of(DATA, untimed)


def test_a_side_that_cannot_be_read_is_an_error(tmp_path):
    assert error_of("nosuch", DATA, tmp_path) == (
        f"nosuch: neither a folder nor a git ref of {tmp_path}\n"
        "Give a run's artifacts, a folder of stored results, or a commit:\n"
        "    aisp results compare HEAD~1 baselines"
    )
    assert error_of(tmp_path, DATA).startswith(
        f"{tmp_path}: contains neither a run nor stored results"
    )
    (tmp_path / "results.jsonl").touch()
    assert "holds no run: it has no manifest.json" in error_of(tmp_path, DATA)


def result(value):
    return Result(
        baseline_us=20.0,
        optimized_us=20.0 / math.exp(value),
        clock="graph",
        values=((value, value + 1e-3, value - 1e-3),),
        environments=("then",),
        sources={"baseline": "a", "optimized": "b"},
    )


@pytest.fixture
def repository(tmp_path):
    """A repository with a run's peaks, and stored results of two commits. The second is slower."""
    root = tmp_path / "repository"
    file = root / "baselines" / "a-gpu" / "ch01.json"
    file.parent.mkdir(parents=True)
    (file.parent / "peaks.json").write_text("{}")
    git = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "init", "-q"], check=True)
    for value in (0.7, 0.4):
        store.write(file, "a-gpu", {"a_test.py::t[v]": result(value)}, {"then": {}}, replace=True)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", "x", "--no-gpg-sign"], check=True)
    return root


def test_commits_are_compared_by_their_stored_results(repository):
    text, code = output("HEAD~1", "HEAD", root=repository)
    assert code == 1
    assert text.startswith("OLD is the stored results at HEAD~1 (")
    assert "2 worse, 0 better, 1 within the noise" in text
    assert "\n1 other is the same within the noise (--all)\n" in text
    for folder in (repository / "baselines", repository / "baselines" / "a-gpu"):
        assert output("HEAD", folder, root=repository)[1] == 0
        assert output(folder, "HEAD~1", root=repository)[1] == 0


def test_a_commit_without_readable_stored_results_is_an_error(repository):
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@t"]
    file = repository / "baselines" / "a-gpu" / "ch01.json"
    file.write_text(file.read_text().replace("0.4", "0.5"))
    assert "ch01.json was not written by pytest-aisp: " in error_of(
        "HEAD", repository / "baselines", repository
    )
    subprocess.run([*git, "rm", "-rqf", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x", "--no-gpg-sign"], check=True)
    message = error_of("HEAD~1", "HEAD", repository)
    assert message.startswith("HEAD: no results are stored in baselines/ at ")
    assert message.endswith("\n    pytest --aisp-update-expectations")


def test_the_command_prints_the_comparison_and_returns_its_code(run, capsys):
    assert app.main(["compare", str(DATA), str(run(slower)), "--format=markdown"]) == 1
    assert capsys.readouterr().out.startswith("**2 worse, 0 better, 16 within the noise**\n")
    assert app.main(["compare", str(DATA), str(DATA), "--all"]) == 0
    assert "(--all)" not in capsys.readouterr().out
    assert app.main(["compare", "nosuch", str(DATA)]) == 2
    assert capsys.readouterr().err.startswith("nosuch: neither a folder nor a git ref of ")


def test_a_case_with_odd_characters_stays_on_one_line():
    odd = [replace(CASE, key="odd|7\n")]
    found = diff.compare(odd, odd)
    sides = compare_results.Side("a", odd), compare_results.Side("b", odd)
    lines = compare_results.text(sides, found, True)
    assert len(lines) == 6 + 6
    assert "ch01/odd|7\\n on a-gpu" in lines[4]
    rows = compare_results.markdown(sides, found, True)[4:-1]
    assert [row.count(" | ") for row in rows if row] == [7] * 8
