"""Asynchronous checkpoint: let a thread write while the next steps run.

Problem    Take nine steps of SGD on an fp32 model of linear layers. The batches are the input.
           After steps 3 and 6, save the weights to a new file. Each side returns the losses, the
           final weights, and the tensors of the files, mapped into memory. So the check also
           compares what was written.
Baseline   blocking: `torch.save` of the weights, before the next step starts.
Optimized  staged: changes `blocking`. The weights are first copied into pinned memory that is
           reused.
           threaded: changes `staged`. `torch.save` runs in a thread during the next steps. The loop
           waits for the copy into pinned memory. Before the loop reuses this memory, it waits until
           the previous file has been written.
Bound      The host limits `blocking` and `staged`: the GPU is idle while a file is written. The
           steps limit `threaded`, unless writing a file takes longer than the steps between two
           files. The costs count the steps and the copies from the GPU. The costs leave out the
           writing, because its rate was not measured. So `blocking` and `staged` take longer than
           predicted.
Seen       On an H200 machine, `blocking` and `staged` take about three times as long as predicted,
           and `threaded` more than twice as long, because the costs leave out the writing. `staged`
           gains almost nothing, as predicted: its copies take little time compared with the
           writing. `threaded` hides six steps behind the two writes, because each write takes
           longer than three steps. It saves about a quarter more than the predicted time of six
           steps, so a step probably takes longer than predicted. The gain of `threaded` differs
           between processes. More steps between two files would hide more of each write. We did not
           time a write or a step alone.
Use when   Writing a checkpoint takes a noticeable time, and host memory has room for a second copy
           of the weights. On a CPU, the thread takes cores from the steps. Write to a temporary
           name, and rename the file when it is complete. Then the last complete file remains if the
           process is killed.
"""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from pytest_aisp import Cost, Variant, Work, compare

from .unnamed_files import new_file, path_of

STEPS, EVERY, CLASSES, RATE = 9, 3, 16, 0.05


def state(device, layers, width, batch):
    hidden = (
        part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.GELU())
    )
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(width, CLASSES)).to(device)
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), RATE))


def inputs(device, layers, width, batch):
    images = torch.randn(STEPS, batch, width, device=device)
    return images, torch.randint(CLASSES, (STEPS, batch), device=device)


def train(state, images, labels, save):
    """Return the losses of all steps. After some of the steps, call `save` with the weights."""
    losses = []
    for step, (x, y) in enumerate(zip(images, labels, strict=True), 1):
        loss = F.cross_entropy(state.model(x), y)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        losses.append(loss.detach())
        if step % EVERY == 0 and step < STEPS:
            save({name: weight.detach() for name, weight in state.model.named_parameters()})
    return torch.stack(losses)


def reference(state, images, labels):
    state.model.double()
    copies = []

    def keep(weights):
        copies.append({name: weight.clone().cpu() for name, weight in weights.items()})

    return train(state, images.double(), labels, keep), copies


def written(weights):
    """Save `weights` to a new file, and return the tensors of the file by name, mapped into
    memory."""
    with new_file(sum(weight.nbytes for weight in weights.values())) as file:
        torch.save(weights, path_of(file))
        return torch.load(path_of(file), map_location="cpu", mmap=True)


def pinned_like(model):
    """Return pinned CPU tensors shaped like the weights of `model`, by name."""
    return {
        name: torch.empty_like(weight, device="cpu", requires_grad=False, pin_memory=weight.is_cuda)
        for name, weight in model.named_parameters()
    }


def stage(buffers, weights):
    """Copy `weights` into `buffers`, and wait until the copies have ended."""
    for name, weight in weights.items():
        buffers[name].copy_(weight, non_blocking=True)
    if weight.is_cuda:
        torch.cuda.current_stream().synchronize()


def blocking(state, images, labels):
    files = []
    losses = train(state, images, labels, lambda weights: files.append(written(weights)))
    return losses, files


def staged(state, images, labels):
    buffers = pinned_like(state.model)

    def loop():
        files = []

        def save(weights):
            stage(buffers, weights)
            files.append(written(buffers))

        return train(state, images, labels, save), files

    yield loop


def threaded(state, images, labels):
    buffers = pinned_like(state.model)

    def loop():
        writes = []

        def save(weights):
            if writes:
                writes[-1].result()  # now the thread has read the buffers
            stage(buffers, weights)
            writes.append(writer.submit(written, buffers))

        with ThreadPoolExecutor(1) as writer:
            losses = train(state, images, labels, save)
            return losses, [write.result() for write in writes]

    yield loop


def weights_of(layers, width):
    return layers * width * (width + 1) + (width + 1) * CLASSES


def flops(layers, width, batch):
    # The gradient of the images is not computed.
    products = 3 * (layers * width * width + width * CLASSES) - width * width
    return 2 * STEPS * batch * products


def loop_cost(layers, width, batch, staged=False):
    tensors = 2 * (layers + 1)
    steps = Cost(
        ops={"fp32": flops(layers, width, batch) / STEPS},
        launches=5 * (layers + 1) + layers + 6,
    )
    saved = 4 * weights_of(layers, width)
    save = Cost(d2h=saved, launches=tensors, syncs=1)
    if not staged:  # the host waits for each tensor
        save += Cost(syncs=tensors - 1)
    between = EVERY * steps
    return between + save + between + save + between + Cost(launches=1)


def staged_cost(layers, width, batch):
    return loop_cost(layers, width, batch, staged=True)


@compare(
    baseline=blocking,
    optimized=[Variant(staged, at_least={"sm90": "neutral", "cpu": "yardstick"}), threaded],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"layers": 2, "width": 1024, "batch": 8192}],
    check_sizes=[{"layers": 1, "width": 33, "batch": 17}],
    cpu_sizes=[{"layers": 2, "width": 192, "batch": 32}],
    work=lambda layers, width, batch: Work(
        wire=2 * 4 * weights_of(layers, width),
        flops={"fp32": flops(layers, width, batch)},
        terms=max(width, batch),
        roundings=8 * STEPS,
    ),
    bound="host",
    costs={blocking: loop_cost, staged: staged_cost, threaded: staged_cost},
    at_least={"cpu": "yardstick"},
)
def test_async_checkpoint(pair):
    pair.assert_equivalent()
    pair.assert_speedup()
