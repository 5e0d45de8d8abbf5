"""Garbage collection: exclude the objects that live until the process ends.

Problem    Group n documents by length, so that a batch needs little padding. This is a Python loop
           that creates an object per document. The modules of torch alone leave several 100,000
           objects in the process, and none of these objects is garbage.
Baseline   collected: Python's default. Creating many objects triggers collections. Most collections
           visit only the youngest objects, but a full collection visits every object of the
           process.
Optimized  frozen: changes `collected`. After `gc.freeze()` before the loop, collections skip all
           objects that exist at that time. `gc.unfreeze()` at the end lets the collector visit them
           again.
           disabled: changes `collected`. With `gc.disable()` during the loop, there is no
           collection at all. (In frozen, collections still visit the objects that the loop
           creates.)
Bound      The host: the Python loop. The cost of a collection grows with the number of objects that
           it visits. In Python 3.13 and older, a full collection starts when the number of new
           objects reaches a quarter of the number of old objects. So with more old objects, full
           collections are less frequent but take longer.
Use when   A loop creates many Python objects in a process that already has millions of them.
           Another case is a job whose ranks all wait because a collection delays one rank. Call
           `gc.freeze()` once, after everything is loaded. With collections disabled, reference
           cycles are never freed, so call `gc.collect()` at a time that suits all ranks. A loop
           that only launches kernels creates few objects and gains nothing.
"""

import gc
from collections import defaultdict

import torch
from hypothesis import strategies as st

from pytest_aisp import Conditions, Cost, Work, compare

LONGEST, STEP = 512, 32


class Document:
    def __init__(self, place, length):
        self.place, self.length = place, length
        self.bucket = length // STEP


def inputs(device, n):
    return (torch.randint(LONGEST, (n,)),)


def reference(lengths):
    return torch.sort(lengths // STEP, stable=True).indices


def grouped(lengths):
    """Return the indices of all documents, bucket by bucket. Within a bucket, the documents keep
    their order."""
    buckets = defaultdict(list)
    for place, length in enumerate(lengths.tolist()):
        document = Document(place, length)
        buckets[document.bucket].append(document)
    order = [document.place for bucket in sorted(buckets) for document in buckets[bucket]]
    return torch.tensor(order)


def collected(lengths):
    return grouped(lengths)


def frozen(lengths):
    gc.freeze()
    order = grouped(lengths)
    gc.unfreeze()
    return order


def disabled(lengths):
    gc.disable()
    order = grouped(lengths)
    gc.enable()
    return order


@compare(
    baseline=collected,
    optimized=[frozen, disabled],
    inputs=inputs,
    reference=reference,
    sizes=[],
    check_sizes=[{"n": 1023}, {"n": st.integers(1, 3000)}],
    cpu_sizes=[{"n": 1 << 17}],
    work=lambda n: Work(read=8 * n, write=8 * n),
    bound="host",
    costs=dict.fromkeys((collected, frozen, disabled), lambda n: Cost(read=8 * n, write=8 * n)),
    at_least={"cpu": 1.2},
    conditions=Conditions(owns=["gc"]),
)
def test_gc(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
