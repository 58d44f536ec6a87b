"""The verified plan of an inventory: each cluster's pipelines, and the joint round."""

from dataclasses import dataclass

from collapipe.inventory.file import DescribedCluster, Inventory
from optim.problem import ClusterProblem, ClusterSolution, Partition
from optim.round.problem import Allocation, RoundProblem, RoundSolution
from optim.sharing.law import in_order, stages_of
from optim.timeline import SegmentTimes, StageTimes, stages_after_encoder, timeline


@dataclass(frozen=True, slots=True)
class SolvedCluster:
    """A cluster's problem for one place of the head, and its solution, which names the place."""

    problem: ClusterProblem
    solution: ClusterSolution


@dataclass(frozen=True, slots=True)
class PlannedCluster:
    """A cluster, solved for each place that its head may have.

    A cluster outside a joint round has no ``allocation``.
    """

    cluster: DescribedCluster
    solved: tuple[SolvedCluster, ...]
    allocation: Allocation | None = None
    uplink: str = "streamed"  # see ``RoundOptions``

    @property
    def problem(self) -> ClusterProblem:
        """The problem for the head's place in the round, else for the fastest place, with each
        device as it computes and sends in the plan."""
        problem, partition = self.chosen.problem, self.partition
        ordered = in_order(problem, stages_of(problem, partition))
        return ordered.in_modes(partition.recomputing)

    @property
    def fastest(self) -> SolvedCluster:
        """The place of the head with the fastest pipeline, independent of any round."""
        return min(self.solved, key=lambda each: each.solution.best.latency_s)

    @property
    def chosen(self) -> SolvedCluster:
        """The head's place in the round, else the fastest, before any device recomputes."""
        if self.allocation is None:
            return self.fastest
        head = self.allocation.partition.head
        return next(each for each in self.solved if each.solution.best.head == head)

    @property
    def partition(self) -> Partition:
        """The round's partition, or without a round the cluster's fastest."""
        return self.allocation.partition if self.allocation else self.chosen.solution.best

    @property
    def segments(self) -> tuple[SegmentTimes, ...]:
        """The times at which the chosen partition's devices compute and send."""
        return timeline(self.problem, self.partition)

    @property
    def order(self) -> list[int]:
        """All devices, those that compute first and in pipeline order."""
        used = [each.device for each in self.segments]
        return [*used, *(k for k in range(len(self.problem.devices)) if k not in used)]

    @property
    def later_stages(self) -> tuple[StageTimes, ...]:
        """The busy times of the stages after the encoder, for a cluster in a round."""
        sent_s, partition = self.activation_s, self.partition
        if self.uplink != "after" or not sent_s:
            return stages_after_encoder(self.problem, partition, sent_s)
        waits = StageTimes("uplink", sent_s, (partition.latency_s,))
        return waits, *stages_after_encoder(self.problem, partition, 0.0)

    @property
    def total_s(self) -> float:
        """Seconds until the batch and its upload, if any, are done."""
        return self.allocation.finish_s if self.allocation else self.partition.latency_s

    @property
    def activation_s(self) -> float:
        """Seconds of the upload for the batch's activations; the rest is for the model."""
        uplink, allocation = self.cluster.uplink, self.allocation
        if uplink is None or allocation is None:
            return 0.0
        return uplink.sending(allocation.payload).activation_share * allocation.upload_s


@dataclass(frozen=True, slots=True)
class JointRound:
    """The round's problem over all clusters, its solution, and the resulting Γ_n and queues."""

    problem: RoundProblem
    solution: RoundSolution
    gammas: tuple[float, ...]
    queues: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """Seconds until the slowest scheduled cluster has uploaded."""
        return max(each.finish_s for each in self.solution.allocations)


@dataclass(frozen=True, slots=True)
class InventoryPlan:
    """The verified plan of an inventory; ``clusters`` in the file's order."""

    inventory: Inventory
    solver: str
    clusters: tuple[PlannedCluster, ...]
    round: JointRound | None
