#!/usr/bin/env python3
"""Write the comment of `aisp ci gate` on the pull request. It replaces that of an earlier run.

AISP_COMMENT   the file that `aisp ci gate --comment` wrote
AISP_TOKEN     GitHub: github.token, with pull-requests: write. GitLab: a token with the scope api
AISP_PULL      GitHub: the number of the pull request
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

PAGE = 100
"""The number of comments that both services return at most in one reply."""
BOT = "github-actions[bot]"
"""The author of everything that github.token writes."""


class Service(NamedTuple):
    """Where the comments of a pull request are.

    Attributes:
        comments: the URL of the comments.
        comment: the URL of one comment, without its id.
        update: the HTTP method that changes a comment.
        headers: the headers that identify us.
        is_ours: whether we are the author of a comment.
        plot: the URL that leads to the plot.
    """

    comments: str
    comment: str
    update: str
    headers: dict[str, str]
    is_ours: Callable[[dict[str, Any]], bool]
    plot: str


def github(token: str) -> Service:
    api = f"{os.environ['GITHUB_API_URL']}/repos/{os.environ['GITHUB_REPOSITORY']}/issues"
    repository = f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
    return Service(
        comments=f"{api}/{os.environ['AISP_PULL']}/comments",
        comment=f"{api}/comments",
        update="PATCH",
        headers={"Authorization": f"Bearer {token}", "Accept": "application/vnd.github+json"},
        is_ours=lambda comment: (comment["user"] or {}).get("login") == BOT,
        plot=f"{repository}/actions/runs/{os.environ['GITHUB_RUN_ID']}#artifacts",
    )


def gitlab(token: str, drawn: str) -> Service:
    api, headers = os.environ["CI_API_V4_URL"], {"PRIVATE-TOKEN": token}
    project, number = os.environ["CI_MERGE_REQUEST_PROJECT_ID"], os.environ["CI_MERGE_REQUEST_IID"]
    notes = f"{api}/projects/{project}/merge_requests/{number}/notes"
    me = ask("GET", f"{api}/user", headers)["id"]
    return Service(
        comments=notes,
        comment=notes,
        update="PUT",
        headers=headers,
        is_ours=lambda note: note["author"]["id"] == me,
        plot=f"{os.environ['CI_JOB_URL']}/artifacts/file/{drawn}",
    )


def ask(method: str, url: str, headers: dict[str, str], body: str | None = None) -> Any:
    """Return the service's reply. Exit with a message if it refuses or cannot be reached."""
    data = None if body is None else json.dumps({"body": body}).encode()
    headers = {**headers, "Content-Type": "application/json", "User-Agent": "pytest-aisp"}
    try:
        with urlopen(Request(url, data, headers, method=method), timeout=30) as reply:
            return json.load(reply)
    except HTTPError as error:
        text = error.read(300).decode(errors="replace")
        sys.exit(f"{method} {url}: {error.code} {error.reason}: {text}")
    except URLError as error:
        sys.exit(f"{method} {url}: {error.reason}")


def comments(service: Service) -> Iterator[dict[str, Any]]:
    for page in count(1):
        found = ask("GET", f"{service.comments}?per_page={PAGE}&page={page}", service.headers)
        yield from found
        if len(found) < PAGE:
            return


def main() -> None:
    file = Path(os.environ.get("AISP_COMMENT", "gate-comment.md"))
    token = os.environ.get("AISP_TOKEN", "")
    if not (os.environ.get("AISP_PULL") or os.environ.get("CI_MERGE_REQUEST_IID")):
        return print("no comment: this pipeline is not about a pull request or merge request")
    if not token:
        return print("no comment: AISP_TOKEN is empty")
    if not file.exists():
        sys.exit(f"no comment: {file} does not exist, because the gate did not run")
    drawn = file.with_suffix(".svg").name
    service = github(token) if os.environ.get("AISP_PULL") else gitlab(token, drawn)
    text = file.read_text(encoding="utf-8")
    marker, body = text.partition("\n")[0], f"{text}\n[Plot: {drawn}]({service.plot})\n"
    found = comments(service)
    ours = [c for c in found if service.is_ours(c) and (c["body"] or "").startswith(marker)]
    if ours:
        ask(service.update, f"{service.comment}/{ours[0]['id']}", service.headers, body)
    else:
        ask("POST", service.comments, service.headers, body)
    print("replaced the comment" if ours else "wrote a comment")


if __name__ == "__main__":
    main()
