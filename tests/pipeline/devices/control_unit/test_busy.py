"""A busy machine does not cause the loss of healthy devices."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from device_cluster import INSECURE, Work, device_name, plan_of
from device_process import device_process

from pipeline.engine import Pipeline
from pipeline.head import LocalHead
from pipeline.phase_timer import PhaseTimer

BUSY, AT_MOST_S = 16, 300  # eight for each core of a small machine
SPIN = f"import time\nend = time.time() + {AT_MOST_S}\nwhile time.time() < end: pass"
NAMES = [device_name(k) for k in range(3)]
PLAN = plan_of(NAMES, (1, 2, 1))


@contextmanager
def busy() -> Iterator[None]:
    """Start processes that compute until the context ends."""
    started = [subprocess.Popen([sys.executable, "-S", "-c", SPIN]) for _ in range(BUSY)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
        for each in started:
            each.wait()


@pytest.mark.faults
def test_no_device_is_lost_while_cores_are_loaded_eightfold() -> None:
    """Several rounds, each with handshakes, steps and copies, have the expected bits."""
    work = Work(steps=5)
    embedding, _, part = work.parts()
    head, expected = LocalHead(part), work.inline(PLAN)
    with ExitStack() as stack:
        started = [stack.enter_context(device_process()) for _ in NAMES]
        with busy():
            for _ in range(2):
                assert work.remote(PLAN, started).equals(expected)
            segments = stack.enter_context(work.segments(PLAN, started, 1, INSECURE))
            m = PLAN.num_micro_batches
            with Pipeline(m, embedding, segments, head, PhaseTimer()) as pipeline:
                assert work._trained(pipeline, head).equals(expected)
            assert (set(segments.lost), segments.events) == (set(), [])
