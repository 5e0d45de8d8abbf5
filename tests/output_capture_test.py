"""What pages print in worker processes is shown as if their tests printed it."""

from __future__ import annotations

import os

import pytest
from ranks_test import write as write_ranks

from pytest_aisp.worker.output_capture import MAX_BYTES, Chunk, Stream, format_output

PRINTS = """
import os, sys

print("imported")


def inputs(device, n):
    print("inputs of", n)
    return (torch.randn(n, device=device),)


def says(x, more=0):
    print("one of", len(x))
    print("woe", file=sys.stderr)
    return 2 * x + more
"""
OUT = "-* Captured stdout call -*"
ERR = "-* Captured stderr call -*"


def checked(pytester, *options):
    return pytester.runpytest_subprocess("--aisp-check", *options)


@pytest.mark.parametrize("workers", [["-p", "no:xdist"], ["-n0"], ["-n2"]], ids=str)
def test_a_failed_case_shows_its_output(page, pytester, workers):
    page("says(x, 1)", defs=PRINTS, body="print('body')\n" + "pair.assert_equivalent()")
    result = checked(pytester, *workers)
    result.stdout.fnmatch_lines(
        [
            "E * AssertionError: doubled is wrong at n=33*",
            OUT,
            "body",
            "imported",
            "inputs of 33",
            "one of 33",
            ERR,
            "woe",
            "=* aisp =*",
        ]
    )


def test_passed_cases_show_their_output_on_request(page, pytester, gpu):
    page("says(x)", defs=PRINTS)
    result = checked(pytester)
    result.stdout.fnmatch_lines(["*1 checked*"])
    result.stdout.no_fnmatch_line("*one of*")
    result.stdout.no_fnmatch_line("*Captured*")
    words = [OUT, "imported", "inputs of 33", "one of 33", ERR, "woe"]
    checked(pytester, "-rP").stdout.fnmatch_lines(["=* CHECKED =*", "_* test_doubling*", *words])
    checked(pytester, "-rP", "--show-capture=stderr").stdout.no_fnmatch_line(OUT)
    gpu(added=2e-5, doubled=1e-5)
    pytester.runpytest_subprocess("-rP").stdout.fnmatch_lines(["=* NEW =*", *words])


def test_uncaptured_output_is_printed_whole(page, pytester):
    defs = """
        import sys


        def counts(x):
            print("woe", file=sys.stderr)
            print(*range(300), sep="\\n")
            return 2 * x
    """
    page("counts(x)", defs=defs)
    result = checked(pytester, "-s")
    lines = [line for line in result.outlines if line.isdecimal()]
    assert lines[-299:] == [str(number) for number in range(1, 300)]
    result.stdout.no_fnmatch_line("*left out*")
    result.stderr.fnmatch_lines(["woe"])


def test_only_the_end_of_ten_megabytes_is_shown(page, pytester):
    defs = """
        def floods(x):
            for number in range(100_000):
                print(f"{number:0100}")
            return 3 * x
    """
    page("floods(x)", defs=defs)
    result = checked(pytester)
    result.stdout.fnmatch_lines([OUT, "(99900 lines left out)", f"{99900:0100}", f"{99999:0100}"])
    assert sum(line.startswith("00000") for line in result.outlines) == 100


DYING_SIDE = r"""
    import os


    def dies(x):
        print("so far")
        os.write(2, b"kernel.c:12: assertion \xff failed\n")
        os.abort()
"""


@pytest.mark.parametrize("new", [False, pytest.param(True, marks=pytest.mark.new_processes)])
def test_the_output_of_a_process_that_dies_is_shown(page, pytester, new):
    page("dies(x)", defs=DYING_SIDE)
    result = checked(pytester)
    result.stdout.fnmatch_lines(
        [
            "E * doubled at n=33: the worker process ended by SIGABRT during: check doubled",
            OUT,
            "so far",
            ERR,
            "kernel.c:12: assertion \N{REPLACEMENT CHARACTER} failed",
            "Fatal Python error: Aborted",
            '  File "*ch99/doubling_test.py", line * in dies',
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_aisp/worker*")


def test_a_case_does_not_show_output_of_the_case_before(page, pytester):
    page(defs=PRINTS + "\n\ndef late(x):\n    says(x)\n    return 2 * x", optimized="late(x)")
    page("3 * x", name="next_test.py")
    result = checked(pytester)
    result.stdout.fnmatch_lines(["*1 failed, 1 checked*"])
    result.stdout.no_fnmatch_line("*one of*")


PRINTS_ON_RANKS = (
    "import sys; print('this is', dist.get_rank());"
    " print('woe to', dist.get_rank(), file=sys.stderr); return summed(x) + 1"
)
DIES = "if dist.get_rank() == 1: os.write(2, b'assertion failed\\n'), os.abort()"


def test_output_of_ranks_is_labeled(page, pytester):
    page()
    files = [
        write_ranks(pytester.path, name, does)
        for name, does in (("says", PRINTS_ON_RANKS), ("dies", DIES))
    ]
    result = checked(pytester, *files)
    both = [OUT, "rank 0: this is 0", "rank 1: this is 1", ERR, "rank 0: woe to 0"]
    dead = ["E * rank 1 ended by SIGABRT during: *", "E       assertion failed", ERR]
    result.stdout.fnmatch_lines([*both, "rank 1: woe to 1", *dead, "rank 1: assertion failed"])
    assert "rank 1: this is" not in "\n".join(result.outlines).partition("SIGABRT")[2]


def test_output_of_fresh_processes_is_shown(page, pytester):
    path = page("says(x, 1)", defs=PRINTS)
    text = path.read_text().replace("import Conditions", "import fresh_process, Conditions")
    for side in ("added", "doubled"):
        text = text.replace(f"def {side}(x)", f"@fresh_process\ndef {side}(x)")
    path.write_text(text)
    checked(pytester).stdout.fnmatch_lines(["E * doubled is wrong at n=33*", OUT, "one of 33"])


@pytest.fixture
def stream():
    made = Stream()
    yield made
    made.file.close()


def write(stream, data):
    os.write(stream.file.fileno(), data)


def test_a_stream_returns_new_output_even_after_it_is_closed(stream):
    write(stream, b"a\n")
    assert stream.peek() == stream.take() == Chunk(0, b"a\n")
    assert stream.take() == Chunk()
    write(stream, b"b\n")
    stream.close()
    stream.close()
    assert [stream.take(), stream.take()] == [Chunk(0, b"b\n"), Chunk()]


def test_an_emptied_stream_is_read_from_its_start(stream):
    write(stream, b"before\n")
    stream.take()
    os.ftruncate(stream.file.fileno(), 0)
    write(stream, b"after")
    assert stream.take().data == b"after"


def test_lines_before_the_last_16_megabytes_are_only_counted(stream):
    write(stream, b"x\n" * MAX_BYTES)
    skipped, data = stream.take()
    assert (skipped, len(data)) == (MAX_BYTES // 2, MAX_BYTES)


def test_an_endless_line_is_cut_to_its_end():
    text = format_output([Chunk(0, b"a" * 300_000 + b"z")], "", 100)
    assert text.startswith("(197602 characters left out)\naaa")
    assert text.endswith("az\n")


def test_zero_lines_leave_out_all_of_them():
    assert format_output([Chunk(0, b"a\nb\n")], "rank 1", 0) == "rank 1: (2 lines left out)\n"
