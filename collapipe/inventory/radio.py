"""The radio side of an inventory: uplinks, channels, and what a joint round minimises.

Decibels are converted here and nowhere else.
"""

from dataclasses import dataclass, fields
from typing import Literal, cast, get_args

from collapipe.devices.hardware import from_db
from collapipe.inventory.yaml_file import Section
from collapipe.state import Channel, Uplink

Drift = Literal["gamma", "paper"]
Fading = Literal["none", "rayleigh"]

_MOST_DECIBELS = 180.0
_UPLINK_KEYS = ("power_w", "energy_j", "upload_bits", "activation_bits", "gain_db")
_CHANNEL_KEYS = ("bandwidth_hz", "interference_w", "noise_dbm_per_hz")


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """The file's ``round``: what a joint round minimises, and the queues Y_n before it."""

    drift: Drift = "gamma"
    drift_weight: float = 0.1
    kappa: float = 1.0
    interference_constant_w: float = 0.08
    gradient_bound: float = 0.1
    gamma_max: float = 0.84
    fading: Fading = "none"
    queues: tuple[float, ...] = ()


def read_uplink(section: Section, num_channels: int) -> Uplink | None:
    """A cluster's uplink; None without channels. Raises ``ConfigError``."""
    if "uplink" not in section:
        if num_channels:
            raise section.error("uplink", "is missing; with channels every cluster has one")
        return None
    if not num_channels:
        raise section.error("uplink", "there are no channels; add channels, or remove it")
    uplink = section.section("uplink")
    uplink.allow(_UPLINK_KEYS)
    if uplink.number("upload_bits") < 1:
        raise uplink.error("upload_bits", "must be at least 1; these are bits")
    gains = uplink.numbers("gain_db", "channels", num_channels)
    return Uplink(
        max_power_w=uplink.number("power_w"),
        energy_j=uplink.number("energy_j"),
        model_bits=uplink.number("upload_bits"),
        activation_bits=uplink.number_from_0("activation_bits", 0.0),
        gains=tuple(_linear(uplink, "gain_db", gain) for gain in gains),
    )


def read_channel(section: Section) -> Channel:
    """One of the file's channels. Raises ``ConfigError``."""
    section.allow(_CHANNEL_KEYS)
    milliwatts = _linear(section, "noise_dbm_per_hz", section.any_number("noise_dbm_per_hz"))
    return Channel(
        section.number("bandwidth_hz"), section.number("interference_w"), milliwatts / 1e3
    )


def _linear(section: Section, key: str, decibels: float) -> float:
    if abs(decibels) > _MOST_DECIBELS:
        raise section.error(
            key, f"{decibels:g} dB: must lie within {_MOST_DECIBELS:g} dB of 0; are these decibels?"
        )
    return from_db(decibels)


def read_round(root: Section, num_clusters: int, num_channels: int) -> RoundFigures:
    """The file's ``round``, or what holds without one. Raises ``ConfigError``."""
    if "round" not in root:
        return RoundFigures(queues=(0.0,) * num_clusters)
    if not num_channels:
        raise root.error("round", "there are no channels; add channels, or remove it")
    section = root.section("round")
    section.allow(field.name for field in fields(RoundFigures))
    default = RoundFigures()
    return RoundFigures(
        drift=cast(Drift, section.choice("drift", get_args(Drift), default.drift)),
        drift_weight=section.number("drift_weight", default.drift_weight),
        kappa=section.number("kappa", default.kappa),
        interference_constant_w=section.number(
            "interference_constant_w", default.interference_constant_w
        ),
        gradient_bound=section.number("gradient_bound", default.gradient_bound),
        gamma_max=section.number("gamma_max", default.gamma_max),
        fading=cast(Fading, section.choice("fading", get_args(Fading), default.fading)),
        queues=_queues(section, num_clusters),
    )


def _queues(section: Section, num_clusters: int) -> tuple[float, ...]:
    if "queues" not in section:
        return (0.0,) * num_clusters
    return section.numbers_from_0("queues", "clusters", num_clusters)
