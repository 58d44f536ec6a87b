"""The wireless world of a run: how devices and channels change from round to round.

It depends on the round's number, not on the clock or on decisions of strategies and units. Runs
with the same seed therefore see the same world under every strategy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from collapipe.errors import ConfigError
from collapipe.state import MOST, MOST_LAW, ClusterState, DeviceProfile, MemoryBudget, admitted

_MOST_LOSS = 1e12  # between the disc's middle and its edge: 120 dB
_MONTH_S = 30 * 24 * 3600.0
Probability = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class Walk:
    """A unit's position and velocity, and its distance at the start; the server is at (0, 0)."""

    x_m: float
    y_m: float
    x_m_per_s: float
    y_m_per_s: float
    start_distance_m: float

    @property
    def distance_m(self) -> float:
        """Distance to the server."""
        return math.hypot(self.x_m, self.y_m)


@dataclass(frozen=True)
class Mobility:
    """A correlated walk around the server of ``round_s`` seconds per round, independent of the
    rounds' real time, and its path loss.

    The Gauss–Markov mobility model: Liang and Haas, "Predictive distance-based mobility management
    for PCS networks", INFOCOM 1999; Camp, Boleng and Davies, "A survey of mobility models for ad
    hoc network research", 2002. Here the mean velocity is 0, and the edge of the disc reflects.

    A round's velocity keeps the share α = ``correlation`` of the previous velocity. The gain is
    proportional to distance^−γ with γ = ``path_loss_exponent``; it is constant below
    ``least_distance_m``.
    """

    speed_m_per_s: Annotated[float, Field(ge=0, le=1e3)]
    correlation: Probability
    round_s: Annotated[float, Field(ge=0, le=_MONTH_S)]
    radius_m: Annotated[float, Field(ge=1, le=1e6)]
    least_distance_m: Annotated[float, Field(ge=1)]
    path_loss_exponent: Annotated[float, Field(ge=0, le=10)]

    def __post_init__(self) -> None:
        if self.least_distance_m > self.radius_m:
            raise ConfigError(
                f"environment.mobility.least_distance_m={self.least_distance_m:g}: must be at most "
                f"radius_m={self.radius_m:g}"
            )
        loss = (self.radius_m / self.least_distance_m) ** self.path_loss_exponent
        if loss > _MOST_LOSS:
            raise ConfigError(
                f"environment.mobility.path_loss_exponent={self.path_loss_exponent:g}: makes "
                f"{10 * math.log10(loss):.0f} dB, at most 120 are possible, between "
                f"least_distance_m={self.least_distance_m:g} and radius_m={self.radius_m:g}"
            )

    def start(self, rng: np.random.Generator) -> Walk:
        """Draw a position uniformly from the disc, and a velocity from its stationary
        distribution."""
        distance, angle = self.radius_m * math.sqrt(rng.random()), math.tau * rng.random()
        x, y = distance * math.cos(angle), distance * math.sin(angle)
        x_speed, y_speed = (self._deviation * rng.standard_normal(2)).tolist()
        return Walk(x, y, x_speed, y_speed, math.hypot(x, y))  # a unit at rest has gain exactly 1

    def step(self, walk: Walk, rng: np.random.Generator) -> Walk:
        """Advance one round: v ← α·v + σ·√(1 − α²)·w with w standard normal, then p ← p + v·t."""
        noise = self._deviation * math.sqrt(1 - self.correlation**2) * rng.standard_normal(2)
        x_speed = self.correlation * walk.x_m_per_s + float(noise[0])
        y_speed = self.correlation * walk.y_m_per_s + float(noise[1])
        x, y = walk.x_m + x_speed * self.round_s, walk.y_m + y_speed * self.round_s
        return self._reflected(Walk(x, y, x_speed, y_speed, walk.start_distance_m))

    def relative_gain(self, walk: Walk) -> float:
        """The path's gain divided by the gain at the walk's start."""
        distances = walk.distance_m, walk.start_distance_m
        now, start = (max(distance, self.least_distance_m) for distance in distances)
        return float((start / now) ** self.path_loss_exponent)

    @property
    def _deviation(self) -> float:
        """σ of each velocity coordinate: the mean speed of two such coordinates is σ·√(π/2)."""
        return self.speed_m_per_s / math.sqrt(math.pi / 2)

    def _reflected(self, walk: Walk) -> Walk:
        """Mirror position and velocity at the disc's edge, so that any step ends inside."""
        distance = walk.distance_m
        if distance <= self.radius_m:
            return walk
        folded = distance % (2 * self.radius_m)
        inside = min(folded, 2 * self.radius_m - folded)
        x, y = walk.x_m / distance, walk.y_m / distance
        outward = walk.x_m_per_s * x + walk.y_m_per_s * y
        turned = 2 * max(outward, 0.0)
        x_speed, y_speed = walk.x_m_per_s - turned * x, walk.y_m_per_s - turned * y
        return Walk(x * inside, y * inside, x_speed, y_speed, walk.start_distance_m)


@dataclass(frozen=True, slots=True)
class DeviceCondition:
    """A device's condition in a round, relative to its profile: the natural logarithm of its speed,
    and its shares of memory and of the energy budget. An absent device holds no block."""

    log_speed: float
    present: bool
    memory_share: float
    energy_share: float


@dataclass(frozen=True, slots=True)
class UnitCondition:
    """A cluster's condition in a round.

    ``devices`` are in the cluster's order, and ``walk`` is the control unit's. ``energy_share`` is
    the available share of the uplink's energy budget. ``gains`` has each channel's gain relative to
    the drawn one (path loss and fading).
    """

    devices: tuple[DeviceCondition, ...]
    walk: Walk
    energy_share: float
    gains: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EnvironmentState:
    """The conditions of N units in a round, in order; the next round's conditions follow from
    them."""

    units: tuple[UnitCondition, ...]


@dataclass(frozen=True)
class Environment:
    """The changes from round to round; ``conf/environment/static.yaml`` explains each field.

    Every round has its own generator and takes the same draws whatever is enabled. Each unit has
    its own stream with devices last, so one unit's report does not change the draws of others.

    The logarithm of a device's speed is a stationary AR(1) process around 0. Shares of memory and
    energy are independent and uniform; unlimited budgets stay unlimited. ``rayleigh`` is block
    fading, independent between rounds. Devices leave and return by a two-state Markov chain; a
    cluster without present devices is not scheduled.
    """

    speed_deviation: Annotated[float, Field(ge=0, le=2)]
    speed_correlation: Probability
    memory_share: tuple[Probability, Probability]
    energy_share: tuple[Probability, Probability]
    fading: Literal["none", "rayleigh"]
    mobility: Mobility
    leave_probability: Probability
    return_probability: Probability

    def __post_init__(self) -> None:
        for option in ("memory_share", "energy_share"):
            least, most = getattr(self, option)
            if least > most:
                raise ConfigError(
                    f"environment.{option}=[{least:g},{most:g}]: must be [least, most]"
                )

    def start(
        self, clusters: Sequence[ClusterState], num_channels: int, rng: np.random.Generator
    ) -> EnvironmentState:
        """Return the state before the first round: all devices are present, and speeds and
        velocities have their stationary distributions."""
        units = [
            self._newcomer(len(cluster.devices), num_channels, stream)
            for cluster, stream in zip(clusters, rng.spawn(len(clusters)), strict=True)
        ]
        return EnvironmentState(tuple(units))

    def step(self, state: EnvironmentState, rng: np.random.Generator) -> EnvironmentState:
        """Return the state of the next round; ``rng`` is that round's generator."""
        streams = rng.spawn(len(state.units))
        return EnvironmentState(tuple(map(self._unit, state.units, streams)))

    def conditions(
        self, state: EnvironmentState, clusters: Sequence[ClusterState]
    ) -> tuple[ClusterState, ...]:
        """Apply ``state`` to the clusters as they were drawn or reported.

        Raises ``ConfigError`` if ``state`` belongs to other units, devices or channels.
        """
        _counted("units", len(clusters), len(state.units))
        pairs = zip(clusters, state.units, strict=True)
        return tuple(_cluster_now(cluster, condition) for cluster, condition in pairs)

    def _newcomer(
        self, num_devices: int, num_channels: int, rng: np.random.Generator
    ) -> UnitCondition:
        walk = self.mobility.start(rng)
        speeds = (self.speed_deviation * rng.standard_normal(num_devices)).tolist()
        devices = tuple(DeviceCondition(log_speed, True, 1.0, 1.0) for log_speed in speeds)
        return UnitCondition(devices, walk, 1.0, (1.0,) * num_channels)

    def _unit(self, unit: UnitCondition, rng: np.random.Generator) -> UnitCondition:
        walk, energy_share = self.mobility.step(unit.walk, rng), rng.uniform(*self.energy_share)
        drawn = rng.standard_exponential(len(unit.gains))  # of mean 1
        faded = drawn if self.fading == "rayleigh" else np.ones(len(unit.gains))
        gains = self.mobility.relative_gain(walk) * faded
        devices = tuple(self._device(device, rng) for device in unit.devices)
        return UnitCondition(devices, walk, energy_share, tuple(gains.tolist()))

    def _device(self, device: DeviceCondition, rng: np.random.Generator) -> DeviceCondition:
        kept = self.speed_correlation
        noise = self.speed_deviation * math.sqrt(1 - kept**2) * rng.standard_normal()
        chance = rng.random()
        stays, returns = chance >= self.leave_probability, chance < self.return_probability
        return DeviceCondition(
            log_speed=kept * device.log_speed + noise,
            present=stays if device.present else returns,
            memory_share=rng.uniform(*self.memory_share),
            energy_share=rng.uniform(*self.energy_share),
        )


def _cluster_now(cluster: ClusterState, condition: UnitCondition) -> ClusterState:
    unit, uplink = f"unit {cluster.unit}", cluster.uplink
    _counted(f"{unit}: devices", len(cluster.devices), len(condition.devices))
    both = zip(cluster.devices, condition.devices, strict=True)
    devices = tuple(_device_now(device, now) for device, now in both)
    if uplink is not None:
        _counted(f"{unit}: gains of channels", len(uplink.gains), len(condition.gains))
        energy_j = admitted(uplink.energy_j * condition.energy_share, MOST)
        pairs = zip(uplink.gains, condition.gains, strict=True)
        gains = tuple(admitted(gain * relative, MOST) for gain, relative in pairs)
        uplink = replace(uplink, energy_j=energy_j, gains=gains)
    return replace(cluster, devices=devices, uplink=uplink)


def _counted(what: str, now: int, in_state: int) -> None:
    if now != in_state:
        raise ConfigError(
            f"{what}: {now} now, {in_state} in the environment's state; set cluster and channel "
            "as they were, or begin a new run"
        )


def _device_now(device: DeviceProfile, now: DeviceCondition) -> DeviceProfile:
    """Return the device under this round's condition. A slower device needs more time per block;
    hops and the energy of a block do not change."""
    speed, time = math.exp(now.log_speed), device.time
    u, v = (admitted(seconds / speed, MOST_LAW) for seconds in (time.u, time.v))
    if not now.present:
        device = device.at_most(0)
    elif device.max_blocks is not None:
        device = device.at_most(math.floor(device.max_blocks * now.memory_share))
    energy, sharing = device.energy, device.sharing
    if energy is not None:
        energy = replace(energy, limit_j=admitted(energy.limit_j * now.energy_share, MOST))
    if sharing is not None:
        memory = sharing.memory and _memory_now(sharing.memory, now)
        sharing = replace(sharing, memory=memory)
    again = device.recomputing
    return replace(
        device,
        time=replace(time, u=u, v=v),
        energy=energy,
        memory=device.memory and _memory_now(device.memory, now),
        sharing=sharing,
        recomputing=again and replace(again, memory=_memory_now(again.memory, now)),
    )


def _memory_now(memory: MemoryBudget, now: DeviceCondition) -> MemoryBudget:
    limit = admitted(memory.limit_bytes * now.memory_share, MOST)
    return replace(memory, limit_bytes=limit)
