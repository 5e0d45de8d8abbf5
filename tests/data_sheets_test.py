"""Predictions from data sheets, for GPUs that have not been measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_results import case, result, stored
from stored_results_test import SCAN, collected, rates

from pytest_aisp.cli import app
from pytest_aisp.page.gpu_specs import GPU_ARCHS
from pytest_aisp.timing import peaks
from pytest_aisp.timing.data_sheets import REFERENCE, SHEETS, estimate, shares
from pytest_aisp.timing.peaks import Peaks

__all__ = ["collected"]  # a fixture
ROOT = Path(__file__).parents[1]
COSTS = {
    "baseline": [{"read": 4.8e9, "launches": 1}],
    "optimized": [{"ops": {"bf16": 2e11}, "launches": 1}],
}
MEASURED = {"read": 2.4e12, "bf16": 4e14, "peer": 4.5e11, "l2": 9e12}
TIMES = {"graph_node": 1e-6, "launch": 7e-6, "all_reduce": 1e-5}


def test_every_gpu_has_a_source_and_a_rate_of_dram():
    assert {sheet.arch for sheet in SHEETS.values()} >= set(GPU_ARCHS)
    for sheet in SHEETS.values():
        assert sheet.source.startswith("NVIDIA ")
        assert 0.2 < sheet.figures["dram"] < 10


def test_the_stored_rates_are_below_the_data_sheet():
    links = peaks.load(ROOT / "baselines" / f"{REFERENCE}-x2" / "peaks.json")
    one = peaks.load(ROOT / "baselines" / REFERENCE / "peaks.json")
    joined = peaks.joined(one, links)
    found = shares(joined)
    assert {"copy", "read", "write", "bf16", "fp8", "peer", "h2d", "pcie_both"} <= found.keys()
    for rate, share in found.items():
        assert (0.4 if rate == "int8" else 0.6) < share < 1, rate  # torch's int8 product is slow


@pytest.mark.parametrize(
    ("product", "rates"),
    [
        ("nvidia-h200", {"read": 2.4e12, "bf16": 4e14, "peer": 4.5e11, **TIMES}),
        (
            "nvidia-b200",
            {"read": 2.4e12 * 7.7 / 4.8, "bf16": 4e14 * 2250 / 989.5, "peer": 9e11, **TIMES},
        ),
        ("nvidia-gb10", {"read": 2.4e12 * 0.273 / 4.8, "graph_node": 1e-6, "launch": 7e-6}),
    ],
)
def test_rates_reach_the_same_share_of_their_data_sheet(product, rates):
    found = estimate(product, Peaks("nvidia-h200", {**MEASURED, **TIMES}))
    assert found.rates == pytest.approx(rates)  # no data sheet has the rate of the L2
    assert found.facts["from"] == SHEETS[product].source


def test_rates_per_cycle_follow_the_sms_and_their_clock():
    measured = Peaks("nvidia-h200", {**MEASURED, "shared": 3.3e13, "sfu": 4e12})
    b200, a100, gb300 = (
        estimate(product, measured).rates
        for product in ("nvidia-b200", "nvidia-a100-sxm4-80gb", "nvidia-gb300")
    )
    assert b200["shared"] == pytest.approx(3.3e13 * 75 / 67)
    assert a100["sfu"] == pytest.approx(4e12 * 2 * 19.5 / 67)  # an SM has half the fp32 lanes
    assert "shared" not in gb300  # its data sheet has no fp32 rate


def test_a_page_is_shown_with_predictions_from_a_data_sheet(collected, tmp_path, capsys):
    collected(case("ch07:scan", costs=COSTS))
    stored(tmp_path, {SCAN: result(2.0)})
    rates(tmp_path, **MEASURED, **TIMES)
    (tmp_path / "suites/ch07").mkdir(parents=True, exist_ok=True)
    (tmp_path / "suites/ch07/scan_test.py").write_text('"""A scan."""\n')
    assert app.main(["suite", "show", "ch07:scan", "--product=nvidia-b200"]) == 0
    printed = capsys.readouterr().out
    assert "predicted from the data sheet" in printed
    assert "not measured: NVIDIA Blackwell data sheet" in printed


def test_a_product_without_results_is_predicted_from_its_data_sheet(collected, tmp_path, capsys):
    collected(
        case("ch07:scan", costs=COSTS),
        case("ch07:sums", costs={"baseline": [{"l2": 1}], "optimized": [{"read": 4.8e9}]}),
        case("ch07:wgmma", costs=COSTS, archs=["sm90"]),
    )
    keys = [f"{name}_test.py::test_{name}[tiled-n64]" for name in ("scan", "sums", "wgmma")]
    stored(tmp_path, {key: result(2.0) for key in keys})
    rates(tmp_path, **MEASURED, **TIMES)
    before = sorted((tmp_path / "baselines").rglob("*"))
    command = ["results", "predictions", "--product=nvidia-b200"]
    assert app.main(command) == 0
    head, baseline, tiled, missing, alone, *about = capsys.readouterr().out.splitlines()
    assert "predicted from the data sheet  predicted speedup  limit" in head
    assert "stored" not in head
    place = ["nvidia-b200", "ch07", SCAN]
    assert baseline.split() == [*place, "baseline", "1.248", "ms", "read"]
    assert tiled.split() == [*place, "tiled", "220.9", "us", "5.649x", "bf16"]
    assert missing.split()[2:] == [keys[1], "baseline", "not", "predicted:", "l2"]
    assert alone.split()[3:] == ["tiled", "1.247", "ms", "read"]
    assert about == [
        "not measured: NVIDIA Blackwell data sheet, one GPU of HGX B200",
        "assumed: rates reach the share of the data sheet that nvidia-h200 reaches"
        " (bf16 40%, peer 100%, read 50%)",
        "assumed: fixed times, such as of a launch, are those of nvidia-h200",
        "assumed: shared memory and special functions have nvidia-h200's rate per SM and cycle",
        "assumed: costs do not change with the L2 (nvidia-h200: 50 MB, here: unknown)",
        "1 not predicted: the data sheet lacks l2",
    ]
    assert app.main([*command, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [one["missing"] for one in plain] == ["", "", "l2", ""]
    assert plain[0]["predicted_from_data_sheet"] == pytest.approx(1.248e-3, rel=1e-3)
    assert sorted((tmp_path / "baselines").rglob("*")) == before, "an estimate is never stored"


def test_links_are_predicted_too(collected, tmp_path, capsys):
    collected(case("ch07:scan", costs={"optimized": [{"sent": 9e8}]}))
    stored(tmp_path, {SCAN: result(2.0)}, "nvidia-h200-x2")
    rates(tmp_path, read=4e12)
    rates(tmp_path, "nvidia-h200-x2", peer=4.5e11)
    assert app.main(["results", "predictions", "--product=nvidia-b200"]) == 0
    _, sent, *_ = capsys.readouterr().out.splitlines()
    assert sent.split() == ["nvidia-b200-x2", "ch07", SCAN, "tiled", "1", "ms", "peer"]


def test_stored_results_come_before_the_data_sheet(collected, tmp_path, capsys):
    collected(case("ch07:scan", costs=COSTS))
    stored(tmp_path, {SCAN: result(2.0)}, "nvidia-b200")
    rates(tmp_path, "nvidia-b200", read=7e12, bf16=1.5e15, graph_node=1e-6)
    assert app.main(["results", "predictions", "--product=nvidia-b200"]) == 0
    assert "stored / predicted" in capsys.readouterr().out


def test_an_older_gpu_gets_the_cases_that_need_no_feature(collected, tmp_path, capsys):
    collected(case("ch07:scan", costs=COSTS), case("ch07:tma", costs=COSTS, needs=["tma"]))
    key = "tma_test.py::test_tma[tiled-n64]"
    stored(tmp_path, {SCAN: result(2.0), key: result(2.0)})
    rates(tmp_path, **MEASURED, **TIMES)
    assert app.main(["results", "predictions", "--product=nvidia-a100-sxm4-80gb"]) == 0
    shown = capsys.readouterr().out
    assert SCAN in shown
    assert key not in shown
    assert "here: 40 MB" in shown


def test_without_rates_or_cases_there_is_an_error(collected, tmp_path, capsys):
    collected(case("ch07:scan", costs=COSTS, archs=["sm90"]))
    command = ["results", "predictions", "--product=nvidia-b200"]
    assert app.main(command) == 2
    assert capsys.readouterr().err.splitlines() == [
        "no peaks of nvidia-h200 are stored, from which the data sheet of nvidia-b200 is scaled;"
        " measure them there:",
        "    aisp machine peak --store",
    ]
    stored(tmp_path, {SCAN: result(2.0)})
    rates(tmp_path, **MEASURED, **TIMES)
    assert app.main(command) == 2
    message = "no stored case of nvidia-h200 that declares a cost runs on sm100\n"
    assert capsys.readouterr().err == message
