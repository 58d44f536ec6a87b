"""Estimates of devices' slowness, measured against their description, and how they decay."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from collapipe.errors import WireError
from collapipe.state import DeviceProfile
from collapipe.tensors import Tensors

_REMEMBERED = 0.9  # factor of an estimate's logarithm for each round without a measurement
_RENEWED = 0.5  # weight of a new measurement, so that one busy round does not move many blocks
_NOTHING = 1.05  # estimates closer to 1 than this factor are dropped
_MOST = 1e6


@dataclass(frozen=True, slots=True)
class Slowness:
    """The ratio of measured to described time of a block, by device name; 1 for other devices.

    A device without blocks is not measured, so one busy round could exclude it from all later
    plans. Therefore an estimate that is not renewed decays to 1, by a tenth of its logarithm per
    round: 4 becomes 2 after seven rounds.
    """

    times: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def unpack(cls, tensors: Tensors, names: Collection[str]) -> Self:
        """Invert ``pack``. Raises ``WireError`` for a device without these names or a bad value."""
        for name, tensor in tensors.items():
            fits = name in names and (tensor.dtype, tensor.shape) == (torch.float64, ())
            if not fits or not 1 / _MOST <= float(tensor) <= _MOST:
                raise WireError(
                    f"slowness of {name[:80]!r}: {tensor.dtype} {list(tensor.shape)}; expected one "
                    f"float64 within {1 / _MOST:g} … {_MOST:g} for a device of the unit"
                )
        return cls({name: float(tensor) for name, tensor in tensors.items()})

    def pack(self) -> Tensors:
        """Return a float64 scalar tensor for each device."""
        return {name: torch.tensor(each, dtype=torch.float64) for name, each in self.times.items()}

    def known(self, profiles: Collection[DeviceProfile]) -> tuple[DeviceProfile, ...]:
        """Return the described devices with their measured speeds."""
        return tuple(
            replace(each, time=each.time.taking(self.times.get(each.name, 1.0)))
            for each in profiles
        )

    def after(self, ratios: Mapping[str, float]) -> Self:
        """Return the estimates after a round.

        ``ratios`` are measured times divided by described ones, by device name. The first one is
        the estimate; later ones change it by half of the logarithm of their difference.
        """
        times = {
            name: forgotten
            for name, each in self.times.items()
            if name not in ratios and not _near(forgotten := each**_REMEMBERED, _NOTHING)
        }
        for name, ratio in ratios.items():
            new = min(max(ratio, 1 / _MOST), _MOST)
            times[name] = new**_RENEWED * self.times.get(name, new) ** (1 - _RENEWED)
        return replace(self, times=times)


def _near(ratio: float, factor: float) -> bool:
    return ratio > 0 and abs(math.log(ratio)) <= math.log(factor)
