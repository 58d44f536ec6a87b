"""The integer programme for δ and S at a given m (eq. 39 with C1, C2', C7 and C9'), by HiGHS."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from optim.latency import block_caps
from optim.problem import ClusterProblem, Floats, Ints


def best_blocks(problem: ClusterProblem, num_micro_batches: int) -> tuple[int, ...]:
    """δ of each device with the least latency for a given m.

    The caps must hold the model under that m. HiGHS is asked for the optimum, without a gap; its
    own tolerance of 1e-6 on the longest chunk remains.

    Columns are δ [K], z [K] with z_k = 1{δ_k > 0}, then what a law adds; seconds are in units of
    the longest chunk.
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
    """Σδ = L (C1); z ≤ δ (C2'); δ ≤ cap·z (C2' with C7 and C9' for its M)."""
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
    """(S + m - 1)·T, made linear: columns T_s and y_s = 1{S = s}, s = 1 … R, with T_s = T·y_s.

    The cost of all columns, the rows, and which of the law's own columns are integers.
    """
    devices, counts = len(chunks), np.arange(1, most_segments + 1)
    chosen, none = np.eye(counts.size), np.zeros(counts.size)
    beside, apart = np.zeros((devices, counts.size)), np.zeros((counts.size, 2 * devices))
    held = np.repeat([0.0, 1.0], devices)
    constraints = [
        LinearConstraint(np.hstack([chunks, beside - 1, beside]), ub=0),
        LinearConstraint(np.hstack([apart, chosen, -chosen]), ub=0),  # no chunk exceeds 1
        LinearConstraint(np.concatenate([held, none, -counts]), 0, 0),
        LinearConstraint(np.concatenate([0 * held, none, none + 1]), 1, 1),
    ]
    cost = np.concatenate([np.zeros(2 * devices), counts + num_micro_batches - 1, none])
    return cost, constraints, np.repeat([0, 1], counts.size)
