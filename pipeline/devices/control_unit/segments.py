"""The encoder's segments on devices, with recovery from lost devices."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from collapipe.errors import DeviceMemoryError, StageError, WireError
from collapipe.models.dropout import DropoutKey
from collapipe.models.split import ModelSpec, block_name
from collapipe.plan import ClusterPlan
from collapipe.process.host import Host
from collapipe.report import PIPELINE, START, DeviceReport, DeviceTrace
from collapipe.tensors import Tensors
from collapipe.wire.frames import Frame, FrameKind
from pipeline import schedule
from pipeline.devices.control_unit.blame import UnreachedError
from pipeline.devices.control_unit.connection import Cluster
from pipeline.devices.control_unit.journal import (
    RecordedHead,
    Recording,
    RecordingPorts,
    StepRecord,
)
from pipeline.devices.control_unit.loading import load
from pipeline.devices.control_unit.measurements import Measurements
from pipeline.devices.control_unit.own_times import OwnTimes, TimedHead, TimedStage
from pipeline.devices.control_unit.placement import Placement
from pipeline.devices.control_unit.replica import Replica
from pipeline.devices.control_unit.step_times import StepTimes
from pipeline.devices.fence import Fence
from pipeline.devices.hops import HopError, StreamPorts
from pipeline.devices.messages import RoundDescription
from pipeline.interleave import StageRun, head_runs, interleave
from pipeline.phase_timer import PhaseTimer
from pipeline.stage import FirstStage, LastStage, Shapes, Stage

_AHEAD = 16  # steps that may run before the copies of an earlier one are complete
_log = logging.getLogger(__name__)


class RemoteSegments:
    """A plan's segments on its devices, while the context is open.

    ``common`` is the part of the round's description that all segments share.

    If a device is lost, the cluster is planned again, the blocks are restored from the ``replica``,
    and the steps after the replica's last complete step are repeated. The result is the same as
    without the loss. If a device cannot dial the next one although both are alive, hops go through
    the control unit. Raises ``RoundFailedError`` if no plan is left.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        cluster: Cluster,
        common: RoundDescription,
        spec: ModelSpec,
        replica: Replica,
        timer: PhaseTimer,
    ) -> None:
        self._placed = Placement(plan, cluster, common, replica)
        self._cluster, self._common, self._spec = cluster, common, spec
        self._replica, self._timer = replica, timer
        self._measured = Measurements()
        self.lost: dict[str, str] = {}  # device that was lost or failed → cause
        # device → number of blocks for which it lacks memory, and its message
        self.refused: dict[str, tuple[int, str]] = {}
        self._journal: list[StepRecord] = []  # steps since the last complete replica
        self._record: StepRecord | None = None  # the current step
        self._norms: list[float] = []
        self.events: list[str] = []
        self.unreached: UnreachedError | None = None  # why hops go through the control unit

    def __enter__(self) -> "RemoteSegments":
        try:
            self._replica.open()
            self._recovering(self._gather)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._placed.close_hops()
        for connection in self._placed.connections.values():
            connection.close()
        self._replica.close()

    def run(self, embedding: FirstStage, head: LastStage, key: DropoutKey, shapes: Shapes) -> None:
        record = self._record = StepRecord(key.step, shapes)
        recorded_head = RecordedHead(head, record)

        def work() -> None:
            self._keep_up()
            embedding.forget()
            self._pass(record, embedding, recorded_head)

        with self._timer.phase(PIPELINE):
            self._recovering(work)

    @property
    def arrived(self) -> threading.Event:
        """An event that wakes the control loop, to check whether an action is ready."""
        return self._placed.arrived

    @property
    def relays(self) -> bool:
        """Whether hops go through the control unit."""
        return self._cluster.relay

    @property
    def plan(self) -> ClusterPlan:
        """The current plan, which changes after a loss."""
        return self._placed.plan

    @property
    def action_times(self) -> list[torch.Tensor]:
        """Each segment's table of times in the last step, see ``Measurements``."""
        return self._measured.last_step

    def measured(self) -> list[DeviceReport]:
        """Each device's measurements since it received its blocks, in the plan's order."""
        return self._measured.reports(self.plan, self._placed.known_clocks or {})

    def step_times(self) -> StepTimes | None:
        """The typical times of the current plan's steps, after ``collect``; None before the first
        step, and without the devices' clocks."""
        clocks = self._placed.known_clocks
        return None if clocks is None else self._measured.step_times(self.plan, clocks)

    @property
    def hosts(self) -> Mapping[str, Host]:
        """The machine of each device of the plan."""
        return self._placed.hosts

    def traces(self) -> list[DeviceTrace]:
        """The times of the devices' actions by the control unit's clock, after ``collect``."""
        clocks = self._placed.known_clocks
        return [] if clocks is None else self._measured.traces(self.plan, clocks)

    def squared_norms(self) -> list[float]:
        return self._norms

    def step(self, rate: float, scale: float) -> None:
        """Command the optimiser's step and return at once. A loss of a device is detected by the
        next call that waits."""
        assert self._record is not None
        record, self._record = replace(self._record, rate=rate, scale=scale), None
        self._trim()
        self._journal.append(record)
        self._send_step(record)

    def weights(self) -> Tensors:
        return {key: each for key, each in self._state() if "/" not in key}

    def optimizer_state(self) -> Tensors:
        return {key: each for key, each in self._state() if "/" in key}

    def forget(self) -> None:
        """Do nothing: devices release their segments when their streams end."""

    def collect(self) -> None:
        """Wait until the replica has all blocks after the last step. Then links are idle, and the
        devices' clocks are measured; without the clocks of all, the round has no times."""
        if self._trim():
            last, every = self._journal[-1].step, self._common.replicate_every
            if not every or (last + 1) % every:
                self._placed.send_to_all(FrameKind.STATE, last)
            self._placed.wait(lambda: self._replica.step == last)
        try:
            self._placed.set_clocks()
        except StageError as lost:  # too late to matter: all blocks are here
            _log.info("unit %d: no clock: %s", self._common.unit, lost)

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the blocks' weights and optimiser state after the last step, one block at a
        time."""
        self._recovering(self.collect)
        for index in range(sum(each.span.blocks for each in self.plan.segments)):
            yield from self._replica.tensors(block_name(index)).items()

    def _recovering(self, work: Callable[[], None]) -> None:
        """Do ``work``, and repeat it without each device that is lost meanwhile."""
        while True:
            try:
                return work()
            except (StageError, HopError) as error:
                lost = self._placed.blamed(error)
            self._recover(lost)

    def _recover(self, lost: StageError) -> None:
        """Recover from the loss of a device, and of others that are lost meanwhile."""
        began, before = time.monotonic(), len(self.lost)
        while True:
            try:
                self._resume_after(lost)
                break
            except (StageError, HopError) as error:
                lost = self._placed.blamed(error)
        if len(self.lost) > before:
            left = " and ".join(self._placed.plan.devices)
            losses = "; ".join(f"{name} ({cause})" for name, cause in self.lost.items())
            seconds = time.monotonic() - began
            self.events.append(f"lost {losses}; continued with {left} after {seconds:.2f} s")

    def _resume_after(self, fault: StageError) -> None:
        """Change the plan or the hops, and repeat the steps since the last complete replica."""
        plan = self._relayed(fault) if isinstance(fault, UnreachedError) else self._replanned(fault)
        self._placed = self._placed.followed_by(plan, self._cluster)
        self._gather()
        late = self._record is None  # after the last step, when nothing else counts the time
        with self._timer.phase(PIPELINE) if late else nullcontext():
            for record in list(self._journal):
                embedding, head = Recording(record.activations, {}), Recording({}, record.gradients)
                self._pass(record, embedding, head)
                self._send_step(record)

    def _relayed(self, unreached: UnreachedError) -> ClusterPlan:
        """Keep the plan, and send hops through the control unit from now on."""
        self._cluster, self.unreached = replace(self._cluster, relay=True), unreached
        ends, cause = f"{unreached.source} cannot dial {unreached.device}", unreached.cause
        _log.info("unit %d: %s: %s", self._common.unit, ends, cause)
        self.events.append(
            f"{ends} ({cause}); from now on hops go through the control unit, as with "
            "pipeline.relay=true: set it, or correct the address"
        )
        return self.plan

    def _replanned(self, lost: StageError) -> ClusterPlan:
        """Close the device's streams, and plan without it. A device that lacks memory for its
        blocks stays connected, because it may hold fewer."""
        reported = self._placed.trouble(lost.device)  # more specific than the end of a stream
        if reported and reported.kind == DeviceMemoryError.__name__:
            (held,) = (each.span for each in self.plan.segments if lost.device in each.devices)
            self.refused[lost.device] = held.blocks, reported.message
        else:
            cause = lost.cause
            if reported and reported.neighbour is None:
                cause = f"{reported.kind}: {reported.message}"
            self.lost[lost.device] = cause
            _log.info("unit %d: lost %s: %s", self._common.unit, lost.device, cause)
            self._placed.drop(lost.device)
        return self._cluster.replan(dict(self.lost), dict(self.refused))

    def _gather(self) -> None:
        """Load the segments from the last complete replica, unless the devices have them."""
        if not self._placed.hops:
            self._measured.clear()
            load(self._placed)
            self._trim()  # removes the steps that the devices' blocks include

    def _trim(self) -> int:
        """Forget steps up to the last complete replica. Returns the number of remaining steps."""
        base = self._replica.step
        self._journal = [each for each in self._journal if base is None or each.step > base]
        return len(self._journal)

    def _keep_up(self) -> None:
        """Wait while the replica lags too many steps, because the journal keeps them in memory.

        Raises ``StageError`` if a device sends no copies."""
        done, began = self._replica.step, self._placed.watch.awake_s
        while self._common.replicate_every and self._trim() > _AHEAD + self._common.replicate_every:
            if self._replica.step != done:
                done, began = self._replica.step, self._placed.watch.awake_s
            if self._placed.watch.awake_s - began > self._placed.hung_s:
                raise StageError(self._replica.waits_for(), "has not sent its blocks")
            self._placed.idle()

    def _pass(self, record: StepRecord, embedding: Stage, head: LastStage) -> None:
        """Run forward and backward of a batch through all segments, and collect their norms."""
        placed, began_s, whole = self._placed, time.monotonic(), not record.gradients
        shape = self.plan.schedule, len(self.plan.segments), len(record.rows)
        lists, first = schedule.build(*shape), schedule.embedding(*shape)
        front, back = self._ports(record)
        timed, timed_head = TimedStage(embedding), TimedHead(head)
        runs = StageRun(first, timed, front), *head_runs(lists[-1], timed_head, back)
        placed.check_hops()
        placed.under_way = record.step, lists[:-1]
        placed.send_to_all(FrameKind.BEGIN, record.step, torch.tensor(record.shapes))
        interleave(runs, partial(self._idle, head))
        answers = placed.all_answer(FrameKind.NORMS, record.step)
        placed.under_way = 0, ()
        self._take_answers(dict(zip(self.plan.devices, answers, strict=True)), lists)
        built_s = max(began_s, *(each.built_s for each in placed.members))
        own = OwnTimes(timed.times, timed_head.times, built_s, time.monotonic(), whole)
        self._measured.add_own(own)
        self._timer.move(built_s - began_s, PIPELINE, START)

    def _ports(self, record: StepRecord) -> tuple[RecordingPorts, StreamPorts]:
        """Return the ports of a step to the first segment and from the last one."""
        placed, returns = self._placed, self._common.first_trained < 0
        fence = Fence.of(placed.common, self._spec, record.step, record.shapes)
        how = fence, placed.wait, record.rows
        front = StreamPorts(None, placed.front, *how, returns)
        built = partial(placed.is_built, self.plan.segments[0])
        back = StreamPorts(placed.back, None, *how, like=record.activations)
        return RecordingPorts(front, record, placed.hops, built), back

    def _take_answers(self, frames: Mapping[str, Frame], lists: schedule.Schedule) -> None:
        """Keep the norms of all blocks and the measurements in the devices' answers to a step."""
        self._norms.clear()
        for segment, actions in zip(self.plan.segments, lists, strict=False):
            leaders, norms = segment.leaders, dict[str, Iterator[float]]()
            for name in segment.devices:
                found = self._taken_norms(name, leaders.count(name), len(actions), frames[name])
                norms[name] = iter(found)
            self._norms += [next(norms[leader]) for leader in leaders]

    def _idle(self, head: LastStage) -> None:
        if isinstance(head, RecordedHead) and head.owes:
            self._placed.watch.reset()
        self._placed.idle()

    def _taken_norms(self, device: str, led: int, num_actions: int, frame: Frame) -> list[float]:
        """Return the squared norms of the blocks that a device leads, and store its measurements
        of so many actions."""
        try:
            norms, *measured = frame.only(3)
            fits = norms.dtype == torch.float64 and norms.shape == (led,)
            if not fits or bool((norms < 0).any()):  # squared norms are not negative
                raise WireError(
                    f"norms {norms.dtype} {list(norms.shape)}, expected float64 [{led}] from 0 on"
                )
            self._measured.add(device, num_actions, *measured)
        except WireError as error:
            raise StageError(device, f"sent {error}") from error
        found: list[float] = norms.tolist()
        return found

    def _send_step(self, record: StepRecord) -> None:
        numbers = torch.tensor([record.rate, record.scale], dtype=torch.float64)
        self._replica.commanded_step = record.step
        self._placed.send_to_all(FrameKind.STEP, record.step, numbers)
