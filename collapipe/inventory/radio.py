"""The radio of a run, read from an inventory."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from collapipe.errors import ConfigError
from collapipe.inventory.cluster import ANY_COST
from collapipe.inventory.file import Inventory, read_inventory
from collapipe.sections import NotNegative as Amount
from collapipe.sections import Positive
from collapipe.state import Channel, Payload, Uplink


@dataclass(frozen=True)
class InventoryChannel:
    """The file's channels, and for unit n the power, energy and gains of its cluster n's uplink.

    Bits are what the unit really sends, seconds of the head and the downlink those of the options:
    the file's own are for ``plan`` alone.
    """

    file: str  # YAML, see docs/planning.md
    interference_constant_w: Amount  # C of Γ (eq. 28), which the strategies read here
    head_s: Amount  # of a sample in the head on the edge server, forward and backward
    downlink_rate_bps: Positive | None  # at which gradients come down; None: not counted
    model_bits: None = None  # what units really send
    activation_bits: None = None

    def __post_init__(self) -> None:
        if not self._inventory.channels:
            raise ConfigError(
                f"channel=file: {self.file} has no channels; add channels, and an uplink to each "
                "cluster, or take another channel"
            )

    @property
    def num_channels(self) -> int:
        """J."""
        return len(self._inventory.channels)

    @property
    def _inventory(self) -> Inventory:
        return read_inventory(Path(self.file), ANY_COST)

    def draw(self, rng: np.random.Generator) -> tuple[Channel, ...]:
        """The J channels of a run."""
        return self._inventory.channels

    def draw_uplink(
        self,
        model_bits: float,
        activation_bits: float,
        rng: np.random.Generator,
        gradient_bits: float = 0.0,
        num_samples: int = 0,
        payloads: tuple[Payload, ...] = (),
        unit: int = 0,
    ) -> Uplink:
        """A unit's uplink to all channels; as ``ChannelPreset`` has it."""
        uplinks = self._inventory.uplinks
        given = uplinks[unit % len(uplinks)]  # a file for one unit is that of any
        down_s = gradient_bits / self.downlink_rate_bps if self.downlink_rate_bps else 0.0
        limits, bits = (given.max_power_w, given.energy_j), (model_bits, activation_bits)
        return Uplink(*limits, *bits, given.gains, num_samples * self.head_s, down_s, payloads)
