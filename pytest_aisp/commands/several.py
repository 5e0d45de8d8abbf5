"""Options with several words, and what stands behind `--`: `--targets ch10:gemm ch12 -- -x`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

OPTION = "--targets"
REST = "pytest_aisp.rest"
"""Where a command's context keeps what stands behind ``--``."""

Targets = Annotated[
    list[str] | None,
    typer.Option(
        OPTION, metavar="TARGET ...", help="chapters (ch10) and pages (ch10:gemm); default: all"
    ),
]


class Several(TyperCommand):
    """A command whose `--targets` takes words up to the next option."""

    passes = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give Typer one option a word, which is all that it knows."""
        ours, dashes, rest = _split(args)
        if dashes and not self.passes:
            ctx.fail("nothing goes from here to pytest: leave out -- and what stands behind it")
        ctx.meta[REST] = rest
        words = list(_one_each(ours))
        if OPTION in words:
            ctx.fail(f"{OPTION} needs a chapter or a page, as ch10 or ch10:gemm")
        return super().parse_args(ctx, words)


class Passing(Several):
    """One that also hands to pytest what stands behind ``--``."""

    passes = True


def _split(args: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in args:
        return list(args), False, []
    at = args.index("--")
    return list(args[:at]), True, list(args[at + 1 :])


def _one_each(args: Sequence[str]) -> Iterator[str]:
    """Yield ``--targets=a --targets=b`` for ``--targets a b``; itself where no word follows."""
    pending, inside = False, False
    for word in [*args, "--"]:  # which ends every option
        if inside and not word.startswith("-"):
            yield f"{OPTION}={word}"
            pending = False
            continue
        if pending:
            yield OPTION
        pending = inside = word == OPTION
        inside |= word.startswith(f"{OPTION}=")
        if not pending and word != "--":
            yield word


def rest(ctx: typer.Context) -> list[str]:
    """Return what stands behind ``--`` on the command line."""
    return list(ctx.meta[REST])
