"""Pages on several ranks reject the wrong sides of page_mutants_test.py, run by two ranks."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, nearly, zeros
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
MUTANT_PAGE = """from mutants import mutant_page

globals().update(mutant_page({path!r}, {root!r}))
"""


RETURN_NOTHING = {"test_sharded_optimizer"}  # nothing that could be nearly right


@pytest.fixture(scope="module")
def started():
    """The ranks that were started; a mutant that only one rank refuses ends them all."""
    rank_sets = []
    yield rank_sets
    for ranks in rank_sets:
        ranks.close()


@pytest.fixture
def two_ranks(started):
    if not started or not started[-1].alive:
        started.append(RankSet(2, {"CUDA_VISIBLE_DEVICES": ""}))
    return started[-1]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_wrong_side_is_caught_on_two_ranks(two_ranks, tmp_path_factory, path, name, mutant):
    mutant = zeros if mutant is nearly and name in RETURN_NOTHING else mutant
    pair, rule = judged_on(path)[name]
    page = tmp_path_factory.getbasetemp() / f"{path.stem}_mutants.py"
    page.write_text(MUTANT_PAGE.format(path=str(path), root=str(ROOT)))
    [size, *_] = [s for s in pair.check_sizes if is_plain(s)]
    where = {"page": str(page), "root": str(ROOT), "module": f"{path.stem}_mutants"}
    case = {"function": name, "variant": mutant.__name__, "size": dict(size), "gpus": 2}
    settings = {"rule": vars(rule), "seed": 1, "at": "case"}
    reply = two_ranks.ask(CheckTask(**where, **case, **settings), 60, lambda text: None)
    assert reply.error in ("wrong", "page"), reply
    assert mutant.__name__ in reply.message
