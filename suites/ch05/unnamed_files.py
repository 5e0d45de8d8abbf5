"""Files without a name, which the pages of this chapter write and read.

A file exists until the process closes it or ends, however it ends. So nothing is left behind, even
after SIGKILL. The files lie where Python's `tempfile` puts its files: in `$TMPDIR`, or else in
/tmp. A page writes a file before its timed part, so reads find it in the page cache.
"""

import os
import tempfile


def unnamed(data):
    """Return an open file with the bytes `data`."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(data)
    file.flush()
    return file


def path_of(file):
    """Return a path at which this process can open `file` once more."""
    return f"/proc/self/fd/{file.fileno()}"


def bytes_of(tensor):
    """Return a view of the bytes of a tensor on the CPU."""
    return memoryview(tensor.detach().contiguous().numpy()).cast("B")


def read_into(descriptor, view, offset=0):
    """Fill `view` with the bytes of a file from `offset` on."""
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise EOFError(f"the file ends at {offset}, {len(view)} bytes too early")
        view, offset = view[count:], offset + count
