"""`aisp judge`: the verdict on kernels that models write."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..util.cli_result import CliError
from .console import parse_option, print_line

if TYPE_CHECKING:
    from ..judging.candidate_verdict import Verdict

Sizes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="replace the value of a constant of the problem"
    ),
]
CODES = {"accepted": 0, "problem_error": 2, "disturbed": 17}
"""The exit code for each reason code of a verdict. All other reasons have exit code 1."""


def judge(
    problem: Annotated[Path, typer.Argument(help="the problem")],
    candidates: Annotated[list[Path], typer.Argument(help="answers to the problem")],
    sizes: Sizes = None,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, max=4, help="draws of weights and inputs to check")
    ] = 3,
    check_only: Annotated[bool, typer.Option("--check-only", help="time nothing")] = False,
    trusted: Annotated[
        bool,
        typer.Option("--trusted", help="skip the sandbox: only for candidates that do not cheat"),
    ] = False,
    precision: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="lower precision that candidates may use, such as bf16"),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="default: the GPU, if there is one")
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="stop a candidate that makes no progress for this long"
        ),
    ] = 120.0,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="host memory per process; default: half of what is free"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print a line of JSON for each candidate")
    ] = False,
) -> None:
    """Judge kernels that models write: are they right, and how fast are they?"""
    from ..judging.judge import Judge

    for file in (problem, *candidates):
        if not file.is_file():
            raise CliError(f"{file}: there is no such file")
    replaced = dict(parse_option("--set", parse_size, text) for text in sizes or ())
    if precision is not None:
        parse_option("--precision", parse_precision, precision)
    options: dict[str, Any] = {"precision": precision, "device": device, "timeout": timeout}
    options["memory"] = None if memory is None else int(memory * 2**30)
    codes = []
    with Judge(
        problem, sizes=replaced, seeds=seeds, timed=not check_only, untrusted=not trusted, **options
    ) as judge:
        for candidate in candidates:
            verdict = judge.judge(candidate)
            codes.append(CODES.get(verdict.reason, 1))
            print_line(to_json(verdict) if as_json else "\n".join(lines(verdict)))
    # If one candidate is refused, the exit code is 1, even if another has no verdict.
    raise typer.Exit(1 if 1 in codes else max(codes))


def parse_size(text: str) -> tuple[str, object]:
    """Return the name and the value in ``batch=32``. A value that is not a literal is a string."""
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier() and value):
        raise ValueError(f"{text!r} is not NAME=VALUE; write it like batch=32")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def parse_precision(text: str) -> str:
    """Return `text`, or raise ValueError if the text is not a precision."""
    from ..page.pair import PRECISIONS

    if text not in PRECISIONS:
        raise ValueError(f"{text!r} is none of {', '.join(PRECISIONS)}")
    return text


def to_json(verdict: Verdict) -> str:
    """Return the fields of a verdict as one line of JSON."""
    return json.dumps({name: getattr(verdict, name) for name in verdict.__struct_fields__})


def lines(verdict: Verdict) -> Sequence[str]:
    """Return a verdict as text."""
    word = "accepted" if verdict.accepted else f"refused: {verdict.reason}"
    if verdict.reason in ("problem_error", "disturbed"):
        word = f"no verdict: {verdict.reason}"
    parts = [f"{verdict.candidate}: {word}"]
    if verdict.speedup is not None and verdict.accepted:
        interval = f"{verdict.low:.3g} to {verdict.high:.3g}"
        parts.append(f"{verdict.speedup:.3g}x ({interval}) on the {verdict.clock} clock")
    details = [*verdict.message.splitlines(), *verdict.trace.splitlines()]
    return [", ".join(parts), *(f"    {line}" for line in details)]
