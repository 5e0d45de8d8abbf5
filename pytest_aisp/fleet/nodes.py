"""Decide which nodes a fleet accepts, and list version differences from this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..page.gpu_specs import GPUS
from ..util.plugin_digest import own_digest
from . import PROTOCOL
from .probe import Facts, probe

CLOCK_SECONDS = 60.0
"""The largest allowed difference between a node's clock and this machine's."""
LABEL = "product"
"""The Ray label that names a node's product."""
VERSIONS = ("python", "plugin", "pytest", "torch", "triton")
"""The versions of a node that are compared with this machine's."""
SIMULATED = "simulated-"


@dataclass(frozen=True)
class RayNode:
    """A node in Ray's list. `gpus` is the number of GPUs that Ray can assign."""

    id: str
    name: str
    gpus: int
    labels: Mapping[str, str]
    address: str = ""

    @property
    def told(self) -> bool:
        """Whether the run accepts or refuses this node.

        The run ignores a node that has no GPU and no `LABEL`. Many head nodes are like that.
        """
        return self.gpus > 0 or LABEL in self.labels


def refusal(node: RayNode, facts: Facts, *, now: float) -> str:
    """Return the reason why the fleet refuses a node, with advice, or an empty string.

    Args:
        now: this machine's time when the facts arrived, in seconds since 1970.
    """
    if facts["plugin"] is None or facts["protocol"] is None:
        return f"it has no pytest-aisp for Python {facts['python']}\n    pip install pytest-aisp"
    if facts["protocol"] != PROTOCOL:
        return (
            f"its pytest-aisp {facts['plugin']} speaks protocol {facts['protocol']}, this one"
            f" {PROTOCOL}\nInstall the same version on both"
        )
    if facts["digest"] != own_digest():
        here = probe()["plugin"]
        other = f"and this machine has {here}" if here != facts["plugin"] else "with other code"
        return (
            f"it has pytest-aisp {facts['plugin']}, {other}\n"
            "Install the same on both, for example one wheel"
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
    """Return the versions that differ from this machine's: ``torch 2.11.0, here 2.13.0``."""
    return [
        f"{name} {facts[name] or 'missing'}, here {here[name] or 'missing'}"
        for name in VERSIONS
        if facts.get(name) != here.get(name)
    ]


def arch_of_product(product: str) -> str:
    """Return the arch of a product such as ``nvidia-h200``, or an empty string if it is unknown."""
    words = product.split("-")
    for arch, names in GPUS.items():
        if any(name.lower() in words for name in names.split(", ")):
            return arch
    return ""
