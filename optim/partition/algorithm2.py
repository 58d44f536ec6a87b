"""Algorithm 2 of CollaPipe (arXiv 2509.19855): alternate a programme for δ and S with one for m."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from optim.latency import block_caps, fitting_micro_batches
from optim.partition.single_point import Cut, single_point, split_latency
from optim.problem import ClusterProblem, Floats, Ints

Blocks = tuple[int, ...]


@single_point("paper")
def paper_partition(problem: ClusterProblem, rng: np.random.Generator) -> Cut:
    """Sub-1 by alternation: δ and S by an integer programme (eq. 39), then m (eq. 38).

    The answer is a local optimum, which neither step alone improves. It depends on m⁽⁰⁾, so
    Algorithm 2 runs from both ``starting_micro_batches``, and the faster answer is returned. Under
    ``flow_shop`` and ``overlap`` both steps use that law's time instead of eq. 15's.
    docs/explanation/paper.md lists deviations from the paper: b̂ = b/m, the last hop, and the end
    of the alternation.

    Raises ``InfeasibleRoundError`` if the caps cannot hold the model under any m.
    """
    starts = sorted(set(starting_micro_batches(problem)))
    return min(
        (alternate(problem, m) for m in starts), key=lambda split: split_latency(problem, *split)
    )


def starting_micro_batches(problem: ClusterProblem) -> tuple[int, int]:
    """Return the paper's m⁽⁰⁾ and an additional one, each the nearest m whose caps hold the model.

    Algorithm 2 starts with S⁽⁰⁾ = 1, for which eq. 38 gives m = 1. The additional start is eq. 38's
    m for the even split over min(K, L) devices. The first start is better if hops are long, the
    second otherwise.
    """
    used = min(len(problem.devices), problem.num_blocks)
    share = problem.num_blocks / used
    even = [share] * used + [0] * (len(problem.devices) - used)
    wanted = stationary_micro_batches(problem, even, 1)
    fitting = fitting_micro_batches(problem)
    additional = min(fitting, key=lambda m: abs(m - wanted) if math.isfinite(wanted) else -m)
    return fitting[0], additional


def alternate(problem: ClusterProblem, num_micro_batches: int) -> Cut:
    """Return δ and m of the local optimum that Algorithm 2 reaches from m⁽⁰⁾ =
    ``num_micro_batches``."""
    m, latency = num_micro_batches, math.inf
    blocks: Blocks = ()
    while True:
        found = best_blocks(problem, m)
        better = best_micro_batches(problem, found, m)
        reached = split_latency(problem, found, better)
        if reached >= latency:
            return blocks, m
        blocks, m, latency = found, better, reached


def stationary_micro_batches(
    problem: ClusterProblem, blocks: Sequence[float], num_micro_batches: int
) -> float:
    """Return the real m ≥ 0 with latency derivative 0 (eq. 38): √((ΣA - A_s)/B_s).

    A stage takes A + m·B seconds per batch with A = b·(δu + w) and B = δv + ℓ. Stage s is the
    slowest for ``num_micro_batches``. ΣA is the sum over all stages, or S times the slowest under
    ``bound``. Under ``overlap`` computes and hops are separate stages. The result is infinite if
    B_s is 0: then more micro-batches are always faster.
    """
    occupied = _occupations(problem, blocks)
    whole, each = max(occupied, key=lambda spent: spent[0] / num_micro_batches + spent[1])
    total = sum(spent for spent, _ in occupied)
    passed = len(occupied) * whole if problem.latency == "bound" else total
    ahead = max(passed - whole, 0.0)
    return math.sqrt(ahead / each) if each else math.inf if ahead else 0.0


def _occupations(problem: ClusterProblem, blocks: Sequence[float]) -> list[tuple[float, float]]:
    """Return (A, B) of each device that holds blocks; under ``overlap`` separately for its compute
    and its hop."""
    b, apart = problem.batch_size, problem.latency == "overlap"
    occupied = []
    for law, held in zip((d.time for d in problem.devices), blocks, strict=True):
        if held:
            compute, hop = (b * held * law.u, held * law.v), (b * law.w, law.ell)
            both = (compute[0] + hop[0], compute[1] + hop[1])
            occupied += [compute, hop] if apart else [both]
    return occupied


def best_micro_batches(problem: ClusterProblem, blocks: Blocks, num_micro_batches: int) -> int:
    """Return the best m for given blocks: an integer next to eq. 38's, or the current m."""
    wanted = stationary_micro_batches(problem, blocks, num_micro_batches)
    below = int(min(max(wanted, 1.0), problem.max_micro_batches))
    candidates = [num_micro_batches, below, min(below + 1, problem.max_micro_batches)]
    caps = block_caps(problem)
    allowed = [m for m in candidates if (caps[m - 1] >= np.asarray(blocks)).all()]
    return min(allowed, key=lambda m: split_latency(problem, blocks, m))


def best_blocks(problem: ClusterProblem, num_micro_batches: int) -> Blocks:
    """Return δ with the least latency for a given m: solve eq. 39 with C1, C2', C7, C9' by HiGHS.

    The caps must hold the model under this m. HiGHS is asked for the optimum without a gap; its
    tolerance of 1e-6 on the longest chunk remains.

    Columns are δ [K], z [K] with z_k = 1{δ_k > 0}, then the law's own columns. Times are in units
    of the longest chunk.
    """
    size = problem.batch_size / num_micro_batches
    caps = block_caps(problem)[num_micro_batches - 1]
    compute = np.array([device.time.compute(1, size) for device in problem.devices])
    hop = np.array([device.time.hop(size) for device in problem.devices])
    longest = (compute * caps + hop).max() or 1.0
    compute, hop = compute / longest, hop / longest
    if problem.latency == "overlap":
        rows = np.diag(np.concatenate([compute, hop]))
    else:
        rows = np.hstack([np.diag(compute), np.diag(hop)])
    if problem.latency == "bound":
        most = min(len(caps), problem.num_blocks)
        cost, constraints, kinds = _paced(rows, most, num_micro_batches)
    else:
        # Σ (C + H) + (m - 1)·T; the column T is no less than any chunk, or any C and any H.
        cost = np.concatenate([compute, hop, [num_micro_batches - 1]])
        constraints = [LinearConstraint(np.hstack([rows, -np.ones((len(rows), 1))]), ub=0)]
        kinds = np.zeros(1, dtype=np.int64)
    upper = np.concatenate([caps, np.ones(len(caps)), np.where(kinds, 1, np.inf)])
    found = milp(
        cost,
        constraints=_holding(problem.num_blocks, caps, len(kinds)) + constraints,
        integrality=np.concatenate([np.ones(2 * len(caps)), kinds]),
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": 0.0},
    )
    return tuple(int(held) for held in np.rint(found.x[: len(caps)]))


def _holding(num_blocks: int, caps: Ints, extra: int) -> list[LinearConstraint]:
    """Return the constraints Σδ = L (C1), z ≤ δ (C2') and δ ≤ cap·z (C2'; C7 and C9' give its
    M)."""
    one, none = np.eye(caps.size), np.zeros((caps.size, extra))
    total = np.concatenate([np.ones(caps.size), np.zeros(caps.size + extra)])
    return [
        LinearConstraint(total, num_blocks, num_blocks),
        LinearConstraint(np.hstack([-one, one, none]), ub=0),
        LinearConstraint(np.hstack([one, -np.diag(caps), none]), ub=0),
    ]


def _paced(
    chunks: Floats, most_segments: int, num_micro_batches: int
) -> tuple[Floats, list[LinearConstraint], Ints]:
    """Linearise (S + m - 1)·T with columns T_s and y_s = 1{S = s}, s = 1 … R, and T_s = T·y_s.

    Returns the cost of all columns, the constraints, and which of the new columns are integers.
    """
    devices, counts = len(chunks), np.arange(1, most_segments + 1)
    chosen, none = np.eye(counts.size), np.zeros(counts.size)
    zeros, apart = np.zeros((devices, counts.size)), np.zeros((counts.size, 2 * devices))
    held = np.repeat([0.0, 1.0], devices)
    constraints = [
        LinearConstraint(np.hstack([chunks, zeros - 1, zeros]), ub=0),
        LinearConstraint(np.hstack([apart, chosen, -chosen]), ub=0),  # no chunk exceeds 1
        LinearConstraint(np.concatenate([held, none, -counts]), 0, 0),
        LinearConstraint(np.concatenate([0 * held, none, none + 1]), 1, 1),
    ]
    cost = np.concatenate([np.zeros(2 * devices), counts + num_micro_batches - 1, none])
    return cost, constraints, np.repeat([0, 1], counts.size)
