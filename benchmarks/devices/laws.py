"""The laws of devices and links, fitted to what the devices measure of their actions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.devices.cluster import Ours
from collapipe.state import AffineLaw, DeviceProfile

SIZES = (4, 8, 16)  # samples of a micro-batch
REPEATED = 3


@dataclass(frozen=True)
class Laws:
    """Of each device; seconds of a sample in the head, and on the way to the first device."""

    devices: tuple[DeviceProfile, ...]
    head_s: float
    first_hop_s: float


def fitted(mine: Ours) -> Laws:
    """From a pipeline of an even split: chunks of whole batches, in which devices are as busy with
    streams as they will be; hops of single micro-batches, that wait for nobody."""
    chunks, hops = list[NDArray[np.float64]](), list[NDArray[np.float64]]()
    for size in SIZES:
        mine.cut(mine.work.batch.num_samples // size)
        mine.run()
        _, began, ended, _ = _actions(mine)
        chunks.append(2 * (ended - began).mean(axis=1))  # as many forwards as backwards
        mine.step()
        mine.cut(1)
        hops.append(np.median([_hops(mine, size) for _ in range(REPEATED)], axis=0))
    devices = []
    for place, segment in enumerate(mine.segments.plan.segments):
        chunk = [each[place] / segment.span.blocks for each in chunks]
        hop = [each[place] for each in hops]
        devices.append(DeviceProfile(segment.device, AffineLaw(*_fit(chunk), *_fit(hop))))
    samples = len(SIZES) * mine.work.batch.num_samples + REPEATED * sum(SIZES)
    return Laws(tuple(devices), mine.timer.seconds["head"] / samples, devices[0].time.w)


def _actions(mine: Ours) -> NDArray[np.float64]:
    """When each action waited, began, ended and had left, [4, devices, actions]."""
    return np.stack([each.numpy().T for each in mine.tables], 1)


def _hops(mine: Ours, samples: int) -> NDArray[np.float64]:
    """Seconds on the way from each device to the next and back, by one clock for all."""
    mine.run(samples)
    mine.step()
    _, began, ended, _ = _actions(mine)
    found = began[1:, 0] - ended[:-1, 0] + began[:-1, 1] - ended[1:, 1]
    return np.append(found, found.mean())  # the head's clock is not asked


def _fit(seconds: Sequence[float]) -> tuple[float, float]:
    """Slope and offset by ``SIZES`` that fit best, relatively; neither is negative."""
    slope, offset = np.polyfit(SIZES, seconds, 1, w=1 / np.asarray(seconds))
    return max(float(slope), 0.0), max(float(offset), 0.0)
