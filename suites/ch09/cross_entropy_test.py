"""Cross entropy: loss and gradient in one kernel, and logits computed in chunks to save memory.

Problem    Compute the mean cross entropy of bf16 logits and its gradient, in fp32.
           test_cross_entropy measures 1024 to 262144 classes. test_linear_cross_entropy starts one
           layer earlier: the inputs are the hidden states and the weight of the last layer, and the
           results include the gradients of both. Labels are class numbers, and no label is ignored.
Baseline   eager: converts the logits to fp32, calls `cross_entropy`, and gets the gradient from
           autograd.
           whole: multiplies the hidden states by the weight, computes the loss in the same way as
           `eager`, and gets all gradients from autograd.
Optimized  compiled: changes `eager`. `torch.compile` compiles the formulas of the softmax, the loss
           and the gradient.
           two_kernels: changes `eager`. A Triton kernel computes each row's loss and log-sum-exp in
           one pass, by the online method. A second kernel reads the logits again and writes the
           gradient.
           one_kernel: changes `two_kernels`. The program that computes a row's log-sum-exp also
           writes the row's gradient.
           clustered: changes `one_kernel`. In CUDA C++, the blocks of a cluster share a row and
           keep it in their shared memory. The blocks exchange their maxima and sums once. This
           kernel runs for 16384 or more classes, and the number of classes must be a multiple of 8.
           A row of 16384 classes fits in one block.
           ring: changes `clustered`. The clusters are persistent: each processes many rows, while
           bulk copies load the next rows, as in rms_norm_test.py. A block has 1024 threads and
           keeps its parts of two rows in shared memory, so only one block fits on an SM. This
           kernel runs for more than 32768 and up to 262144 classes.
           pushed: changes `ring`. The blocks send their maxima and sums to each other with
           st.async, and wait only for these values. In `ring`, the blocks use ordinary stores, and
           then all blocks wait at the cluster's barrier.
           chunked: changes `whole`. The rows are processed in eight chunks, one after another. For
           each chunk, the logits, the loss and the gradients are computed. The gradient of the
           weight is summed in bf16.
           fused_chunks: changes `chunked`. The kernel of `one_kernel` computes each chunk's loss,
           and overwrites the chunk's logits with their gradient.
           linear_library: `torch.nn.functional.linear_cross_entropy` with its default chunks, which
           returns the loss in bf16.
Bound      test_cross_entropy: DRAM, or the rate at which the SMs issue instructions. `eager` makes
           ten passes over the logits, most of them in fp32. torch's log softmax and its backward
           also read long rows more than once. The Triton kernels read each logit twice and write
           its gradient. The CUDA C++ kernels read each logit once. In `one_kernel`, the second read
           comes from the L2 if the rows of all running programs fit in the L2 together. In that
           case, issuing the instructions takes longer than the DRAM traffic. The machine code of
           `one_kernel` for sm_90 has about 40 instructions per logit, most of them for exponentials
           and for rounding to bf16. If a row takes only one step of the loop, there are about 60
           instructions per logit. The machine code of `clustered` has 13 instructions per logit.
           `clustered` rounds with one instruction, flushes denormal numbers, and computes two
           exponentials per logit instead of three. The exponentials are powers of 2, so each takes
           one multiply-add and one SFU instruction. The gradient's factor 1 / rows is added to the
           exponent as a logarithm. Only the thread that holds the label's logit subtracts the 1 of
           the gradient's formula. With 16384 classes, `clustered` has one block per row. So
           clustered differs from `one_kernel` in only two ways: fewer instructions, and a second
           read from shared memory instead of the L2. The costs do not include the time that blocks
           wait for each other. rms_norm_test.py explains these waits.
           test_linear_cross_entropy: the tensor cores. All sides compute the same three products.
           In `whole`, the passes over the fp32 logits add three quarters of the products' time. The
           goal of this test is memory: `whole` keeps fp32 copies of the logits and their gradients.
           The page claims that chunks save memory, not time. The products of a chunk are smaller,
           so they fill the GPU less evenly. Each chunk also reads and writes the gradient of the
           weight.
Seen       On an H100, `eager` takes a quarter longer than predicted with 1024 classes, and almost a
           fifth longer with 16384. torch sums the losses of all rows in a single block. With 1024
           classes, that block may explain part of the extra time. With 16384 classes, there are too
           few rows for the block to take much time. We did not time the kernels of `eager` one by
           one. With 16384 classes, `one_kernel` takes a sixth longer than predicted. `compiled`
           takes as long as a kernel whose second read comes from DRAM. We did not look at the
           kernel that Inductor generated. On an H200, `fused_chunks` takes more than a quarter
           longer than predicted. We did not measure which step of `fused_chunks` takes the extra
           time. On an H100, `clustered` takes about an eighth longer than its memory traffic alone
           with 16384 classes, and a sixth longer with 262144. With 262144 classes, `ring` takes
           25 % longer than its memory traffic alone, and `pushed` takes only slightly longer. So
           most of the gain of `pushed` over `clustered` comes from st.async. On an H200, the
           ranking is the same and the differences are larger: `clustered` takes a third longer than
           its memory traffic, `ring` two thirds longer, and pushed a tenth longer. An H200 has
           faster DRAM and the same SMs, so the waits of the blocks are a larger part of the time.
           With 16384 classes on an H200, `eager` takes a third longer than predicted.
           `linear_library` is not recorded yet.
Use when   The vocabulary is large. The forward pass already has all inputs of the gradient, so
           compute the gradient together with the loss. Choose chunks that are large enough for
           their products to fill the GPU. Here, a chunk has 1024 rows, and the gradient of its
           hidden states has 128 tiles of 128 x 128 for the 132 SMs of an H200.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pytest_aisp import Cost, Sweep, Variant, Work, compare, cuda_module

kernels = cuda_module("cross_entropy.cu", options={"ftz": True})

TOTAL = 2**28  # logits at each size of test_cross_entropy
CLASSES = (1024, 16384, 262144)
CHUNKS = 8
ROWS = 512  # rows that the reference computes at a time
STEP = 4096  # logits that a program loads at a time, 16 per thread
LANES = 132 * 5 * STEP  # logits in registers of an H200: 48 registers per thread
TORCH = 132 * 2  # blocks of 1024 threads of torch's log softmax that run on an H200
L2 = 60 * 2**20
# Instructions of a thread: those for the 16 logits of each step, and those executed once per row.
# They were counted in the machine code that Triton 3.9 generates for sm_90.
LOSS, GRADIENT, BOTH = (284, 301), (328, 51), (625, 312)
# Instructions per logit, counted in the machine code for sm_90. The counts of ring and pushed
# include the exchange between blocks.
CLUSTERED, RING, PUSHED = 404 / 32, 601 / 32, 580 / 32
BLOCK, MOST_BLOCKS = 256, 8  # clustered: threads per block, maximum blocks per cluster
SLICE = 32 * 2**10  # bytes of a row that a block keeps; more if 8 blocks are not enough
# For ring and pushed: threads per block, the number of rows that have a part in the block's shared
# memory, and the bytes of each part.
THREADS, STAGES, RING_SLICE = 1024, 2, 64 * 2**10
MOST = {"chunked": 0.35, "fused_chunks": 0.2, "linear_library": 0.6}


@triton.jit
def in_bf16(value):
    """Round to bf16, ties to even. A GPU's cast does that. Triton's interpreter truncates."""
    bits = value.to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return ((bits >> 16) << 16).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def log_sum(logits, row, n, STEP: tl.constexpr):
    """Return the log-sum-exp of a row that begins at element `row` of `logits`."""
    lanes = tl.arange(0, STEP)
    most = tl.full((STEP,), -3.4028234e38, tl.float32)
    total = tl.zeros((STEP,), tl.float32)
    for start in range(0, n, STEP):
        at = start + lanes
        value = tl.load(logits + row + at, mask=at < n, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(most, value)
        total = total * tl.exp(most - larger) + tl.exp(value - larger)
        most = larger
    largest = tl.max(most)
    return largest + tl.log(tl.sum(total * tl.exp(most - largest)))


@triton.jit
def store_gradient(logits, grad, row, n, label, found, rows, STEP: tl.constexpr):
    lanes = tl.arange(0, STEP)
    share = 1.0 / rows
    for start in range(0, n, STEP):
        at = start + lanes
        value = tl.load(logits + row + at, mask=at < n, other=float("-inf")).to(tl.float32)
        change = (tl.exp(value - found) - tl.where(at == label, 1.0, 0.0)) * share
        tl.store(grad + row + at, in_bf16(change), mask=at < n)


@triton.jit
def loss_kernel(logits, labels, losses, sums, n, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    label = tl.load(labels + tl.program_id(0))
    found = log_sum(logits, row, n, STEP)
    tl.store(sums + tl.program_id(0), found)
    tl.store(losses + tl.program_id(0), found - tl.load(logits + row + label).to(tl.float32))


@triton.jit
def gradient_kernel(logits, labels, sums, grad, n, rows, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    label = tl.load(labels + tl.program_id(0))
    found = tl.load(sums + tl.program_id(0))
    store_gradient(logits, grad, row, n, label, found, rows, STEP)


@triton.jit
def both_kernel(logits, labels, losses, grad, n, rows, STEP: tl.constexpr):
    """Store a row's loss and gradient. `grad` may be `logits`, as no other program uses the row."""
    row = tl.program_id(0).to(tl.int64) * n
    label = tl.load(labels + tl.program_id(0))
    found = log_sum(logits, row, n, STEP)
    tl.store(losses + tl.program_id(0), found - tl.load(logits + row + label).to(tl.float32))
    # If `grad` is `logits`, every thread has to read the label's logit before it is overwritten.
    tl.debug_barrier()
    store_gradient(logits, grad, row, n, label, found, rows, STEP)


def inputs(device, rows, n):
    logits = 2 * torch.randn(rows, n, device=device)
    return logits.bfloat16(), torch.randint(n, (rows,), device=device)


def linear_inputs(device, rows, n, k):
    hidden = torch.randn(rows, k, device=device).bfloat16()
    weight = 2 * torch.randn(n, k, device=device) / k**0.5
    return hidden, weight.bfloat16(), torch.randint(n, (rows,), device=device)


def reference(logits, labels):
    logits = logits.double()
    rows = len(logits)
    logs = logits.log_softmax(dim=1)
    own = F.one_hot(labels, logits.shape[1])
    loss = -logs.gather(1, labels[:, None]).sum() / rows
    return loss, (logs.exp() - own) / rows


def linear_reference(hidden, weight, labels):
    weight = weight.double()
    loss, dweight, dhidden = 0, torch.zeros_like(weight), []
    for start in range(0, len(hidden), ROWS):
        piece = hidden[start : start + ROWS].double()
        part, change = reference(piece @ weight.mT, labels[start : start + ROWS])
        share = len(piece) / len(hidden)
        loss = loss + part * share
        dweight = dweight + (change * share).mT @ piece
        dhidden.append((change * share) @ weight)
    return loss, torch.cat(dhidden), dweight


def eager(logits, labels):
    leaf = logits.detach().requires_grad_()
    loss = F.cross_entropy(leaf.float(), labels)
    return loss.detach(), *torch.autograd.grad(loss, leaf)


def formula(logits, labels):
    logs = logits.float().log_softmax(dim=1)
    loss = -logs.gather(1, labels[:, None]).mean()
    own = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    return loss, ((logs.exp() - own.float()) / len(logits)).to(logits.dtype)


@functools.cache
def compiled_formula():
    return torch.compile(formula, dynamic=False)


def compiled(logits, labels):
    return compiled_formula()(logits, labels)


def in_steps(n):
    """Return STEP and num_warps for rows of n logits. Each thread processes 16 logits per step."""
    step = min(STEP, triton.next_power_of_2(n))
    return {"STEP": step, "num_warps": max(step // 512, 1)}


def two_kernels(logits, labels):
    rows, n = logits.shape
    losses, sums = torch.empty(2, rows, device=logits.device)
    loss_kernel[(rows,)](logits, labels, losses, sums, n, **in_steps(n))
    grad = torch.empty_like(logits)
    gradient_kernel[(rows,)](logits, labels, sums, grad, n, rows, **in_steps(n))
    return losses.mean(), grad


def both(logits, labels, losses, grad, rows):
    """Store the losses of `logits`, and the gradient of the mean over `rows` losses."""
    given, n = logits.shape
    both_kernel[(given,)](logits, labels, losses, grad, n, rows, **in_steps(n))


def one_kernel(logits, labels):
    losses = torch.empty(len(logits), device=logits.device)
    grad = torch.empty_like(logits)
    both(logits, labels, losses, grad, len(logits))
    return losses.mean(), grad


def blocks_of(n, each=SLICE):
    """Return how many blocks share a row, if each block keeps `each` bytes."""
    return min(triton.next_power_of_2(triton.cdiv(2 * n, each)), MOST_BLOCKS)


def clustered(logits, labels):
    (rows, n), grad = logits.shape, torch.empty_like(logits)
    if n % 8:
        raise ValueError(f"rows of {n} logits; clustered needs a multiple of 8")
    losses = torch.empty(rows, device=logits.device)
    blocks = blocks_of(n)
    shared = 16 * triton.cdiv(n, 8 * blocks)
    launch = kernels.clustered.launch((blocks, rows), BLOCK, shared, cluster=(blocks, 1))
    launch(logits, labels, losses, grad, n)
    return losses.mean(), grad


def staying(kernel, logits, labels):
    """Run a kernel with as many clusters as fit on the GPU, but at most one for every 8 rows."""
    (rows, n), grad = logits.shape, torch.empty_like(logits)
    if n % 8 or 2 * n > MOST_BLOCKS * RING_SLICE:
        raise ValueError(f"rows of {n} logits; needs a multiple of 8, and at most 262144")
    losses = torch.empty(rows, device=logits.device)
    blocks, shared = blocks_of(n, RING_SLICE), STAGES * RING_SLICE
    fit = kernel.clusters_at_once(THREADS, shared, cluster=(blocks, 1)) if logits.is_cuda else 2
    clusters = min(fit, triton.cdiv(rows, 8))
    launch = kernel.launch((blocks, clusters), THREADS, shared, cluster=(blocks, 1))
    launch(logits, labels, losses, grad, n, rows)
    return losses.mean(), grad


def ring(logits, labels):
    return staying(kernels.ring, logits, labels)


def pushed(logits, labels):
    return staying(kernels.pushed, logits, labels)


def whole(hidden, weight, labels):
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = F.cross_entropy((leaves[0] @ leaves[1].mT).float(), labels)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def pieces(hidden, labels):
    size = -(-len(hidden) // CHUNKS)
    return zip(hidden.split(size), labels.split(size), strict=True)


def chunked(hidden, weight, labels):
    loss = torch.zeros((), device=hidden.device)
    dhidden, dweight = [], torch.zeros_like(weight)
    for piece, own in pieces(hidden, labels):
        leaf = (piece @ weight.mT).requires_grad_()
        part = F.cross_entropy(leaf.float(), own, reduction="sum") / len(hidden)
        [change] = torch.autograd.grad(part, leaf)
        loss += part.detach()
        dhidden.append(change @ weight)
        dweight.addmm_(change.mT, piece)
    return loss, torch.cat(dhidden), dweight


def fused_chunks(hidden, weight, labels):
    rows = len(hidden)
    losses = []
    dhidden, dweight = [], torch.zeros_like(weight)
    for piece, own in pieces(hidden, labels):
        logits = piece @ weight.mT
        losses.append(torch.empty(len(piece), device=hidden.device))
        both(logits, own, losses[-1], logits, rows)
        dhidden.append(logits @ weight)
        dweight.addmm_(logits.mT, piece)
    return torch.cat(losses).sum() / rows, torch.cat(dhidden), dweight


def linear_library(hidden, weight, labels):
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    options = torch.nn.LinearCrossEntropyOptions()
    loss = F.linear_cross_entropy(*leaves, labels, options=options)
    return loss.detach().float(), *torch.autograd.grad(loss, leaves)


def moved(rows, n, read, write, exponentials=0, instructions=0, blocks=0):
    """Return the cost of a kernel, from the bytes per logit that it moves.

    Args:
        instructions: the number per logit. Each counts as a multiply-add, which is two operations.
    """
    elements = rows * n
    return Cost(
        read=read * elements,
        write=write * elements,
        sfu=exponentials * elements,
        ops={"fp32": 2 * instructions * elements},
        blocks=blocks,
        launches=1,
    )


def issued(n, each, once):
    """Return a thread's instructions per logit: `each` for every step, and `once` for the row."""
    step = in_steps(n)["STEP"]
    return (each * triton.cdiv(n, step) + once) * step / (16 * n)


def exponentials_of(n):
    """Return the exponentials per logit of `log_sum`: two, and one per lane after the last step."""
    return 2 + in_steps(n)["STEP"] / n


def eager_cost(rows, n):
    # Log softmax reads its input for the maximum, the sum and the result. The backward pass reads
    # its inputs for the sum and the result.
    fits = 4 * n * min(rows, TORCH) < L2, 8 * n * min(rows, TORCH) < L2
    forward, backward = 1 if fits[0] else 3, 1 if fits[1] else 2
    return (
        moved(rows, n, read=2, write=4)  # to fp32
        + moved(rows, n, read=4 * forward, write=4, exponentials=1)  # log softmax
        + 2 * Cost(read=16 * rows, launches=1)  # loss
        + moved(rows, n, read=0, write=4)  # zeros
        + Cost(read=8 * rows, write=4 * rows, launches=1)  # gradient of the labels' logarithms
        + moved(rows, n, read=8 * backward, write=4, exponentials=1)  # gradient of log softmax
        + moved(rows, n, read=4, write=2)  # to bf16
    )


def two_kernels_cost(rows, n):
    return (
        moved(rows, n, 2, 0, exponentials_of(n), issued(n, *LOSS), rows)
        + moved(rows, n, 2, 2, 1, issued(n, *GRADIENT), rows)
        + Cost(read=4 * rows, launches=1)
    )


def bytes_read(rows, n):
    """Return bytes per logit that one_kernel reads from DRAM: 2, or 4 if the rows exceed the L2."""
    in_work = 2 * n * min(rows, LANES // min(n, STEP))
    return 2 if in_work < L2 else 4


def one_kernel_cost(rows, n):
    exponentials = exponentials_of(n) + 1
    both = moved(rows, n, bytes_read(rows, n), 2, exponentials, issued(n, *BOTH), rows)
    return both + Cost(read=4 * rows, launches=1)


def clustered_cost(rows, n):
    both = moved(rows, n, 2, 2, 2, CLUSTERED, rows * blocks_of(n))
    return both + Cost(read=4 * rows, launches=1)


def ring_cost(rows, n, instructions=RING):
    return moved(rows, n, 2, 2, 2, instructions) + Cost(read=4 * rows, launches=1)


def pushed_cost(rows, n):
    return ring_cost(rows, n, PUSHED)


def compiled_cost(rows, n):
    """Return the cost of `compiled`. Inductor also computes a row's sums and gradient in a kernel.

    We did not count the instructions of that kernel.
    """
    both = moved(rows, n, bytes_read(rows, n), 2, exponentials=3, blocks=rows)
    return both + Cost(read=4 * rows, launches=1)


def product(m, n, k, added=0):
    """Return the cost of a product of (m, k) and (k, n) in bf16, with `added` matrices added."""
    return Cost(
        read=2 * (m * k + k * n + added * m * n),
        write=2 * m * n,
        ops={"bf16": 2 * m * n * k},
        launches=1,
    )


def products(rows, n, k, loss, added=0):
    """Return the cost of the three products plus the cost of the loss of `rows` rows."""
    return product(rows, n, k) + loss(rows, n) + product(rows, k, n) + product(n, k, rows, added)


def in_chunks(rows, n, k, loss):
    # The gradient of the weight is set to zero once, and each chunk adds to it.
    each = products(rows // CHUNKS, n, k, loss, added=1)
    return Cost(write=2 * n * k, launches=1) + CHUNKS * each


@compare(
    baseline=eager,
    optimized=[
        Variant(compiled, at_least={"sm90": 5.1}),
        Variant(two_kernels, at_least={"sm90": 4.8}),
        Variant(one_kernel, at_least={"sm90": 6.1}),
        Variant(
            clustered,
            when=lambda rows, n: n >= CLASSES[1],
            needs=("clusters", "dsmem"),
            sass=("UCGABAR_WAIT", "LDGSTS.E.BYPASS.128"),
        ),
        Variant(
            ring,
            when=lambda rows, n: n > 2 * CLASSES[1],
            needs=("clusters", "dsmem", "bulk_copy", "shared_227k"),
            sass=("UCGABAR_WAIT", "UBLKCP"),
        ),
        Variant(
            pushed,
            when=lambda rows, n: n > 2 * CLASSES[1],
            needs=("clusters", "dsmem", "bulk_copy", "st_async", "shared_227k"),
            sass=("UBLKCP", "STAS"),
        ),
    ],
    inputs=inputs,
    reference=reference,
    sizes=[{"rows": TOTAL // n, "n": n} for n in CLASSES],
    # Rows begin at multiples of 16 bytes. With 40008 logits, a cluster has at least two blocks. The
    # blocks of a cluster have different numbers of vectors, and so do some of the threads. A
    # cluster of ring gets more of the 9 rows than its shared memory can hold.
    check_sizes=[{"rows": 17, "n": 248}, {"rows": 2, "n": 9000}, {"rows": 9, "n": 40008}],
    work=lambda rows, n: Work(read=2 * rows * n, write=2 * rows * n, terms=n, roundings=4),
    bound="dram",
    costs={
        eager: eager_cost,
        compiled: compiled_cost,
        two_kernels: two_kernels_cost,
        one_kernel: one_kernel_cost,
        clustered: clustered_cost,
        ring: ring_cost,
        pushed: pushed_cost,
    },
    sweep=Sweep("n"),
)
def test_cross_entropy(pair):
    pair.assert_equivalent()
    pair.assert_speedup()


@compare(
    baseline=whole,
    optimized=[
        # Chunks may be slower, because their purpose is to save memory.
        Variant(chunked, at_least="yardstick"),
        Variant(fused_chunks, at_least="yardstick"),
        Variant(
            linear_library,
            precision="bf16",
            at_least="yardstick",
            marks=[
                pytest.mark.skipif(
                    not hasattr(F, "linear_cross_entropy"), reason="needs torch 2.13 or later"
                )
            ],
        ),
    ],
    inputs=linear_inputs,
    reference=linear_reference,
    sizes=[{"rows": 8192, "n": 131072, "k": 2048}],
    check_sizes=[{"rows": 33, "n": 257, "k": 40}],
    work=lambda rows, n, k: Work(
        read=2 * (rows + n) * k,
        write=2 * (rows + n) * k,
        flops={"bf16": 6 * rows * n * k},
        terms=max(rows, n, k),
        roundings=CHUNKS + 4,
    ),
    bound="tensor",
    costs={
        whole: lambda rows, n, k: products(rows, n, k, eager_cost),
        chunked: lambda rows, n, k: in_chunks(rows, n, k, eager_cost),
        fused_chunks: lambda rows, n, k: in_chunks(rows, n, k, one_kernel_cost),
        linear_library: lambda rows, n, k: in_chunks(rows, n, k, eager_cost),
    },
)
def test_linear_cross_entropy(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
    pair.assert_memory(at_most=MOST[pair.variant])
