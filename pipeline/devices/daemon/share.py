"""A device's share of a segment: its rows, and what it exchanges with the segment's other devices.

Each block has a leader among the devices. The others send it the gradients of their shares; it adds
them in the shares' order, steps, and sends the weights back. Devices lead in proportion to their
rows; with equal rows all links carry equally much, as in a ring.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Literal

from torch import Tensor

from collapipe.errors import LinkError, WireError
from collapipe.models.part import Part
from collapipe.row_shares import common_rows
from collapipe.tensors import Tensors
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.parts import grouped, joined, numbered, separated
from collapipe.wire.streams.frame_stream import FrameStream
from pipeline.devices.block_form import BlockForm
from pipeline.devices.encoding import as_bytes, unpacked
from pipeline.devices.hops import HopError
from pipeline.devices.messages import (
    SHARE,
    PartHeader,
    SegmentDescription,
    ShareHeader,
    neighbour_name,
)
from pipeline.segment import SharedSegment
from pipeline.stage import Passed, SegmentStage

Header = PartHeader | ShareHeader
Packed = tuple[Header, Callable[[], Tensor]]
_MOST_AT_ONCE = 64  # parts of a device; else it could keep this one from its commands
_GRADIENTS: Literal["gradients"] = "gradients"
_WEIGHTS: Literal["weights"] = "weights"


@dataclass(frozen=True)
class ShareStage(SegmentStage):
    """The device's rows of a segment; micro-batches without own rows pass nothing."""

    rows: Sequence[int]  # own ones of each micro-batch

    def forward(self, micro_batch: int, received: Passed) -> Passed:
        return super().forward(micro_batch, received) if self.rows[micro_batch] else ()

    def backward(self, micro_batch: int, received: Passed) -> Passed:
        return super().backward(micro_batch, received) if self.rows[micro_batch] else ()


def own_rows(description: SegmentDescription, totals: Sequence[int]) -> list[int]:
    """Return the number of own rows of micro-batches with these ``totals``."""
    ranges = (common_rows((1,), 0, description.rows, total) for total in totals)
    return [end - first for first, end in (each[description.member] for each in ranges)]


class Exchange:
    """The parts of a step that this device has received from the segment's other devices.

    ``forms`` are the forms of the segment's blocks, in their order.
    """

    def __init__(self, description: SegmentDescription, forms: Mapping[str, BlockForm]) -> None:
        self._round_and_epoch = description.round, description.epoch
        self._own, self._forms = description.member, list(forms.values())
        self._leaders = dict(zip(forms, description.leaders, strict=True))
        self._shares = {each: description.shares_of(each) for each in description.others}
        self._led: dict[int, set[str]] = {k: set() for k in range(len(description.cuts))}
        for form, leader in zip(forms.values(), description.leaders, strict=True):
            self._led[leader] |= form.trained  # names of weights by the device that steps them
        self._received: dict[int, dict[tuple[str, int], Tensors]] = {}
        self._done: dict[int, set[tuple[str, int]]] = {}

    def leads(self, block: str) -> bool:
        """Whether this device steps the block."""
        return self._leaders[block] == self._own

    def gradients_for(
        self, member: int, shared: SharedSegment, parts: Sequence[Part], own: range
    ) -> Iterator[Packed]:
        """Yield the gradients of the ``own`` shares for the blocks that the device ``member``
        leads, if any; a share without rows has none."""
        for share in own if self._led[member] else ():
            named = {
                name: each.cpu()
                for part, gradients in zip(parts, shared.gradients.get(share, ()), strict=False)
                for name, each in zip(part.trained, gradients, strict=False)
                if each is not None and name in self._led[member]
            }
            yield from _packed(ShareHeader(_GRADIENTS, 0, share), named)

    def weights_of(self, parts: Sequence[Part]) -> Iterator[Packed]:
        """Yield the weights of the blocks that this device leads, as far as they train."""
        named = {
            name: each
            for part in parts
            if self.leads(part.name)
            for name, each in part.weights().items()
            if name in self._led[self._own]
        }
        return _packed(ShareHeader(_WEIGHTS, 0), named) if named else iter(())

    def take_waiting(self, streams: Mapping[str, FrameStream], step: int) -> bool:
        """Take some of the parts that other devices have sent in a step, by their ``streams``.
        Returns whether more may wait. Raises ``HopError`` for an invalid one."""
        left = False
        for member in self._shares:
            name = neighbour_name(SHARE, member)
            stream = streams[name]
            for _ in range(_MOST_AT_ONCE):
                if not stream.waiting():
                    break
                try:
                    self._take_frame(member, stream.receive(0), step)
                except (LinkError, WireError) as error:
                    raise HopError(name, str(error)) from error
            else:
                left = True
        return left

    def _take_frame(self, member: int, frame: Frame, now: int) -> None:
        if frame.kind != FrameKind.PART or (frame.round, frame.epoch) != self._round_and_epoch:
            raise WireError(f"{frame.kind.name} of round {frame.round}, epoch {frame.epoch}")
        header, data = frame.only(2)
        self.take(member, unpacked(ShareHeader, header), frame.step, as_bytes(data), now)

    def take(self, member: int, header: ShareHeader, step: int, data: bytes, now: int) -> None:
        """Keep a part of another device. Raises ``WireError`` if it is invalid, or of another step
        than ``now``; gradients may be of the next one, because devices differ in speed."""
        gradients = header.role == _GRADIENTS
        names = self._led[self._own if gradients else member]
        if not names or header.share not in (self._shares[member] if gradients else (0,)):
            raise WireError(f"{header.role} of share {header.share}, which were not expected")
        if step not in (now, now + gradients):
            raise WireError(f"{header.role} of step {step}, expected {now}")
        key = header.role, header.share if gradients else member
        received, done = self._received.setdefault(step, {}), self._done.setdefault(step, set())
        tensors, known = separated(data), received.setdefault(key, {})
        if key in done or (header.left and not tensors):  # which could arrive without end
            raise WireError(f"{header.role} of step {step}, which were not expected")
        if not tensors.keys() <= names or tensors.keys() & known:
            raise WireError(f"{header.role} of weights that are not expected")
        for form in self._forms:
            form.check({name: each for name, each in tensors.items() if name in form.trained})
        received[key] = known | tensors
        if not header.left:
            if not gradients and received[key].keys() < names:
                raise WireError(f"weights without {min(names - received[key].keys())[:80]!r}")
            done.add(key)

    def has_gradients(self, step: int) -> bool:
        """Whether all gradients of the step for the blocks that this device leads are here."""
        expected = sum(map(len, self._shares.values())) if self._led[self._own] else 0
        return self._count(step, _GRADIENTS) == expected

    def has_weights(self, step: int) -> bool:
        """Whether the weights of all other blocks after the step are here."""
        expected = sum(bool(self._led[member]) for member in self._shares)
        return self._count(step, _WEIGHTS) == expected

    def put_gradients(self, step: int, shared: SharedSegment, parts: Sequence[Part]) -> None:
        """Put the other devices' gradients into ``shared``; those of blocks that other devices lead
        are dropped there. Parts of earlier steps, which were aborted, are forgotten."""
        for earlier in [each for each in self._received if each < step]:
            del self._received[earlier], self._done[earlier]
        received = self._received.get(step, {})
        for share in chain(*self._shares.values()):
            found = received.pop((_GRADIENTS, share), {})
            shared.gradients[share] = [
                [found[name].to(part.device) if name in found else None for name in part.trained]
                for part in parts
            ]

    def put_weights(self, step: int, parts: Sequence[Part]) -> None:
        """Load the weights of other blocks after the step, and forget the step's parts."""
        received = self._received.pop(step, {})
        self._done.pop(step, None)
        for part in parts:
            if not self.leads(part.name):
                found = received.get((_WEIGHTS, self._leaders[part.name]), {})
                part.load_trained({name: found[name] for name in part.trained})
                part.forget_gradients()

    def _count(self, step: int, role: str) -> int:
        return sum(each[0] == role for each in self._done.get(step, ()))


def _packed(header: ShareHeader, tensors: Tensors) -> Iterator[Packed]:
    for left, names in numbered(grouped(tensors)):
        own = {name: tensors[name] for name in names}
        yield replace(header, left=left), partial(joined, own)
