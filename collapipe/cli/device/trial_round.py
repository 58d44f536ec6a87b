"""Trial rounds: micro-batches through a cluster's devices, to time their blocks and hops.

Times within a device are by its own clock. A hop's round trip is the time between two actions of
both its ends, forward and back, in which the offset of their clocks cancels.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from statistics import median

import torch

import collapipe
from collapipe.devices.fitting import Fit, fit
from collapipe.errors import CancelledRoundError, LinkError
from collapipe.models.cost import rows_of_input
from collapipe.models.description import describe
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import prefixed
from collapipe.models.split import ModelSpec, block_name
from collapipe.models.transformer import TransformerSpec
from collapipe.plan import ClusterPlan, SegmentPlan, Span
from collapipe.process import cancellation
from collapipe.process.cancellation import cancellable
from collapipe.sections import OptimizerSettings
from collapipe.state import BlockCost
from collapipe.tensors import Tensors
from collapipe.wire.channels import Channels, DeviceAddress, Dialer
from pipeline import schedule
from pipeline.devices.block_form import block_forms
from pipeline.devices.control_unit.connection import Cluster
from pipeline.devices.control_unit.replica import Replica, starting_with
from pipeline.devices.control_unit.segments import RemoteSegments
from pipeline.devices.messages import RoundDescription
from pipeline.phase_timer import PhaseTimer
from pipeline.schedule import Action
from pipeline.stage import Passed

_SCHEDULE = "one_f_one_b"  # keeps only two micro-batches
_PARTS = 4  # the largest micro-batch is a batch divided by this
_WARM_UPS = 2  # micro-batches that are not counted
_HUNG_S = 600.0  # time limit of an action
_BUSY_S = 5.0  # a device is free again this long after a trial, also on a busy machine
_NO_STEP = OptimizerSettings(  # without state; it never steps
    name="sgd",
    lr=1.0,
    momentum=0.0,
    beta1=0.0,
    beta2=0.0,
    eps=1.0,
    weight_decay=0.0,
    warmup_steps=0,
    decay="constant",
    clip_norm=None,
    state="reset",
)
# Hops are timed with blocks that compute little for the bytes of their activations.
_DIM, _TOKENS = 32, 32
_ROW_BYTES = _DIM * torch.float32.itemsize
_MOST_BYTES = 8 * 2**20  # of a message
_MOST_S = 3.0  # for all messages of a size, after the first ones
_FEWEST = 2  # messages of a size; the first one is not counted
_HOP_S = 10.0  # time limit of all messages, for each hop
_HEAD_START_S = 0.05  # so that each device has begun the step when the first message arrives


@dataclass(frozen=True, slots=True)
class Trial:
    """The micro-batches that are sent through devices ``repeats`` times. ``cost`` is a block's cost
    for a whole batch."""

    spec: ModelSpec
    cost: BlockCost
    tokens: int
    batch_size: int
    repeats: int

    @property
    def samples(self) -> tuple[int, int]:
        """The sample counts of the smaller and the larger micro-batch."""
        return 1, max(2, self.batch_size // _PARTS)


@dataclass(frozen=True, slots=True)
class Trip:
    """The median round-trip time of a message over a hop, or over all hops of a pipeline."""

    num_bytes: int  # each way
    seconds: float


class LostDeviceError(LinkError):
    """A device was lost or failed in a trial round."""

    def __init__(self, device: str, cause: str) -> None:
        super().__init__(f"{device}: {cause}")
        self.device = device


def chunk_seconds(
    device: DeviceAddress, dialer: Dialer, trial: Trial, blocks: int
) -> list[list[float]]:
    """Time micro-batches, forward and backward, through the first ``blocks`` blocks.

    Returns the seconds of the trial's repeats for each of its sample counts. Raises ``LinkError``
    if the device is lost, fails or is busy.
    """
    m, row = trial.repeats + _WARM_UPS, (rows_of_input(trial.spec, trial.tokens), trial.spec.dim)
    with _opened([device], dialer, trial.spec, blocks, m) as segments:
        return [
            _chunks(segments, torch.randn(size, *row), trial.tokens, m, step)[_WARM_UPS:]
            for step, size in enumerate(trial.samples)
        ]


def hop_trips(
    devices: Sequence[DeviceAddress], dialer: Dialer, sizes: Sequence[int], repeats: int
) -> list[list[Trip]]:
    """Time messages of about these sizes over each hop of a pipeline: from the control unit to the
    first device, on to each next one, and from the last one to the control unit.

    ``sizes`` ascend. A hop's trips lack sizes that do not fit into the time limit. Raises
    ``LostDeviceError``, ``BusyDeviceError``, ``UnreachedError`` if a device cannot dial the next
    one, and ``LinkError`` if not even the first size fits.
    """
    spec = TransformerSpec(len(devices), 1, _DIM, 1, 1, 0.0)
    limit_s = _HOP_S * (len(devices) + 1)
    until_s = time.monotonic() + limit_s
    found: list[list[Trip]] = [[] for _ in range(len(devices) + 1)]
    try:
        with (
            cancellable(limit_s),
            _opened(devices, dialer, spec, blocks=1, num_micro_batches=1) as segments,
        ):
            if segments.unreached is not None:
                raise segments.unreached
            for of_hops in _trips(segments, sizes, repeats, until_s):
                for trips, each in zip(found, of_hops, strict=True):
                    trips.append(each)
    except CancelledRoundError as error:
        cancellation.check()  # the caller's cancellation is no fault of the hops
        if not found[0]:
            raise LinkError(f"{_FEWEST} messages exceed {limit_s:g} s; use faster links") from error
    return found


def expected_s(passes: Sequence[Trip], num_bytes: int) -> float:
    """Estimate the seconds of a message over all hops from those of smaller ones.

    One smaller size says nothing of the hops' rate, so the estimate is then the least possible.
    """
    if len(passes) < 2:
        return passes[0].seconds if passes else 0.0
    law = fit_hop(passes)
    return law.each * num_bytes + law.fixed


def fit_hop(trips: Sequence[Trip]) -> Fit:
    """Fit a round trip's seconds per byte, and per message without bytes."""
    return fit([(each.num_bytes, 1.0) for each in trips], [each.seconds for each in trips])


@contextmanager
def _opened(
    devices: Sequence[DeviceAddress],
    dialer: Dialer,
    spec: ModelSpec,
    blocks: int,
    num_micro_batches: int,
) -> Iterator[RemoteSegments]:
    """Load ``blocks`` new blocks to each device, for steps that do not change them."""
    held = (SegmentPlan(each.name, Span(k * blocks, blocks)) for k, each in enumerate(devices))
    common = RoundDescription(
        version=collapipe.__version__,
        unit=0,
        round=0,
        seed=0,
        model=describe(spec),
        recompute=False,  # the planner adds the time of recomputation
        dtype="float32",
        optimizer=_NO_STEP,
        replicate_every=0,
    )
    known = {each.name: each for each in devices}
    indices, weights = range(len(devices) * blocks), Tensors()
    for index in indices:
        weights |= prefixed(block_name(index), spec.build_block(index).state_dict())
    forms = block_forms(spec, indices, _NO_STEP, torch.float32)
    with (
        Channels(dialer) as channels,
        RemoteSegments(
            ClusterPlan(0, tuple(held), num_micro_batches, _SCHEDULE),
            Cluster(known, channels, _give_up, lambda plan: _HUNG_S, busy_s=_BUSY_S),
            common,
            spec,
            Replica(forms, starting_with(weights, {}), {}),
            PhaseTimer(),
        ) as segments,
    ):
        yield segments


def _give_up(lost: Mapping[str, str]) -> ClusterPlan:
    """Raise ``LostDeviceError``, because a trial has no other devices."""
    raise LostDeviceError(*next(iter(lost.items())))


def _chunks(
    segments: RemoteSegments, hidden: torch.Tensor, tokens: int, m: int, step: int
) -> list[float]:
    """Return the seconds of each of m micro-batches with the activations ``hidden`` [b, s, d] of
    ``tokens`` tokens, at most s, on the only device."""
    ends = _Ends(hidden, tokens, head_start_s=0.0)
    segments.run(ends.first, ends, DropoutKey(0, 0, step), [(len(hidden), tokens)] * m)
    (table,) = segments.action_times
    taken = [0.0] * m
    actions = schedule.build(_SCHEDULE, 1, m)[0]
    for action, (_, began, ended, _) in zip(actions, table.tolist(), strict=True):
        taken[action.micro_batch] += ended - began
    return taken


def _trips(
    segments: RemoteSegments, sizes: Sequence[int], repeats: int, until_s: float
) -> Iterator[list[Trip]]:
    """Yield each size's trips over the hops, as long as messages are expected before ``until_s``
    of ``time.monotonic``."""
    passes, steps = list[Trip](), count()
    for hidden in map(_hidden, sizes):
        began = time.monotonic()
        if began + _FEWEST * expected_s(passes, hidden.nbytes) > until_s:
            return
        taken = _repeated(segments, hidden, steps, repeats)
        passes.append(Trip(hidden.nbytes, (time.monotonic() - began) / len(taken)))
        yield [Trip(hidden.nbytes, median(seconds)) for seconds in zip(*taken[1:], strict=True)]


def _repeated(
    segments: RemoteSegments, hidden: torch.Tensor, steps: Iterator[int], repeats: int
) -> list[list[float]]:
    """Return each message's seconds over each hop, of one that is not counted and the repeats."""
    taken, began = list[list[float]](), time.monotonic()
    while len(taken) < _FEWEST or (len(taken) <= repeats and time.monotonic() - began < _MOST_S):
        taken.append(_round_trips(segments, hidden, next(steps)))
    return taken


def _round_trips(segments: RemoteSegments, hidden: torch.Tensor, step: int) -> list[float]:
    """Return the seconds of a message, there and back, over each hop."""
    rows, tokens, _ = hidden.shape
    ends = _Ends(hidden, tokens, _HEAD_START_S)
    segments.run(ends.first, ends, DropoutKey(0, 0, step), [(rows, tokens)])
    # of each end of a hop: forward received and sent, backward received and sent
    devices = [
        (forward[1], forward[2], backward[1], backward[2])
        for forward, backward in map(torch.Tensor.tolist, segments.action_times)
    ]
    first, last = ends.first, ends
    control_unit = (last.received_s, first.sent_s, first.received_s, last.sent_s)
    stages = (control_unit, *devices, control_unit)
    return [(after[0] - before[1]) + (before[2] - after[3]) for before, after in pairwise(stages)]


def _hidden(num_bytes: int) -> torch.Tensor:
    """Make an activation [b, s, d] of about so many bytes, at most ``_MOST_BYTES``."""
    rows = max(1, min(num_bytes, _MOST_BYTES) // _ROW_BYTES)
    tokens = min(rows, _TOKENS)
    return torch.randn(rows // tokens, tokens, _DIM)  # random, so that no link compresses it


class _First:
    """The control unit before the first device: sends the same activation for each micro-batch."""

    def __init__(self, hidden: torch.Tensor, tokens: int, head_start_s: float) -> None:
        self._head_start_s = head_start_s
        self._passed = hidden, torch.ones(len(hidden), tokens, dtype=torch.bool)
        self.sent_s = self.received_s = 0.0

    def forget(self) -> None:
        """Do nothing: the activation is kept."""

    def forward(self, micro_batch: int, received: Passed) -> Passed:
        time.sleep(self._head_start_s)
        self.sent_s = time.monotonic()
        return self._passed

    def backward(self, micro_batch: int, received: Passed) -> Passed:
        self.received_s = time.monotonic()
        return ()


class _Ends:
    """The control unit after the last device: returns activations as gradients."""

    def __init__(self, hidden: torch.Tensor, tokens: int, head_start_s: float) -> None:
        self.first = _First(hidden, tokens, head_start_s)
        self.received_s = self.sent_s = 0.0
        self._held = dict[int, torch.Tensor]()

    def forward(self, micro_batch: int, received: Passed) -> Passed:
        self.received_s = time.monotonic()
        self._held[micro_batch] = received[0]
        return ()

    def backward(self, micro_batch: int, received: Passed) -> Passed:
        self.sent_s = time.monotonic()
        return (self._held.pop(micro_batch),)

    def ready(self, action: Action) -> bool:
        return action.micro_batch in self._held
