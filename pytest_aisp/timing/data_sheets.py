"""Rates of GPUs without stored measurements, estimated from NVIDIA's data sheets.

A prediction from a data sheet is not a measurement. Each rate is assumed to reach the same share of
the data-sheet value as on the H200, whose rates are measured. Fixed times, such as the time of a
launch, are assumed to be the same as on the H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .peaks import MATRIX, MEETINGS, SECONDS, TOLERANCE, Peaks

REFERENCE = "nvidia-h200"
"""The product with measured rates and a data sheet."""


@dataclass(frozen=True)
class DataSheet:
    """The contents of one GPU's data sheet.

    Attributes:
        arch: the GPU's arch, even if pages cannot run on it.
        source: the name of the document.
        figures: the columns of the table that the document has.
    """

    arch: str
    source: str
    figures: Mapping[str, float]


_TABLE = """
                       arch   dram   half    fp8   int8  tf32   fp32  nvlink  pcie  l2
nvidia-h200            sm90   4.8    989.5   1979  1979  494.5  67    900     128   50
nvidia-h100-80gb-hbm3  sm90   3.35   989.5   1979  1979  494.5  67    900     128   50
nvidia-a100-sxm4-80gb  sm80   2.039  312     -     624   156    19.5  600     64    40
nvidia-l40s            sm89   0.864  362.05  733   733   183    91.6  -       64    -
nvidia-b200            sm100  7.7    2250    4500  4500  1100   75    1800    128   -
nvidia-gb300           sm103  8      2500    5000  -     1250   -     1800    -     -
nvidia-gb10            sm121  0.273  -       -     -     -      -     -       -     -
"""
# TB/s of DRAM, dense TFLOP/s or TOP/s by type (`half`: bf16 and fp16), GB/s in both directions of
# NVLink and PCIe, and MB of L2. Rates that a data sheet gives with sparsity are halved. A value is
# missing if the document lacks it, or has it only for a whole rack.
_SOURCES = {
    "nvidia-h200": "NVIDIA H200 Tensor Core GPU data sheet (SXM) and H100 white paper",
    "nvidia-h100-80gb-hbm3": "NVIDIA H100 Tensor Core GPU data sheet (SXM) and white paper",
    "nvidia-a100-sxm4-80gb": "NVIDIA A100 Tensor Core GPU data sheet (80GB SXM) and white paper",
    "nvidia-l40s": "NVIDIA L40S data sheet",
    "nvidia-b200": "NVIDIA Blackwell data sheet, one GPU of HGX B200",
    "nvidia-gb300": "NVIDIA GB300 NVL72 data sheet, divided by its 72 GPUs",
    "nvidia-gb10": "NVIDIA DGX Spark data sheet",
}
_FIGURES = {
    **dict.fromkeys(("copy", "read", "write"), "dram"),
    **dict.fromkeys(("bf16", "fp16"), "half"),
    **{name: name for name in ("fp8", "int8", "tf32", "fp32")},
    **dict.fromkeys(("peer", "peer_both", "busbw"), "nvlink"),
    **dict.fromkeys(("h2d", "d2h", "pcie_both"), "pcie"),
}
"""The table column of each rate that is scaled."""
_PER_CYCLE = ("shared", "sfu")
"""Rates that an SM has per cycle. They are the same on these GPUs. Data sheets lack them, but their
fp32 rate is proportional to the SMs and their clock."""
_FP32_LANES = {"sm80": 64}
"""The fp32 lanes of an SM. Other archs have 128."""
_ONE_WAY = ("peer", "busbw", "h2d", "d2h")
"""Rates in one direction of a link. The table has the sum of both directions."""
_OTHER_KERNEL = 1.3
"""Without a data sheet, a kernel may exceed the library kernel's rate by this factor."""


def _parse() -> dict[str, DataSheet]:
    heads, *rows = (line.split() for line in _TABLE.strip().splitlines())
    sheets = {}
    for product, arch, *cells in rows:
        named = zip(heads[1:], cells, strict=True)
        figures = {name: float(cell) for name, cell in named if cell != "-"}
        sheets[product] = DataSheet(arch, _SOURCES[product], figures)
    return sheets


SHEETS = _parse()
"""The data sheets by product."""


def full_rate(product: str, rate: str) -> float | None:
    """Return the value of `rate` in the data sheet of `product`, or None if there is none."""
    figure, sheet = _FIGURES.get(rate), SHEETS.get(product)
    if figure is None or sheet is None or figure not in sheet.figures:
        return None
    full = sheet.figures[figure] * (1e9 if figure in ("nvlink", "pcie") else 1e12)
    return full / 2 if rate in _ONE_WAY else full


def most_above(product: str, rate: str, measured: float) -> float:
    """Return the factor by which a side may exceed the `measured` rate before its work is doubted.

    The rate of a matrix product is measured with a library's kernel and random values. A side with
    a better kernel, or with values that need less power, can exceed the measured rate. So the limit
    is the data sheet's rate, if the data sheet has one.
    """
    if rate not in MATRIX:
        return TOLERANCE
    full = full_rate(product, rate)
    return _OTHER_KERNEL if full is None else max(TOLERANCE, full / measured)


def shares(measured: Peaks) -> dict[str, float]:
    """Return each `measured` rate of the H200 as a share of the rate in the data sheet."""
    full = {rate: full_rate(REFERENCE, rate) for rate in measured.rates}
    return {rate: measured.rates[rate] / value for rate, value in full.items() if value}


def estimate(product: str, measured: Peaks) -> Peaks:
    """Return estimated rates of `product`, from its data sheet and the H200's `measured` rates.

    Rates that the data sheet lacks are left out.
    """
    sheet, reference = SHEETS[product], SHEETS[REFERENCE]
    theirs, ours = sheet.figures, reference.figures
    rates = {rate: value for rate, value in measured.rates.items() if rate in SECONDS}
    if "nvlink" not in theirs:
        rates = {rate: value for rate, value in rates.items() if rate not in MEETINGS}
    for rate, figure in _FIGURES.items():
        if rate in measured.rates and figure in theirs:
            rates[rate] = measured.rates[rate] * theirs[figure] / ours[figure]
    if "fp32" in theirs:
        cycles = _cycles(sheet) / _cycles(reference)
        rates |= {r: measured.rates[r] * cycles for r in _PER_CYCLE if r in measured.rates}
    return Peaks(product, rates, {"from": sheet.source})


def _cycles(sheet: DataSheet) -> float:
    """Return a number that is proportional to the SMs times their clock."""
    return sheet.figures["fp32"] / _FP32_LANES.get(sheet.arch, 128)
