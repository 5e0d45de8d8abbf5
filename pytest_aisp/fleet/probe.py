"""Read facts about a node. `probe` is sent as code, so the node may lack the plugin."""

from __future__ import annotations

from typing import Any, TypeAlias

Facts: TypeAlias = dict[str, Any]
"""The type that `probe` returns. The docstring of `probe` lists the keys."""


def probe() -> Facts:
    """Return facts about this machine, which may have only Python's standard library.

    The keys: ``plugin``, ``protocol``, ``python``, ``pytest``, ``torch``, ``triton``, ``driver``
    (versions; None if missing), ``digest`` (of the plugin's code; None if missing), ``nice``,
    ``time`` (seconds since 1970), ``host``, ``product``, ``arch``; ``uuids`` of all GPUs, by their
    index; and ``gpus``: for each GPU that Ray may use its ``index``, ``name``, ``capability`` and
    ``mig``.
    """
    import importlib.metadata
    import os
    import platform
    import time

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def visible() -> list[str] | None:
        variable = "CUDA_VISIBLE_DEVICES"
        found = os.environ.get(variable)
        if "RAY_JOB_ID" in os.environ:  # Ray changes the variable here, so read the parent's
            try:
                with open(f"/proc/{os.getppid()}/environ", "rb") as file:
                    lines = file.read().decode(errors="replace").split("\0")
            except OSError:
                return None
            found = dict(line.partition("=")[::2] for line in lines).get(variable)
        return None if found is None else [name.strip() for name in found.split(",")]

    facts: Facts = {name: version(name) for name in ("pytest", "torch", "triton")}
    facts |= {
        "plugin": version("pytest-aisp"),
        "protocol": None,
        "digest": None,
        "driver": None,
        "gpus": [],
        "uuids": [],
    }
    facts |= {"python": platform.python_version(), "nice": os.nice(0), "host": platform.node()}
    facts |= {"time": time.time(), "product": "", "arch": ""}
    try:
        from pytest_aisp.fleet import PROTOCOL
        from pytest_aisp.page.gpu_specs import arch_of, product_of

        facts["protocol"] = PROTOCOL
    except ImportError:
        return facts
    try:
        from pytest_aisp.util.plugin_digest import own_digest

        facts["digest"] = own_digest()
    except ImportError:  # an older version of the plugin
        pass
    if simulated := os.environ.get("AISP_FLEET_SIMULATED"):
        facts["product"], _, facts["arch"] = simulated.partition(":")
        return facts
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission
        return facts
    facts["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
    named = visible()
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        try:
            mig = bool(pynvml.nvmlDeviceGetMigMode(gpu)[0])
        except pynvml.NVMLError:  # this GPU has no such mode
            mig = False
        facts["uuids"].append(uuid := str(pynvml.nvmlDeviceGetUUID(gpu)))
        if named is None or str(index) in named or any(n and uuid.startswith(n) for n in named):
            capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(gpu))
            known = {"index": index, "name": str(pynvml.nvmlDeviceGetName(gpu)), "mig": mig}
            facts["gpus"].append({**known, "capability": capability})
    if facts["gpus"]:
        first = facts["gpus"][0]
        facts["product"], facts["arch"] = product_of(first["name"]), arch_of(*first["capability"])
    return facts
