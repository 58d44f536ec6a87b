"""Settings of the C library's memory allocator."""

import ctypes
import sys

_SETTINGS = {-3: 2**22, -8: 1}  # M_MMAP_THRESHOLD and M_ARENA_MAX of malloc.h


def return_large_blocks() -> None:
    """Return freed large tensors to the system at once, and let threads share a heap.

    By default glibc keeps up to 32 MB per tensor, and a heap for each of gRPC's threads. So a
    process that sends and receives blocks would grow by the size of several. Other C libraries have
    no such call; then nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, value in _SETTINGS.items():
            mallopt(parameter, value)
