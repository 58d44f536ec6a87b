"""What the C library does with memory that is freed."""

import ctypes
import sys

_SETTINGS = {-3: 2**22, -8: 1}  # M_MMAP_THRESHOLD and M_ARENA_MAX of malloc.h


def return_large_blocks() -> None:
    """Have large tensors go back to the system when they are freed, and threads share a heap.

    glibc keeps up to 32 MB of each such tensor, and a heap for each of gRPC's threads: a process
    that receives and sends blocks of a model grows by several. Others have no such call.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, value in _SETTINGS.items():
            mallopt(parameter, value)
