"""A device's share of a segment: its rows, and what it exchanges with the segment's other devices.

The other devices send the gradients of their shares to the leading one, which adds them in the
shares' order, steps, and sends the weights back. All of it passes the control unit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

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
from pipeline.shared_segment import Gradients, SharedSegment
from pipeline.stage import Passed, SegmentStage

Packed = tuple[PartHeader, Callable[[], Tensor]]
_MOST_STEPS = 2  # whose parts may wait: another device may be one step ahead


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
    found, own = [], description.own_shares
    for total in sizes:
        ends = (0, *row_ends(description.shares, total))
        found.append((Rows(ends[own.start], total), ends[own.stop] - ends[own.start]))
    return found


class Exchange:
    """The parts of a shared segment that devices exchange in a step, by their step."""

    def __init__(self, description: SegmentDescription, forms: Mapping[str, BlockForm]) -> None:
        self._description, self._forms = description, forms
        self._came: dict[int, dict[tuple[int, str], Tensors]] = {}
        self._done: dict[int, set[tuple[int, str]]] = {}
        others = range(len(description.shares)) if description.leads else range(1)
        self._others = [each for each in others if each not in description.own_shares]

    def take(self, header: PartHeader, step: int, data: bytes) -> None:
        """Keep a part of another device. Raises ``WireError`` if it is invalid."""
        role = "gradients" if self._description.leads else "weights"
        form, key = self._forms.get(header.block), (header.share, header.block)
        if header.role != role or form is None or header.share not in self._others:
            raise WireError(f"{header.role} of share {header.share}, {header.block[:40]!r}")
        came, done = self._came.setdefault(step, {}), self._done.setdefault(step, set())
        tensors, known = separated(data), came.setdefault(key, {})
        form.check(tensors)
        if len(self._came) > _MOST_STEPS or key in done:
            raise WireError(f"{header.role} of step {step}, which were not expected")
        if not tensors.keys() <= form.trained or tensors.keys() & known:
            raise WireError(f"{header.role} of {header.block[:40]!r} that do not train")
        came[key] = known | tensors
        if not header.left:
            done.add(key)

    def complete(self, step: int) -> bool:
        """Whether all parts of the step are here."""
        return len(self._done.get(step, ())) == len(self._others) * len(self._forms)

    def gradients(self, step: int, parts: Sequence[Part]) -> dict[int, Gradients]:
        """Remove and return the gradients of the other devices' shares."""
        came = self._removed(step)
        return {
            share: [[came[share, part.name].get(name) for name in part.trained] for part in parts]
            for share in self._others
        }

    def weights(self, step: int) -> Tensors:
        """Remove and return the weights after the step."""
        own = self._removed(step).values()
        return {name: each for tensors in own for name, each in tensors.items()}

    def _removed(self, step: int) -> dict[tuple[int, str], Tensors]:
        self._done.pop(step)
        return self._came.pop(step)


def packed_gradients(
    gradients: Mapping[int, Gradients], shares: range, parts: Sequence[Part]
) -> Iterator[Packed]:
    """Yield the parts with the gradients of the own shares; a share without rows has none."""
    for share in shares:
        none: Gradients = [[] for _ in parts]
        for part, own in zip(parts, gradients.get(share) or none, strict=True):
            named = {
                name: each.cpu()
                for name, each in zip(part.trained, own, strict=False)
                if each is not None
            }
            yield from _packed(PartHeader(part.name, 0, "gradients", share), named)


def packed_weights(parts: Sequence[Part]) -> Iterator[Packed]:
    """Yield the parts with all weights that train."""
    for part in parts:
        weights = part.weights()
        named = {name: weights[name] for name in part.trained}
        yield from _packed(PartHeader(part.name, 0, "weights"), named)


def _packed(header: PartHeader, tensors: Tensors) -> Iterator[Packed]:
    groups = grouped(tensors)
    for left, names in zip(range(len(groups) - 1, -1, -1), groups, strict=True):
        own = {name: tensors[name] for name in names}
        yield replace(header, left=left), partial(joined, own)
