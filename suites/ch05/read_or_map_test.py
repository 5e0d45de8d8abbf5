"""Read or map: map a table that fits in memory, and index it like a tensor.

Problem    Copy rows of an (n, 256) fp32 table to the GPU. The table is a file, and the input is a
           list of random row numbers. The file was written just before, so all sides read it from
           the page cache.
Baseline   seek: one `seek` and one `read` of a Python file per row. The file's buffer is one row
           long.
Optimized  into: changes `seek`. `os.preadv` reads straight into the row of the result, without a
           `bytes` object.
           mapped: changes `into`. The file is mapped into memory before the timed part. One
           `index_select` copies all rows, so no Python code runs per row, and torch may use several
           threads. Once each page has been touched, no system calls are needed either.
Bound      The host limits `seek` and `into`: each row costs Python code and system calls. Memory
           latency and the copy to the GPU limit `mapped`. The costs count only the copy to the GPU,
           at the rate of pinned memory, because no rate of the host's work was measured. So all
           sides take longer than predicted.
Seen       On an H100 machine, `into` takes almost three quarters of `seek`'s time. So most of the
           host's work remains: a system call and a few lines of Python per row. `mapped` has
           neither, and still takes about seven times as long as predicted. It gathers its rows from
           random places of a large table, and its copy to the GPU starts in memory that is not
           pinned. We did not time the two apart.
Use when   A file fits in the page cache and is often read at random: map it. If the data comes from
           a disk, read larger pieces instead. A mapping waits for one page at a time, and an I/O
           error in a mapping kills the process.
"""

from types import SimpleNamespace

import torch

from pytest_aisp import Cost, Work, compare

from .unnamed_files import bytes_of, path_of, read_into, unnamed

COLUMNS = 256
BYTES = 4 * COLUMNS


def state(device, n, rows):
    return SimpleNamespace(table=torch.randn(n, COLUMNS), device=device)


def inputs(device, n, rows):
    return (torch.randint(n, (rows,)),)


def reference(state, wanted):
    return state.table.double()[wanted].to(state.device)


def seek(state, wanted):
    with unnamed(bytes_of(state.table)) as whole, open(path_of(whole), "rb", BYTES) as file:

        def load():
            joined = bytearray()
            for row in wanted.tolist():
                file.seek(row * BYTES)
                joined += file.read(BYTES)
            return torch.frombuffer(joined, dtype=torch.float32).view(-1, COLUMNS).to(state.device)

        yield load


def into(state, wanted):
    with unnamed(bytes_of(state.table)) as file:

        def load():
            found = torch.empty(len(wanted), COLUMNS)
            rows, descriptor = bytes_of(found), file.fileno()
            for at, row in enumerate(wanted.tolist()):
                read_into(descriptor, rows[at * BYTES : (at + 1) * BYTES], row * BYTES)
            return found.to(state.device)

        yield load


def mapped(state, wanted):
    with unnamed(bytes_of(state.table)) as file:
        size = state.table.numel()
        flat = torch.from_file(path_of(file), shared=False, size=size, dtype=torch.float32)
        table = flat.view(-1, COLUMNS)
        yield lambda: table.index_select(0, wanted).to(state.device)


def copied(n, rows):
    return Cost(h2d=BYTES * rows, launches=1, syncs=1)


@compare(
    baseline=seek,
    optimized=[into, mapped],
    state=state,
    inputs=inputs,
    reference=reference,
    sizes=[{"n": 1 << 18, "rows": 4096}],
    check_sizes=[{"n": 1023, "rows": 33}],
    cpu_sizes=[{"n": 1 << 15, "rows": 512}],
    work=lambda n, rows: Work(wire=BYTES * rows),
    bound="host",
    costs=dict.fromkeys((seek, into, mapped), copied),
    at_least={"cpu": "yardstick"},
)
def test_read_or_map(pair):
    pair.assert_equivalent(exact=True)
    pair.assert_speedup()
