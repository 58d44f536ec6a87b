"""Settings of the C library's memory allocator; only glibc has them."""

import ctypes
import sys

_LARGE, _HEAPS = -3, -8  # M_MMAP_THRESHOLD and M_ARENA_MAX of malloc.h


def share_heap() -> None:
    """Let all threads of this process share a heap; it must not have any thread yet.

    By default glibc gives threads heaps of their own, up to eight per core. What one thread has
    freed stays there: a round's activations when the next round has another thread.
    """
    _set(_HEAPS, 1)


def return_large_blocks(scarce: bool = False) -> None:
    """Return freed tensors of 4 MB and more to the system at once; if memory is ``scarce``, of
    128 KiB and more.

    By default glibc keeps up to 32 MB for each. So a process that sends and receives blocks would
    grow by the size of several. Smaller freed tensors leave gaps between those that stay: measured,
    a segment takes a sixth more memory than its tensors. To return them, too, makes its
    steps up to a quarter longer.
    """
    _set(_LARGE, 2**17 if scarce else 2**22)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(parameter, value)
