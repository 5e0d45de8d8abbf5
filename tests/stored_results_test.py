"""`aisp results roofline`, `expectations` and `prune` on made-up results."""

from __future__ import annotations

import csv
import json
import math
import re

import pytest
from fake_results import SOURCES, case, fake_catalog, result, stored

from pytest_aisp.cli import app
from pytest_aisp.results import store
from pytest_aisp.results.models import Result
from pytest_aisp.results.store import StoreError
from pytest_aisp.timing import peaks
from pytest_aisp.timing.peaks import Peaks
from pytest_aisp.tools import catalog, expectations, maintenance, roofline, stored_results
from pytest_aisp.util.cli_result import CliError
from pytest_aisp.util.device import Machine

H200 = Machine("sm90", "nvidia-h200", "NVIDIA H200", ("GPU-0",))
LAPTOP = Machine("cpu", "cpu-some-4c", "Some, 4 cores")
SCAN = "scan_test.py::test_scan[tiled-n64]"


@pytest.fixture
def collected(tmp_path, monkeypatch):
    """Return a function that makes the catalog that the command collects."""
    (tmp_path / "suites").mkdir()

    def collected(*cases, **fields):
        found = fake_catalog(tmp_path, list(cases), **fields)
        monkeypatch.setattr(catalog, "collect", lambda targets=None, *, tell: found)
        monkeypatch.setattr(Machine, "here", classmethod(lambda cls: LAPTOP))
        monkeypatch.chdir(tmp_path)
        return found

    return collected


def rates(root, product="nvidia-h200", **known):
    path = root / "baselines" / product / "peaks.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    peaks.save(path, Peaks(product, known))


def test_the_default_product_is_the_machines_or_the_only_one(tmp_path):
    with pytest.raises(
        CliError, match=r"^no results of nvidia-h200 are stored in .*baselines; record them"
    ):
        stored_results.select_products(tmp_path / "baselines", None, H200)
    stored(tmp_path, {SCAN: result(2.0)})
    stored(tmp_path, {SCAN: result(2.0)}, "nvidia-h200-x2")
    both = ["nvidia-h200", "nvidia-h200-x2"]
    assert stored_results.select_products(tmp_path / "baselines", None, H200) == both
    assert stored_results.select_products(tmp_path / "baselines", None, LAPTOP) == both
    assert (
        stored_results.select_products(tmp_path / "baselines", "nvidia-h200-x2", LAPTOP) == both[1:]
    )
    stored(tmp_path, {SCAN: result(2.0)}, "nvidia-b200")
    assert stored_results.select_products(tmp_path / "baselines", None, H200) == both
    for product, named in ((None, "cpu-some-4c"), ("nvidia-h100", "nvidia-h100")):
        with pytest.raises(CliError) as error:
            stored_results.select_products(tmp_path / "baselines", product, LAPTOP)
        assert str(error.value).splitlines() == [
            f"no results of {named} are stored in {tmp_path / 'baselines'}, only of"
            " nvidia-b200, nvidia-h200, nvidia-h200-x2; choose with",
            "    --product=nvidia-b200",
        ]


@pytest.mark.parametrize(
    ("product", "given", "arch"),
    [
        ("nvidia-h200-x2", None, "sm90"),
        ("nvidia-b300", None, "sm103"),
        ("nvidia-h200", "sm121", "sm121"),
        ("cpu-other-8c", None, "cpu"),
        ("cpu-some-4c", None, "cpu"),
    ],
)
def test_the_arch_follows_from_the_product(product, given, arch):
    assert stored_results.arch_of(product, given, LAPTOP) == arch
    assert stored_results.arch_of("nvidia-y1", None, Machine("sm100", "nvidia-y1", "Y1")) == "sm100"


def test_an_unknown_arch_is_an_error():
    with pytest.raises(CliError) as error:
        stored_results.arch_of("nvidia-y1", None, LAPTOP)
    unknown = "the arch of nvidia-y1 is unknown; legal are cpu, sm90, sm100, sm103, sm121"
    assert str(error.value).splitlines() == [unknown, "    --arch=sm90"]
    with pytest.raises(CliError, match="--arch=sm80: unknown arch; legal are cpu, sm90"):
        stored_results.arch_of("nvidia-y1", "sm80", LAPTOP)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    path = stored(tmp_path, {SCAN: result(2.0)})
    (path.parent / "peaks.json").write_text("{}")
    with pytest.raises(CliError, match=r"peaks.json is not a peaks file"):
        stored_results.stored_peaks(tmp_path / "baselines", "nvidia-h200")
    path.write_text("{")
    with pytest.raises(CliError, match=r"ch07.json is truncated"):
        list(stored_results.chapters(tmp_path / "baselines", "nvidia-h200"))


def test_a_result_is_compared_with_the_rate_that_limits_it(collected, tmp_path, capsys):
    collected(case("ch07:scan"), case("ch07:gone"))
    rates(tmp_path, copy=4e12, read=4e12, write=4e12)
    late = result(1.25, share=0.5, limit="bf16")
    stored(tmp_path, {SCAN: result(0.5), "left_test.py::test_left[a-n1]": late})
    assert app.main(["roofline"]) == 0
    heads, left, scan = capsys.readouterr().out.splitlines()
    assert heads.split()[:5] == ["product", "target", "case", "bound", "speedup"]
    # 2 GB read and written in 2 ms are 2 TB/s, half of what a copy reaches.
    line = "nvidia-h200 ch07:scan test_scan[tiled-n64] dram 0.500x 2 ms 2 TB/s 50% copy 4 TB/s"
    assert scan.split() == line.split()
    line = "nvidia-h200 ch07:left test_left[a-n1] - 1.250x 800 us - 50% bf16"
    assert left.split() == line.split()


def test_roofline_of_some_targets_as_json(collected, tmp_path, capsys):
    collected(case("ch07:scan"))
    rates(tmp_path, copy=4e12)
    stored(tmp_path, {SCAN: result(0.5)})
    stored(tmp_path, {SCAN: result(0.5)}, chapter="ch08")
    assert app.main(["roofline", "--targets", "ch07:scan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "product": "nvidia-h200",
            "target": "ch07:scan",
            "case": "test_scan[tiled-n64]",
            "bound": "dram",
            "speedup": pytest.approx(0.5, rel=1e-4),
            "seconds": 2e-3,
            "limit": "copy",
            "share": pytest.approx(0.5, rel=1e-4),
            "attained": pytest.approx(2e12, rel=1e-4),
            "peak": 4e12,
        }
    ]


@pytest.mark.parametrize("page", ["test_scan.py", "scan_test.py", "test_scan_test.py", "scan.py"])
def test_a_target_is_called_what_the_catalog_calls_it(collected, tmp_path, capsys, page):
    collected(case("ch07:scan", key=f"{page}::test_scan[tiled-n64]"))
    stored(tmp_path, {f"{page}::test_scan[tiled-n64]": result(0.5)})
    assert app.main(["roofline", "--targets", "ch07:scan", "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)
    assert (point["target"], point["bound"]) == ("ch07:scan", "dram")


def test_without_peaks_roofline_says_how_to_measure_them(collected, tmp_path, capsys):
    collected(case("ch07:scan"))
    stored(tmp_path, {SCAN: result(0.5)})
    assert app.main(["roofline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["no peaks of nvidia-h200 are stored", "    aisp machine peak --store"]
    assert app.main(["roofline", "--targets", "ch08"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "no result is stored"


def test_the_links_of_several_gpus_are_a_limit(collected, tmp_path):
    work = {"read": 0, "write": 0, "flops": {}, "wire": 1e9, "terms": 1, "roundings": 1}
    found = collected(case("ch07:scan", bound="nvlink", work=work))
    rates(tmp_path, copy=4e12)
    rates(tmp_path, "nvidia-h200-x2", peer=4e11)
    stored(tmp_path, {SCAN: result(0.2)}, "nvidia-h200-x2")
    limits = stored_results.stored_peaks(found.baselines, "nvidia-h200-x2")
    (point,) = roofline.points(found, "nvidia-h200-x2", [], limits)
    assert (point.limit, point.share, point.attained) == ("peer", 0.5, 2e11)
    assert point.row()[-3:] == ("200 GB/s", "50%", "peer 400 GB/s")


@pytest.mark.parametrize(
    ("result_and_claim", "states"),
    [
        ((result(1.5), 1.5), ""),
        ((result(1.49), 1.5), "below"),
        ((result(0.97), "neutral"), "below"),
        ((result(0.99), "neutral"), ""),
        ((result(0.2), "yardstick"), ""),
        ((result(1.0), 1.0), "neutral"),
        ((result(0.9), 1.0), "below neutral"),
        ((result(0.9), 0.8), ""),
        ((result(0.7), 0.8), "below"),
        ((result(2.0, sources={"baseline": "0b", "optimized": "1b"}), 1.5), "stale"),
        ((result(2.0, values=((0.69,) * 8,), environments=("one",)), 1.5), "few"),
        ((result(2.0, values=((0.69,) * 3,) * 2), 1.5), "few"),
    ],
)
def test_states_of_a_result(collected, tmp_path, result_and_claim, states):
    found = collected(case("ch07:scan", claim=result_and_claim[1]))
    stored(tmp_path, {SCAN: result_and_claim[0]})
    (one,) = expectations.expectations(found, "nvidia-h200", "sm90")
    assert " ".join(one.states) == states
    code = expectations.expectations_result(found, {"nvidia-h200": "sm90"}, form="text").code
    assert code == ("below" in one.states)


def test_a_result_without_times_has_no_claim_and_no_limit(collected, tmp_path, capsys):
    found = collected(case("ch07:scan"))
    goals = {"memory": {"baseline": 600.0, "optimized": 240.0}}
    plain = {"environments": ("one",), "goals": goals}
    stored(tmp_path, {SCAN: Result(sources=SOURCES, **plain)})
    assert list(roofline.points(found, "nvidia-h200", [], None)) == []
    (one,) = expectations.expectations(found, "nvidia-h200", "sm90")
    assert one.states == ()
    assert one.row()[3:8] == ("-", "-", "-", "0", "1")
    assert app.main(["expectations", "--format", "csv"]) == 0
    (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert (row["claim"], row["speedup"], row["low"], row["high"]) == ("", "", "", "")
    changed = {**SOURCES, "optimized": "2c"}
    stored(tmp_path, {SCAN: Result(sources=changed, **plain)})
    (one,) = expectations.expectations(found, "nvidia-h200", "sm90")
    assert one.states == ("stale",)


def test_a_readme_table_shows_metrics_if_nothing_was_timed(tmp_path):
    goals = {"memory": {"baseline": 600 << 20, "optimized": 240 << 20}}
    goals |= {"launches": {"baseline": 63.0, "optimized": 2.0}}
    counted = Result(sources=SOURCES, environments=("one",), goals=goals)
    stored(tmp_path, {SCAN: counted, "scan_test.py::test_scan[timed-n64]": result(2.0)})
    lines = stored_results.readme_table("ch07", fake_catalog(tmp_path, [])).splitlines()
    page = "| [scan](scan_test.py) |"
    launches = "launches 63, memory 600 MiB | launches 2, memory 240 MiB"
    assert lines[-2] == f"{page} tiled-n64 | {launches} | - |  | - |"
    assert lines[-1].startswith(f"{page} timed-n64 | 1 ms | 500 us | 2.000x [")


@pytest.mark.parametrize(
    ("now", "times"),
    [
        (SOURCES, "1 ms | 500 us"),
        ({**SOURCES, "optimized": "2c"}, "1 ms | 500 us (stale)"),
        ({**SOURCES, "baseline": "2c"}, "1 ms (stale) | 500 us"),
    ],
)
def test_a_readme_table_marks_the_times_of_older_code(tmp_path, now, times):
    stored(tmp_path, {SCAN: result(2.0)})
    found = fake_catalog(tmp_path, [case("ch07:scan", sources=now)])
    table = stored_results.readme_table("ch07", found)
    assert f"| tiled-n64 | {times} | 2.000x [" in table
    why = "\n\n(stale): the side's code has changed since it was timed: record it again\n"
    assert table.endswith(why) is (now != SOURCES)


def test_a_share_of_a_librarys_speed_is_shown_as_one(collected, tmp_path):
    found = collected(case("ch07:scan", claim=0.8, versus="library"))
    stored(tmp_path, {SCAN: result(0.7)})
    lines = expectations.expectations_result(found, {"nvidia-h200": "sm90"}, form="text").lines
    assert any("  0.8 of library  " in line for line in lines)


def test_the_claim_is_the_one_for_the_products_arch(collected, tmp_path, capsys):
    collected(case("ch07:scan", claims={"sm90": 2.5, "sm100": 1.5, "cpu": 1.0}))
    stored(tmp_path, {SCAN: result(2.0)})
    assert app.main(["expectations"]) == 1
    row, counted, below = capsys.readouterr().out.splitlines()[1:]
    assert row.split()[3:5] == ["2.5", "2.000x"]
    assert row.split()[-1] == "below"
    assert counted == "1 stored results, 0 without a problem"
    assert below == "below 1: the stored speedup is below the claim"
    assert app.main(["expectations", "--arch=sm100"]) == 0
    assert capsys.readouterr().out == "1 stored results, 1 without a problem\n"


def test_a_result_without_a_case_is_gone_unless_its_page_is_unread(collected, tmp_path):
    unread = {"path": "suites/ch07/te_test.py", "outcome": "skipped", "text": "no te"}
    found = collected(case("ch07:scan"), unread=[unread])
    keys = ("left_test.py::test_left[a-n1]", "te_test.py::test_te[b-n1]")
    stored(tmp_path, {key: result(2.0) for key in keys})
    found = expectations.expectations(found, "nvidia-h200", "sm90")
    assert [one.states for one in found] == [("gone",), ("unread",)]


@pytest.mark.parametrize(
    ("speedup", "known", "fields", "states", "predicted"),
    [
        (1.25, {"read": 4e12}, {}, "", pytest.approx(1.25)),
        (2.0, {"read": 4e12}, {}, "unexplained", pytest.approx(1.25)),
        (2.0, {"read": 4e12}, {"seen": ["optimized"]}, "", pytest.approx(1.25)),
        (2.0, {"read": 4e12}, {"seen": ["baseline"]}, "unexplained", pytest.approx(1.25)),
        (
            2.0,
            {"read": 4e12},
            {"sources": {**SOURCES, "optimized": "2c"}},
            "stale",
            pytest.approx(1.25),
        ),
        (2.0, {}, {}, "", None),
    ],
)
def test_a_time_off_its_prediction_is_unexplained(
    collected, tmp_path, speedup, known, fields, states, predicted
):
    costs = {"baseline": [{"read": 4e9}], "optimized": [{"read": 3.2e9}]}
    found = collected(case("ch07:scan", claim=1.1, costs=costs, **fields))
    stored(tmp_path, {SCAN: result(speedup)})
    rates(tmp_path, copy=4e12, **known)
    (one,) = expectations.expectations(found, "nvidia-h200", "sm90")
    assert (" ".join(one.states), one.predicted) == (states, predicted)


def test_expectations_show_the_predicted_speedup(collected, tmp_path, capsys):
    costs = {"baseline": [{"read": 4e9}], "optimized": [{"read": 2e9}]}
    collected(case("ch07:scan", costs=costs))
    stored(tmp_path, {SCAN: result(4.0)})
    rates(tmp_path, read=4e12)
    assert app.main(["expectations"]) == 0
    head, row, _, why = capsys.readouterr().out.splitlines()
    assert head.split()[-4:] == ["predicted", "processes", "sessions", "states"]
    assert row.split()[-4:] == ["2.000x", "8", "2", "unexplained"]
    assert why == (
        "unexplained 1: a stored time is more than 25% off the predicted time,"
        " and the page's section Seen does not name the side"
    )
    assert app.main(["expectations", "--format=json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["predicted"] == 2.0


def test_csv_and_json_contain_every_result(collected, tmp_path, capsys):
    collected(case("ch07:scan"))
    stored(tmp_path, {SCAN: result(1.2)})
    assert app.main(["expectations", "--format", "csv"]) == 1
    (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert (row["case"], row["claim"], row["states"]) == (SCAN, "1.5", "below")
    assert float(row["low"]) < 1.2 < float(row["high"])
    assert (row["processes"], row["sessions"]) == ("8", "2")
    assert app.main(["expectations", "--format=json"]) == 1
    (plain,) = json.loads(capsys.readouterr().out)
    assert plain["states"] == ["below"]
    assert plain["speedup"] == pytest.approx(1.2, rel=1e-4)


def test_prune_removes_only_with_yes(collected, tmp_path, capsys):
    collected(case("ch07:scan"))
    gone = "left_test.py::test_left[a-n1]"
    path = stored(tmp_path, {SCAN: result(2.0), gone: result(2.0)})
    other = stored(tmp_path, {gone: result(2.0)}, "nvidia-b200")
    before = path.read_text()
    assert app.main(["prune", "--product", "nvidia-h200"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: {gone}",
        "1 result would be removed:",
        "    aisp results prune --yes",
    ]
    assert path.read_text() == before
    assert app.main(["prune", "--yes"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 results removed"
    assert set(store.load(path).results) == {SCAN}
    assert store.load(other).results == {}
    assert app.main(["prune"]) == 0
    assert capsys.readouterr().out == "every stored result has its case\n"


def test_prune_prints_json(collected, tmp_path, capsys):
    unread = {"path": "suites/ch07/te_test.py", "outcome": "skipped", "text": "no te"}
    collected(case("ch07:scan"), unread=[unread])
    gone = "left_test.py::test_left[a-n1]"
    path = stored(tmp_path, {SCAN: result(2.0), gone: result(2.0)})
    place = {"product": "nvidia-h200", "chapter": "ch07", "case": gone, "file": str(path)}
    for words, removed, found in ((), False, [place]), (["--yes"], True, [place]), ((), False, []):
        assert app.main(["prune", "--json", *words]) == 0
        plain = json.loads(capsys.readouterr().out)
        assert plain == {"removed": removed, "gone": found, "unread": [unread]}
    assert set(store.load(path).results) == {SCAN}


def test_prune_keeps_results_that_are_recorded_meanwhile(collected, tmp_path, monkeypatch):
    found = collected(case("ch07:scan"))
    gone, new = "left_test.py::test_left[a-n1]", "new_test.py::test_new[b-n1]"
    path = stored(tmp_path, {SCAN: result(2.0), gone: result(2.0)})
    write = store.prune

    def late(file, keys):
        stored(tmp_path, {new: result(1.5)})
        return write(file, keys)

    monkeypatch.setattr(store, "prune", late)
    assert maintenance.prune_result(found, None, yes=True).lines == [
        f"{path}: {gone}",
        "1 result removed",
    ]
    assert set(store.load(path).results) == {SCAN, new}


def test_prune_keeps_results_of_pages_that_cannot_be_collected(collected, tmp_path):
    unread = {"path": "suites/ch07/te_test.py", "outcome": "failed", "text": "E"}
    found = collected(unread=[unread])
    stored(tmp_path, {"te_test.py::test_te[b-n1]": result(2.0)})
    assert maintenance.prune_result(found, None, yes=True).lines == [
        "every stored result has its case",
        "kept, because its page cannot be collected: suites/ch07/te_test.py",
    ]


def test_prune_refuses_a_partial_checkout(collected, tmp_path):
    found = collected(folders=["suites", "more"])
    with pytest.raises(CliError) as error:
        maintenance.prune_result(found, None, yes=True)
    assert str(error.value).splitlines() == [
        f"{tmp_path / 'more'} is not here, so it is unknown which cases are gone",
        "Check out the whole repository:",
        "    git sparse-checkout disable",
    ]


def test_prune_needs_the_folders_of_pages(collected, tmp_path):
    found = collected(folders=[])
    path = stored(tmp_path, {SCAN: result(2.0)})
    with pytest.raises(CliError) as error:
        maintenance.prune_result(found, None, yes=True)
    assert str(error.value).splitlines() == [
        "the ini file names no folder of pages, so it is unknown which cases are gone",
        "Name them in [tool.pytest.ini_options] of pyproject.toml:",
        '    aisp_pages = ["suites"]',
    ]
    assert store.load(path).results


def test_prune_fails_for_a_product_without_results_or_an_unwritable_file(
    collected, tmp_path, monkeypatch
):
    found = collected(case("ch07:scan"))
    path = stored(tmp_path, {"left_test.py::test_left[a-n1]": result(2.0)})
    with pytest.raises(CliError, match="no results of nvidia-b200 are stored in"):
        maintenance.prune_result(found, "nvidia-b200", yes=False)

    def full(path, gone):
        raise StoreError(f"{path} could not be written")

    monkeypatch.setattr(store, "prune", full)
    with pytest.raises(CliError, match=f"{path} could not be written"):
        maintenance.prune_result(found, None, yes=True)
    assert math.isclose(store.load(path).results.popitem()[1].speedup, 2.0, rel_tol=1e-3)


COSTS = {
    "baseline": [{"read": 4e9, "launches": 1}, {"write": 1e9}],
    "optimized": [{"read": 2e9, "write": 2e9}],
}


def predicted(capsys, code=0):
    assert app.main(["results", "predictions"]) == code
    return capsys.readouterr()


def test_stored_times_are_compared_with_predicted_ones(collected, tmp_path, capsys):
    tiled = case("ch07:scan", costs=COSTS, seen=["baseline"])
    two = [tiled, case("ch07:scan", "wide", costs=COSTS)]
    collected(*two, case("ch07:plain"))
    rates(tmp_path, copy=4e12, read=4e12, write=2e12, graph_node=1e-6)
    keys = [one["key"] for one in two]
    stored(tmp_path, {keys[0]: result(1.0), keys[1]: result(2.0)})
    head, worst, *rest, summary = predicted(capsys).out.splitlines()
    assert head.split()[3:6] == ["side", "predicted", "stored"]
    assert worst.split()[2:] == [
        keys[1],
        "wide",
        "1",
        "ms",
        "500",
        "us",
        "0.50",
        "unexplained",
        "copy",
    ]
    lines = [line.split()[2:] for line in rest]
    assert lines[0] == [keys[0], "baseline", "1.501", "ms", "1", "ms", "0.67", "read"]
    assert lines[1] == [keys[0], "tiled", "1", "ms", "1", "ms", "1.00", "copy"]
    assert len(rest) == 2, "both cases have the same baseline"
    assert summary == "1 of 3 within 25% of the prediction"
    assert app.main(["results", "predictions", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["predicted"] == pytest.approx(1e-3)


def test_no_prediction_is_an_error_that_says_what_to_do(collected, tmp_path, capsys):
    stored(tmp_path, {SCAN: result(2.0)})
    collected(
        case("ch07:scan"), unread=[{"path": "a_test.py", "outcome": "failed", "text": "oh no"}]
    )
    message = predicted(capsys, code=2).err
    assert "a_test.py was not read: oh no\nno page with stored results of nvidia-h200" in message
    assert "\n    @compare(..., costs={side: lambda n: Cost(" in message
    collected(case("ch07:scan", costs=COSTS))
    assert "no peaks of nvidia-h200 are stored; measure them there:" in predicted(capsys, 2).err


def test_a_side_whose_rate_is_missing_is_listed_as_not_predicted(collected, tmp_path, capsys):
    scan = case("ch07:scan", costs=COSTS)
    collected(scan)
    (tmp_path / "suites" / "ch07").mkdir()
    (tmp_path / scan["path"]).write_text(PAGE)
    stored(tmp_path, {SCAN: result(1.25)})
    rates(tmp_path, copy=4e12, write=2e12)
    missing = (
        "1 side is not predicted, because the rate read was not measured there:"
        " run aisp machine peak --store"
    )
    _, tiled, baseline, summary, closing = predicted(capsys).out.splitlines()
    assert tiled.split()[2:] == [SCAN, "tiled", "1", "ms", "800", "us", "0.80", "copy"]
    assert baseline.split()[2:] == [SCAN, "baseline", "not", "predicted:", "read", "1", "ms", "-"]
    assert summary == "1 of 1 within 25% of the prediction"
    assert closing == missing
    assert app.main(["results", "predictions", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [(one["predicted"], one["missing"]) for one in plain] == [
        (pytest.approx(1e-3), ""),
        (None, "read"),
    ]
    assert app.main(["suite", "show", "ch07:scan"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert missing in shown
    rows = [line.split() for line in shown]
    assert ["n=64", "baseline", "not", "predicted:", "read", "1", "ms"] in rows
    assert ["n=64", "tiled", "1", "ms", "800", "us", "-", "1.25x", "-"] in rows


@pytest.mark.parametrize(
    ("product", "fact", "is_assumed"),
    [
        ("nvidia-h200-x4", "GPU 1 -> GPU 0, NVLink 4 x18", True),
        ("nvidia-h200-x4", "GPU 1 -> GPU 0, PCIe", False),
        ("nvidia-h200-2x2", "GPU 1 -> GPU 0, NVLink 4 x18", False),
    ],
)
def test_the_rate_between_two_gpus_is_that_of_a_pair_behind_a_switch(
    collected, tmp_path, capsys, product, fact, is_assumed
):
    scan = case("ch07:scan", costs={"optimized": [{"sent": 4e8}]}, seen=["optimized"])
    collected(scan)
    (tmp_path / "suites" / "ch07").mkdir()
    (tmp_path / scan["path"]).write_text(PAGE)
    stored(tmp_path, {SCAN: result(1.0)}, product)
    rates(tmp_path, copy=4e12)
    rates(tmp_path, product, busbw=3e11)
    peaks.add(
        tmp_path / "baselines/nvidia-h200-x2/peaks.json",
        *("nvidia-h200-x2", {"peer": 4e11}, {"peer": fact}),
    )
    line = f"assumed: GPUs of {product} copy to each other at the rate of nvidia-h200-x2"
    for words in (["results", "predictions"], ["suite", "show", "ch07:scan"]):
        assert app.main([*words, f"--product={product}"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert (line in lines) is is_assumed
        assert any("the rate peer was not measured" in each for each in lines) is not is_assumed
    rates(tmp_path, product, busbw=3e11, peer=2e11)
    assert stored_results.known_peaks(tmp_path / "baselines", product).rates["peer"] == 2e11
    assert stored_results.assumed_peer(tmp_path / "baselines", [product]) == []


def test_a_type_that_no_command_measures_is_named(collected, tmp_path, capsys):
    costs = {"baseline": [{"ops": {"fp64": 1e9}}], "optimized": [{"read": 1e9}]}
    collected(case("ch07:scan", costs=costs))
    stored(tmp_path, {SCAN: result(1.25)})
    rates(tmp_path, copy=4e12)
    *_, closing = predicted(capsys).out.splitlines()
    assert closing == (
        "2 sides are not predicted, because the rates fp64, read were not measured there:"
        " run aisp machine peak --store (no command measures fp64)"
    )


def test_a_page_shows_its_stored_times_if_no_peaks_are_stored(collected, tmp_path, capsys):
    scan = case("ch07:scan", costs={**COSTS, "optimized": [{"sent": 1e9}]})
    collected(scan)
    (tmp_path / "suites" / "ch07").mkdir()
    (tmp_path / scan["path"]).write_text(PAGE)
    stored(tmp_path, {SCAN: result(1.25)})
    assert app.main(["suite", "show", "ch07:scan"]) == 0
    shown = capsys.readouterr().out
    assert "2 sides are not predicted, because the rates peer, read were not measured" in shown
    assert "run aisp links bandwidth --store and aisp machine peak --store" in shown


PAGE = '''"""A title.

Bound      DRAM.
"""
def plain(x):
    return x + 1

def tiled(x):
    return x + 2

@compare(baseline=plain, optimized=[tiled])
def test_scan(pair):
    pass
'''


def test_a_page_is_shown_with_its_times_and_differences(collected, tmp_path, capsys):
    scan = case("ch07:scan", costs=COSTS)
    collected(scan, case("ch07:other"))
    (tmp_path / "suites" / "ch07").mkdir()
    (tmp_path / scan["path"]).write_text(PAGE)
    assert app.main(["suite", "show", "ch07:scan"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:3] == ["A title.", "", "Bound      DRAM."]
    assert any("no results of cpu-some-4c are stored" in line for line in shown)
    assert shown[-4:] == [
        "-def plain(x):",
        "-    return x + 1",
        "+def tiled(x):",
        "+    return x + 2",
    ]
    rates(tmp_path, copy=4e12, read=4e12, write=2e12, graph_node=1e-6)
    stored(tmp_path, {scan["key"]: result(1.25, share=0.5, limit="copy")})
    assert app.main(["suite", "show", "ch07:scan"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["nvidia-h200:"] in shown
    assert ["n=64", "baseline", "1.501", "ms", "1", "ms"] in shown
    row = ["n=64", "tiled", "1", "ms", "800", "us", "1.5x", "1.25x", "50%", "of", "copy"]
    assert row in shown
    stored(
        tmp_path,
        {scan["key"]: result(1.25, sources={**SOURCES, "optimized": "syntax:fedcba9876543210"})},
    )
    assert app.main(["suite", "show", "ch07:scan"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"tiled +1 ms +800 us \(stale\)", shown)
    assert "\n(stale): the side's code has changed since it was timed: record it again\n" in shown
    assert app.main(["suite", "show", "ch07"]) == 2
    message = "'ch07' has several pages; name one\n    aisp suite list --chapter=ch07\n"
    assert capsys.readouterr().err == message
