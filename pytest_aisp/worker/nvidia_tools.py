"""One side under NVIDIA's Nsight Systems (`nsys`) or Nsight Compute (`ncu`): `solo` inside it.

The tool gets a program with one side in it, and no worker process: its own pipes and time limits
are none of the tool's business, and what was run can be run again by hand with other options.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from ..results import messages
from ..results.messages import ProfileTask, Reply, Task
from .client import LONGER, WorkerProcess, how_it_ended, python, worker_environment
from .output_capture import last_lines
from .torch_profiler import range_name

PROFILER_SLOWDOWN = 20.0
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


def absent_profiler(name: str) -> str:
    """Return what to say where the tool `name` is not installed."""
    product = TOOLS[name].product
    page = f"https://developer.nvidia.com/{product.lower().replace(' ', '-')}"
    return (
        f"{name} is not on PATH; it is {product}, which comes with the CUDA toolkit, in bin/, or"
        f" from {page}\ntorch's profiler needs neither:\n    pytest --aisp-profile=torch"
    )


def profiler_installed(name: str) -> str | None:
    """Return the path of the tool `name`, or None."""
    return shutil.which(name)


def watch(
    name: str,
    task: ProfileTask,
    folder: Path,
    environment: Mapping[str, str | None],
    seconds: float,
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
        code = _finished(
            command, worker_environment(environment), output.fileno(), PROFILER_SLOWDOWN * seconds
        )
        if not report.exists() or code != 0:
            raise NsightError(_why(name, code, PROFILER_SLOWDOWN * seconds, last_lines(output, 6)))
    return [file.name for file in (report, again, said, given)]


def _options(name: str, role: str, report: Path) -> list[str]:
    filled = {"range": range_name(role), "report": str(report.with_suffix(""))}
    return [profiler_installed(name) or name, *(o.format(**filled) for o in TOOLS[name].options)]


def _program(given: Path) -> list[str]:
    return [*python(), "-m", "pytest_aisp.worker.profile_target", str(given)]


def _script(command: Sequence[str], environment: Mapping[str, str | None]) -> str:
    """Return the lines that run `command` once more, by hand."""
    path = worker_environment({})["PYTHONPATH"]
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


TOOL = "compute-sanitizer"
ABSENT = f"{TOOL} is not on PATH; it comes with the CUDA toolkit, in bin/"
SANITIZER_SLOWDOWN = 20.0
"""By how much time limits are longer under it."""
SHOWN = 12
"""Lines of its report that a failure shows."""

_NO_FINDING = re.compile(r"COMPUTE-SANITIZER|ERROR SUMMARY: 0 |^=+\s*$|Target application|LEAK SUM")
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor is an allocation of its own, so that reading beyond it is reading beyond memory."""


def sanitizer_installed() -> str | None:
    """Return the path of compute-sanitizer, or None."""
    return shutil.which(TOOL)


class Sanitized(WorkerProcess):
    """A worker process whose kernels `check`, a tool of compute-sanitizer, watches."""

    def __init__(self, check: str, environment: Mapping[str, str | None] | None = None) -> None:
        handle, self._log = tempfile.mkstemp(prefix="aisp-sanitizer-", suffix=".log")
        os.close(handle)
        self._check, self._read = check, 0
        # A library's own faults while it initializes are not the page's.
        watch = ("--tool", check, "--log-file", self._log, "--report-api-errors", "no")
        tool = sanitizer_installed() or TOOL
        super().__init__({**(environment or {}), **ENVIRONMENT}, [tool, *watch])

    def ask(self, task: Task, seconds: float, progress: Callable[[str], None]) -> Reply:
        """Return the reply to `task`, or what was found while it was answered."""
        reply = super().ask(task, SANITIZER_SLOWDOWN * seconds, progress)
        found = self._findings()
        if not found:
            return reply
        self.kill()  # after an access beyond memory nothing works any more
        first = f"{self._check} finds fault with a kernel:"
        words = [first, *found[:SHOWN], *["..."] * (len(found) > SHOWN)]
        return replace(reply, error="page", message="\n".join(words), trace="")

    def _findings(self) -> list[str]:
        """Return the report's new lines, without its frame."""
        with open(self._log, errors="replace") as log:
            log.seek(self._read)
            lines = log.read().splitlines()
            self._read = log.tell()
        return [line.removeprefix("=========").strip() for line in lines if _is_finding(line)]

    def close(self) -> None:
        super().close()
        os.unlink(self._log)


def _is_finding(line: str) -> bool:
    return bool(line.strip()) and not _NO_FINDING.search(line)
