"""Two versions of a page, each in a tree of its own, and what `changed_sides` says about them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from pytest_aisp.results.messages import ChangedTask, PageSource
from pytest_aisp.results.task_results import ChangedResult
from pytest_aisp.worker.changed_sides import changed_sides
from pytest_aisp.worker.loader import TaskContext

NUMBERS = itertools.count()


def write_files(root: Path, files: Mapping[str, str]) -> str:
    """Write the texts of `files` below `root`, and return `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def compare_versions(then: str, now: str, page: str, **fields: object) -> ChangedResult:
    """Return what `changed_sides` says about the variant `doubled` of `page` in two trees."""
    module = page.removesuffix(".py").replace("/", ".")
    old = f"aisp_past_{next(NUMBERS)}.{module}"
    past = PageSource(page=f"{then}/{page}", root=then, module=old)
    case = {"function": "test_doubling", "variant": "doubled", "past": past}
    task = ChangedTask(page=f"{now}/{page}", root=now, module=module, **case, **fields)
    result = changed_sides(TaskContext(task, past))
    assert result.why == "", result.why
    return result
