"""Divergence: a warp executes every branch that any of its lanes takes.

Problem    Take 128 steps of a growth rule for each of n fp32 elements. There are two kinds of
           elements, half of each. Kind 0 has a logistic rule with two dependent instructions per
           step, and kind 1 has a cubic rule with three. With order=random, the kinds are mixed.
           With order=sorted, all elements of kind 0 come first in the input.
Baseline   branching: an `if` on the kind, with the loop for one rule in each branch.
Optimized  partitioned: changes `branching`. A block of 256 threads counts its elements of kind 0 by
           warp votes. The block moves these elements through shared memory to its first threads, so
           at most one warp of the block has both kinds. Each result is stored at the index of the
           element.
           both_paths: changes `branching`. Each thread computes both results and keeps one, so no
           branch is left. If the kinds are sorted, this doubles the work.
           one_path: changes `branching`. One loop serves both rules, because the rules differ only
           in one factor. Each step selects the factor of the element's rule. The selection adds an
           instruction, so a step has four.
Bound      Instruction issue. A warp with both kinds needs 2 + 3 instructions per step. A warp with
           a single kind needs 2 or 3. So `branching` takes twice as long with order=random as with
           order=sorted. `partitioned` takes little longer with order=random than with order=sorted.
           In both orders, `both_paths` takes as long as `branching` with order=random. `one_path`
           takes less time than `branching` with order=random, but more than `branching` with
           order=sorted.
Seen       `partitioned` takes longer than predicted, because its cost leaves out the votes, the
           barriers and the moves through shared memory. The other three sides take as long as
           predicted from their instructions.
Use when   The branches are long, and the lanes of a warp take different ones. Sort data that you
           use often. Partition other data inside a block. If the branches are alike, compute the
           common part outside of them and only select operands. Leave short branches as they are,
           because the compiler predicates them. In a kernel that waits for DRAM, a second branch
           costs little, because issue slots are free.
"""

import torch

from pytest_aisp import Cost, Variant, Work, compare, cuda_module

kernels = cuda_module("divergence.cu")
BLOCK = 256
STEPS, RATE = 128, 0.02
LOGISTIC, CUBIC, SELECTED = 2, 3, 4  # instructions per step of a rule


def inputs(device, n, order):
    x = 0.01 + 0.49 * torch.rand(n, device=device)
    kind = (torch.randperm(n, device=device) % 2).to(torch.int32)
    return x, kind.sort().values if order == "sorted" else kind


def reference(x, kind):
    y = x.double()
    for _ in range(STEPS):
        y = y + RATE * (y - torch.where(kind == 0, y**2, y**3))
    return y


def launch(kernel, x, kind):
    out = torch.empty_like(x)
    kernel[-(-x.numel() // BLOCK), BLOCK](RATE, x, kind, out, x.numel())
    return out


def branching(x, kind):
    return launch(kernels.branching, x, kind)


def partitioned(x, kind):
    return launch(kernels.partitioned, x, kind)


def both_paths(x, kind):
    return launch(kernels.both_paths, x, kind)


def one_path(x, kind):
    return launch(kernels.one_path, x, kind)


def issued(random, ordered):
    """Return a cost function from the instructions per step for random and for sorted input."""

    def stepped(n, order):
        # Each instruction takes the issue slot of a multiply-add, which is two operations.
        ops = 2 * STEPS * n * (random if order == "random" else ordered)
        return Cost(read=8 * n, write=4 * n, ops={"fp32": ops}, launches=1)

    return stepped


BOTH, ONE = LOGISTIC + CUBIC, (LOGISTIC + CUBIC) / 2
MIXED = (7 * ONE + BOTH) / 8  # one of a block's 8 warps has both kinds


@compare(
    baseline=branching,
    optimized=[
        # If the elements are sorted, nothing is left to partition.
        Variant(
            partitioned,
            sass="VOTE",
            when=lambda n, order: order == "random",
            at_least={"sm90": 1.2},
        ),
        Variant(both_paths, at_least="yardstick"),  # more work than the baseline if order=sorted
        Variant(one_path, at_least="yardstick"),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 2**26, "order": order} for order in ("random", "sorted")],
    check_sizes=[
        {"n": 833, "order": "random"},
        {"n": 515, "order": "sorted"},
    ],
    # No flops are declared: the chains may run at the full fp32 rate. If the clock is higher now
    # than when this rate was measured, the harness would report skipped work.
    work=lambda n, order: Work(read=8 * n, write=4 * n),
    bound="issue",
    costs={
        branching: issued(BOTH, ONE),
        partitioned: issued(MIXED, ONE),
        both_paths: issued(BOTH, BOTH),
        one_path: issued(SELECTED, SELECTED),
    },
)
def test_divergence(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
