"""Record a step's inputs of the segments, so that the step can be repeated after a loss.

The embedding and the head have already finished the step and cannot repeat it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from collapipe.wire.streams.frame_stream import FrameStream
from collapipe.wire.streams.outbox import WINDOW
from pipeline.schedule import FORWARD, Action
from pipeline.stage import LastStage, Passed, Ports, Shapes


@dataclass
class StepRecord:
    """One step: the embedding's activations, the head's answers, and how the step ended."""

    step: int
    shapes: Shapes
    activations: dict[int, Passed] = field(default_factory=dict)
    gradients: dict[int, Passed] = field(default_factory=dict)
    rate: float = 0.0
    scale: float = 1.0

    @property
    def rows(self) -> list[int]:
        """The rows of each micro-batch."""
        return [rows for rows, _ in self.shapes]


class Recording:
    """A first or last stage that replays recorded tensors and ignores its inputs."""

    def __init__(self, forwards: Mapping[int, Passed], backwards: Mapping[int, Passed]) -> None:
        self._forwards, self._backwards = forwards, backwards

    def ready(self, action: Action) -> bool:
        return True

    def forward(self, micro_batch: int, received: Passed) -> Passed:
        return self._forwards.get(micro_batch, ())

    def backward(self, micro_batch: int, received: Passed) -> Passed:
        return self._backwards.get(micro_batch, ())


class RecordedHead:
    """The head of a step that may be repeated: it computes each micro-batch only once."""

    def __init__(self, head: LastStage, record: StepRecord) -> None:
        self._head, self._record = head, record
        self._submitted = set[int]()

    @property
    def owes(self) -> bool:
        """Whether an answer is awaited."""
        return not self._submitted <= self._record.gradients.keys()

    def forward(self, micro_batch: int, received: Passed) -> Passed:
        if micro_batch not in self._submitted:
            self._submitted.add(micro_batch)
            self._head.forward(micro_batch, received)
        return ()

    def backward(self, micro_batch: int, received: Passed) -> Passed:
        answers = self._record.gradients
        if micro_batch not in answers:
            answers[micro_batch] = self._head.backward(micro_batch, received)
        return answers[micro_batch]

    def ready(self, action: Action) -> bool:
        return action.micro_batch in self._record.gradients or self._head.ready(action)


class RecordingPorts:
    """The embedding's ports; they record its activations, whose size also limits the frames that
    ``hops`` may receive.

    Activations after the first wait until the first segment is ``built``, because they share the
    link with its weights.
    """

    def __init__(
        self,
        ports: Ports,
        record: StepRecord,
        hops: Sequence[FrameStream],
        built: Callable[[], bool],
    ) -> None:
        self._ports, self._record, self._hops, self._built = ports, record, hops, built
        self.receive = ports.receive

    def holds(self, action: Action) -> bool:
        early = action.kind == FORWARD and action.micro_batch > 0 and not self._built()
        return not early and self._ports.holds(action)

    def send(self, action: Action, made: Passed) -> None:
        if made:
            self._record.activations[action.micro_batch] = made
            most = 2 * WINDOW * sum(each.nbytes for each in made)
            for hop in self._hops:
                hop.max_bytes = max(hop.max_bytes, most)
        self._ports.send(action, made)
