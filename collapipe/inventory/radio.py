"""The channels and uplinks of a run, read from an inventory."""

import functools
from pathlib import Path

import numpy as np
from pydantic.dataclasses import dataclass

from collapipe.devices.presets import Radio
from collapipe.errors import ConfigError
from collapipe.inventory.cluster import ANY_COST
from collapipe.inventory.file import Inventory, read_inventory
from collapipe.state import Channel


@dataclass(frozen=True, kw_only=True)
class InventoryChannel(Radio):
    """The file's channels, and for unit n the power, energy and gains of cluster n's uplink.

    Bits are those that the unit really sends; seconds of the head and the downlink come from the
    options. The file's own values serve ``collapipe plan`` only.
    """

    file: str  # YAML, see docs/reference/inventory.md

    def __post_init__(self) -> None:
        if not self._inventory.channels:
            raise ConfigError(
                f"channel=file: {self.file} has no channels; add channels, and an uplink to each "
                "cluster, or take another channel"
            )

    @property
    def num_channels(self) -> int:
        """J, the number of channels."""
        return len(self._inventory.channels)

    @functools.cached_property
    def _inventory(self) -> Inventory:
        return read_inventory(Path(self.file), ANY_COST)

    def draw(self, rng: np.random.Generator) -> tuple[Channel, ...]:
        """Return the J channels of a run."""
        return self._inventory.channels

    def _sender(
        self, unit: int, rng: np.random.Generator
    ) -> tuple[float, float, tuple[float, ...]]:
        uplinks = self._inventory.uplinks
        given = uplinks[unit % len(uplinks)]  # a file with one cluster serves any unit
        return given.max_power_w, given.energy_j, given.gains
