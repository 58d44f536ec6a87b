"""Read an inventory, a YAML file of a user's devices, into the laws and limits of planning."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote

from collapipe.devices.hardware import PhysicalDevice, from_db
from collapipe.errors import ConfigError
from collapipe.formatting import amount
from collapipe.inventory import schema
from collapipe.inventory.model import Model, read_model
from collapipe.inventory.values import MOST_BLOCKS
from collapipe.inventory.yaml_file import Document, Loc, load
from collapipe.state import AffineLaw, BlockCost, Channel, DeviceProfile, Payload, Uplink

_FIGURES_FOR = {  # key of a device → figures of the model that it needs
    "flops_per_s": ("forward_flops", "backward_flops"),
    "d2d_rate_bps": ("activation_bits", "gradient_bits"),
    "memory_bytes": ("block_bytes",),
}
_HEAD = ("head_blocks", "head_bits")
_MOST_RATIO = 1.3  # most ratio of two blocks' sizes for which one law serves both
_ENERGY_PAIRS = (  # each is useless without the other
    ("energy_j", "power_w", "the watts that the device draws"),
    ("power_w", "energy_j", "the joules that a batch may take"),
)


@dataclass(frozen=True, slots=True)
class DescribedCluster:
    """A cluster of the file: its K devices in the file's terms, and as planners' profiles."""

    loc: Loc
    name: str
    devices: tuple[PhysicalDevice, ...]
    profiles: tuple[DeviceProfile, ...]
    uplink: Uplink | None  # None: no joint round
    control_unit: AffineLaw | None  # law of a block on it; None: not in the file
    head_s: float | None  # of a batch in the head on the control unit; None: not known
    misfit: ConfigError | None  # a law that was measured with another model


@dataclass(frozen=True, slots=True)
class Inventory:
    """A validated inventory; ``document`` makes errors that name a line."""

    document: Document
    section: schema.InventorySection
    model: Model
    clusters: tuple[DescribedCluster, ...]
    channels: tuple[Channel, ...]  # empty: no joint round
    notes: tuple[str, ...]  # keys that planning ignores because another is missing

    @property
    def uplinks(self) -> tuple[Uplink, ...]:
        """Uplinks of all clusters; empty if the inventory has no channels."""
        return tuple(each.uplink for each in self.clusters if each.uplink is not None)


def read_inventory(file: Path, cost: BlockCost | None = None) -> Inventory:
    """Read and check an inventory; with a block's ``cost`` the file's model is ignored.

    Raises ``ConfigError``: one line with file, line, key, value and how to correct it.
    """
    document = load(file)
    section = document.parse(schema.InventorySection)
    model = read_model(document, section) if cost is None else Model(MOST_BLOCKS, asdict(cost))
    channels = (
        Channel(each.bandwidth_hz, each.interference_w, from_db(each.noise_dbm_per_hz) / 1e3)
        for each in section.channels
    )
    options = "OPTIONS --write, with the options of collapipe run"
    how = "--write, or give the measured model in the file" if cost is None else options
    clusters = (
        _cluster(document, n, each, model, section.batch_size, how)
        for n, each in enumerate(section.clusters)
    )
    notes = tuple(_notes(document, section))
    return Inventory(document, section, model, tuple(clusters), tuple(channels), notes)


def _cluster(
    document: Document,
    place: int,
    section: schema.ClusterSection,
    model: Model,
    batch_size: int,
    measure: str,
) -> DescribedCluster:
    """Return a cluster; ``measure`` are the arguments that measure its devices with ``model``."""
    loc: Loc = "clusters", place
    for n, link in enumerate(section.links):
        _check_figures(document, (*loc, "links", n), link, model)
    located = [((*loc, "devices", k), each) for k, each in enumerate(section.devices)]
    pairs = [_device(document, where, each, section, model) for where, each in located]
    laws = ((where, each.chunk) for where, each in located if each.chunk)
    misfits = (_misfit(document, where, chunk, model.cost, measure) for where, chunk in laws)
    control_unit, head_s = _control_unit(document, loc, section.control_unit, model), None
    if control_unit and model.head_blocks:
        head_s = model.head_blocks * control_unit.compute(1, batch_size)
    return DescribedCluster(
        loc,
        section.name,
        devices=tuple(device for device, _ in pairs),
        profiles=tuple(profile for _, profile in pairs),
        uplink=_uplink(section.uplink, model, head_s) if section.uplink else None,
        control_unit=control_unit,
        head_s=head_s,
        misfit=next(filter(None, misfits), None),
    )


def _device(
    document: Document,
    loc: Loc,
    section: schema.DeviceSection,
    cluster: schema.ClusterSection,
    model: Model,
) -> tuple[PhysicalDevice, DeviceProfile]:
    """Return a device of the ``cluster`` and its profile for the ``model``."""
    _check_figures(document, loc, section, model)
    chunk = section.chunk
    law = AffineLaw(u=chunk.u, v=chunk.v, w=chunk.w, ell=chunk.l) if chunk else None
    described = section.model_dump(exclude={"chunk", "address", "process_id"})
    try:
        device = PhysicalDevice(chunk=law, links=tuple(_links_of(section, cluster)), **described)
        profile = device.profile(model.cost)
        if model.recomputing is not None:
            smaller = device.profile(model.recomputing)
            profile = profile.or_recomputing(1 + model.cost.forward_share, smaller)
        return device, profile.taking(model.times, model.sent)
    except ConfigError as error:
        raise document.error(loc, f"{error}; check the units of its keys") from error


def _links_of(
    device: schema.DeviceSection, cluster: schema.ClusterSection
) -> Iterator[tuple[str, float, float | None]]:
    """Yield a device's links, in the order of the other devices."""
    for other in cluster.devices:
        for link in cluster.links:
            if other is not device and {*link.between} == {device.name, other.name}:
                yield other.name, link.d2d_rate_bps, link.hop_latency_s


def _misfit(
    document: Document, loc: Loc, chunk: schema.ChunkSection, cost: BlockCost, measure: str
) -> ConfigError | None:
    """Return an error if a figure that both have differs between the law and the model's block."""
    sizes = {"block_flops": (cost.flops, "FLOP"), "hop_bits": (cost.hop_bits, "bit")}
    for key, (size, unit) in sizes.items():
        measured = getattr(chunk, key)
        if measured and size and not 1 / _MOST_RATIO <= measured / size <= _MOST_RATIO:
            return document.error(
                (*loc, "chunk", key),
                f"this law was measured with another model; a block of yours has "
                f"{amount(size, unit)} per sample; measure again: collapipe device measure "
                f"{quote(document.file)} {measure}",
            )
    return None


def _control_unit(
    document: Document, cluster: Loc, section: schema.ControlUnitSection | None, model: Model
) -> AffineLaw | None:
    if section is None:
        return None
    _check_figures(document, (*cluster, "control_unit"), section, model)
    block_s = section.block_s
    if section.flops_per_s is not None:
        block_s = model.cost.flops / section.flops_per_s
    return AffineLaw(block_s or 0.0, 0.0, 0.0, 0.0)


def _uplink(given: schema.UplinkSection, model: Model, head_s: float | None) -> Uplink:
    """Return the uplink, with a choice of the head's place if the file has costs for both."""
    gains = tuple(map(from_db, given.gain_db))
    bits = given.upload_bits, given.activation_bits
    limits = given.power_w, given.energy_j
    uplink = Uplink(*limits, *bits, gains, given.head_s, given.gradient_s)
    if head_s is None or model.head_bits is None:
        return uplink
    payloads = (
        Payload("float32", "float32", *bits, gradient_error=0.0, head="server"),
        Payload("float32", "float32", bits[0] + model.head_bits, 0.0, 0.0, "control_unit"),
    )
    return replace(uplink, payloads=payloads, control_unit_head_s=head_s)


def _check_figures(
    document: Document,
    loc: Loc,
    section: schema.DeviceSection | schema.ControlUnitSection | schema.LinkSection,
    model: Model,
) -> None:
    """Raise ``ConfigError`` for a key for which the model lacks figures; it names the figures."""
    given = [key for key in _FIGURES_FOR if key in section.model_fields_set]
    needed = dict.fromkeys(name for key in given for name in _FIGURES_FOR[key])
    missing = [name for name in needed if name not in model.figures]
    if missing:
        key = next(key for key in given if missing[0] in _FIGURES_FOR[key])
        is_link = isinstance(section, schema.LinkSection)
        other = "" if is_link else ", or measure this device's chunk and max_blocks"
        raise document.error(
            (*loc, key),
            f"needs figures that model (line {document.line(('model',))}) lacks: "
            f"{', '.join(missing)}; add them there{other}",
        )


def _notes(document: Document, section: schema.InventorySection) -> Iterator[str]:
    for n, cluster in enumerate(section.clusters):
        for k, device in enumerate(cluster.devices):
            for key, other, what in _ENERGY_PAIRS:
                if key in device.model_fields_set and other not in device.model_fields_set:
                    loc = ("clusters", n, "devices", k, key)
                    why = f"not planned with, since {other} is missing; add {what}"
                    yield str(document.error(loc, why))
    yield from _notes_of_heads(document, section)


def _notes_of_heads(document: Document, section: schema.InventorySection) -> Iterator[str]:
    """Yield notes on keys that are missing for a round to decide the place of heads."""
    places: list[Loc] = [("model", key) for key in _HEAD]
    given: list[Loc] = [loc for loc in places if getattr(section.model, str(loc[1])) is not None]
    lacking = [f"model.{key}" for key in _HEAD if ("model", key) not in given]
    units = [n for n, cluster in enumerate(section.clusters) if cluster.control_unit]
    lacking += [] if units else ["control_unit of a cluster"]
    given += [("clusters", n, "control_unit") for n in units]
    for loc in given if section.channels and lacking else ():
        yield str(document.error(loc, f"not planned with: it needs {' and '.join(lacking)}"))
