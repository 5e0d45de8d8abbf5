"""Options with several words, and what stands behind `--`: `--targets ch10:gemm ch12 -- -x`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..common.answers import Unanswerable

OPTION = "--targets"
REST, GIVEN = "pytest_aisp.rest", "pytest_aisp.given"
"""Where a command's context keeps what stands behind ``--``, and which targets stand last."""


def complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return how a shell could complete a target: chapters, and the pages of one written whole.

    bash takes `ch10:ge` for three words and replaces the last.
    """
    words = list(ctx.meta.get(GIVEN) or ())
    begun = f"{words[-2]}:" if words[1:] and words[-1] == ":" else ""
    return [
        name.removeprefix(begun)
        for name in _names(begun + incomplete)
        if begun or name not in words
    ]


def _names(incomplete: str) -> list[str]:
    from ..tools import catalogue

    try:
        pages = catalogue.collect(()).pages
    except Unanswerable:  # a shell that completes has no use for the reason
        return []
    chapters = sorted({page["chapter"] for page in pages})
    names = [page["name"] for page in pages if page["chapter"] == incomplete.partition(":")[0]]
    return [name for name in [*chapters, *names] if name.startswith(incomplete)]


Targets = Annotated[
    list[str] | None,
    typer.Option(
        OPTION,
        metavar="TARGET ...",
        help="chapters (ch10) and pages (ch10:gemm); default: all",
        autocompletion=complete,
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
        if ctx.resilient_parsing:  # a shell completes: what it has so far may lack a word
            ctx.meta[GIVEN] = None if dashes else _last_given(ours)
            words = [word for word in words if word != OPTION]
        if OPTION in words:
            ctx.fail(f"{OPTION} needs a chapter or a page, as ch10 or ch10:gemm")
        return super().parse_args(ctx, words)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the second target and those after it, as Typer does the first."""
        if ctx.meta.get(GIVEN) is None or incomplete.startswith("-"):
            return list(super().shell_complete(ctx, incomplete))
        if incomplete == ":":
            ctx.meta[GIVEN].append(incomplete)
            incomplete = ""
        option = next(param for param in self.get_params(ctx) if OPTION in param.opts)
        return list(option.shell_complete(ctx, incomplete))


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


def _last_given(args: Sequence[str]) -> list[str] | None:
    """Return the targets at the end of `args`, or None where another option stands there."""
    words: list[str] = []
    for word in reversed(args):
        if not word.startswith("-"):
            words.insert(0, word)
            continue
        option, equals, first = word.partition("=")
        return ([first] if equals else []) + words if option == OPTION else None
    return None


def rest(ctx: typer.Context) -> list[str]:
    """Return what stands behind ``--`` on the command line."""
    return list(ctx.meta[REST])
