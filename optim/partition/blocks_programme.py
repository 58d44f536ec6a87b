"""The integer programme for δ and S at a given m (eq. 39 with C1, C2', C7 and C9'), by HiGHS."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from optim.latency import block_caps
from optim.problem import ClusterProblem, Floats, Ints


@dataclass(frozen=True, slots=True)
class _Cluster:
    """What the programme knows of K devices at one m: seconds in units of the longest chunk, caps.

    A programme's columns are δ [K], z [K] with z_k = 1{δ_k > 0}, then what a law adds.
    """

    block: Floats
    hop: Floats
    caps: Ints

    @property
    def chunk_rows(self) -> Floats:
        """C_k + H_k of each device, [K, 2K]."""
        return np.hstack([np.diag(self.block), np.diag(self.hop)])

    @property
    def resource_rows(self) -> Floats:
        """C_k and H_k of each device apart, [2K, 2K]."""
        return np.diag(np.concatenate([self.block, self.hop]))


@dataclass(frozen=True, slots=True)
class _Law:
    """A law's part of the programme: its cost over all columns, its rows, its columns' kinds."""

    cost: Floats
    constraints: list[LinearConstraint]
    integrality: Ints


def best_blocks(problem: ClusterProblem, num_micro_batches: int) -> tuple[int, ...]:
    """δ of each device with the least latency for a given m.

    The caps must hold the model under that m. HiGHS is asked for the optimum, without a gap; its
    own tolerance of 1e-6 on the longest chunk remains.
    """
    cluster = _cluster(problem, num_micro_batches)
    law = _bound_law if problem.latency == "bound" else _sum_law
    part = law(problem, cluster, num_micro_batches)
    devices, extra = len(cluster.caps), part.integrality.size
    upper = np.concatenate([cluster.caps, np.ones(devices), np.where(part.integrality, 1, np.inf)])
    found = milp(
        part.cost,
        constraints=_holding(problem.num_blocks, cluster.caps, extra) + part.constraints,
        integrality=np.concatenate([np.ones(2 * devices), part.integrality]),
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": 0.0},
    )
    return tuple(int(held) for held in np.rint(found.x[:devices]))


def _cluster(problem: ClusterProblem, num_micro_batches: int) -> _Cluster:
    size = problem.batch_size / num_micro_batches
    caps = block_caps(problem)[num_micro_batches - 1]
    block = np.array([device.time.compute(1, size) for device in problem.devices])
    hop = np.array([device.time.hop(size) for device in problem.devices])
    longest = (block * caps + hop).max() or 1.0
    return _Cluster(block / longest, hop / longest, caps)


def _holding(num_blocks: int, caps: Ints, extra: int) -> list[LinearConstraint]:
    """Σδ = L (C1); z ≤ δ (C2'); δ ≤ cap·z (C2' with C7 and C9' for its M)."""
    one, none = np.eye(caps.size), np.zeros((caps.size, extra))
    total = np.concatenate([np.ones(caps.size), np.zeros(caps.size + extra)])
    return [
        LinearConstraint(total, num_blocks, num_blocks),
        LinearConstraint(np.hstack([-one, one, none]), ub=0),
        LinearConstraint(np.hstack([one, -np.diag(caps), none]), ub=0),
    ]


def _sum_law(problem: ClusterProblem, cluster: _Cluster, num_micro_batches: int) -> _Law:
    """Σ (C + H) + (m - 1)·T; the column T is no less than any chunk, or any C and any H."""
    rows = cluster.resource_rows if problem.latency == "overlap" else cluster.chunk_rows
    return _Law(
        cost=np.concatenate([cluster.block, cluster.hop, [num_micro_batches - 1]]),
        constraints=[LinearConstraint(np.hstack([rows, -np.ones((len(rows), 1))]), ub=0)],
        integrality=np.zeros(1, dtype=np.int64),
    )


def _bound_law(problem: ClusterProblem, cluster: _Cluster, num_micro_batches: int) -> _Law:
    """(S + m - 1)·T, made linear: columns T_s and y_s = 1{S = s}, s = 1 … R, with T_s = T·y_s."""
    devices = cluster.caps.size
    counts = np.arange(1, min(devices, problem.num_blocks) + 1)
    chosen, none = np.eye(counts.size), np.zeros(counts.size)
    rows, beside = cluster.chunk_rows, np.zeros((devices, counts.size))
    apart = np.zeros((counts.size, 2 * devices))
    held = np.repeat([0.0, 1.0], devices)
    return _Law(
        cost=np.concatenate([np.zeros(2 * devices), counts + num_micro_batches - 1, none]),
        constraints=[
            LinearConstraint(np.hstack([rows, beside - 1, beside]), ub=0),
            LinearConstraint(np.hstack([apart, chosen, -chosen]), ub=0),  # no chunk exceeds 1
            LinearConstraint(np.concatenate([held, none, -counts]), 0, 0),
            LinearConstraint(np.concatenate([0 * held, none, none + 1]), 1, 1),
        ],
        integrality=np.repeat([0, 1], counts.size),
    )
