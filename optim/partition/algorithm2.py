"""Algorithm 2 of CollaPipe (arXiv 2509.19855): alternate a programme for δ and S with one for m."""

import math
from collections.abc import Sequence

import numpy as np

from optim.latency import block_caps
from optim.partition.blocks_programme import best_blocks
from optim.partition.single_point import Split, fitting_micro_batches, single_point, split_latency
from optim.problem import ClusterProblem, ClusterSolution

Blocks = tuple[int, ...]


def paper_partition(problem: ClusterProblem, rng: np.random.Generator) -> ClusterSolution:
    """Sub-1 by alternation: δ and S by an integer programme (eq. 39), then m (eq. 38).

    The answer is a local optimum: neither step alone improves it. Under ``flow_shop`` and
    ``overlap`` both steps take that law's time instead of eq. 15's. Where the paper is silent or
    slips:

    - b̂ is b/m (eq. 5), where eqs. 33 to 39 print S/m.
    - The last hop stays in, where eqs. 15 and 34 take it off.
    - m⁽⁰⁾ is eq. 38's for the even split over min(K, L) devices. S⁽⁰⁾ = 1 as printed would give
      m = 1, and m = 1 a single device again.
    - "Until Y_n stabilizes" is read as: until the latency falls no more. Queues change once a
      round, after the plan (eq. 29); what depends on them, S·ΣY_n and C11, is Sub-2's here.

    Raises ``InfeasibleRoundError`` where the caps cannot hold the model under any m.
    """
    return single_point("paper", problem, _alternate)


def _alternate(problem: ClusterProblem) -> Split:
    m = _first_micro_batches(problem)
    blocks: Blocks = ()
    latency = math.inf
    while True:
        found = best_blocks(problem, m)
        better = best_micro_batches(problem, found, m)
        reached = split_latency(problem, found, better)
        if reached >= latency:
            return blocks, m
        blocks, m, latency = found, better, reached


def _first_micro_batches(problem: ClusterProblem) -> int:
    """m⁽⁰⁾: the even split's, or the nearest to it under which the devices can hold the model."""
    used = min(len(problem.devices), problem.num_blocks)
    share = problem.num_blocks / used
    even = [share] * used + [0] * (len(problem.devices) - used)
    wanted = stationary_micro_batches(problem, even, 1)
    fitting = fitting_micro_batches("paper", problem)
    return min(fitting, key=lambda m: abs(m - wanted) if math.isfinite(wanted) else -m)


def stationary_micro_batches(
    problem: ClusterProblem, blocks: Sequence[float], num_micro_batches: int
) -> float:
    """The real m at which the latency's derivative is 0 (eq. 38): √((ΣA - A_s)/B_s), ≥ 0.

    What occupies a device for A + m·B seconds a batch, A = b·(δu + w) and B = δv + ℓ, does so m
    times; s is the slowest of them under ``num_micro_batches``, and ΣA counts what a micro-batch
    passes: under ``bound`` S times the slowest. Under ``overlap`` computes and hops count apart.
    Infinite where B_s is 0 and more micro-batches always pay.
    """
    occupied = _occupations(problem, blocks)
    whole, each = max(occupied, key=lambda spent: spent[0] / num_micro_batches + spent[1])
    total = sum(spent for spent, _ in occupied)
    passed = len(occupied) * whole if problem.latency == "bound" else total
    ahead = max(passed - whole, 0.0)
    return math.sqrt(ahead / each) if each else math.inf if ahead else 0.0


def _occupations(problem: ClusterProblem, blocks: Sequence[float]) -> list[tuple[float, float]]:
    """(A, B) of each device that holds blocks; under ``overlap`` of its compute and of its hop."""
    b, apart = problem.batch_size, problem.latency == "overlap"
    occupied = []
    for law, held in zip((d.time for d in problem.devices), blocks, strict=True):
        if held:
            compute, hop = (b * held * law.u, held * law.v), (b * law.w, law.ell)
            both = (compute[0] + hop[0], compute[1] + hop[1])
            occupied += [compute, hop] if apart else [both]
    return occupied


def best_micro_batches(problem: ClusterProblem, blocks: Blocks, num_micro_batches: int) -> int:
    """m for given blocks: the better integer beside eq. 38's, or the present m if neither is."""
    wanted = stationary_micro_batches(problem, blocks, num_micro_batches)
    below = int(min(max(wanted, 1.0), problem.max_micro_batches))
    beside = [num_micro_batches, below, min(below + 1, problem.max_micro_batches)]
    caps = block_caps(problem)
    allowed = [m for m in beside if (caps[m - 1] >= np.asarray(blocks)).all()]
    return min(allowed, key=lambda m: split_latency(problem, blocks, m))
