"""`aisp results roofline`, `expectations`, `prune`: what stored results say, on results told of."""

from __future__ import annotations

import csv
import json
import math

import pytest
from fake_results import SOURCES, case, fake_catalog, result, stored

from pytest_aisp.cli import app
from pytest_aisp.results import store
from pytest_aisp.results.models import Result
from pytest_aisp.results.store import StoreError
from pytest_aisp.timing import peaks
from pytest_aisp.timing.peaks import Peaks
from pytest_aisp.tools import catalog, maintenance, expectations, roofline, stored_results
from pytest_aisp.util.cli_result import CliError
from pytest_aisp.util.device import Machine

H200 = Machine("sm90", "nvidia-h200", "NVIDIA H200", ("GPU-0",))
LAPTOP = Machine("cpu", "cpu-some-4c", "Some, 4 cores")
SCAN = "scan_test.py::test_scan[tiled-n64]"


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Return what makes a catalog of cases, which the command collects."""

    (tmp_path / "suites").mkdir()

    def told(*cases, **fields):
        found = fake_catalog(tmp_path, list(cases), **fields)
        monkeypatch.setattr(catalog, "collect", lambda targets=None, *, tell: found)
        monkeypatch.setattr(Machine, "here", classmethod(lambda cls: LAPTOP))
        monkeypatch.chdir(tmp_path)
        return found

    return told


def rates(root, product="nvidia-h200", **known):
    path = root / "baselines" / product / "peaks.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    peaks.save(path, Peaks(product, known))


# Which product


def test_the_product_is_the_machines_else_the_only_one(tmp_path):
    with pytest.raises(CliError, match=r"^no results are stored in .*baselines; record them"):
        stored_results.chosen(tmp_path / "baselines", None, H200)
    stored(tmp_path, {SCAN: result(2.0)})
    stored(tmp_path, {SCAN: result(2.0)}, "nvidia-h200-x2")
    both = ["nvidia-h200", "nvidia-h200-x2"]
    assert stored_results.chosen(tmp_path / "baselines", None, H200) == both
    assert stored_results.chosen(tmp_path / "baselines", None, LAPTOP) == both
    assert stored_results.chosen(tmp_path / "baselines", "nvidia-h200-x2", LAPTOP) == both[1:]
    stored(tmp_path, {SCAN: result(2.0)}, "nvidia-b200")
    assert stored_results.chosen(tmp_path / "baselines", None, H200) == both
    for asked, named in ((None, "cpu-some-4c"), ("nvidia-h100", "nvidia-h100")):
        with pytest.raises(CliError) as error:
            stored_results.chosen(tmp_path / "baselines", asked, LAPTOP)
        assert str(error.value).splitlines() == [
            f"no results of {named} are stored in {tmp_path / 'baselines'}; there are those of"
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


def test_an_arch_that_nobody_knows_is_asked_for():
    with pytest.raises(CliError) as error:
        stored_results.arch_of("nvidia-y1", None, LAPTOP)
    said = "nothing here says which arch nvidia-y1 has; legal are cpu, sm90, sm100, sm103, sm121"
    assert str(error.value).splitlines() == [said, "    --arch=sm90"]
    with pytest.raises(CliError, match="--arch=sm80: unknown arch; legal are cpu, sm90"):
        stored_results.arch_of("nvidia-y1", "sm80", LAPTOP)


def test_files_that_cannot_be_read_say_so(tmp_path):
    path = stored(tmp_path, {SCAN: result(2.0)})
    (path.parent / "peaks.json").write_text("{}")
    with pytest.raises(CliError, match=r"peaks.json is no peaks file"):
        stored_results.peaks_of(tmp_path / "baselines", "nvidia-h200")
    path.write_text("{")
    with pytest.raises(CliError, match=r"ch07.json is truncated"):
        list(stored_results.chapters(tmp_path / "baselines", "nvidia-h200"))


# Roofline


def test_a_result_is_held_against_the_rate_that_limits_it(told, tmp_path, capsys):
    told(case("ch07:scan"), case("ch07:gone"))
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


def test_targets_and_json(told, tmp_path, capsys):
    told(case("ch07:scan"))
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
def test_a_target_is_called_what_the_catalog_calls_it(told, tmp_path, capsys, page):
    told(case("ch07:scan", key=f"{page}::test_scan[tiled-n64]"))
    stored(tmp_path, {f"{page}::test_scan[tiled-n64]": result(0.5)})
    assert app.main(["roofline", "--targets", "ch07:scan", "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)
    assert (point["target"], point["bound"]) == ("ch07:scan", "dram")


def test_peaks_are_read_once(told, tmp_path, monkeypatch):
    found, read = told(case("ch07:scan")), []
    stored(tmp_path, {SCAN: result(0.5)})
    monkeypatch.setattr(stored_results, "peaks_of", lambda _, name: read.append(name))
    roofline.roofline_result(found, ["nvidia-h200"], (), as_json=False)
    assert read == ["nvidia-h200"]


def test_without_peaks_it_says_how_to_measure_them(told, tmp_path, capsys):
    told(case("ch07:scan"))
    stored(tmp_path, {SCAN: result(0.5)})
    assert app.main(["roofline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["no peaks of nvidia-h200 are stored", "    aisp machine peak --store"]
    assert app.main(["roofline", "--targets", "ch08"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "no result is stored"


def test_links_are_those_of_several_gpus(told, tmp_path):
    work = {"read": 0, "write": 0, "flops": {}, "wire": 1e9, "terms": 1, "roundings": 1}
    found = told(case("ch07:scan", bound="nvlink", work=work))
    rates(tmp_path, copy=4e12)
    rates(tmp_path, "nvidia-h200-x2", peer=4e11)
    stored(tmp_path, {SCAN: result(0.2)}, "nvidia-h200-x2")
    limits = stored_results.peaks_of(found.baselines, "nvidia-h200-x2")
    (point,) = roofline.points_of(found, "nvidia-h200-x2", [], limits)
    assert (point.limit, point.share, point.attained) == ("peer", 0.5, 2e11)
    assert point.row()[-3:] == ("200 GB/s", "50%", "peer 400 GB/s")


# Expectations


@pytest.mark.parametrize(
    ("stands", "states"),
    [
        ((result(1.5), 1.5), ""),
        ((result(1.49), 1.5), "below"),
        ((result(0.97), "neutral"), "below"),
        ((result(0.99), "neutral"), ""),
        ((result(0.2), "yardstick"), ""),
        ((result(1.0), 1.0), "neutral"),
        ((result(0.9), 1.0), "below neutral"),
        ((result(2.0, sources={"baseline": "0b", "optimized": "1b"}), 1.5), "stale"),
        ((result(2.0, values=((0.69,) * 8,), environments=("one",)), 1.5), "few"),
        ((result(2.0, values=((0.69,) * 3,) * 2), 1.5), "few"),
    ],
)
def test_what_there_is_to_say_of_a_result(told, tmp_path, stands, states):
    found = told(case("ch07:scan", claim=stands[1]))
    stored(tmp_path, {SCAN: stands[0]})
    (stand,) = expectations.stands_of(found, "nvidia-h200", "sm90")
    assert " ".join(stand.states) == states
    code = expectations.expectations_result(found, {"nvidia-h200": "sm90"}, form="text").code
    assert code == ("below" in stand.states)


def test_a_result_without_times_is_held_against_no_claim_and_no_limit(told, tmp_path, capsys):
    found = told(case("ch07:scan"))
    goals = {"memory": {"baseline": 600.0, "optimized": 240.0}}
    plain = {"environments": ("one",), "goals": goals}
    stored(tmp_path, {SCAN: Result(sources=SOURCES, **plain)})
    assert list(roofline.points_of(found, "nvidia-h200", [], None)) == []
    (stand,) = expectations.stands_of(found, "nvidia-h200", "sm90")
    assert stand.states == ()
    assert stand.row()[3:7] == ("-", "-", "0", "1")
    assert app.main(["expectations", "--format", "csv"]) == 0
    (row,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert (row["claim"], row["speedup"], row["low"], row["high"]) == ("", "", "", "")
    changed = {**SOURCES, "optimized": "2c"}
    stored(tmp_path, {SCAN: Result(sources=changed, **plain)})
    (stand,) = expectations.stands_of(found, "nvidia-h200", "sm90")
    assert stand.states == ("stale",)


def test_a_chapters_table_shows_goals_where_nothing_was_timed(tmp_path):
    goals = {"memory": {"baseline": 600 << 20, "optimized": 240 << 20}}
    goals |= {"launches": {"baseline": 63.0, "optimized": 2.0}}
    counted = Result(sources=SOURCES, environments=("one",), goals=goals)
    stored(tmp_path, {SCAN: counted, "scan_test.py::test_scan[timed-n64]": result(2.0)})
    lines = expectations.table("ch07", tmp_path / "baselines").splitlines()
    page = "| [scan](scan_test.py) |"
    launches = "launches 63, memory 600 MiB | launches 2, memory 240 MiB"
    assert lines[-2] == f"{page} tiled-n64 | {launches} | - |  | - |"
    assert lines[-1].startswith(f"{page} timed-n64 | 1 ms | 500 us | 2.000x [")


def test_the_claim_is_that_of_the_products_arch(told, tmp_path, capsys):
    told(case("ch07:scan", claims={"sm90": 2.5, "sm100": 1.5, "cpu": 1.0}))
    stored(tmp_path, {SCAN: result(2.0)})
    assert app.main(["expectations"]) == 1
    row, counted, below = capsys.readouterr().out.splitlines()[1:]
    assert row.split()[3:5] == ["2.5", "2.000x"]
    assert row.split()[-1] == "below"
    assert counted == "1 stored results, 0 with nothing to say"
    assert below == "below 1: the stored speedup is below the claim"
    assert app.main(["expectations", "--arch=sm100"]) == 0
    said = capsys.readouterr().out
    assert said == "1 stored results, 1 with nothing to say\n"


def test_results_without_a_case_are_gone_unless_their_page_is_unread(told, tmp_path):
    unread = {"path": "suites/ch07/te_test.py", "outcome": "skipped", "text": "no te"}
    found = told(case("ch07:scan"), unread=[unread])
    keys = ("left_test.py::test_left[a-n1]", "te_test.py::test_te[b-n1]")
    stored(tmp_path, {key: result(2.0) for key in keys})
    stands = expectations.stands_of(found, "nvidia-h200", "sm90")
    assert [stand.states for stand in stands] == [("gone",), ("unread",)]


def test_csv_and_json_have_every_result(told, tmp_path, capsys):
    told(case("ch07:scan"))
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


def test_what_is_no_format_says_what_is(capsys):
    assert app.main(["expectations", "--format=xml"]) == 2
    assert "'xml' is no format; legal are text, csv, json" in capsys.readouterr().err


# Prune


def test_prune_lists_and_removes_only_when_told(told, tmp_path, capsys):
    told(case("ch07:scan"))
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


def test_prune_tells_programs_the_same(told, tmp_path, capsys):
    unread = {"path": "suites/ch07/te_test.py", "outcome": "skipped", "text": "no te"}
    told(case("ch07:scan"), unread=[unread])
    gone = "left_test.py::test_left[a-n1]"
    path = stored(tmp_path, {SCAN: result(2.0), gone: result(2.0)})
    place = {"product": "nvidia-h200", "chapter": "ch07", "case": gone, "file": str(path)}
    for words, removed, found in ((), False, [place]), (["--yes"], True, [place]), ((), False, []):
        assert app.main(["prune", "--json", *words]) == 0
        plain = json.loads(capsys.readouterr().out)
        assert plain == {"removed": removed, "gone": found, "unread": [unread]}
    assert set(store.load(path).results) == {SCAN}


def test_what_is_recorded_meanwhile_stays(told, tmp_path, monkeypatch):
    found = told(case("ch07:scan"))
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


def test_results_of_pages_that_cannot_be_collected_are_kept(told, tmp_path):
    unread = {"path": "suites/ch07/te_test.py", "outcome": "failed", "text": "E"}
    found = told(unread=[unread])
    stored(tmp_path, {"te_test.py::test_te[b-n1]": result(2.0)})
    assert maintenance.prune_result(found, None, yes=True).lines == [
        "every stored result has its case",
        "kept, its page cannot be collected here: suites/ch07/te_test.py",
    ]


def test_a_folder_that_is_not_checked_out_has_cases_all_the_same(told, tmp_path):
    found = told(folders=["suites", "more"])
    with pytest.raises(CliError) as error:
        maintenance.prune_result(found, None, yes=True)
    assert str(error.value).splitlines() == [
        f"{tmp_path / 'more'} is not here: which of its cases are gone cannot be known",
        "Check all of the repository out:",
        "    git sparse-checkout disable",
    ]


def test_without_folders_of_pages_nothing_is_known_to_be_gone(told, tmp_path):
    found = told(folders=[])
    path = stored(tmp_path, {SCAN: result(2.0)})
    with pytest.raises(CliError) as error:
        maintenance.prune_result(found, None, yes=True)
    assert str(error.value).splitlines() == [
        "the ini file names no folder of pages: which cases are gone cannot be known",
        "Name them in [tool.pytest.ini_options] of pyproject.toml:",
        '    aisp_pages = ["suites"]',
    ]
    assert store.load(path).results


def test_a_product_without_results_and_a_file_that_is_locked_away(told, tmp_path, monkeypatch):
    found = told(case("ch07:scan"))
    path = stored(tmp_path, {"left_test.py::test_left[a-n1]": result(2.0)})
    with pytest.raises(CliError, match="no results of nvidia-b200 are stored in"):
        maintenance.prune_result(found, "nvidia-b200", yes=False)

    def full(path, gone):
        raise StoreError(f"{path} could not be written")

    monkeypatch.setattr(store, "prune", full)
    with pytest.raises(CliError, match=f"{path} could not be written"):
        maintenance.prune_result(found, None, yes=True)
    assert math.isclose(store.load(path).results.popitem()[1].speedup, 2.0, rel_tol=1e-3)
