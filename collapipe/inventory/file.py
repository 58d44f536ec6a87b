"""An inventory: somebody's boxes in a YAML file, read into the laws and limits of planning.

The file has SI units, with decibels where radio people write them; they end here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from collapipe.devices.hardware import energy_at
from collapipe.errors import ConfigError
from collapipe.inventory.model import MOST_BLOCKS, Model, read_model
from collapipe.inventory.radio import RoundFigures, read_channel, read_round, read_uplink
from collapipe.inventory.yaml_file import Section, load
from collapipe.state import AffineLaw, BlockCost, Channel, DeviceProfile, EnergyBudget, Uplink

Latency = Literal["overlap", "flow_shop", "bound"]

_MOST_SAMPLES = 10**9
_MOST_MICRO_BATCHES = 4096  # more of them gain nothing, and every one is looked at
_LEAST_SECONDS, _MOST_SECONDS = 1e-18, 1e6  # of a sample, a block or a hop; eleven days
_FILE_KEYS = (
    "batch_size",
    "max_micro_batches",
    "latency",
    "model",
    "clusters",
    "channels",
    "round",
)
_MEASURED_KEYS = ("chunk",)
_PHYSICAL_KEYS = ("flops_per_s", "d2d_rate_bps", "launch_s", "hop_latency_s")
_LIMIT_KEYS = ("max_blocks", "memory_bytes", "energy_j", "power_w")
_FIGURES_FOR = {  # what a device's key needs of the model
    "flops_per_s": ("forward_flops", "backward_flops"),
    "d2d_rate_bps": ("activation_bits", "gradient_bits"),
    "memory_bytes": ("block_bytes",),
}
_ENERGY_PAIRS = (  # neither says anything alone
    ("energy_j", "power_w", "the watts that the device draws"),
    ("power_w", "energy_j", "the joules that a batch may take"),
)
_RESERVED_KEYS = ("address", "process_id")  # a deployment's; planning needs neither
_DEVICE_KEYS = ("name", *_MEASURED_KEYS, *_PHYSICAL_KEYS, *_LIMIT_KEYS, *_RESERVED_KEYS)


@dataclass(frozen=True, slots=True)
class Box:
    """A device of the file.

    Attributes
    ----------
    profile
        What planners ask for.
    memory_bytes
        None: the file gives no bytes, at most a number of blocks.
    """

    profile: DeviceProfile
    memory_bytes: float | None


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of the file; ``uplink`` is None where no joint round is planned."""

    section: Section
    name: str
    boxes: tuple[Box, ...]
    uplink: Uplink | None

    @property
    def devices(self) -> tuple[DeviceProfile, ...]:
        """The K devices as planners ask for them, in the file's order."""
        return tuple(box.profile for box in self.boxes)


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the whole file says.

    Attributes
    ----------
    block_bytes
        Memory of one block; None: the file does not say.
    channels
        Empty: no joint round.
    notes
        One line each for what the file says and nobody can plan with.
    """

    file: str
    batch_size: int
    max_micro_batches: int
    latency: Latency
    num_blocks: int
    block_bytes: float | None
    clusters: tuple[Cluster, ...]
    channels: tuple[Channel, ...]
    round: RoundFigures
    notes: tuple[str, ...]


def read_inventory(file: Path) -> Inventory:
    """Read and check an inventory.

    Raises ``ConfigError``: one line with file, line, key, value and the way out.
    """
    root = load(file)
    root.allow(_FILE_KEYS)
    batch_size = root.whole("batch_size", _MOST_SAMPLES)
    model = read_model(root, batch_size)
    channels = tuple(map(read_channel, root.sections("channels")))
    clusters = _clusters(root, model, len(channels))
    return Inventory(
        file=str(file),
        batch_size=batch_size,
        max_micro_batches=_max_micro_batches(root, batch_size),
        latency=cast(Latency, root.choice("latency", get_args(Latency), "overlap")),
        num_blocks=model.num_blocks,
        block_bytes=model.figures.get("block_bytes"),
        clusters=clusters,
        channels=channels,
        round=read_round(root, len(clusters), len(channels)),
        notes=tuple(_notes(root)),
    )


def read_clusters(file: Path, cost: BlockCost) -> tuple[Cluster, ...]:
    """The clusters of an inventory for blocks of ``cost``, whatever its model is.

    Raises ``ConfigError`` as ``read_inventory`` does.
    """
    root = load(file)
    root.allow(_FILE_KEYS)
    model = Model(root, MOST_BLOCKS, asdict(cost))
    return _clusters(root, model, len(root.sections("channels")))


def _max_micro_batches(root: Section, batch_size: int) -> int:
    """M: a micro-batch holds at least one sample, so that a larger number binds nobody."""
    given = root.whole("max_micro_batches", _MOST_SAMPLES, default=batch_size)
    if min(given, batch_size) > _MOST_MICRO_BATCHES:
        raise root.error(
            "max_micro_batches",
            f"batch_size={batch_size} leaves room for more than {_MOST_MICRO_BATCHES:,} "
            "micro-batches; set max_micro_batches, 64 is plenty",
        )
    return min(given, batch_size)


# Clusters and devices


def _clusters(root: Section, model: Model, num_channels: int) -> tuple[Cluster, ...]:
    sections = root.sections("clusters")
    if not sections:
        raise root.error("clusters", "has no cluster; list at least one, with its devices")
    _refuse_twins(sections)
    return tuple(_cluster(section, model, num_channels) for section in sections)


def _cluster(section: Section, model: Model, num_channels: int) -> Cluster:
    section.allow(("name", "devices", "uplink"))
    devices = section.sections("devices")
    if not devices:
        raise section.error("devices", "has no device; list at least one")
    _refuse_twins(devices)
    boxes = tuple(_box(device, model, alone=len(devices) == 1) for device in devices)
    return Cluster(section, section.text("name"), boxes, read_uplink(section, num_channels))


def _refuse_twins(sections: Sequence[Section]) -> None:
    lines: dict[str, int] = {}
    for section in sections:
        name = section.text("name")
        if name in lines:
            raise section.error("name", f"line {lines[name]} has this name already; rename one")
        lines[name] = section.line


def _box(section: Section, model: Model, alone: bool) -> Box:
    section.allow(_DEVICE_KEYS)
    _check_figures(section, model)
    measured = "chunk" in section
    time = _measured(section, alone) if measured else _physical(section, model.figures, alone)
    memory = section.number("memory_bytes") if "memory_bytes" in section else None
    profile = DeviceProfile(
        section.text("name"),
        time,
        _max_blocks(section, model.figures, memory),
        _energy(section, time),
    )
    return Box(profile, memory)


def _check_figures(section: Section, model: Model) -> None:
    """Raises ``ConfigError`` with all figures of the model that the device lacks."""
    given = [key for key in _FIGURES_FOR if key in section]
    needed = dict.fromkeys(name for key in given for name in _FIGURES_FOR[key])
    missing = [name for name in needed if name not in model.figures]
    if missing:
        line = model.section.line
        raise section.error(
            next(key for key in given if missing[0] in _FIGURES_FOR[key]),
            f"needs what model (line {line}) does not say: {', '.join(missing)}; add them there, "
            "or measure this device's chunk and max_blocks",
        )


def _law(section: Section, u: float, v: float, w: float, ell: float) -> AffineLaw:
    for key, value in zip(_PHYSICAL_KEYS, (u, w, v, ell), strict=True):
        if value and not _LEAST_SECONDS <= value <= _MOST_SECONDS:
            raise section.error(
                key if key in section else "chunk",
                f"makes {value:.3g} s of a sample, block or hop; check the units",
            )
    return AffineLaw(u, v, w, ell)


def _measured(section: Section, alone: bool) -> AffineLaw:
    for key in _PHYSICAL_KEYS:
        if key in section:
            raise section.error(key, "the device has a measured chunk as well; remove one")
    chunk = section.section("chunk")
    chunk.allow(("u", "v", "w", "l"))
    if not alone:  # silence must not make a hop free
        for key in ("w", "l"):
            if key not in chunk:
                raise chunk.error(
                    key,
                    "is missing; in a cluster of several devices each says what its hop takes: "
                    "w seconds a sample, l a micro-batch, 0 for nothing",
                )
    v, w, ell = (chunk.number_from_0(key, 0.0) for key in ("v", "w", "l"))
    return _law(section, chunk.number("u"), v, w, ell)


def _physical(section: Section, figures: Mapping[str, float], alone: bool) -> AffineLaw:
    """u = (o + o')/F and w = (z + g)/r; v and ℓ where they are given."""
    if "flops_per_s" not in section:
        raise section.error(
            "flops_per_s", "is missing; describe the device by it, or by a measured chunk"
        )
    speed = section.number("flops_per_s")
    launch, hop = (section.number_from_0(key, 0.0) for key in ("launch_s", "hop_latency_s"))
    compute = (figures["forward_flops"] + figures["backward_flops"]) / speed
    return _law(section, compute, launch, _sending(section, figures, alone), hop)


def _sending(section: Section, figures: Mapping[str, float], alone: bool) -> float:
    if "d2d_rate_bps" in section:
        rate = section.number("d2d_rate_bps")
        return (figures["activation_bits"] + figures["gradient_bits"]) / rate
    if alone:  # the whole encoder in one box, which then is the control unit's own
        return 0.0
    raise section.error(
        "d2d_rate_bps",
        "is missing; in a cluster of several devices each says how fast it sends",
    )


def _max_blocks(section: Section, figures: Mapping[str, float], memory: float | None) -> int | None:
    limits = [section.whole("max_blocks", MOST_BLOCKS)] if "max_blocks" in section else []
    if memory is not None:
        limits.append(math.floor(memory / figures["block_bytes"]))
    return min(limits, default=None)


def _energy(section: Section, time: AffineLaw) -> EnergyBudget | None:
    """A batch's joules: the device draws its power while it computes and while it sends."""
    power = section.number("power_w") if "power_w" in section else None
    limit = section.number("energy_j") if "energy_j" in section else None
    if power is None or limit is None:
        return None
    try:
        return energy_at(time, power, limit)
    except ConfigError as error:
        raise section.error("power_w", "makes no joules to plan with; check the units") from error


def _notes(root: Section) -> list[str]:
    devices = [d for cluster in root.sections("clusters") for d in cluster.sections("devices")]
    return [
        str(device.error(key, f"not planned with, since {other} is missing; add {what}"))
        for device in devices
        for key, other, what in _ENERGY_PAIRS
        if key in device and other not in device
    ]
