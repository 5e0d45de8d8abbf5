"""`aisp links bandwidth` on simulated GPUs: slow hops, stored peaks, messages.

CPU tensors and fake events stand in for CUDA.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from topology_test import SWITCHED, nvml_of

from pytest_aisp.cli import app
from pytest_aisp.distributed import bandwidth
from pytest_aisp.distributed.bandwidth import CudaCopier, Hop, flag_slow_hops
from pytest_aisp.distributed.topology import Route
from pytest_aisp.timing import peaks
from pytest_aisp.util import device, gpu_lease
from pytest_aisp.util.device import Machine

GB, GIB = 1e9, 1 << 30
NV18 = ("NVLink 4 x18", 450 * GB)


def hop(rate, kind=NV18, pair=(0, 1), *, both=False):
    name, limit = kind
    limit = limit and limit * (2 if both else 1)
    return Hop(*pair, both, rate * GB, name, limit)


def slow(rates, kind=NV18, nbytes=GIB, *, both=False):
    return [h.slow for h in flag_slow_hops([hop(rate, kind, both=both) for rate in rates], nbytes)]


def test_a_hop_far_below_the_median_of_its_kind_is_slow():
    reasons = slow([390, 391, 388, 300])
    assert reasons == ["", "", "", "77% of the median of NVLink 4 x18, 389 GB/s"]
    assert slow([390, 391, 388, 313]) == [""] * 4


def test_hops_in_both_directions_may_differ_more():
    healthy = [773, 698, 695, 623, 617, 522]  # four H200s
    assert slow(healthy, both=True) == [""] * 6
    reasons = slow([773, 770, 760, 430], both=True)
    assert reasons[:3] == [""] * 3
    assert reasons[3].startswith("56% of the median of NVLink 4 x18")


def test_equal_hops_below_the_floor_are_all_slow():
    assert slow([249] * 2) == ["below the 250 GB/s that NVLink 4 x18 must reach"] * 2
    assert slow([251] * 2) == [""] * 2
    assert slow([499] * 2, both=True)[0] == "below the 500 GB/s that NVLink 4 x18 must reach"
    assert slow([260] * 2, ("NVLink 5 x18", 900 * GB)) == [""] * 2


def test_the_floor_of_a_narrow_bridge_scales_with_its_limit():
    assert slow([90] * 2, ("NVLink 3 x4", 100 * GB)) == [""] * 2
    assert slow([50] * 2, ("NVLink 3 x4", 100 * GB))[0].startswith("below the 55.56 GB/s")


def test_no_floor_over_pcie_unknown_links_or_for_small_copies():
    assert slow([20] * 2, ("NVLink ? x18", None)) == [""] * 2
    assert slow([20] * 2, ("PCIe 5 x16, SYS", 63 * GB)) == [""] * 2
    assert slow([20] * 2, nbytes=1 << 20) == [""] * 2


def test_hops_are_compared_within_their_kind():
    hops = [hop(390), hop(50, ("PCIe 5 x16, SYS", 63 * GB)), hop(700, both=True)]
    assert [h.slow for h in flag_slow_hops(hops, GIB)] == [""] * 3


class FakeCopier:
    """A copier with a rate in GB/s for each ordered pair of GPUs."""

    def __init__(self, nbytes, rates=None, *, loses=()):
        self.nbytes, self.rates, self.loses, self.asked = nbytes, rates or {}, loses, []

    def seconds(self, pairs, copies):
        self.asked.append((tuple(pairs), copies))
        return self.nbytes * copies / (min(self.rates.get(p, 390) for p in pairs) * GB)

    def arrived(self, pairs):
        return not any(pair in self.loses for pair in pairs)


def routes(count, links=18):
    pairs = itertools.permutations(range(count), 2)
    return {(a, b): Route(a, b, "SYS", {}, links, "4") for a, b in pairs}


def measured(count, *args, nbytes=GIB, **kwargs):
    return bandwidth.measure(
        FakeCopier(nbytes, *args, **kwargs), routes(count), nbytes, lambda t: None
    )


def test_measure_covers_each_direction_and_both_at_once():
    hops = measured(3)
    assert [h.label for h in hops if not h.both] == [
        *("GPU 0 -> GPU 1", "GPU 0 -> GPU 2", "GPU 1 -> GPU 0"),
        *("GPU 1 -> GPU 2", "GPU 2 -> GPU 0", "GPU 2 -> GPU 1"),
    ]
    assert [h.label for h in hops if h.both] == [
        *("GPU 0 <-> GPU 1", "GPU 0 <-> GPU 2", "GPU 1 <-> GPU 2"),
    ]
    assert [h.rate / GB for h in hops] == [pytest.approx(390)] * 6 + [pytest.approx(780)] * 3
    assert hops[0].share == pytest.approx(390 / 450)
    assert hops[-1].share == pytest.approx(780 / 900)


def test_a_window_has_4_to_64_copies():
    for nbytes, count in ((4 << 10, 64), (256 << 20, 16), (8 << 30, 4)):
        copier = FakeCopier(nbytes)
        bandwidth.measure(copier, routes(2), nbytes, lambda t: None)
        assert {c for _, c in copier.asked} == {count}
        assert len(copier.asked) == 3 * bandwidth.WINDOWS


def test_table_and_exit_code_of_a_healthy_machine():
    result = bandwidth.bandwidth_result(measured(2), GIB, as_json=False)
    assert result.code == 0
    pytest.LineMatcher(list(result.lines)).fnmatch_lines(
        [
            "device-to-device copies of 1 GiB, median of 7 windows",
            "hop              rate      limit     share  kind",
            "GPU 0 -> GPU 1   390 GB/s  450 GB/s  87%    NVLink 4 x18",
            "GPU 0 <-> GPU 1  780 GB/s  900 GB/s  87%    NVLink 4 x18",
            "no slow hop",
        ]
    )


def test_a_slow_hop_is_reported_with_exit_code_1():
    result = bandwidth.bandwidth_result(measured(3, {(2, 0): 120}), GIB, as_json=False)
    assert result.code == 1
    assert list(result.lines[-4:]) == [
        "slow: GPU 2 -> GPU 0: 120 GB/s, 31% of the median of NVLink 4 x18, 390 GB/s",
        "slow: GPU 0 <-> GPU 2: 240 GB/s, 31% of the median of NVLink 4 x18, 780 GB/s",
        "Measure again with nothing else on the GPUs, then look at the links' errors:",
        "    nvidia-smi nvlink -e",
    ]
    assert [line.split("  ")[-1] for line in result.lines].count("slow") == 2


def test_lost_data_is_reported_with_exit_code_1():
    result = bandwidth.bandwidth_result(measured(2, loses=[(1, 0)]), GIB, as_json=False)
    assert result.code == 1
    assert "WRONG: GPU 1 -> GPU 0: the target does not hold the sent data" in result.lines


def test_an_unknown_limit_shows_as_a_question_mark():
    result = bandwidth.bandwidth_result([hop(390, ("NVLink ? x18", None))], GIB, as_json=False)
    words = "GPU 0 -> GPU 1 390 GB/s ? ? NVLink ? x18"
    assert " ".join(result.lines[2].split()) == words


def test_json_has_every_hop():
    result = bandwidth.bandwidth_result(measured(2, {(1, 0): 10}), GIB, as_json=True)
    plain = json.loads("\n".join(result.lines))
    assert (plain["size"], plain["windows"], result.code) == (GIB, 7, 1)
    assert plain["hops"][0]["share"] == pytest.approx(390 / 450)
    assert "median" in plain["hops"][1]["slow"]


class Event:
    """A fake event; its clock advances by a millisecond per copy."""

    now = 0.0

    def __init__(self, enable_timing=False):
        self.at = None

    def record(self, stream):
        self.at = Event.now

    def synchronize(self):
        assert self.at is not None

    def elapsed_time(self, end):
        return end.at - self.at


class Stream:
    def __init__(self, name):
        self.name, self.waited = name, []

    def wait_event(self, event):
        assert event.at is not None
        self.waited.append(event)


@pytest.fixture
def gpus(monkeypatch):
    """Replace torch.cuda by two fake GPUs with CPU memory; return the streams that were used."""
    entered = []

    @contextlib.contextmanager
    def stream(one):
        entered.append(one)
        yield
        Event.now += 0.5  # two streams a copy

    for name, value in {
        **{"Event": Event, "Stream": Stream, "stream": stream, "synchronize": lambda name: None},
        **{"is_available": lambda: True, "device_count": lambda: 2},
        "get_device_properties": lambda k: SimpleNamespace(uuid=str(k)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return entered


def test_copier_times_all_copies_on_its_own_streams(gpus):
    copier = CudaCopier(["cpu", "cpu"], 1 << 10)
    assert copier.seconds([(0, 1)], 4) == pytest.approx(4e-3)
    assert copier.seconds([(0, 1), (1, 0)], 4) == pytest.approx(8e-3)
    there, back = copier._streams
    assert gpus[-4:] == [there[1], there[0], back[0], back[1]]  # target's, then source's
    assert len(back[1].waited) == 1  # both directions begin together
    assert len(there[0].waited) == 2 + 3  # and the end waits for both


def test_copier_detects_bytes_that_do_not_arrive(gpus, monkeypatch):
    copier = CudaCopier(["cpu", "cpu"], 1 << 10)
    assert copier.arrived([(0, 1), (1, 0)])
    copier._send[1][5] = 9
    assert copier.arrived([(0, 1)])
    assert not copier.arrived([(1, 0)])
    monkeypatch.setattr(CudaCopier, "_copy", lambda self, direction, pair: None)
    assert not copier.arrived([(0, 1)])  # the buffers are cleared first


@pytest.fixture
def two(gpus, monkeypatch, tmp_path):
    """Two fake H200s; `two(rates)` sets how fast they copy."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(gpu_lease, "lease_folder", lambda: tmp_path)
    monkeypatch.setattr(device, "load_nvml", lambda: nvml_of(2, SWITCHED))
    machine = Machine("sm90", "nvidia-h200", "NVIDIA H200", ("GPU-0", "GPU-1"), {"driver": "580"})
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine))

    def copy(rates=None):
        monkeypatch.setattr(
            bandwidth, "CudaCopier", lambda devices, nbytes: FakeCopier(nbytes, rates)
        )

    copy()
    return copy


def test_command_locks_the_gpus_and_stores_peaks(two, tmp_path, capsys):
    baselines = tmp_path / "baselines"
    assert app.main(["bandwidth", "--store", f"--baselines={baselines}"]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[-1] == "no slow hop"
    path = baselines / "nvidia-h200-x2" / "peaks.json"
    assert output.err.splitlines() == [
        f"stored in {path}: peer 390 GB/s",
        f"stored in {path}: peer_both 780 GB/s",
    ]
    stored = peaks.load(path)
    assert stored.rates == {"peer": 390e9, "peer_both": 780e9}
    assert stored.facts["name"] == "2 x NVIDIA H200"
    how = "GPU 0 -> GPU 1, NVLink 4 x18, 1 GiB, median of 7 windows, driver 580, 20"
    assert stored.facts["peer"].startswith(how)
    assert {p.name for p in tmp_path.glob("*.lock")} == {"host.lock", "GPU-0.lock", "GPU-1.lock"}


def test_a_machine_with_a_slow_hop_has_no_peaks(two, tmp_path, capsys):
    two({(0, 1): 100})
    assert app.main(["bandwidth", "--store", f"--baselines={tmp_path / 'baselines'}"]) == 1
    output = capsys.readouterr()
    assert "slow: GPU 0 -> GPU 1" in output.out
    assert output.err == "nothing is stored: a machine with a slow hop has no peaks\n"
    assert not (tmp_path / "baselines").exists()


def test_small_copies_are_not_stored(two, tmp_path, capsys):
    baselines = tmp_path / "baselines"
    assert app.main(["bandwidth", "--size=1MiB", "--store", f"--baselines={baselines}"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "nothing is stored: copies of 1 MiB do not fill a link",
        "    aisp links bandwidth --size=1GiB --store",
    ]


def test_gpus_of_two_products_have_no_peaks(two, tmp_path, capsys, monkeypatch):
    machine = Machine("sm90", "nvidia-h200", "NVIDIA H200", ("GPU-0",))
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine))
    assert app.main(["bandwidth", "--store", f"--baselines={tmp_path / 'baselines'}"]) == 2
    assert capsys.readouterr().err == (
        "nothing is stored: only 1 of 2 GPUs are NVIDIA H200, but peaks belong to one product\n"
    )


def test_an_invalid_peaks_file_is_left_unchanged(two, tmp_path, capsys):
    path = tmp_path / "nvidia-h200-x2" / "peaks.json"
    path.parent.mkdir()
    path.write_text("mine")
    assert app.main(["bandwidth", "--store", f"--baselines={tmp_path}"]) == 2
    assert "nothing is stored: " + str(path) + " is not a peaks file" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_store_is_refused_under_ci(two, capsys, monkeypatch):
    monkeypatch.setenv("CI", "1")
    assert app.main(["bandwidth", "--store"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("--store is refused if CI is set: a gate must not change its own")


@pytest.mark.parametrize(("count", "have"), [(0, "none is"), (1, "one is")])
def test_fewer_than_two_gpus_exit_with_code_2(gpus, monkeypatch, capsys, count, have):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert app.main(["bandwidth"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"aisp links bandwidth needs 2 GPUs; {have} visible here",
        "    aisp links topology",
    ]


def test_a_mig_slice_is_refused(two, monkeypatch, capsys):
    properties = SimpleNamespace(uuid="slice")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda k: properties)
    assert app.main(["bandwidth"]) == 2
    message = "NVML does not know GPU-slice: MIG slices have no separate links\n"
    assert capsys.readouterr().err == message


def test_out_of_memory_suggests_smaller_copies(two, monkeypatch, capsys):
    def full(devices, nbytes):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bandwidth, "CudaCopier", full)
    assert app.main(["bandwidth"]) == 2
    output = capsys.readouterr().err.splitlines()
    assert output[0] == "no room for two buffers of 1 GiB on each GPU"
    assert "    aisp links bandwidth --size=256MiB" in output


def test_unwritable_lock_folder_is_reported(two, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu_lease, "lease_folder", lambda: tmp_path / "not there")
    assert app.main(["bandwidth"]) == 2
    output = capsys.readouterr().err
    assert output.startswith("the machine cannot be leased: ")
    assert output.endswith(f"{gpu_lease.REMEDY}\n")


def test_an_invalid_size_is_refused(capsys):
    assert app.main(["bandwidth", "--size=1GB"]) == 2
    assert "'1GB' is not a size; write it like 4KiB, 512MiB or 1GiB" in capsys.readouterr().err
