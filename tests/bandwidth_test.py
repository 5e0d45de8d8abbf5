"""`aisp bandwidth` on GPUs that are only told of: which hops are slow, what is stored and said.

No GPU has run it yet: what copies and times here are tensors of a CPU and events of our own.
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
from pytest_aisp.distributed.bandwidth import Copier, Hop, judged
from pytest_aisp.distributed.topology import Way
from pytest_aisp.timing import peaks
from pytest_aisp.util import device, locks
from pytest_aisp.util.device import Machine

GB, GIB = 1e9, 1 << 30
NV18 = ("NVLink 4 x18", 450 * GB)


def hop(rate, kind=NV18, pair=(0, 1), *, both=False):
    name, limit = kind
    limit = limit and limit * (2 if both else 1)
    return Hop(*pair, both, rate * GB, name, limit)


def slow(rates, kind=NV18, nbytes=GIB, *, both=False):
    return [h.slow for h in judged([hop(rate, kind, both=both) for rate in rates], nbytes)]


def test_a_hop_far_below_the_median_of_its_kind_is_slow():
    said = slow([390, 391, 388, 300])
    assert said == ["", "", "", "77% of the median of NVLink 4 x18, 389 GB/s"]
    assert slow([390, 391, 388, 313]) == [""] * 4


def test_all_hops_below_the_floor_are_slow_though_they_are_alike():
    assert slow([249] * 2) == ["below the 250 GB/s that NVLink 4 x18 must reach"] * 2
    assert slow([251] * 2) == [""] * 2
    assert slow([499] * 2, both=True)[0] == "below the 500 GB/s that NVLink 4 x18 must reach"
    assert slow([260] * 2, ("NVLink 5 x18", 900 * GB)) == [""] * 2


def test_a_bridge_of_few_links_is_held_against_what_it_can_carry():
    assert slow([90] * 2, ("NVLink 3 x4", 100 * GB)) == [""] * 2
    assert slow([50] * 2, ("NVLink 3 x4", 100 * GB))[0].startswith("below the 55.56 GB/s")


@pytest.mark.parametrize("kind", [("NVLink ? x18", None), ("PCIe 5 x16, SYS", 63 * GB)])
def test_where_no_floor_is_known_none_holds(kind):
    assert slow([20] * 2, kind) == [""] * 2


def test_small_copies_are_held_against_no_floor():
    assert slow([20] * 2, nbytes=1 << 20) == [""] * 2


def test_kinds_are_not_held_against_each_other():
    hops = [hop(390), hop(50, ("PCIe 5 x16, SYS", 63 * GB)), hop(700, both=True)]
    assert [h.slow for h in judged(hops, GIB)] == [""] * 3


class Copies:
    """Copies that take as long as `rates` says, in GB/s by ordered pair."""

    def __init__(self, nbytes, rates=None, *, loses=()):
        self.nbytes, self.rates, self.loses, self.asked = nbytes, rates or {}, loses, []

    def seconds(self, pairs, copies):
        self.asked.append((tuple(pairs), copies))
        return self.nbytes * copies / (min(self.rates.get(p, 390) for p in pairs) * GB)

    def arrived(self, pairs):
        return not any(pair in self.loses for pair in pairs)


def ways(count, links=18):
    pairs = itertools.permutations(range(count), 2)
    return {(a, b): Way(a, b, "SYS", {}, links, "4") for a, b in pairs}


def measured(count, *args, nbytes=GIB, **kwargs):
    return bandwidth.measure(Copies(nbytes, *args, **kwargs), ways(count), nbytes, lambda t: None)


def test_every_ordered_pair_is_measured_and_every_pair_in_both_directions():
    found = measured(3)
    assert [h.label for h in found if not h.both] == [
        *("GPU 0 -> GPU 1", "GPU 0 -> GPU 2", "GPU 1 -> GPU 0"),
        *("GPU 1 -> GPU 2", "GPU 2 -> GPU 0", "GPU 2 -> GPU 1"),
    ]
    assert [h.label for h in found if h.both] == [
        *("GPU 0 <-> GPU 1", "GPU 0 <-> GPU 2", "GPU 1 <-> GPU 2"),
    ]
    assert [h.rate / GB for h in found] == [pytest.approx(390)] * 6 + [pytest.approx(780)] * 3
    assert found[0].share == pytest.approx(390 / 450)
    assert found[-1].share == pytest.approx(780 / 900)


def test_a_window_copies_much_but_not_for_ever():
    for nbytes, count in ((4 << 10, 64), (256 << 20, 16), (8 << 30, 4)):
        copies = Copies(nbytes)
        bandwidth.measure(copies, ways(2), nbytes, lambda t: None)
        assert {c for _, c in copies.asked} == {count}
        assert len(copies.asked) == 3 * bandwidth.WINDOWS


def test_the_table_and_the_exit_code_of_a_healthy_machine():
    found = bandwidth.bandwidth_result(measured(2), GIB, as_json=False)
    assert found.code == 0
    pytest.LineMatcher(list(found.lines)).fnmatch_lines(
        [
            "device-to-device copies of 1 GiB, median of 7 windows",
            "hop              rate      limit     share  kind",
            "GPU 0 -> GPU 1   390 GB/s  450 GB/s  87%    NVLink 4 x18",
            "GPU 0 <-> GPU 1  780 GB/s  900 GB/s  87%    NVLink 4 x18",
            "no slow hop",
        ]
    )


def test_a_slow_hop_is_named_and_the_exit_code_is_1():
    found = bandwidth.bandwidth_result(measured(3, {(2, 0): 120}), GIB, as_json=False)
    assert found.code == 1
    assert list(found.lines[-4:]) == [
        "slow: GPU 2 -> GPU 0: 120 GB/s, 31% of the median of NVLink 4 x18, 390 GB/s",
        "slow: GPU 0 <-> GPU 2: 240 GB/s, 31% of the median of NVLink 4 x18, 780 GB/s",
        "Measure again with nothing else on the GPUs, then look at the links' errors:",
        "    nvidia-smi nvlink -e",
    ]
    assert [line.split("  ")[-1] for line in found.lines].count("slow") == 2


def test_data_that_do_not_arrive_are_named_and_the_exit_code_is_1():
    found = bandwidth.bandwidth_result(measured(2, loses=[(1, 0)]), GIB, as_json=False)
    assert found.code == 1
    assert "WRONG: GPU 1 -> GPU 0: the target does not hold what was sent" in found.lines


def test_what_is_not_known_is_a_question_mark():
    found = bandwidth.bandwidth_result([hop(390, ("NVLink ? x18", None))], GIB, as_json=False)
    words = "GPU 0 -> GPU 1 390 GB/s ? ? NVLink ? x18"
    assert " ".join(found.lines[2].split()) == words


def test_json_has_every_hop():
    found = bandwidth.bandwidth_result(measured(2, {(1, 0): 10}), GIB, as_json=True)
    plain = json.loads("\n".join(found.lines))
    assert (plain["size"], plain["windows"], found.code) == (GIB, 7, 1)
    assert plain["hops"][0]["share"] == pytest.approx(390 / 450)
    assert "median" in plain["hops"][1]["slow"]


class Event:
    """An event that happens when it is recorded; its clock goes a millisecond a copy."""

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
    """Stand in for torch's CUDA with two GPUs whose memory is the CPU's."""
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


def test_the_copier_times_all_its_copies_and_uses_streams_of_its_own(gpus):
    copier = Copier(["cpu", "cpu"], 1 << 10)
    assert copier.seconds([(0, 1)], 4) == pytest.approx(4e-3)
    assert copier.seconds([(0, 1), (1, 0)], 4) == pytest.approx(8e-3)
    there, back = copier._streams
    assert gpus[-4:] == [there[1], there[0], back[0], back[1]]  # target's, then source's
    assert len(back[1].waited) == 1  # the way back begins with the way there
    assert len(there[0].waited) == 2 + 3  # and the end is that of both


def test_the_copier_sees_whether_every_byte_arrives(gpus, monkeypatch):
    copier = Copier(["cpu", "cpu"], 1 << 10)
    assert copier.arrived([(0, 1), (1, 0)])
    copier._send[1][5] = 9
    assert copier.arrived([(0, 1)])
    assert not copier.arrived([(1, 0)])
    monkeypatch.setattr(Copier, "_copy", lambda self, way, pair: None)
    assert not copier.arrived([(0, 1)])  # what an earlier copy brought is no proof


@pytest.fixture
def two(gpus, monkeypatch, tmp_path):
    """Two H200s as the command sees them; `two(rates)` says how fast they copy."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(locks, "folder", lambda: tmp_path)
    monkeypatch.setattr(device, "_nvml", lambda: nvml_of(2, SWITCHED))
    machine = Machine("sm90", "nvidia-h200", "NVIDIA H200", ("GPU-0", "GPU-1"), {"driver": "580"})
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine))

    def copy(rates=None):
        monkeypatch.setattr(bandwidth, "Copier", lambda devices, nbytes: Copies(nbytes, rates))

    copy()
    return copy


def test_the_command_measures_leases_and_stores(two, tmp_path, capsys):
    kept = tmp_path / "kept"
    assert app.main(["bandwidth", "--store", f"--baselines={kept}"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == "no slow hop"
    path = kept / "nvidia-h200-x2" / "peaks.json"
    assert said.err.splitlines() == [
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
    assert app.main(["bandwidth", "--store", f"--baselines={tmp_path / 'kept'}"]) == 1
    said = capsys.readouterr()
    assert "slow: GPU 0 -> GPU 1" in said.out
    assert said.err == "nothing is stored: a machine with a slow hop has no peaks\n"
    assert not (tmp_path / "kept").exists()


def test_small_copies_are_no_peak(two, tmp_path, capsys):
    kept = tmp_path / "kept"
    assert app.main(["bandwidth", "--size=1MiB", "--store", f"--baselines={kept}"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "nothing is stored: copies of 1 MiB do not fill a link",
        "    aisp bandwidth --size=1GiB --store",
    ]


def test_gpus_of_two_products_have_no_peaks(two, tmp_path, capsys, monkeypatch):
    machine = Machine("sm90", "nvidia-h200", "NVIDIA H200", ("GPU-0",))
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine))
    assert app.main(["bandwidth", "--store", f"--baselines={tmp_path / 'kept'}"]) == 2
    assert capsys.readouterr().err == (
        "nothing is stored: of 2 GPUs 1 are NVIDIA H200, and peaks belong to one product\n"
    )


def test_a_peaks_file_that_is_none_is_left_as_it_is(two, tmp_path, capsys):
    path = tmp_path / "nvidia-h200-x2" / "peaks.json"
    path.parent.mkdir()
    path.write_text("mine")
    assert app.main(["bandwidth", "--store", f"--baselines={tmp_path}"]) == 2
    assert "nothing is stored: " + str(path) + " is no peaks file" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_under_ci_nothing_is_stored_or_measured(two, capsys, monkeypatch):
    monkeypatch.setenv("CI", "1")
    assert app.main(["bandwidth", "--store"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("--store is refused where CI is set: a gate must not move its own")


@pytest.mark.parametrize(("count", "have"), [(0, "none is"), (1, "one is")])
def test_fewer_than_two_gpus_are_exit_code_2(gpus, monkeypatch, capsys, count, have):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert app.main(["bandwidth"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"aisp bandwidth needs 2 GPUs; {have} visible here",
        "    aisp topology",
    ]


def test_a_slice_of_a_gpu_has_no_links(two, monkeypatch, capsys):
    properties = SimpleNamespace(uuid="slice")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda k: properties)
    assert app.main(["bandwidth"]) == 2
    said = "NVML does not know GPU-slice: MIG slices have no links of their own\n"
    assert capsys.readouterr().err == said


def test_no_room_says_what_to_do(two, monkeypatch, capsys):
    def full(devices, nbytes):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bandwidth, "Copier", full)
    assert app.main(["bandwidth"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "no room for two buffers of 1 GiB on each GPU"
    assert "    aisp bandwidth --size=256MiB" in said


def test_a_machine_that_cannot_be_leased_says_so(two, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(locks, "folder", lambda: tmp_path / "not there")
    assert app.main(["bandwidth"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("the machine cannot be leased: ")
    assert said.endswith(f"{locks.REMEDY}\n")


def test_a_size_that_is_none_is_refused(capsys):
    assert app.main(["bandwidth", "--size=1GB"]) == 2
    assert "'1GB' is no size; write it like 4KiB, 512MiB or 1GiB" in capsys.readouterr().err
