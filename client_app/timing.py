"""Time micro-batches through new blocks on one device, by the device's clock."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

import collapipe
from collapipe.errors import LinkError
from collapipe.models.description import describe
from collapipe.models.dropout import DropoutKey
from collapipe.models.part import state_like
from collapipe.models.split import ModelSpec, block_name
from collapipe.plan import ClusterPlan, SegmentPlan, Span
from collapipe.sections import OptimizerSettings
from collapipe.state import BlockCost
from collapipe.tensors import Tensors
from collapipe.wire.dialing import Dialer
from collapipe.wire.segments import DeviceAddress, RoundDescription
from pipeline import schedule
from pipeline.remote.cluster import Cluster
from pipeline.remote.journal import Recording
from pipeline.remote.replica import Replica, starting_with
from pipeline.remote.segments import RemoteSegments
from pipeline.schedule import Action
from pipeline.stage import Passed
from pipeline.timer import PhaseTimer

_SCHEDULE = "one_f_one_b"  # keeps only two micro-batches
_PARTS = 4  # the largest micro-batch is a batch divided by this
_WARM_UPS = 2  # micro-batches that are not counted
_HUNG_S = 600.0  # time limit of an action
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


def chunk_seconds(
    device: DeviceAddress, dialer: Dialer, trial: Trial, weights: Tensors, blocks: int
) -> list[float]:
    """Time a micro-batch, forward and backward, through the first ``blocks`` blocks.

    Returns the median seconds over the trial's repeats for each of its sample counts. ``weights``
    are the blocks' weights. Raises ``LinkError`` if the device is lost or fails.
    """
    spec = trial.spec
    segment = SegmentPlan(device.name, Span(0, blocks))
    plan = ClusterPlan(0, (segment,), trial.repeats + _WARM_UPS, _SCHEDULE)
    common = RoundDescription(
        version=collapipe.__version__,
        unit=plan.unit,
        round=0,
        seed=0,
        model=describe(spec),
        recompute=False,  # the planner adds the time of recomputation
        dtype="float32",
        optimizer=_NO_STEP,
        replicate_every=0,
    )
    cluster = Cluster({device.name: device}, dialer, _give_up, lambda plan: _HUNG_S)
    names = [block_name(index) for index in range(blocks)]
    replica = Replica(names, starting_with(weights, {}), partial(state_like, _NO_STEP))
    with RemoteSegments(plan, cluster, common, spec.dim, replica, PhaseTimer()) as segments:
        return [
            _median_seconds(segments, plan, torch.randn(size, trial.tokens, spec.dim), step)
            for step, size in enumerate(trial.samples)
        ]


def _median_seconds(
    segments: RemoteSegments, plan: ClusterPlan, hidden: torch.Tensor, step: int
) -> float:
    """Return the median seconds of a micro-batch with the activations ``hidden`` [b, s, d]."""
    m = plan.num_micro_batches
    activation = hidden, torch.ones(hidden.shape[:2], dtype=torch.bool)
    embedding = Recording(dict.fromkeys(range(m), activation), {})
    segments.run(embedding, _Mirror(), DropoutKey(0, plan.unit, step), m)
    (table,) = segments.action_times
    taken = [0.0] * m
    actions = schedule.build(plan.schedule, 1, m)[0]
    for action, (_, began, ended, _) in zip(actions, table.tolist(), strict=True):
        taken[action.micro_batch] += ended - began
    return median(taken[_WARM_UPS:])


def _give_up(lost: Mapping[str, str]) -> ClusterPlan:
    """Raise ``LinkError``, because a trial has no other device."""
    device, cause = next(iter(lost.items()))
    raise LinkError(f"{device}: {cause}")


class _Mirror:
    """A head that returns the received activations as gradients."""

    def __init__(self) -> None:
        self._held = dict[int, torch.Tensor]()

    def forward(self, micro_batch: int, received: Passed) -> Passed:
        self._held[micro_batch] = received[0]
        return ()

    def backward(self, micro_batch: int, received: Passed) -> Passed:
        return (self._held.pop(micro_batch),)

    def ready(self, action: Action) -> bool:
        return action.micro_batch in self._held
