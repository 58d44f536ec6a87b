"""A batch's time for tests that have devices but no ``ClusterProblem``."""

from collections.abc import Sequence

from collapipe.state import DeviceProfile
from optim.partition.single_point import split_latency
from optim.problem import ClusterProblem, Latency


def pipeline_latency(
    devices: Sequence[DeviceProfile], blocks: Sequence[int], batch_size: int, m: int, law: Latency
) -> float:
    """Return the seconds of a batch in m micro-batches under ``law``."""
    problem = ClusterProblem(tuple(devices), sum(blocks), batch_size, m, law)
    return split_latency(problem, blocks, m)
