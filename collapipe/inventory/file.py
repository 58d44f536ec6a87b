"""An inventory: somebody's boxes in a YAML file, read into the laws and limits of planning."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from collapipe.devices.hardware import PhysicalDevice, from_db
from collapipe.errors import ConfigError
from collapipe.inventory.model import Model, read_model
from collapipe.inventory.schema import (
    MOST_BLOCKS,
    ChannelSection,
    ClusterSection,
    DeviceSection,
    InventorySection,
    Latency,
    RoundSection,
    UplinkSection,
)
from collapipe.inventory.yaml_file import Document, Loc, load
from collapipe.state import AffineLaw, BlockCost, Channel, DeviceProfile, Uplink

_FIGURES_FOR = {  # what a device's key needs of the model
    "flops_per_s": ("forward_flops", "backward_flops"),
    "d2d_rate_bps": ("activation_bits", "gradient_bits"),
    "memory_bytes": ("block_bytes",),
}
_ENERGY_PAIRS = (  # neither says anything alone
    ("energy_j", "power_w", "the watts that the device draws"),
    ("power_w", "energy_j", "the joules that a batch may take"),
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of the file.

    Attributes
    ----------
    loc
        Its place in the file.
    devices, profiles
        The K devices, as the file describes them and as planners ask for them.
    uplink
        None where no joint round is planned.
    """

    loc: Loc
    name: str
    devices: tuple[PhysicalDevice, ...]
    profiles: tuple[DeviceProfile, ...]
    uplink: Uplink | None


@dataclass(frozen=True, slots=True)
class Inventory:
    """An inventory, checked.

    Attributes
    ----------
    document
        The file, for errors that name a line.
    block_bytes
        Memory of one block; None: the file does not say.
    channels
        Empty: no joint round.
    round
        With a queue for each cluster.
    notes
        One line for each key that planning ignores because another is missing.
    """

    document: Document
    batch_size: int
    max_micro_batches: int
    latency: Latency
    num_blocks: int
    block_bytes: float | None
    clusters: tuple[Cluster, ...]
    channels: tuple[Channel, ...]
    round: RoundSection
    notes: tuple[str, ...]


def read_inventory(file: Path) -> Inventory:
    """Read and check an inventory.

    Raises ``ConfigError``: one line with file, line, key, value and the way out.
    """
    document = load(file)
    section = document.parse(InventorySection)
    model = read_model(document, section.model, section.batch_size)
    queues = section.round.queues or (0.0,) * len(section.clusters)
    return Inventory(
        document=document,
        batch_size=section.batch_size,
        max_micro_batches=section.most_micro_batches,
        latency=section.latency,
        num_blocks=model.num_blocks,
        block_bytes=model.figures.get("block_bytes"),
        clusters=_clusters(document, section, model),
        channels=tuple(map(_channel, section.channels)),
        round=section.round.model_copy(update={"queues": queues}),
        notes=tuple(_notes(document, section)),
    )


def read_clusters(file: Path, cost: BlockCost) -> tuple[Cluster, ...]:
    """The clusters of an inventory for blocks of ``cost``, whatever its model is.

    Raises ``ConfigError`` as ``read_inventory`` does.
    """
    document = load(file)
    section = document.parse(InventorySection)
    return _clusters(document, section, Model(MOST_BLOCKS, asdict(cost)))


def _clusters(document: Document, section: InventorySection, model: Model) -> tuple[Cluster, ...]:
    return tuple(
        _cluster(document, ("clusters", place), each, model)
        for place, each in enumerate(section.clusters)
    )


def _cluster(document: Document, loc: Loc, section: ClusterSection, model: Model) -> Cluster:
    devices, profiles = [], []
    for place, each in enumerate(section.devices):
        here = (*loc, "devices", place)
        _check_figures(document, here, each, model)
        try:
            devices.append(_device(each))
            profiles.append(devices[-1].profile(model.cost))
        except ConfigError as error:
            raise document.error(here, f"{error}; check the units of its keys") from error
    uplink = _uplink(section.uplink) if section.uplink else None
    return Cluster(loc, section.name, tuple(devices), tuple(profiles), uplink)


def _check_figures(document: Document, loc: Loc, section: DeviceSection, model: Model) -> None:
    """Refuse a key for which the model lacks figures, naming all of those."""
    given = [key for key in _FIGURES_FOR if key in section.model_fields_set]
    needed = dict.fromkeys(name for key in given for name in _FIGURES_FOR[key])
    missing = [name for name in needed if name not in model.figures]
    if missing:
        key = next(key for key in given if missing[0] in _FIGURES_FOR[key])
        raise document.error(
            (*loc, key),
            f"needs figures that model (line {document.line(('model',))}) lacks: "
            f"{', '.join(missing)}; add them there, or measure this device's chunk and max_blocks",
        )


def _device(section: DeviceSection) -> PhysicalDevice:
    chunk = section.chunk
    law = AffineLaw(chunk.u, chunk.v, chunk.w, chunk.l) if chunk else None
    described = section.model_dump(exclude={"chunk", "address", "process_id"})
    return PhysicalDevice(chunk=law, **described)


def _uplink(section: UplinkSection) -> Uplink:
    return Uplink(
        max_power_w=section.power_w,
        energy_j=section.energy_j,
        model_bits=section.upload_bits,
        activation_bits=section.activation_bits,
        gains=tuple(map(from_db, section.gain_db)),
    )


def _channel(section: ChannelSection) -> Channel:
    noise_w_per_hz = from_db(section.noise_dbm_per_hz) / 1e3
    return Channel(section.bandwidth_hz, section.interference_w, noise_w_per_hz)


def _notes(document: Document, section: InventorySection) -> Iterator[str]:
    for n, cluster in enumerate(section.clusters):
        for k, device in enumerate(cluster.devices):
            for key, other, what in _ENERGY_PAIRS:
                if key in device.model_fields_set and other not in device.model_fields_set:
                    loc = ("clusters", n, "devices", k, key)
                    why = f"not planned with, since {other} is missing; add {what}"
                    yield str(document.error(loc, why))
