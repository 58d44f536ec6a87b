"""A joint round as a table: who sends on which channel, with which power, and who waits."""

from rich.console import Console

from collapipe.formatting import (
    certainty,
    counted,
    enough,
    print_lines,
    print_table,
    seconds,
    watts,
)
from collapipe.planning.infeasible import full_power_energy
from collapipe.planning.inventory_plan import EXACT, InventoryPlan, JointRound, PlannedCluster
from optim.radio.channel import links, power_limits

_COLUMNS = ("cluster", "channel", "power", "pipeline", "upload", "total", "drift", "queue")
_OWN_ROUND = "paper"  # the one other solver of rounds


def show_round(console: Console, plan: InventoryPlan, joint: JointRound) -> None:
    """Print the round, its objective, and why some clusters are idle."""
    options, certificate = joint.problem.options, joint.solution.certificate
    channels, units = len(joint.problem.channels), len(joint.problem.uplinks)
    console.print(
        f"round: {counted(channels, 'channel')} for {counted(units, 'cluster')}, "
        f"drift {options.drift}, V = {options.drift_weight:g} per s",
        style="bold",
    )
    print_table(console, _COLUMNS, [_row(p, joint, n) for n, p in enumerate(plan.clusters)])
    lines = [
        ("the round", f"{seconds(joint.makespan_s)}, its slowest cluster's batch and upload"),
        ("objective", f"{certificate.objective:.6g}; {_certainty(plan.solver, joint)}"),
        *(("idle", line) for line in _idlers(plan, joint)),
    ]
    print_lines(console, lines)


def _certainty(solver: str, joint: JointRound) -> str:
    """A baseline chooses splits; who takes part with them is the exact solver's answer."""
    certificate = joint.solution.certificate
    if solver in (EXACT, _OWN_ROUND):
        return certainty(certificate)
    return (
        f"the best round with these splits, by {certificate.solver}, in "
        f"{seconds(certificate.solve_time_s)}; how far from the best with others is not known"
    )


def _row(planned: PlannedCluster, joint: JointRound, unit: int) -> tuple[str, ...]:
    allocation = planned.allocation
    sending: tuple[str, ...] = ("idle", *"----")
    if allocation:
        times = (planned.partition.latency_s, allocation.upload_s, planned.total_s)
        sending = (f"{allocation.channel}", watts(allocation.power_w), *map(seconds, times))
    queue = f"{joint.problem.queues[unit]:.3g} -> {joint.queues[unit]:.3g}"
    return (planned.cluster.name, *sending, f"{joint.gammas[unit]:.3g}", queue)


def _idlers(plan: InventoryPlan, joint: JointRound) -> list[str]:
    """Who sits the round out, and whether it could have taken part."""
    pairs = links(joint.problem.uplinks, joint.problem.channels, joint.problem.options.fading)
    possible = power_limits(pairs).max(axis=1) > 0
    needed = (pairs.energy_j / pairs.budgets).min(axis=1)
    at_full_power = full_power_energy(pairs).min(axis=1)
    return [
        f"{planned.cluster.name}: "
        + (
            "the channels serve others better in this round"
            if possible[unit]
            else f"at any power its upload costs more than {needed[unit]:.3g} J on every channel, "
            f"it has {joint.problem.uplinks[unit].energy_j:.3g} J; "
            f"{enough(at_full_power[unit])} J pay for full power"
        )
        for unit, planned in enumerate(plan.clusters)
        if not planned.allocation
    ]
