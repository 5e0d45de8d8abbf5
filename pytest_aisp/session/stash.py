"""What a session of ours keeps in `config.stash`: these, and nothing in module globals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .recorder import Recorder
    from .run import Run
    from .settings import Settings

SETTINGS: pytest.StashKey[Settings] = pytest.StashKey()
RUN: pytest.StashKey[Run] = pytest.StashKey()
RECORDER: pytest.StashKey[Recorder] = pytest.StashKey()
NO_LEASE: pytest.StashKey[str] = pytest.StashKey()
"""On an item: why the machine could not be leased for it."""
