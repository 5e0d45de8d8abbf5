"""Check the table of features in `gpu_specs` against this machine's compiler and GPU.

    python benchmarks/feature_probe.py            what assembles for each arch, and what runs here
    python benchmarks/feature_probe.py --table    the table of docs/gpu-features.md

The probe of a feature is a kernel in `features.cu`. It is compiled for three targets of an arch:
plain, family and arch-specific (``sm_100``, ``sm_100f``, ``sm_100a``). If there is a GPU, the
kernel is also launched. The exit code is 0 if the results match the table, else 1.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from pytest_aisp.kernels.nvrtc import CompileError, NoCompiler, compile_source, toolchain
from pytest_aisp.page.gpu_specs import ASSEMBLED, GPU_ARCHS, GPUS, target_of
from pytest_aisp.util.device import Machine

SOURCE = Path(__file__).with_name("features.cu")
BLOCKS, THREADS = 2, 128
SUFFIXES = ("", "f", "a")
LAUNCH = (sys.executable, __file__, "--launch")
SECONDS = 60.0
"""Longest wait for a launched probe; starting CUDA takes most of it."""
ANSWERS = {0: "the kernel wrote no answer", 1: "", 2: "the instruction's result is wrong"}
NOT_LAUNCHED = {
    "tma": "needs a tensor map",
    "tma_gather": "needs a tensor map",
    "tensormap_replace": "needs a tensor map",
    "multimem": "needs memory that several GPUs share",
    "tcgen05_block_scale": "needs scales in tensor memory",
}
"""Features whose probe is only assembled, and what a launch would need."""

_ADVICE = re.compile(r"\bAdvisory: (.*)")
_ERROR = re.compile(r"\berror\s*:\s*(.*)")
# ptxas's errors for an instruction that it knows but the target lacks.
_MISSING = re.compile(r"not supported on \.target|requires \.target|cannot be compiled for arch")


@dataclass(frozen=True)
class Attempt:
    """The result of assembling one feature's probe for one target.

    Attributes:
        target: ``sm_100a``.
        code: the machine code; empty if it does not assemble.
        words: the compiler's errors, or its advice if it does assemble.
    """

    target: str
    code: bytes = b""
    words: str = ""

    @property
    def errors(self) -> list[str]:
        """The compiler's errors, one line each, without line numbers of generated files."""
        return _ERROR.findall(self.words) or self.words.split("\n")[-1:]

    @property
    def refused(self) -> bool:
        """Whether every error says that the target lacks the feature."""
        return not self.code and all(map(_MISSING.search, self.errors))


ByArch: TypeAlias = "Mapping[str, tuple[Attempt, ...]]"
"""A feature's attempts by arch, the plain target first."""


@functools.cache
def purposes() -> dict[str, str]:
    """Return what each probe assembles, by feature: the list at the head of `features.cu`."""
    return dict(re.findall(r"^// (\w+): (.*)\.$", SOURCE.read_text(), re.MULTILINE))


def targets(arch: str) -> tuple[str, ...]:
    """Return the targets for `arch`, the plain one first."""
    suffixes = [s for s in SUFFIXES if s != "f" or arch != "sm90"]  # families begin with sm_100
    return tuple(arch.replace("sm", "sm_") + suffix for suffix in suffixes)


def attempt(feature: str, to: str) -> Attempt:
    """Assemble the probe of `feature` for the target `to`, with no GPU or driver.

    Raises:
        NoCompiler: cuda.core or NVRTC is not installed.
    """
    options = {"std": "c++17", "arch": to, "name": SOURCE.name, "define_macro": f"PROBE_{feature}"}
    try:
        code, log = compile_source(toolchain().core, SOURCE.read_text(), options)
    except CompileError as error:
        return Attempt(to, words=str(error))
    return Attempt(to, code, "".join(_ADVICE.findall(log)[:1]))


def survey(feature: str, archs: Sequence[str] = GPU_ARCHS) -> ByArch:
    """Assemble the probe of `feature` for every target of `archs`."""
    return {arch: tuple(attempt(feature, to) for to in targets(arch)) for arch in archs}


def first_target(attempts: tuple[Attempt, ...]) -> str:
    """Return the first target that has the feature, or an empty string."""
    return next((a.target for a in attempts if a.code), "")


def expected(feature: str, arch: str) -> str:
    """Return the first target that has the feature by the table, or an empty string."""
    suffix = ASSEMBLED.get(feature, {}).get(arch)
    return "" if suffix is None else target_of(arch) + suffix


def differences(feature: str, attempts_by_arch: ByArch) -> Iterator[str]:
    """Yield a line for each difference between the results for `feature` and the table."""
    for arch, attempts in attempts_by_arch.items():
        for a in attempts:
            if not a.code and not a.refused:
                yield f"{feature} for {a.target}: the probe failed: {a.errors[0]}"
        listed, actual = expected(feature, arch), first_target(attempts)
        if listed != actual:
            difference = f"the table says {listed or 'nothing'}, {actual or 'nothing'} takes it"
            yield f"{feature} on {arch}: {difference}"
        taken = [bool(a.code) for a in attempts]
        if taken != sorted(taken):  # later targets must have it, too
            yield f"{feature} on {arch}: {actual} takes it and {attempts[-1].target} does not"


def launches(machine: Machine) -> dict[str, str]:
    """Launch the probe of every feature of this GPU's arch, and return its error by feature.

    An empty error is success. Features in `NOT_LAUNCHED` are left out.
    """
    here = [f for f, archs in ASSEMBLED.items() if machine.arch in archs and f not in NOT_LAUNCHED]
    return {feature: _launch_in_subprocess(feature) for feature in here}


def _launch_in_subprocess(feature: str) -> str:
    # After a fault, a process can no longer use CUDA. A hanging kernel ends with its process.
    command = [*LAUNCH, feature]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS:g} s"
    if done.returncode == 0:
        return ""
    output = (done.stdout + done.stderr).split("\n")
    died = f"it died without a message, exit code {done.returncode}"
    return next((line.strip() for line in reversed(output) if line.strip()), died)


def launch(feature: str) -> str:
    """Launch the probe of `feature` on this process's first GPU, and return its error."""
    core = toolchain().core
    device = core.Device(0)
    device.set_current()
    arch = "sm{}{}".format(*device.compute_capability)
    attempted = attempt(feature, target_of(arch, [feature]))
    if not attempted.code:
        return attempted.errors[0]
    kernel = core.ObjectCode.from_cubin(attempted.code).get_kernel("probe")
    pinned = core.LegacyPinnedMemoryResource().allocate(4 * BLOCKS)
    answers = (ctypes.c_uint32 * BLOCKS).from_address(int(pinned.handle))
    answers[:] = [0] * BLOCKS
    stream = device.create_stream()
    config = core.LaunchConfig(grid=BLOCKS, block=THREADS)
    core.launch(stream, config, kernel, int(pinned.handle), 0)
    stream.sync()
    return ANSWERS[max(answers)]  # one block may cancel the other block, which then writes nothing


def table() -> str:
    """Return the table in Markdown: for each arch and feature, the first target that has it."""
    heads = ["feature", "probe", *(f"{arch} ({GPUS[arch]})" for arch in GPU_ARCHS)]
    rows = [heads, ["---"] * len(heads)]
    for feature, purpose in purposes().items():
        cells = [f"`{to}`" if (to := expected(feature, arch)) else "no" for arch in GPU_ARCHS]
        rows.append([f"`{feature}`", purpose, *cells])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def report(found: Mapping[str, ByArch], here: str, launched: Mapping[str, str]) -> Iterator[str]:
    """Yield a row for each feature, and below it the errors of the targets that refuse it.

    `here` is the arch of this machine's GPU, or ``cpu``; `launched` is from `launches`.
    """
    archs = list(next(iter(found.values()), ()))
    last = "runs on this GPU" if here in archs else ""
    yield f"{'':21}{''.join(f'{arch:9}' for arch in archs)}{last}".rstrip()
    for feature, by_arch in found.items():
        cells = "".join(f"{first_target(by_arch[arch]) or '-':9}" for arch in archs)
        yield f"{feature:21}{cells}{_launch_result(feature, here, launched)}".rstrip()
        for attempts in by_arch.values():
            if refusals := [a for a in attempts if not a.code]:
                yield f"    {refusals[-1].target}: {refusals[-1].errors[0]}"
            elif attempts[-1].words:
                yield f"    {attempts[-1].target}: {attempts[-1].words}"


def _launch_result(feature: str, here: str, launched: Mapping[str, str]) -> str:
    if feature in launched:
        return f"no: {launched[feature]}" if launched[feature] else "yes"
    if here in ASSEMBLED.get(feature, ()):
        return f"not launched: {NOT_LAUNCHED[feature]}"
    return ""


def known() -> tuple[int, ...]:
    """Return the compute capabilities that NVRTC compiles for, as ``90``."""
    _, capabilities = import_module("cuda.bindings.nvrtc").nvrtcGetSupportedArchs()
    return tuple(capabilities)


def probe() -> int:
    """Print what this machine can do; return 0 if it matches the table."""
    try:
        version, capabilities = toolchain().version, known()
    except NoCompiler as error:
        print(error)
        return 1
    machine = Machine.here()
    print(f"NVRTC {version} compiles for " + ", ".join(f"sm_{c}" for c in capabilities))
    print(_gpu_description(machine), end="\n\n")
    archs = [arch for arch in GPU_ARCHS if int(arch[2:]) in capabilities]
    found, launched = {f: survey(f, archs) for f in ASSEMBLED}, launches(machine)
    print(*report(found, machine.arch, launched), sep="\n")
    differing = [f"{a}: NVRTC {version} does not know it" for a in GPU_ARCHS if a not in archs]
    differing += [line for feature in found for line in differences(feature, found[feature])]
    differing += [f"{f} on {machine.arch}: on this GPU: {w}" for f, w in launched.items() if w]
    verdict = (
        "not as in the table of pytest_aisp/page/gpu_specs.py:" if differing else "as in the table"
    )
    print("", verdict, *differing, sep="\n")
    return int(bool(differing))


def _gpu_description(machine: Machine) -> str:
    if machine.arch == "cpu":
        return "no GPU here: what follows was assembled, nothing was launched"
    if machine.arch not in GPU_ARCHS:
        return f"{machine.name} is {machine.arch}, which is not in the table: nothing was launched"
    return f"{machine.name} is {machine.arch}"


def main(arguments: list[str]) -> int:
    """Probe, print the table, or launch one probe; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--table", action="store_true", help="print the table and probe nothing")
    parser.add_argument("--launch", choices=list(ASSEMBLED), help="launch one probe on the GPU")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(), end="")
        return 0
    if options.launch:
        print(fault := launch(options.launch))
        return int(bool(fault))
    return probe()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
