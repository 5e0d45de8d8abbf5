"""A digest of this plugin's own code, which tells whether two installations run the same code."""

from __future__ import annotations

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
SUFFIXES = (".py", ".cu")


def own_digest(folder: Path = PACKAGE) -> str:
    """Return a digest of the code of the plugin that is installed in `folder`.

    It does not depend on how the plugin was installed: an editable installation and a wheel of the
    same code have the same digest.
    """
    hashed = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
        hashed.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return hashed.hexdigest()
