"""An inventory's plan as the JSON object that scripts read; its names are fixed."""

from typing import Any

from collapipe import __version__
from collapipe.plan import Certificate
from collapipe.planning.inventory_plan import InventoryPlan, JointRound, PlannedCluster
from optim.problem import Partition
from optim.timeline import timeline


def json_answer(plan: InventoryPlan) -> dict[str, Any]:
    """``clusters``, ``version`` and, for a joint round, ``round``."""
    answer: dict[str, Any] = {
        "version": __version__,
        "clusters": [_fastest(c) for c in plan.clusters],
    }
    if plan.round:
        answer["round"] = _round(plan, plan.round)
    return answer


def _fastest(planned: PlannedCluster) -> dict[str, Any]:
    """The cluster's fastest plan, whatever a round makes of it, with its front."""
    solution = planned.solution
    return {
        "name": planned.cluster.name,
        **_split(planned, solution.best),
        **_certificate(solution.certificate, "lower_bound_s"),
        "front": [_point(point) for point in solution.front],
    }


def _split(planned: PlannedCluster, partition: Partition) -> dict[str, Any]:
    segments = [
        {
            "device": planned.problem.devices[each.device].name,
            "first_block": each.span.first,
            "blocks": each.span.blocks,
        }
        for each in timeline(planned.problem, partition)
    ]
    return {**_point(partition), "segments": segments}


def _point(partition: Partition) -> dict[str, Any]:
    names = ("num_segments", "num_micro_batches", "latency_s")
    return {name: getattr(partition, name) for name in names}


def _round(plan: InventoryPlan, joint: JointRound) -> dict[str, Any]:
    names = [planned.cluster.name for planned in plan.clusters]
    return {
        "units": [_unit(planned) for planned in plan.clusters if planned.allocation],
        "idle": [planned.cluster.name for planned in plan.clusters if not planned.allocation],
        "makespan_s": joint.makespan_s,
        "objective": joint.solution.certificate.objective,
        **_certificate(joint.solution.certificate, "lower_bound"),
        "gammas": dict(zip(names, joint.gammas, strict=True)),
        "queues": dict(zip(names, joint.queues, strict=True)),
    }


def _unit(planned: PlannedCluster) -> dict[str, Any]:
    """``pipeline_s``, ``upload_s`` and their sum, with the split that the round chose."""
    allocation = planned.allocation
    assert allocation is not None
    split = _split(planned, allocation.partition)
    return {
        "cluster": planned.cluster.name,
        "channel": allocation.channel,
        "power_w": allocation.power_w,
        "pipeline_s": split.pop("latency_s"),
        "upload_s": allocation.upload_s,
        "total_s": planned.total_s,
        **split,
    }


def _certificate(certificate: Certificate, bound: str) -> dict[str, Any]:
    names = ("gap", "solver", "solve_time_s")
    return {bound: certificate.lower_bound, **{n: getattr(certificate, n) for n in names}}
