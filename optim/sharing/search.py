"""Search plans with shared stages for the least Σ stages + (m - 1)·slowest stage + syncs.

For one m the least Σ within a threshold on the slowest stage is a dynamic programme. Under
``overlap`` the rows of shared stages depend on the threshold, too: those with the least time may
not have the least pace. Each answer says how low the threshold must be for a better plan, so few of
the possible thresholds are tried. Bounds exclude most m.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product

import numpy as np

from collapipe.errors import UnfinishedSearchError
from optim.latency import model_too_large
from optim.partition.envelope import Envelope, Splits
from optim.partition.exact import certified
from optim.partition.rates import TINY_S
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
from optim.sharing.bounds import Bounds, least_roots, of_batch_s
from optim.sharing.caps import Caps
from optim.sharing.costs import Costs, Tables
from optim.sharing.law import stage_of
from optim.sharing.modes import decided, no_plan
from optim.sharing.programme import Group, Programme
from optim.sharing.states import States, kinds_of, states_of

_PAIRS_PER_NODE = 1000
_GLANCED = 4  # numbers of micro-batches m whose plans of one stage are searched first
_FIRST, _GROWTH = 8, 8  # m that a search tries at once, and the factor by which they grow
_MOST_STAGES = 2**20  # most stages, or pairs in a programme, of all m tried at once


class Search:
    """Offers plans to an envelope of all requested uplink times.

    With ``most`` stages their order counts; ``sizes`` is 1, or ``most`` if the fastest of each S
    are wanted.
    """

    def __init__(
        self,
        problem: ClusterProblem,
        bounds: Bounds,
        caps: Sequence[Caps],
        sizes: int,
        max_nodes: float,
        most: int | None = None,
        ordered: tuple[States, Sequence[ClusterProblem]] | None = None,
    ) -> None:
        self._problem, self._bounds, self._caps = problem, bounds, caps
        self._sizes, self._left, self._most = sizes, max_nodes, most
        self._max_nodes, self._ordered = max_nodes, ordered
        self._by_next_class = ordered[1] if ordered else [problem]  # before a stage of each class
        self.only_shared = False  # plans without shared stages are known
        self._one_stage = bounds.once.copy()  # those of known m are skipped
        every = np.arange(problem.num_blocks + 1)
        self._roots = least_roots(every[:, None], every)
        self._kinds = kinds_of(problem.devices)
        first = [own[0] for own in self._kinds]
        self._rates = bounds.rates[:, first], bounds.paces[:, first]
        self._kind_of = {k: kind for kind, own in enumerate(self._kinds) for k in own}
        counts = np.arange(1, problem.max_micro_batches + 1)
        after = np.array([problem.head_s, problem.gradient_s])[:, None] / counts
        self._after, self._floor = after.sum(axis=0), after.max(axis=0)
        self.points = list[Partition]()
        times, continuous = np.array(problem.activation_s), math.isinf(problem.activation_s[-1])
        if continuous:  # from here on the uplink is the slowest stage of every plan
            slowest = np.maximum(self._bounds.longest, self._floor)
            times[-1] = max(times[-2], float((counts * slowest).max()))
        empty = np.zeros(0, dtype=int)
        none = Splits(empty, empty, np.zeros(0), np.zeros(0), np.zeros((0, 1), dtype=int))
        self._best = Envelope(times, continuous, sizes, none)

    def glance(self) -> None:
        """Offer plans of one stage for the most promising m, at no cost of nodes, unless syncs make
        several stages more promising."""
        bounds, blocks = self._bounds, np.array([self._problem.num_blocks])
        one_s, several_s = (
            of_batch_s(self._problem, bounds, each) for each in (bounds.once, bounds.several)
        )
        rows = np.array(self._promising(bounds.once)[:_GLANCED], dtype=int)
        if len(rows) and self._left >= 0 and one_s.min() <= several_s.min():
            self._descend(rows, self._tables.costs(rows + 1, blocks), blocks, None, bounds.once)
            self._one_stage[rows] = np.inf
        self._left = self._max_nodes

    def run(self) -> float:
        """Search; return a lower bound, s, of what is left open, infinite if nothing is."""
        bounds, blocks = self._bounds, np.arange(1, self._problem.num_blocks + 1)
        more = [self._most] if self._sizes == 1 else list(range(2, self._sizes + 1))
        one_s = self._open_s([1 if self._most else None], self._one_stage, blocks[-1:])
        return min(one_s, self._open_s(more, bounds.several, blocks))

    def _open_s(self, sizes: Sequence[int | None], once: Floats, blocks: Ints) -> float:
        """Search the plans with at most so many stages of ``blocks``, for each of ``sizes``. Return
        a lower bound, s, of those that are left open."""
        pairs = len(self._states.sets) * len(self._by_next_class)
        for tried in self._portions(once, blocks):
            rows = np.array(tried, dtype=int)
            rows = rows[self._improves(rows, once[rows], self._bounds.pace[rows], sizes[0])]
            if not len(rows):
                continue
            if self._left < 0:  # the most promising ones come first
                return float(of_batch_s(self._problem, self._bounds, once)[rows[0]])
            least = self._tables.least(rows + 1, blocks, *self._rates)
            wanted = _finite(self._hopeful(rows, least, blocks, sizes[0]))
            helpful = self._may_help(wanted)
            rows, wanted = rows[helpful], wanted[helpful]
            costs = self._tables.costs(rows + 1, blocks, wanted=wanted)
            together = int(max(1, min(_MOST_STAGES // (pairs * len(blocks)), self._left)))
            for place, most in product(range(0, len(rows), together), sizes):
                if self._left < 0:
                    return float(of_batch_s(self._problem, self._bounds, once)[rows[place]])
                part = slice(place, place + together)
                self._descend(rows[part], costs.of(part), blocks, most, once)
        return math.inf

    def _portions(self, once: Floats, blocks: Ints) -> Iterator[list[int]]:
        """Yield the promising rows m - 1 in growing portions, whose costs are computed together."""
        left = self._promising(once)
        stages = len(self._states.counts) * len(blocks)
        stages *= math.prod(self._tables.alone.shape[2:4]) if left else 1
        size = _FIRST
        while left:
            yield left[:size]
            left = left[size:]
            size = max(1, min(_GROWTH * size, _MOST_STAGES // stages))

    @cached_property
    def _states(self) -> States:
        return self._ordered[0] if self._ordered else states_of(tuple(map(len, self._kinds)))

    @cached_property
    def _tables(self) -> Tables:
        return Tables.of(self._problem, self._states, self._by_next_class, self._kinds, self._caps)

    def solution(self, open_s: float, start: float) -> ClusterSolution:
        """Return the found front; ``open_s`` is a lower bound of what the search left open."""
        front = self.front()
        if not front and math.isfinite(open_s):
            if math.isinf(self._max_nodes):
                raise UnfinishedSearchError(
                    f"{len(self._problem.devices)} different devices are too many to compare all "
                    "shared stages, and those that hold most have no plan; list fewer devices"
                )
            raise UnfinishedSearchError(
                f"the search ended after max_nodes={self._max_nodes:g} without a plan; raise "
                "strategy.max_nodes"
            )
        if not front:
            raise model_too_large(self._problem) if self._most is None else no_plan(self._problem)
        return certified(self._problem, front, "shared", start, open_s)

    def _may_help(self, stages: Bools) -> Bools:
        """Whether a plan that is not known has only such ``stages`` [R, N, D], [R]."""
        sets = self._states.counts.sum(axis=1) >= (2 if self.only_shared else 1)
        return np.asarray(stages[:, sets].any(axis=(1, 2)))

    def front(self) -> tuple[Partition, ...]:
        """Return the fastest plans, by S, then by the uplink times for which they are fastest."""
        splits, ranges = self._best.front()
        found = [
            replace(self.points[place], fastest_s=UplinkTimes(first, last))
            for place, (first, last) in zip(splits.blocks[:, 0], ranges.tolist(), strict=True)
        ]
        return tuple(sorted(found, key=lambda point: point.num_segments))

    def _promising(self, once: Floats) -> list[int]:
        """Return the rows m - 1 that the bounds do not exclude, the most promising first."""
        least_s = of_batch_s(self._problem, self._bounds, once)
        order: list[int] = np.argsort(least_s, kind="stable").tolist()
        return order[: np.isfinite(least_s).sum()]

    def _improves(
        self, row: Ints | int, once: Floats | float, pace: Floats | float, most: int | None
    ) -> Bools:
        """Whether a plan with these times, and at most ``most`` stages, would be the fastest for
        some uplink time, [N]."""
        slowest = np.atleast_1d(np.maximum(pace, self._floor[row]))
        goal = self._best.goal(np.broadcast_to(row, slowest.shape), slowest)
        return np.asarray(once + self._after[row] < goal[:, min(most or 1, self._sizes) - 1])

    def _hopeful(self, rows: Ints, costs: Costs, blocks: Ints, stages: int | None) -> Costs:
        """Drop the stages that no better plan can have: its other blocks take some time, too."""
        others_s, pace = (each[..., blocks - 1][:, None, None] for each in self._others(rows))
        if self._problem.latency == "bound":
            others_s = pace + np.maximum(costs.pace, pace)
        pace = np.maximum(pace, self._bounds.pace[rows].reshape(-1, 1, 1, 1, 1))
        once, pace = costs.once + others_s, np.maximum(costs.least, pace)
        hopeful = np.isfinite(pace)
        places = rows[hopeful.nonzero()[0]]
        hopeful[hopeful] = self._improves(places, once[hopeful], pace[hopeful], stages)
        return Costs(*(np.where(hopeful, e, np.inf) for e in (costs.once, costs.pace, costs.least)))

    def _others(self, rows: Ints) -> tuple[Floats, Floats]:
        """Return lower bounds of Σ and the slowest stage of the devices outside of each set, if
        they hold the blocks outside of its stage, [R, N, L] s, for rows m - 1."""
        problem, tables = self._problem, self._tables
        counts = self._states.counts.astype(float)  # many times as fast as of integers
        blocks = np.arange(1, problem.num_blocks + 1)
        left, number = problem.num_blocks - blocks, tables.rows[rows][:, None, None]
        # the blocks of the largest stage that any of these devices can hold
        caps = self._caps[0].rows[:, :, 1, 0, rows].max(axis=0).swapaxes(0, 1).astype(float)
        alone = np.isfinite(tables.alone[1, rows, 0].min(axis=1)).astype(float)
        single = counts[self._states.alone]  # of one kind each
        held = (counts @ caps >= number) | (counts @ single.T @ alone > 0)
        most = np.where(held, blocks, 0).max(axis=2)[:, ::-1, None]
        rates, paces = ((each[rows].max(axis=2) @ counts.T)[:, ::-1, None] for each in self._rates)
        with np.errstate(divide="ignore", invalid="ignore"):
            others_s = np.where(left, number * self._roots[left, most] / rates, 0.0)
            return others_s, np.where(left, number * left / paces, 0.0)

    def _descend(
        self, rows: Ints, costs: Costs, blocks: Ints, most: int | None, once: Floats
    ) -> None:
        """Offer the plans of ever lower thresholds on the pace, while a better one may exist, for
        these rows m - 1 with their ``costs``; ``once`` are bounds of Σ for all m, s."""
        law = self._problem.latency
        costs = self._hopeful(rows, costs, blocks, most)
        of, *places = np.nonzero(np.isfinite(costs.pace))
        paces, longest = costs.pace[of, *places], np.zeros(len(rows))
        np.maximum.at(longest, of, paces)
        if law == "overlap":
            own, of_devices = self._tables.paces(rows + 1, blocks)
            lower = of_devices < longest[own]
            of, paces = np.append(of, own[lower]), np.append(paces, of_devices[lower])
        sums, thresholds = once[rows], longest
        while True:
            shrinks = paces / np.maximum(thresholds[of], TINY_S) if law == "bound" else 1.0
            hopeful = self._improves(rows[of], sums[of] * shrinks, paces, most)
            left, of = np.unique(of[hopeful], return_inverse=True)
            if not len(left):
                return
            paces, rows, costs = paces[hopeful], rows[left], costs.of(left)
            sums, longest, thresholds = sums[left], longest[left], np.zeros(len(left))
            np.maximum.at(thresholds, of, paces)
            if law == "overlap" and (thresholds < longest).any():
                costs = self._tables.costs(rows + 1, blocks, thresholds, _finite(costs))
                costs = self._hopeful(rows, costs, blocks, most)
            below = np.zeros(len(rows))
            for place, sum_s, groups in self._cheapest(rows, costs, thresholds, most):
                m, threshold = int(rows[place]) + 1, float(thresholds[place])
                slowest = self._slowest_s(costs.of(place), groups)
                sums[place], below[place] = sum_s, threshold if law == "bound" else slowest
                # under ``bound`` a stage costs the threshold: fewer may be better at a lower one
                if law == "bound" or self._improves(m - 1, sum_s, slowest, most):
                    self.offer([self._plan(groups, blocks, m, threshold)])
            paces, of = paces[paces < below[of]], of[paces < below[of]]

    def _cheapest(
        self, rows: Ints, costs: Costs, thresholds: Floats, most: int | None
    ) -> Iterator[tuple[int, float, list[Group]]]:
        """Yield the place of each m with a plan that is not known within its threshold, the least
        Σ, s, and the groups of its plan, unless neither this nor one of a lower threshold is
        better."""
        helpful = np.flatnonzero(self._may_help(_finite(costs)))
        if not len(helpful):
            return
        self._left -= len(helpful) * (1 + len(self._states.sets) * (most or 1) // _PAIRS_PER_NODE)
        limits, bound = thresholds[helpful], self._problem.latency == "bound"
        programme = Programme(self._states, costs.of(helpful), most)
        solved, paces = programme.solved(limits, limits if bound else 0.0), self._bounds.pace[rows]
        sums, (found,) = solved.sums, np.isfinite(solved.sums).nonzero()
        paces, least = paces[helpful[found]], sums[found]
        least = least * paces / np.maximum(limits[found], TINY_S) if bound else least
        better = self._improves(rows[helpful[found]], least, paces, most)
        for number in found[better].tolist():
            yield int(helpful[number]), float(sums[number]), solved.groups(number)

    def _slowest_s(self, costs: Costs, groups: Sequence[Group]) -> float:
        """Return the largest pace of these stages, s."""
        last, next_classes = len(costs.pace) - 1, self._next_classes(groups)
        return max(
            float(costs.pace[min(len(groups) - 1 - place, last), to, own, count - 1])
            for place, ((own, count), to) in enumerate(zip(groups, next_classes, strict=True))
        )

    def _next_classes(self, groups: Sequence[Group]) -> list[int]:
        """Return the class of the stage after each of these."""
        return [*(int(self._states.classes[own]) for own, _ in groups[1:]), -1]

    def _plan(self, groups: Sequence[Group], blocks: Ints, m: int, threshold: float) -> Partition:
        """Name the devices of each group, and give them their rows."""
        free, stages = [list(own) for own in self._kinds], list[Stage]()
        places, next_classes = range(len(groups), 0, -1), self._next_classes(groups)
        for place, to, (group, count) in zip(places, next_classes, groups, strict=True):
            held = enumerate(self._states.counts[group].tolist())
            taken = [free[kind].pop(0) for kind, n in held for _ in range(n)]
            stages.append(self.stage(taken, int(blocks[count - 1]), m, place, to, threshold))
        if self._most is None:
            stages.sort(key=lambda each: each.devices)
        return decided(self._problem, stages, m)

    def stage(
        self,
        devices: Sequence[int],
        blocks: int,
        m: int,
        place: int,
        to: int = -1,
        threshold: float = math.inf,
    ) -> Stage:
        """Return a stage of these devices with balanced rows, before one of class ``to``."""
        own = self._caps[min(place, len(self._caps)) - 1].rows[to]
        caps = [own[self._kind_of[k]] for k in devices]
        return stage_of(self._by_next_class[to], devices, blocks, m, caps, threshold)

    def one_stage_of_all(self) -> float:
        """Offer one stage on all devices, and return the bound of everything else."""
        problem, open_s = self._problem, math.inf
        all_devices, once = range(len(problem.devices)), self._bounds.once
        for row in self._promising(once):
            if self._improves(row, once[row], self._bounds.pace[row], None):
                stage = self.stage(all_devices, problem.num_blocks, row + 1, 1)
                self.offer([decided(problem, [stage], row + 1)] if stage.rows else [])
        for once in (self._bounds.once, self._bounds.several):
            for row in self._promising(once):
                if self._improves(row, once[row], self._bounds.pace[row], None):
                    open_s = min(open_s, of_batch_s(self._problem, self._bounds, once)[row])
        return open_s

    def offer(self, points: Sequence[Partition]) -> None:
        """Add these plans to the envelope."""
        if not points:
            return
        first, rows = len(self.points), np.array([each.num_micro_batches - 1 for each in points])
        slowest = np.array([each.slowest_s for each in points])
        total = np.array([each.latency_s for each in points]) - rows * slowest
        places = np.arange(first, first + len(points))[:, None]
        sizes = np.array([min(each.num_segments, self._sizes) for each in points])
        self.points += points
        self._best.offer(Splits(sizes, rows, total, slowest, places))


def _finite(costs: Costs) -> Bools:
    """Return which sets have stages with how many blocks for each m, [R, N, D]."""
    return np.asarray(np.isfinite(costs.pace).any(axis=(1, 2)))
