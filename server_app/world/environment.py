"""The wireless world of a run: how devices and channels change from round to round.

It goes by rounds, not by the clock, and nothing that a strategy or a unit does enters it: runs with
the same seed see the same world, whoever decides in them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from collapipe.errors import ConfigError
from collapipe.state import Channel, ClusterState
from server_app.world.conditions import (
    DeviceCondition,
    EnvironmentState,
    RoundConditions,
    UnitCondition,
    cluster_now,
)
from server_app.world.mobility import Mobility, Probability


@dataclass(frozen=True)
class Environment:
    """What changes, and by how much; see ``conf/environment/``.

    Every round takes a generator of its own, and the same draws from it whatever is switched on.
    Each unit has a stream of it for itself, in which devices come last: what one unit tells of its
    cluster changes nothing for the others.

    Attributes
    ----------
    speed_deviation, speed_correlation
        Of the logarithm of a device's speed, a stationary AR(1) process around 0: its standard
        deviation, and its correlation from round to round.
    memory_share, energy_share
        Least and most of what a round leaves of ``max_blocks``, rounded down, and of the energy
        budgets of devices and uplinks; drawn evenly, each by itself. A device whose blocks are not
        limited, or an energy that is not, stays so.
    fading
        ``rayleigh``: block fading. The gain of each unit and channel is multiplied by an
        exponential number of mean 1, independent from round to round. Or ``none``.
    mobility
        How control units walk.
    leave_probability, return_probability
        That a device which is there is away in the next round, and the other way round: a Markov
        chain of two states. A cluster whose devices are all away sits out.
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
        """Before the first round: all devices are there, speeds and velocities are stationary."""
        pairs = zip(clusters, rng.spawn(len(clusters)), strict=True)
        return EnvironmentState(
            tuple(self._newcomer(len(c.devices), num_channels, stream) for c, stream in pairs)
        )

    def step(self, state: EnvironmentState, rng: np.random.Generator) -> EnvironmentState:
        """The next round; ``rng`` is that round's own."""
        pairs = zip(state.units, rng.spawn(len(state.units)), strict=True)
        return EnvironmentState(tuple(self._unit(unit, stream) for unit, stream in pairs))

    def conditions(
        self,
        state: EnvironmentState,
        clusters: Sequence[ClusterState],
        channels: Sequence[Channel],
    ) -> RoundConditions:
        """What ``state`` makes of the clusters as they were drawn or told.

        Raises ``ConfigError`` where ``state`` is that of other clusters or channels.
        """
        if len(state.units) != len(clusters):
            raise ConfigError(
                f"federation.num_units={len(clusters)}: the environment's state is of "
                f"{len(state.units)} units; set it as it was, or begin a new run"
            )
        pairs = zip(clusters, state.units, strict=True)
        clusters_now = tuple(cluster_now(cluster, unit) for cluster, unit in pairs)
        return RoundConditions(clusters_now, tuple(channels))

    def _newcomer(
        self, num_devices: int, num_channels: int, rng: np.random.Generator
    ) -> UnitCondition:
        walk = self.mobility.start(rng)
        speeds = (self.speed_deviation * rng.standard_normal(num_devices)).tolist()
        devices = tuple(DeviceCondition(log_speed, True, 1.0, 1.0) for log_speed in speeds)
        return UnitCondition(devices, walk, 1.0, (1.0,) * num_channels)

    def _unit(self, unit: UnitCondition, rng: np.random.Generator) -> UnitCondition:
        walk, energy_share = self.mobility.step(unit.walk, rng), rng.uniform(*self.energy_share)
        gains = self.mobility.relative_gain(walk) * self._faded(len(unit.gains), rng)
        devices = tuple(self._device(device, rng) for device in unit.devices)
        return UnitCondition(devices, walk, energy_share, tuple(gains.tolist()))

    def _faded(self, num_channels: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Factors of mean 1."""
        drawn = rng.standard_exponential(num_channels)
        return drawn if self.fading == "rayleigh" else np.ones(num_channels)

    def _device(self, device: DeviceCondition, rng: np.random.Generator) -> DeviceCondition:
        kept = self.speed_correlation
        noise = self.speed_deviation * math.sqrt(1 - kept**2) * rng.standard_normal()
        chance = rng.random()
        stays = chance >= self.leave_probability
        returns = chance < self.return_probability
        return DeviceCondition(
            log_speed=kept * device.log_speed + noise,
            present=stays if device.present else returns,
            memory_share=rng.uniform(*self.memory_share),
            energy_share=rng.uniform(*self.energy_share),
        )
