"""A red verdict fails in pytest, whatever the page's test does."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from pytest_aisp.results import run_reader

CAUGHT = """pair.assert_equivalent()
try:
    pair.assert_speedup()
except AssertionError as error:
    {}"""
WRONG = """try:
    pair.assert_equivalent()
except AssertionError:
    {}"""
ZEROS = "torch.zeros_like(x)"
REFUSED = "E  *AssertionError: doubled is wrong at *"
RED = {
    "swallowed": CAUGHT.format("pass"),
    "expected": "pair.assert_equivalent()\n"
    "with __import__('pytest').raises(AssertionError):\n    pair.assert_speedup()",
    "skipped": CAUGHT.format("__import__('pytest').skip('slow today')"),
    "xfailed": CAUGHT.format("__import__('pytest').xfail('known to be slow')"),
    "exited": CAUGHT.format("__import__('sys').exit(0)"),
    "other": CAUGHT.format("pass") + "\nassert pair.size == {}",
    "chained": CAUGHT.format("raise RuntimeError('too slow') from error"),
    "twice": CAUGHT.format("pass") + "\npair.assert_speedup()",
    "stripped": CAUGHT.format("error.__traceback__ = None"),  # nothing to show the page's line
    "threaded": "pair.assert_equivalent()\n"
    "__import__('concurrent.futures').futures.ThreadPoolExecutor()"
    ".submit(pair.assert_speedup).exception()",
}
MISSED = "E  *AssertionError: ?.???x against 3.000x (at_least on the page)*-> red"
PLAIN = """import pytest


@pytest.mark.xfail
def test_plain():
    assert False
"""
FEW = ("swallowed", "skipped", "xfailed", "other")
RUNS = {"alone": (RED, []), "n2": (FEW, ["-n2"]), "reruns": (FEW, ["--reruns=2", "--runxfail"])}


def junit_cases(path):
    """Return the outcomes and texts of each test of a JUnit file, by its file's name."""
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = case.attrib["classname"].split(".")[-1].removesuffix("_test")
        found[name] = [(e.tag, e.text) for e in case if e.tag in ("failure", "error", "skipped")]
    return found


@pytest.mark.parametrize("how", RUNS)
def test_each_red_case_is_failed_and_shows_its_verdict(page, gpu, pytester, how):
    gpu(added=2e-5, doubled=1e-5)
    names, options = RUNS[how]
    for name in names:
        page(body=RED[name], name=f"{name}_test.py", at_least="3.0")
    page(name="green_test.py")
    pytester.makepyfile(plain_test=PLAIN)
    result = pytester.runpytest_subprocess(
        "--junitxml=junit.xml", "--aisp-artifacts=kept", *options
    )
    rows = run_reader.load(pytester.path / "kept").cases
    verdicts = {row["page"][5:-8]: row["verdict"] for row in rows}
    assert verdicts == {**dict.fromkeys(names, "fail"), "green": "new"}
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    plain = how == "reruns"  # its --runxfail makes the ordinary test fail
    assert result.parseoutcomes()["failed"] == len(names) + plain

    junit = junit_cases(pytester.path / "junit.xml")
    assert junit["green"] == []
    for name in names:
        [(outcome, text)] = junit[name]
        assert outcome == "failure"
        assert "against 3.000x (at_least on the page)" in text
        assert "reproduce:" in text
        assert "pair.assert_speedup" in text or name in ("stripped", "threaded")
        assert "too slow" in text or name != "chained"
    result.stdout.fnmatch_lines([MISSED])
    result.stdout.fnmatch_lines(
        [
            "* The test also failed after its verdict *",
            "E       AssertionError: assert {'n': 1001} == {}",
        ]
    )
    assert "pytest_aisp/" not in result.stdout.str()


def test_maxfail_counts_red_cases(page, pytester):
    page(ZEROS, body=WRONG.format("__import__('pytest').skip()"), name="a_test.py")
    page(name="b_test.py")
    result = pytester.runpytest_subprocess("-x", "--aisp-check")
    result.stdout.fnmatch_lines(["*stopping after 1 failures*", "=* 1 failed in *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_nothing_is_timed_after_a_wrong_result(timed_page, pytester):
    timed_page(ZEROS, body=WRONG.format("pair.assert_speedup()"))
    result = pytester.runpytest_subprocess("--aisp-artifacts=kept")
    [row] = run_reader.load(pytester.path / "kept").cases
    assert (row["verdict"], row["speedup"]) == ("wrong", None)
    result.stdout.fnmatch_lines([">*pair.assert_speedup()", REFUSED])


def test_a_verdict_that_the_ini_file_makes_red_cannot_be_swallowed(timed_page, pytester):
    timed_page(body=RED["swallowed"])
    result = pytester.runpytest_subprocess("-o", "aisp_missing=fail", "--aisp-artifacts=kept")
    [row] = run_reader.load(pytester.path / "kept").cases
    assert (row["verdict"], row["reasons"]) == ("new", [])
    result.stdout.fnmatch_lines(["=* 1 failed in *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


HONEST = """pair.assert_equivalent()
with __import__('pytest').raises(AssertionError):
    pair.speedup
pair.assert_speedup()
pair.assert_speedup()
with __import__('pytest').raises(AssertionError):
    assert pair.speedup > 1000"""


def test_a_body_that_expects_other_errors_is_green(timed_page, pytester):
    timed_page(body=HONEST)
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(["=* 1 new in *"])
    assert result.ret == 0


# Fixtures


def add_fixture(path, text):
    """Add a fixture `late` to a page, and let its test take it."""
    page = path.read_text().replace("(pair):", "(pair, late):")
    path.write_text(f"{page}\n\nimport pytest\n\n\n@pytest.fixture\n{text}")


SKIPS = """def late(pair):
    try:
        pair.assert_equivalent()
    except AssertionError:
        pytest.skip("slow today")
"""


def test_a_red_verdict_in_a_fixture_that_skips_is_red(page, pytester):
    add_fixture(page(ZEROS), SKIPS)
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines([REFUSED, "doubling *wrong", "=* 1 error in *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_nothing_is_judged_in_a_finalizer(timed_page, pytester):
    add_fixture(timed_page(), "def late(pair):\n    yield\n    pair.assert_launches(at_most=1)\n")
    result = pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(
        [
            "E  *AssertionError: the test is over and its verdict is reported: nothing more is *",
            "E  *Call the assertions of `pair` in the test body",
            "=* 1 error, 1 new in *",
        ]
    )


OWN = """


import pytest


@pytest.fixture
def pair({}):
    return {}
"""


def test_a_fixture_may_wrap_the_pair_but_not_hide_it(page, pytester):
    hides, wraps = page(body="assert pair", name="hides_test.py"), page(name="wraps_test.py")
    hides.write_text(hides.read_text() + OWN.format("", 1))
    wraps.write_text(wraps.read_text() + OWN.format("pair", "pair"))
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(
        [
            "ch99/hides_test.py:*: another fixture `pair` hides the plugin's: nothing would be *",
            "Give that fixture another name",
            "=* 1 failed, 1 checked in *",
        ]
    )


# The exit code


@pytest.mark.parametrize("workers", [[], ["-n1"]])
def test_pytest_exit_does_not_hide_a_red_verdict(page, pytester, workers):
    page(ZEROS, body=WRONG.format("__import__('pytest').exit('enough', returncode=0)"))
    result = pytester.runpytest_subprocess("--aisp-check", *workers)
    result.stdout.fnmatch_lines([REFUSED, "doubling *wrong"])
    result.stdout.fnmatch_lines(["!*enough*", "=* 1 failed in *"])
    assert result.ret == pytest.ExitCode.INTERRUPTED


def test_a_page_cannot_end_the_run_with_exit_code_0(page, pytester):
    page(body="__import__('pytest').exit('enough', returncode=0)")
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(["!* _pytest.outcomes.Exit: enough !*"])
    assert result.ret == pytest.ExitCode.INTERRUPTED


def test_a_body_that_ends_its_xdist_worker_is_red(page, pytester):
    page(body="__import__('os')._exit(0)")
    result = pytester.runpytest_subprocess("--aisp-check", "-n1")
    result.stdout.fnmatch_lines(["NO VERDICT: *", "=* 1 failed in *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


REWRITES = {
    "reports": """
import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_logreport(report):
    report.outcome = "passed"
    return (yield)
""",
    "status": "def pytest_sessionfinish(session):\n    session.exitstatus = 0\n",
    "exit": """
import pytest


def pytest_sessionfinish():
    pytest.exit("enough", returncode=0)
""",
}


@pytest.mark.parametrize("how", REWRITES)
def test_a_run_with_a_red_row_never_exits_0(page, pytester, how):
    page(ZEROS)
    pytester.makeconftest(REWRITES[how])
    assert pytester.runpytest_subprocess("--aisp-check").ret == pytest.ExitCode.TESTS_FAILED


# xfail


XFAIL = [
    "ch99/*_test.py:*: test_doubling[[]doubled-n1001[]]: xfail is refused on a case, because it"
    " would turn a red verdict green",
    'If a variant may be slower, declare at_least="yardstick". If it cannot run here, skip *',
    "    Variant(side, marks=[[]pytest.mark.skipif(...)[]])",
]
MARKS = {
    "test": ("@compare(", "@__import__('pytest').mark.xfail(strict=True)\n@compare("),
    "page": ("CALLS = []", "pytestmark = __import__('pytest').mark.xfail"),
    "variant": ("[doubled]", "[Variant(doubled, marks=[__import__('pytest').mark.xfail])]"),
}


@pytest.mark.parametrize("options", [[], ["--runxfail"], ["-n1"]])
def test_xfail_on_a_case_is_refused_at_collection(page, pytester, options):
    for where, change in MARKS.items():
        path = page(name=f"{where}_test.py")
        path.write_text(path.read_text().replace(*change))
    result = pytester.runpytest_subprocess("--aisp-check", *options)
    result.stdout.fnmatch_lines(len(MARKS) * XFAIL)
    result.stdout.fnmatch_lines(["=* 3 errors in *"])
    assert result.ret != pytest.ExitCode.OK


LATE = """
import pytest

OPTIONS = {"strict_test.py": {"strict": True}, "unused_test.py": {"run": False}}


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.xfail(**OPTIONS.get(item.path.name, {})))
"""


def test_a_late_xfail_mark_does_not_make_a_case_green(page, pytester):
    for name in ("right", "strict", "unused"):
        page(name=f"{name}_test.py")
    page(ZEROS, name="wrong_test.py")
    pytester.makepyfile(plain_test=PLAIN.replace("@pytest.mark.xfail\n", ""))
    pytester.makeconftest(LATE)
    result = pytester.runpytest_subprocess("--aisp-check", "-ra")
    result.stdout.fnmatch_lines(["ch99/unused_test.py:*: xfail is refused on a case, *"])
    result.stdout.fnmatch_lines(["ch99/right_test.py:*: xfail is refused on a case, *", REFUSED])
    result.stdout.fnmatch_lines(["XFAIL plain_test.py::*", "=* 3 failed, 1 xfailed, 1 error in *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


# when=


def test_a_page_whose_when_leaves_no_case_is_an_error_of_that_page(page, pytester):
    page(variants="[Variant(doubled, when=lambda n: n > 5000)]", name="a_test.py")
    page(name="b_test.py")
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(
        [
            "ch99/a_test.py:*: when= leaves no case: it returned False for every variant *",
            "Add a size at which a variant exists. If the page cannot run here, skip it:",
            "    @pytest.mark.skipif(...)",
            "=* 1 error, 1 checked in *",
        ]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
