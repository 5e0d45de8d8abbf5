"""What a side leaves behind affects only its own case, and no other side is blamed."""

from __future__ import annotations

import pytest

IMPORTS = "import ctypes, threading, time"
SIDES = """
    {imports}


    def spin():
        while True:
            pass


    def bad(x):
        {trick}
        return 2 * x


    def second(x):
        return 2 * x


    def third(x):
        return x * 2
"""
TRICKS = {
    "clock": ("time.perf_counter = lambda: 0.0", "bad replaced time.perf_counter; its times"),
    "function of torch": ("torch.matmul = torch.mul", "bad replaced torch.matmul; its times"),
    "setting": ("torch.set_default_dtype(torch.float64)", "bad changed torch's default dtype"),
    "thread": ("threading.Thread(target=spin, daemon=True).start()", "bad leaves a thread"),
    "crash": ("ctypes.string_at(0)", "the worker process ended by SIGSEGV during: check bad"),
    "exit": ("raise SystemExit(3)", "the worker process ended with exit code 3"),
    "wrong": ("x = x + 1", "bad is wrong at n=33"),
}
OTHERS = "[second-n1001] [third-n1001]"
LATE = """
    FACTOR = [2]


    def added(x):
        return FACTOR[0] * x


    def late(x):
        CALLS.append(x)
        out = 2 * x
        if len(CALLS) == {calls}:
            FACTOR[0] = 3
        return out


    def second(x):
        return x + x
"""


def verdicts(junit):
    return {name: case.verdict for name, case in junit.items()}


@pytest.mark.parametrize("trick", TRICKS)
def test_only_the_side_with_the_trick_is_refused(page, pytester, read_junit, trick):
    code, message = TRICKS[trick]
    page(defs=SIDES.format(imports=IMPORTS, trick=code), variants="[bad, second, third]")
    result = pytester.runpytest_subprocess("--aisp-check", "--junitxml=junit.xml")
    result.stdout.fnmatch_lines([f"E *{message}*", "=* 1 failed, 2 checked in *"])
    result.stdout.no_fnmatch_line("*passed in a new process*")


def test_what_an_earlier_case_left_behind_is_blamed_on_nobody(page, pytester):
    page(defs=LATE.format(calls=3), variants="[late, second]")
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(
        [
            "*passed in a new process; in the process that had run test_doubling[[]late-n1001]"
            " before: added is wrong at n=33*",
            "=* 2 checked in *",
        ]
    )


def test_a_baseline_is_not_blamed_for_what_its_variant_changed(page, pytester):
    page(defs=LATE.format(calls=1), variants="[late, second]")
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(
        [
            "E *: added passes its check alone, but not after late ran: added is wrong at n=33*",
            "=* 1 failed, 1 checked in *",
        ]
    )


def test_a_wrong_baseline_is_blamed(page, pytester):
    page(defs="def added(x):\n    return 3 * x")
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(["E *: added is wrong at n=33*", "=* 1 failed in *"])
    result.stdout.no_fnmatch_line("*passes its check alone*")


def test_an_import_of_the_page_is_blamed_for_what_it_replaces(page, pytester):
    page(defs="torch.equal = lambda a, b: True")
    result = pytester.runpytest_subprocess("--aisp-check")
    result.stdout.fnmatch_lines(
        ["E *torch.equal was replaced before added ran; times and results cannot be trusted"]
    )


def test_inside_pytest_a_replaced_function_is_put_back(page, pytester):
    trick = TRICKS["function of torch"][0].replace("matmul", "equal")
    page(defs=SIDES.format(imports=IMPORTS, trick=trick), variants="[bad, second, third]")
    result = pytester.runpytest_subprocess("--aisp-check", "--aisp-in-process")
    result.stdout.fnmatch_lines(["E *bad replaced torch.equal*", "=* 1 failed, 2 checked in *"])
