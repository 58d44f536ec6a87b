"""The encoder's segments on devices: told what to do, and replaced when a device is lost."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from collapipe import cancellation
from collapipe.errors import NonFiniteLossError, StageError, WireError
from collapipe.models.dropout import DropoutKey
from collapipe.models.split import block_name
from collapipe.plan import ClusterPlan, SegmentPlan
from collapipe.report import PIPELINE, DeviceReport, DeviceTrace
from collapipe.tensors import Tensors
from collapipe.wire.dialing import Dialer
from collapipe.wire.frames import Frame, FrameKind
from collapipe.wire.segments import (
    BEFORE,
    BEHIND,
    Neighbour,
    SegmentDescription,
    Trouble,
    as_tensor,
    packed,
    unpacked,
)
from collapipe.wire.streams import FrameStream
from pipeline import schedule
from pipeline.hop_codec import HopCodec
from pipeline.interleave import StageRun, head_runs, interleave
from pipeline.remote.connection import SILENT_S, DeviceConnection
from pipeline.remote.journal import RecordedHead, Recording, RecordingPorts, StepRecord
from pipeline.remote.measurements import Clock, Measurements
from pipeline.remote.ports import Fence, HopError, StreamPorts
from pipeline.remote.relay import relay
from pipeline.remote.replica import Replica
from pipeline.stage import EmbeddingStage, LastStage, Stage
from pipeline.timer import PhaseTimer

_AHEAD = 16  # steps that may follow one whose copies are under way
_CLOCK_TRIPS = 3
_LOOK_S = 0.1  # between two looks at cancellation and signs of life
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices that there are, and how to reach them.

    ``replan`` makes a plan without the devices that it is given, each with the cause of its loss;
    it raises where there is none.
    ``hung_s`` is how long one action of a device may take. With ``relay`` devices do not dial each
    other: what one hands to the next goes through the control unit. ``needed_bytes`` is what a
    number of blocks is planned to need of a device, which refuses more than it gives.
    """

    devices: Mapping[str, Neighbour]
    dialer: Dialer
    replan: Callable[[Mapping[str, str]], ClusterPlan]
    hung_s: float
    relay: bool = False
    needed_bytes: Callable[[int], float] = lambda blocks: 0.0


class RemoteSegments:
    """A plan's segments on the devices that it names, while the context is open.

    ``common`` describes a segment, but for what the plan says. Where a device is lost, the cluster
    is planned anew, its blocks come from the ``replica``, and the steps since are done again: the
    result is the same as without the loss. Raises ``StageError`` where no plan is left.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        cluster: Cluster,
        common: SegmentDescription,
        dim: int,
        replica: Replica,
        timer: PhaseTimer,
    ) -> None:
        self._plan, self._cluster, self._common, self._dim = plan, cluster, common, dim
        self._replica = replica
        self._arrived = threading.Event()
        self._connections: dict[str, DeviceConnection] = {}
        self._hops: list[FrameStream] = []  # before the first stage, behind the last; relayed ones
        self._lost: dict[str, str] = {}
        self._journal: list[StepRecord] = []
        self._record: StepRecord | None = None
        self._norms: list[float] = []
        self.events: list[str] = []
        self._timer = timer
        self._measured = Measurements()

    def __enter__(self) -> "RemoteSegments":
        try:
            self._recovering(self._gather)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._hang_up()
        for connection in self._connections.values():
            connection.close()
        self._replica.close()

    def run(
        self, embedding: EmbeddingStage, head: LastStage, key: DropoutKey, num_micro_batches: int
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
    def lost(self) -> Collection[str]:
        """Devices that are gone, or could not go on."""
        return self._lost.keys()

    def measured(self) -> list[DeviceReport]:
        """What each device of the plan measured since it has had its blocks, in their order."""
        return self._measured.reports(self._plan)

    def traces(self) -> list[DeviceTrace]:
        """When the devices of the plan did what, by the control unit's clock."""
        return self._measured.traces(self._plan)

    @property
    def action_times(self) -> list[torch.Tensor]:
        """Of the last step and each segment, float64 [actions, 3]: when each action waited, began
        and ended, s."""
        return self._measured.last_step

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
        return {key: each for key, each in self._state().items() if "/" not in key}

    def optimizer_state(self) -> Tensors:
        return {key: each for key, each in self._state().items() if "/" in key}

    def forget(self) -> None:
        """Devices drop what they hold when their streams end."""

    def _state(self) -> Tensors:
        """All blocks as they are after the last step."""
        self._recovering(self._collect)
        blocks = map(block_name, range(sum(each.span.blocks for each in self._plan.segments)))
        return {key: each for name in blocks for key, each in self._replica.tensors(name).items()}

    def _collect(self) -> None:
        """Wait until all blocks are here."""
        if not self._journal:
            return
        last = self._journal[-1].step
        every = self._common.replicate_every
        if not every or (last + 1) % every:
            for connection in self._members():
                connection.tell(FrameKind.STATE, self._where(last))
        self._wait(lambda: self._replica.step == last)

    def _recovering(self, work: Callable[[], None]) -> None:
        """Do ``work``; where a device is lost, again, without it."""
        while True:
            try:
                work()
                return
            except (StageError, HopError) as error:
                lost = self._blamed(error)
            self._recover(lost)

    def _recover(self, lost: StageError) -> None:
        """Go on without a device, and without those that are lost meanwhile."""
        began = time.monotonic()
        while True:
            try:
                self._without(lost)
            except (StageError, HopError) as error:
                lost = self._blamed(error)
            else:
                left = " and ".join(segment.device for segment in self._plan.segments)
                gone = "; ".join(f"{name} ({cause})" for name, cause in self._lost.items())
                seconds = time.monotonic() - began
                self.events.append(f"lost {gone}; went on with {left} after {seconds:.2f} s")
                return

    def _without(self, lost: StageError) -> None:
        """Another plan, other segments, and the steps since the last complete replica."""
        told = self._trouble(lost.device)  # its own words say more than that its stream ended
        cause = f"{told.kind}: {told.message}" if told and told.side is None else lost.cause
        self._lost[lost.device] = cause
        _log.info("unit %d: lost %s: %s", self._plan.unit, lost.device, cause)
        self._hang_up()
        if lost.device in self._connections:
            self._connections.pop(lost.device).close()
        self._plan = self._cluster.replan(dict(self._lost))
        self._measured.clear()
        self._common = replace(self._common, epoch=self._common.epoch + 1)
        self._gather()
        for record in list(self._journal):
            embedding = Recording(record.activations, {})
            head = _Answered(record)
            self._pass(record, embedding, head)
            self._tell_step(record)

    def _gather(self) -> None:
        """Give each device of the plan its segment, and connect them in their order."""
        plan = self._plan
        blocks = {block_name(k): each.device for each in plan.segments for k in each.span.indices()}
        self._replica.expect(self._common.epoch, blocks)
        self._trim()
        load, parts, connect = map(self._where, range(3))
        names = [segment.device for segment in plan.segments]
        sessions = [secrets.token_hex(16) for _ in names]
        for name in names:
            if name not in self._connections:
                self._connections[name] = self._dialled(name)
        members = [self._connections[name] for name in names]
        for stage, (connection, segment) in enumerate(zip(members, plan.segments, strict=True)):
            dials = stage < len(members) - 1 and not self._cluster.relay
            held = set(map(block_name, segment.span.indices()))
            frozen = {k: each for k, each in self._common.frozen.items() if k in held}
            description = replace(
                self._common,
                session=sessions[stage],
                frozen=frozen,
                memory_bytes=self._cluster.needed_bytes(segment.span.blocks),
                span=segment.span,
                stage=stage,
                num_segments=len(members),
                next=self._cluster.devices[names[stage + 1]] if dials else None,
                next_session=sessions[stage + 1] if dials else None,
            )
            connection.tell(FrameKind.LOAD, load, packed(description))
        answers = self._all_answer(FrameKind.READY, load)
        for connection, segment, answer in zip(members, plan.segments, answers, strict=True):
            lacking = _lacking(connection, answer)
            for name in map(block_name, segment.span.indices()):
                whole = name in lacking or name not in self._common.frozen
                data = as_tensor(self._replica.packed(name, whole))
                connection.tell(FrameKind.PART, parts, as_tensor(name.encode()), data)
        self._all_answer(FrameKind.READY, parts)
        self._connect(members, sessions)
        for connection in members:
            connection.tell(FrameKind.OPEN, connect)
        self._all_answer(FrameKind.READY, connect)
        self._measured.clocks = {each.name: self._clock(each) for each in members}

    def _connect(self, members: Sequence[DeviceConnection], sessions: Sequence[str]) -> None:
        """Open this side's streams: before the first stage, behind the last, and between stages
        where these do not dial each other."""
        self._hang_up()
        self._hops.append(members[0].hop(sessions[0], BEFORE))
        self._hops.append(members[-1].hop(sessions[-1], BEHIND))
        between = range(len(members) - 1) if self._cluster.relay else ()
        for stage in between:
            front = members[stage].hop(sessions[stage], BEHIND)
            behind = members[stage + 1].hop(sessions[stage + 1], BEFORE)
            self._hops += front, behind
            relay(front, behind)

    def _hang_up(self) -> None:
        while self._hops:
            self._hops.pop().close()

    def _clock(self, connection: DeviceConnection) -> Clock:
        """From a few round trips; the quickest tells most."""
        clocks = []
        for number in range(_CLOCK_TRIPS):
            asked, where = time.monotonic(), self._where(number)
            connection.tell(FrameKind.CLOCK, where)
            (frame,) = self._answers(FrameKind.CLOCK, where, [connection])
            came = time.monotonic()
            offset_s = (asked + came) / 2 - float(frame.tensors[0])
            clocks.append(Clock(offset_s, (came - asked) / 2))
        return min(clocks, key=lambda each: each.error_s)

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
            if time.monotonic() - began > self._cluster.hung_s:
                raise StageError(self._replica.waits_for(), "has not sent its blocks")
            self._idle()

    def _dialled(self, name: str) -> DeviceConnection:
        if name not in self._cluster.devices:
            raise StageError(name, "the cluster's file has no such device")
        device, dialer = self._cluster.devices[name], self._cluster.dialer
        replica = self._replica
        return DeviceConnection(device, dialer, self._arrived, replica.put, replica.most_bytes())

    def _pass(self, record: StepRecord, embedding: Stage, head: LastStage) -> None:
        """Forward and backward of a batch through all segments, and their norms."""
        first, last = self._hops[:2]
        m, where, common = record.num_micro_batches, self._where(record.step), self._common
        codec = HopCodec(common.wire_dtype, getattr(torch, common.dtype))
        fence = Fence(common.round, common.epoch, record.step, self._dim, codec)
        for connection in self._members():
            connection.tell(FrameKind.BEGIN, where, torch.tensor([m]))
        lists = schedule.build(self._plan.schedule, len(self._plan.segments), m)
        front = RecordingPorts(StreamPorts(None, first, fence, self._wait), record)
        back = StreamPorts(last, None, fence, self._wait)
        runs = [
            StageRun(schedule.passed_on(lists[0]), embedding, front),
            *head_runs(lists[-1], head, back),
        ]
        interleave(runs, self._idle)
        answers = self._all_answer(FrameKind.NORMS, where)
        self._norms.clear()
        for segment, actions, frame in zip(self._plan.segments, lists, answers, strict=False):
            self._take_norms(segment, len(actions), frame)

    def _take_norms(self, segment: SegmentPlan, num_actions: int, frame: Frame) -> None:
        """A segment's squared norms, and what the device measured."""
        try:
            norms, *measured = frame.tensors
            if norms.dtype != torch.float64 or norms.shape != (segment.span.blocks,):
                raise WireError(f"norms as {norms.dtype} {list(norms.shape)}")
            self._measured.add(segment.device, num_actions, *measured)
        except (WireError, TypeError, ValueError) as error:
            raise StageError(segment.device, f"sent {error}") from error
        self._norms += norms.tolist()

    def _tell_step(self, record: StepRecord) -> None:
        numbers = torch.tensor([record.rate, record.scale], dtype=torch.float64)
        self._replica.told = record.step
        for connection in self._members():
            connection.tell(FrameKind.STEP, self._where(record.step), numbers)

    def _members(self) -> list[DeviceConnection]:
        """The devices of the plan, in their order."""
        return [self._connections[segment.device] for segment in self._plan.segments]

    def _where(self, step: int) -> Frame:
        """A frame of this round, epoch and step."""
        return Frame(FrameKind.BEGIN, self._common.round, step, 0, (), self._common.epoch)

    def _all_answer(self, kind: FrameKind, where: Frame) -> list[Frame]:
        """An answer of each device of the plan."""
        return self._answers(kind, where, self._members())

    def _answers(
        self, kind: FrameKind, where: Frame, members: Sequence[DeviceConnection]
    ) -> list[Frame]:
        frames: dict[str, Frame] = {}

        def complete() -> bool:
            for each in members:
                if each.name not in frames and (frame := each.answer(kind, where)):
                    frames[each.name] = frame
            return len(frames) == len(members)

        self._wait(complete)
        return [frames[each.name] for each in members]

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._idle()

    def _idle(self) -> None:
        """Wait for something to come. Raises where a device is lost, or the round cancelled."""
        self._arrived.wait(_LOOK_S)
        self._arrived.clear()
        cancellation.check()
        self._check()

    def _check(self) -> None:
        for connection in self._members():
            connection.check(self._cluster.hung_s)
            if trouble := connection.troubles.get(self._common.epoch):
                if trouble.kind == NonFiniteLossError.__name__:  # no fault of the device
                    raise NonFiniteLossError(trouble.message)
                raise StageError(connection.name, f"{trouble.kind}: {trouble.message}")

    def _blamed(self, error: StageError | HopError) -> StageError:
        """Whose fault it is: of the device that is gone, where one is, before who complains of it.

        A hop that ended between two devices that live is the fault of the one that is complained
        of.
        """
        members = self._members() if self._connections.keys() >= self._names() else []
        suspect = self._suspect(error)
        deadline = time.monotonic() + SILENT_S
        while time.monotonic() < deadline and suspect is not None:
            for each in members:
                try:
                    each.check(self._cluster.hung_s)
                except StageError as gone:
                    return gone
            self._arrived.wait(_LOOK_S)
            self._arrived.clear()
        if suspect is not None:
            return StageError(suspect, str(error))
        assert isinstance(error, StageError)
        return error

    def _names(self) -> set[str]:
        return {segment.device for segment in self._plan.segments}

    def _suspect(self, error: StageError | HopError) -> str | None:
        """The neighbour that is complained of; None: the device itself has the trouble."""
        names = [segment.device for segment in self._plan.segments]
        if isinstance(error, HopError):
            return names[-1] if error.side == BEFORE else names[0]
        trouble = self._trouble(error.device)
        if trouble is None or trouble.side is None or error.device not in names:
            return None
        place = names.index(error.device) + (1 if trouble.side == BEHIND else -1)
        return names[place] if 0 <= place < len(names) else None

    def _trouble(self, device: str) -> Trouble | None:
        """What the device has told under the present plan."""
        connection = self._connections.get(device)
        return connection.troubles.get(self._common.epoch) if connection else None


def _lacking(connection: DeviceConnection, answer: Frame) -> list[str]:
    """Blocks whose frozen weights the device has not."""
    try:
        return unpacked(list[str], *answer.tensors[:1])
    except (WireError, TypeError) as error:
        raise StageError(connection.name, f"answered {answer.kind.name} with {error}") from error


class _Answered(LastStage):
    """The head of a step that is over: all its answers are known."""

    def __init__(self, record: StepRecord) -> None:
        self._record = record

    def forward(self, micro_batch: int, received: object) -> tuple[()]:
        return ()

    def backward(self, micro_batch: int, received: object) -> tuple[torch.Tensor, ...]:
        return self._record.gradients[micro_batch]

    def ready(self, action: object) -> bool:
        return True
