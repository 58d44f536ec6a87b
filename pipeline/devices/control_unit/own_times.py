"""The times of a step on the control unit: of its embedding and its head."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pipeline.schedule import BACKWARD, FORWARD, Action
from pipeline.stage import LastStage, Passed, Stage


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
