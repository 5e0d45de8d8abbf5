"""Pages that are a curve over one key: their points, their line in the terminal, their gates."""

from __future__ import annotations

import math

import pytest

from pytest_aisp.results.curves import curves
from pytest_aisp.results.row import Row

SIZES = 'sizes=[{{"n": 1001, "block": b}} for b in (32, 64, 128)], sweep=Sweep("block"{judged}),'


def point(at, speedup, width=0.01, **size):
    value = math.log(speedup)
    row = Row("id", "f", "k", "p", "test_x", "tiled", {"block": at, **size}, "dram", sweep="block")
    row.value, row.low, row.high = value, value - width, value + width
    return row


def test_a_curve_names_its_best_point_and_its_knee():
    rows = [point(at, s, n=7) for at, s in ((256, 1.98), (64, 1.2), (512, 2.0), (1024, 1.5))]
    assert [str(curve) for curve in curves(rows)] == [
        "test_x[tiled] at n=7 over block 64 to 1024: best 2.000x at 512, knee 256"
    ]


def test_a_curve_names_where_the_faster_side_changes():
    rows = [point(at, s) for at, s in ((1, 0.5), (2, 1.001), (4, 1.3), (8, 1.3), (16, 0.9))]
    assert str(curves(rows)[0]).endswith(
        "best 1.300x at 4, knee 4, crosses 1x between 1 and 4 and 8 and 16"
    )


def test_words_keep_the_order_of_the_page():
    [curve] = curves([point(at, 1.5) for at in ("small", "large", "huge")])
    assert [p.at for p in curve.points] == ["small", "large", "huge"]


def test_untimed_cases_and_other_sizes_are_no_points():
    untimed = point(64, 1.5)
    untimed.value = None
    assert curves([untimed, point(32, 1.5), point(128, 1.5), point(256, 1.5, n=8)]) == []


@pytest.fixture
def swept(page):
    def swept(judged="", **parts):
        path = page(defs="from pytest_aisp import Sweep", **parts)
        text = path.read_text().replace("device, n)", "device, n, block)")
        text = text.replace("lambda n:", "lambda n, block:")
        text = text.replace('"n": 33', '"n": 33, "block": 3')
        text = text.replace('sizes=[{"n": 1001}],', SIZES.format(judged=judged), 1)
        path.write_text(text)

    return swept


def test_points_that_are_not_judged_have_no_gate(swept, gpu, pytester):
    gpu(added=2e-5, doubled=1e-5)
    swept(", judged=[64]", at_least="3.0")
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(
        [
            "curve: test_doubling[[]doubled] at n=1001 over block 32 to 128: best *, knee *",
            "*1 failed, 2 new*",
        ]
    )


def test_a_loss_against_the_record_is_red_only_where_judged(swept, gpu, pytester):
    gpu(added=2e-5, doubled=1e-5)
    swept(", judged=[64]")
    record = ("--aisp-update-expectations", "--aisp-processes=1")
    assert pytester.runpytest_subprocess(*record).ret == 0
    gpu(added=2e-5, doubled=1.5e-5)
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(["*1 failed, 2 passed*"])


def test_without_judged_every_point_is_judged(swept, gpu, pytester):
    gpu(added=2e-5, doubled=1e-5)
    swept(at_least="3.0")
    pytester.runpytest_subprocess().stdout.fnmatch_lines(["*3 failed*"])
