"""The typical times of a round's steps, from the times of all actions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, starmap
from statistics import fmean
from typing import NamedTuple

from collapipe.plan import ClusterPlan
from collapipe.row_shares import connected
from pipeline import schedule
from pipeline.devices.control_unit.own_times import OwnTimes
from pipeline.schedule import BACKWARD, FORWARD, Action

_Table = Sequence[Sequence[float]]


class _Times(NamedTuple):
    """When an action requested its input, began, ended, and had sent its output."""

    requested_s: float
    began_s: float
    ended_s: float
    sent_s: float


_Rows = Mapping[Action, _Times]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Typical times of a round's steps, in seconds of a micro-batch: means after the first step.

    ``forward_s`` and ``backward_s`` are by device, in the plan's order. ``send_s`` maps a device,
    or None for the control unit, to the time from the end of an action until its output was at a
    waiting stage; a device that shares one and is never its last has none. ``gradients`` is the
    fraction of gradients among a device's outputs in this mean. The head answers after ``head_s``,
    and ``head_pace_s`` after its last answer if it was busy; 0 if it never was. ``overhead_s`` is
    the part of a step before the first action and after the last one. Devices that share the first
    stage begin ``late_s`` after their tensors arrive, because they wait for weights of the last
    step. ``step_s`` is the mean of all steps.
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


def typical_times(
    plan: ClusterPlan, own_times: Sequence[OwnTimes], tables: Mapping[str, Sequence[_Table]]
) -> StepTimes | None:
    """Return the typical times of the plan's steps; None if no step has all its times.

    ``tables`` are each device's tables of steps, see ``Measurements``, by the control unit's clock.
    """
    steps = _whole_steps(plan, own_times, tables)
    later = steps[1:] or steps
    if not later:
        return None
    held = [(stage, name) for stage, each in enumerate(plan.segments) for name in each.devices]
    own_s, gradients = _mean(each.own_sent() for each in later), dict[str, float]()
    send_s: dict[str | None, float] = {None: own_s}
    for stage, name in held:
        sent = [pair for each in later for pair in each.sent(stage, name)]
        gradients[name] = _mean([[float(kind == BACKWARD) for kind, _ in sent]])
        if sent or not plan.shares:
            send_s[name] = _mean([[seconds for _, seconds in sent]])
    late_s = fmean(each.first_arrival_s for each in later) - own_s
    own = [each.own for each in later]
    returned_s = _mean(_lengths(each.embedding, BACKWARD) for each in own)
    head_s = _mean(each.answers(queued=False) for each in later)
    pace_s = _mean(each.answers(queued=True) for each in later)
    return StepTimes(
        forward_s=tuple(_mean(each.chunks(FORWARD, *one) for each in later) for one in held),
        backward_s=tuple(_mean(each.chunks(BACKWARD, *one) for each in later) for one in held),
        send_s=send_s,
        embedding_forward_s=_mean(_lengths(each.embedding, FORWARD) for each in own),
        embedding_backward_s=returned_s if any(each.returns for each in later) else 0.0,
        submit_s=_mean(_lengths(each.head, FORWARD) for each in own),
        head_s=head_s,
        head_pace_s=min(head_s, pace_s),
        overhead_s=fmean(each.overhead_s for each in later),
        step_s=fmean(each.own.ended_s - each.own.began_s for each in steps),
        late_s=max(0.0, late_s) if len(plan.segments[0].devices) > 1 else 0.0,
        gradients=gradients,
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's times: the control unit's, and per segment and device those of each action, all by
    the control unit's clock. ``pairs`` are the devices of each two segments in order that have rows
    in common."""

    own: OwnTimes
    rows: Sequence[Mapping[str, _Rows]]
    pairs: Sequence[Sequence[tuple[str, str]]]

    @property
    def overhead_s(self) -> float:
        first = min(began_s for began_s, _ in self.own.embedding.values())
        own = [*self.own.embedding.values(), *self.own.head.values()]
        tables = (table for each in self.rows for table in each.values())
        ends = (end_s for _, end_s in own), (t.ended_s for rows in tables for t in rows.values())
        busy_s = max(chain(*ends)) - first
        return max(0.0, self.own.ended_s - self.own.began_s - busy_s)

    @property
    def returns(self) -> bool:
        """Whether the first segment sends gradients to the embedding."""
        rows = (pair for each in self.rows[0].values() for pair in each.items())
        return any(t.sent_s > t.ended_s for action, t in rows if action.kind == BACKWARD)

    @property
    def first_arrival_s(self) -> float:
        """The seconds until the embedding's first output was at all devices of the first stage."""
        first = Action(FORWARD, 0)
        began_s = max(rows[first].began_s for rows in self.rows[0].values())
        return began_s - self.own.embedding[first][1]

    def chunks(self, kind: str, stage: int, device: str) -> Iterator[float]:
        """Yield the seconds of a device's actions of a kind."""
        rows = self.rows[stage][device]
        return (t.ended_s - t.began_s for action, t in rows.items() if action.kind == kind)

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
        """Yield the seconds from the end of the control unit's actions until their outputs were at
        the first device of a stage that was waiting for them."""
        ended = {a: t[1] for a, t in self.own.embedding.items() if a.kind == FORWARD}
        ended |= {a: t[1] for a, t in self.own.head.items() if a.kind == BACKWARD}
        if len(self.rows[0]) > 1:  # which also waits for weights of the last step
            ended.pop(Action(FORWARD, 0), None)
        first, last = (next(iter(self.rows[stage].values())) for stage in (0, -1))
        for action, end_s in ended.items():
            times = (first if action.kind == FORWARD else last).get(action)
            if times is not None and times.requested_s < end_s:
                yield max(0.0, times.began_s - end_s)

    def sent(self, stage: int, device: str) -> Iterator[tuple[str, float]]:
        """Yield the kind of each action of a ``device``, and the seconds from its end until its
        output was at a device that was waiting for it and had received its other rows."""
        sinks = {kind: list(self._sinks(stage, device, kind)) for kind in (FORWARD, BACKWARD)}
        for action, (_, _, end_s, sent_s) in self.rows[stage][device].items():
            # a device that sends no output has sent it at once
            for sink, sources in sinks[action.kind] if sent_s > end_s else ():
                times = sink.get(action)
                last_s = max(rows[action].ended_s for rows in sources)
                if times is not None and times.requested_s < end_s >= last_s:
                    yield action.kind, max(0.0, times.began_s - end_s)

    def _sinks(self, stage: int, device: str, kind: str) -> Iterator[tuple[_Rows, list[_Rows]]]:
        """Yield the times of each receiver of a ``device``'s outputs of a kind of action, and the
        times of all devices that send to this receiver. It may be the control unit."""
        to, place = (stage + 1, stage) if kind == FORWARD else (stage - 1, stage - 1)
        if not 0 <= to < len(self.rows):
            own = {
                action: _Times(free_s, began_s, began_s, began_s)
                for action, of_head, free_s, began_s in self.own.waited()
                if of_head == (action.kind == FORWARD)
            }
            yield own, list(self.rows[stage].values())
            return
        pairs = [pair if kind == FORWARD else pair[::-1] for pair in self.pairs[place]]
        for sink in (b for a, b in pairs if a == device):
            yield self.rows[to][sink], [self.rows[stage][a] for a, b in pairs if b == sink]


def _whole_steps(
    plan: ClusterPlan, own_times: Sequence[OwnTimes], tables: Mapping[str, Sequence[_Table]]
) -> list[_Step]:
    """Return the steps that were not repeated and have all of the plan's micro-batches."""
    lists = schedule.build(plan.schedule, len(plan.segments), plan.num_micro_batches)
    steps, pairs = [], _pairs(plan)
    for number, own in enumerate(own_times):
        if own.whole and len(tables[plan.segments[0].device][number]) == len(lists[0]):
            rows = [
                {
                    name: dict(zip(actions, starmap(_Times, tables[name][number]), strict=True))
                    for name in segment.devices
                }
                for segment, actions in zip(plan.segments, lists, strict=False)
            ]
            steps.append(_Step(own, rows, pairs))
    return steps


def _pairs(plan: ClusterPlan) -> list[list[tuple[str, str]]]:
    """Return the devices of each two segments in order that have rows in common."""
    return [
        [(before.devices[a], after.devices[b]) for a, b in connected(before.parts, after.parts)]
        for before, after in pairwise(plan.segments)
    ]


def _lengths(times: Mapping[Action, tuple[float, float]], kind: str) -> Iterator[float]:
    return (end - begin for action, (begin, end) in times.items() if action.kind == kind)


def _mean(steps: Iterable[Iterable[float]]) -> float:
    """Return the mean of all steps' values; 0 without values."""
    found = [*chain.from_iterable(steps)]
    return fmean(found) if found else 0.0
