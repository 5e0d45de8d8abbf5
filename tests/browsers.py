"""A headless browser for tests: Debian's chromium and its driver, a new process each time."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

REQUIRED = "CI_BROWSER_REQUIRED"
"""Set to 1, a missing browser is a failure instead of a skip."""
PROGRAMS = ("chromium", "chromedriver")
FLAGS = ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run")
FLAGS += ("disable-background-networking", "disable-component-update", "disable-sync")


def missing_browser(environment: Mapping[str, str]) -> str:
    """Return what must be installed for a browser, or ""."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=environment.get("PATH"))]
    try:
        import selenium  # noqa: F401
    except ImportError:
        missing.append("selenium (Python)")
    if not missing:
        return ""
    return (
        f"needs a browser; not installed: {', '.join(missing)}\n"
        "    apt-get install --no-install-recommends chromium chromium-driver\n"
        "    pip install 'pytest-aisp[test]'"
    )


def refuse(environment: Mapping[str, str]) -> None:
    """Skip the test if there is no browser, or fail it if one is required."""
    if reason := missing_browser(environment):
        (pytest.fail if environment.get(REQUIRED) == "1" else pytest.skip)(reason)


@contextlib.contextmanager
def started() -> Iterator[Any]:
    """Yield the driver of a new browser with an empty profile."""
    refuse(os.environ)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"user-data-dir={profile}"):
            options.add_argument(f"--{flag}")
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield driver
        finally:
            driver.quit()
