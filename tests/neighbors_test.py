"""Other processes on the GPU: how their time slices are found, and what becomes of the verdict."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch

from pytest_aisp.isolation.interference import Disturbed
from pytest_aisp.kernels import cuda_cpp
from pytest_aisp.kernels.nvrtc import NoCompiler
from pytest_aisp.page.pair import SideError
from pytest_aisp.timing import neighbors
from pytest_aisp.timing.fake_device import Noise, Process
from pytest_aisp.timing.neighbors import Neighbors, Slices
from pytest_aisp.timing.schedule import Budget
from pytest_aisp.util import cpu_load

KERNEL = [0, 200_000, 0, 40, 32]
"""What a kernel reads on a quiet GPU: start, end, lost, longest and shortest step."""


def later(kernel, ns):
    """Return `kernel`, which ends `ns` later, followed by another one."""
    return [kernel, [kernel[1] + ns, kernel[1] + ns + 200_000, *kernel[2:]]]


def test_a_quiet_gpu_has_no_time_slices():
    assert neighbors.slices(later(KERNEL, 1_500)) == Slices(0.0, 0.0, pytest.approx(401.5e-6))


def test_a_time_slice_inside_a_kernel_and_one_between_two_are_found():
    interrupted = [0, 2_200_000, 2_100_000, 2_000_000, 32]
    seen = neighbors.slices(later(interrupted, 1_000_000))
    assert seen.longest == pytest.approx(2e-3)
    assert seen.lost == pytest.approx(2.1e-3 * 2 + 1e-3)


def test_a_coarse_counter_is_not_taken_for_time_slices():
    """Some GPUs' counters advance by a millisecond at a time."""
    coarse = [0, 1_000_000, 1_000_000, 1_000_000, 1_000_000]
    assert neighbors.slices([coarse, [1_000_000, 2_000_000, *coarse[2:]]]).lost == 0


@pytest.fixture
def fake_cuda(monkeypatch):
    """Replace CUDA by kernels that write `rows`. `late` says which chains the host queued late."""
    state = SimpleNamespace(rows=[KERNEL] * neighbors.KERNELS, late=[], launched=0)

    def watch(found, number, length, least):
        state.launched += 1
        found[number] = torch.tensor(state.rows[number])

    event = SimpleNamespace(record=lambda: None, query=lambda: state.late.pop(0))
    module = SimpleNamespace(watch={(1, 1): watch})
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(cuda_cpp, "cuda_module", lambda name: module)
    neighbors.slice_reader.cache_clear()
    yield state
    neighbors.slice_reader.cache_clear()


def test_a_chain_that_the_host_queued_late_is_repeated(fake_cuda):
    fake_cuda.late = [False, True, False, True, True, True]
    read = neighbors.slice_reader()
    assert read().lost == 0
    assert fake_cuda.launched == 3 * neighbors.KERNELS
    assert read() is None, "the pauses may be the host's"


def test_without_a_compiler_no_chain_runs(fake_cuda, monkeypatch):
    def missing(name):
        def watch(*args):
            raise NoCompiler

        return SimpleNamespace(watch={(1, 1): watch})

    monkeypatch.setattr(cuda_cpp, "cuda_module", missing)
    assert neighbors.slice_reader() is None
    assert Neighbors(None).details() == {}


def gpu_with(share, **named):
    """Return the neighbors on a GPU that others use for `share` of the time."""
    return Neighbors(lambda: Slices(share * 5e-3, 2e-3 * (share > 0), 5e-3), lambda: named)


@pytest.mark.parametrize(
    ("share", "named", "text"),
    [
        (0.3, {}, "another process uses 30% of this GPU in time slices of up to 2 ms"),
        (0.3, {"p": 0.34}, "p uses 34% of this GPU in time slices of up to 2 ms"),
        (0.0, {"p": 0.34, "q": 0.01}, "p uses 34% of this GPU"),
        (0.0, {"p": 0.4, "q": 0.3}, "p and q use 40% of this GPU"),
    ],
)
def test_who_uses_the_gpu_is_named_with_the_share(share, named, text):
    found = gpu_with(share, **named)
    with pytest.raises(Disturbed) as raised:
        found.before()
    assert str(raised.value) == text
    assert found.details()["neighbor"]["text"] == text


def test_a_small_share_is_not_named():
    found = gpu_with(0.03, compositor=0.04)
    found.before()
    found.refuse(neighbors.NO_VERDICT)
    assert found.details() == {}


def test_a_contradiction_is_blamed_on_the_side_only_if_nothing_else_used_the_machine(monkeypatch):
    monkeypatch.setattr(cpu_load.CpuLoad, "look", lambda self: None)
    cold = "doubled: the L2 is not cold\ndeclare l2='warm'"
    with pytest.raises(SideError, match="the L2 is not cold"), gpu_with(0.0).excusing():
        raise SideError(cold)
    blamed = r"^another process uses 2% .*; meanwhile: doubled: the L2 is not cold$"
    with pytest.raises(Disturbed, match=blamed), gpu_with(0.02).excusing():
        raise SideError(cold)
    monkeypatch.setattr(cpu_load.CpuLoad, "look", lambda self: "a busy CPU")
    with pytest.raises(Disturbed, match="a busy CPU; meanwhile: doubled"), gpu_with(0).excusing():
        raise SideError(cold)


def test_uneven_windows_lead_to_a_longer_look():
    looks = []
    found = Neighbors(lambda: looks.append(1))
    found.after_lap([1.0, 1.0, 1.2], [1.0, 1.0, 1.0])
    assert len(looks) == neighbors.FEW
    found.after_lap([1.0, 1.0, 1.3], [1.0, 1.0, 1.0])
    assert len(looks) == neighbors.FEW + neighbors.MANY


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_a_simulated_neighbor_is_detected(share, seed):
    process = Process((2e-5, 1e-5), Noise(neighbor=share), random.Random(seed))
    with pytest.raises(Disturbed, match=r"^another process uses \d\d% of this GPU in time slices"):
        process.measure(Budget())


TENTH = {"neighbor": 0.1}


def test_a_neighbor_is_named_beside_a_green_verdict(page, gpu, pytester):
    page(at_least="1.2")
    gpu(added=2e-5, doubled=1e-5, noise=TENTH)
    result = pytester.runpytest_subprocess("-v", "--aisp-artifacts=a")
    said = "another process uses ??% of this GPU in time slices of up to 0.5 ms"
    result.stdout.fnmatch_lines(["*NEW *", f"*n1001[]]: {said}: the speedup may be wrong"])
    [case] = json.loads((pytester.path / "a" / "results.json").read_text())["cases"]
    assert case["verdict"] == "new"
    assert "the speedup may be wrong" in case["remarks"][0]


def test_beside_a_neighbor_no_verdict_is_red_and_nothing_is_stored(page, gpu, pytester):
    page(at_least="3.0")
    gpu(added=2e-5, doubled=1e-5, noise=TENTH)
    result = pytester.runpytest_subprocess("-v", "-oaisp_wait=0")
    result.stdout.fnmatch_lines(["*DISTURBED: another process uses ??% of this GPU*"])
    assert result.ret == 17
    page(at_least="1.2")
    recorded = pytester.runpytest_subprocess("--aisp-update-expectations", "-oaisp_wait=0")
    recorded.stdout.fnmatch_lines(["DISTURBED: 1 of 1 case got no verdict*"])
    assert not (pytester.path / "baselines").exists()


def test_a_wrong_result_is_wrong_beside_a_neighbor_too(page, gpu, pytester):
    page("2 * x + 1")
    gpu(added=2e-5, doubled=1e-5, noise={"neighbor": 0.5})
    result = pytester.runpytest_subprocess("-oaisp_wait=0")
    result.stdout.fnmatch_lines(["*1 failed*"])
    assert result.ret == 1
