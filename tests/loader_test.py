"""An old page imports the modules of its own tree, not those of the current tree."""

from __future__ import annotations

import sys

import pytest
from two_versions import write_files

from pytest_aisp.worker import loader
from pytest_aisp.worker.loader import MixedTreesError, load_old_page, load_page

PAST = "aisp_past_c0ffee.chapter.some_test"


@pytest.fixture
def trees(tmp_path, fresh_imports):
    """Write a page and its helper into two trees, `today` and `old`, and import today's."""

    def write(page, helper):
        today, old = tmp_path / "today", tmp_path / "old"
        for root in (today, old):
            write_files(root, {"chapter/some_test.py": page, helper: f"AGE = {root.name!r}\n"})
        for folder in ("src", "."):
            sys.path.insert(0, str(today / folder))
        return today, old

    return write


def load_both(today, old):
    page = "chapter/some_test.py"
    now = load_page(str(today / page), str(today), "chapter.some_test")
    return now, load_old_page(str(old / page), str(old), PAST, str(today))


@pytest.mark.parametrize(
    ("page", "helper"),
    [
        ("from aged_library import AGE", "src/aged_library.py"),
        ("from aged_library.ops import AGE", "src/aged_library/ops.py"),
        ("from aged_helper import AGE", "aged_helper.py"),
        ("from chapter.aged_helper import AGE", "chapter/aged_helper.py"),
        ("from .aged_helper import AGE", "chapter/aged_helper.py"),
    ],
    ids=["src", "namespace", "root", "chapter", "relative"],
)
def test_each_page_imports_the_helper_of_its_tree(trees, page, helper):
    today, old = trees(page, helper)
    before = list(sys.path)
    now, then = load_both(today, old)
    assert (now.AGE, then.AGE) == ("today", "old")
    assert [path for path in sys.path if path not in before] == []
    again = load_old_page(str(old / "chapter/some_test.py"), str(old), PAST, str(today))
    assert again is then
    under = loader._modules_under(str(old))
    assert {name.partition(".")[0] for name in under} == {"aisp_past_c0ffee"}


def test_an_old_tree_may_lie_inside_of_todays_tree(trees):
    today, old = trees("from aged_library import AGE", "src/aged_library.py")
    inside = today / "tmp" / "tree"
    inside.parent.mkdir()
    old.rename(inside)
    assert load_both(today, inside)[1].AGE == "old"


def test_an_old_page_that_imports_todays_helper_is_refused(trees, tmp_path):
    library = str(tmp_path / "today" / "lib")
    page = f"import sys\nsys.path.insert(0, {library!r})\nfrom aged_library import AGE"
    today, old = trees(page, "lib/aged_library.py")
    with pytest.raises(
        MixedTreesError, match=r"^the old page imports aged_library from the current tree$"
    ):
        load_both(today, old)
    assert PAST not in sys.modules
    assert sys.modules["aged_library"].AGE == "today"


def test_a_relative_import_in_a_call_stays_in_the_old_tree(trees):
    page = "def age():\n    from .aged_helper import AGE\n    return AGE\n"
    now, then = load_both(*trees(page, "chapter/aged_helper.py"))
    assert (now.age(), then.age()) == ("today", "old")
