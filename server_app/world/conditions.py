"""What has become of devices and channels, and clusters as these conditions leave them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from collapipe.errors import ConfigError
from collapipe.state import AffineLaw, Channel, ClusterState, DeviceProfile, EnergyBudget, Uplink
from server_app.world.mobility import Walk

T = TypeVar("T")
U = TypeVar("U")
_LEAST, _MOST, _MOST_LAW = 1e-18, 1e18, 1e6  # what collapipe.state admits


@dataclass(frozen=True, slots=True)
class DeviceCondition:
    """A device in a round.

    Attributes
    ----------
    log_speed
        Natural logarithm of its speed, relative to that in its profile.
    present
        False: away, it holds no block.
    memory_share, energy_share
        Of the profile's ``max_blocks`` and of its energy budget.
    """

    log_speed: float
    present: bool
    memory_share: float
    energy_share: float


@dataclass(frozen=True, slots=True)
class UnitCondition:
    """A cluster in a round.

    Attributes
    ----------
    devices
        In the cluster's order.
    walk
        Of the control unit.
    energy_share
        Of the uplink's energy budget.
    gains
        For each channel: relative to the uplink's, path loss and fading together.
    """

    devices: tuple[DeviceCondition, ...]
    walk: Walk
    energy_share: float
    gains: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EnvironmentState:
    """All that a round's world is made of and the next one follows from; N units, in order.

    Plain numbers throughout, so that what is written as JSON and read again is the same.
    """

    units: tuple[UnitCondition, ...]


@dataclass(frozen=True, slots=True)
class RoundConditions:
    """What the scheduler sees in a round: N clusters, in the units' order, and J channels."""

    clusters: tuple[ClusterState, ...]
    channels: tuple[Channel, ...]


def cluster_now(cluster: ClusterState, condition: UnitCondition) -> ClusterState:
    """The cluster as it is in this round.

    Raises ``ConfigError`` where the condition is of other devices, or the uplink of other channels.
    """
    pairs = _paired(f"unit {cluster.unit}: devices", cluster.devices, condition.devices)
    uplink = None if cluster.uplink is None else _uplink(cluster, cluster.uplink, condition)
    devices = tuple(_device(device, now) for device, now in pairs)
    return replace(cluster, devices=devices, uplink=uplink)


def _device(device: DeviceProfile, now: DeviceCondition) -> DeviceProfile:
    """Blocks take longer on a slower device; its hops and the joules of a block stay."""
    speed, time = math.exp(now.log_speed), device.time
    return DeviceProfile(
        device.name,
        AffineLaw(
            _admitted(time.u / speed, _MOST_LAW),
            _admitted(time.v / speed, _MOST_LAW),
            time.w,
            time.ell,
        ),
        _max_blocks(device.max_blocks, now),
        None if device.energy is None else _budget(device.energy, now.energy_share),
    )


def _max_blocks(max_blocks: int | None, now: DeviceCondition) -> int | None:
    if not now.present:
        return 0
    return None if max_blocks is None else math.floor(max_blocks * now.memory_share)


def _budget(energy: EnergyBudget, share: float) -> EnergyBudget:
    return replace(energy, limit_j=_admitted(energy.limit_j * share, _MOST))


def _uplink(cluster: ClusterState, uplink: Uplink, now: UnitCondition) -> Uplink:
    pairs = _paired(f"unit {cluster.unit}: gains of channels", uplink.gains, now.gains)
    gains = tuple(_admitted(gain * relative, _MOST) for gain, relative in pairs)
    energy_j = _admitted(uplink.energy_j * now.energy_share, _MOST)
    return replace(uplink, energy_j=energy_j, gains=gains)


def _paired(what: str, told: Sequence[T], conditions: Sequence[U]) -> Iterator[tuple[T, U]]:
    if len(told) != len(conditions):
        raise ConfigError(
            f"{what}: {len(told)} now, {len(conditions)} in the environment's state; set cluster "
            "and channel as they were, or begin a new run"
        )
    return zip(told, conditions, strict=True)


def _admitted(value: float, most: float) -> float:
    """A unit that tells extremes must not end the run once they are scaled: less than the least
    number that it may tell is 0, and ``most`` is the most."""
    return 0.0 if value < _LEAST else min(value, most)
