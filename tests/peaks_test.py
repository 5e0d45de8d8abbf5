"""Peaks: the limits they set, how they are stored, and how they are measured."""

import dataclasses
import json
import math

import pytest

from pytest_aisp.page.pair import Work
from pytest_aisp.timing import measure_peaks, peaks
from pytest_aisp.timing.data_sheets import most_above
from pytest_aisp.timing.peaks import Limit, Peaks, PeaksError, implausible, limit_of, share

H200 = Peaks(
    "nvidia-h200",
    {
        "copy": 4.24e12,
        "read": 4.30e12,
        "write": 4.64e12,
        "fp32": 5e13,
        "tf32": 4e14,
        "bf16": 7.9e14,
        "fp16": 7.9e14,
        "h2d": 5.5e10,
        "d2h": 5.7e10,
        "launch": 4.1e-6,
        "graph_node": 1.1e-6,
    },
    {"name": "NVIDIA H200", "date": "2026-11-21"},
)
GB = 1e9


@pytest.mark.parametrize(
    ("work", "name", "seconds"),
    [
        (Work(read=GB), "read", GB / 4.30e12),
        (Work(write=GB), "write", GB / 4.64e12),
        (Work(read=GB, write=GB), "copy", 2 * GB / 4.24e12),
        (Work(read=4 * GB, write=GB), "read", 2 * GB / 4.24e12 + 3 * GB / 4.30e12),
        (Work(read=GB, write=5 * GB), "write", 2 * GB / 4.24e12 + 4 * GB / 4.64e12),
        (Work(flops={"bf16": 1e12}), "bf16", 1e12 / 7.9e14),
        (Work(flops={"bf16": 1e12, "fp32": 1e12}), "fp32", 1e12 / 7.9e14 + 1e12 / 5e13),
        (Work(read=GB, flops={"bf16": 1e12}), "bf16", 1e12 / 7.9e14),
        (Work(read=9 * GB, flops={"bf16": 1e12}), "read", 9 * GB / 4.30e12),
    ],
)
@pytest.mark.parametrize("bound", ["dram", "tensor", "launch", "host"])
def test_the_slowest_resource_sets_the_limit(work, name, seconds, bound):
    limit = limit_of(work, bound, H200)
    assert limit.name == name
    assert limit.seconds == pytest.approx(seconds)


def test_pcie_uses_its_faster_direction():
    work = Work(wire=GB, write=GB)
    assert limit_of(work, "pcie", H200) == Limit("d2h", GB / 5.7e10)
    one_way = Peaks("gb", {k: r for k, r in H200.rates.items() if k != "d2h"})
    assert limit_of(work, "pcie", one_way) == Limit("h2d", GB / 5.5e10)


@pytest.mark.parametrize("bound", ["nvlink", "latency"])
def test_links_use_the_faster_of_copy_and_all_reduce(bound):
    """A reduction inside the switch has a busbw that no copy reaches."""
    links = Peaks("nvidia-h200-x2", {**H200.rates, "peer": 3.9e11, "busbw": 4.5e11})
    work = Work(wire=GB, read=GB)
    assert limit_of(work, bound, links) == Limit("busbw", GB / 4.5e11)
    copied = Peaks("nvidia-h200-x2", {**H200.rates, "peer": 3.9e11})
    assert limit_of(work, bound, copied) == Limit("peer", GB / 3.9e11)


def test_a_link_is_never_implausible():
    """A switch may reduce, and a side may use links that a copy to one peer does not."""
    assert not implausible(Limit("peer", 1e-3), 1e-4)
    assert not implausible(Limit("busbw", 1e-3), 1e-4)
    assert implausible(Limit("copy", 1e-3), 1e-4)


def test_rates_are_added_to_stored_ones(tmp_path):
    path = tmp_path / "nvidia-h200-x2" / "peaks.json"
    peaks.add(path, "nvidia-h200-x2", {"peer": 3.9e11}, {"peer": "first", "name": "two"})
    peaks.add(path, "nvidia-h200-x2", {"busbw": 4e11, "peer": 3.8e11}, {"peer": "second"})
    stored = peaks.load(path)
    assert stored.rates == {"peer": 3.8e11, "busbw": 4e11}
    assert stored.facts == {"peer": "second", "name": "two"}
    with pytest.raises(PeaksError, match="holds the peaks of nvidia-h200-x2, not of nvidia-b200"):
        peaks.add(path, "nvidia-b200-x2", {"peer": 7e11}, {})


def test_wire_bytes_count_only_for_link_bounds():
    assert limit_of(Work(wire=1e15, read=GB), "dram", H200).name == "read"


@pytest.mark.parametrize(
    ("work", "bound"),
    [
        (Work(), "launch"),
        (Work(read=GB), "l2"),
        (Work(wire=GB, read=GB), "nvlink"),
        (Work(flops={"fp8": 1e12}, read=GB), "tensor"),
        (Work(flops={"nvfp4": 1e12}), "tensor"),
    ],
)
def test_there_is_no_limit_without_declared_work_or_measured_rates(work, bound):
    assert limit_of(work, bound, H200) is None


def test_rates_without_declared_work_may_be_missing():
    only_read = Peaks("odd", {"read": 1e12})
    assert limit_of(Work(read=GB, flops={"fp8": 0}), "dram", only_read) == Limit("read", 1e-3)
    assert limit_of(Work(read=GB, write=1), "dram", only_read) is None


@pytest.mark.parametrize("more", ["read", "write", "wire", "flops"])
@pytest.mark.parametrize("bound", ["dram", "pcie"])
def test_more_work_never_takes_less_time(more, bound):
    amounts = [0, 1e8, 9.9e8, 1e9, 1.01e9, 2e9, 1e10]
    works = [{"read": 1e9, "write": 1e9, "wire": 1e7} for _ in amounts]
    for work, amount in zip(works, amounts, strict=True):
        work[more] = {"bf16": 1000 * amount} if more == "flops" else amount
    seconds = [limit_of(Work(**work), bound, H200).seconds for work in works]
    assert seconds == sorted(seconds)


def test_share_and_plausibility():
    limit = Limit("copy", 1e-3)
    assert share(limit, 2e-3) == 0.5
    assert share(limit, 0.0) == math.inf
    assert not implausible(limit, 1e-3 / 1.04)
    assert implausible(limit, 1e-3 / 1.06)


@pytest.mark.parametrize(
    ("product", "rate", "times"),
    [
        ("nvidia-h200", "int8", 1979 / 918),  # its data sheet allows more than a library reaches
        ("nvidia-h200", "bf16", 1.1),
        ("nvidia-unknown", "int8", 1.3),
        ("nvidia-h200", "read", 1.05),
    ],
)
def test_a_kernel_may_be_faster_than_the_library_that_was_measured(product, rate, times):
    measured = {"int8": 918e12, "bf16": 989.5e12 / 1.1, "read": 4.4e12}[rate]
    most = most_above(product, rate, measured)
    assert most == pytest.approx(times)
    assert not implausible(Limit(rate, 1e-3), 1e-3 / (times - 0.01), most)
    assert implausible(Limit(rate, 1e-3), 1e-3 / (times + 0.01), most)


def test_a_fill_at_full_speed_is_plausible():
    """By the copy rate it would reach 109 %."""
    assert not implausible(limit_of(Work(write=GB), "dram", H200), GB / 4.64e12)


@pytest.mark.parametrize("rate", [0, -1.0, math.inf, math.nan, "fast", None])
def test_a_rate_is_a_positive_number_with_a_known_name(rate):
    with pytest.raises(PeaksError, match=r"copy=.* must be a number > 0"):
        Peaks("cpu", {"copy": rate})
    with pytest.raises(PeaksError, match="unknown rate 'dram'; legal: copy, read, write"):
        Peaks("cpu", {"dram": rate})


def test_saved_peaks_are_loaded_with_four_digits(tmp_path):
    with pytest.raises(FileNotFoundError):
        peaks.load(tmp_path / "peaks.json")
    path = tmp_path / "nvidia-h200" / "peaks.json"
    measured = dataclasses.replace(H200, rates={**H200.rates, "fp8": 1.23456789e15, "tf32": 4e14})
    peaks.save(path, measured)
    stored = peaks.load(path)
    assert stored.rates == {**H200.rates, "fp8": 1.235e15}
    assert (stored.product, stored.facts) == (H200.product, H200.facts)
    before = path.read_bytes()
    peaks.save(path, stored)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["peaks.json"]


def test_the_file_is_sorted_with_one_rate_per_line(tmp_path):
    path = tmp_path / "peaks.json"
    rates, facts = {"read": 4.3e12, "copy": 4.24e12, "launch": 4.1e-6}, {"torch": "2.11", "b": "3"}
    peaks.save(path, Peaks("gpu", rates, facts))
    assert path.read_text() == (
        '{\n "facts": {\n  "b": "3",\n  "torch": "2.11"\n },\n "product": "gpu",\n "rates": {\n'
        '  "copy": 4.24e+12,\n  "launch": 4.1e-06,\n  "read": 4.3e+12\n },\n "schema": 1\n}\n'
    )


FOREIGN = {
    "cut": '{"schema": 1, "prod',
    "binary": b"\xff\xfe\x00",
    "list": "[1, 2]",
    "results": '{"schema": 1, "results": {}}',
    "newer": '{"schema": 2, "product": "p", "rates": {}, "facts": {}}',
    "rate": '{"schema": 1, "product": "p", "rates": {"copy": "fast"}, "facts": {}}',
    "nan": '{"schema": 1, "product": "p", "rates": {"copy": NaN}, "facts": {}}',
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_damaged_or_foreign_file_is_an_error_and_is_never_overwritten(tmp_path, content):
    path = tmp_path / "peaks.json"
    before = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(before)
    with pytest.raises(PeaksError, match=r"is not a peaks file of schema 1(.|\n)*git checkout -- "):
        peaks.load(path)
    with pytest.raises(PeaksError, match="is not a peaks file"):
        peaks.save(path, H200)
    assert path.read_bytes() == before


def test_another_products_peaks_are_not_overwritten(tmp_path):
    path = tmp_path / "peaks.json"
    peaks.save(path, H200)
    with pytest.raises(PeaksError, match="holds the peaks of nvidia-h200, not of nvidia-b200"):
        peaks.save(path, dataclasses.replace(H200, product="nvidia-b200"))
    assert peaks.load(path) == H200


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "peaks.json"
    peaks.save(path, H200)

    def full(_descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        peaks.save(path, dataclasses.replace(H200, rates={"copy": 1.0}))
    assert peaks.load(path) == H200
    assert list(tmp_path.iterdir()) == [path]


def test_the_cpu_can_be_measured(tmp_path, monkeypatch):
    import torch

    # Rates are not more exact than this on a CPU, and some CPUs have caches of 500 MB.
    monkeypatch.setattr(measure_peaks, "_last_level_caches", lambda: 0)
    monkeypatch.setattr(measure_peaks, "WINDOWS", 3)
    before = torch.backends.cuda.matmul.fp32_precision
    measured = measure_peaks.measure("cpu")
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert measured.product.startswith("cpu-")
    assert set(measured.rates) == {"copy", "read", "write", "fp32"}
    assert all(0 < rate < math.inf for rate in measured.rates.values())
    assert min(measured.rates["read"], measured.rates["write"]) >= measured.rates["copy"] / 2
    assert {"name", "date", "torch", "buffer", "copy", "read", "write"} <= set(measured.facts)
    assert limit_of(Work(read=8, write=8, flops={"fp32": 1}), "dram", measured).name == "copy"
    peaks.save(tmp_path / "peaks.json", measured)
    assert json.loads((tmp_path / "peaks.json").read_text())["facts"] == measured.facts


def test_the_triton_read_kernel_reads_everything():
    """Needs a GPU, or Triton's interpreter chosen before triton is imported."""
    triton = pytest.importorskip("triton")
    import torch

    if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1; this machine has no GPU")
    source = torch.randn(8 * 4096 * 4, device="cuda" if torch.cuda.is_available() else "cpu")
    run = measure_peaks._triton_read(source)
    run()
    torch.testing.assert_close(run.args[1].sum(), source.sum(), atol=1e-2, rtol=1e-4)
