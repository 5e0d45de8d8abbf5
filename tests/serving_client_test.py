"""The client of serving benchmarks, against a small server that streams as OpenAI's does."""

from __future__ import annotations

import http.server
import json
import threading
import time

import pytest
import serving_client
from serving_client import Answer, arrivals, pieces_of, summary

TOKENS, FIRST, GAP = 4, 0.03, 0.01


class StandIn(http.server.BaseHTTPRequestHandler):
    """Answer with `TOKENS` pieces. A prompt of the model `silent` gets none, and `broken` a 500."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(500 if body["model"] == "broken" else 200)
        self.end_headers()
        if body["model"] != "default":
            return
        for number in range(TOKENS):
            time.sleep(GAP if number else FIRST)
            piece = {"choices": [{"text": f"word{number} "}]}
            self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        """Print nothing."""


@pytest.fixture
def url():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def words(url, *more):
    return [url, "--requests", "6", "--rate", "100", "--prompt", "3", *more]


def test_latencies_are_those_of_the_server(url, capsys):
    assert serving_client.main(words(url, "--ttft", "60", "--itl", "60")) == 0
    out = capsys.readouterr().out
    assert "6 requests in" in out
    assert "0 failed" in out
    assert ": 6 met TTFT 60 s and ITL 60 s" in out
    for name, least in (("TTFT p50", FIRST), ("ITL p50", GAP)):
        (line,) = (line for line in out.splitlines() if line.startswith(name))
        assert float(line.removeprefix(name).split()[0]) >= 900 * least  # ms; sleeps vary a little


def test_an_objective_that_nobody_can_meet_gives_no_goodput(url, capsys):
    assert serving_client.main(words(url, "--ttft", "0")) == 0
    assert "goodput 0.000 requests/s: 0 met" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "reason"),
    [("broken", "HTTP Error 500"), ("silent", "the stream ended without a token")],
)
def test_a_failed_request_is_counted_and_named(url, capsys, model, reason):
    assert serving_client.main(words(url, "--model", model)) == 1
    out = capsys.readouterr().out
    assert "6 failed" in out
    assert reason in out
    assert "TTFT none" in out


def test_a_server_that_is_not_there_is_a_failure(capsys):
    assert serving_client.main(words("http://127.0.0.1:9", "--timeout", "1")) == 1
    assert "6 failed" in capsys.readouterr().out


@pytest.mark.parametrize("more", [("--requests", "0"), ("--rate", "0"), ("--rate", "nan")])
def test_no_arrivals_are_refused(url, more, capsys):
    with pytest.raises(SystemExit):
        serving_client.main(words(url, *more))
    assert "both must be positive" in capsys.readouterr().err


def test_arrivals_are_the_same_for_both_servers():
    assert arrivals(50, 4.0, seed=3) == arrivals(50, 4.0, seed=3) != arrivals(50, 4.0, seed=4)
    assert 5 < arrivals(50, 4.0, seed=3)[-1] < 25


def test_events_without_text_are_no_tokens():
    lines = [b": ping\n", b'data: {"choices": []}\n', b'data: {"choices": [{"text": "a"}]}\n']
    assert list(pieces_of(iter([*lines, b"data: [DONE]\n", lines[-1]]))) == ["a"]


def test_one_late_piece_misses_the_objective():
    late, early = Answer(0.0, [0.1, 0.2, 0.9]), Answer(0.0, [0.1, 0.2, 0.3])
    lines = summary([late, early], seconds=2.0, ttft=0.15, itl=0.2)
    assert lines[1].startswith("goodput 0.500 requests/s: 1 met")
