"""An inventory's problems, solved and verified; where one has no plan, why, as its file says it."""

from dataclasses import dataclass, replace

import numpy as np

from collapipe.devices.hardware import PhysicalDevice
from collapipe.errors import ConfigError, InfeasibleRoundError
from collapipe.formatting import counted, enough
from collapipe.inventory.file import Cluster, Inventory
from collapipe.state import DeviceProfile
from optim.convergence import next_queues, round_gammas
from optim.latency import block_caps
from optim.problem import (
    Allocation,
    ClusterProblem,
    ClusterSolution,
    Partition,
    RoundOptions,
    RoundProblem,
    RoundSolution,
)
from optim.radio.channel import links, power_limits
from optim.solvers import cluster_solver, round_solver
from optim.timeline import SegmentTimes, timeline
from optim.verify import verify_cluster, verify_round

EXACT = "exact"
_SEED = 0  # of the one baseline that draws its devices


@dataclass(frozen=True, slots=True)
class PlannedCluster:
    """A cluster, its problem and its answer; ``allocation`` is None without a part in a round."""

    cluster: Cluster
    problem: ClusterProblem
    solution: ClusterSolution
    allocation: Allocation | None = None

    @property
    def partition(self) -> Partition:
        """The round's choice, or the cluster's fastest where no round chose."""
        return self.allocation.partition if self.allocation else self.solution.best

    @property
    def segments(self) -> tuple[SegmentTimes, ...]:
        """When the chosen partition's devices compute and send."""
        return timeline(self.problem, self.partition)

    @property
    def total_s(self) -> float:
        """Seconds of the batch, and of the upload where it has one."""
        return self.partition.latency_s + (self.allocation.upload_s if self.allocation else 0.0)


@dataclass(frozen=True, slots=True)
class JointRound:
    """The round's problem over all clusters, its answer, and what the answer makes of queues."""

    problem: RoundProblem
    solution: RoundSolution
    gammas: tuple[float, ...]
    queues: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """Seconds until the slowest scheduled cluster has uploaded."""
        allocations = self.solution.allocations
        return max(each.partition.latency_s + each.upload_s for each in allocations)


@dataclass(frozen=True, slots=True)
class InventoryPlan:
    """The verified plan of an inventory; ``clusters`` in the file's order."""

    inventory: Inventory
    solver: str
    clusters: tuple[PlannedCluster, ...]
    round: JointRound | None


def plan_inventory(inventory: Inventory, solver: str) -> InventoryPlan:
    """Plan every cluster, and the round where the inventory has channels.

    Raises ``ConfigError`` where no plan exists.
    """
    planned = tuple(_plan_cluster(inventory, cluster, solver) for cluster in inventory.clusters)
    if not inventory.channels:
        return InventoryPlan(inventory, solver, planned, None)
    joint = _plan_round(inventory, planned, solver)
    by_unit = {each.unit: each for each in joint.solution.allocations}
    scheduled = tuple(replace(p, allocation=by_unit.get(n)) for n, p in enumerate(planned))
    return InventoryPlan(inventory, solver, scheduled, joint)


def _plan_cluster(inventory: Inventory, cluster: Cluster, solver: str) -> PlannedCluster:
    section, num_blocks = inventory.section, inventory.model.num_blocks
    problem = ClusterProblem(
        cluster.profiles,
        num_blocks,
        section.batch_size,
        section.most_micro_batches,
        section.latency,
    )
    try:
        solution = cluster_solver(solver)(problem, np.random.default_rng(_SEED))
    except InfeasibleRoundError as error:
        why = _no_room(problem, cluster, inventory.model.block_bytes) or str(error)
        raise inventory.document.error(cluster.loc, why) from error
    verify_cluster(solution, problem)
    return PlannedCluster(cluster, problem, solution)


def _plan_round(
    inventory: Inventory, planned: tuple[PlannedCluster, ...], solver: str
) -> JointRound:
    figures = inventory.section.round.model_dump()
    problem = RoundProblem(
        fronts=tuple(each.solution.front for each in planned),
        uplinks=tuple(c.uplink for c in inventory.clusters if c.uplink is not None),
        channels=inventory.channels,
        queues=figures.pop("queues") or (0.0,) * len(planned),
        num_blocks=inventory.model.num_blocks,
        options=RoundOptions(**figures),
    )
    try:
        solution = round_solver(solver)(problem)
    except InfeasibleRoundError as error:
        raise _no_upload(inventory, problem, str(error)) from error
    verify_round(solution, problem)
    if solver != EXACT:  # what is proved among a baseline's splits proves nothing about all splits
        certificate = replace(solution.certificate, lower_bound=0.0, solver=solver)
        solution = replace(solution, certificate=certificate)
    gammas = round_gammas(problem, solution.allocations)
    queues = next_queues(problem.queues, gammas, problem.options.gamma_max)
    return JointRound(problem, solution, gammas, queues)


def _no_room(problem: ClusterProblem, cluster: Cluster, block_bytes: float | None) -> str | None:
    """Which limit binds where, if the devices cannot hold the model at any m. None: they can."""
    caps = block_caps(problem)
    row = int(caps.sum(axis=1).argmax())
    held, count = [int(cap) for cap in caps[row]], row + 1
    if sum(held) >= problem.num_blocks:
        return None
    room = [
        _Room(device, profile, cap, problem.batch_size / count, count, block_bytes)
        for device, profile, cap in zip(cluster.devices, cluster.profiles, held, strict=True)
    ]
    pieces = f" in {counted(count, 'micro-batch')}" if any(each.by_energy for each in room) else ""
    lower = f", or lower model.num_blocks to {sum(held)}" if any(held) else ""
    return (
        f"the devices hold at most {sum(held)} of {problem.num_blocks} blocks{pieces} "
        f"({', '.join(each.binding() for each in room)}); "
        f"raise {_remedy(room, problem.num_blocks)}{lower}"
    )


@dataclass(frozen=True, slots=True)
class _Room:
    """A device that holds ``cap`` blocks of a batch in ``count`` micro-batches, and why no more."""

    device: PhysicalDevice
    profile: DeviceProfile
    cap: int
    size: float
    count: int
    block_bytes: float | None

    @property
    def by_energy(self) -> bool:
        most = self.profile.max_blocks
        return self.profile.energy is not None and (most is None or self.cap < most)

    def binding(self) -> str:
        """The limit that binds, with its figures."""
        limit = "max_blocks"
        if self.by_energy:
            blocks = "1 block takes" if not self.cap else f"{self.cap + 1} blocks take"
            limit = (
                f"energy_j {self.device.energy_j:g} where {blocks} {self.joules(self.cap + 1)} J"
            )
        elif self.device.is_limited_by_memory(self.block_bytes):
            limit = f"memory_bytes {self.device.memory_bytes:g} at block_bytes {self.block_bytes:g}"
        return f"{self.device.name}: {self.cap} by {limit}"

    def joules(self, blocks: int) -> str:
        """Of a batch, rounded up."""
        assert self.profile.energy is not None
        return enough(self.count * self.profile.energy.law.chunk(blocks, self.size))

    def key(self) -> str:
        """The key that limits blocks whatever the energy."""
        if self.device.is_limited_by_memory(self.block_bytes):
            return f"{self.device.name}'s memory_bytes ({self.block_bytes:g} a block)"
        return f"{self.device.name}'s max_blocks"


def _remedy(room: list[_Room], num_blocks: int) -> str:
    """More energy, as far as memory lets it help, then memory."""
    raises, missing = [], num_blocks - sum(each.cap for each in room)
    for each in room:
        most = num_blocks if each.profile.max_blocks is None else each.profile.max_blocks
        more = min(most - each.cap, missing)
        if each.by_energy and more > 0:
            raises.append(f"{each.device.name}'s energy_j to {each.joules(each.cap + more)}")
            missing -= more
    if missing:
        full = [each for each in room if not each.by_energy] or room
        keys = [each.key() for each in full if each.profile.max_blocks is not None]
        blocks = "1 block" if missing == 1 else f"{missing} blocks in all"
        raises.append(f"{' or '.join(keys)} by {blocks}")
    return " and ".join(raises)


def _no_upload(inventory: Inventory, problem: RoundProblem, why: str) -> ConfigError:
    """No cluster can afford an upload: the nearest to it, and what full power takes."""
    pairs = links(problem.uplinks, problem.channels, problem.options.fading)
    if power_limits(pairs).any():
        return ConfigError(f"{inventory.document.file}: round: {why}")
    needed = pairs.energies(pairs.max_power_w)
    lacking = needed / pairs.energy_j
    unit, channel = (int(place) for place in np.unravel_index(lacking.argmin(), lacking.shape))
    cluster, uplink = inventory.clusters[unit], problem.uplinks[unit]
    return inventory.document.error(
        (*cluster.loc, "uplink", "energy_j"),
        f"no cluster can afford its upload; nearest to it is {cluster.name} on channel {channel}: "
        f"{uplink.model_bits:.4g} bits at power_w={uplink.max_power_w:g} take "
        f"{enough(float(needed[unit, channel]))} J; give it these, or send fewer bits",
    )
