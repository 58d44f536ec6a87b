"""Trial rounds: micro-batches through a cluster's devices, to time their blocks.

Times within a device are by its own clock.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

import collapipe
from collapipe.errors import LinkError
from collapipe.models.cost import rows_of_input
from collapipe.models.description import describe
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import prefixed
from collapipe.models.split import ModelSpec, block_name
from collapipe.plan import ClusterPlan, SegmentPlan, Span
from collapipe.sections import OptimizerSettings
from collapipe.state import BlockCost
from collapipe.tensors import Tensors
from collapipe.wire.device_address import DeviceAddress
from collapipe.wire.streams.channels import Channels, Dialer
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
    with opened([device], dialer, trial.spec, blocks, m) as segments:
        return [
            _chunks(segments, torch.randn(size, *row), trial.tokens, m, step)[_WARM_UPS:]
            for step, size in enumerate(trial.samples)
        ]


@contextmanager
def opened(
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


def _give_up(lost: Mapping[str, str], refused: Mapping[str, tuple[int, str]]) -> ClusterPlan:
    """Raise ``LostDeviceError``, because a trial has no other devices."""
    causes = {**lost, **{name: cause for name, (_, cause) in refused.items()}}
    raise LostDeviceError(*next(iter(causes.items())))


def _chunks(
    segments: RemoteSegments, hidden: torch.Tensor, tokens: int, m: int, step: int
) -> list[float]:
    """Return the seconds of each of m micro-batches with the activations ``hidden`` [b, s, d] of
    ``tokens`` tokens, at most s, on the only device."""
    ends = Ends(hidden, tokens, head_start_s=0.0)
    segments.run(ends.first, ends, DropoutKey(0, 0, step), [(len(hidden), tokens)] * m)
    (table,) = segments.action_times
    taken = [0.0] * m
    actions = schedule.build(_SCHEDULE, 1, m)[0]
    for action, (_, began, ended, _) in zip(actions, table.tolist(), strict=True):
        taken[action.micro_batch] += ended - began
    return taken


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


class Ends:
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
