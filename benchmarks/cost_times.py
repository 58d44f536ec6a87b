"""Seconds of forward and backward of a segment, predicted from the seconds of one block."""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from cost_segment import Worked

CALIBRATED = (1, 2, 4, 8)  # samples of a micro-batch, on one block
PREDICTED = ((2, 3), (2, 6), (4, 3), (4, 6))  # blocks, samples


@dataclass
class Chunk:
    """A segment, and the seconds of its forward and backward in each repetition."""

    worked: Worked
    samples: int
    seconds: list[tuple[float, float]]

    def run(self) -> None:
        """Time one micro-batch."""
        start = time.perf_counter()
        shape = self.worked.forward(0, self.samples)
        between = time.perf_counter()
        gradient = torch.randn(shape)
        again = time.perf_counter()
        self.worked.backward(0, gradient)
        self.seconds.append((between - start, time.perf_counter() - again))

    def medians(self) -> list[float]:
        """Median seconds of forward and backward, without the first repetition."""
        return [statistics.median(times) for times in zip(*self.seconds[1:], strict=True)]


def chunk_times(name: str, repetitions: int) -> list[dict[str, object]]:
    """A row for each of ``PREDICTED`` and each direction; all cases take turns."""
    segments = {blocks: Worked(name, blocks) for blocks in {1, *(b for b, _ in PREDICTED)}}
    one = [Chunk(segments[1], samples, []) for samples in CALIBRATED]
    others = {sizes: Chunk(segments[sizes[0]], sizes[1], []) for sizes in PREDICTED}
    for _ in range(repetitions + 1):  # the first one warms up
        for chunk in (*one, *others.values()):
            chunk.run()
    rows: list[dict[str, object]] = []
    for direction, phase in enumerate(("forward", "backward")):
        u, v = np.polyfit(CALIBRATED, [chunk.medians()[direction] for chunk in one], 1)
        for (blocks, samples), chunk in others.items():
            predicted, measured = blocks * (u * samples + v), chunk.medians()[direction]
            rows.append(
                {
                    "model": name,
                    "phase": phase,
                    "blocks": blocks,
                    "micro_batch_size": samples,
                    "predicted_s": float(predicted),
                    "measured_s": measured,
                    "ratio": float(predicted / measured),
                }
            )
    return rows
