"""A unit's state before a round is planned: devices, uplink and estimates, in SI units."""

import math
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, replace
from numbers import Integral, Real
from typing import Literal

from collapipe.errors import ConfigError, is_printable, unit_called
from collapipe.step_law import StepLaw
from collapipe.validation import nearest

_MOST_DEVICES = 128  # of a cluster, so that no unit can make planning endless
MOST, MOST_LAW = 1e18, 1e6
ROUNDING = 1e-12  # of a limit for exactly n blocks or rows, which must not lose one by rounding
_MOST_NAME = 64  # characters of a device's name, which is printed
_MOST_ERROR = 1.0  # relative, of a gradient: the error of sending nothing

Precision = Literal["float32", "bfloat16", "int8", "int6", "int4"]
"""Precision of a sent tensor, see ``collapipe.wire.compression``; float32 keeps its own dtype."""
HopPrecision = Literal["float32", "bfloat16", "int8"]
"""Precision between stages."""
EnergyScope = Literal["batch", "micro_batch"]
HeadPlace = Literal["server", "control_unit"]
"""Where a unit's head trains."""


@dataclass(frozen=True, slots=True)
class AffineLaw:
    """An amount that a device spends on one micro-batch, forward and backward together.

    amount(δ, b̂) = δ·(u·b̂ + v) + (w·b̂ + ell), for δ blocks and b̂ samples. As a time in seconds, the
    term with δ is the compute C and the rest the hop H to the next device (eq. 15: u = o/F,
    v = o'/F, w = 0, ell = τ^dd). As an energy in joules, it is eq. 16.
    """

    u: float
    v: float
    w: float
    ell: float

    def __post_init__(self) -> None:
        _check_within(self, ("u", "v", "w", "ell"), MOST_LAW)

    def compute(self, blocks: int, micro_batch_size: float) -> float:
        """Return C = δ·(u·b̂ + v)."""
        return blocks * (self.u * micro_batch_size + self.v)

    def hop(self, micro_batch_size: float) -> float:
        """Return H = w·b̂ + ℓ."""
        return self.w * micro_batch_size + self.ell

    def chunk(self, blocks: int, micro_batch_size: float) -> float:
        """Return C + H."""
        return self.compute(blocks, micro_batch_size) + self.hop(micro_batch_size)

    def taking(self, times: float, sent: float = 1.0) -> "AffineLaw":
        """Return the law with computes multiplied by ``times`` and hop bits by ``sent``."""
        u, v, w = (
            admitted(each, MOST_LAW) for each in (self.u * times, self.v * times, self.w * sent)
        )
        return replace(self, u=u, v=v, w=w)


@dataclass(frozen=True, slots=True)
class EnergyBudget:
    """Energy limit of a device (E_k^max, C9); ``law`` gives the joules of one micro-batch.

    ``links`` give the joules of some of the device's links, whose hops take others than usual ones.
    The limit applies to all m micro-batches of a batch and the adding of gradients together or,
    with scope ``micro_batch``, to each micro-batch, as the paper prints C9'.
    """

    limit_j: float
    law: AffineLaw
    scope: EnergyScope = "batch"
    links: tuple["Link", ...] = ()
    sync_j: float = 0.0  # of sending what trains in a block over the usual hop, see ``SharingLaw``

    def __post_init__(self) -> None:
        _check_within(self, ("limit_j", "sync_j"))


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory limit of a device (C7) if memory depends on the size of a micro-batch.

    bytes(δ, b̂) = segment_bytes + δ·(block_bytes + sample_bytes·⌈b̂⌉), for δ blocks and b̂ samples;
    the largest micro-batch has ⌈b̂⌉ samples. ``segment_bytes`` and ``block_bytes`` include what is
    kept for all rows of a batch. A device keeps this only for the micro-batches that are under way
    in its schedule, and of a shared stage for its own rows. A shared stage adds
    ``received_gradients``.
    """

    limit_bytes: float
    segment_bytes: float
    block_bytes: float
    sample_bytes: float
    batch_segment_bytes: float = 0.0  # of ``segment_bytes``, for all rows of a batch
    batch_block_bytes: float = 0.0  # of ``block_bytes``, likewise
    trained_bytes: float = 0.0  # of a block's gradients

    def __post_init__(self) -> None:
        own = "limit_bytes", "segment_bytes", "block_bytes", "sample_bytes"
        _check_within(self, (*own, "batch_segment_bytes", "batch_block_bytes", "trained_bytes"))
        for name in ("segment_bytes", "block_bytes"):
            whole, part = getattr(self, name), getattr(self, f"batch_{name}")
            if part > whole:
                raise ConfigError(f"MemoryBudget: batch_{name}={part} is more than {name}={whole}")

    def blocks(self, micro_batch_size: float, most: int, kept: float = 1.0) -> int:
        """Return how many blocks fit, at most ``most``, if the tensors of ``kept`` of a batch's
        rows are kept at the same time."""
        limit = self.limit_bytes * (1 + ROUNDING)
        left = limit - (self.segment_bytes - (1 - kept) * self.batch_segment_bytes)
        if left < 0:
            return 0
        each = self.block_bytes - (1 - kept) * self.batch_block_bytes
        each += self.sample_bytes * math.ceil(micro_batch_size)
        return most if left >= most * each else math.floor(left / each)


@dataclass(frozen=True, slots=True)
class SharingLaw:
    """What limits and delays a device that holds whole rows of a stage that others share.

    After a batch the g devices of a stage add their gradients in a ring, which takes
    2·(g − 1)/g·δ·``sync_s`` seconds for δ blocks and the largest ``sync_s`` among them.
    """

    sync_s: float  # seconds in which the device sends what trains in a block
    max_blocks: int | None = None  # its owner's limit; None: any number
    memory: MemoryBudget | None = None  # None: no limit

    def __post_init__(self) -> None:
        _check_within(self, ("sync_s",))
        _check_count("SharingLaw: max_blocks", self.max_blocks or 0)


def received_gradients(
    blocks: int, part: float, members: int, own: int = 1, others: int | None = None
) -> float:
    """Return how many blocks' gradients a device with ``part`` of the rows has at most beyond one
    set: (g - 1)·min(δ, (δ + g - 1)·part) from the other members of a stage.

    Each other member sends those of the blocks that the device leads. The second bound holds for
    all divisions of leaders in proportion to rows by D'Hondt's method, see ``plan.leaders``. With
    several ``own`` shares after a loss it has a set of each, and receives those of ``others``.
    """
    received = members - 1 if others is None else others
    led = min(float(blocks), (blocks + members - 1) * part)
    return (own - 1) * blocks + received * led


def ring_s(laws: Sequence[SharingLaw | None], blocks: int) -> float:
    """Return the seconds in which devices with these laws add the gradients of ``blocks`` blocks in
    a ring; 0 for a device alone."""
    slowest = max((law.sync_s for law in laws if law is not None), default=0.0)
    return 2 * (len(laws) - 1) / len(laws) * blocks * slowest


@dataclass(frozen=True, slots=True)
class Recomputing:
    """What differs on a device that keeps only the inputs of its blocks, and computes their forward
    pass again before backward."""

    times: float  # factor of a block's compute, 1 to 2
    memory: MemoryBudget

    def __post_init__(self) -> None:
        if not 1 <= self.times <= 2:
            raise ConfigError(
                f"Recomputing: times={self.times}; forward is computed once more, 1 … 2"
            )


@dataclass(frozen=True, slots=True)
class Link:
    """A device's hop to another one, if it differs from its usual hop: it takes w·b̂ + ell seconds
    for b̂ samples."""

    to: str  # the other device's name
    w: float
    ell: float
    sync_s: float | None = None  # see ``SharingLaw``; None: the device's own

    def __post_init__(self) -> None:
        _check_within(self, ("w", "ell"), MOST_LAW)
        _check_within(self, ("sync_s",) if self.sync_s is not None else ())


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device k that can hold a segment."""

    name: str  # at most 64 printable characters
    time: AffineLaw  # its chunk law, in seconds
    max_blocks: int | None = None  # limit of its memory (C7); None: any number
    energy: EnergyBudget | None = None  # None: unlimited
    memory: MemoryBudget | None = None  # applies in addition to ``max_blocks``; None: no limit
    sharing: SharingLaw | None = None  # None: it shares no stage
    recomputing: Recomputing | None = None  # None: the planner does not choose it
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if len(self.name) > _MOST_NAME or not is_printable(self.name):
            raise ConfigError(
                f"device {self.name[:_MOST_NAME]!r}: a name has at most {_MOST_NAME} characters, "
                "all printable"
            )
        if not isinstance(self.time, AffineLaw):
            raise ConfigError(f"device {self.name}: time={self.time} must be an AffineLaw")
        _check_count(f"device {self.name}: max_blocks", self.max_blocks or 0)
        others = {each.to for each in self.links} - {self.name}
        if not len(self.links) == len(others) < _MOST_DEVICES:
            raise ConfigError(f"device {self.name}: needs at most one link to each other device")
        joules = self.energy.links if self.energy else ()
        if len(joules) > len(others & {each.to for each in joules}):
            raise ConfigError(f"device {self.name}: each of energy.links needs one of its links")
        if self.recomputing and not self._may_recompute(self.recomputing.memory):
            raise ConfigError(f"device {self.name}: recomputing needs memory of the same device")

    def taking(self, times: float, sent: float) -> "DeviceProfile":
        """Return the profile with block times multiplied by ``times`` and hop bits by ``sent``;
        energy scales likewise."""
        links, joules = (
            tuple(replace(each, w=admitted(each.w * sent, MOST_LAW)) for each in links)
            for links in (self.links, self.energy.links if self.energy else ())
        )
        energy = self.energy and replace(
            self.energy, law=self.energy.law.taking(times, sent), links=joules
        )
        return replace(self, time=self.time.taking(times, sent), energy=energy, links=links)

    def time_to(self, names: Collection[str]) -> AffineLaw:
        """Return its time if it sends to devices of these ``names``, with the largest w and ℓ of
        the links to them. Without names it sends to the control unit."""
        return _over(self.links, names, self.time)

    def before(self, names: Collection[str], members: Collection[str] = ()) -> "DeviceProfile":
        """Return the profile without links, with the time and joules of hops to these ``names`` and
        the sync of a stage that it shares with the devices ``members``."""
        if not self.links:
            return self
        energy, sharing = self.energy, self.sharing
        if energy:
            law = _over(energy.links, names, energy.law)
            energy = replace(energy, law=law, links=())
        if sharing:
            syncs = (self._sync_with(name, sharing) for name in members if name != self.name)
            sharing = replace(sharing, sync_s=max(syncs, default=sharing.sync_s))
        time = self.time_to(names)
        return replace(self, time=time, energy=energy, sharing=sharing, links=())

    def _sync_with(self, name: str, law: SharingLaw) -> float:
        own = (link.sync_s for link in self.links if link.to == name)
        return next((each for each in own if each is not None), law.sync_s)

    def _may_recompute(self, other: MemoryBudget) -> bool:
        """Whether ``other`` may be its memory if it recomputes."""
        own = self.memory
        return (
            own is not None
            and own.limit_bytes == other.limit_bytes
            and (self.sharing is None or self.sharing.memory == own)
        )

    def or_recomputing(self, times: float, smaller: "DeviceProfile") -> "DeviceProfile":
        """Return the profile with the choice to recompute, which takes ``times`` as long and has
        the memory of ``smaller``. Without a limit of memory there is no reason to."""
        if self.memory is None or smaller.memory is None:
            return self
        return replace(self, recomputing=Recomputing(times, smaller.memory))

    def in_mode(self, recomputes: bool) -> "DeviceProfile":
        """Return the profile of the device if it ``recomputes`` or not, without that choice."""
        own, sharing = self.recomputing, self.sharing
        if own is None or not recomputes:
            return replace(self, recomputing=None) if own else self
        sharing = sharing and replace(sharing, memory=own.memory)
        slower = self.taking(own.times, 1.0)
        return replace(slower, memory=own.memory, sharing=sharing, recomputing=None)

    def memory_cap(self, micro_batch_size: float, num_blocks: int, kept: float = 1.0) -> int:
        """Return how many of ``num_blocks`` fit its memory with micro-batches of that size (C7), if
        the tensors of ``kept`` of a batch's rows are kept at the same time."""
        most = num_blocks if self.max_blocks is None else min(self.max_blocks, num_blocks)
        return most if self.memory is None else self.memory.blocks(micro_batch_size, most, kept)


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The cost of one encoder block on a device."""

    forward_flops: float  # o_l, per sample
    backward_flops: float  # o'_l, per sample
    activation_bits: float  # z^s, per sample and hop
    gradient_bits: float  # g^s, per sample and hop
    block_bytes: float  # γ_0: weights, gradients, optimiser state and tensors saved for backward
    sample_bytes: float = 0.0  # tensors saved for backward of the current micro-batch, per sample
    segment_bytes: float = 0.0  # of any number of blocks: kept inputs, a weight once more
    batch_block_bytes: float = 0.0  # of ``block_bytes``, for all samples of a batch
    batch_segment_bytes: float = 0.0  # of ``segment_bytes``, likewise
    trained_bytes: float = 0.0  # of a block's gradients; 0: not known

    def segment_needs(
        self,
        blocks: int,
        samples: float,
        kept: float = 1.0,
        part: float = 1.0,
        gradients: float = 0.0,
    ) -> float:
        """Return the bytes of a segment (C7) on a device that has ``part`` of its rows.

        A micro-batch has ``samples`` samples. Tensors of ``kept`` of the device's rows of a batch
        are kept at the same time. ``gradients`` counts blocks' gradients beyond one set.
        """
        others = 1 - part * kept
        each = self.block_bytes + self.sample_bytes * samples * part
        needed = self.segment_bytes - others * self.batch_segment_bytes
        needed += blocks * (each - others * self.batch_block_bytes)
        return needed + gradients * self.trained_bytes

    @property
    def flops(self) -> float:
        """FLOPs of both passes, per sample."""
        return self.forward_flops + self.backward_flops

    @property
    def hop_bits(self) -> float:
        """Bits of activations and gradients, per sample and hop."""
        return self.activation_bits + self.gradient_bits

    @property
    def forward_share(self) -> float:
        """Forward's fraction of a block's FLOPs."""
        return self.forward_flops / self.flops


@dataclass(frozen=True, slots=True)
class Payload:
    """The bits that a unit sends in a round with these precisions and this place of the head."""

    activation: Precision
    upload: Precision
    model_bits: float
    activation_bits: float
    gradient_error: float  # ρ = E‖Δg‖²/φ², the gradient's relative rounding error
    head: HeadPlace | None = None  # None: the configuration sets the place

    def __post_init__(self) -> None:
        _check_within(self, ("model_bits", "activation_bits"))
        _check_within(self, ("gradient_error",), _MOST_ERROR)
        if self.head == "control_unit" and self.activation_bits:
            raise ConfigError(
                f"Payload: {self.activation_bits} bits of activations, though the head is on the "
                "control unit; expected 0"
            )

    @property
    def choice(self) -> tuple[Precision, Precision, HeadPlace | None]:
        """The decisions that identify the payload among a unit's payloads."""
        return self.activation, self.upload, self.head

    @property
    def bits(self) -> tuple[float, float]:
        """Bits of the model and of activations."""
        return self.model_bits, self.activation_bits


@dataclass(frozen=True, slots=True)
class Uplink:
    """A control unit's uplink to the edge server.

    With ``payloads`` the scheduler chooses one; ``model_bits`` and ``activation_bits`` equal the
    first payload's, which is exact. Without ``payloads`` there is no choice.
    """

    max_power_w: float  # P_n^max
    energy_j: float  # E_n^max, for sending everything, or only ``model_bits`` (C8)
    model_bits: float  # θ_n^enc: the tunable parameters, sent once a round
    activation_bits: float  # z_n^enc: activations and targets of all local steps of a round
    gains: tuple[float, ...]  # h_{n,j}, linear, for each channel j
    head_s: float = 0.0  # seconds in the head for all local steps of a round
    gradient_s: float = 0.0  # seconds to send their gradients down; 0: not counted
    payloads: tuple[Payload, ...] = ()
    # ``head_s`` for payloads with the head on the control unit
    control_unit_head_s: float = 0.0

    def payload(
        self, activation: str | None, upload: str | None, head: str | None
    ) -> Payload | None:
        """Return the payload with these choices; None without a choice or a match."""
        chosen = activation, upload, head
        return next((each for each in self.payloads if each.choice == chosen), None)

    def sending(self, payload: Payload | None) -> "Uplink":
        """Return the uplink with the sizes of ``payload``; None keeps the default payload."""
        if payload is None:
            return self
        model_bits, activation_bits = payload.bits
        sent = replace(self, model_bits=model_bits, activation_bits=activation_bits, payloads=())
        return sent.placed(payload.head)

    def placed(self, place: HeadPlace | None) -> "Uplink":
        """Return the uplink with the times of a head in this place."""
        if place != "control_unit":
            return self
        return replace(self, head_s=self.control_unit_head_s, gradient_s=0.0)

    @property
    def activation_share(self) -> float:
        """Fraction of an upload's bits, and so of its time, for activations; 0 without bits."""
        bits = self.activation_bits + self.model_bits
        return self.activation_bits / bits if bits else 0.0

    def __post_init__(self) -> None:
        times = "head_s", "gradient_s", "control_unit_head_s"
        amounts = "model_bits", "activation_bits"
        _check_within(self, ("max_power_w", "energy_j", *amounts, *times))
        sent = (self.model_bits, self.activation_bits), *(each.bits for each in self.payloads)
        if not (self.max_power_w or all(map(any, sent))):
            raise ConfigError("Uplink: needs max_power_w above 0, or bits to send in each payload")
        for gain in self.gains:
            if not (gain == 0 or 1 / MOST <= gain <= MOST):
                raise ConfigError(
                    f"Uplink: gain={gain} must be 0, or within {1 / MOST:g} … {MOST:g}"
                )
        if len({each.choice for each in self.payloads}) < len(self.payloads):
            raise ConfigError("Uplink: two payloads have the same precisions and head; remove one")


@dataclass(frozen=True, slots=True)
class Channel:
    """An uplink channel j: B_j, I_j and N_0."""

    bandwidth_hz: float
    interference_w: float
    noise_w_per_hz: float

    def __post_init__(self) -> None:
        if not (self.bandwidth_hz and all(0 <= each < math.inf for each in astuple(self))):
            raise ConfigError(f"{self}: must be finite and not negative, and bandwidth_hz above 0")


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster n: its control unit, its devices and the size of its data."""

    unit: int  # n, also its partition of the data
    devices: tuple[DeviceProfile, ...]  # the K devices as the cluster lists them
    num_samples: int  # rows of the unit's shard, |D_n|
    uplink: Uplink | None = None  # None: not modelled, for strategies without channels
    real_devices: bool = False  # machines that may be lost at any time
    step: StepLaw | None = None  # measured on real devices; None before the first round
    name: str = ""  # of the unit; set by the server in requests, ignored in reports of units

    @property
    def called(self) -> str:
        """The unit's name in messages to users."""
        return unit_called(self.unit, self.name)

    def __post_init__(self) -> None:
        _check_count("ClusterState: unit", self.unit)
        _check_count(f"unit {self.unit}: num_samples", self.num_samples)
        names = {device.name for device in self.devices}
        if not 1 <= len(self.devices) <= _MOST_DEVICES or len(names) < len(self.devices):
            raise ConfigError(
                f"unit {self.unit}: {len(self.devices)} devices with {len(names)} names; "
                f"1 to {_MOST_DEVICES} are possible, each with a different name"
            )
        check_links(self.devices)
        if self.uplink and self.uplink.payloads:
            _check_first(self.unit, self.uplink)


@dataclass(frozen=True, slots=True)
class Estimates:
    """Estimates of Theorem 1's constants from training; None before there is one."""

    gradient_bound: float | None = None  # φ² (assumption 2): the largest mean of a round's ‖∇F‖²
    # β (assumption 1), from below: the largest change of a round's ‖∇F‖ over the model's own change
    smoothness: float | None = None
    curvature: float | None = None  # ξ (assumption 3), from below: the smallest ‖∇F‖²/(2F), F* = 0


def unknown_cluster(unit: int, name: str = "") -> ClusterState:
    """Return a placeholder for a cluster without a valid report; it can hold no block."""
    device = DeviceProfile("unknown", AffineLaw(0.0, 0.0, 0.0, 0.0), max_blocks=0)
    return ClusterState(unit, (device,), 0, name=name)


def check_links(devices: Sequence[DeviceProfile]) -> None:
    """Raise ``ConfigError`` unless all links of a whole cluster's ``devices`` are between them."""
    names = {device.name: device.links for device in devices}
    for name, links in names.items():
        for unknown in (link.to for link in links if link.to not in names):
            raise ConfigError(
                f"device {name}: has a link to {unknown[:_MOST_NAME]!r}, which is no device of the "
                f"cluster{nearest(unknown, names)}"
            )


def _check_first(unit: int, uplink: Uplink) -> None:
    """Check that the first payload is the default one and satisfies every error budget."""
    first = uplink.payloads[0]
    if first.gradient_error:
        raise ConfigError(
            f"unit {unit}: the first payload has gradient_error={first.gradient_error}; it must "
            "be 0, so that any budget can be kept"
        )
    if first.bits != (uplink.model_bits, uplink.activation_bits):
        raise ConfigError(
            f"unit {unit}: the first payload has {first.model_bits} and {first.activation_bits} "
            f"bits, the uplink {uplink.model_bits} and {uplink.activation_bits}; they must be alike"
        )


def _check_count(what: str, count: int) -> None:
    """Raise ``ConfigError`` for a fraction, or a negative or huge count."""
    if not (isinstance(count, Integral) and 0 <= count <= MOST):
        raise ConfigError(f"{what} must be a whole number within 0 … {MOST:g}")


def _over(links: Sequence[Link], names: Collection[str], law: AffineLaw) -> AffineLaw:
    """Return the law with the largest w and ℓ of the hops to these devices, which are usual ones to
    a device without a link."""
    if not links:
        return law
    own = {each.to: each for each in links}
    hops = [own.get(name, law) for name in names] or [law]
    return replace(law, w=max(each.w for each in hops), ell=max(each.ell for each in hops))


def admitted(value: float, most: float) -> float:
    """Limit a scaled value to what states accept: a very small value becomes 0, one above ``most``
    becomes ``most``. Extreme reports must not end the run."""
    return 0.0 if value < 1 / MOST else min(value, most)


def _check_within(of: object, names: Sequence[str], most: float = MOST) -> None:
    """Raise ``ConfigError`` for values too large or too small for arithmetic."""
    for name in names:
        value = getattr(of, name)
        number = isinstance(value, float | Real)
        if not (number and (value == 0 or 1 / MOST <= value <= most)):
            within = f"{1 / MOST:g} … {most:g}"
            raise ConfigError(
                f"{type(of).__name__}: {name}={value!r} must be 0, or within {within}"
            )
