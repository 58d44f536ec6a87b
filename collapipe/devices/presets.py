"""Presets that draw clusters' devices, and channels to the server, from ranges.

The options ``cluster`` and ``channel`` choose a preset; the ranges are in ``conf/``.
"""

import math
from abc import abstractmethod
from typing import Annotated, Protocol

import numpy as np
from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic.dataclasses import dataclass

from collapipe.devices.hardware import PhysicalDevice, from_db, from_dbm
from collapipe.errors import ConfigError
from collapipe.sections import Count, Positive
from collapipe.sections import NotNegative as Amount
from collapipe.state import (
    AffineLaw,
    BlockCost,
    Channel,
    DeviceProfile,
    EnergyBudget,
    Payload,
    SharingLaw,
    Uplink,
)
from collapipe.state.limits import MOST_DECIBELS, MOST_DEVICES, MOST_LAW


def _check_ends(value: object, validate: ValidatorFunctionWrapHandler) -> tuple[float, float]:
    ends = validate(value) if isinstance(value, list | tuple) and len(value) == 2 else (1, 0)
    if ends[0] > ends[1]:
        raise ValueError("must be [least, most]")
    return ends


Decibels = Annotated[float, Field(ge=-300, le=300)]
Seconds = Annotated[float, Field(ge=0, le=MOST_LAW)]
_ENDS = WrapValidator(_check_ends)
# Ends of the interval from which a value is drawn uniformly.
Range = Annotated[tuple[Amount, Amount], _ENDS]
PositiveRange = Annotated[tuple[Positive, Positive], _ENDS]
SecondsRange = Annotated[tuple[Seconds, Seconds], _ENDS]
Gain = Annotated[float, Field(ge=-MOST_DECIBELS, le=MOST_DECIBELS)]  # dB
GainRange = Annotated[tuple[Gain, Gain], _ENDS]


class ClusterPreset(Protocol):
    """Draws the devices of clusters."""

    @property
    def num_devices(self) -> int:
        """K, the largest number of devices of a cluster."""

    def draw(
        self, cost: BlockCost, unit: int, rng: np.random.Generator
    ) -> tuple[DeviceProfile, ...]:
        """Return the devices of unit n for blocks of ``cost``; equal generators give equal ones."""

    def control_unit(self, cost: BlockCost, unit: int) -> AffineLaw | None:
        """Return the law of such blocks on the control unit of unit n; None: not counted."""


@dataclass(frozen=True)
class _DrawnCluster:
    """Every unit has ``num_devices`` devices, drawn one after another by ``_device``."""

    num_devices: Annotated[int, Field(ge=1, le=MOST_DEVICES)]

    def draw(
        self, cost: BlockCost, unit: int, rng: np.random.Generator
    ) -> tuple[DeviceProfile, ...]:
        return tuple(self._device(number, cost, rng) for number in range(self.num_devices))

    def _device(self, number: int, cost: BlockCost, rng: np.random.Generator) -> DeviceProfile:
        raise NotImplementedError


@dataclass(frozen=True)
class SyntheticCluster(_DrawnCluster):
    """Devices that have only times, which do not depend on the model."""

    block_s: SecondsRange  # of a block, for each sample
    hop_s: SecondsRange  # of a hop, for each sample
    control_unit_block_s: Seconds | None = None  # of a block, for each sample, on the control unit

    def control_unit(self, cost: BlockCost, unit: int) -> AffineLaw | None:
        block_s = self.control_unit_block_s
        return None if block_s is None else AffineLaw(block_s, 0.0, 0.0, 0.0)

    def _device(self, number: int, cost: BlockCost, rng: np.random.Generator) -> DeviceProfile:
        block_s, hop_s = rng.uniform(*self.block_s), rng.uniform(*self.hop_s)
        return DeviceProfile(f"device-{number}", AffineLaw(block_s, 0.0, hop_s, 0.0))


@dataclass(frozen=True)
class PaperCluster(_DrawnCluster):
    """Devices of the paper's Table II; values that it leaves open reproduce the paper's Fig. 5."""

    relative_speed: PositiveRange  # f_k
    flops_per_s: PositiveRange  # φ_k, of a unit of the relative speed
    forward_flops: Amount  # o_l per sample (eq. 15)
    backward_flops: Amount  # o'_l per micro-batch (eq. 15)
    hop_bits: Amount  # z^s + g^s of a transfer, for any size of micro-batch
    d2d_bandwidth_hz: Positive  # B^dd of eq. 13
    d2d_gain_db: Decibels  # h_dd
    d2d_interference_w: Amount  # I_dd
    d2d_power_w: Range  # p_k
    noise_dbm_per_hz: Decibels  # N_0
    energy_j: Positive  # E_k^max for each micro-batch (C9')
    max_blocks: Annotated[int, Field(ge=0)]  # in a device's memory (C7)
    control_unit_flops_per_s: Positive | None = None

    def control_unit(self, cost: BlockCost, unit: int) -> AffineLaw | None:
        if (speed := self.control_unit_flops_per_s) is None:
            return None
        return AffineLaw(self.forward_flops / speed, self.backward_flops / speed, 0.0, 0.0)

    def _device(self, number: int, cost: BlockCost, rng: np.random.Generator) -> DeviceProfile:
        # Table II gives times and memory directly, independent of a block's cost.
        factor, per_unit = rng.uniform(*self.relative_speed), rng.uniform(*self.flops_per_s)
        power = rng.uniform(*self.d2d_power_w)
        noise = self.d2d_bandwidth_hz * from_dbm(self.noise_dbm_per_hz)
        snr = power * from_db(self.d2d_gain_db) / (self.d2d_interference_w + noise)
        rate_bps = self.d2d_bandwidth_hz * math.log2(1 + snr)
        hop_s = self.hop_bits / rate_bps
        speed = factor * per_unit
        forward_s, backward_s = self.forward_flops / speed, self.backward_flops / speed
        time = AffineLaw(u=forward_s, v=backward_s, w=0.0, ell=hop_s)
        joules = factor**2 / per_unit  # of a FLOP: eq. 16 without its 2
        energy = AffineLaw(
            u=self.forward_flops * joules,
            v=self.backward_flops * joules,
            w=0.0,
            ell=power * hop_s,
        )
        sync_s = 8 * cost.trained_bytes / rate_bps
        return DeviceProfile(
            f"device-{number}",
            time,
            self.max_blocks,
            EnergyBudget(self.energy_j, energy, "micro_batch", sync_j=power * sync_s),
            sharing=SharingLaw(sync_s, self.max_blocks) if sync_s else None,
        )


@dataclass(frozen=True)
class Hardware:
    """A kind of device, described by its data sheet and measurements."""

    name: str
    flops_per_s: Positive
    memory_bytes: Amount
    power_w: Amount
    d2d_rate_bps: Positive


@dataclass(frozen=True)
class HardwareCluster(_DrawnCluster):
    """Devices drawn from ``kinds``; each is busy with other work for part of its time."""

    kinds: Annotated[tuple[Hardware, ...], Field(min_length=1)]
    available: PositiveRange  # share of its speed that training gets
    energy_j: Positive  # of a batch (C9)
    launch_s: Seconds  # of a block, for each micro-batch
    hop_latency_s: Seconds  # of a hop, for each micro-batch
    control_unit_kind: str | None = None  # the name of one of the kinds

    def control_unit(self, cost: BlockCost, unit: int) -> AffineLaw | None:
        """Return the compute law of a control unit. Raises ``ConfigError`` for an unknown kind."""
        if self.control_unit_kind is None:
            return None
        kind = next((each for each in self.kinds if each.name == self.control_unit_kind), None)
        if kind is None:
            raise ConfigError(
                f"cluster.control_unit_kind={self.control_unit_kind}: must be null or one of "
                f"{', '.join(each.name for each in self.kinds)}"
            )
        flops_per_s = kind.flops_per_s * sum(self.available) / 2
        return AffineLaw(cost.flops / flops_per_s, self.launch_s, 0.0, 0.0)

    def _device(self, number: int, cost: BlockCost, rng: np.random.Generator) -> DeviceProfile:
        kind = self.kinds[rng.integers(len(self.kinds))]
        device = PhysicalDevice(
            name=f"{kind.name}-{number}",
            flops_per_s=kind.flops_per_s * rng.uniform(*self.available),
            d2d_rate_bps=kind.d2d_rate_bps,
            memory_bytes=kind.memory_bytes,
            power_w=kind.power_w,
            energy_j=self.energy_j,
            launch_s=self.launch_s,
            hop_latency_s=self.hop_latency_s,
        )
        return device.profile(cost)


@dataclass(frozen=True)
class Radio:
    """A control unit's uplink: the bits that it sends, and the stages after it.

    Bits of None mean the bits that the unit really sends. A unit that sends no activations has no
    ``activation_bits``.
    """

    interference_constant_w: Amount  # C of Γ (eq. 28), which the strategies read here
    head_s: Amount  # of a sample in the head on the edge server, forward and backward
    downlink_rate_bps: Positive | None  # rate of gradients to units; None: not counted
    model_bits: Positive | None = None  # θ_n^enc
    activation_bits: Amount | None = None  # the part of z_n^enc that one local step sends

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
        """Return the uplink of control unit ``unit`` to all channels.

        Bits of activations and gradients are per round, as is the number of samples that pass the
        head on the server.
        """
        down_s = gradient_bits / self.downlink_rate_bps if self.downlink_rate_bps else 0.0
        head_s, bits = num_samples * self.head_s, (model_bits, activation_bits)
        power_w, energy_j, gains = self._sender(unit, rng)
        return Uplink(power_w, energy_j, *bits, gains, head_s, down_s, payloads)

    @abstractmethod
    def _sender(
        self, unit: int, rng: np.random.Generator
    ) -> tuple[float, float, tuple[float, ...]]:
        """Return the unit's largest power in W, its energy in J, and the gain to each channel."""


@dataclass(frozen=True, kw_only=True)
class ChannelPreset(Radio):
    """J uplink channels, and units that differ only in their gains."""

    num_channels: Count
    bandwidth_hz: PositiveRange
    interference_w: Range
    gain_db: GainRange  # h_{n,j} of each unit and channel
    noise_dbm_per_hz: Decibels
    max_power_w: Positive
    energy_j: Positive

    def draw(self, rng: np.random.Generator) -> tuple[Channel, ...]:
        """Draw the J channels of a run."""
        noise = from_dbm(self.noise_dbm_per_hz)
        return tuple(
            Channel(rng.uniform(*self.bandwidth_hz), rng.uniform(*self.interference_w), noise)
            for _ in range(self.num_channels)
        )

    def _sender(
        self, unit: int, rng: np.random.Generator
    ) -> tuple[float, float, tuple[float, ...]]:
        drawn = rng.uniform(*self.gain_db, size=self.num_channels)
        return self.max_power_w, self.energy_j, tuple(from_db(float(gain)) for gain in drawn)
