"""The lines with which a failure ends: how to have it again, how to accept what it shows."""

from __future__ import annotations

import shlex

from .settings import Settings


def again(settings: Settings, case: str, seed: int = 0) -> list[str]:
    """Return how to run `case` again, in this mode, on the values of `seed`.

    0 is the seed of a task that draws none, and of a reproducible run.
    """
    values = {
        "--aisp-check": "" if settings.check and not settings.sanitize else None,
        "--aisp-sanitize": settings.sanitize or None,
        "--aisp-aa": "" if settings.aa else None,
        "--aisp-compile": ",".join(settings.compile) or None,
        "--aisp-against": settings.against,
        "--aisp-untrusted": "" if settings.untrusted else None,
        "--aisp-reproducible": "" if settings.reproducible else None,
        "--aisp-seed": f"{seed}" if seed and not settings.compile else None,
    }
    given = [f"{k}={shlex.quote(v)}" if v else k for k, v in values.items() if v is not None]
    return ["reproduce:", " ".join([f"    pytest {shlex.quote(case)}", *given])]


def accept(case: str, *, stored: bool) -> list[str]:
    """Return how to store what was measured of `case`, in place of what is `stored`."""
    how = "=all" if stored else ""
    return ["accept:", f"    pytest --aisp-update-expectations{how} {shlex.quote(case)}"]
