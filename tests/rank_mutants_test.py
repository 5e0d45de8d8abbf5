"""Pages on several ranks reject the wrong sides of page_mutants_test.py, run by two ranks."""

from __future__ import annotations

import pytest
from mutants import LIES, nearly, zeros
from page_mutants_test import PAGES, ROOT, judged_on

from pytest_aisp.distributed.launcher import RankSet
from pytest_aisp.page.pair import is_plain
from pytest_aisp.results.messages import CheckTask

SPREAD = sorted(set((ROOT / "suites").rglob("*_test.py")) - set(PAGES))
CASES = [
    pytest.param(path, name, id=f"{path.parent.name}/{path.stem}::{name}")
    for path in SPREAD
    for name in judged_on(path)
]
LYING = """from mutants import lying_page

globals().update(lying_page({path!r}, {root!r}))
"""


RETURN_NOTHING = {"test_sharded_optimizer"}  # nothing that could be nearly right


@pytest.fixture(scope="module")
def started():
    """The ranks that were started; a lie that one rank alone sees through ends them all."""
    found = []
    yield found
    for ranks in found:
        ranks.close()


@pytest.fixture
def both(started):
    if not started or not started[-1].alive:
        started.append(RankSet(2, {"CUDA_VISIBLE_DEVICES": ""}))
    return started[-1]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_wrong_side_is_caught_on_two_ranks(both, tmp_path_factory, path, name, lie):
    lie = zeros if lie is nearly and name in RETURN_NOTHING else lie
    pair, rule = judged_on(path)[name]
    page = tmp_path_factory.getbasetemp() / f"{path.stem}_lies.py"
    page.write_text(LYING.format(path=str(path), root=str(ROOT)))
    [size, *_] = [s for s in pair.check_sizes if is_plain(s)]
    where = {"page": str(page), "root": str(ROOT), "module": f"{path.stem}_lies"}
    case = {"function": name, "variant": lie.__name__, "size": dict(size), "gpus": 2}
    asked = {"rule": vars(rule), "seed": 1, "at": "case"}
    reply = both.ask(CheckTask(**where, **case, **asked), 60, lambda text: None)
    assert reply.error in ("wrong", "page"), reply
    assert lie.__name__ in reply.message
