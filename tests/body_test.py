"""A test body's own assertions count for the case's verdict, as its pair's claims do."""

from __future__ import annotations

import pytest

from pytest_aisp.results import run_reader

JUDGED = "pair.assert_equivalent()\npair.assert_speedup()"
BODIES = {
    "told": f'{JUDGED}\nassert pair.speedup > 5, "too slow\\nfor me"',
    "plain": f"{JUDGED}\nassert pair.size == {{}}",
    "broken": f"{JUDGED}\n1 / 0",
    "before": "assert pair.size == {}",
}


@pytest.fixture
def rows(page, gpu, pytester):
    """Return how to run the pages here, and the rows of their cases by page."""
    gpu(added=2e-5, doubled=1e-5)

    def rows(*options):
        result = pytester.runpytest_subprocess("-v", "--aisp-artifacts=kept", *options)
        found = {line["page"]: line for line in run_reader.load(pytester.path / "kept").cases}
        return result, {page[5:-8]: (row["verdict"], row["reasons"]) for page, row in found.items()}

    return rows


def test_what_else_fails_is_the_cases_reason_and_it_fails(page, rows, read_junit, pytester):
    for name, body in BODIES.items():
        page(body=body, name=f"{name}_test.py")
    page(at_least="3.0", name="claim_test.py")
    result, found = rows("--junitxml=junit.xml")
    _, [claim, evidence] = found.pop("claim")
    assert claim.endswith("-> red")
    assert evidence == "there is no stored result to compare with"
    assert found == {
        "told": ("fail", ["AssertionError: too slow"]),
        "plain": ("fail", ["AssertionError: assert {'n': 1001} == {}"]),
        "broken": ("fail", ["ZeroDivisionError: division by zero"]),
        "before": ("fail", ["AssertionError: assert {'n': 1001} == {}"]),
    }
    assert {case.verdict for case in read_junit(pytester.path / "junit.xml").values()} == {"fail"}
    result.stdout.fnmatch_lines(
        ["*told_test.py*FAILED 2.0??x*", "told *2.0??x *fail", "*5 failed*"]
    )


def test_a_verdict_that_the_ini_file_makes_red_keeps_its_name(page, rows):
    page()
    _, found = rows("-o", "aisp_missing=fail")
    assert found == {"doubling": ("new", [])}
