"""If a conftest provides the timer, its name is shown with its times, and it never passes as
real."""

from __future__ import annotations

import json

import fake_results
import pytest
from msgspec.structs import replace

from pytest_aisp.results import store

TIMER = "pytest_aisp.timing.fake_device:simulate"
LINE = f"simulated: the times come from {TIMER} (pytest_aisp_timer), not from a device"


def test_the_timer_is_named_in_every_place(timed_page, pytester):
    timed_page()
    options = ["-v", "--aisp-artifacts=out", "--junitxml=junit.xml", "--aisp-processes=1"]
    result = pytester.runpytest_subprocess("--aisp-update-expectations", *options)
    assert result.ret == 0
    header = [f"aisp: {LINE}", "*doubling_test.py*NEW 2.* simulated *", "doubling *", LINE]
    result.stdout.fnmatch_lines(header)
    out = pytester.path / "out"
    [row] = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    assert (row["product"], row["environment"]["timer"]) == ("simulated-gpu", TIMER)
    results = json.loads((out / "results.json").read_text())
    assert results["run"]["timer"] == results["cases"][0]["environment"]["timer"] == TIMER
    assert f"<dt>simulated by</dt><dd>{TIMER}</dd>" in (out / "report.html").read_text()
    junit = (pytester.path / "junit.xml").read_text()
    assert f'name="aisp_timer" value="{TIMER}"' in junit
    stored = store.load(pytester.path / "baselines/simulated-gpu/ch99.json")
    assert [facts["timer"] for facts in stored.environments.values()] == [TIMER]
    assert [r.samples for r in stored.results.values()] == [row["samples"]["sha256"]]


@pytest.mark.parametrize(
    ("old", "new", "options", "says"),
    [
        (
            "'simulated-gpu'",
            "'nvidia-h200'",
            ["--aisp-update-expectations"],
            [
                f"*pytest_aisp_timer: the times of {TIMER} would pass for measurements of nvidia*",
                "Begin the product with simulated-:",
                '    "product": "simulated-nvidia-h200"',
            ],
        ),
        (
            "'simulated-gpu'",
            "''",
            [],
            ["*pytest_aisp_timer: the timer lacks product", "Return all of them:", "    {*}"],
        ),
        (
            "sm90",
            "sm90",
            ["--aisp-untrusted"],
            [
                f"*--aisp-untrusted cannot be combined with the timer {TIMER}: no other process*",
                "Remove the hook pytest_aisp_timer from conftest.py",
            ],
        ),
    ],
    ids=["real product", "no product", "untrusted"],
)
def test_a_timer_that_would_pass_for_a_real_one_is_refused(
    timed_page, pytester, old, new, options, says
):
    timed_page()
    conftest = pytester.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace(old, new))
    result = pytester.runpytest_subprocess(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(says)
    assert not (pytester.path / "baselines").exists()


def test_simulated_results_are_refused_as_those_of_a_real_product(tmp_path):
    path = fake_results.stored(tmp_path, {"a": fake_results.result(2.0)}, product="simulated-gpu")
    stored = store.load(path)
    facts = {name: {**e, "timer": TIMER} for name, e in stored.environments.items()}
    text = store.dump(replace(stored, environments=facts))
    assert store.parse(path, text).product == "simulated-gpu"
    real = tmp_path / "nvidia-h200" / path.name
    with pytest.raises(store.StoreError, match=r"the timer .*:simulate, not the plugin"):
        store.parse(real, text.replace("simulated-gpu", "nvidia-h200"))
