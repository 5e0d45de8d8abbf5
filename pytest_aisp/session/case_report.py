"""Complete pytest's report of a case: add the row, and make it failed if the verdict is red."""

from __future__ import annotations

import msgspec
import pytest

from ..results.row import JournalLine, Recording
from ..results.verdict import RED, Cause, Finding
from . import sandbox_and_profile
from .collect import NO_XFAIL, at_test
from .measurement import TOO_FAST, build_row
from .pair_fixture import PAIR, PairUnderTest


def complete_report(
    item: pytest.Function, call: pytest.CallInfo[None], report: pytest.TestReport
) -> None:
    """Make the report of a red case failed, even if the test caught the error. Add the row.

    Args:
        report: the report of one phase. The verdict is reported in the call phase, or if a fixture
            caused a red verdict, in the phase of that fixture.
    """
    _refuse_xfail(item, report)
    pair = item.stash.get(PAIR, None)
    if pair is None or pair.reported or not (report.when == "call" or pair.failure):
        return
    _add_finding(pair, call, report)
    _keep_red(item, pair, report)
    if pair.failure is not None:
        _show_failure(item, report, pair.failure)
    pair.reported = True
    if not report.skipped or pair.case_run.findings:
        _add_row(item, pair, report)


def _refuse_xfail(item: pytest.Item, report: pytest.TestReport) -> None:
    """Make the report failed if `pytest.xfail` or a late mark turned it into an xfail."""
    if vars(report).pop("wasxfail", None) is not None:
        report.outcome, report.longrepr = "failed", at_test(item, NO_XFAIL)


def _add_finding(
    pair: PairUnderTest, call: pytest.CallInfo[None], report: pytest.TestReport
) -> None:
    """Make the verdict red if the test failed because of its own assertions."""
    case_run, error = pair.case_run, call.excinfo and call.excinfo.value
    # A verdict that failed the test without being red is `new` or `inconclusive`. The ini file can
    # make these fail the run.
    ours = error is not None and error is pair.failure and case_run.verdict
    if not report.failed or ours or case_run.verdict in RED:
        return
    if call.excinfo is None or isinstance(report.longrepr, str):
        text = report.longreprtext
    else:
        text = call.excinfo.exconly(tryshort=True)
    case_run.findings.append(Finding("fail", (text.partition("\n")[0],), "code"))


def _keep_red(item: pytest.Item, pair: PairUnderTest, report: pytest.TestReport) -> None:
    """In a replay, keep the red verdict of the recorded run if no replayed gate can explain it."""
    case_run = pair.case_run
    then = case_run.client.recorded_row()
    if then is None or then.verdict not in RED or case_run.verdict in RED:
        return
    judged = case_run.timing is not None or bool(case_run.metrics)
    if judged and _is_replayed(then):
        return
    reason = f"{then.verdict} in the recorded run, for a reason that this replay does not judge"
    cause = msgspec.convert(then.cause, Cause)
    case_run.findings.append(Finding(then.verdict, (reason, *then.reasons), cause))
    lines = [f"{reason}:", *then.reasons, "Run the case again, without --aisp-replay"]
    report.outcome, report.longrepr = "failed", at_test(item, "\n".join(lines))


def _is_replayed(then: JournalLine) -> bool:
    """Return whether a replay judges the gate that made the recorded case red.

    The gates of `regressed` are always replayed. The verdicts `fail` and `invalid` can also come
    from a side's error, an assertion of the test, or a sandbox, which are not replayed.
    """
    if then.verdict == "invalid":
        return any(TOO_FAST in reason for reason in then.reasons)
    return then.verdict == "regressed" or (then.verdict == "fail" and then.missed_limit)


def _show_failure(item: pytest.Item, report: pytest.TestReport, failure: AssertionError) -> None:
    """Make the report failed, with the error of the verdict."""
    __tracebackhide__ = True
    other = report.longreprtext if report.failed else ""
    if str(failure).partition("\n")[0] not in other:  # the body caught the error
        try:
            raise failure  # raised again because a body may have dropped the traceback
        except AssertionError:
            report.longrepr = item.repr_failure(pytest.ExceptionInfo.from_current())
        if other:
            report.sections.append(("The test also failed after its verdict", other))
    report.outcome = "failed"


def _add_row(item: pytest.Item, pair: PairUnderTest, report: pytest.TestReport) -> None:
    """Put the case's row into its report, and its numbers into JUnit's properties."""
    case_run = pair.case_run
    if not report.passed:
        case_run.recorded = Recording()
    if case_run.run.settings.profile:
        try:
            sandbox_and_profile.profile(case_run)
        except pytest.fail.Exception as late:  # pytest-timeout's clock continues after the verdict
            case_run.remarks.append(f"not profiled: {late.msg}")
    row = build_row(case_run)
    report.aisp = row.to_json()  # type: ignore[attr-defined]
    # The teardown report has the properties of the item, and JUnit reads them there.
    item.user_properties += row.properties()
    report.user_properties += row.properties()
