"""The keys of an inventory, and the contradictions between them."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from collapipe.formatting import counted
from collapipe.inventory.values import (
    Address,
    Blocks,
    Decibels,
    Name,
    NotNegative,
    Number,
    Place,
    Positive,
    Recompute,
    Samples,
    Section,
    Text,
    Whole,
)
from collapipe.inventory.yaml_file import Loc, PlacedError
from collapipe.validation import dotted, nearest

_MOST_MICRO_BATCHES = 4096  # more gain nothing, and planners try every number


class ModelSection(Section):
    """``model``: figures of a block, or a name; figures take precedence over the name's."""

    name: Text | None = None
    num_blocks: Blocks | None = None
    family: Text | None = None
    config: dict[str, Text] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # of frozen weights
    quantization: Literal["int8", "nf4"] | None = None
    tokens: Annotated[Whole, Field(le=10**6)] | None = None
    forward_flops: Positive | None = None
    backward_flops: Positive | None = None
    activation_bits: Positive | None = None
    gradient_bits: Positive | None = None
    block_bytes: Positive | None = None
    trained_bytes: Positive | None = None  # of a block's gradients, for shared stages
    head_blocks: Positive | None = None  # the head's work, in units of a block's
    head_bits: NotNegative | None = None  # of the head's weights and everything sent with them


class PipelineSection(Section):
    """``pipeline``: options of a run that change blocks' time and memory."""

    recompute: Recompute = "auto"
    wire_dtype: Literal["float32", "bfloat16", "int8"] = "float32"


class AdapterSection(Section):
    """``adapter``: LoRA as in a run, see ``collapipe.models.lora.LoraSpec``."""

    name: Literal["lora"]
    rank: Whole = 8
    target_modules: tuple[Text, ...] | None = None


class ControlUnitSection(Section):
    """``control_unit``: its speed, as measured seconds per block and sample or as FLOP/s."""

    block_s: Positive | None = None
    flops_per_s: Positive | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.block_s is None) == (self.flops_per_s is None):
            raise PlacedError((), "needs one of block_s and flops_per_s")
        return self


class ChunkSection(Section):
    """``chunk``: a measured law, in seconds."""

    u: Positive
    v: NotNegative = 0.0
    w: NotNegative = 0.0
    l: NotNegative = 0.0  # noqa: E741  # ℓ
    block_flops: Positive | None = None  # of the measured block and a sample, both passes
    hop_bits: Positive | None = None  # of a sample's activations and gradients


class DeviceSection(Section):
    """A device: its measured ``chunk`` or its described speed, and its limits."""

    name: Name
    chunk: ChunkSection | None = None
    flops_per_s: Positive | None = None
    d2d_rate_bps: Positive | None = None
    launch_s: NotNegative = 0.0
    hop_latency_s: NotNegative = 0.0
    max_blocks: Blocks | None = None
    memory_bytes: Positive | None = None
    energy_j: Positive | None = None
    power_w: Positive | None = None
    address: Address | None = None  # for real devices; planning ignores this and process_id
    process_id: Text | None = None

    def faults(self, alone: bool) -> Iterator[tuple[Loc, str]]:
        """Yield contradictions of keys; a device that is not ``alone`` must give its hop's time."""
        if self.chunk is None:
            if self.flops_per_s is None:
                yield ("flops_per_s",), "is missing; give it, or a measured chunk"
            if self.d2d_rate_bps is None and not alone:
                yield ("d2d_rate_bps",), "is missing; among several devices each says its rate"
            return
        for key in ("flops_per_s", "d2d_rate_bps", "launch_s", "hop_latency_s"):
            if key in self.model_fields_set:
                yield (key,), "the device has a measured chunk as well; remove one"
        for key in ("w", "l"):
            if not alone and key not in self.chunk.model_fields_set:
                yield (
                    ("chunk", key),
                    "is missing; among several devices each says what its hop takes: w seconds a "
                    "sample, l a micro-batch, 0 for nothing",
                )


class UplinkSection(Section):
    """``uplink``: limits of power and energy, bits to send, and a gain for each channel.

    ``head_s`` and ``gradient_s`` are the seconds that a batch spends after the uplink: in the head,
    and in the transfer of gradients to the unit.
    """

    power_w: Positive
    energy_j: Positive
    upload_bits: Annotated[Number, Field(ge=1)]
    activation_bits: NotNegative = 0.0
    gain_db: list[Decibels]
    head_s: NotNegative = 0.0
    gradient_s: NotNegative = 0.0


class LinkSection(Section):
    """``links``: a rate for two devices whose stages follow each other, in either order."""

    between: tuple[Text, Text]
    d2d_rate_bps: Positive
    hop_latency_s: NotNegative | None = None  # None: the sender's


class ClusterSection(Section):
    """A cluster: its devices, and its uplink in a joint round."""

    name: Name
    devices: list[DeviceSection] = Field(min_length=1)
    links: list[LinkSection] = Field([])
    control_unit: ControlUnitSection | None = None
    uplink: UplinkSection | None = None

    def faults(self, num_channels: int) -> Iterator[tuple[Loc, str]]:
        """Yield contradictions between devices, or between the uplink and the channels."""
        yield from _repeated_names(("devices",), [each.name for each in self.devices])
        for place, device in enumerate(self.devices):
            for loc, message in device.faults(alone=len(self.devices) == 1):
                yield ("devices", place, *loc), message
        yield from self._faults_of_links()
        if self.uplink is None:
            if num_channels:
                yield ("uplink",), "is missing; with channels every cluster has one"
        elif not num_channels:
            yield ("uplink",), "there are no channels; add channels, or remove it"
        elif (given := len(self.uplink.gain_db)) != num_channels:
            fault = f"{counted(given, 'value')}, expected {num_channels}, one for each channel"
            yield ("uplink", "gain_db"), fault

    def _faults_of_links(self) -> Iterator[tuple[Loc, str]]:
        names, first = [each.name for each in self.devices], dict[frozenset[str], int]()
        for place, link in enumerate(self.links):
            pair, loc = frozenset(link.between), ("links", place, "between")
            for name in link.between:
                if name not in names:
                    yield (*loc,), f"{name} is no device of the cluster{nearest(name, names)}"
            if len(pair) < len(link.between):
                yield loc, f"names {link.between[0]} twice; name two devices"
            if first.setdefault(pair, place) < place:
                yield loc, f"links[{first[pair]}] has the same devices; remove one"


class ChannelSection(Section):
    """An uplink channel."""

    bandwidth_hz: Positive
    interference_w: Positive
    noise_dbm_per_hz: Decibels


class RoundSection(Section):
    """``round``: the objective of a joint round, and the queues Y_n before it.

    For None the planner uses its default.
    """

    drift: Literal["gamma", "paper"] | None = None
    drift_weight: Positive | None = None
    kappa: Positive | None = None
    interference_constant_w: Positive | None = None
    gradient_bound: Positive | None = None
    gamma_max: Positive | None = None
    fading: Literal["none", "rayleigh"] | None = None
    uplink: Literal["streamed", "after"] | None = None
    energy: Literal["all", "adapters"] | None = None
    segment_price: Literal["paper", "none"] | None = None
    queues: tuple[NotNegative, ...] = ()


class InventorySection(Section):
    """The whole file."""

    batch_size: Samples
    max_micro_batches: Samples | None = None
    latency: Literal["overlap", "flow_shop", "bound"] = "overlap"
    model: ModelSection
    pipeline: PipelineSection | None = None
    adapter: AdapterSection | None = None
    clusters: list[ClusterSection] = Field(min_length=1)
    channels: list[ChannelSection] = Field([])
    credentials: Place | None = None  # a folder; for real devices
    round: RoundSection = RoundSection()

    @property
    def most_micro_batches(self) -> int:
        """M, at most the batch size, because a micro-batch has at least one sample."""
        return min(self.max_micro_batches or self.batch_size, self.batch_size)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for loc, message in self._faults():
            raise PlacedError(loc, message)
        return self

    def _faults(self) -> Iterator[tuple[Loc, str]]:
        if self.most_micro_batches > _MOST_MICRO_BATCHES:
            yield (
                ("max_micro_batches",),
                f"batch_size={self.batch_size} leaves room for more than {_MOST_MICRO_BATCHES:,} "
                "micro-batches; set max_micro_batches, 64 is plenty",
            )
        yield from _repeated_names(("clusters",), [each.name for each in self.clusters])
        for place, cluster in enumerate(self.clusters):
            for loc, message in cluster.faults(len(self.channels)):
                yield ("clusters", place, *loc), message
        if "round" in self.model_fields_set and not self.channels:
            yield ("round",), "there are no channels; add channels, or remove it"
        given, wanted = len(self.round.queues), len(self.clusters)
        if "queues" in self.round.model_fields_set and given != wanted:
            fault = f"{counted(given, 'value')}, expected {wanted}, one for each cluster"
            yield ("round", "queues"), fault


def _repeated_names(loc: Loc, names: list[str]) -> Iterator[tuple[Loc, str]]:
    places: dict[str, int] = {}
    for place, name in enumerate(names):
        first = places.setdefault(name, place)
        if first != place:
            where = dotted((*loc, first))
            yield (*loc, place, "name"), f"{where} has this name already; rename one"
