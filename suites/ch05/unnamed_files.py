"""Files without a name, which the pages of this chapter write and read.

A file exists until the process closes it or ends. So no file is left behind, even after SIGKILL.
The files are in `$TMPDIR` if it is set, and in /tmp if not. Python's `tempfile` would also try
other folders, even the current one. A page that times reading writes its file before the timed
part, so the file is in the page cache.
"""

import errno
import os
import shutil
import tempfile

FOLDER = os.environ.get("TMPDIR") or "/tmp"


def new_file(size):
    """Return a new open file, in a folder that has room for `size` bytes.

    Raises:
        OSError: if the folder has no room, is read-only, or does not exist.
    """
    try:
        if shutil.disk_usage(FOLDER).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return tempfile.TemporaryFile(dir=FOLDER)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write {size:,} bytes to {FOLDER}: {error.strerror}. Set TMPDIR to a"
            " folder that can be written and has room",
        ) from None


def unnamed(data):
    """Return an open file with the bytes `data`."""
    file = new_file(len(data))
    file.write(data)
    file.flush()
    return file


def path_of(file):
    """Return a path by which this process can open `file` a second time."""
    return f"/proc/self/fd/{file.fileno()}"


def bytes_of(tensor):
    """Return a view of the bytes of a tensor on the CPU."""
    return memoryview(tensor.detach().contiguous().numpy()).cast("B")


def read_into(descriptor, view, offset=0):
    """Read from the file at `offset` until `view` is full."""
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise EOFError(f"the file ends at {offset}, {len(view)} bytes too early")
        view, offset = view[count:], offset + count
