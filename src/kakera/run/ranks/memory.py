"""Memory that the processes of a model share: a file without a name, so that nobody can leave it behind. No torch.

Each rank gets its descriptor when it starts and maps it; the kernel frees it with the last of them, however they end.
On Linux it is not in /dev/shm, whose 64 MB a container may have filled.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile

from kakera.errors import KakeraError


def shared_memory(size: int) -> int:
    """A descriptor of `size` bytes of zeros, all of them there: a full machine is an error here, and no signal in the
    middle of a step. Raises KakeraError."""
    try:
        descriptor = _nameless()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.truncate(descriptor, size)
    except OSError as error:
        raise KakeraError(
            f"the ranks need {size / 2**20:.1f} MiB of memory to share, and the machine gives none "
            f"({error.strerror}): close something, or take fewer ranks"
        ) from None
    return descriptor


def _nameless() -> int:
    if sys.platform == "linux":
        return os.memfd_create("kakera-ranks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def mapped(descriptor: int) -> mmap.mmap:
    """All of it, to read and to write."""
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
