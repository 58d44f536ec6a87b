"""Wrong partitions with shared stages are refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from collapipe.errors import PlanViolationError
from collapipe.state import AffineLaw, DeviceProfile, EnergyBudget, MemoryBudget, SharingLaw
from optim.problem import ClusterProblem, Partition, Stage
from optim.sharing.exact import shared_partition
from optim.sharing.law import partition_of_stages
from optim.verify import verify_cluster
from optim.verify.cluster import check_plan

_LAW = AffineLaw(0.1, 0.0, 0.0, 0.01)
_ROOM = SharingLaw(0.01, memory=MemoryBudget(100.0, 1.0, 10.0, 0.0, 0.5, 9.0))
PROBLEM = ClusterProblem(
    tuple(DeviceProfile(f"d{k}", _LAW, sharing=_ROOM) for k in range(3)), 6, 9, 3, "flow_shop"
)
Change = Callable[[Partition], Partition]


def _first(**changes: object) -> Change:
    """Return a change of the first stage."""
    return lambda point: replace(
        point,
        stages=(replace(point.stages[0], **changes), *point.stages[1:]),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        (_first(devices=(0, 0, 1)), "C2"),
        (_first(devices=(0, 1, 7)), "C2"),
        (_first(rows=(3, 3, 4)), "rows"),
        (_first(rows=(4, 5, 0)), "rows"),
        (_first(rows=(4, 5)), "rows"),
        (_first(shares=(5, 1, 3)), "rows"),
        (_first(shares=(3, 3, 3, 1)), "rows"),
        (_first(shares=(3, 0, 3, 3)), "rows"),
        (_first(blocks=5), "C1"),
        (lambda point: replace(point, blocks=(6, 6, 0)), "C1"),
        (lambda point: replace(point, num_micro_batches=4), "C1"),
        (lambda point: replace(point, latency_s=0.9 * point.latency_s), "latency"),
        (lambda point: replace(point, slowest_s=0.9 * point.slowest_s), "slowest stage"),
    ],
)
def test_a_wrong_point_is_refused(change: Change, constraint: str) -> None:
    solution = shared_partition(PROBLEM)
    (stage,) = solution.best.stages
    assert (stage.devices, stage.rows) == ((0, 1, 2), (3, 3, 3))
    verify_cluster(solution, PROBLEM)
    wrong = change(solution.best)
    with pytest.raises(PlanViolationError, match=f"^{constraint}: "):
        verify_cluster(replace(solution, front=(wrong,), best=wrong), PROBLEM)


@pytest.mark.parametrize(
    ("device", "constraint"),
    [
        ({"sharing": None}, "sharing"),
        ({"sharing": replace(_ROOM, max_blocks=5)}, "C7"),
        ({"sharing": replace(_ROOM, memory=replace(_ROOM.memory, limit_bytes=24.0))}, "C7"),
        ({"sharing": replace(_ROOM, memory=replace(_ROOM.memory, trained_bytes=14.2))}, "C7"),
        ({"energy": EnergyBudget(1.7, _LAW)}, "C9'"),
    ],
)
def test_limits_of_a_share_are_checked(device: dict[str, object], constraint: str) -> None:
    """A device with a third of the rows keeps a third of a batch's tensors: 24.3 bytes, 1.81 J. It
    receives the gradients of at most 2·(6 + 2)/3 blocks."""
    solution = shared_partition(PROBLEM)
    limited = replace(PROBLEM.devices[1], **device)  # type: ignore[arg-type]
    problem = replace(PROBLEM, devices=(PROBLEM.devices[0], limited, PROBLEM.devices[2]))
    with pytest.raises(PlanViolationError, match=f"^{constraint}: d1"):
        verify_cluster(solution, problem)


@pytest.mark.parametrize("shared", [False, True])
def test_memory_depends_on_the_place_of_a_device(shared: bool) -> None:
    """The device that holds more must be closer to the end of the pipeline."""
    limit = MemoryBudget(25.0, 0.0, 5.0, 0.0, 0.0, 4.0)
    rooms = [replace(limit, limit_bytes=each) for each in (12.0, 20.0, 20.0)]
    devices = tuple(
        DeviceProfile(f"d{k}", _LAW, memory=own, sharing=SharingLaw(0.01, memory=own))
        for k, own in enumerate(rooms)
    )
    problem = ClusterProblem(devices, 10, 8, 8, "flow_shop", in_flight=(2, 4, 8))
    last = Stage((1, 2), (1, 1), 8) if shared else Stage((1,), (1,), 8)
    m, first = (4, Stage((0,), (2,), 2)) if shared else (8, Stage((0,), (1,), 2))
    for order, fits in ((first, last), True), ((last, first), False):
        point = partition_of_stages(problem, order, m)
        if fits:
            check_plan(point, problem)
            continue
        with pytest.raises(PlanViolationError, match=r"^C7: d1 "):
            check_plan(point, problem)
