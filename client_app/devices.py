"""A control unit's devices: who they are, what each holds, and another plan when one is lost."""

from collections.abc import Collection, Mapping

import collapipe
from collapipe.config import Settings
from collapipe.credentials.credentials import load
from collapipe.errors import InfeasibleRoundError, RoundFailedError
from collapipe.inventory.cluster import DeviceCluster
from collapipe.models.description import describe
from collapipe.models.part import Part
from collapipe.models.split import ModelSpec, block_name
from collapipe.plan import ClusterPlan, SegmentPlan, Span
from collapipe.state import DeviceProfile
from collapipe.tensors import Tensors
from collapipe.wire.dialing import Dialer
from collapipe.wire.messages import TrainRequest
from collapipe.wire.segments import SegmentDescription
from optim.partition.exact import exact_partition
from optim.problem import ClusterProblem
from pipeline.engine import Pipeline
from pipeline.head import HeadStage
from pipeline.remote.replica import Replica, starting_with
from pipeline.remote.segments import Cluster, RemoteSegments
from pipeline.timer import PhaseTimer

_HUNG_S, _HUNG_CHUNKS = 10.0, 20.0  # an action takes longer than this, and than so many planned


class DevicePipeline:
    """A round's pipeline on the devices of ``cluster``, while the context is open."""

    def __init__(
        self,
        settings: Settings,
        cluster: DeviceCluster,
        request: TrainRequest,
        spec: ModelSpec,
        devices: Mapping[str, DeviceProfile],
        weights: Tensors,
        state: Tensors,
    ) -> None:
        self._settings, self._plan = settings, request.plan
        self._devices, self._spec = devices, spec
        blocks = [block_name(index) for index in range(spec.num_blocks)]
        replica = Replica(blocks, starting_with(weights, state))
        roster = {each.name: each for each in cluster.roster(request.plan.unit)}
        own = cluster.credentials
        dialer = Dialer(load(own) if own else None)
        reach = Cluster(roster, dialer, self._without, self._hung_s())
        common = SegmentDescription(
            version=collapipe.__version__,
            session="",
            unit=request.plan.unit,
            round=request.round,
            epoch=0,
            seed=settings.seed,
            model=describe(spec),
            span=Span(0, 1),
            stage=0,
            num_segments=1,
            num_micro_batches=request.plan.num_micro_batches,
            schedule=request.plan.schedule,
            dtype=settings.pipeline.dtype,
            optimizer=settings.optimizer,
            memory_bytes=0.0,
            next_session=None,
            next=None,
            replicate_every=settings.pipeline.replicate_every,
        )
        self._segments = RemoteSegments(request.plan, reach, common, spec.dim, replica)

    def __enter__(self) -> RemoteSegments:
        return self._segments.__enter__()

    def __exit__(self, *error: object) -> None:
        self._segments.__exit__(*error)

    def pipeline(self, embedding: Part, head: HeadStage) -> Pipeline:
        """Embedding and head around the devices' segments."""
        m = self._plan.num_micro_batches
        return Pipeline(m, embedding, self._segments, head, PhaseTimer())

    def _without(self, lost: Collection[str]) -> ClusterPlan:
        """The fastest split over the devices that are left, in the same micro-batches."""
        left = tuple(each for name, each in self._devices.items() if name not in lost)
        gone = ", ".join(sorted(lost))
        if not left:
            raise RoundFailedError(f"unit {self._plan.unit}: lost all its devices ({gone})")
        settings, m = self._settings, self._plan.num_micro_batches
        problem = ClusterProblem(left, self._spec.num_blocks, settings.batch_size, m, "overlap")
        try:
            blocks = exact_partition(problem).best.blocks
        except InfeasibleRoundError as error:
            raise RoundFailedError(f"unit {self._plan.unit}: without {gone}: {error}") from error
        segments, first = list[SegmentPlan](), 0
        for device, held in zip(left, blocks, strict=True):
            if held:
                segments.append(SegmentPlan(device.name, Span(first, held)))
                first += held
        return ClusterPlan(self._plan.unit, tuple(segments), m, self._plan.schedule)

    def _hung_s(self) -> float:
        """More than any action of a healthy device takes."""
        samples = self._settings.batch_size / self._plan.num_micro_batches
        held = {each.device: each.span.blocks for each in self._plan.segments}
        planned = (self._devices[name].time.compute(n, samples) for name, n in held.items())
        return max(_HUNG_S, _HUNG_CHUNKS * max(planned, default=0.0))
