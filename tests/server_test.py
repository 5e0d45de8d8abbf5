"""What a worker process says of an error that a side raised."""

from __future__ import annotations

import pytest
import torch

from pytest_aisp.results.messages import CheckTask, CountTask, TimeTask
from pytest_aisp.timing import cuda_graph
from pytest_aisp.worker import server
from pytest_aisp.worker.server import _error_reply


def raised(cause):
    """Return an error that another one has caused, as it was caught."""
    try:
        raise RuntimeError("Failed to run stage backward:\nargs: ...") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("cause", "kind", "says"),
    [
        (None, "side", "RuntimeError: Failed to run stage backward:, during: time"),
        (
            KeyError("weight"),
            "side",
            "RuntimeError: Failed to run stage backward: (KeyError: 'weight'), during: time",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"),
            "memory",
            "out of memory: Failed to run stage backward: (OutOfMemoryError: CUDA out of memory."
            " Tried to allocate 2 GiB), during: time",
        ),
    ],
)
def test_what_caused_an_error_is_said_and_counts(cause, kind, says):
    reply = _error_reply(raised(cause), "time")
    assert (reply.error, reply.message) == (kind, says)


@pytest.mark.parametrize("doing", ["check added", "check added at n=33, m=4", "search n"])
def test_the_size_at_which_it_happened_is_said_apart(doing):
    reply = _error_reply(ValueError("no"), doing)
    what, _, size = doing.partition(" at ")
    assert (reply.message, reply.at) == (f"ValueError: no, during: {what}", size)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError("CUDA error: invalid argument"), "fault"),
        (raised(torch.AcceleratorError("CUDA error: invalid argument")), "fault"),
        (ValueError("a page's own"), "side"),
    ],
)
def test_what_cuda_refused_may_have_spoilt_the_process(monkeypatch, error, expected):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    served = server.Server(lambda text: None)

    def refuse(task):
        raise error

    monkeypatch.setattr(served.engine, "time", refuse)
    reply = served.answer(TimeTask())
    assert reply.error == expected


@pytest.mark.parametrize(
    ("outcome", "kind", "says"),
    [
        (
            lambda: pytest.importorskip("no_such_library"),
            "page",
            "could not import 'no_such_library': No module named 'no_such_library', during: check\n"
            "a side cannot skip, its case can: Variant(side, marks=[pytest.mark.skipif(...)])",
        ),
        (lambda: pytest.fail("not so"), "side", "Failed: not so, during: check"),
    ],
)
def test_a_side_that_skips_is_told_what_to_declare(monkeypatch, outcome, kind, says):
    served = server.Server(lambda text: None)
    monkeypatch.setattr(served.engine, "check", lambda task: outcome())
    reply = served.answer(CheckTask())
    assert (reply.error, reply.message) == (kind, says)


@pytest.mark.parametrize("task", [TimeTask(), CountTask(metric="memory")])
@pytest.mark.parametrize("abandoned", [[], [(0, 1)]])
def test_every_answer_after_a_failed_capture_is_the_last(monkeypatch, abandoned, task):
    monkeypatch.setattr(cuda_graph, "abandoned", abandoned)
    served = server.Server(lambda text: None)

    def refuse(task):
        raise ValueError("a page's own")

    monkeypatch.setattr(served.engine, "time", refuse)
    monkeypatch.setattr(served.engine, "count", lambda task: {"baseline": 1.0})
    assert served.answer(task).exhausted is bool(abandoned)
