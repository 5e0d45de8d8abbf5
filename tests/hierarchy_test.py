"""The probe of the memory hierarchy, as far as it can be checked without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from pytest_aisp.kernels import capture_launches
from pytest_aisp.kernels.capture_launches import CapturedLaunches
from pytest_aisp.kernels.fake_gpu import fake_gpu
from pytest_aisp.timing import hierarchy


def test_a_list_visits_every_link_once_and_ends_where_it_begins():
    links = hierarchy.linked(64, 32, "cpu").tolist()
    seen, at = set(), 0
    for _ in range(64):
        seen.add(at)
        at = links[at]
    assert (at, seen) == (0, {32 * i for i in range(64)})


def test_near_and_far_are_the_outer_tenths():
    near, far = hierarchy.near_and_far([200] * 50 + [280] * 50)
    assert (near, far) == (200, 280)


def test_every_level_is_measured_with_arguments_that_its_kernel_takes(monkeypatch):
    captured = CapturedLaunches()

    def seconds(run):
        run()
        return 2.0

    monkeypatch.setattr(hierarchy, "seconds", seconds)
    monkeypatch.setattr(hierarchy, "near_and_far", lambda cycles: (1.0, 2.0))
    monkeypatch.setattr(hierarchy, "HOST_BYTES", 1 << 20)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(hierarchy, "on_gpu", lambda pinned: pinned.to("cuda"))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: [])
    with fake_gpu("sm90"), capture_launches._capturing(captured, assemble=False):
        gpu = SimpleNamespace(multi_processor_count=132, L2_cache_size=3 << 20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: gpu)
        measured = hierarchy.measure()
    assert captured.error is None
    assert {launch.name for launch in captured.unique.values()} == {
        *("chase", "chase_shared", "read_cached", "line_latencies", "fused_multiply_adds"),
        *("dependent_multiply_adds", "shared_read", "l2_read"),
    }
    names = [level.name for level in measured.levels]
    on_board = ["registers", "shared memory", "L1", "L2", "L2", "L2", "L2", "DRAM"]
    assert names == [*on_board, "pinned host memory"]
    sizes = [level.working_set for level in measured.levels[3:-1]]
    assert sizes == [2**15, 2**17, 2**19, 2**20, 2**27]  # an L2 of 3 MiB
    l1 = measured.levels[2]
    assert l1.bandwidth == 4 * 512 * 16 * 264 * 1024 / 2.0
    assert l1.latency == 2.0 / 4096
    host = measured.levels[-1]
    assert host.working_set == 1 << 20
    assert host.bandwidth == 4 * hierarchy.HOST_ROUNDS * 16 * 264 * 1024 / 2.0
    assert host.latency == 2.0 / 4096


def test_pinned_memory_reaches_torch_as_an_address_of_the_gpu(monkeypatch):
    given = []
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: given.append((memory, device)))
    pinned = torch.zeros(64, dtype=torch.int32)
    hierarchy.on_gpu(pinned)
    [(memory, device)] = given
    assert device == "cuda"
    interface = memory.__cuda_array_interface__
    assert interface["data"] == (pinned.data_ptr(), False)
    assert (interface["shape"], interface["typestr"]) == ((64,), "<i4")
