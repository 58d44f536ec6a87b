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

    If costs are equal at all places, stages have no order, and

    h(D, l) = min over groups G in D and δ of cost(G, δ) + h(D - G, l - δ), where G has a device of
    the first kind in D, and h(D, 0) = 0. The answer is the least h(D, L) of any D.

    Else stages are added from the end of the pipeline. The last p of them, on exactly the devices
    D, cost h_p(D, l) = min over all groups G in D and δ of cost_p(G, δ) + h_{p-1}(D - G, l - δ).
    The answer is the least h_p(D, L) of any p and D.
    """

    states: States
    costs: Costs  # of δ = 1 … L blocks
    most: int | None = None  # stages, in their order; None: any number, without an order

    def cheapest(self, threshold: float, each_s: float = 0.0) -> tuple[float, list[Group]] | None:
        """Return the least sum of costs of stages whose pace is at most ``threshold``, and the
        stages, in pipeline order if they have one; None if no cut holds all blocks. Each stage
        costs ``each_s`` more."""
        once = np.where(self.costs.pace <= threshold, self.costs.once + each_s, np.inf)
        sets, blocks = once.shape[1:]
        reached = np.full((sets, blocks + 1), np.inf)
        reached[: None if self.most is None else 1, 0] = 0.0  # the first set is empty
        levels = [reached]
        for place in range(self.most or 1):
            own = once[min(place, len(once) - 1)]
            levels.append(self._with_stage(own, levels[-1], repeats=self.most is None))
        last = np.array([level[:, -1] for level in levels])
        stages, used = np.unravel_index(int(last.argmin()), last.shape)
        total = float(last[stages, used])
        if not np.isfinite(total):
            return None
        return total, self._traced(once, levels, int(stages), int(used))

    def _with_stage(self, once: Floats, rest: Floats, repeats: bool) -> Floats:
        """Return the costs [N, L + 1] with one more stage than in ``rest``, or, if stages may
        repeat, with any number more."""
        states, blocks = self.states, once.shape[1]
        padded = np.full((len(once), 2 * blocks + 1), np.inf)  # begins with l = -L … -1
        padded[:, blocks:] = rest
        reached = padded if repeats else np.full_like(padded, np.inf)
        pair, more = np.nonzero(np.isfinite(once)[states.groups])
        sets, groups = states.sets[pair], states.groups[pair]
        costs, starts = once[groups, more], np.flatnonzero(np.diff(sets, prepend=-1))
        left = (sets - groups) * padded.shape[1] + blocks - more - 1
        own = sets[starts]
        for count in range(1, blocks + 1 if len(own) else 1):
            sums = costs + padded.ravel()[left + count]
            reached[own, blocks + count] = np.minimum.reduceat(sums, starts)
        return reached[:, blocks:]

    def _traced(self, once: Floats, levels: list[Floats], place: int, used: int) -> list[Group]:
        states, devices, left, stages = self.states, used, once.shape[2], list[Group]()
        while left:
            groups = states.groups[states.sets == devices]
            own = once[min(place, len(once)) - 1]
            rest = levels[place if self.most is None else place - 1]
            costs = own[groups, :left] + rest[devices - groups, left - 1 :: -1]
            number, more = np.unravel_index(int(costs.argmin()), costs.shape)
            stages.append((int(groups[number]), int(more) + 1))
            devices, left = devices - int(groups[number]), left - int(more) - 1
            place -= self.most is not None
        return stages
