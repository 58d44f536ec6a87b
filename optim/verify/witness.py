"""A witness of a cluster's lower bound: thresholds from which the bound follows without a search.

For each m, thresholds T_1 < … < T_n divide the time of the slowest stage into ranges, the first
from 0 and the last to infinity. In the range (T_i, T_i+1] the slowest stage takes at least τ, the
shortest stage above T_i that a device can have, and no device has a stage above T_i+1. A table over
devices and blocks gives Σ, the least sum of such stages that hold L blocks. No plan in this range
takes less than Σ + (m - 1)·τ, so the least of these values is a lower bound.

The plans are pipelines of single devices. Each device counts as the last one, with the smaller
memory of both ways and without the time of recomputing.
"""

import math
from dataclasses import dataclass

import numpy as np

from collapipe.plan import Certificate, Witness
from optim.problem import Bools, ClusterProblem, Floats, Ints
from optim.verify.limits import possible
from optim.verify.tolerance import exceeds, violation

_SAME = 1e-12  # stages with a smaller relative difference are equal
_PIECES = 3  # into which a range is divided if its bound is too low
_MOST_CELLS = 2**22  # of an array


def check_witness(certificate: Certificate, problem: ClusterProblem) -> None:
    """Check that the certificate's witness proves its lower bound.

    Raises ``PlanViolationError`` with the range that does not.
    """
    witness, least_m = certificate.witness, problem.min_micro_batches
    if len(witness) != problem.max_micro_batches + 1 - least_m:
        raise violation("witness", f"{len(witness)} lists of thresholds, expected one for each m")
    for m, each in enumerate(witness, start=least_m):
        if not all(a < b for a, b in zip((0.0, *each), (*each, math.inf), strict=True)):
            raise violation("witness", f"the thresholds for m={m} do not ascend")
    row = np.repeat(np.arange(len(witness)), [len(each) + 1 for each in witness])
    low = np.array([edge for each in witness for edge in (0.0, *each)])
    high = np.array([edge for each in witness for edge in (*each, math.inf)])
    bounds = _Stages.of(problem).bounds(row, low, high)
    worst = int(bounds.argmin())
    if exceeds(certificate.lower_bound, float(bounds[worst])):
        raise violation(
            "lower bound",
            f"{certificate.lower_bound:.12g} s, but the witness proves only {bounds[worst]:.12g} s "
            f"for m={row[worst] + least_m} and a slowest stage of {low[worst]:.12g} to "
            f"{high[worst]:.12g} s",
        )


def witness_of(problem: ClusterProblem, lower_bound: float) -> Witness | None:
    """Return a witness of this bound; None if a plan may be faster.

    A range whose bound is too low is halved, until no other stage is between its ends.
    """
    stages = _Stages.of(problem)
    inner = (np.unique(own[can])[:-1] for own, can in zip(stages.seconds, stages.can, strict=True))
    edges = [np.array([0.0, *each[each > 0], math.inf]) for each in inner]
    found = [list[float]() for _ in edges]
    ranges = [(row, 0, len(own) - 1) for row, own in enumerate(edges)]
    while ranges:
        low, high = np.array([(edges[row][i], edges[row][j]) for row, i, j in ranges]).T
        bounds = stages.bounds(np.array([row for row, _, _ in ranges]), low, high)
        open_ranges = list[tuple[int, int, int]]()
        for (row, first, last), bound_s in zip(ranges, bounds, strict=True):
            if not exceeds(lower_bound, bound_s):
                found[row].append(float(edges[row][last]))
                continue
            if last - first == 1:
                return None
            middle = (first + last) // 2
            open_ranges += [(row, first, middle), (row, middle, last)]
        ranges = open_ranges
    return tuple(tuple(sorted(each)[:-1]) for each in found)


@dataclass(frozen=True, slots=True)
class _Stages:
    """The stages of a micro-batch that a device can have, for each m; R values of m."""

    problem: ClusterProblem
    m: Ints  # [R]
    seconds: Floats  # that a stage of 1 … L blocks occupies its device or its link, [R, K, L]
    once: Floats  # its compute and hop, [R, K, L]
    can: Bools  # whether memory and energy allow it, [R, K, L]

    @classmethod
    def of(cls, problem: ClusterProblem) -> "_Stages":
        m = np.arange(problem.min_micro_batches, problem.max_micro_batches + 1)
        laws = [device.time for device in problem.devices]
        u, v, w, ell = np.array([(law.u, law.v, law.w, law.ell) for law in laws]).T[..., None]
        size, blocks = problem.batch_size / m[:, None, None], np.arange(problem.num_blocks + 1)[1:]
        compute, hop = blocks * u * size + blocks * v, w * size + ell
        seconds = np.maximum(compute, hop) if problem.latency == "overlap" else compute + hop
        return cls(problem, m, seconds, compute + hop, possible(problem, place=1)[..., 1:])

    def bounds(self, row: Ints, low: Floats, high: Floats) -> Floats:
        """Return a lower bound of a batch, s, for each range of the slowest stage, [N]."""
        each = max(1, _MOST_CELLS // self.seconds[0].size)
        parts = (slice(first, first + each) for first in range(0, len(row), each))
        return np.concatenate([self._bounds(row[own], low[own], high[own]) for own in parts])

    def _bounds(self, row: Ints, low: Floats, high: Floats) -> Floats:
        problem, m, own = self.problem, self.m[row], self.seconds[row]
        low = np.where(low > 0, low, -1.0)  # a stage may take no time
        above, within = (edge[:, None, None] * (1 + _SAME) for edge in (low, high))
        can = self.can[row] & (own <= within)
        slowest = np.where(can & (own > above), own, math.inf).min(axis=(1, 2))
        once = self.once[row]
        if problem.latency == "bound":  # every stage takes as long as the slowest
            once = np.broadcast_to(slowest[:, None, None], once.shape)
        least = _least_sums(np.where(can, once, math.inf))
        behind = problem.head_s, problem.gradient_s
        sent = problem.activation_s[0] / m
        empty = np.isinf(slowest)  # no plan is in the range
        pace = np.maximum(np.where(empty, 0.0, slowest), np.maximum(max(behind) / m, sent))
        seconds = least + sum(behind) / m + sent + (m - 1) * pace
        return np.asarray(np.where(empty, math.inf, seconds))


def _least_sums(cost: Floats) -> Floats:
    """Return the least sum for L blocks, [N], of devices that each hold none or 1 … L blocks at
    these costs, [N, K, L]."""
    ranges, devices, most = cost.shape
    least = np.full((ranges, most + 1), math.inf)  # for 0 … L blocks on the devices so far
    least[:, 0] = 0.0
    for k in range(devices):
        before = least.copy()
        for blocks in range(1, most + 1):
            more = before[:, :-blocks] + cost[:, k, blocks - 1, None]
            np.minimum(least[:, blocks:], more, out=least[:, blocks:])
    return np.asarray(least[:, -1])
