"""Partitions that break the caps of memory (C7) or energy (C9'), and what would be enough."""

import math
from collections.abc import Sequence

from collapipe.errors import InfeasibleRoundError
from optim.latency import block_caps
from optim.problem import ClusterProblem


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
