"""What a partition costs: the pipeline's time, and the caps of memory and energy that it keeps."""

import math
from collections.abc import Sequence

import numpy as np

from collapipe.errors import InfeasibleRoundError
from collapipe.state import DeviceProfile, EnergyBudget
from optim.problem import ClusterProblem, Floats, Ints, Latency

_ROUNDING = 1e-12


def pipeline_latency(
    devices: Sequence[DeviceProfile],
    blocks: Sequence[int],
    batch_size: float,
    num_micro_batches: int,
    latency: Latency,
) -> float:
    """Seconds of a batch of b samples in m micro-batches of b/m.

    With C the compute and H the hop of a chunk on each device that holds blocks:

    - ``bound`` (eq. 15, without the hop that it takes off): (S + m - 1)·max (C + H).
    - ``flow_shop``: Σ (C + H) + (m - 1)·max (C + H): a device computes, then sends, then goes on.
    - ``overlap``: Σ (C + H) + (m - 1)·max max(C, H): it sends while it computes.
    """
    size = batch_size / num_micro_batches
    held = [(device.time, count) for device, count in zip(devices, blocks, strict=True) if count]
    computes = [law.compute(count, size) for law, count in held]
    hops = [law.hop(size) for law, _ in held]
    chunks = [compute + hop for compute, hop in zip(computes, hops, strict=True)]
    if latency == "bound":
        return (len(held) + num_micro_batches - 1) * max(chunks)
    slowest = max(chunks) if latency == "flow_shop" else max(*computes, *hops)
    return sum(chunks) + (num_micro_batches - 1) * slowest


def block_caps(problem: ClusterProblem) -> Ints:
    """How many blocks each device can hold, [M, K]: row m - 1 is for m micro-batches; 0 … L.

    Memory (C7) gives the same in every row, energy (C9') does not.
    """
    sizes = micro_batch_sizes(problem)
    caps = np.empty((problem.max_micro_batches, len(problem.devices)), dtype=np.int64)
    for column, device in enumerate(problem.devices):
        limit = problem.num_blocks if device.max_blocks is None else device.max_blocks
        caps[:, column] = min(limit, problem.num_blocks)
        if (budget := device.energy) is not None:
            caps[:, column] = np.minimum(caps[:, column], _energy_caps(budget, sizes, problem))
    return caps


def micro_batch_sizes(problem: ClusterProblem) -> Floats:
    """b̂ = b/m for m = 1 … M, [M]."""
    return problem.batch_size / np.arange(1, problem.max_micro_batches + 1)


def _energy_caps(budget: EnergyBudget, sizes: Floats, problem: ClusterProblem) -> Floats:
    law = budget.law
    times = problem.batch_size / sizes if budget.scope == "batch" else 1.0
    # A budget that holds exactly n blocks must not lose one to rounding.
    limit = budget.limit_j * (1 + _ROUNDING)
    left = limit / times - (law.w * sizes + law.ell)
    per_block = law.u * sizes + law.v
    with np.errstate(divide="ignore", invalid="ignore"):
        held = np.where(per_block > 0, left / per_block, np.where(left >= 0, math.inf, 0.0))
    return np.clip(np.floor(held * (1 + _ROUNDING)), 0, problem.num_blocks)


def fitting_micro_batches(problem: ClusterProblem) -> list[int]:
    """Each m under which the devices together can hold the model.

    Raises ``InfeasibleRoundError`` where there is none.
    """
    fitting = (block_caps(problem).sum(axis=1) >= problem.num_blocks).nonzero()[0] + 1
    if not fitting.size:
        raise model_too_large(problem)
    return [int(m) for m in fitting]


def require_within_caps(
    solver: str, problem: ClusterProblem, blocks: Sequence[int], num_micro_batches: int
) -> None:
    """Raises ``InfeasibleRoundError`` that names the first device with too many blocks."""
    caps = block_caps(problem)[num_micro_batches - 1].tolist()
    for device, held, cap in zip(problem.devices, blocks, caps, strict=True):
        if held > cap:
            by_memory = device.max_blocks is not None and cap == device.max_blocks
            raise InfeasibleRoundError(
                f"solver {solver}: device {device.name} would hold {held} blocks with "
                f"{num_micro_batches} micro-batches, at most {cap} fit its "
                f"{'memory (max_blocks)' if by_memory else 'energy budget'}; raise it, lower "
                "model.num_blocks, or let the exact solver split"
            )


def model_too_large(problem: ClusterProblem) -> InfeasibleRoundError:
    """The error of a cluster that cannot hold L blocks: how many fit where, and what is missing."""
    by_m = block_caps(problem)
    row = int(by_m.sum(axis=1).argmax())
    caps, m = by_m[row].tolist(), row + 1
    missing = problem.num_blocks - sum(caps)
    held = ", ".join(
        f"{device.name}: {cap}" for device, cap in zip(problem.devices, caps, strict=True)
    )
    return InfeasibleRoundError(
        f"the devices hold at most {sum(caps)} of {problem.num_blocks} blocks ({held}; "
        f"{m} micro-batch{'es' if row else ''}); {_remedy(problem, caps, m, missing)}"
    )


def _remedy(problem: ClusterProblem, caps: Sequence[int], m: int, missing: int) -> str:
    """More energy, as far as memory lets it help, then memory or a smaller model."""
    raises = []
    for device, cap in zip(problem.devices, caps, strict=True):
        memory = problem.num_blocks if device.max_blocks is None else device.max_blocks
        more = min(memory - cap, missing)
        if device.energy is None or more <= 0:
            continue
        joules = device.energy.law.chunk(cap + more, problem.batch_size / m)
        joules *= m if device.energy.scope == "batch" else 1
        # Rounded up: the figure has to be enough.
        raises.append(f"{device.name}'s energy to {math.ceil(joules * 100) / 100:.2f} J")
        missing -= more
    if missing:
        raises.append(f"memory by {missing} blocks in all, lower model.num_blocks or use LoRA")
    return "raise " + ", ".join(raises)
