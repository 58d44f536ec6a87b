"""The clusters, channels and uplinks of a run, read from an inventory."""

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pydantic.dataclasses

from collapipe.devices.hardware import transformer_block_cost
from collapipe.devices.presets import Radio
from collapipe.errors import ConfigError
from collapipe.inventory.file import DescribedCluster, Inventory, read_inventory
from collapipe.state import AffineLaw, BlockCost, Channel, DeviceProfile
from collapipe.wire.device_address import DeviceAddress

# Used to check a file before the model is known.
ANY_COST = transformer_block_cost(512, 2048, 64, 64)


@dataclass(frozen=True)
class InventoryCluster:
    """Clusters read from an inventory: unit n has the devices of the file's cluster n, from 0.

    Further clusters are ignored; with one unit a file of one cluster serves any unit. The law of a
    device with ``flops_per_s`` follows from the run's model and batch. A measured ``chunk`` is not
    changed; ``draw`` raises ``ConfigError`` if it was measured with another model. The
    file's model and batch size serve ``collapipe plan`` only, as do its channels and uplinks unless
    ``channel=file`` is set.
    """

    file: str  # YAML, see docs/reference/inventory.md
    num_units: int  # N, that the file must have clusters for

    def __post_init__(self) -> None:
        self._clusters(ANY_COST)

    @property
    def num_devices(self) -> int:
        """Largest number of devices of one of the N clusters."""
        return max(len(each.devices) for each in self._clusters(ANY_COST))

    def draw(
        self, cost: BlockCost, unit: int, rng: np.random.Generator
    ) -> tuple[DeviceProfile, ...]:
        cluster = self._clusters(cost)[unit % self.num_units]
        if cluster.misfit:
            raise cluster.misfit
        return cluster.profiles

    def control_unit(self, cost: BlockCost, unit: int) -> AffineLaw | None:
        """Return the law of the cluster's ``control_unit`` in the file; None if it has none."""
        return self._clusters(cost)[unit % self.num_units].control_unit

    def _inventory(self, cost: BlockCost) -> Inventory:
        return read_inventory(Path(self.file), cost)

    def _clusters(self, cost: BlockCost) -> tuple[DescribedCluster, ...]:
        """Return the file's first N clusters. Raises ``ConfigError`` if it has fewer."""
        clusters, wanted = self._inventory(cost).clusters, self.num_units
        if len(clusters) < wanted:
            raise ConfigError(
                f"cluster.file={self.file}: has {len(clusters)} of {wanted} clusters, one for each "
                f"unit; add clusters to the file or set federation.num_units={len(clusters)}"
            )
        return clusters[:wanted]


@dataclass(frozen=True)
class DeviceCluster(InventoryCluster):
    """An ``InventoryCluster`` of real devices.

    Each device has an ``address`` and computes the segments that are planned for it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        inventory = self._inventory(ANY_COST)
        for n, cluster in enumerate(inventory.section.clusters[: self.num_units]):
            for k, device in enumerate(cluster.devices):
                if device.address is None:
                    raise inventory.document.error(
                        ("clusters", n, "devices", k, "address"),
                        "is missing; add HOST:PORT of its `collapipe device`, or set "
                        "cluster=file to simulate devices",
                    )

    def roster(self, unit: int) -> tuple[DeviceAddress, ...]:
        """Return the names and addresses of a unit's devices."""
        section = self._inventory(ANY_COST).section.clusters[unit % self.num_units]
        return tuple(DeviceAddress(each.name, str(each.address)) for each in section.devices)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of all devices of the units."""
        return tuple(each.address for unit in range(self.num_units) for each in self.roster(unit))

    @property
    def credentials(self) -> Path | None:
        """Folder of the control unit's credentials; None: no encryption, on loopback only."""
        given = self._inventory(ANY_COST).section.credentials
        return Path(self.file).parent / given if given else None


@pydantic.dataclasses.dataclass(frozen=True, kw_only=True)
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
