"""A segment on a device, built from a description and the parts that follow it."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from collapipe import __version__
from collapipe.errors import ConfigError, DataError, DeviceMemoryError, WireError
from collapipe.models.description import from_description
from collapipe.models.dropout import DropoutKey
from collapipe.models.frozen import find
from collapipe.models.part import Part, prefixed, select
from collapipe.models.split import block_name
from collapipe.process.allocator import return_large_blocks
from collapipe.process.host import this_host
from collapipe.process.torch_device import CPU, moved
from collapipe.tensors import Tensors
from collapipe.wire.frozen_store import FrozenStore, digest
from collapipe.wire.parts import grouped, joined, most_bytes, numbered, separated
from pipeline.devices.block_form import BlockForm, block_forms
from pipeline.devices.daemon.share import Exchange, Packed, ShareStage, own_rows
from pipeline.devices.encoding import as_json
from pipeline.devices.messages import PartHeader, SegmentDescription, Wanted
from pipeline.phase_timer import PhaseTimer
from pipeline.segment import Segment, SharedSegment
from pipeline.stage import SegmentStage

_log = logging.getLogger(__name__)
_SCARCE = 0.75  # part of the memory from which on a segment leaves no gaps in it


class HeldSegment:
    """Blocks of a model, which are added one by one.

    Blocks are reused if the ``earlier`` segment has them in the same state. Frozen weights are
    reused if they are in ``kept``, in the ``store`` or in the pretrained model ``source``, a folder
    or hub id. The others must be sent in parts of at most ``part_bytes``. Frozen weights that were
    found are in ``kept`` afterwards, by their digests, and no others.

    Raises ``WireError`` if the description or a part is invalid, and ``DeviceMemoryError`` if the
    segment needs more than ``memory_bytes``, before memory is allocated.
    """

    def __init__(
        self,
        description: SegmentDescription,
        memory_bytes: float,
        store: FrozenStore,
        device: torch.device = CPU,
        earlier: "HeldSegment | None" = None,
        source: str | None = None,
        kept: dict[str, Tensors] | None = None,
    ) -> None:
        self._device, self._store, self._source = device, store, source
        self._found = {} if kept is None else kept
        if description.version != __version__:
            raise WireError(
                f"the control unit has CollaPipe {description.version[:40]}, this device "
                f"{__version__}; install the same version on both"
            )
        self.description = description
        self.spec = from_description(description.model)
        span = description.span
        if span.stop > self.spec.num_blocks or description.stage >= description.num_segments:
            raise WireError(f"blocks {span.first} … {span.stop - 1} of {self.spec.num_blocks}")
        self._dtype = getattr(torch, description.dtype)
        self._leads = [leader == description.member for leader in description.leaders]
        self._forms = self._forms_within(memory_bytes)
        self.part_bytes = most_bytes(max(each.largest_bytes for each in self._forms.values()))
        self._parts, stateless = earlier._kept_for(description) if earlier else ({}, set[str]())
        self.done: int | None = description.base  # the last finished step; None during a step
        blocks = tuple(name for name in self._forms if name not in self._parts)
        frozen = self._unknown(blocks)
        # blocks whose frozen weights are not sent
        self._there = {name for name in blocks if description.frozen.get(name)} - {*frozen}
        led = compress(self._forms, self._leads)
        states = tuple(name for name in led if name in stateless)
        self.wanted = Wanted(blocks, frozen, states, this_host())
        self._shared: SharedSegment | None = None  # of the current step
        self.exchange = Exchange(description, self._forms) if description.others else None
        self._lacking = {*blocks, *states}  # blocks of which not all parts have arrived
        self._pending: dict[str, Tensors] = {}  # received tensors that no block has yet

    def _forms_within(self, memory_bytes: float) -> Mapping[str, BlockForm]:
        """Return the forms of all blocks. Raises ``DeviceMemoryError`` if they do not fit."""
        d, dtype = self.description, self._dtype
        (first,) = block_forms(self.spec, d.span.indices()[:1], d.optimizer, dtype).values()
        # before all are built, because their forms have constants
        self._check_memory(first.constant_bytes * d.span.blocks, memory_bytes)
        forms = block_forms(self.spec, d.span.indices(), d.optimizer, dtype)
        # gradients of each own share, and for a block's leader of all others
        own = len(d.shares_of(d.member))
        sets = (len(d.shares) if leads_it else own for leads_it in self._leads)
        least = float(sum(map(BlockForm.train_bytes, forms.values(), sets)))
        self._check_memory(needed := max(d.memory_bytes, least), memory_bytes)
        return_large_blocks(scarce=self._device.type == "cpu" and needed > _SCARCE * memory_bytes)
        return forms

    def _unknown(self, blocks: Sequence[str]) -> tuple[str, ...]:
        """Return those of ``blocks`` whose frozen weights this machine lacks, and forget the
        weights that belong to no block."""
        known = {name: self.description.frozen.get(name) for name in self._forms}
        for other in self._found.keys() - known.values():
            del self._found[other]
        return tuple(name for name in blocks if known[name] and not self._find(name))

    def _check_memory(self, needed: float, offered: float) -> None:
        """Raise ``DeviceMemoryError`` if the segment needs more bytes than the device offers."""
        if needed > offered:
            raise DeviceMemoryError(
                f"{self.description.span.blocks} blocks need {needed:,.0f} bytes, this device "
                f"offers {offered:,.0f}; raise --memory, or plan fewer blocks here"
            )

    @property
    def built(self) -> bool:
        """Whether all blocks have their weights."""
        return len(self._parts) == len(self._forms)

    def has(self, block: str) -> bool:
        """Whether a block has its weights."""
        return block in self._parts

    @property
    def complete(self) -> bool:
        """Whether all blocks also have their optimiser state: a step can end."""
        return not self._lacking

    def add(self, header: PartHeader, data: bytes) -> None:
        """Add tensors of a wanted block, in the safetensors format. The block is built once its
        weights are there; its optimiser state is loaded after the last part. Raises ``WireError``
        if they are invalid."""
        name = header.block
        if name not in self._lacking:
            raise WireError(f"received part {name[:40]!r}, which was not requested")
        form, tensors = self._forms[name], self._pending.pop(name, {}) | separated(data)
        form.check(tensors)
        sent = form.trained if name in self._there else form.weights
        if name not in self._parts and (not header.left or sent <= tensors.keys()):
            self._build(name, self._with_frozen(name, tensors))
            tensors = {key: each for key, each in tensors.items() if "/" in key}
        if header.left:
            self._pending[name] = tensors
            return
        form.check_complete(form.weights | tensors.keys(), whole=True)
        self._parts[name].load_optimizer_state(tensors)
        self._lacking.remove(name)

    def _build(self, name: str, weights: Tensors) -> None:
        form = self._forms[name]
        form.check(weights)
        form.check_complete(weights, whole=True)
        own = {key: each for key, each in select(weights, name).items() if "/" not in key}
        settings = self.description.optimizer
        self._parts[name] = Part(name, form.build(own), settings, device=self._device)

    @property
    def parts(self) -> list[Part]:
        """The blocks built so far, in their order."""
        return [self._parts[name] for name in self._forms if name in self._parts]

    def stage(
        self, step: int, sizes: Sequence[int], wait_for: Callable[[str], None]
    ) -> SegmentStage:
        """Make a stage of the blocks for a step with micro-batches of these ``sizes``.

        ``wait_for`` is called with the name of a block that is used before it has its weights.
        """
        d, timer = self.description, PhaseTimer()
        key = DropoutKey(d.seed, d.unit, step)
        parts = _ArrivingParts(tuple(self._forms), self._parts, wait_for)
        how = parts, d.recompute, d.first_trained < d.span.first
        if len(d.shares) == 1:
            return SegmentStage(Segment(*how), key, timer)
        self._shared = SharedSegment(d.shares, *how, d.shares_of(d.member), sizes)
        return ShareStage(self._shared, key, timer, own_rows(d, sizes))

    @property
    def led(self) -> list[Part]:
        """The blocks that this device steps, in their order."""
        exchange = self.exchange
        return [each for each in self.parts if exchange is None or exchange.leads(each.name)]

    def gradients_for(self, member: int) -> Iterator[Packed]:
        """Yield the gradients of the step for the blocks that another device leads."""
        assert self._shared is not None and self.exchange is not None
        own = self.description.shares_of(self.description.member)
        return self.exchange.gradients_for(member, self._shared, self.parts, own)

    def add_up(self, step: int) -> None:
        """Add the gradients of all shares, those of other devices included."""
        if self._shared is not None:
            if self.exchange is not None:
                self.exchange.put_gradients(step, self._shared, self.parts)
            self._shared.add_up()
            self._shared = None

    def step(self, rate: float, scale: float) -> None:
        """Step the blocks that this device leads. ``finish`` ends the step."""
        self._require_complete()
        self.done = None
        for part in self.led:
            part.step(rate, scale)

    def finish(self, number: int) -> None:
        """Take the weights of blocks that other devices have stepped."""
        if self.exchange is not None:
            self.exchange.put_weights(number, self.parts)
        self.done = number

    def forget(self) -> None:
        self._shared = None
        for part in self.parts:
            part.forget_gradients()

    def packed_parts(self) -> list[tuple[PartHeader, Callable[[], Tensor]]]:
        """Return the parts that the control unit keeps: trainable weights and optimiser state, a
        few tensors each. Call the functions, which pack them, before the next step."""
        self._require_complete()
        return [
            (PartHeader(part.name, left), partial(self._packed, part, names))
            for part in self.led
            for left, names in numbered(grouped(self._trained(part)))
        ]

    def _packed(self, part: Part, names: Sequence[str]) -> Tensor:
        tensors = self._trained(part)
        return joined({name: tensors[name] for name in names})

    def _trained(self, part: Part) -> Tensors:
        trained = self._forms[part.name].trained
        weights = {key: each for key, each in part.weights().items() if key in trained}
        return weights | part.optimizer_state()

    def _kept_for(self, later: SegmentDescription) -> tuple[dict[str, Part], set[str]]:
        """Return the blocks that the description ``later`` can reuse, and the names of those
        without the optimiser's state: others lead them, or it has not arrived."""
        wanted = (_identity(each) for each in (self.description, later))
        if self.done != later.base or len(set(wanted)) > 1:
            return {}, set()
        self.forget()
        names = set(map(block_name, later.span.indices()))
        kept = {name: part for name, part in self._parts.items() if name in names}
        return kept, kept.keys() - ({part.name for part in self.led} - self._lacking)

    def _require_complete(self) -> None:
        if not self.complete:
            raise WireError("blocks are missing")

    def _find(self, name: str) -> Tensors | None:
        """Return a block's frozen weights; None if this machine lacks them. On a CPU these are
        mapped from files, which may have changed since the last segment."""
        known, empty = self.description.frozen[name], self._forms[name].empty
        if known not in self._found or self._device.type == "cpu":
            where = [self._store], self._source
            found = find(known, self.spec, name, empty, self._dtype, *where)
            self._found.pop(known, None)
            if found is not None:
                self._found[known] = {k: moved(each, self._device) for k, each in found.items()}
        return self._found.get(known)

    def _with_frozen(self, name: str, tensors: Tensors) -> Tensors:
        """Add a block's frozen weights from this machine, or verify the received ones and store
        them if that is possible."""
        known = self.description.frozen.get(name)
        if known is None:
            return tensors
        if name in self._there:
            return prefixed(name, self._found[known]) | tensors
        trained = self._forms[name].trained
        fixed = {k: each for k, each in tensors.items() if k not in trained and "/" not in k}
        if digest(frozen := select(fixed, name)) != known:
            raise WireError(f"{name}: its frozen weights differ from the announced ones")
        try:
            self._store.add(frozen)
            # the store maps its files, so that these weights take no further memory
            return tensors | prefixed(name, self._store.load(known))
        except (ConfigError, DataError) as error:
            _log.warning("%s: its frozen weights will be sent again: %s", name, error)
            return tensors


@dataclass(frozen=True)
class _ArrivingParts(Sequence[Part]):
    """The blocks of a segment in their order; indexing waits for a block that has no weights."""

    names: tuple[str, ...]
    built: Mapping[str, Part]
    wait_for: Callable[[str], None]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        name = self.names[index]
        if name not in self.built:
            self.wait_for(name)
        return self.built[name]


def _identity(description: SegmentDescription) -> bytes:
    """Return the properties in which two segments must agree to share blocks."""
    d = description
    return as_json([d.version, d.unit, d.round, d.seed, d.model, d.dtype, d.optimizer])
