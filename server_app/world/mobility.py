"""Random walks of the control units around the server, and their path loss.

The Gauss–Markov mobility model: Liang and Haas, "Predictive distance-based mobility management for
PCS networks", INFOCOM 1999; Camp, Boleng and Davies, "A survey of mobility models for ad hoc
network research", 2002. Here the mean velocity is 0, and the edge of the disc reflects.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from collapipe.errors import ConfigError

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
    """A correlated walk of ``round_s`` seconds per round, independent of the rounds' real time.

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
