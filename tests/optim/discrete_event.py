"""Discrete-event simulations of a pipeline's schedule, and of a round with its energy.

Each device and each link does one thing at a time.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.schedule import FORWARD, Action, Schedule

Sender = Literal["device", "link"]
"""The resource that is busy during a hop: the device, or a separate link."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Seconds of one micro-batch on one segment, in one direction.

    The hop connects the segment to the next one, or the last segment to the head. A forward chunk
    ends with its hop, and a backward chunk begins with it.
    """

    compute_s: float
    hop_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LaterStages:
    """Seconds of one micro-batch in the stages after the last segment; each stage is a separate
    resource."""

    uplink_s: float = 0.0
    head_s: float = 0.0  # forward and backward
    gradient_s: float = 0.0


def makespan(
    schedule: Schedule,
    forward: Sequence[Chunk],
    backward: Sequence[Chunk],
    sender: Sender,
    later: LaterStages | None = None,
) -> float:
    """Return the seconds until every action is done.

    A link sends one tensor at a time, in the order of its segment's actions. Activations reach the
    head over the uplink, and gradients reach the last segment over a separate link.
    """
    run = _Run(len(forward), sender, later or LaterStages())
    waiting = [list(actions) for actions in schedule]
    while any(waiting):
        for stage, actions in enumerate(waiting):
            while actions and run.may_start(stage, actions[0]):
                action = actions.pop(0)
                if stage == len(forward):
                    run.pass_head(stage, action)
                elif action.kind == FORWARD:
                    run.send_forward(stage, action, forward[stage])
                else:
                    run.send_backward(stage, action, backward[stage])
    return max(run.ended.values())


class _Run:
    """The times at which each resource becomes free and each action ends, including its forward
    hop."""

    def __init__(self, num_segments: int, sender: Sender, later: LaterStages) -> None:
        self.device_free_s = [0.0] * num_segments
        self.link_free_s = [0.0] * num_segments
        self.ended: dict[tuple[int, Action], float] = {}
        self._head = num_segments
        self._sender = sender
        self._later = later
        self._uplink_free_s = self._head_free_s = self._gradients_free_s = 0.0

    def may_start(self, stage: int, action: Action) -> bool:
        """Whether the time at which the previous stage ends with the micro-batch is known."""
        before = self._needs(stage, action)
        return before is None or before in self.ended

    def ready_s(self, stage: int, action: Action) -> float:
        """Return the time at which the previous stage ends with the micro-batch."""
        before = self._needs(stage, action)
        return 0.0 if before is None else self.ended[before]

    def send_forward(self, stage: int, action: Action, chunk: Chunk) -> None:
        """Compute, then send."""
        begin = max(self.device_free_s[stage], self.ready_s(stage, action))
        computed = self.device_free_s[stage] = begin + chunk.compute_s
        self.ended[stage, action] = self._hop(stage, computed, chunk.hop_s)

    def send_backward(self, stage: int, action: Action, chunk: Chunk) -> None:
        """Receive, then compute."""
        arrived = self._hop(stage, self.ready_s(stage, action), chunk.hop_s)
        begin = max(self.device_free_s[stage], arrived)
        self.ended[stage, action] = self.device_free_s[stage] = begin + chunk.compute_s

    def pass_head(self, stage: int, action: Action) -> None:
        """Run an action of the head.

        A forward ends when its activations arrive at the head. A backward ends when its gradients
        arrive at the last segment.
        """
        ready_s = self.ready_s(stage, action)
        if action.kind == FORWARD:
            self._uplink_free_s = max(self._uplink_free_s, ready_s) + self._later.uplink_s
            self.ended[stage, action] = self._uplink_free_s
        else:
            self._head_free_s = max(self._head_free_s, ready_s) + self._later.head_s
            sent_s = max(self._gradients_free_s, self._head_free_s) + self._later.gradient_s
            self.ended[stage, action] = self._gradients_free_s = sent_s

    def _hop(self, stage: int, ready_s: float, hop_s: float) -> float:
        busy = self.device_free_s if self._sender == "device" else self.link_free_s
        busy[stage] = max(busy[stage], ready_s) + hop_s
        return busy[stage]

    def _needs(self, stage: int, action: Action) -> tuple[int, Action] | None:
        if action.kind == FORWARD:
            return (stage - 1, action) if stage else None
        # The head's backward needs the head's own forward, which is earlier in its list.
        return (stage + 1, action) if stage < self._head else (stage, _forward_of(action))


def _forward_of(action: Action) -> Action:
    return Action(FORWARD, action.micro_batch)


@dataclass(frozen=True, slots=True)
class Station:
    """A device or a link that is busy with one micro-batch at a time.

    ``seconds`` and ``joules`` are per micro-batch. ``owner`` is the device that spends the joules.
    """

    owner: str
    seconds: float
    joules: float


@dataclass
class Line:
    """Stations in a row that micro-batches pass one after another, with a clock and an energy
    meter.

    ``starts_s`` lists the times at which each station begins its micro-batches.
    """

    stations: Sequence[Station]
    clock_s: float = 0.0
    spent_j: dict[str, float] = field(default_factory=dict)
    starts_s: dict[int, list[float]] = field(default_factory=dict)

    def run(self, num_micro_batches: int) -> None:
        """Simulate one batch event by event, until its last micro-batch has left the last
        station."""
        waiting = [list(range(num_micro_batches)), *([] for _ in self.stations)]
        busy = [False] * len(self.stations)
        events = list[tuple[float, int, int]]()
        self._start(events, waiting, busy)
        while events:
            self.clock_s, place, micro_batch = heapq.heappop(events)
            station, busy[place] = self.stations[place], False
            self.spent_j[station.owner] = self.spent_j.get(station.owner, 0.0) + station.joules
            waiting[place + 1].append(micro_batch)
            self._start(events, waiting, busy)

    def _start(
        self, events: list[tuple[float, int, int]], waiting: list[list[int]], busy: list[bool]
    ) -> None:
        for place, station in enumerate(self.stations):
            if waiting[place] and not busy[place]:
                busy[place] = True
                self.starts_s.setdefault(place, []).append(self.clock_s)
                end_s = self.clock_s + station.seconds
                heapq.heappush(events, (end_s, place, waiting[place].pop(0)))
