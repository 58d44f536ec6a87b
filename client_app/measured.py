"""A cluster's state with the laws that its devices showed, in place of the modelled ones."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from collapipe.state import ClusterState, DeviceProfile
from collapipe.tensors import Tensors
from pipeline.profile import ChunkTime, Moments, add_up, fit


def with_measured_laws(
    state: ClusterState, kept: Tensors, chunks: Iterable[ChunkTime]
) -> tuple[ClusterState, Tensors]:
    """The state after these chunks, and what to keep for those to come.

    Parameters
    ----------
    kept
        From the last time, device → its moments; empty at first. A device that never held a block
        keeps its modelled law.
    """
    before = {device: _moments(sums) for device, sums in kept.items()}
    moments = add_up(before, chunks)

    def measured(device: DeviceProfile) -> DeviceProfile:
        if device.name not in moments:
            return device
        return replace(device, time=fit(moments[device.name], device.time).law)

    known = replace(state, devices=tuple(map(measured, state.devices)))
    return known, {device: _sums(each) for device, each in moments.items()}


def _sums(moments: Moments) -> Tensor:
    values = [moments.count, *moments.xx, *moments.xt, moments.tt]
    return torch.tensor(values, dtype=torch.float64)


def _moments(sums: Tensor) -> Moments:
    count, a, b, c, d, e, tt = sums.tolist()
    return Moments(int(count), (a, b, c), (d, e), tt)
