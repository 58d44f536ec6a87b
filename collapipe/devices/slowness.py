"""How slow devices were measured to be, against their description, and how that is forgotten."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from collapipe.errors import WireError
from collapipe.state import DeviceProfile
from collapipe.tensors import Tensors

_DRIFT = 1.3  # times as fast or as slow as planned: another estimate
_REMEMBERED = 0.9  # of an estimate's logarithm, after a round in which it was not measured
_NOTHING = 1.05  # an estimate that is nearer to 1 than this is forgotten
_MOST = 1e6


@dataclass(frozen=True, slots=True)
class Slowness:
    """Measured over described seconds of a chunk, by the devices' names; 1 for all others.

    A device that holds no block is not measured, so that one busy round could keep it out of all
    later plans. Therefore an estimate that is not renewed returns to 1, by a tenth of its logarithm
    a round: 4 is 2 after seven rounds.
    """

    times: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def unpack(cls, tensors: Tensors, names: Collection[str]) -> Self:
        """What ``pack`` made. Raises ``WireError`` for other devices than those of these names, and
        for what no device's estimate is."""
        for name, tensor in tensors.items():
            fits = name in names and (tensor.dtype, tensor.shape) == (torch.float64, ())
            if not fits or not 1 / _MOST <= float(tensor) <= _MOST:
                raise WireError(
                    f"slowness of {name[:80]!r}: {tensor.dtype} {list(tensor.shape)}; expected one "
                    f"float64 within {1 / _MOST:g} … {_MOST:g} for a device of the unit"
                )
        return cls({name: float(tensor) for name, tensor in tensors.items()})

    def pack(self) -> Tensors:
        """A float64 [] for each device."""
        return {name: torch.tensor(each, dtype=torch.float64) for name, each in self.times.items()}

    def known(self, profiles: Collection[DeviceProfile]) -> tuple[DeviceProfile, ...]:
        """Described devices with the speed that was measured of them."""
        return tuple(
            replace(each, time=each.time.taking(self.times.get(each.name, 1.0)))
            for each in profiles
        )

    def after(self, ratios: Mapping[str, float]) -> Self:
        """After a round in which devices took so many times as long as planned by ``known``."""
        times = {
            name: forgotten
            for name, each in self.times.items()
            if name not in ratios and not _near(forgotten := each**_REMEMBERED, _NOTHING)
        }
        for name, ratio in ratios.items():
            before = self.times.get(name, 1.0)
            if drifted(ratio):
                times[name] = min(max(before * ratio, 1 / _MOST), _MOST)
            elif name in self.times:
                times[name] = before
        return replace(self, times=times)


def drifted(ratio: float) -> bool:
    """Whether measured over planned seconds are so far from 1 that another estimate is needed."""
    return not _near(ratio, _DRIFT)


def _near(ratio: float, factor: float) -> bool:
    return ratio > 0 and abs(math.log(ratio)) <= math.log(factor)
