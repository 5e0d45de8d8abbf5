"""One side under NVIDIA's Nsight Systems (`nsys`) or Nsight Compute (`ncu`): `solo` inside it.

The tool gets a program with one side in it, and no bench process: its own pipes and time limits
are none of the tool's business, and what was run can be run again by hand with other options.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..results import messages
from ..results.messages import Task
from .client import LONGER, bench_environment, how_it_ended, python
from .printed import last_lines
from .profiler import range_name

SLOWER = 20.0
"""By how much time limits are longer: `ncu` runs each kernel some forty times."""
LAUNCHES = 100
"""Most kernels of a side that `ncu` looks at."""
NO_COUNTERS = "ERR_NVGPUCTRPERM"
COUNTERS = (
    f"ncu may not read the GPU's performance counters ({NO_COUNTERS})\n"
    "Let every user read them, and restart the driver:\n"
    "    echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' |"
    " sudo tee /etc/modprobe.d/ncu.conf"
)


class NsightError(Exception):
    """A tool that gave no report; the message says why and what to do."""


@dataclass(frozen=True)
class Tool:
    """How a tool is called.

    Attributes:
        product: what has to be installed; suffix: of its reports.
        options: before the program; ``{range}`` and ``{report}``, a path to which the tool adds
            its suffix, are filled in.
    """

    product: str
    suffix: str
    options: Sequence[str]


TOOLS = {
    "nsys": Tool(
        "Nsight Systems",
        ".nsys-rep",
        (
            *("profile", "--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none"),
            *("--cuda-graph-trace=node", "--capture-range=cudaProfilerApi"),
            *("--capture-range-end=stop", "--stats=true", "--force-overwrite=true"),
            "--output={report}",
        ),
    ),
    "ncu": Tool(
        "Nsight Compute",
        ".ncu-rep",
        (
            *("--nvtx", "--nvtx-include", "{range}/", "--set=full"),
            "--target-processes=application-only",  # not the compilers that a side may start
            *(f"--launch-count={LAUNCHES}", "--force-overwrite", "--export={report}"),
        ),
    ),
}


def absent(name: str) -> str:
    """Return what to say where the tool `name` is not installed."""
    product = TOOLS[name].product
    page = f"https://developer.nvidia.com/{product.lower().replace(' ', '-')}"
    return (
        f"{name} is not on PATH; it is {product}, which comes with the CUDA toolkit, in bin/, or"
        f" from {page}\ntorch's profiler needs neither:\n    pytest --aisp-profile=torch"
    )


def installed(name: str) -> str | None:
    """Return the path of the tool `name`, or None."""
    return shutil.which(name)


def watch(
    name: str, task: Task, folder: Path, environment: Mapping[str, str | None], seconds: float
) -> list[str]:
    """Run the side `task.side` under the tool `name`; return the files that it left in `folder`.

    Args:
        environment: variables to set for it; None as a value removes one.
        seconds: time limit, which is `SLOWER` times longer here.

    Raises:
        NsightError: where there is no report in the end.
        OSError: where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / f"{task.side}{TOOLS[name].suffix}"
    report.unlink(missing_ok=True)
    given = folder / f"{task.side}.task.json"
    given.write_bytes(messages.encode(task))
    command = [*_options(name, task.side, report), *_program(given)]
    again = folder / f"{task.side}.{name}.sh"
    again.write_text(_script(command, environment))
    said = folder / f"{task.side}.{name}.txt"
    with open(said, "w+b") as output:
        code = _finished(command, bench_environment(environment), output.fileno(), SLOWER * seconds)
        if not report.exists() or code != 0:
            raise NsightError(_why(name, code, SLOWER * seconds, last_lines(output, 6)))
    return [file.name for file in (report, again, said, given)]


def _options(name: str, role: str, report: Path) -> list[str]:
    filled = {"range": range_name(role), "report": str(report.with_suffix(""))}
    return [installed(name) or name, *(o.format(**filled) for o in TOOLS[name].options)]


def _program(given: Path) -> list[str]:
    return [*python(), "-m", "pytest_aisp.bench.solo", str(given)]


def _script(command: Sequence[str], environment: Mapping[str, str | None]) -> str:
    """Return the lines that run `command` once more, by hand."""
    path = bench_environment({})["PYTHONPATH"]
    unset = [f"-u {name}" for name, value in environment.items() if value is None]
    assigned = {"PYTHONPATH": path} | {k: v for k, v in environment.items() if v is not None}
    variables = [f"{name}={shlex.quote(value)}" for name, value in assigned.items()]
    line = " ".join(["env", *unset, *variables, shlex.join(command)])
    return f"cd {shlex.quote(os.getcwd())} && {line}\n"


def _finished(
    command: Sequence[str], environment: Mapping[str, str], output: int, seconds: float
) -> int | None:
    """Return the exit code of `command`, or None where it was killed after `seconds`."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=dict(environment),
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:  # late, or Ctrl-C: no tool outlives its run
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _why(name: str, code: int | None, seconds: float, output: str) -> str:
    if NO_COUNTERS in output:
        return COUNTERS
    if code is None:
        return f"{name} took longer than {seconds:g} s\n{LONGER}"
    ended = f"ended {how_it_ended(code)}" if code else "left no report"
    return "\n".join([f"{name} {ended}", *output.splitlines()])
