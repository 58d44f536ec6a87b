"""A device that can hold a segment, and the links between a cluster's devices."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from collapipe.errors import ConfigError, is_printable
from collapipe.state.device_laws import (
    AffineLaw,
    EnergyBudget,
    Link,
    MemoryBudget,
    Recomputing,
    SharingLaw,
)
from collapipe.state.limits import (
    MOST_DEVICES,
    MOST_LAW,
    MOST_NAME,
    admitted,
    check_count,
    check_each,
    check_kind,
)
from collapipe.validation import nearest

_PARTS = {
    "energy": EnergyBudget,
    "memory": MemoryBudget,
    "sharing": SharingLaw,
    "recomputing": Recomputing,
}


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
    # what sets ``max_blocks``, for error messages
    limited_by: Literal["max_blocks", "memory"] = field(default="max_blocks", compare=False)

    def __post_init__(self) -> None:
        check_kind("DeviceProfile: name", self.name, str)
        if len(self.name) > MOST_NAME or not is_printable(self.name):
            raise ConfigError(
                f"device {self.name[:MOST_NAME]!r}: a name has at most {MOST_NAME} characters, "
                "all printable"
            )
        check_kind(f"device {self.name}: time", self.time, AffineLaw)
        check_count(f"device {self.name}: max_blocks", self.max_blocks or 0)
        for name, kind in _PARTS.items():
            if getattr(self, name) is not None:
                check_kind(f"device {self.name}: {name}", getattr(self, name), kind)
        check_each(f"device {self.name}: links", self.links, Link)
        object.__setattr__(self, "links", tuple(self.links))  # profiles are keys
        others = {each.to for each in self.links} - {self.name}
        if not len(self.links) == len(others) < MOST_DEVICES:
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

    def at_most(self, blocks: int) -> "DeviceProfile":
        """Return the profile if the device's memory holds at most so many blocks, alone or in a
        shared stage."""
        most = blocks if self.max_blocks is None else min(blocks, self.max_blocks)
        sharing = self.sharing and replace(self.sharing, max_blocks=most)
        limited_by = self.limited_by if most == self.max_blocks else "memory"
        return replace(self, max_blocks=most, sharing=sharing, limited_by=limited_by)

    def unlimited(self) -> "DeviceProfile":
        """Return the profile without limits of memory and energy."""
        sharing = self.sharing and SharingLaw(self.sharing.sync_s)
        return replace(self, max_blocks=None, energy=None, memory=None, sharing=sharing)

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


def check_links(devices: Sequence[DeviceProfile]) -> None:
    """Raise ``ConfigError`` unless all links of a whole cluster's ``devices`` are between them."""
    names = {device.name: device.links for device in devices}
    for name, links in names.items():
        for unknown in (link.to for link in links if link.to not in names):
            raise ConfigError(
                f"device {name}: has a link to {unknown[:MOST_NAME]!r}, which is no device of the "
                f"cluster{nearest(unknown, names)}"
            )


def _over(links: Sequence[Link], names: Collection[str], law: AffineLaw) -> AffineLaw:
    """Return the law with the largest w and ℓ of the hops to these devices, which are usual ones to
    a device without a link."""
    if not links:
        return law
    own = {each.to: each for each in links}
    hops = [own.get(name, law) for name in names] or [law]
    return replace(law, w=max(each.w for each in hops), ell=max(each.ell for each in hops))
