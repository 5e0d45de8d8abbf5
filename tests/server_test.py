"""The replies of a worker process to a task whose side raises an error."""

from __future__ import annotations

import pytest
import torch

from pytest_aisp.results.messages import CheckTask, CountTask, TimeTask
from pytest_aisp.timing import cuda_graph
from pytest_aisp.worker.server import Server, _error_reply


@pytest.fixture
def server():
    return Server(lambda text: None)


def refuse(error):
    """Return a method of an engine that raises `error`."""

    def method(task):
        raise error

    return method


def caused_by(cause):
    """Return an error with this cause, as it is caught."""
    try:
        raise RuntimeError("Failed to run stage backward:\nargs: ...") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("cause", "kind", "message"),
    [
        (None, "side", "RuntimeError: Failed to run stage backward, during: time"),
        (
            KeyError("weight"),
            "side",
            "RuntimeError: Failed to run stage backward (KeyError: 'weight'), during: time",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"),
            "memory",
            "out of memory: Failed to run stage backward (OutOfMemoryError: CUDA out of memory."
            " Tried to allocate 2 GiB), during: time",
        ),
    ],
)
def test_an_error_reply_includes_the_cause(cause, kind, message):
    reply = _error_reply(caused_by(cause), "time")
    assert (reply.error, reply.message) == (kind, message)


def test_an_error_reply_includes_the_output_of_a_compiler():
    lines = [
        "page.cu does not compile:",
        "page.cu(3): error: no",
        *(f"line {n}" for n in range(40)),
    ]
    reply = _error_reply(RuntimeError("\n".join(lines)), "check added")
    assert reply.message == "RuntimeError: page.cu does not compile, during: check added"
    assert reply.trace.splitlines()[0] == "page.cu(3): error: no"
    assert len(reply.trace.splitlines()) == 30
    plain = _error_reply(RuntimeError("illegal access\nadvice of a library"), "check added")
    assert plain.trace == ""


@pytest.mark.parametrize("doing", ["check added", "check added at n=33, m=4", "search n"])
def test_an_error_reply_separates_work_and_size(doing):
    reply = _error_reply(ValueError("no"), doing)
    work, _, size = doing.partition(" at ")
    assert (reply.message, reply.at) == (f"ValueError: no, during: {work}", size)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError("CUDA error: invalid argument"), "fault"),
        (caused_by(torch.AcceleratorError("CUDA error: invalid argument")), "fault"),
        (ValueError("a page's own"), "side"),
    ],
)
def test_any_cuda_error_is_a_fault_of_the_process(server, monkeypatch, error, expected):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(server.engine, "time", refuse(error))
    assert server.answer(TimeTask()).error == expected


@pytest.mark.parametrize(
    ("outcome", "kind", "message"),
    [
        (
            lambda task: pytest.importorskip("no_such_library"),
            "page",
            "could not import 'no_such_library': No module named 'no_such_library', during: check\n"
            "a side cannot skip, but its case can: Variant(side, marks=[pytest.mark.skipif(...)])",
        ),
        (lambda task: pytest.fail("not so"), "side", "Failed: not so, during: check"),
    ],
)
def test_a_side_that_skips_gets_a_hint(server, monkeypatch, outcome, kind, message):
    monkeypatch.setattr(server.engine, "check", outcome)
    reply = server.answer(CheckTask())
    assert (reply.error, reply.message) == (kind, message)


@pytest.mark.parametrize("task", [TimeTask(), CountTask(metric="memory")])
@pytest.mark.parametrize("abandoned", [[], [(0, 1)]])
def test_a_process_is_exhausted_after_a_failed_capture(server, monkeypatch, abandoned, task):
    monkeypatch.setattr(cuda_graph, "abandoned", abandoned)
    monkeypatch.setattr(server.engine, "time", refuse(ValueError("a page's own")))
    monkeypatch.setattr(server.engine, "count", lambda task: {"baseline": 1.0})
    assert server.answer(task).exhausted is bool(abandoned)
