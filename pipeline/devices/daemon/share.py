"""A device's share of a segment: its rows, and what it exchanges with the segment's other devices.

Each block has a leader among the devices. The others send it the gradients of their shares; it adds
them in the shares' order, steps, and sends the weights back. Leaders take turns, so that all links
carry equally much, as in a ring.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from torch import Tensor

from collapipe.errors import WireError
from collapipe.models.dropout import DropoutKey, Rows
from collapipe.models.part import Part
from collapipe.plan import row_ends
from collapipe.tensors import Tensors
from collapipe.wire.parts import grouped, joined, separated
from pipeline.devices.block_form import BlockForm
from pipeline.devices.messages import PartHeader, SegmentDescription
from pipeline.phase_timer import PhaseTimer
from pipeline.segment import Segment
from pipeline.shared_segment import SharedSegment
from pipeline.stage import Passed, SegmentStage

Packed = tuple[PartHeader, Callable[[], Tensor]]
_GRADIENTS: Literal["gradients"] = "gradients"
_WEIGHTS: Literal["weights"] = "weights"


class ShareStage(SegmentStage):
    """The device's rows of a segment; micro-batches without own rows pass nothing."""

    def __init__(
        self,
        segment: Segment | SharedSegment,
        key: DropoutKey,
        timer: PhaseTimer,
        rows: Sequence[tuple[Rows, int]],
    ) -> None:
        super().__init__(segment, key, timer)
        self._rows = rows  # of each micro-batch: the first one and the total, and the own number

    def forward(self, micro_batch: int, received: Passed) -> Passed:
        rows, own = self._rows[micro_batch]
        self._key = replace(self._key, rows=rows)
        return super().forward(micro_batch, received) if own else ()

    def backward(self, micro_batch: int, received: Passed) -> Passed:
        _, own = self._rows[micro_batch]
        return super().backward(micro_batch, received) if own else ()


def own_rows(description: SegmentDescription, sizes: Sequence[int]) -> list[tuple[Rows, int]]:
    """Return the first own row, the total and the number of own rows of each micro-batch."""
    found, own = [], description.shares_of(description.member)
    for total in sizes:
        ends = (0, *row_ends(description.shares, total))
        found.append((Rows(ends[own.start], total), ends[own.stop] - ends[own.start]))
    return found


class Exchange:
    """The parts of a step that this device has received from the segment's other devices.

    ``forms`` are the forms of the segment's blocks, in their order.
    """

    def __init__(self, description: SegmentDescription, forms: Mapping[str, BlockForm]) -> None:
        self._forms, self._own = forms, description.member
        self._leaders = {name: description.leader(k) for k, name in enumerate(forms)}
        self._shares = {each: description.shares_of(each) for each in description.others}
        self._came: dict[int, dict[tuple[str, str, int], Tensors]] = {}
        self._done: dict[int, set[tuple[str, str, int]]] = {}

    def leads(self, block: str) -> bool:
        """Whether this device steps the block."""
        return self._leaders[block] == self._own

    def gradients_for(
        self, member: int, shared: SharedSegment, parts: Sequence[Part], own: range
    ) -> Iterator[Packed]:
        """Yield the gradients of the ``own`` shares for the blocks that the device ``member``
        leads; a share without rows has none."""
        for place, part in enumerate(parts):
            for share in own if self._leaders[part.name] == member else ():
                gradients = shared.gradients.get(share)
                pairs = zip(part.trained, gradients[place] if gradients else (), strict=False)
                named = {name: each.cpu() for name, each in pairs if each is not None}
                yield from _packed(PartHeader(part.name, 0, _GRADIENTS, share), named)

    def weights_of(self, parts: Sequence[Part]) -> Iterator[Packed]:
        """Yield the weights of the blocks that this device leads, as far as they train."""
        for part in parts:
            if self.leads(part.name):
                weights = part.weights()
                named = {name: weights[name] for name in part.trained}
                yield from _packed(PartHeader(part.name, 0, _WEIGHTS), named)

    def take(self, member: int, header: PartHeader, step: int, data: bytes, now: int) -> None:
        """Keep a part of another device. Raises ``WireError`` if it is invalid, or of another step
        than ``now``; gradients may be of the next one, because devices differ in speed."""
        form = self._forms.get(header.block)
        leader = self._leaders.get(header.block)
        key = header.role, header.block, header.share
        expected = {
            _GRADIENTS: leader == self._own and header.share in self._shares[member],
            _WEIGHTS: leader == member and header.share == 0,
        }
        if form is None or not expected.get(header.role):
            raise WireError(f"{header.role} of {header.block[:40]!r}, share {header.share}")
        if step not in (now, now + (header.role == _GRADIENTS)):
            raise WireError(f"{header.role} of step {step}, expected {now}")
        came, done = self._came.setdefault(step, {}), self._done.setdefault(step, set())
        tensors, known = separated(data), came.setdefault(key, {})
        if key in done or (header.left and not tensors):  # which could arrive without end
            raise WireError(f"{header.role} of step {step}, which were not expected")
        form.check(tensors)
        if not tensors.keys() <= form.trained or tensors.keys() & known:
            raise WireError(f"{header.role} of {header.block[:40]!r} that do not train")
        came[key] = known | tensors
        if not header.left:
            if header.role == _WEIGHTS:
                form.check_complete(came[key], whole=False)
            done.add(key)

    def has_gradients(self, step: int) -> bool:
        """Whether all gradients of the step for the blocks that this device leads are here."""
        led = sum(map(self.leads, self._forms))
        return self._count(step, _GRADIENTS) == led * sum(map(len, self._shares.values()))

    def has_weights(self, step: int) -> bool:
        """Whether the weights of all other blocks after the step are here."""
        return self._count(step, _WEIGHTS) == len(self._forms) - sum(map(self.leads, self._forms))

    def put_gradients(self, step: int, shared: SharedSegment, parts: Sequence[Part]) -> None:
        """Put the other devices' gradients into ``shared``; those of blocks that other devices lead
        are dropped there."""
        came = self._came.get(step, {})
        for shares in self._shares.values():
            for share in shares:
                own = (came.get((_GRADIENTS, part.name, share), {}) for part in parts)
                shared.gradients[share] = [
                    [
                        found[name].to(part.device) if name in found else None
                        for name in part.trained
                    ]
                    for part, found in zip(parts, own, strict=True)
                ]

    def put_weights(self, step: int, parts: Sequence[Part]) -> None:
        """Load the weights of other blocks after the step, and forget the step's parts."""
        came = self._came.pop(step, {})
        self._done.pop(step, None)
        for part in parts:
            if not self.leads(part.name):
                part.load_trained(came[_WEIGHTS, part.name, 0])
                part.forget_gradients()

    def _count(self, step: int, role: str) -> int:
        return sum(each[0] == role for each in self._done.get(step, ()))


def _packed(header: PartHeader, tensors: Tensors) -> Iterator[Packed]:
    groups = grouped(tensors)
    for left, names in zip(range(len(groups) - 1, -1, -1), groups, strict=True):
        own = {name: tensors[name] for name in names}
        yield replace(header, left=left), partial(joined, own)
