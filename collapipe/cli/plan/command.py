"""``collapipe plan``: split a model over an inventory's devices, and compute a batch's time."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from collapipe import __version__
from collapipe.errors import ConfigError
from collapipe.formatting import counted
from collapipe.inventory.file import read_inventory
from collapipe.inventory.planned import InventoryPlan, PlannedCluster
from collapipe.inventory.planning import plan_inventory
from collapipe.plan import Certificate
from collapipe.validation import nearest
from optim.problem import Partition
from optim.solvers import CLUSTER_SOLVERS
from optim.timeline import timeline


def run_plan(file: Path, as_json: bool, solver: str, plot: Path | None) -> None:
    """Plan the inventory and print a table or JSON; draw the pipelines to ``plot`` if given.

    Raises ``ConfigError``, before it prints anything, for invalid arguments or files.
    """
    if solver not in CLUSTER_SOLVERS:
        raise ConfigError(
            f"--solver {solver}: must be one of {', '.join(CLUSTER_SOLVERS)}"
            f"{nearest(solver, CLUSTER_SOLVERS)}"
        )
    inventory = read_inventory(file)
    with Console(stderr=True).status(f"planning {counted(len(inventory.clusters), 'cluster')}"):
        plan = plan_inventory(inventory, solver)
    for note in inventory.notes:
        print(f"note: {note}", file=sys.stderr)
    if plot is not None:
        from collapipe.cli.plan.gantt import draw

        draw(plan, plot)
    if as_json:
        print(json.dumps(_json_answer(plan), indent=2, allow_nan=False))
    else:
        from collapipe.cli.plan.table import show

        show(plan)


def _json_answer(plan: InventoryPlan) -> dict[str, Any]:
    """Return the JSON output, with fixed names because scripts read it.

    It has each cluster's fastest plan, even if the round uses another one, and the joint round.
    """
    clusters = [
        {
            "name": planned.cluster.name,
            "head": solution.best.head,
            **_split(planned, solution.best),
            **_certificate(solution.certificate, "lower_bound_s"),
            "witness_s": solution.certificate.witness,
            "front": [_point(point) for point in solution.front],
        }
        for planned in plan.clusters
        for solution in [planned.fastest.solution]
    ]
    answer: dict[str, Any] = {"version": __version__, "clusters": clusters}
    if joint := plan.round:
        names = [planned.cluster.name for planned in plan.clusters]
        answer["round"] = {
            "units": [_unit(planned) for planned in plan.clusters if planned.allocation],
            "idle": [planned.cluster.name for planned in plan.clusters if not planned.allocation],
            "makespan_s": joint.makespan_s,
            "objective": joint.solution.certificate.objective,
            **_certificate(joint.solution.certificate, "lower_bound"),
            "gammas": dict(zip(names, joint.gammas, strict=True)),
            "queues": dict(zip(names, joint.queues, strict=True)),
        }
    return answer


def _split(planned: PlannedCluster, partition: Partition) -> dict[str, Any]:
    segments = [
        {
            "device": planned.problem.devices[each.device].name,
            "first_block": each.span.first,
            "blocks": each.span.blocks,
            **({} if each.rows is None else {"rows": each.rows}),
            **({"recomputing": True} if each.device in partition.recomputing else {}),
        }
        for each in timeline(planned.problem, partition)
    ]
    return {**_point(partition), "segments": segments}


def _point(partition: Partition) -> dict[str, Any]:
    names = ("num_segments", "num_micro_batches", "latency_s")
    return {name: getattr(partition, name) for name in names}


def _unit(planned: PlannedCluster) -> dict[str, Any]:
    """Return a unit's times in the round, their total, and the split that the round chose."""
    allocation = planned.allocation
    assert allocation is not None
    split = _split(planned, allocation.partition)
    return {
        "cluster": planned.cluster.name,
        "head": allocation.partition.head,
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
