"""Cascade and early exit: a small model labels the inputs it is sure of.

Problem    Label `rows` bf16 inputs. An easy input is near one of `classes` prototypes, and its
           label is the prototype's number. A hard input is near the sum of two prototypes, and its
           label is the sum of their numbers modulo `classes`. One input in 5 is hard. The large
           network has `layers` random layers. The head of this network is fitted to a training set
           by least squares, as part of the page's state. Every label must be right.
Baseline   large: the large network labels all inputs.
Optimized  cascade: changes `large`. A linear model, fitted to easy inputs, labels all inputs. If
           the best score is less than 0.5 above the second best, the large network labels the input
           instead. The host waits for the number of such inputs.
           early_exit: changes `cascade`. In place of the linear model, a second head is fitted to
           the first layer of the large network. If this head is not sure of an input, the other
           layers continue from the first layer's output. `early_exit` multiplies more than
           `cascade`, because the first layer computes every input.
Bound      Tensor cores. The large network multiplies each input by all its matrices. `large` runs
           the network on all inputs, and `cascade` only on the hard inputs. The wait for the number
           of hard inputs is the second largest part of the time.
Seen       On an H200, `large` and `cascade` take about as long as predicted. On an H100, `large`
           takes as long as predicted, and `early_exit` takes a third longer. We did not time the
           parts of `early_exit` alone.
Use when   Most inputs are easy, and the small model's scores show when it is not sure. Measure the
           accuracy at your threshold, because a wrong label costs more than the time that it saves.
           `TestAccuracy` shows that labels are wrong without a threshold. An early exit needs no
           second model, which saves memory.
"""

import itertools

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Work, compare

HARD, SURE = 0.2, 0.5
TRAINING = 2  # training inputs per input feature of a head
NOISE = 0.2  # norm of the noise, relative to the norm of a prototype
GAIN = 1.5  # gain of a random layer, so that tanh is not linear


def drawn(device, rows, classes, dimensions, hard):
    """Return inputs and their labels. `hard` is the share of hard inputs."""
    first = torch.randint(classes, (rows,), device=device)
    second = (first + torch.randint(1, classes, (rows,), device=device)) % classes
    is_hard = torch.rand(rows, device=device) < hard
    noise = torch.randn(rows, dimensions, device=device)
    x = NOISE * noise / noise.norm(dim=1, keepdim=True)
    x[:, :classes] += F.one_hot(first, classes) + F.one_hot(second, classes) * is_hard[:, None]
    return x.bfloat16(), torch.where(is_hard, (first + second) % classes, first)


def fitted(features, labels, classes, ridge=1e-4):
    """Return the matrix that maps features to labels, by least squares."""
    features, wanted = features.float(), F.one_hot(labels, classes).float() - 1 / classes
    gram = features.t() @ features / len(features)
    gram.diagonal().add_(ridge * gram.diagonal().mean())
    return torch.linalg.solve(gram, features.t() @ wanted / len(features)).bfloat16()


def state(device, rows, classes, dimensions, width, layers):
    sizes = [dimensions] + [width] * layers
    network = [
        (GAIN * torch.randn(a, b, device=device) / (a**0.5 if number else 1)).bfloat16()
        for number, (a, b) in enumerate(itertools.pairwise(sizes))
    ]
    x, labels = drawn(device, TRAINING * width, classes, dimensions, 0.5)
    easy, easy_labels = drawn(device, TRAINING * width, classes, dimensions, 0.0)
    return {
        "layers": network,
        "head": fitted(features_of(x, network), labels, classes),
        "linear": fitted(easy, easy_labels, classes),
        # A large ridge makes the head unsure of inputs that differ from its training set.
        "exit": fitted(features_of(easy, network[:1]), easy_labels, classes, ridge=1.0),
    }


def inputs(device, rows, classes, dimensions, width, layers):
    return (drawn(device, rows, classes, dimensions, HARD)[0],)


def reference(state, x):
    """Return the true labels: find the prototypes in each input, without any network."""
    classes = state["head"].shape[1]
    present = x.double()[:, :classes] > 0.5
    return (present * torch.arange(classes, device=x.device)).sum(dim=1) % classes


def features_of(x, layers):
    for layer in layers:
        x = torch.tanh(x @ layer)
    return x


def best(scores):
    return scores.argmax(dim=1)


def unsure(scores, threshold=SURE):
    """Return the indices of rows whose two best scores are close. The host waits for them."""
    first, second = scores.float().topk(2, dim=1).values.unbind(1)
    return (first - second < threshold).nonzero().squeeze(1)


def large(state, x):
    return best(features_of(x, state["layers"]) @ state["head"])


def cascade(state, x):
    scores = x @ state["linear"]
    left = unsure(scores)
    return best(scores).index_copy_(0, left, large(state, x[left]))


def early_exit(state, x):
    layers = state["layers"]
    features = features_of(x, layers[:1])
    scores = features @ state["exit"]
    left = unsure(scores)
    rest = best(features_of(features[left], layers[1:]) @ state["head"])
    return best(scores).index_copy_(0, left, rest)


def products(rows, *sizes):
    """Return the cost of layers of these sizes, each a product and a tanh."""
    cost = Cost(launches=1)
    for a, b in itertools.pairwise(sizes):
        cost += Cost(
            read=2 * (rows * a + a * b),
            write=2 * rows * b,
            ops={"bf16": 2 * rows * a * b},
            launches=1,
        )
        cost += Cost(read=2 * rows * b, write=2 * rows * b, launches=1)
    return cost


def large_cost(rows, classes, dimensions, width, layers):
    return products(rows, dimensions, *[width] * layers, classes)


def chosen(rows, columns):
    """Return the cost of finding the unsure rows, of the wait, and of gathering and scattering."""
    left = HARD * rows * columns
    return Cost(read=2 * left, write=2 * left, launches=14, syncs=1)


def cascade_cost(rows, classes, dimensions, width, layers):
    hard = round(HARD * rows)
    small = products(rows, dimensions, classes) + chosen(rows, dimensions)
    return small + products(hard, dimensions, *[width] * layers, classes)


def early_exit_cost(rows, classes, dimensions, width, layers):
    hard = round(HARD * rows)
    first = products(rows, dimensions, width, classes) + chosen(rows, width)
    return first + products(hard, *[width] * layers, classes)


@compare(
    baseline=large,
    optimized=[cascade, early_exit],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": 16384, "classes": 16, "dimensions": 1024, "width": 4096, "layers": 4}],
    check_sizes=[
        {"rows": 101, "classes": 4, "dimensions": 16, "width": 128, "layers": 2},
        {"rows": 33, "classes": 3, "dimensions": 8, "width": 128, "layers": 2},
    ],
    work=lambda rows, classes, dimensions, width, layers: Work(
        read=2 * rows * dimensions, write=8 * rows, flops={"bf16": 2 * rows * dimensions * classes}
    ),
    bound="host",
    costs={large: large_cost, cascade: cascade_cost, early_exit: early_exit_cost},
)
def test_cascade(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()


class TestAccuracy:
    """The threshold decides how many labels are wrong."""

    def test_without_a_threshold_the_cascade_is_wrong_on_hard_inputs(self):
        size = {"classes": 4, "dimensions": 16}
        weights = state("cpu", 0, **size, width=128, layers=2)
        x, labels = drawn("cpu", 1000, **size, hard=HARD)
        scores = x @ weights["linear"]
        shares = {}
        for threshold in (0.0, SURE, 10.0):
            left = unsure(scores, threshold)
            answers = best(scores).index_copy_(0, left, large(weights, x[left]))
            shares[threshold] = (answers == labels).float().mean().item()
        assert shares[0.0] < 1 - HARD / 2  # it finds at most one of a hard input's two numbers
        assert shares[SURE] == shares[10.0] == 1.0
