"""The rows and blocks that devices can hold at each place of the pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optim.latency import block_caps
from optim.problem import ClusterProblem, Ints
from optim.sharing.law import row_caps


@dataclass(frozen=True, slots=True)
class Caps:
    """What a device of each kind can hold: without recomputing, and in either way."""

    rows: Ints  # if g = 2 … K devices share a stage, [C, T, 2, K - 1, M, L]
    blocks: Ints  # if it has a stage alone, [C, 2, M, T]; C: class of the next stage

    @classmethod
    def of(cls, by_next_class: Sequence[ClusterProblem], kinds: Sequence[Sequence[int]]) -> "Caps":
        """Return the caps of the first device of each kind, in each of the problems
        ``by_next_class``."""
        first, most = [own[0] for own in kinds], np.maximum.accumulate
        may = any(each.recomputing for each in by_next_class[-1].devices)
        ways = [(), range(len(by_next_class[-1].devices))] if may else [()]
        rows, blocks = list[object](), list[object]()
        for each in by_next_class:
            of_modes = [each.in_modes(on) for on in ways]
            rows.append([[row_caps(own, own.devices[k]) for own in of_modes] for k in first])
            blocks.append([block_caps(own)[:, first] for own in of_modes])
        every_row, every_block = np.array(rows)[:, :, [0, -1]], np.array(blocks)[:, [0, -1]]
        return cls(most(every_row, axis=2), most(every_block, axis=1))

    @property
    def chosen(self) -> bool:
        """Whether a device can hold more if it recomputes."""
        return bool(np.ptp(self.rows, axis=2).any() or np.ptp(self.blocks, axis=1).any())

    def same(self, other: "Caps") -> bool:
        """Whether both have the same caps."""
        return np.array_equal(self.rows, other.rows) and np.array_equal(self.blocks, other.blocks)


def caps_by_place(
    by_next_class: Sequence[ClusterProblem], kinds: Sequence[Sequence[int]]
) -> list[Caps]:
    """Return the caps at each place from the end, one if they are equal at all places."""

    def at(place: int) -> Caps:
        return Caps.of([each.at(place) for each in by_next_class], kinds)

    most, last = len(by_next_class[-1].in_flight), at(1)
    if most < 2 or last.same(first := at(most)):
        return [last]
    return [last, *map(at, range(2, most)), first]
