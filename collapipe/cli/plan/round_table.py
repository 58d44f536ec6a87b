"""A joint round as a table: who sends on which channel, with which power, and who waits."""

from rich.console import Console

from collapipe.cli.plan.decision import EXACT, Decision, JointRound
from collapipe.cli.plan.infeasible import full_power_energy
from collapipe.formatting import (
    certainty,
    counted,
    enough,
    print_lines,
    print_table,
    seconds,
    watts,
)
from optim.convergence import next_queues, round_gammas
from optim.radio.channel import links, power_limits

_COLUMNS = ("cluster", "channel", "power", "pipeline", "upload", "total", "drift", "queue")
_OWN_ROUND = "paper"  # the one other solver of rounds


def show_round(console: Console, decision: Decision, joint: JointRound) -> None:
    """Print the round, its objective, and why somebody is idle."""
    options, certificate = joint.problem.options, joint.solution.certificate
    channels, units = len(joint.problem.channels), len(joint.problem.uplinks)
    console.print(
        f"round: {counted(channels, 'channel')} for {counted(units, 'cluster')}, "
        f"drift {options.drift}, V = {options.drift_weight:g} per s",
        style="bold",
    )
    print_table(console, _COLUMNS, _rows(decision, joint))
    longest = max(a.partition.latency_s + a.upload_s for a in joint.solution.allocations)
    lines = [
        ("the round", f"{seconds(longest)}, its slowest cluster's batch and upload"),
        ("objective", f"{certificate.objective:.6g}; {_certainty(decision, joint)}"),
        *(("idle", line) for line in _idlers(decision, joint)),
    ]
    print_lines(console, lines)


def _certainty(decision: Decision, joint: JointRound) -> str:
    """A baseline chooses splits; who takes part with them is the exact solver's answer."""
    certificate = joint.solution.certificate
    if decision.solver in (EXACT, _OWN_ROUND):
        return certainty(certificate)
    return (
        f"the best round with these splits, by {certificate.solver}, in "
        f"{seconds(certificate.solve_time_s)}; how far from the best with others is not known"
    )


def _rows(decision: Decision, joint: JointRound) -> list[tuple[str, ...]]:
    gammas = round_gammas(joint.problem, joint.solution.allocations)
    after = next_queues(joint.problem.queues, gammas, joint.problem.options.gamma_max)
    return [
        (
            cluster.name,
            *_row(joint, unit),
            f"{gammas[unit]:.3g}",
            f"{joint.problem.queues[unit]:.3g} -> {after[unit]:.3g}",
        )
        for unit, cluster in enumerate(decision.inventory.clusters)
    ]


def _row(joint: JointRound, unit: int) -> tuple[str, ...]:
    allocation = joint.of(unit)
    if allocation is None:
        return ("idle", *"----")
    pipeline, upload = allocation.partition.latency_s, allocation.upload_s
    times = (seconds(each) for each in (pipeline, upload, pipeline + upload))
    return (str(allocation.channel), watts(allocation.power_w), *times)


def _idlers(decision: Decision, joint: JointRound) -> list[str]:
    """Who sits the round out, and whether it could have taken part."""
    pairs = links(joint.problem.uplinks, joint.problem.channels, decision.inventory.round.fading)
    possible = power_limits(pairs).max(axis=1) > 0
    needed = (pairs.energy_j / pairs.budgets).min(axis=1)
    at_full_power = full_power_energy(pairs).min(axis=1)
    return [
        f"{cluster.name}: "
        + (
            "the channels serve others better in this round"
            if possible[unit]
            else f"at any power its upload costs more than {needed[unit]:.3g} J on every channel, "
            f"it has {joint.problem.uplinks[unit].energy_j:.3g} J; "
            f"{enough(at_full_power[unit])} J pay for full power"
        )
        for unit, cluster in enumerate(decision.inventory.clusters)
        if not joint.of(unit)
    ]
