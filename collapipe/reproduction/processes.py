"""A figure's seeds side by side; a process of its own for each imports no more than it computes."""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def of_seeds(compute: Callable[[int], T], seeds: Sequence[int], processes: int) -> list[T]:
    """``compute`` of each seed, in this process or in others, which Ctrl-C ends too."""
    if processes == 1 or len(seeds) == 1:
        return [compute(seed) for seed in seeds]
    with multiprocessing.get_context("spawn").Pool(processes, _deaf_to_ctrl_c) as pool:
        return pool.map(compute, seeds, chunksize=1)


def _deaf_to_ctrl_c() -> None:
    """Whoever started this process ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
