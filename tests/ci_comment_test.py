"""`ci/comment.py` against a made-up GitHub and GitLab: one comment, replaced in place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from pytest_aisp.tools.ci_gate_comment import LIMIT, MARKER

SCRIPT = Path(__file__).parents[1] / "ci/comment.py"
TEXT = f"{MARKER}\n## Performance gate: red\n"
PATHS = {"github": "/repos/o/r/issues/7/comments", "gitlab": "/projects/5/merge_requests/7/notes"}


class Service:
    """The comments of pull request 7, and the requests that were made.

    Attributes:
        comments: id, author and body of each comment.
        refuse: the method that is refused with 403, or an empty string.
    """

    def __init__(self, kind):
        self.kind, self.comments, self.requests, self.refuse = kind, [], [], ""

    def add(self, author, body):
        """Add a comment by `author`, which is the bot's name on GitHub and its id on GitLab."""
        who = {"user": author and {"login": author}, "author": {"id": author}}
        self.comments.append({"id": len(self.comments) + 1, **who, "body": body})

    @property
    def me(self):
        return "github-actions[bot]" if self.kind == "github" else 99

    def answer(self, method, path, query, body):
        self.requests.append((method, path))
        if method == self.refuse:
            return 403, {"message": "Resource not accessible by integration"}
        if (method, path, self.kind) == ("GET", "/user", "gitlab"):
            return 200, {"id": 99}
        if path == PATHS[self.kind]:
            if method == "POST":
                self.add(self.me, body)
                return 201, {}
            page, size = int(query["page"][0]), int(query["per_page"][0])
            return 200, self.comments[(page - 1) * size : page * size]
        folder = "/repos/o/r/issues/comments" if self.kind == "github" else PATHS["gitlab"]
        number = int(path.removeprefix(f"{folder}/"))
        assert method == ("PATCH" if self.kind == "github" else "PUT")
        self.comments[number - 1]["body"] = body
        return 200, {}


@pytest.fixture(params=["github", "gitlab"])
def service(request):
    """Run a service on a port of this machine."""
    found = Service(request.param)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            token = {"github": ("Authorization", "Bearer t"), "gitlab": ("PRIVATE-TOKEN", "t")}
            name, value = token[found.kind]
            assert self.headers[name] == value
            data = self.rfile.read(int(self.headers["Content-Length"] or 0))
            url = urlsplit(self.path)
            body = json.loads(data)["body"] if data else None
            code, reply = found.answer(self.command, url.path, parse_qs(url.query), body)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        do_POST = do_PUT = do_PATCH = do_GET

        def log_message(self, *words):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


def variables(service, **more):
    """Return the environment variables that a service's runner sets."""
    github = {"GITHUB_API_URL": service.url, "GITHUB_REPOSITORY": "o/r", "AISP_PULL": "7"}
    github |= {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_RUN_ID": "3"}
    gitlab = {"CI_API_V4_URL": service.url, "CI_MERGE_REQUEST_PROJECT_ID": "5"}
    gitlab |= {"CI_MERGE_REQUEST_IID": "7", "CI_JOB_URL": "https://gitlab.com/p/-/jobs/3"}
    found = github if service.kind == "github" else gitlab
    return {**found, "AISP_TOKEN": "t", "AISP_COMMENT": "gate-comment.md", **more}


@pytest.fixture
def post(tmp_path, service):
    """Run the script in a folder with a comment of the gate."""
    (tmp_path / "gate-comment.md").write_text(TEXT)
    names = ("AISP_PULL", "AISP_TOKEN", "AISP_COMMENT", "CI_MERGE_REQUEST_IID")
    clean = {name: value for name, value in os.environ.items() if name not in names}

    def run(**more):
        return subprocess.run(
            [sys.executable, SCRIPT],
            cwd=tmp_path,
            env={**clean, **variables(service, **more)},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_the_first_run_writes_a_comment_and_the_next_replaces_it(service, post, tmp_path):
    done = post()
    assert (done.returncode, done.stdout, done.stderr) == (0, "wrote a comment\n", "")
    [one] = service.comments
    link = {
        "github": "https://github.com/o/r/actions/runs/3#artifacts",
        "gitlab": "https://gitlab.com/p/-/jobs/3/artifacts/file/gate-comment.svg",
    }
    assert one["body"] == f"{TEXT}\n[Plot: gate-comment.svg]({link[service.kind]})\n"
    (tmp_path / "gate-comment.md").write_text(TEXT.replace("red", "green ü"))
    assert post().stdout == "replaced the comment\n"
    [one] = service.comments
    assert one["body"].startswith(f"{MARKER}\n## Performance gate: green ü\n")


def test_our_comment_is_found_on_a_later_page_and_others_are_left_alone(service, post):
    others = [("somebody", TEXT), (None, TEXT), (service.me, f"Look: {TEXT}"), (service.me, None)]
    for author, body in others:
        service.add(author, body)
    for number in range(196):
        service.add("somebody", f"comment {number}")
    service.add(service.me, f"{MARKER}\nold")
    assert post().stdout == "replaced the comment\n"
    assert len(service.comments) == 201
    assert service.comments[-1]["body"].startswith(TEXT)
    assert [comment["body"] for comment in service.comments[:4]] == [body for _, body in others]


def test_a_full_last_page_ends_the_search(service, post):
    for number in range(100):
        service.add("somebody", f"comment {number}")
    assert post().stdout == "wrote a comment\n"
    assert len(service.comments) == 101


def test_the_longest_comment_fits_with_its_link(service, post, tmp_path):
    (tmp_path / "gate-comment.md").write_text(TEXT + "x" * LIMIT)
    assert post().returncode == 0
    assert len(service.comments[0]["body"]) < 65_536


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_refusal_is_an_error(service, post, method):
    service.refuse = method
    done = post()
    assert (done.returncode, done.stdout, service.comments) == (1, "", [])
    assert f"{method} {service.url}/" in done.stderr
    assert "403 Forbidden" in done.stderr
    assert "Resource not accessible by integration" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_service_that_cannot_be_reached_is_an_error(service, post):
    name = "GITHUB_API_URL" if service.kind == "github" else "CI_API_V4_URL"
    done = post(**{name: "http://127.0.0.1:1"})
    assert done.returncode == 1
    assert done.stderr.endswith("Connection refused\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"AISP_PULL": "", "CI_MERGE_REQUEST_IID": ""}, "this pipeline is not about a pull"),
        ({"AISP_TOKEN": ""}, "AISP_TOKEN is empty"),
    ],
)
def test_without_a_pull_request_or_a_token_nothing_is_done(service, post, given, message):
    done = post(**given)
    assert (done.returncode, service.requests) == (0, [])
    assert done.stdout.startswith(f"no comment: {message}")


def test_without_a_verdict_there_is_nothing_to_write(service, post, tmp_path):
    (tmp_path / "gate-comment.md").unlink()
    done = post()
    assert (done.returncode, service.requests) == (1, [])
    error = "no comment: gate-comment.md does not exist, because the gate did not run\n"
    assert done.stderr == error
