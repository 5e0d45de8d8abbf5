"""Which nodes a fleet accepts, and how they differ from the machine here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..page.gpu_specs import GPUS
from . import PROTOCOL
from .probe import Facts

CLOCK_SECONDS = 60.0
"""The most that a node's clock may differ from the clock here."""
LABEL = "product"
"""The Ray label that names a node's product."""
VERSIONS = ("python", "plugin", "pytest", "torch", "triton")
"""The versions that are compared with those here."""
SIMULATED = "simulated-"


@dataclass(frozen=True)
class RayNode:
    """A node as Ray lists it: `gpus` is the number that Ray may give away."""

    id: str
    name: str
    gpus: int
    labels: Mapping[str, str]

    @property
    def told(self) -> bool:
        """Whether this node will be accepted or refused. Any other has no GPU, like many a head."""
        return self.gpus > 0 or LABEL in self.labels


def refusal(node: RayNode, facts: Facts, *, now: float) -> str:
    """Return why a node cannot take part, with the remedy, or an empty text.

    Args:
        now: seconds since 1970 here, when the facts arrived.
    """
    if facts["plugin"] is None or facts["protocol"] is None:
        return f"it has no pytest-aisp for Python {facts['python']}\n    pip install pytest-aisp"
    if facts["protocol"] != PROTOCOL:
        return (
            f"its pytest-aisp {facts['plugin']} speaks protocol {facts['protocol']}, this one"
            f" {PROTOCOL}\nInstall the same version on both"
        )
    if not facts["product"]:
        return "NVML finds no GPU on it\nStart Ray there with --num-gpus=0, or repair the driver"
    if not facts["gpus"] and not facts["product"].startswith(SIMULATED):
        return f"AISP_FLEET_SIMULATED={facts['product']}: begin the product with {SIMULATED}"
    if facts["nice"] > 0:
        return (
            f"Ray runs its workers at nice {facts['nice']}, and everything else would go first\n"
            "Start Ray there with: RAY_worker_niceness=0 ray start ..., or aisp fleet start"
        )
    return _gpu_refusal(node, facts) or _clock_refusal(facts["time"] - now)


def _gpu_refusal(node: RayNode, facts: Facts) -> str:
    if slices := [str(gpu["index"]) for gpu in facts["gpus"] if gpu["mig"]]:
        number = slices[0]
        return (
            f"GPU {', '.join(slices)} is split by MIG, and slices share clocks and power\n"
            f"Turn it off:\n    sudo nvidia-smi -i {number} -mig 0"
        )
    if names := {gpu["name"] for gpu in facts["gpus"][1:]} - {
        gpu["name"] for gpu in facts["gpus"][:1]
    }:
        others = ", ".join(sorted(names))
        return (
            f"it has GPUs of two products: {facts['product']} and {others}\n"
            "Start one Ray node for each, with CUDA_VISIBLE_DEVICES"
        )
    label = node.labels.get(LABEL, facts["product"])
    if label != facts["product"]:
        return (
            f"its label says {LABEL}={label}, but its GPU is {facts['product']}\n"
            "Start it with `aisp fleet start`, which reads the product from the driver"
        )
    return ""


def _clock_refusal(ahead: float) -> str:
    if abs(ahead) <= CLOCK_SECONDS:
        return ""
    where = "ahead of" if ahead > 0 else "behind"
    return (
        f"its clock is {abs(ahead):.0f} s {where} the clock here, and sessions are told apart by"
        " time\nSet it:\n    sudo chronyc makestep"
    )


def differences(facts: Facts, here: Mapping[str, str | None]) -> list[str]:
    """Return the versions of a node that differ from those here: ``torch 2.11.0, here 2.13.0``."""
    return [
        f"{name} {facts[name] or 'missing'}, here {here[name] or 'missing'}"
        for name in VERSIONS
        if facts.get(name) != here.get(name)
    ]


def arch_of_product(product: str) -> str:
    """Return the arch of a product such as ``nvidia-h200``, or an empty text if it is unknown."""
    words = product.split("-")
    for arch, names in GPUS.items():
        if any(name.lower() in words for name in names.split(", ")):
            return arch
    return ""
