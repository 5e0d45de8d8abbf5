"""The replays of arrivals at several servers, and what their bootstrap judges."""

from __future__ import annotations

from xml.etree import ElementTree

import latency_plot
import pytest
import serving_load
from serving_client import Answer

TTFT, ITL = 0.5, 0.2


def replay(good, late=0, stalled=0, seconds=1.0):
    """Return a replay in which so many requests meet both objectives, and others miss one."""
    answers = [Answer(0.0, [0.1, 0.2])] * good + [Answer(0.0, [0.6, 0.7])] * late
    return answers + [Answer(0.0, [0.1, 0.4])] * stalled, seconds


def test_goodput_counts_requests_that_meet_both_objectives():
    some = [replay(3, late=2, stalled=1), replay(2, late=4, seconds=1.5)]
    assert serving_load.goodput(some, TTFT, ITL) == 2.0


@pytest.mark.parametrize(
    ("goods", "verdict"),
    [
        ((8, 9, 8, 9, 8, 9), "gains"),
        ((2, 3, 2, 3, 2, 3), "loses"),
        ((5, 4, 6, 5, 3, 7), "no difference shown"),
    ],
)
def test_a_side_gains_if_the_interval_of_its_goodput_says_so(goods, verdict):
    first = [replay(good) for good in (5, 6, 5, 4, 5, 5)]
    side = [replay(good, late=1) for good in goods]
    assert serving_load.gain(side, first, TTFT, ITL).endswith(f": {verdict}")


def test_an_objective_that_nobody_meets_gives_no_ratio_and_a_status(capsys):
    assert "for no request" in serving_load.gain([replay(1)], [replay(0, late=3)], TTFT, ITL)
    assert serving_load.main(["--loads", "2000", "--replays", "5", "--ttft", "1e-9"]) == 1
    assert "static: most goodput 0.000 requests/s at any load" in capsys.readouterr().out


def test_all_sides_serve_the_same_arrivals_and_print_quantiles_with_intervals(capsys):
    words = ["--loads", "500", "--replays", "5", "--ttft", "60", "--itl", "60"]
    assert serving_load.main(words) == 0
    out = capsys.readouterr().out
    for side in serving_load.SIDES:
        assert f"{side} at load 500: 15 requests in" in out
        assert f"{side} at load 500: TTFT p99" in out
        assert f"{side}: most goodput" in out


def test_the_band_of_a_distribution_comes_from_the_replays():
    replays = [[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]]
    middle, low, high = latency_plot.band_of(replays)
    half = latency_plot.SHARES.index(0.5)
    assert (low[half], middle[half], high[half]) == (3.0, 6.0, 8.0)
    _, low, high = latency_plot.band_of([[1.0, 2.0, 3.0]] * 5)
    assert low == high  # equal replays leave nothing uncertain


def test_a_plot_shows_each_side_and_the_objective(tmp_path):
    found = {"static": [replay(5, late=1)] * 5, "chunked": [replay(6)] * 5}
    serving_load.plot(found, 200.0, tmp_path / "new", TTFT, ITL)
    for name in ("ttft-200.svg", "itl-200.svg"):
        root = ElementTree.fromstring((tmp_path / "new" / name).read_text())
        shown = {element.text for element in root.iter() if element.tag.endswith("text")}
        assert {"static", "chunked", "objective"} <= shown


@pytest.mark.parametrize("words", [["--loads", "0"], ["--replays", "1"]])
def test_no_arrivals_and_too_few_replays_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        serving_load.main(words)
    assert "loads must be positive" in capsys.readouterr().err
