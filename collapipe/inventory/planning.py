"""Plan an inventory's clusters and verify the plans; errors use the file's keys."""

from dataclasses import replace

import numpy as np

from collapipe.errors import ConfigError, InfeasibleRoundError
from collapipe.formatting import amount
from collapipe.inventory.file import DescribedCluster, Inventory
from collapipe.inventory.planned import InventoryPlan, JointRound, PlannedCluster, SolvedCluster
from collapipe.state import HeadPlace
from optim.cluster.problem import activation_times, head_places
from optim.latency import model_too_large, round_up
from optim.problem import ClusterProblem, ClusterSolution
from optim.round.channel import links, power_limits
from optim.round.convergence import next_queues, round_gammas
from optim.round.problem import RoundOptions, RoundProblem
from optim.sharing.modes import held_in_order
from optim.solvers import cluster_solver, round_solver
from optim.step import DEFAULT, in_flight
from optim.verified import solve_verified, witnessed
from optim.verify import verify_round

EXACT, SHARED = "exact", "shared"
_NO_HEAD_CHOICE = "paper", "vanilla_fl"  # solvers that do not choose the head's place
_SHARE = "; a plan with stages that devices share is possible: --solver shared"
_SMALLER = "; an adapter, fewer tokens or a smaller batch make blocks smaller"
_SEED = 0  # for the only baseline that draws its devices


def plan_inventory(inventory: Inventory, solver: str) -> InventoryPlan:
    """Plan every cluster, and the joint round if the inventory has channels.

    Raises ``ConfigError`` if no plan exists.
    """
    chooses = any(each.uplink is not None and each.uplink.payloads for each in inventory.clusters)
    if chooses and solver in _NO_HEAD_CHOICE:
        raise ConfigError(
            f"{inventory.document.file}: --solver {solver} does not decide where heads train; "
            "leave out control_unit, or take --solver exact"
        )
    times: list[tuple[float, ...]] = [(0.0,)] * len(inventory.clusters)
    if inventory.channels:
        options = _round_options(inventory)
        if solver == SHARED and options.prices_segments:
            raise ConfigError(
                f"{inventory.document.file}: --solver shared finds the fastest plans of any S, but "
                "the round prices S; set round.drift=gamma and round.segment_price=none, or take "
                "--solver exact"
            )
        times = activation_times(inventory.uplinks, inventory.channels, options)
    planned = tuple(
        _plan_cluster(inventory, cluster, activation_s, solver)
        for cluster, activation_s in zip(inventory.clusters, times, strict=True)
    )
    if not inventory.channels:
        return InventoryPlan(inventory, solver, planned, None)
    joint = _plan_round(inventory, planned, solver)
    by_unit = {each.unit: each for each in joint.solution.allocations}
    uplink = joint.problem.options.uplink
    scheduled = tuple(
        replace(p, allocation=by_unit.get(n), uplink=uplink) for n, p in enumerate(planned)
    )
    return InventoryPlan(inventory, solver, scheduled, joint)


def _plan_cluster(
    inventory: Inventory, cluster: DescribedCluster, activation_s: tuple[float, ...], solver: str
) -> PlannedCluster:
    if cluster.misfit:
        raise cluster.misfit
    solved = []
    for head in head_places(cluster.uplink):
        taking = (0.0,) if head == "control_unit" else activation_s
        problem = _problem(inventory, cluster, taking, head)
        solution = _solution(inventory, cluster, problem, solver)
        front = tuple(replace(point, head=head) for point in solution.front)
        best = replace(solution.best, head=head)
        solved.append(SolvedCluster(problem, replace(solution, front=front, best=best)))
    return PlannedCluster(cluster, tuple(solved))


def _problem(
    inventory: Inventory,
    cluster: DescribedCluster,
    activation_s: tuple[float, ...],
    head: HeadPlace | None,
) -> ClusterProblem:
    section, uplink = inventory.section, cluster.uplink and cluster.uplink.placed(head)
    return ClusterProblem(
        cluster.profiles,
        inventory.model.num_blocks,
        section.batch_size,
        section.most_micro_batches,
        section.latency,
        activation_s,
        uplink.head_s if uplink else cluster.head_s or 0.0,
        uplink.gradient_s if uplink else 0.0,
        in_flight=in_flight(DEFAULT, len(cluster.profiles)),
    )


def _solution(
    inventory: Inventory, cluster: DescribedCluster, problem: ClusterProblem, solver: str
) -> ClusterSolution:
    try:
        found = solve_verified(problem, cluster_solver(solver), np.random.default_rng(_SEED))
        return witnessed(problem, found)
    except InfeasibleRoundError as error:
        reason, (totals, most) = error, held_in_order(problem)
        if totals.max() < problem.num_blocks:
            limits = _limits(cluster, _block_bytes(inventory, problem, most[0]))
            reason = model_too_large(problem, limits, most)
        ways = _SMALLER if inventory.model.tokens else ""
        ways += _SHARE if solver == EXACT and _fits_shared(problem) else ""
        raise inventory.document.error(cluster.loc, f"{reason}{ways}") from error


def _fits_shared(problem: ClusterProblem) -> bool:
    """Whether stages that devices share have a plan."""
    try:
        solve_verified(problem, cluster_solver(SHARED), np.random.default_rng(_SEED))
    except InfeasibleRoundError:
        return False
    return True


def _plan_round(
    inventory: Inventory, planned: tuple[PlannedCluster, ...], solver: str
) -> JointRound:
    problem = RoundProblem(
        fronts=tuple(
            tuple(point for each in p.solved for point in each.solution.front) for p in planned
        ),
        uplinks=inventory.uplinks,
        channels=inventory.channels,
        queues=inventory.section.round.queues or (0.0,) * len(planned),
        num_blocks=inventory.model.num_blocks,
        options=_round_options(inventory),
    )
    try:
        solution = round_solver(solver)(problem)
    except InfeasibleRoundError as error:
        raise _no_upload(inventory, problem, str(error)) from error
    verify_round(solution, problem)
    whole = all(each.solution.complete for p in planned for each in p.solved)
    # a bound over a baseline's splits, or over some of the best ones, is no bound over all splits
    if solver not in (EXACT, SHARED) or not whole:
        certificate = replace(solution.certificate, lower_bound=0.0, solver=solver)
        solution = replace(solution, certificate=certificate)
    gammas = round_gammas(problem, solution.allocations)
    queues = next_queues(problem.queues, gammas, problem.options.gamma_max)
    return JointRound(problem, solution, gammas, queues)


def _round_options(inventory: Inventory) -> RoundOptions:
    figures = inventory.section.round.model_dump(exclude_none=True, exclude={"queues"})
    return RoundOptions(**figures)


def _block_bytes(inventory: Inventory, problem: ClusterProblem, m: int) -> float | None:
    """Return the bytes of a block with ``m`` micro-batches on the last of the pipeline's devices,
    which keeps least, and recomputes if the planner may decide that."""
    if inventory.model.block_bytes is None:
        return None
    cost = inventory.model.recomputing or inventory.model.cost
    kept = problem.kept(m, place=1)
    return cost.block_bytes - (1 - kept) * cost.batch_block_bytes


def _limits(cluster: DescribedCluster, block_bytes: float | None) -> list[str]:
    """Return, for each device, the keys that limit its blocks apart from energy, with values."""
    return [
        " and ".join(
            key
            if key == "max_blocks"
            else f"{key} {device.memory_bytes:g} (at least {amount(block_bytes or 0, 'B')} a block)"
            for key in device.block_limits(block_bytes)
        )
        for device in cluster.devices
    ]


def _no_upload(inventory: Inventory, problem: RoundProblem, why: str) -> ConfigError:
    """Return an error about the cluster nearest to affording an upload, with its energy need."""
    options = problem.options
    pairs = links(problem.uplinks, problem.channels, options.fading, options.energy)
    if power_limits(pairs).any():
        return ConfigError(f"{inventory.document.file}: round: {why}")
    offered = pairs.max_power_w > 0
    needed = np.where(offered, pairs.energies(pairs.max_power_w), np.inf)
    lacking = needed / pairs.energy_j
    nearest = np.unravel_index(lacking.argmin(), lacking.shape)
    _, unit, channel = map(int, nearest)
    cluster, uplink = inventory.clusters[unit], problem.uplinks[unit]
    return inventory.document.error(
        (*cluster.loc, "uplink", "energy_j"),
        f"no cluster can afford its upload; nearest to it is {cluster.name} on channel {channel}: "
        f"{pairs.paid_bits[nearest]:.4g} bits at power_w={uplink.max_power_w:g} take "
        f"{round_up(float(needed[nearest]))} J; give it these, or send fewer bits",
    )
