"""Products with stored results: which one is asked about, its chapters, peaks and arch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..page.gpu_specs import ARCHS, GPUS
from ..results import store
from ..results.models import Stored, base_of
from ..results.store import StoreError
from ..timing import peaks
from ..timing.peaks import Peaks, PeaksError
from ..util.cli_result import CliError
from ..util.device import Machine


@dataclass(frozen=True)
class Chapter:
    """The stored results of one chapter on one product."""

    name: str
    path: Path
    stored: Stored


def chosen(baselines: Path, asked: str | None, machine: Machine) -> list[str]:
    """Return the products asked about: one, and the same with several GPUs.

    It is `asked`, else the machine's, else the only one that has results. ``nvidia-h200-x2`` is
    itself alone.

    Raises:
        Unanswerable: where it has no results, or nothing says which one is meant.
    """
    there = sorted({file.parent.name for file in baselines.glob("*/*.json")})
    bases = sorted({base_of(product) for product in there})
    if asked is None:
        mine = machine.product in bases
        asked = machine.product if mine else bases[0] if len(bases) == 1 else None
    if asked is None or (asked not in there and asked not in bases):
        raise no_product(baselines, asked or machine.product, there)
    return [p for p in there if p == asked or base_of(p) == asked]


def no_product(baselines: Path, product: str, there: Sequence[str]) -> CliError:
    """Return the error of a product without results, with those `there`."""
    if not there:
        return CliError(
            f"no results are stored in {baselines}; record them on a quiet machine\n"
            "    pytest --aisp-update-expectations"
        )
    return CliError(
        f"no results of {product} are stored in {baselines}; there are those of"
        f" {', '.join(there)}; choose with\n    --product={there[0]}"
    )


def chapters(baselines: Path, product: str) -> Iterator[Chapter]:
    """Yield the stored chapters of `product`, by name.

    Raises:
        Unanswerable: for a file that cannot be read.
    """
    for path in sorted((baselines / product).glob("*.json")):
        if path.name != "peaks.json":
            try:
                yield Chapter(path.stem, path, store.load(path))
            except StoreError as error:
                raise CliError(str(error)) from None


def peaks_of(baselines: Path, product: str) -> Peaks | None:
    """Return the stored peaks of `product`: with several GPUs, those of one and of their links.

    Raises:
        Unanswerable: for a file that cannot be read.
    """
    names = dict.fromkeys((base_of(product), product))
    try:
        found = [peaks.stored(peaks.path_of(baselines, name)) for name in names]
    except (PeaksError, OSError) as error:
        raise CliError(str(error)) from None
    return found[0] if len(found) == 1 else peaks.joined(*found)


def arch_of(product: str, given: str | None, machine: Machine) -> str:
    """Return the arch whose claims `product` is held against.

    It is `given`, else the machine's where this is its product, else what the table of GPUs says of
    the name: results do not hold it.

    Raises:
        Unanswerable: for a word that is no arch, or a name that the table does not have.
    """
    legal = f"legal are {', '.join(ARCHS)}"
    if given is not None and given not in ARCHS:
        raise CliError(f"--arch={given}: unknown arch; {legal}")
    base = base_of(product)
    if given or machine.product == base:
        return given or machine.arch
    if base.startswith("cpu-"):
        return "cpu"
    for arch, names in GPUS.items():
        if set(names.lower().split(", ")) & set(base.split("-")):
            return arch
    raise CliError(f"nothing here says which arch {product} has; {legal}\n    --arch={ARCHS[1]}")
