"""What shall happen: frozen plans, the only thing that passes from deciding to doing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from collapipe.errors import ConfigError
from collapipe.state import DeviceProfile, HeadPlace, Precision

Amount = Annotated[float, Field(ge=0)]  # checked where it is read from a file or a message


@dataclass(frozen=True, slots=True)
class Span:
    """A run of consecutive encoder blocks, ``first`` … ``first + blocks - 1`` (δ_k blocks)."""

    first: int
    blocks: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.blocks < 1:
            raise ConfigError(
                f"a span of {self.blocks} blocks from block {self.first} is impossible; "
                "a segment holds at least one block"
            )

    @property
    def stop(self) -> int:
        """One past the last block."""
        return self.first + self.blocks

    def indices(self) -> range:
        """The blocks' places in the whole encoder."""
        return range(self.first, self.stop)


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """One segment s of the encoder and the device that holds it."""

    device: str
    span: Span


def segment_plans(devices: Sequence[DeviceProfile], held: Sequence[int]) -> tuple[SegmentPlan, ...]:
    """The blocks that the devices hold, each device's after those of the ones before it."""
    segments, first = [], 0
    for device, blocks in zip(devices, held, strict=True):
        if blocks:
            segments.append(SegmentPlan(device.name, Span(first, blocks)))
            first += blocks
    return tuple(segments)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A solver's proof for its answer: no solution is below ``lower_bound``.

    A heuristic that knows no bound gives 0. Times are not compared: the same plan is the same plan.
    """

    objective: float
    lower_bound: float
    solver: str
    solve_time_s: float = field(compare=False)

    @property
    def gap(self) -> float:
        """(objective - lower_bound) / |objective|; 0 where they agree."""
        excess = self.objective - self.lower_bound
        return excess / abs(self.objective) if excess else 0.0


@dataclass(frozen=True, slots=True)
class UplinkPlan:
    """The channel j and transmit power p_n of a unit, and how long its upload then takes.

    ``finish_s`` is when the unit is done; before ``latency_s`` and ``upload_s`` of its plan
    together, where it uploads while its pipeline runs. None in plans of older versions.
    ``activation`` and ``upload`` are the precisions of what it sends, ``head`` where its head
    trains; each is None where the configuration fixes it.
    """

    channel: int
    power_w: Amount
    upload_s: Amount
    finish_s: Amount | None = None
    activation: Precision | None = None
    upload: Precision | None = None
    head: HeadPlace | None = None


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What one cluster does in one round.

    ``segments`` are the S segments in the order in which activations pass them, contiguous from
    block 0; without any, every device trains all blocks on its share of the batch. A batch of fewer
    samples than ``num_micro_batches``, m, is split into as many micro-batches as it has samples.
    ``schedule`` is one of ``pipeline.schedule``. ``latency_s`` is what the strategy expects the
    round's pipelines to take, None where it does not model time; ``uplink`` is None where it plans
    no channels. ``over_limits``: a device may get more than its memory or energy allows.
    """

    unit: int
    segments: tuple[SegmentPlan, ...]
    num_micro_batches: int
    schedule: str
    latency_s: Amount | None = None
    uplink: UplinkPlan | None = None
    over_limits: bool = False

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1:
            raise ConfigError(
                f"unit {self.unit}: {self.num_micro_batches} micro-batches; at least 1"
            )
        expected = 0
        for segment in self.segments:
            if segment.span.first != expected:
                raise ConfigError(
                    f"unit {self.unit}: segment on {segment.device} starts at block "
                    f"{segment.span.first}, expected {expected}; segments follow each other"
                )
            expected = segment.span.stop


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What one round t does: a plan for every scheduled unit, in the units' order.

    ``gammas`` are Γ_n(t) of all N units (eq. 28), ``queues`` Y_n(t+1) as this round leaves them
    (eq. 29), and ``idle_queues`` what they are instead for units that were scheduled and failed;
    all empty where the strategy keeps no queues. ``error_queues`` are Q_n(t+1), of what fewer bits
    cost the gradient; empty where none are kept. ``certificate`` is None where it solves nothing.
    """

    round: int
    clusters: tuple[ClusterPlan, ...]
    gammas: tuple[float, ...] = ()
    queues: tuple[float, ...] = ()
    idle_queues: tuple[float, ...] = ()
    certificate: Certificate | None = None
    error_queues: tuple[float, ...] = ()
