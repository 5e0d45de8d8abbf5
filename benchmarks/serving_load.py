"""Latencies and goodput of the sides of `suites/ch17/load_test.py`, by load.

    python benchmarks/serving_load.py --loads 100 200 400 800 --ttft 0.05 --itl 0.005

Arrival times are drawn once for each replay. Each side serves the same arrivals in real time, with
real steps of the decoder. For each load and side, the script prints p50 and p99 of the time to the
first token (TTFT) and of the times between tokens (ITL), with 95 % intervals from a bootstrap over
requests. It also prints the goodput: the requests per second that meet both objectives. A bootstrap
over replays gives an interval for the ratio of a side's goodput to the first side's goodput. The
side gains if the interval excludes 1. At the end, the script prints the load at which each side has
the most goodput. `--plot FOLDER` draws the distributions of TTFT and ITL of each load, with 95 %
bands from a bootstrap over replays.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import latency_plot
from serving_client import Answer, quantile, summary

sys.path.append(str(Path(__file__).parents[1]))
from suites.ch17 import load_test
from suites.server import Server, serve

SIDES = {"static": {"together": True}, "continuous": {}, "chunked": {}}
LEAST = 5
"""The fewest replays from which a bootstrap may draw."""
Replay = tuple[list[Answer], float]
"""The answers of a side to all requests, and the seconds that they took together."""


def replays(load: float, count: int, size: dict[str, int], device: str) -> dict[str, list[Replay]]:
    """Return the answers of each side. All sides get the same requests at the same times."""
    model = load_test.state(device, **size, load=load)
    servers = {side: Server(model, size["slots"], graph=True) for side in SIDES}
    found: dict[str, list[Replay]] = {side: [] for side in SIDES}
    for number in range(count + 1):
        prompts, lengths, due, _, chunk = load_test.inputs(device, **size, load=load)
        arrive = due.tolist()
        for side, server in servers.items():
            policy = {"chunk": chunk} if side == "chunked" else SIDES[side]
            serve(server, prompts, lengths, arrive, **policy)
            if number:  # the first replay warms up
                answers = [
                    Answer(server.begun + at, times)
                    for at, times in zip(arrive, server.times, strict=True)
                ]
                end = max(answer.pieces[-1] for answer in answers)
                found[side].append((answers, end - server.begun))
    return found


def goodput(some: Sequence[Replay], ttft: float, itl: float) -> float:
    """Return the requests per second that meet both objectives."""
    met = sum(answer.meets(ttft, itl) for answers, _ in some for answer in answers)
    return met / sum(seconds for _, seconds in some)


def gain(side: list[Replay], first: list[Replay], ttft: float, itl: float) -> str:
    """Return the ratio of a side's goodput to the first side's goodput, with a verdict."""
    if not goodput(first, ttft, itl):
        return "the first side meets the objectives for no request"
    draw, ratios = random.Random(0), []
    for _ in range(1000):
        chosen = draw.choices(range(len(side)), k=len(side))
        below = goodput([first[k] for k in chosen], ttft, itl)
        above = goodput([side[k] for k in chosen], ttft, itl)
        ratios.append(above / below if below else float("inf"))
    low, high = quantile(ratios, 0.025), quantile(ratios, 0.975)
    verdict = "gains" if low > 1 else "loses" if high < 1 else "no difference shown"
    ratio = goodput(side, ttft, itl) / goodput(first, ttft, itl)
    return f"{ratio:.3f}x the goodput of the first side [{low:.3f}, {high:.3f}]: {verdict}"


def plot(
    found: dict[str, list[Replay]], load: float, folder: Path, ttft: float, itl: float
) -> None:
    """Write the distributions of the latencies at one load to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    firsts = {
        side: [[answer.first for answer in answers] for answers, _ in some]
        for side, some in found.items()
    }
    gaps = {
        side: [[gap for answer in answers for gap in answer.gaps] for answers, _ in some]
        for side, some in found.items()
    }
    for name, words, sides, limit in (
        ("ttft", "Time to the first token", firsts, ttft),
        ("itl", "Time between tokens", gaps, itl),
    ):
        drawing = latency_plot.draw(sides, f"{words} at load {load:g}", limit)
        (folder / f"{name}-{load:g}.svg").write_text(drawing)


def main(words: list[str] | None = None) -> int:
    """Print all loads; return 1 if no side meets the objectives at any of them."""
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loads", type=float, nargs="+", default=[100, 200, 400, 800])
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--ttft", type=float, default=0.05, help="objective, in seconds")
    parser.add_argument("--itl", type=float, default=0.005, help="objective, in seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="a folder for ttft-LOAD.svg and itl-LOAD.svg")
    options = parser.parse_args(words)
    if options.replays < LEAST or not all(load > 0 for load in options.loads):
        parser.error(f"loads must be positive, and an interval needs at least {LEAST} replays")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = load_test.LARGE if device == "cuda" else load_test.SMALL
    torch.manual_seed(options.seed)
    best = dict.fromkeys(SIDES, (0.0, 0.0))
    for load in options.loads:
        found = replays(load, options.replays, size, device)
        if options.plot is not None:
            plot(found, load, options.plot, options.ttft, options.itl)
        first = next(iter(found.values()))
        for side, some in found.items():
            answers = [answer for each, _ in some for answer in each]
            seconds = sum(each for _, each in some)
            for line in summary(answers, seconds, options.ttft, options.itl):
                print(f"{side} at load {load:g}: {line}")
            if some is not first:
                print(f"{side} at load {load:g}: {gain(some, first, options.ttft, options.itl)}")
            best[side] = max(best[side], (goodput(some, options.ttft, options.itl), load))
    for side, (most, load) in best.items():
        at = f"at load {load:g}" if most else "at any load"
        print(f"{side}: most goodput {most:.3f} requests/s {at}")
    return int(not any(most for most, _ in best.values()))


if __name__ == "__main__":
    sys.exit(main())
