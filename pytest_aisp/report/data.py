"""What a report embeds: a run, the code of its pages, its cases' history, as plain JSON types."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..results.run_reader import SamplesError
from ..results.verdict import LOOK
from .run import ReportRun, blocks_for, clean, embedded
from .source_view import Page, diff

ORDER: tuple[str, ...] = ("wrong", "invalid", "regressed", "fail", "inconclusive", "stale", "new")
ORDER += ("improved", "pass", "checked", "compiled", "")
"""Verdicts, the gravest first."""

CODE = 2_500_000
"""Bytes of listings and diffs in a whole report: those of the first cases, whole ones only."""
LONG, MANY = 4_000, 40
"""Characters of a reason, note or remark, and how many of each, beyond which they are cut."""

HEADER = ("version", "started", "ended", "complete", "mode", "python", "platform")
LISTS = ("invalid", "not_written", "no_verdict", "no_canary")
PACKAGES = ("torch", "triton", "transformer-engine")
"""All that is taken of a manifest, with driver, product, clocks, power limit and commit: it may
hold more than one wants to hand around, and what is not named here is not."""
CASE: tuple[str, ...] = ("id", "key", "page", "chapter", "function", "baseline", "variant", "size")
CASE += (
    "gpus",
    "product",
    "arch",
    "bound",
    "clock",
    "verdict",
    "not_timed",
    "speedup",
    "seconds",
)
CASE += ("limit", "work", "claim", "stored", "spread", "detectable", "votes", "goals", "reasons")
CASE += ("notes", "remarks", "launch_bound", "profile", "wall")
TEXTS: tuple[str, ...] = ("key", "page", "chapter", "function", "baseline", "variant", "product")
TEXTS += ("arch", "bound", "clock", "verdict", "not_timed")
TABLES = ("size", "work", "goals", "launch_bound")
ROWS = ("votes", "reasons", "notes", "remarks")


def report_data(
    run: ReportRun,
    history: Sequence[ReportRun] = (),
    pages_root: Path | None = None,
    where: Path | None = None,
) -> dict[str, Any]:
    """Return what the report of `run` embeds; the cases that need a look first.

    Args:
        history: other runs whose cases of the same product are shown beside it.
        pages_root: what the pages' paths are relative to; the run's own root, else the working
            directory.
        where: the folder that the report goes to, for links; None for the run's own.
    """
    cases = sorted(map(_case, run.cases), key=_place)
    pages = _pages(cases, _roots(run, pages_root))
    most = blocks_for(len(cases))
    originals = {case["id"]: case for case in run.cases}
    past = _past(run, history)
    room = _Room(CODE)
    for case in cases:
        case |= _samples(run, originals[case["id"]], most)
        case["history"] = past.get((case["id"], case["product"]), [])
        case["command"] = f"pytest {shlex.quote(case['id'])}"
        case["profile"] = _profile(case, run.folder, where)
        room.list(case, pages.get(case["page"]))
    return {
        "run": _header(run),
        "peaks": {product: _peaks(told) for product, told in run.peaks.items()},
        "pages": {
            path: {"title": clean(page.title), "doc": clean(page.doc), "sides": room.sides(path)}
            for path, page in pages.items()
        },
        "cases": [_without_nothing(case) for case in cases],
        "blocks": most,
        "runs": len(history),
    }


def _header(run: ReportRun) -> dict[str, Any]:
    told = run.manifest
    machine, git, packages = (_table(told, name) for name in ("machine", "git", "packages"))
    found: dict[str, Any] = {name: told.get(name) for name in HEADER}
    found |= {name: [str(line) for line in _list(told, name)] for name in LISTS}
    found |= {name: machine.get(name) for name in ("name", "product", "arch")}
    found["gpus"] = len(_list(machine, "gpus"))
    found["versions"] = {k: _table(machine, "versions").get(k) for k in ("driver", "cuda")}
    found["versions"] |= {k: packages[k] for k in PACKAGES if k in packages}
    found["clocks"] = _table(machine, "clocks")
    found["power_limit_w"] = _table(machine, "facts").get("power_limit_w")
    found |= {name: git.get(name) for name in ("commit", "branch", "dirty")}
    found["lost"] = [str(line) for line in _list(run.results, "lost")]
    return found


def _case(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case's fields, those of a partial one with what stands for nothing."""
    case: dict[str, Any] = {name: told.get(name) for name in CASE}
    case |= {name: str(told.get(name) or "") for name in TEXTS}
    case |= {name: dict(_table(told, name)) for name in TABLES}
    case |= {name: list(map(_short, _list(told, name)[:MANY])) for name in ROWS}
    case["verdict"] = case["verdict"] if case["verdict"] in ORDER else ""
    case["chapter"] = case["chapter"] or Path(case["page"]).parent.name
    case["speedup"] = _three(told.get("speedup"))
    seconds = _table(told, "seconds")
    both = [seconds.get(side) for side in ("baseline", "optimized")]
    case["seconds"] = both if all(isinstance(s, (int, float)) and s > 0 for s in both) else None
    return case


def _short(line: Any) -> Any:
    return line[:LONG] + " ..." if isinstance(line, str) and len(line) > LONG else line


def _three(speedup: object) -> list[float] | None:
    """Return value and interval of a speedup that is one."""
    if not isinstance(speedup, Mapping):
        return None
    found = [speedup.get(name) for name in ("value", "low", "high")]
    usable = all(isinstance(v, (int, float)) and v > 0 for v in found)
    return [float(f"{v:.6g}") for v in found if v is not None] if usable else None


def _samples(run: ReportRun, told: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return what is embedded of a case's samples, or what is wrong with them."""
    try:
        return {"samples": embedded(run.timings(told), most)}
    except SamplesError as error:
        return {"samples_wrong": _short(f"{'. '.join(str(error).splitlines())}.")}


def _place(case: Mapping[str, Any]) -> tuple[int, str, str]:
    look = min(ORDER.index(case["verdict"]), len(LOOK))  # they are the first of it
    return look, case["chapter"], case["page"]


def _profile(case: Mapping[str, Any], folder: Path | None, where: Path | None) -> Any:
    """Return tool and files of a case's profile, these as seen from `where`."""
    told = case["profile"]
    if not isinstance(told, Mapping) or folder is None:
        return None
    way = Path(os.path.relpath(folder, where)) if where is not None else Path()
    files = [str(way / str(name)) for name in _list(told, "files")]
    return {"tool": str(told.get("tool") or ""), "files": files}


def _roots(run: ReportRun, pages_root: Path | None) -> list[Path]:
    if pages_root is not None:
        return [pages_root]
    return [Path(str(run.manifest.get("root") or ".")), Path(".")]


def _pages(cases: Sequence[Mapping[str, Any]], roots: Sequence[Path]) -> dict[str, Page]:
    found: dict[str, Page] = {}
    for path in dict.fromkeys(case["page"] for case in cases):
        for root in roots if path else ():
            try:
                found[path] = Page.read(root / path)
                break
            except (OSError, SyntaxError, ValueError):
                continue
    return found


class _Room:
    """Room for the code of the cases, first come, first served."""

    def __init__(self, left: int) -> None:
        self._left = left
        self._sides: dict[str, dict[str, str]] = {}
        self._known: dict[tuple[str, tuple[str, str]], tuple[list[str], str]] = {}

    def _code(self, path: str, page: Page, names: tuple[str, str]) -> tuple[list[str], str]:
        """Return both sides' listings and what changed; a page's cases differ mostly by size."""
        if (path, names) not in self._known:
            texts: list[str] = [clean(page.side(name)) for name in names]
            changed = diff(texts[0], texts[1], names) if all(texts) else ""
            self._known[path, names] = texts, changed
        return self._known[path, names]

    def list(self, case: dict[str, Any], page: Page | None) -> None:
        """List both sides and what changed, or say in `case` that there was no room."""
        if page is None:
            return
        names = _names(case, page)
        case["baseline"] = names[0]
        texts, changed = self._code(case["page"], page, names)
        listed = self._sides.setdefault(case["page"], {})
        new = {n: t for n, t in zip(names, texts, strict=True) if t and n not in listed}
        needed = sum(len(t.encode()) for t in (changed, *new.values()))
        if needed > self._left:
            case["code_left_out"] = True
            return
        self._left -= needed
        listed.update(new)
        case["diff"] = changed

    def sides(self, path: str) -> dict[str, str]:
        """Return the listings of a page's sides by name."""
        return self._sides.get(path, {})


def _names(case: Mapping[str, Any], page: Page) -> tuple[str, str]:
    return case["baseline"] or page.sides(case["function"])[0], case["variant"]


def _past(run: ReportRun, history: Sequence[ReportRun]) -> dict[tuple[str, str], list[list[Any]]]:
    """Return by case and product when, how fast and how it was judged, this run included."""
    found: dict[tuple[str, str], list[list[Any]]] = {}
    for one in sorted([*history, run], key=lambda r: r.started) if history else ():
        commit = str(_table(one.manifest, "git").get("commit") or "")[:10]
        for case in map(_case, one.cases):
            if case["speedup"]:
                entry = [one.started, commit, *case["speedup"], case["verdict"], one is run]
                found.setdefault((case["id"], case["product"]), []).append(entry)
    return {key: entries for key, entries in found.items() if len(entries) > 1}


def _peaks(told: object) -> dict[str, Any]:
    rates, facts = (
        _table(told, n) if isinstance(told, Mapping) else {} for n in ("rates", "facts")
    )
    kept = {k: v for k, v in rates.items() if isinstance(v, (int, float)) and v > 0}
    from_ = told.get("from") if isinstance(told, Mapping) else ""
    return {"rates": kept, "from": str(from_ or ""), "date": facts.get("date")}


def _without_nothing(case: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in case.items() if v not in (None, "", [], {}, False) or k in TEXTS}


def _table(told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = told.get(name)
    return value if isinstance(value, Mapping) else {}


def _list(told: Mapping[str, Any], name: str) -> list[Any]:
    value = told.get(name)
    return value if isinstance(value, list) else []
