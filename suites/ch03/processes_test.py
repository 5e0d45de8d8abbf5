"""Processes: Python loops of several shards need a process each.

Problem    Count the distinct n-grams of documents, for n = 2 to 5, as filters for repetitive text
           do. It is a loop in Python, and each document is independent of the others. The result of
           every document is returned.
Baseline   one_loop: one loop over all documents.
Optimized  threads: one_loop with the documents split among a pool of threads. Only the thread that
           holds Python's global lock runs, so they take turns. It gains nothing, except on a
           Python that was built without the lock.
           processes: threads with a pool of processes. Each has a lock of its own. Documents and
           counts are pickled and sent through pipes, which is timed.
Bound      The host: the interpreter's loop. Pools start before the clock does. With processes the
           work is split among the cores, and pickling is not.
Use when   The work is Python code, and takes much longer than sending its data. Threads are better
           for calls that release the lock: reads of files, torch, most decoders. For the same
           reason training uses one process per GPU: launching kernels is Python code.
"""

import itertools
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import torch

from pytest_aisp import Cost, Variant, Work, compare

SHORTEST, LONGEST, VOCABULARY = 2, 5, 50


def inputs(device, documents, tokens, workers):
    skewed = torch.rand(documents, tokens) ** 3  # as in texts, few words are most of all words
    return (VOCABULARY * skewed).long(), workers


def reference(texts, workers):
    counts = []
    for n in range(SHORTEST, LONGEST + 1):
        places = VOCABULARY ** torch.arange(n)
        numbers = (texts.unfold(1, n, 1) * places).sum(-1).sort(dim=1).values
        counts.append(1 + (numbers.diff(dim=1) != 0).sum(1))
    return torch.stack(counts, 1)


def distinct(text):
    """Return how many different n-grams `text` has, for each n."""
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
