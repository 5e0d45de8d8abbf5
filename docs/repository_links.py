"""MkDocs hook: links that leave docs/ for other files of the repository.

On the site such a file has no page. With `repo_url` in mkdocs.yml the link leads there. Without it
the link becomes plain text. A link to a file that does not exist is a warning, so `--strict` fails.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\.[\w./-]*)(#[\w-]+)?\)")
log = logging.getLogger("mkdocs.hooks.repository_links")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_uri).parent

    def replace(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = Path(os.path.normpath(folder / target))
        if path.is_relative_to(docs):
            return found[0]
        if not path.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, target)
        if not config["repo_url"]:
            return text
        root = config["repo_url"].rstrip("/")
        return f"[{text}]({root}/blob/main/{path.relative_to(docs.parent).as_posix()}{anchor})"

    return LINK.sub(replace, markdown)
