"""Requests that are cancelled while suites/server.py serves them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]
LENGTHS = [4, 2, 3, 4]
CANCELLED, AFTER = 0, 2
"""The request that is cancelled, and how many tokens of its answer are computed before."""


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return [importlib.import_module(f"suites.{name}") for name in ("server", "serving")]


@pytest.mark.parametrize(
    ("policy", "paged"),
    [({"together": True}, False), ({}, False), ({}, True), ({"chunk": 2}, False)],
    ids=["together", "continuous", "pages", "chunks"],
)
def test_a_cancelled_request_frees_its_row_and_changes_no_other_answer(modules, policy, paged):
    module, serving = modules
    torch.manual_seed(1)
    model = serving.planted("cpu", serving.config_of(1, 128, 16))
    prompts, lengths = torch.randint(256, (len(LENGTHS), 5)), list(LENGTHS)

    class Cancelling(module.Server):
        def stream(self, requests):
            super().stream(requests)
            if len(self.places[CANCELLED]) == AFTER:
                lengths[CANCELLED] = AFTER

    server = Cancelling(model, 2, module.Pages(model.config, 2, 0, "cpu") if paged else None)
    tokens, scores = module.serve(server, prompts, lengths, [0.0] * len(lengths), **policy)

    assert lengths == [AFTER, *LENGTHS[1:]]
    wanted = serving.continued(model, prompts, max(LENGTHS))
    for found, expected in zip((tokens, scores), wanted, strict=True):
        kept = torch.cat([row[:length] for row, length in zip(expected, lengths, strict=True)])
        torch.testing.assert_close(found.double(), kept.double(), atol=0.25, rtol=0)
    parts = 3 if "chunk" in policy else None
    steps, calls = module.counted(lengths, 2, together="together" in policy, parts=parts)
    assert len(server.found) == steps + len(calls)  # the next request starts in the free row
    if paged:
        assert (len(server.cache.free), server.cache.taken) == (2, [[], []])
