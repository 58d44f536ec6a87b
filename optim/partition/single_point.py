"""How a heuristic answers: one partition, within the caps, with what it costs under the law."""

from collections.abc import Callable, Sequence
from time import perf_counter

from collapipe.errors import InfeasibleRoundError
from collapipe.plan import Certificate
from optim.latency import block_caps, pipeline_latency
from optim.problem import ClusterProblem, ClusterSolution, Partition

Split = tuple[tuple[int, ...], int]
"""δ_k of each device, and m."""


def single_point(
    solver: str, problem: ClusterProblem, split: Callable[[ClusterProblem], Split]
) -> ClusterSolution:
    """The answer of a heuristic that returns δ and m, its time measured; no bound is known.

    Raises ``InfeasibleRoundError`` where the split breaks a cap of memory or energy.
    """
    started = perf_counter()
    blocks, num_micro_batches = split(problem)
    require_within_caps(solver, problem, blocks, num_micro_batches)
    latency = split_latency(problem, blocks, num_micro_batches)
    return answer(solver, Partition(blocks, num_micro_batches, latency), started)


def answer(solver: str, partition: Partition, started: float) -> ClusterSolution:
    """A front of one point; ``started`` is the performance counter at the beginning."""
    return ClusterSolution(
        front=(partition,),
        certificate=Certificate(partition.latency_s, 0.0, solver, perf_counter() - started),
    )


def split_latency(problem: ClusterProblem, blocks: Sequence[int], num_micro_batches: int) -> float:
    """Seconds of a batch under the problem's law."""
    return pipeline_latency(
        problem.devices, blocks, problem.batch_size, num_micro_batches, problem.latency
    )


def fitting_micro_batches(solver: str, problem: ClusterProblem) -> list[int]:
    """Each m under which the devices together can hold the model.

    Raises ``InfeasibleRoundError`` where there is none.
    """
    caps = block_caps(problem)
    fitting = [int(row) + 1 for row in (caps.sum(axis=1) >= problem.num_blocks).nonzero()[0]]
    if fitting:
        return fitting
    roomiest = caps[int(caps.sum(axis=1).argmax())]
    where = ", ".join(
        f"{device.name}: {cap}" for device, cap in zip(problem.devices, roomiest, strict=True)
    )
    raise InfeasibleRoundError(
        f"{solver}: the devices can hold at most {roomiest.sum()} of {problem.num_blocks} blocks "
        f"({where}); lower model.num_blocks, raise memory or energy, or use LoRA"
    )


def require_within_caps(
    solver: str, problem: ClusterProblem, blocks: Sequence[int], num_micro_batches: int
) -> None:
    """Raises ``InfeasibleRoundError`` that names the first device with too many blocks."""
    caps = block_caps(problem)[num_micro_batches - 1]
    for device, held, cap in zip(problem.devices, blocks, caps, strict=True):
        if held > cap:
            raise InfeasibleRoundError(
                f"{solver}: device {device.name} would hold {held} blocks with "
                f"{num_micro_batches} micro-batches, at most {cap} fit its memory and energy; "
                "raise them, lower model.num_blocks, or let the exact solver split"
            )
