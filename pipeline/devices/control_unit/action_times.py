"""Collect the times of a round's steps: of the devices' actions, by the devices' clocks, and of
the control unit's."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, zip_longest
from statistics import fmean, median
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from collapipe.errors import WireError
from collapipe.plan import ClusterPlan, connected
from collapipe.report import TRACED_STEPS, DeviceReport, DeviceTrace
from pipeline import schedule
from pipeline.schedule import BACKWARD, FORWARD, Action
from pipeline.stage import LastStage, Passed, Stage

_KINDS = 2  # of actions: forward and backward
_MOST = 2.0**53  # seconds, or bytes: sums of them are finite
_Rows = Mapping[Action, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Clock:
    """The offset from a device's clock to the control unit's clock, and its largest error."""

    offset_s: float
    error_s: float


@dataclass(slots=True)
class TimedStage:
    """A stage of the control unit that records when each action began and ended."""

    stage: Stage
    times: dict[Action, tuple[float, float]] = field(default_factory=dict)

    def forward(self, micro_batch: int, received: Passed) -> Passed:
        began = time.monotonic()
        made = self.stage.forward(micro_batch, received)
        self.times[Action(FORWARD, micro_batch)] = began, time.monotonic()
        return made

    def backward(self, micro_batch: int, received: Passed) -> Passed:
        began = time.monotonic()
        made = self.stage.backward(micro_batch, received)
        self.times[Action(BACKWARD, micro_batch)] = began, time.monotonic()
        return made


@dataclass(slots=True)
class TimedHead(TimedStage):
    """The control unit's last stage, timed."""

    stage: LastStage

    def ready(self, action: Action) -> bool:
        return self.stage.ready(action)


@dataclass(frozen=True, slots=True)
class OwnTimes:
    """A step on the control unit: its embedding, its head, and when the step began and ended. It
    began when all devices had their weights.

    A step that is not ``whole`` was repeated after a loss, with recorded tensors.
    """

    embedding: Mapping[Action, tuple[float, float]]
    head: Mapping[Action, tuple[float, float]]
    began_s: float
    ended_s: float
    whole: bool = True

    def embedding_rows(self) -> Iterator[tuple[float, float, float]]:
        """Yield when the control unit's thread became free, began and ended each action of the
        embedding, in order."""
        free = {action: free_s for action, of_head, free_s, _ in self.waited() if not of_head}
        for action, (began_s, ended_s) in self.embedding.items():
            yield free.get(action, began_s), began_s, ended_s

    def head_rows(self, actions: Sequence[Action]) -> Iterator[tuple[float, float, float]]:
        """Yield when the head became free, began and ended each of its ``actions``. Its forward is
        the submission, its backward the answer."""
        free_s = 0.0
        for action in actions:
            if action not in self.head:  # a smaller batch
                continue
            began_s, ended_s = self.head[action]
            if action.kind == BACKWARD:
                began_s = max(self.head[Action(FORWARD, action.micro_batch)][1], free_s)
                yield free_s or began_s, began_s, ended_s
                free_s = ended_s
            else:
                yield began_s, began_s, ended_s

    def busy_s(self, actions: Sequence[Action], until_s: Tensor) -> Tensor:
        """Return how long the embedding, or the head with its ``actions``, has computed until each
        of these times."""
        edges, sums = [0.0], [0.0]
        parts = *self.embedding.values(), *(each[1:] for each in self.head_rows(actions))
        for began_s, ended_s in sorted(parts):
            edges += max(began_s, edges[-1]), max(ended_s, edges[-1])
            sums += sums[-1], sums[-1] + edges[-1] - edges[-2]
        return torch.from_numpy(np.interp(until_s.numpy(), edges, sums))

    def waited(self) -> Iterator[tuple[Action, bool, float, float]]:
        """Yield each action, whether it is the head's, when its thread became free, and when it
        began."""
        rows = [(each, False, *times) for each, times in self.embedding.items()]
        rows += [(each, True, *times) for each, times in self.head.items()]
        rows.sort(key=lambda row: row[2])
        for before, (action, of_head, began, _) in pairwise(rows):
            yield action, of_head, before[3], began


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Typical times of a round's steps, in seconds of a micro-batch: means after the first step.

    ``forward_s`` and ``backward_s`` are by device, in the plan's order. ``send_s`` maps a device,
    or None for the control unit, to the time from the end of an action until its output was at a
    waiting stage; a device that shares one and is never its last has none. ``gradients`` is which
    part of a device's outputs in this mean were gradients. The head's answer takes ``head_s``, and
    follows the one before after ``head_pace_s``, 0 if none had to wait. ``overhead_s`` is the part
    of a step before the first action and after the last one. Devices that share the first stage
    begin ``late_s`` later than tensors take, because they wait for weights of the last step.
    ``step_s`` is the mean of all steps.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    send_s: Mapping[str | None, float]
    embedding_forward_s: float
    embedding_backward_s: float
    submit_s: float
    head_s: float
    head_pace_s: float
    overhead_s: float
    step_s: float
    late_s: float = 0.0
    gradients: Mapping[str, float] = field(default_factory=dict)


class Measurements:
    """Each device's times and resource usage since it received its blocks.

    A step's table is float64 [actions, 4], in seconds: when each action requested its input, began,
    ended, and had sent its output. ``usage`` is float64 [2]: bytes sent to neighbours since the
    segment was loaded, and the process's peak memory in bytes.
    """

    def __init__(self) -> None:
        self._tables: dict[str, list[Tensor]] = {}
        self._usage: dict[str, tuple[float, float]] = {}
        self._own = list[OwnTimes]()
        self._began_s = time.monotonic()

    def clear(self) -> None:
        """Remove all measurements, because another plan begins."""
        self._own.clear()
        self._tables.clear()
        self._usage.clear()

    def add(self, device: str, num_actions: int, table: Tensor, usage: Tensor) -> None:
        """Add the measurements of a step. Raises ``WireError`` if they are impossible."""
        for name, each, shape in (("times", table, (num_actions, 4)), ("usage", usage, (2,))):
            if each.dtype != torch.float64 or each.shape != shape or not each.isfinite().all():
                raise WireError(f"{name} of its actions as {each.dtype} {list(each.shape)}")
        thread, sending = table[:, :3].flatten().diff(), table[:, 3] - table[:, 2]
        grows, known = torch.cat((thread, sending)) >= 0, torch.cat((table.flatten(), usage))
        if not grows.all() or usage.amin() < 0 or known.abs().amax() > _MOST:
            raise WireError(f"times down to {float(table.min())}, usage {usage.tolist()}")
        self._tables.setdefault(device, []).append(table)
        sent, peak = usage.tolist()
        self._usage[device] = sent, peak

    def add_own(self, own: OwnTimes) -> None:
        """Add the control unit's times of a step that all devices have finished."""
        self._own.append(own)

    @property
    def last_step(self) -> list[Tensor]:
        """The tables of the last step, in the segments' order."""
        return [tables[-1] for tables in self._tables.values()]

    def reports(self, plan: ClusterPlan, clocks: Mapping[str, Clock]) -> list[DeviceReport]:
        """Summarise the measurements of the plan's devices, in their order."""
        return [
            self._report(plan, stage, name, clocks.get(name))
            for stage, segment in enumerate(plan.segments)
            for name in segment.devices
            if name in self._tables
        ]

    def traces(self, plan: ClusterPlan, clocks: Mapping[str, Clock]) -> list[DeviceTrace]:
        """Return the times of all stages' actions by the control unit's clock, in order."""
        held = (name for each in plan.segments for name in each.devices)
        names = [name for name in held if name in self._tables]
        if not self._own:
            return [self._trace(name, clocks[name]) for name in names]
        own = self._own[:TRACED_STEPS]
        actions = schedule.build(plan.schedule, len(plan.segments), plan.num_micro_batches)[-1]
        return [
            self._own_trace("embedding", [each.embedding_rows() for each in own]),
            *(self._trace(name, clocks[name]) for name in names),
            self._own_trace("head", [each.head_rows(actions) for each in own]),
        ]

    def _own_trace(
        self, stage: Literal["embedding", "head"], steps: Iterable[Iterable[Sequence[float]]]
    ) -> DeviceTrace:
        """Return a stage of the control unit, with rows of when it became free, began and ended."""
        began_s = self._began_s
        times = tuple(
            tuple((a - began_s, b - began_s, c - began_s, c - began_s) for a, b, c in step)
            for step in steps
        )
        return DeviceTrace("control unit", 0.0, times, stage)

    def step_times(self, plan: ClusterPlan, clocks: Mapping[str, Clock]) -> StepTimes | None:
        """Return the typical times of the plan's steps; None if no step has all its times."""
        lists = schedule.build(plan.schedule, len(plan.segments), plan.num_micro_batches)
        shifted = {  # by the control unit's clock
            name: [(table + clocks[name].offset_s).tolist() for table in tables]
            for name, tables in self._tables.items()
        }
        steps, pairs = [], _pairs(plan)
        for number, own in enumerate(self._own):
            # a smaller batch may have fewer micro-batches
            if own.whole and len(shifted[plan.segments[0].device][number]) == len(lists[0]):
                rows = [
                    {
                        name: dict(zip(actions, shifted[name][number], strict=True))
                        for name in segment.devices
                    }
                    for segment, actions in zip(plan.segments, lists, strict=False)
                ]
                steps.append(_Step(own, rows, pairs))
        later = steps[1:] or steps
        if not later:
            return None
        held = [(stage, name) for stage, each in enumerate(plan.segments) for name in each.devices]
        forward_s, backward_s = (
            tuple(_mean(t for each in later for t in each.chunks(kind, *one)) for one in held)
            for kind in (FORWARD, BACKWARD)
        )
        own_s, gradients = _mean(t for each in later for t in each.own_sent()), dict[str, float]()
        send_s: dict[str | None, float] = {None: own_s}
        for stage, name in held:
            sent = [pair for each in later for pair in each.sent(stage, name)]
            gradients[name] = _mean(float(kind == BACKWARD) for kind, _ in sent)
            if sent or not plan.shares:
                send_s[name] = _mean(t for _, t in sent)
        late_s = _mean(each.first_arrival_s for each in later) - own_s
        embedding = [
            _mean(t for each in later for t in _lengths(each.own.embedding, kind))
            for kind in (FORWARD, BACKWARD)
        ]
        latency_s = _mean(t for each in later for t in each.answers(queued=False))
        paces = [t for each in later for t in each.answers(queued=True)]
        return StepTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            send_s=send_s,
            embedding_forward_s=embedding[0],
            embedding_backward_s=embedding[1] if any(each.returns for each in later) else 0.0,
            submit_s=_mean(t for each in later for t in _lengths(each.own.head, FORWARD)),
            head_s=latency_s,
            head_pace_s=min(latency_s, fmean(paces)) if paces else 0.0,
            overhead_s=_mean(each.overhead_s for each in later),
            step_s=fmean(each.own.ended_s - each.own.began_s for each in steps),
            late_s=max(0.0, late_s) if len(plan.segments[0].devices) > 1 else 0.0,
            gradients=gradients,
        )

    def _report(
        self, plan: ClusterPlan, stage: int, name: str, clock: Clock | None
    ) -> DeviceReport:
        segment, last, tables = plan.segments[stage], len(plan.segments) - 1, self._tables[name]
        requested, began, ended, sent = torch.cat(list(tables)).T
        control_unit_wait_s = send_alone_s = 0.0
        for table, own in zip_longest(tables, self._own if clock else ()):
            until = torch.cat((table[1:, 0], table[-1:, 3]))  # the next request for an input
            send_alone_s += float((torch.minimum(table[:, 3], until) - table[:, 2]).sum())
            lists = schedule.build(plan.schedule, last + 1, len(table) // _KINDS)
            edge = torch.tensor([stage == (0 if a.kind == FORWARD else last) for a in lists[stage]])
            waits_s = edge * table.diff()[:, 0]
            if own and clock:
                busy_s = own.busy_s(lists[-1], table[:, :2] + clock.offset_s)
                waits_s += ~edge * busy_s.diff()[:, 0].clamp(min=0.0)
            control_unit_wait_s += float(waits_s.sum())
        sent_bytes, peak_bytes = self._usage[name]
        return DeviceReport(
            name,
            segment.span.blocks,
            chunk_s=median(
                float((each[:, 2] - each[:, 1]).sum()) * _KINDS / len(each) for each in tables
            ),
            compute_s=float((ended - began).sum()),
            wait_s=float((began - requested).sum()),
            send_s=float((sent - ended).sum()),
            span_s=sum(float(table[:, 3].max() - table[0, 0]) for table in tables),
            sent_bytes=sent_bytes,
            peak_bytes=peak_bytes,
            control_unit_wait_s=control_unit_wait_s,
            send_alone_s=send_alone_s,
        )

    def _trace(self, name: str, clock: Clock) -> DeviceTrace:
        offset_s = clock.offset_s - self._began_s
        shifted = ((table + offset_s).tolist() for table in self._tables[name][:TRACED_STEPS])
        steps = tuple(tuple((a, b, c, d) for a, b, c, d in table) for table in shifted)
        return DeviceTrace(name, clock.error_s, steps)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's times: the control unit's, and per segment and device those of each action (request,
    begin, end, sent), all by the control unit's clock. ``pairs`` are the devices of each two
    segments in order that have rows in common."""

    own: OwnTimes
    rows: Sequence[Mapping[str, _Rows]]
    pairs: Sequence[Sequence[tuple[str, str]]]

    @property
    def overhead_s(self) -> float:
        first = min(began_s for began_s, _ in self.own.embedding.values())
        own = [*self.own.embedding.values(), *self.own.head.values()]
        tables = (table for each in self.rows for table in each.values())
        ends = (end_s for _, end_s in own), (row[2] for rows in tables for row in rows.values())
        busy_s = max(chain(*ends)) - first
        return max(0.0, self.own.ended_s - self.own.began_s - busy_s)

    @property
    def returns(self) -> bool:
        """Whether the first segment sends gradients to the embedding."""
        rows = (pair for each in self.rows[0].values() for pair in each.items())
        return any(row[3] > row[2] for action, row in rows if action.kind == BACKWARD)

    @property
    def first_arrival_s(self) -> float:
        """The seconds until the embedding's first output was at all devices of the first stage."""
        first = Action(FORWARD, 0)
        began_s = max(rows[first][1] for rows in self.rows[0].values())
        return began_s - self.own.embedding[first][1]

    def chunks(self, kind: str, stage: int, device: str) -> Iterator[float]:
        """Yield the seconds of a device's actions of a kind."""
        rows = self.rows[stage][device]
        return (each[2] - each[1] for action, each in rows.items() if action.kind == kind)

    def answers(self, queued: bool) -> Iterator[float]:
        """Yield the head's seconds for each answer: from its submission, or if it was ``queued``
        behind an earlier one, from that one's answer."""
        head, free_s = self.own.head, 0.0
        for number in range(len(head) // 2):
            submitted_s = head[Action(FORWARD, number)][1]
            answered_s = head[Action(BACKWARD, number)][1]
            if queued == (submitted_s < free_s):
                yield answered_s - max(submitted_s, free_s)
            free_s = answered_s

    def own_sent(self) -> Iterator[float]:
        """Yield the seconds in which outputs of the control unit came to the first device of a
        stage that was waiting for them."""
        ended = {a: t[1] for a, t in self.own.embedding.items() if a.kind == FORWARD}
        ended |= {a: t[1] for a, t in self.own.head.items() if a.kind == BACKWARD}
        if len(self.rows[0]) > 1:  # which also waits for weights of the last step
            ended.pop(Action(FORWARD, 0), None)
        first, last = (next(iter(self.rows[stage].values())) for stage in (0, -1))
        for action, end_s in ended.items():
            times = (first if action.kind == FORWARD else last).get(action)
            if times is not None and times[0] < end_s:
                yield max(0.0, times[1] - end_s)

    def sent(self, stage: int, device: str) -> Iterator[tuple[str, float]]:
        """Yield the kind of action and the seconds in which its output came from a ``device`` of a
        stage to one that was waiting for it, and received its other rows earlier."""
        sinks = {kind: list(self._sinks(stage, device, kind)) for kind in (FORWARD, BACKWARD)}
        for action, (_, _, end_s, sent_s) in self.rows[stage][device].items():
            # a device that sends no output has sent it at once
            for sink, sources in sinks[action.kind] if sent_s > end_s else ():
                times = sink.get(action)
                last_s = max(rows[action][2] for rows in sources)
                if times is not None and times[0] < end_s >= last_s:
                    yield action.kind, max(0.0, times[1] - end_s)

    def _sinks(
        self, stage: int, device: str, kind: str
    ) -> Iterator[tuple[Mapping[Action, Sequence[float]], list[_Rows]]]:
        """Yield the times of each stage's device to which a ``device`` sends outputs of a kind of
        action, or of the control unit, and the times of all devices that send to it."""
        to, place = (stage + 1, stage) if kind == FORWARD else (stage - 1, stage - 1)
        if not 0 <= to < len(self.rows):
            own = {
                action: (free_s, began_s)
                for action, of_head, free_s, began_s in self.own.waited()
                if of_head == (action.kind == FORWARD)
            }
            yield own, list(self.rows[stage].values())
            return
        pairs = [pair if kind == FORWARD else pair[::-1] for pair in self.pairs[place]]
        for sink in (b for a, b in pairs if a == device):
            yield self.rows[to][sink], [self.rows[stage][a] for a, b in pairs if b == sink]


def _pairs(plan: ClusterPlan) -> list[list[tuple[str, str]]]:
    """Return the devices of each two segments in order that have rows in common."""
    return [
        [(before.devices[a], after.devices[b]) for a, b in connected(before.parts, after.parts)]
        for before, after in pairwise(plan.segments)
    ]


def _lengths(times: Mapping[Action, tuple[float, float]], kind: str) -> Iterator[float]:
    return (end - begin for action, (begin, end) in times.items() if action.kind == kind)


def _mean(values: Iterable[float]) -> float:
    """Return the mean; 0 without values."""
    found = [*values]
    return fmean(found) if found else 0.0
