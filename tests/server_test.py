"""What a bench process says of an error that a side raised."""

from __future__ import annotations

import pytest
import torch

from pytest_aisp.bench import server
from pytest_aisp.bench.server import _error_reply
from pytest_aisp.results.messages import Task


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
    reply = served.answer(Task(kind="time"))
    assert reply.error == expected
