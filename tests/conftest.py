"""Helpers of the plugin's own tests: pages written to disk, a simulated GPU, whole output lines."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch  # noqa: F401 - once, out here: pytester's in-process runs would load it twice and die

PAGE = '''
    """Doubling."""

    import torch

    from pytest_aisp import Variant, Work, compare

    CALLS = []


    def inputs(device, n):
        return (torch.randn(n, device=device),)


    def reference(x):
        return 2 * x.double()


    def added(x):
        return x + x


    def doubled(x):
        return {optimized}


    @compare(
        baseline=added,
        optimized=[doubled],
        inputs=inputs,
        reference=reference,
        sizes=[{{"n": 1001}}],
        check_sizes=[{{"n": 33}}],
        work=lambda n: Work(read=4 * n, write=4 * n),
        bound="dram",
        at_least={at_least},
        {more}
    )
    def test_doubling(pair):
        {body}
'''
BODY = "pair.assert_equivalent()\npair.assert_speedup()"
INI = """
    [pytest]
    addopts = --import-mode=importlib -p no:randomly
    aisp_pages = .
    python_files = *_test.py
"""


@pytest.fixture(autouse=True)
def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests say themselves when they are under CI."""
    monkeypatch.delenv("CI", raising=False)


@pytest.fixture
def page(pytester: pytest.Pytester) -> Callable[..., Any]:
    """Write `doubling_test.py` in a folder of pages and return its path.

    Args: `optimized` is the expression that the variant returns, `body` the test's body, `more`
    further keywords of `compare`.
    """
    pytester.makeini(textwrap.dedent(INI))

    def write(
        optimized: str = "2 * x",
        *,
        body: str = BODY,
        at_least: str = "1.0",
        more: str = "",
        name: str = "doubling_test.py",
        text: str = PAGE,
    ) -> Any:
        path = pytester.path / "ch99" / name
        path.parent.mkdir(exist_ok=True)
        parts = {"optimized": optimized, "at_least": at_least, "more": more}
        path.write_text(textwrap.dedent(text).format(body=body.replace("\n", "\n    "), **parts))
        return path

    return write


@pytest.fixture
def gpu(pytester: pytest.Pytester) -> Callable[..., None]:
    """Put a simulated GPU into this session: `gpu(added=2e-5, doubled=1e-5, noise={...})`."""

    def install(
        *, noise: dict[str, float] | None = None, session: float = 0.0, **seconds: float
    ) -> None:
        timer = {
            "target": "pytest_aisp.simulated:simulate",
            "arch": "sm90",
            "product": "simulated-gpu",
            "options": {"seconds": seconds, "noise": noise or {}, "session": session},
        }
        pytester.makeconftest(f"def pytest_aisp_timer(config):\n    return {timer!r}\n\n\n")

    return install


@pytest.fixture
def lines() -> Callable[[pytest.RunResult], str]:
    """Return a run's whole output as one text."""
    return lambda result: "\n".join(result.outlines + result.errlines)
