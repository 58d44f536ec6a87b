"""Sub-1 with shared stages, exactly: Σ stages + (m - 1)·slowest stage + syncs.

For one m the least Σ within a threshold on the slowest stage is a dynamic programme. Each answer
says how low the threshold must be for a better plan, so few of the possible thresholds are tried.
Bounds exclude most m.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import Certificate
from optim.latency import batch_s, block_caps, model_too_large
from optim.partition.envelope import Envelope, Splits
from optim.partition.exact import exact_partition
from optim.partition.rates import PROGRESS, batch_seconds
from optim.problem import (
    Bools,
    ClusterProblem,
    ClusterSolution,
    Floats,
    Ints,
    Partition,
    Stage,
    UplinkTimes,
)
from optim.sharing.bounds import least_roots, stage_bounds
from optim.sharing.costs import Caps, Costs, stage_costs
from optim.sharing.law import largest_rows, sharing_partition, stage_of
from optim.sharing.programme import Group, Programme
from optim.sharing.states import States, kinds_of, num_pairs, states_of

MOST_PAIRS = 2**17
"""Pairs of a set and a group, beyond which only pipelines and one shared stage are compared."""
_PAIRS_PER_NODE = 1000
_TINY = 1e-200


def shared_partition(
    problem: ClusterProblem, rng: np.random.Generator | None = None, max_nodes: float = math.inf
) -> ClusterSolution:
    """Return the fastest partitions with shared stages for the problem's uplink times.

    The front does not depend on S: it suits rounds whose objective has no price for segments.
    ``rng`` is not used. Raises ``InfeasibleRoundError`` if the devices cannot hold the model.
    """
    start, low = time.perf_counter(), problem.activation_s[0]
    search = _Search(problem, max_nodes)
    open_s = search.run()
    front = search.front()
    if not front and math.isfinite(open_s):
        raise InfeasibleRoundError(
            f"the search for shared stages ended after max_nodes={max_nodes:g} without a plan; "
            "raise strategy.max_nodes"
        )
    if not front:
        raise model_too_large(problem)
    times = [batch_s(point, low) for point in front]
    fastest = min(range(len(front)), key=times.__getitem__)
    lower = min(times[fastest], open_s)
    lower = times[fastest] if lower >= times[fastest] * (1 - 10 * PROGRESS) else lower
    certificate = Certificate(times[fastest], lower, "shared", time.perf_counter() - start)
    return ClusterSolution(front, front[fastest], certificate, complete=math.isinf(open_s))


class _Search:
    """Offers plans to an envelope of all requested uplink times."""

    def __init__(self, problem: ClusterProblem, max_nodes: float) -> None:
        self._problem, self._left = problem, max_nodes
        self._kinds, self._bounds = kinds_of(problem.devices), stage_bounds(problem)
        self._caps = Caps.of(problem, self._kinds)
        self._kind_of = {k: kind for kind, own in enumerate(self._kinds) for k in own}
        counts = np.arange(1, problem.max_micro_batches + 1)
        behind = np.array([problem.head_s, problem.gradient_s])[:, None] / counts
        self._behind, self._floor = behind.sum(axis=0), behind.max(axis=0)
        self._points = list[Partition]()
        asked, continuous = np.array(problem.activation_s), math.isinf(problem.activation_s[-1])
        if continuous:  # from here on the uplink is the slowest stage of every plan
            slowest = np.maximum(self._bounds.longest, self._floor)
            asked[-1] = max(asked[-2], float((counts * slowest).max()))
        empty = np.zeros(0, dtype=int)
        none = Splits(empty, empty, np.zeros(0), np.zeros(0), np.zeros((0, 1), dtype=int))
        self._best = Envelope(asked, continuous, 1, none)

    def run(self) -> float:
        """Search; return a lower bound, s, of what is left open, infinite if nothing is."""
        problem, bounds, sizes = self._problem, self._bounds, tuple(map(len, self._kinds))
        open_s = math.inf
        if (block_caps(problem).sum(axis=1) >= problem.num_blocks).any():
            single = exact_partition(problem, max_nodes=self._left)
            self._offer(single.front)
            open_s = math.inf if single.complete else single.certificate.lower_bound
        if num_pairs(sizes) > MOST_PAIRS:
            return min(open_s, self._one_stage_of_all())
        states, caps = states_of(sizes), self._caps
        every_count = np.arange(1, problem.num_blocks + 1)
        for once, blocks in ((bounds.once, every_count[-1:]), (bounds.several, every_count)):
            for row in self._promising(once):
                if self._left < 0:
                    open_s = min(open_s, self._least_s(row, once[row]))
                elif self._improves(row, once[row], bounds.pace[row]):
                    costs = stage_costs(problem, states, self._kinds, caps, row + 1, blocks)
                    costs = self._hopeful(row, states, costs, caps, blocks)
                    self._descend(row, Programme(states, costs), blocks, once[row])
        return open_s

    def front(self) -> tuple[Partition, ...]:
        """Return the fastest plans, by S, then by the uplink times for which they are fastest."""
        splits, ranges = self._best.front()
        found = [
            replace(self._points[place], fastest_s=UplinkTimes(first, last))
            for place, (first, last) in zip(splits.blocks[:, 0], ranges.tolist(), strict=True)
        ]
        return tuple(sorted(found, key=lambda point: point.num_segments))

    def _promising(self, once: Floats) -> list[int]:
        """Return the rows m - 1 that the bounds do not exclude, the most promising first."""
        rows = np.flatnonzero(np.isfinite(once + self._bounds.pace))
        least = [self._least_s(row, once[row]) for row in rows.tolist()]
        return [int(rows[place]) for place in np.argsort(least, kind="stable")]

    def _least_s(self, row: int, once: float) -> float:
        """Return the bound of a batch's seconds at the first uplink time."""
        slowest = np.array([max(self._bounds.pace[row], self._floor[row])])
        total, rows = np.array([once + self._behind[row]]), np.array([row])
        return float(batch_seconds(total, slowest, rows, float(self._best.times[0]))[0])

    def _improves(self, row: int, once: Floats | float, pace: Floats | float) -> Bools:
        """Whether a plan with these times would be the fastest for some uplink time, [N]."""
        slowest = np.atleast_1d(np.maximum(pace, self._floor[row]))
        goal = self._best.goal(np.full(len(slowest), row), slowest)[:, 0]
        return np.asarray(once + self._behind[row] < goal)

    def _hopeful(self, row: int, states: States, costs: Costs, caps: Caps, blocks: Ints) -> Costs:
        """Drop the stages that no better plan can have: its other blocks take some time, too."""
        first, bounds = [own[0] for own in self._kinds], self._bounds
        left, rows = self._problem.num_blocks - blocks, largest_rows(self._problem, row + 1)
        most = _most_blocks(states, costs, caps, row, blocks, rows)[::-1, None]  # of the others
        rates, paces = (  # of all other devices
            (states.counts @ each[row, first])[::-1, None] for each in (bounds.rates, bounds.paces)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            others_s = np.where(left, rows * least_roots(left, most) / rates, 0.0)
            pace = np.where(left, rows * left / paces, 0.0)
        if self._problem.latency == "bound":
            others_s = pace + np.maximum(costs.pace, pace)
        pace = np.maximum(costs.pace, np.maximum(pace, self._bounds.pace[row]))
        once, hopeful = costs.once + others_s, np.isfinite(pace)
        hopeful[hopeful] = self._improves(row, once[hopeful], pace[hopeful])
        return Costs(np.where(hopeful, costs.once, np.inf), np.where(hopeful, costs.pace, np.inf))

    def _descend(self, row: int, programme: Programme, blocks: Ints, once: float) -> None:
        """Offer the plans of ever lower thresholds on the pace, while a better one may exist."""
        paces, bound = np.unique(programme.costs.pace), self._problem.latency == "bound"
        paces = paces[np.isfinite(paces)]
        threshold = paces[-1] if len(paces) else 0.0
        while True:
            sums = once * (paces / max(threshold, _TINY)) if bound else once
            paces = paces[self._improves(row, sums, paces)] if len(paces) else paces
            if not len(paces):
                return
            threshold = float(paces[-1])
            self._left -= 1 + len(programme.states.sets) // _PAIRS_PER_NODE
            found = programme.cheapest(threshold, threshold if bound else 0.0)
            if found is None:
                return
            once, groups = found
            self._offer([self._plan(groups, blocks, row + 1)])
            slowest = max(float(programme.costs.pace[own, count - 1]) for own, count in groups)
            # under ``bound`` a stage costs the threshold: fewer may be better at a lower one
            paces = paces[paces < (threshold if bound else slowest)]

    def _plan(self, groups: Sequence[Group], blocks: Ints, m: int) -> Partition:
        """Name the devices of each group, and give them their rows."""
        free, stages = [list(own) for own in self._kinds], list[Stage]()
        counts = states_of(tuple(map(len, self._kinds))).counts
        for group, count in groups:
            taken = [free[t].pop(0) for t, n in enumerate(counts[group].tolist()) for _ in range(n)]
            stages.append(self._stage(taken, int(blocks[count - 1]), m))
        return sharing_partition(self._problem, sorted(stages, key=lambda each: each.devices), m)

    def _stage(self, devices: Sequence[int], blocks: int, m: int) -> Stage:
        caps = [self._caps.rows[self._kind_of[k]] for k in devices]
        return stage_of(self._problem, devices, blocks, m, caps)

    def _one_stage_of_all(self) -> float:
        """Offer one stage on all devices, and return the bound of everything else."""
        problem, open_s = self._problem, math.inf
        everybody, once = range(len(problem.devices)), self._bounds.once
        for row in self._promising(once):
            if self._improves(row, once[row], self._bounds.pace[row]):
                stage = self._stage(everybody, problem.num_blocks, row + 1)
                self._offer([sharing_partition(problem, [stage], row + 1)] if stage.rows else [])
        for once in (self._bounds.once, self._bounds.several):
            for row in self._promising(once):
                if self._improves(row, once[row], self._bounds.pace[row]):
                    open_s = min(open_s, self._least_s(row, once[row]))
        return open_s

    def _offer(self, points: Sequence[Partition]) -> None:
        if not points:
            return
        first, rows = len(self._points), np.array([each.num_micro_batches - 1 for each in points])
        slowest = np.array([each.slowest_s for each in points])
        total = np.array([each.latency_s for each in points]) - rows * slowest
        places = np.arange(first, first + len(points))[:, None]
        self._points += points
        self._best.offer(Splits(np.ones(len(points), dtype=int), rows, total, slowest, places))


def _most_blocks(
    states: States, costs: Costs, caps: Caps, row: int, blocks: Ints, rows: int
) -> Ints:
    """Return the blocks of the largest stage that any devices of each set can hold, [N]."""
    shared = states.counts @ caps.rows[:, 0, row, blocks - 1] >= rows
    alone = np.isfinite(costs.pace) & states.alone[:, None]
    kinds = np.array([alone[states.first == kind].any(axis=0) for kind in range(len(caps.rows))])
    held = shared | ((states.counts > 0).astype(int) @ kinds > 0)
    return np.asarray(np.where(held, blocks, 0).max(axis=1))
