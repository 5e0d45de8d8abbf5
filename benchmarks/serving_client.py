"""Latencies of a server with an OpenAI-style HTTP interface, such as vLLM or SGLang.

    python benchmarks/serving_client.py http://localhost:8000 --model NAME --rate 4 --requests 100

Requests arrive at random, at a mean rate per second, whether or not earlier ones have ended. Each
request asks for a stream of tokens. The client measures the time to the first token (TTFT) and the
times between tokens (ITL), and prints p50 and p99 of both. A bootstrap over requests gives 95 %
intervals. Goodput is the number of requests per second that meet both objectives. A failed request
counts as one that does not meet them. The client needs only Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Answer:
    """The answer to a request: when it was due, when pieces arrived, and any error."""

    due: float
    pieces: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def first(self) -> float:
        """Return the seconds between the time the request was due and its first piece."""
        return self.pieces[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Return the seconds between neighboring pieces."""
        return [b - a for a, b in zip(self.pieces[:-1], self.pieces[1:], strict=True)]

    def meets(self, ttft: float, itl: float) -> bool:
        """Return whether the first piece and all later pieces arrived within the objectives."""
        in_time = not self.error and bool(self.pieces) and self.first <= ttft
        return in_time and all(gap <= itl for gap in self.gaps)


def arrivals(requests: int, rate: float, seed: int) -> list[float]:
    """Return the times at which requests are due: a Poisson process from the seed."""
    if requests < 1 or not rate > 0:
        raise ValueError(f"{requests} requests at {rate} a second: both must be positive")
    draw, due, times = random.Random(seed), 0.0, []
    for _ in range(requests):
        times.append(due)
        due += draw.expovariate(rate)
    return times


def pieces_of(lines: Iterator[bytes]) -> Iterator[str]:
    """Yield the text of each piece of a stream of server-sent events, until the stream ends."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        choices = json.loads(data).get("choices") or [{}]
        if text := choices[0].get("text"):
            yield text


def ask(url: str, body: dict[str, object], answer: Answer, timeout: float) -> None:
    """Send one request, and note when each piece of its answer comes."""
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            for _ in pieces_of(iter(reply.readline, b"")):
                answer.pieces.append(time.perf_counter())
    except (OSError, ValueError) as error:  # URLError is an OSError
        answer.error = f"{type(error).__name__}: {error}"
    if not answer.pieces and not answer.error:
        answer.error = "the stream ended without a token"


def run(url: str, bodies: Sequence[dict[str, object]], due: list[float], timeout: float):
    """Send each request when it is due. Return all answers when the last answer has ended."""
    begin = time.perf_counter()
    answers = [Answer(begin + at) for at in due]
    threads = []
    for body, answer in zip(bodies, answers, strict=True):
        time.sleep(max(0.0, answer.due - time.perf_counter()))
        threads.append(threading.Thread(target=ask, args=(url, body, answer, timeout)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return answers, time.perf_counter() - begin


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of the values for this share."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def interval(answers: list[Answer], values: Callable[[list[Answer]], list[float]], share: float):
    """Return the bounds of the quantile in 95 % of samples of requests, drawn with replacement."""
    draw, found = random.Random(0), []
    for _ in range(300):
        if sample := values(draw.choices(answers, k=len(answers))):
            found.append(quantile(sample, share))
    return quantile(found, 0.025), quantile(found, 0.975)


def summary(answers: list[Answer], seconds: float, ttft: float, itl: float) -> list[str]:
    """Return the lines that `main` prints."""
    good = [answer for answer in answers if not answer.error]
    met = sum(answer.meets(ttft, itl) for answer in answers)
    lines = [
        f"{len(answers)} requests in {seconds:.2f} s, {len(answers) - len(good)} failed",
        f"goodput {met / seconds:.3f} requests/s: {met} met TTFT {ttft:g} s and ITL {itl:g} s",
    ]
    readers: dict[str, Callable[[list[Answer]], list[float]]] = {
        "TTFT": lambda some: [answer.first for answer in some],
        "ITL": lambda some: [gap for answer in some for gap in answer.gaps],
    }
    for name, values in readers.items():
        if not values(good):
            lines.append(f"{name} none")
            continue
        for share in (0.5, 0.99):
            low, high = interval(good, values, share)
            middle = quantile(values(good), share)
            lines.append(
                f"{name} p{share * 100:.0f} {1e3 * middle:.2f} ms"
                f" [{1e3 * low:.2f}, {1e3 * high:.2f}]"
            )
    lines += [f"failed: {answer.error}" for answer in answers if answer.error][:3]
    return lines


def main(words: list[str] | None = None) -> int:
    """Print the latencies; return 1 if no request succeeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--model", default="default")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, default=4.0, help="mean arrivals a second")
    parser.add_argument("--prompt", type=int, default=128, help="words of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--ttft", type=float, default=0.2, help="objective, in seconds")
    parser.add_argument("--itl", type=float, default=0.05, help="objective, in seconds")
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(words)
    try:
        due = arrivals(options.requests, options.rate, options.seed)
    except ValueError as error:
        parser.error(str(error))
    draw = random.Random(options.seed)
    bodies = [
        {
            "model": options.model,
            "prompt": " ".join(str(draw.randrange(10_000)) for _ in range(options.prompt)),
            "max_tokens": options.tokens,
            "temperature": 0,
            "stream": True,
        }
        for _ in due
    ]
    answers, seconds = run(options.url, bodies, due, options.timeout)
    print("\n".join(summary(answers, seconds, options.ttft, options.itl)))
    return int(all(answer.error for answer in answers))


if __name__ == "__main__":
    sys.exit(main())
