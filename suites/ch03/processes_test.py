"""Processes: run each shard of a Python loop in its own process.

Problem    Count the distinct n-grams of documents, for n = 2 to 5, as filters for repetitive text
           do. The documents are independent. The result has the counts of every document.
Baseline   one_loop: one loop over all documents.
Optimized  threads: changes `one_loop`. The documents are split among a pool of threads. Only the
           thread that holds Python's global interpreter lock (GIL) runs, so the threads take turns.
           Threads gain nothing, except with a Python that was built without the GIL.
           processes: changes `threads`. The pool has processes. Each process has its own GIL.
           Documents and counts are pickled and sent through pipes, which the time includes.
Bound      The host: the Python loop. The pools are started before the timed part. In `processes`,
           the cores share the counting, but the parent process alone pickles the documents.
Use when   The work is Python code, and takes much longer than sending its data to another process.
           First see whether tensor operations can do the work: the page's `reference` counts with a
           sort and no loop over tokens. The page does not time it, because it shows how to spread
           code that has to stay in Python. Threads are better for calls that release the GIL, such
           as file reads, torch operations, and most decoders. Training uses one process per GPU for
           the same reason: Python code launches the kernels and holds the GIL.
"""

import itertools
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import torch

from pytest_aisp import Cost, Variant, Work, compare

SHORTEST, LONGEST, VOCABULARY = 2, 5, 50


def inputs(device, documents, tokens, workers):
    skewed = torch.rand(documents, tokens) ** 3  # as in real texts, a few words occur most often
    return (VOCABULARY * skewed).long(), workers


def reference(texts, workers):
    counts = []
    for n in range(SHORTEST, LONGEST + 1):
        places = VOCABULARY ** torch.arange(n)
        numbers = (texts.unfold(1, n, 1) * places).sum(-1).sort(dim=1).values
        counts.append(1 + (numbers.diff(dim=1) != 0).sum(1))
    return torch.stack(counts, 1)


def distinct(text):
    """Return the number of different n-grams in `text`, for each n, as a list."""
    lengths = range(SHORTEST, LONGEST + 1)
    return [len(set(zip(*(text[at:] for at in range(n)), strict=False))) for n in lengths]


def distinct_of_all(texts):
    return [distinct(text) for text in texts]


def split_among(pool, texts, workers):
    parts = pool.map(distinct_of_all, [part.tolist() for part in texts.chunk(workers)])
    return torch.tensor(list(itertools.chain.from_iterable(parts)))


def one_loop(texts, workers):
    return torch.tensor(distinct_of_all(texts.tolist()))


def threads(texts, workers):
    with ThreadPoolExecutor(workers) as pool:
        yield lambda: split_among(pool, texts, workers)


def processes(texts, workers):
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield lambda: split_among(pool, texts, workers)


def counting(documents, tokens, workers):
    return Cost(read=8 * documents * tokens, write=8 * documents * (LONGEST - SHORTEST + 1))


@compare(
    baseline=one_loop,
    optimized=[Variant(threads, at_least="yardstick"), processes],
    inputs=inputs,
    reference=reference,
    sizes=[],
    check_sizes=[{"documents": 5, "tokens": 33, "workers": 2}],
    cpu_sizes=[{"documents": 32, "tokens": 1024, "workers": 2}],
    work=lambda documents, tokens, workers: Work(
        read=8 * documents * tokens, write=8 * documents * (LONGEST - SHORTEST + 1)
    ),
    bound="host",
    costs=dict.fromkeys((one_loop, threads, processes), counting),
    at_least={"cpu": 1.2},
)
def test_processes(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
