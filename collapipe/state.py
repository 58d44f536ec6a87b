"""What is true now: what a unit tells of itself before a round is planned."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device k that can hold a segment."""

    name: str


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster n: its control unit, its devices and the size of its data.

    Attributes
    ----------
    unit
        Number n of the control unit, its partition of the data.
    devices
        The K devices in the order in which the cluster lists them.
    num_samples
        Rows of the unit's shard, |D_n|.
    """

    unit: int
    devices: tuple[DeviceProfile, ...]
    num_samples: int
