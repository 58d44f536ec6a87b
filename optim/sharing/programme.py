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
    """A dynamic programme over sets of devices and numbers of blocks, for each of some numbers of
    micro-batches.

    If costs are equal at all places, stages have no order, and

    h(D, l) = min over groups G in D and δ of cost(G, δ) + h(D - G, l - δ), where G has a device of
    the first kind in D, and h(D, 0) = 0. The answer is the least h(D, L) of any D.

    Else stages are added from the end of the pipeline. The last p of them, on exactly the devices
    D, cost h_p(D, l) = min over all groups G in D and δ of cost_p(G, δ) + h_{p-1}(D - G, l - δ).
    The answer is the least h_p(D, L) of any p and D. If devices have links, h also depends on the
    class of the first of these stages, and cost_p on the class of the next stage.
    """

    states: States
    costs: Costs  # of δ = 1 … L blocks, for each of R numbers of micro-batches
    most: int | None = None  # stages, in their order; None: any number, without an order

    def solved(self, thresholds: Floats, each_s: Floats | float = 0.0) -> "Solved":
        """Solve it for stages whose pace is at most the threshold, if each stage costs ``each_s``
        more; both are [R] s."""
        fits = self.costs.pace <= thresholds.reshape(-1, 1, 1, 1, 1)
        more_s = np.reshape(each_s, (-1, 1, 1, 1, 1))
        once = np.where(fits, self.costs.once + more_s, np.inf)
        counts, places, classes, sets, blocks = once.shape
        reached = np.full((counts, classes, sets, blocks + 1), np.inf)
        reached[:, -1, : None if self.most is None else 1, 0] = 0.0  # the first set is empty
        levels = [reached]
        for place in range(self.most or 1):
            own = once[:, min(place, places - 1)]
            levels.append(self._with_stage(own, levels[-1], repeats=self.most is None))
        return Solved(self, once, levels)

    def _with_stage(self, once: Floats, rest: Floats, repeats: bool) -> Floats:
        """Return the costs [R, C, N, L + 1] with one more stage than in ``rest``, or, if stages may
        repeat, with any number more."""
        states, (counts, classes, sets, blocks) = self.states, once.shape
        padded = np.full((counts, classes, sets, 2 * blocks + 1), np.inf)  # from l = -L on
        padded[..., blocks:] = rest
        reached = padded if repeats else np.full_like(padded, np.inf)
        least_rest_s: Floats = rest.min(axis=3)  # the least of any number of blocks
        remaining = states.sets - states.groups
        least = once.min(axis=(1, 3))[:, states.groups] + least_rest_s.min(axis=1)[:, remaining]
        row, pair = np.nonzero(np.isfinite(least))
        sums = once[row, :, states.groups[pair]] + least_rest_s[row, :, remaining[pair], None]
        place, next_class, more = np.nonzero(np.isfinite(sums))
        row, pair = row[place], pair[place]
        whole, groups = states.sets[pair], states.groups[pair]
        costs, first = once[row, next_class, groups, more], states.classes[groups]
        starts = np.flatnonzero(np.diff((row * sets + whole) * classes + first, prepend=-1))
        left = ((row * classes + next_class) * sets + whole - groups) * padded.shape[-1]
        left += blocks - more - 1
        own = row[starts], first[starts], whole[starts]
        for count in range(1, blocks + 1 if len(starts) else 1):
            sums = costs + padded.ravel()[left + count]
            reached[*own, blocks + count] = np.minimum.reduceat(sums, starts)
        return reached[..., blocks:]


@dataclass(frozen=True, slots=True)
class Solved:
    """The least sums of costs for each m of a programme."""

    programme: Programme
    once: Floats  # costs of stages within the threshold, [R, P, C, N, L]
    levels: list[Floats]  # h with 0, 1, … stages, [R, C, N, L + 1]

    @property
    def sums(self) -> Floats:
        """The least sum for each m, [R] s; infinite if no cut holds all blocks."""
        last = [level[..., -1].reshape(len(level), -1).min(axis=1) for level in self.levels]
        return np.asarray(np.min(last, axis=0))

    def groups(self, row: int) -> list[Group]:
        """Return the stages of a plan with the least sum for the m of this row, in pipeline order
        if they have one."""
        last = np.array([level[row, ..., -1] for level in self.levels])
        place, first, used = map(int, np.unravel_index(int(last.argmin()), last.shape))
        once, levels = self.once[row], [level[row] for level in self.levels]
        states, devices, left, stages = self.programme.states, used, once.shape[-1], list[Group]()
        ordered = int(self.programme.most is not None)  # then each stage has its level
        while left:
            own_class = states.classes[states.groups] == first
            groups = states.groups[(states.sets == devices) & own_class]
            own = once[min(place, len(once)) - 1]
            rest = levels[place - ordered]
            costs = own[:, groups, :left] + rest[:, devices - groups, left - 1 :: -1]
            next_class, number, more = np.unravel_index(int(costs.argmin()), costs.shape)
            stages.append((int(groups[number]), int(more) + 1))
            devices, left = devices - int(groups[number]), left - int(more) - 1
            first, place = int(next_class), place - ordered
        return stages
