"""A decision as the JSON object that scripts read; its names are fixed."""

from typing import Any

from collapipe import __version__
from collapipe.cli.plan.decision import Decision, JointRound
from collapipe.plan import Certificate
from optim.convergence import next_queues, round_gammas
from optim.problem import Allocation, Partition
from optim.timeline import timeline


def described(decision: Decision) -> dict[str, Any]:
    """``clusters``, ``version`` and, for a joint round, ``round``."""
    units = range(len(decision.problems))
    answer: dict[str, Any] = {
        "version": __version__,
        "clusters": [_cluster(decision, unit) for unit in units],
    }
    if decision.round:
        answer["round"] = _round(decision, decision.round)
    return answer


def _cluster(decision: Decision, unit: int) -> dict[str, Any]:
    """The cluster's fastest plan, whatever a round makes of it, with its front."""
    solution = decision.solutions[unit]
    certificate = solution.certificate
    return {
        "name": decision.inventory.clusters[unit].name,
        **_plan(decision, unit, solution.best),
        "lower_bound_s": certificate.lower_bound,
        "gap": certificate.gap,
        "solver": certificate.solver,
        "solve_time_s": certificate.solve_time_s,
        "front": [_point(point) for point in solution.front],
    }


def _plan(decision: Decision, unit: int, partition: Partition) -> dict[str, Any]:
    problem = decision.problems[unit]
    segments = [
        {
            "device": problem.devices[stage.device].name,
            "first_block": stage.span.first,
            "blocks": stage.span.blocks,
        }
        for stage in timeline(problem, partition)
    ]
    return {**_point(partition), "segments": segments}


def _point(partition: Partition) -> dict[str, Any]:
    return {
        "num_segments": partition.num_segments,
        "num_micro_batches": partition.num_micro_batches,
        "latency_s": partition.latency_s,
    }


def _round(decision: Decision, joint: JointRound) -> dict[str, Any]:
    names = [cluster.name for cluster in decision.inventory.clusters]
    allocations = joint.solution.allocations
    gammas = round_gammas(joint.problem, allocations)
    queues = next_queues(joint.problem.queues, gammas, joint.problem.options.gamma_max)
    return {
        "units": [_unit(decision, names, allocation) for allocation in allocations],
        "idle": [name for unit, name in enumerate(names) if not joint.of(unit)],
        "makespan_s": max(_total_s(allocation) for allocation in allocations),
        **_certified(joint.solution.certificate),
        "gammas": dict(zip(names, gammas, strict=True)),
        "queues": dict(zip(names, queues, strict=True)),
    }


def _unit(decision: Decision, names: list[str], allocation: Allocation) -> dict[str, Any]:
    """``pipeline_s``, ``upload_s`` and their sum, with the plan that the round chose."""
    plan = _plan(decision, allocation.unit, allocation.partition)
    return {
        "cluster": names[allocation.unit],
        "channel": allocation.channel,
        "power_w": allocation.power_w,
        "pipeline_s": plan.pop("latency_s"),
        "upload_s": allocation.upload_s,
        "total_s": _total_s(allocation),
        **plan,
    }


def _certified(certificate: Certificate) -> dict[str, Any]:
    return {
        "objective": certificate.objective,
        "lower_bound": certificate.lower_bound,
        "gap": certificate.gap,
        "solver": certificate.solver,
        "solve_time_s": certificate.solve_time_s,
    }


def _total_s(allocation: Allocation) -> float:
    return allocation.partition.latency_s + allocation.upload_s
