"""Triton: compilations inside a window are counted, and the tuner's choices are recorded."""

from __future__ import annotations

import json

import pytest
import torch

from pytest_aisp.isolation.interference import InterferenceMonitor
from pytest_aisp.kernels.capture_launches import (
    choice_notes,
    differing_choices,
    merge_choices,
    record_choices,
)

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


def stored_one(x):
    tl.store(x, 1.0)


def test_triton_compilations_are_counted_and_other_listeners_called(monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    heard: list[str] = []
    compilation = triton.knobs.compilation
    monkeypatch.setattr(compilation, "listener", lambda **facts: heard.append(facts["src"].name))
    keeping = InterferenceMonitor()
    keeping.begin()  # a second start adds no second listener
    source = triton.compiler.ASTSource(JITFunction(stored_one), {"x": "*fp32"})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "1 Triton kernel compiled inside a timed window" in str(keeping.look())
    assert heard == ["stored_one"]


@pytest.fixture
def tuned(monkeypatch):
    """A kernel whose tuner measures that the second of two configurations is the faster one."""
    times = iter([[2.0], [1.0]] * 9)

    @triton.autotune(
        [triton.Config({"BLOCK": 8}), triton.Config({"BLOCK": 16})],
        key=["n"],
        do_bench=lambda call, quantiles: next(times),
    )
    @triton.jit
    def doubled_kernel(x, n, BLOCK: tl.constexpr):
        pass

    # Only the choice is of interest here: no kernel runs.
    monkeypatch.setattr(type(doubled_kernel.fn), "run", lambda *args, **kwargs: None)
    return doubled_kernel


def test_the_configuration_of_each_tuned_launch_is_recorded(tuned):
    x, choices = torch.zeros(4), {}
    run = type(tuned).run
    tuned[(1,)](x, 4)
    with record_choices(choices):
        tuned[(1,)](x, 4)
        tuned[(1,)](x, 8)
    assert type(tuned).run is run
    [config] = choices.pop("doubled_kernel")
    assert config.startswith("BLOCK: 16, num_warps: 4")
    assert choices == {}


def test_a_single_configuration_is_not_recorded(tuned):
    choices = {}
    tuned.configs = tuned.configs[:1]
    with record_choices(choices):
        tuned[(1,)](torch.zeros(4), 4)
    assert choices == {}


def test_nothing_is_recorded_without_triton(monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "triton.runtime.autotuner")
    choices = {}
    with record_choices(choices):
        pass
    assert choices == {}


def test_choices_of_several_processes_are_merged_and_shown():
    parts = [{"b": ["BLOCK: 8"]}, {"b": ["BLOCK: 4"], "a": {"BLOCK: 2"}}, {}]
    choices = merge_choices(parts)
    assert choices == {"a": ["BLOCK: 2"], "b": ["BLOCK: 4", "BLOCK: 8"]}
    assert choice_notes(choices) == [
        "tuned a: BLOCK: 2",
        "tuned b: BLOCK: 4 | BLOCK: 8",
    ]


def test_choices_that_differ_from_the_stored_are_reported():
    stored = {"a": ["BLOCK: 2"], "b": ["BLOCK: 4", "BLOCK: 8"]}
    assert differing_choices(stored, {"b": ["BLOCK: 4"], "new": ["BLOCK: 1"]}) == []
    assert differing_choices({}, {"a": ["BLOCK: 4"]}) == []
    assert differing_choices(stored, {"a": ["BLOCK: 4"]}) == [
        "a is tuned differently than in the stored result: BLOCK: 4, stored BLOCK: 2"
    ]


CHOSEN = {"choices": {"doubled_kernel": ["BLOCK: 16, num_warps: 4"]}}


def test_choices_are_stored_and_explain_a_slowdown(page, gpu, pytester):
    page()
    gpu(added=2e-5, doubled=1e-5, details=CHOSEN)
    options = ["--aisp-update-expectations", "--aisp-processes=3", "-vv"]
    result = pytester.runpytest_subprocess(*options)
    result.stdout.fnmatch_lines(["*tuned doubled_kernel: BLOCK: 16, num_warps: 4"])
    file = pytester.path / "baselines" / "simulated-gpu" / "ch99.json"
    [stored] = json.loads(file.read_text())["results"].values()
    assert stored["choices"] == CHOSEN["choices"]
    gpu(added=2e-5, doubled=1.2e-5, details={"choices": {"doubled_kernel": ["BLOCK: 8"]}})
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(
        [
            "*stored in baselines/simulated-gpu/ch99.json*-> red",
            "*doubled_kernel is tuned differently than in the stored result: BLOCK: 8, stored*",
        ]
    )
    assert result.ret == 1
