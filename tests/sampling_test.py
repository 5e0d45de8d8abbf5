"""The tokens that suites/ch16/sampling_test.py samples come as often as their shares say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from pytest_aisp.worker.loader import load_page

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "suites/ch16/sampling_test.py"
DRAWS, VOCABULARY, TOP_P = 500, 64, 0.8
LOGITS = torch.linspace(-8, 8, VOCABULARY)
BIASES = {
    "another temperature": ("1 / TEMPERATURE,", "0.5 / TEMPERATURE,"),
    "one token too few": ("cumsum(share, 0) - share <", "cumsum(share, 0) <"),
    "one token too many": ("cumsum(share, 0) - share <", "cumsum(share, 0) - 3 * share <"),
    "half of the noise": ("value + random", "value + random / 2"),
}
"""Replacements in the page that make its kernel sample from another distribution."""


@pytest.fixture
def sampled(tmp_path, request):
    """Return a function that samples with the page's kernel, after replacing a text in the page."""

    def tokens(old="", new=""):
        text = PAGE.read_text()
        assert old in text
        path = tmp_path / "page.py"
        path.write_text(text.replace(old, new))
        page = load_page(str(path), str(ROOT), f"sampling.{request.node.name}")
        torch.manual_seed(1)
        noise = page.gumbel(DRAWS, VOCABULARY, device="cpu")
        return page.fused(LOGITS.repeat(DRAWS, 1), noise, torch.full((DRAWS,), TOP_P))

    return tokens


def follows_the_shares(tokens):
    """Return whether a chi-squared test accepts the tokens as samples of the kept shares."""
    shares = (LOGITS.double() / 0.8).softmax(0)  # the logits rise, so the best tokens are last
    kept = shares.flip(0).cumsum(0).flip(0) - shares < TOP_P
    wanted = DRAWS * shares[kept] / shares[kept].sum()
    assert wanted.min() > 5  # with fewer tokens, chi squared has another distribution
    counts = tokens.bincount(minlength=VOCABULARY)
    chi = ((counts[kept] - wanted).square() / wanted).sum()
    freedom = len(wanted) - 1
    # As on the page, the limit is six standard deviations of chi squared above the mean.
    return not counts[~kept].any() and bool(chi < freedom + 6 * math.sqrt(2 * freedom))


def test_the_fused_kernel_samples_from_the_kept_shares(sampled):
    assert follows_the_shares(sampled())


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES.keys())
def test_a_biased_kernel_is_found(sampled, bias):
    assert not follows_the_shares(sampled(*bias))
