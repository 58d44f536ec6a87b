"""The cheapest cut of a cluster into groups that hold all blocks, none slower than a threshold."""

from dataclasses import dataclass

import numpy as np

from optim.problem import Floats
from optim.sharing.costs import Costs
from optim.sharing.states import States

Group = tuple[int, int]
"""A set of devices, as its number, and the blocks that it holds."""


@dataclass(frozen=True, slots=True)
class Programme:
    """A dynamic programme over sets of devices and numbers of blocks.

    h(D, l) = min over groups G in D and δ of cost(G, δ) + h(D - G, l - δ), where G has a device of
    the first kind in D. All devices of D are used; the answer is the least h(D, L) of any D.
    """

    states: States
    costs: Costs  # of δ = 1 … L blocks

    def cheapest(self, threshold: float, each_s: float = 0.0) -> tuple[float, list[Group]] | None:
        """Return the least sum of costs of stages whose pace is at most ``threshold``, and the
        stages; None if no cut holds all blocks. Each stage costs ``each_s`` more."""
        once = np.where(self.costs.pace <= threshold, self.costs.once + each_s, np.inf)
        reached = self._reached(once)
        used = int(reached[:, -1].argmin())
        total = float(reached[used, -1])
        return (total, self._traced(once, reached, used)) if np.isfinite(total) else None

    def _reached(self, once: Floats) -> Floats:
        """Return h(D, l) for l = 0 … L, [N, L + 1]."""
        states, blocks = self.states, once.shape[1]
        reached = np.full((len(once), 2 * blocks + 1), np.inf)  # begins with l = -L … -1
        reached[:, blocks] = 0.0
        pair, more = np.nonzero(np.isfinite(once)[states.groups])
        sets, groups = states.sets[pair], states.groups[pair]
        costs, starts = once[groups, more], np.flatnonzero(np.diff(sets, prepend=-1))
        rest = (sets - groups) * reached.shape[1] + blocks - more - 1
        own = sets[starts]
        for count in range(1, blocks + 1 if len(own) else 1):
            sums = costs + reached.ravel()[rest + count]
            reached[own, blocks + count] = np.minimum.reduceat(sums, starts)
        return reached[:, blocks:]

    def _traced(self, once: Floats, reached: Floats, used: int) -> list[Group]:
        states, devices, left, stages = self.states, used, once.shape[1], list[Group]()
        while left:
            groups = states.groups[states.sets == devices]
            costs = once[groups, :left] + reached[devices - groups, left - 1 :: -1]
            place, more = np.unravel_index(int(costs.argmin()), costs.shape)
            stages.append((int(groups[place]), int(more) + 1))
            devices, left = devices - int(groups[place]), left - int(more) - 1
        return stages
