"""The encoder's segments on devices, which go on without those that are lost."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import torch

from collapipe.errors import StageError, WireError
from collapipe.models.dropout import DropoutKey
from collapipe.models.split import block_name
from collapipe.plan import ClusterPlan, SegmentPlan
from collapipe.report import PIPELINE, DeviceReport, DeviceTrace
from collapipe.tensors import Tensors
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.segments import RoundDescription
from pipeline import schedule
from pipeline.hop_codec import HopCodec
from pipeline.interleave import StageRun, head_runs, interleave
from pipeline.remote.cluster import Cluster
from pipeline.remote.journal import (
    RecordedHead,
    Recording,
    RecordingPorts,
    StepRecord,
)
from pipeline.remote.measurements import Measurements
from pipeline.remote.placement import Placement, UnreachedError
from pipeline.remote.ports import Fence, HopError, StreamPorts
from pipeline.remote.replica import Replica
from pipeline.stage import FirstStage, LastStage, Stage
from pipeline.timer import PhaseTimer

_AHEAD = 16  # steps that may follow one whose copies are under way
_log = logging.getLogger(__name__)


class RemoteSegments:
    """A plan's segments on the devices that it names, while the context is open.

    ``common`` is what their descriptions have in common. Where a device is lost, the cluster
    is planned anew, its blocks come from the ``replica``, and the steps since are done again: the
    result is the same as without the loss. Where a device cannot dial the next one, though both
    live, hops go through the control unit. Raises ``StageError`` where no plan is left.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        cluster: Cluster,
        common: RoundDescription,
        dim: int,
        replica: Replica,
        timer: PhaseTimer,
    ) -> None:
        self._placed = Placement(plan, cluster, common, replica)
        self._cluster, self._common, self._dim = cluster, common, dim
        self._replica, self._timer = replica, timer
        self._measured = Measurements()
        self._lost: dict[str, str] = {}  # with the cause
        self._journal: list[StepRecord] = []  # steps since the last complete replica
        self._record: StepRecord | None = None  # the step under way
        self._norms: list[float] = []
        self.events: list[str] = []

    def __enter__(self) -> "RemoteSegments":
        try:
            self._replica.open()
            self._recovering(self._gather)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._placed.hang_up()
        for connection in self._placed.connections.values():
            connection.close()
        self._replica.close()

    def run(
        self, embedding: FirstStage, head: LastStage, key: DropoutKey, num_micro_batches: int
    ) -> None:
        record = self._record = StepRecord(key.step, num_micro_batches)
        asked = RecordedHead(head, record)

        def work() -> None:
            self._keep_up()
            embedding.forget()
            self._pass(record, embedding, asked)

        with self._timer.phase(PIPELINE):
            self._recovering(work)

    @property
    def arrived(self) -> threading.Event:
        """Once it is set, who waits for devices looks whether the head can go on."""
        return self._placed.arrived

    @property
    def lost(self) -> Collection[str]:
        """Devices that are gone, or could not go on."""
        return self._lost.keys()

    @property
    def relays(self) -> bool:
        """Whether hops go through the control unit."""
        return self._cluster.relay

    @property
    def plan(self) -> ClusterPlan:
        """Who holds what now."""
        return self._placed.plan

    @property
    def action_times(self) -> list[torch.Tensor]:
        """Of the last step, each segment's table as ``Measurements`` has it."""
        return self._measured.last_step

    def measured(self) -> list[DeviceReport]:
        """What each device of the plan measured since it has had its blocks, in their order."""
        return self._measured.reports(self.plan)

    def traces(self) -> list[DeviceTrace]:
        """When the devices of the plan did what, by the control unit's clock."""
        return self._measured.traces(self.plan, self._placed.clocks)

    def squared_norms(self) -> list[float]:
        return self._norms

    def step(self, rate: float, scale: float) -> None:
        """Return at once; a device that is lost meanwhile is noticed by the next that waits."""
        assert self._record is not None
        record, self._record = replace(self._record, rate=rate, scale=scale), None
        self._trim()
        self._journal.append(record)
        self._tell_step(record)

    def weights(self) -> Tensors:
        return {key: each for key, each in self._state() if "/" not in key}

    def optimizer_state(self) -> Tensors:
        return {key: each for key, each in self._state() if "/" in key}

    def forget(self) -> None:
        """Devices drop what they hold when their streams end."""

    def collect(self) -> None:
        """Wait until all blocks are here as they are after the last step."""
        if not self._trim():
            return
        last, every = self._journal[-1].step, self._common.replicate_every
        if not every or (last + 1) % every:
            self._placed.tell(FrameKind.STATE, last)
        self._placed.wait(lambda: self._replica.step == last)

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All that the blocks are after the last step, a block at a time."""
        self._recovering(self.collect)
        for index in range(sum(each.span.blocks for each in self.plan.segments)):
            yield from self._replica.tensors(block_name(index)).items()

    def _recovering(self, work: Callable[[], None]) -> None:
        """Do ``work``; where a device is lost, again, without it."""
        while True:
            try:
                return work()
            except (StageError, HopError) as error:
                lost = self._placed.blamed(error)
            self._recover(lost)

    def _recover(self, lost: StageError) -> None:
        """Go on without a device, and without those that are lost meanwhile."""
        began, before = time.monotonic(), len(self._lost)
        while True:
            try:
                self._without(lost)
            except (StageError, HopError) as error:
                lost = self._placed.blamed(error)
            else:
                if len(self._lost) == before:
                    return
                left = " and ".join(self._placed.names)
                gone = "; ".join(f"{name} ({cause})" for name, cause in self._lost.items())
                seconds = time.monotonic() - began
                self.events.append(f"lost {gone}; went on with {left} after {seconds:.2f} s")
                return

    def _without(self, lost: StageError) -> None:
        """Another plan or other hops, and the steps since the last complete replica."""
        plan = self._relayed(lost) if isinstance(lost, UnreachedError) else self._replanned(lost)
        self._placed = self._placed.followed_by(plan, self._cluster)
        self._gather()
        for record in list(self._journal):
            embedding, head = Recording(record.activations, {}), Recording({}, record.gradients)
            self._pass(record, embedding, head)
            self._tell_step(record)

    def _relayed(self, unreached: UnreachedError) -> ClusterPlan:
        """The same plan, from now on with hops through the control unit."""
        self._cluster = replace(self._cluster, relay=True)
        ends, cause = f"{unreached.source} cannot dial {unreached.device}", unreached.cause
        _log.info("unit %d: %s: %s", self._common.unit, ends, cause)
        self.events.append(
            f"{ends} ({cause}); from now on hops go through the control unit, as with "
            "pipeline.relay=true: set it, or correct the address"
        )
        return self.plan

    def _replanned(self, lost: StageError) -> ClusterPlan:
        """A plan without the device, whose streams end."""
        told = self._placed.trouble(lost.device)  # says more than that its stream ended
        cause = f"{told.kind}: {told.message}" if told and told.side is None else lost.cause
        self._lost[lost.device] = cause
        _log.info("unit %d: lost %s: %s", self._common.unit, lost.device, cause)
        self._placed.drop(lost.device)
        return self._cluster.replan(dict(self._lost))

    def _gather(self) -> None:
        """Give devices their segments, from the last complete replica, unless they have them."""
        if not self._placed.hops:
            self._measured.clear()
            self._placed.gather()
            self._trim()  # to the copies that devices have got

    def _trim(self) -> int:
        """Forget steps that all blocks have been sent after; how many are left."""
        base = self._replica.step
        self._journal = [each for each in self._journal if base is None or each.step > base]
        return len(self._journal)

    def _keep_up(self) -> None:
        """Wait where copies of the blocks are far behind, for all steps since are kept too. Raises
        ``StageError`` where a device sends none."""
        done, began = self._replica.step, time.monotonic()
        while self._common.replicate_every and self._trim() > _AHEAD + self._common.replicate_every:
            if self._replica.step != done:
                done, began = self._replica.step, time.monotonic()
            if time.monotonic() - began > self._placed.hung_s:
                raise StageError(self._replica.waits_for(), "has not sent its blocks")
            self._placed.idle()

    def _pass(self, record: StepRecord, embedding: Stage, head: LastStage) -> None:
        """Forward and backward of a batch through all segments, and their norms."""
        placed, segments, m = self._placed, self.plan.segments, record.num_micro_batches
        first, last = placed.hops[:2]
        fence = self._fence(record.step)
        placed.tell(FrameKind.BEGIN, record.step, torch.tensor([m]))
        lists = schedule.build(self.plan.schedule, len(segments), m)
        front = RecordingPorts(StreamPorts(None, first, fence, placed.wait), record, placed.hops)
        back = StreamPorts(last, None, fence, placed.wait)
        before = StageRun(schedule.passed_on(lists[0]), embedding, front)
        interleave([before, *head_runs(lists[-1], head, back)], placed.idle)
        answers = placed.all_answer(FrameKind.NORMS, record.step)
        self._norms.clear()
        for segment, actions, frame in zip(segments, lists, answers, strict=False):
            self._take_norms(segment, len(actions), frame)

    def _fence(self, step: int) -> Fence:
        common = self._placed.common
        codec = HopCodec(common.wire_dtype, getattr(torch, common.dtype))
        return Fence(common.round, common.epoch, step, self._dim, codec)

    def _take_norms(self, segment: SegmentPlan, num_actions: int, frame: Frame) -> None:
        """A segment's squared norms, and what the device measured."""
        try:
            norms, *measured = frame.tensors
            fits = norms.dtype == torch.float64 and norms.shape == (segment.span.blocks,)
            if not fits or bool((norms < 0).any()):  # squares, which have a root
                raise WireError(f"norms as {norms.dtype} {list(norms.shape)}")
            self._measured.add(segment.device, num_actions, *measured)
        except (WireError, TypeError, ValueError) as error:
            raise StageError(segment.device, f"sent {error}") from error
        self._norms += norms.tolist()

    def _tell_step(self, record: StepRecord) -> None:
        numbers = torch.tensor([record.rate, record.scale], dtype=torch.float64)
        self._replica.told = record.step
        self._placed.tell(FrameKind.STEP, record.step, numbers)
