"""The table of a joint round, how good the round is, and why clusters are idle in it."""

import numpy as np
from rich.console import Console

from collapipe.formatting import certainty, counted, print_lines, print_table, seconds, watts
from collapipe.inventory.planned import InventoryPlan, JointRound, PlannedCluster
from collapipe.inventory.planning import EXACT, SHARED
from optim.latency import round_up
from optim.round.channel import links, power_limits

_COLUMNS = ("cluster", "channel", "power", "pipeline", "upload", "total", "drift", "queue")
_OWN_ROUND = "paper"  # the only other solver of rounds


def show_round(console: Console, plan: InventoryPlan, joint: JointRound) -> None:
    """Print the round's options, a row for each cluster, and what the round achieves."""
    options, certificate = joint.problem.options, joint.solution.certificate
    channels, units = len(joint.problem.channels), len(joint.problem.uplinks)
    console.print(
        f"round: {counted(channels, 'channel')} for {counted(units, 'cluster')}, "
        f"drift {options.drift}, V = {options.drift_weight:g} per s",
        style="bold",
    )
    print_table(console, _COLUMNS, [_round_row(p, joint, n) for n, p in enumerate(plan.clusters)])
    lines = [
        ("the round", f"{seconds(joint.makespan_s)}, until its slowest cluster is done"),
        ("objective", f"{certificate.objective:.6g}; {_round_certainty(plan.solver, joint)}"),
        *(("idle", line) for line in _idle_lines(plan, joint)),
    ]
    print_lines(console, lines)


def _round_certainty(solver: str, joint: JointRound) -> str:
    """Return the round's certainty; for a baseline's splits the exact solver chooses the units."""
    certificate = joint.solution.certificate
    if solver in (EXACT, SHARED, _OWN_ROUND):
        return certainty(certificate, "round of such pipelines", "better")
    return (
        f"the best round with these splits, by {certificate.solver}, in "
        f"{seconds(certificate.solve_time_s)}; how far from the best with others is not known"
    )


def _round_row(planned: PlannedCluster, joint: JointRound, unit: int) -> tuple[str, ...]:
    allocation = planned.allocation
    sending: tuple[str, ...] = ("idle", *"----")
    if allocation:
        times = map(seconds, (planned.partition.latency_s, allocation.upload_s, planned.total_s))
        sending = (f"{allocation.channel}", watts(allocation.power_w), *times)
    queue = f"{joint.problem.queues[unit]:.3g} -> {joint.queues[unit]:.3g}"
    return (planned.cluster.name, *sending, f"{joint.gammas[unit]:.3g}", queue)


def _idle_lines(plan: InventoryPlan, joint: JointRound) -> list[str]:
    """Return the idle clusters, and whether their energy would have allowed an upload."""
    problem, options = joint.problem, joint.problem.options
    pairs = links(problem.uplinks, problem.channels, options.fading, options.energy)
    possible, offered = power_limits(pairs).max(axis=(0, 2)) > 0, pairs.max_power_w > 0
    needed, at_full_power = (
        np.where(offered, joules, np.inf).min(axis=(0, 2))
        for joules in (pairs.energy_j / pairs.budgets, pairs.energies(pairs.max_power_w))
    )
    lines = []
    for unit in (n for n, planned in enumerate(plan.clusters) if not planned.allocation):
        why = "the channels serve others better in this round"
        if not possible[unit]:
            why = (
                f"at any power its upload costs more than {needed[unit]:.3g} J on every channel, "
                f"it has {problem.uplinks[unit].energy_j:.3g} J; "
                f"{round_up(at_full_power[unit])} J pay for full power"
            )
        lines.append(f"{plan.clusters[unit].cluster.name}: {why}")
    return lines
