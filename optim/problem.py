"""Problems and solutions of the planner: the interfaces of all solvers."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from numbers import Integral
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from collapipe.errors import ConfigError
from collapipe.plan import Certificate, ClusterPlan, SegmentPlan, Share, Span, segment_plans
from collapipe.state import DeviceProfile, HeadPlace, SharingLaw

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Latency = Literal["bound", "flow_shop", "overlap"]
LATENCIES = get_args(Latency)


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{option}={value}: must be one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class ClusterProblem:
    """Sub-1: choose the blocks of each device, S and m, for the smallest pipeline latency.

    ``activation_s``, ``head_s`` and ``gradient_s`` are seconds of a whole batch; a micro-batch
    takes 1/m of each. The fastest partition depends on the activations' uplink time, which is set
    later, so ``activation_s`` lists several possible times. If the last one is infinite, all times
    from the one before it on are possible.
    """

    devices: tuple[DeviceProfile, ...]  # K of them
    num_blocks: int  # L
    batch_size: int  # b; a micro-batch has b̂ = b/m samples, a real number here (eq. 5)
    max_micro_batches: int
    latency: Latency  # the law of the pipeline's time, see ``optim.latency``
    activation_s: tuple[float, ...] = (0.0,)  # uplink times during the pipeline, ascending
    head_s: float = 0.0  # time in the head, after the uplink if there is one
    gradient_s: float = 0.0  # time of sending gradients to the unit, after the head
    min_micro_batches: int = 1  # equal to the maximum in a round that must keep its m
    # Micro-batches of which a device keeps tensors, by its place from the end of the pipeline,
    # ascending; (): all m. Without a place a device counts as the first of all.
    in_flight: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choice("latency", self.latency, LATENCIES)
        if not isinstance(self.num_blocks, Integral) or self.num_blocks < 1:
            raise ConfigError(f"num_blocks={self.num_blocks}: must be a whole number from 1 on")
        if not 1 <= self.batch_size < math.inf:
            raise ConfigError(f"batch_size={self.batch_size}: must be from 1 on")
        least, most = self.min_micro_batches, self.max_micro_batches
        if not 1 <= least <= most:
            raise ConfigError(f"micro-batches from {least} to {most}: must be from 1 on, ascending")
        if not self.activation_s or not all(a <= b for a, b in pairwise((0.0, *self.activation_s))):
            raise ConfigError(f"activation_s={self.activation_s}: must be ascending, from 0 on")

    @property
    def linked(self) -> bool:
        """Whether a hop may depend on the next device."""
        return any(device.links for device in self.devices)

    def kept(
        self, num_micro_batches: int, place: int | None = None, rows: int | None = None
    ) -> float:
        """Return the part of a batch's rows whose tensors a device keeps at the same time, if it
        computes at most so many ``rows`` of a micro-batch; None: all.

        The last stage has place 1.
        """
        rows = math.ceil(self.batch_size / num_micro_batches) if rows is None else rows
        count = self.num_in_flight(num_micro_batches, place)
        return min(1.0, count * rows / self.batch_size)

    def num_in_flight(self, num_micro_batches: int, place: int | None = None) -> int:
        """Return of how many micro-batches a device keeps tensors at the same time."""
        last = len(self.in_flight)
        count = self.in_flight[min(place or last, last) - 1] if last else num_micro_batches
        return min(count, num_micro_batches)

    def only(self, used: Sequence[int]) -> "ClusterProblem":
        """Return the problem with these devices, and no others."""
        return replace(self, devices=tuple(self.devices[k] for k in used))

    def at(self, place: int) -> "ClusterProblem":
        """Return the problem in which every device is at this place from the end."""
        first = min(place, len(self.in_flight)) - 1
        return replace(self, in_flight=self.in_flight[first : first + 1])

    def in_modes(self, recomputing: Collection[int]) -> "ClusterProblem":
        """Return the problem in which these devices recompute, and no others."""
        devices = tuple(each.in_mode(k in recomputing) for k, each in enumerate(self.devices))
        return replace(self, devices=devices)

    def sharing(self) -> "ClusterProblem":
        """Return the problem in which every device may share a stage; adding gradients takes no
        time if nothing says how long it takes."""
        devices = (
            replace(each, sharing=each.sharing or SharingLaw(0.0, each.max_blocks, each.memory))
            for each in self.devices
        )
        return replace(self, devices=tuple(devices))

    def unlimited(self) -> "ClusterProblem":
        """Return the problem without limits of memory and energy, in which no device recomputes."""
        free = tuple(device.unlimited() for device in self.in_modes(()).devices)
        return replace(self, devices=free)


class UplinkTimes(NamedTuple):
    """A range of seconds that a batch's activations take on the uplink."""

    first_s: float = 0.0
    last_s: float = math.inf


EVERY_TIME = UplinkTimes()


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive blocks on one device, or on several that each compute whole rows of a
    micro-batch.

    The rows y_k of several devices sum to ⌈b/m⌉, in the devices' order; a device alone has all.
    ``shares`` are the rows of each share if a device has several, which are next to each other.
    """

    devices: tuple[int, ...]  # indices among the cluster's K devices
    rows: tuple[int, ...]  # y_k, at least 1
    blocks: int  # δ
    shares: tuple[int, ...] = ()

    def shares_on(self, names: Sequence[str]) -> tuple[Share, ...]:
        """Return the shares if its devices have these ``names``; none for one device's only one."""
        rows = self.shares or (self.rows if len(self.devices) > 1 else ())
        ends, starts = [*accumulate(self.rows)], accumulate(rows, initial=0)
        pairs = zip(starts, rows, strict=False)  # the last start is the end
        return tuple(Share(names[bisect_right(ends, start)], y) for start, y in pairs)

    def shares_of_each(self) -> Iterator[tuple[int, int]]:
        """Yield each device and the number of its shares."""
        names = [str(k) for k in self.devices]
        held = Counter(share.device for share in self.shares_on(names))
        return zip(self.devices, map(held.__getitem__, names), strict=True)


@dataclass(frozen=True, slots=True)
class Partition:
    """A point of a cluster's front.

    ``latency_s`` is Σ + (m - 1)·M with Σ the sum of all stages and M the slowest one. It excludes
    the uplink, which is a separate stage: see ``optim.latency.streamed_s``. ``replicated`` means
    that every device holds the whole encoder and trains b/K samples (VanillaFL, S = 1). ``stages``
    are in pipeline order; they are empty if each device that holds blocks is a stage of its own, in
    the devices' order.
    ``over_limits`` means that memory and energy limits were ignored. ``head`` is the place of the
    head that the times assume; only payloads for this place are compatible.
    """

    blocks: tuple[int, ...]  # δ_k for each of the K devices, 0 for those left out
    num_micro_batches: int  # m
    latency_s: float  # seconds of one batch, under the problem's law
    slowest_s: float = 0.0  # M of a micro-batch; 0 if uploads wait for the whole batch
    replicated: bool = False
    over_limits: bool = False
    fastest_s: UplinkTimes = EVERY_TIME  # for which it is the fastest
    head: HeadPlace | None = None  # None: the configured place
    stages: tuple[Stage, ...] = ()
    recomputing: tuple[int, ...] = ()  # devices that recompute, ascending
    schedule: str = ""  # "": the request's
    bound_s: float = math.inf  # no plan takes less without the uplink, if a search left some open

    @property
    def num_segments(self) -> int:
        """S, the stages of the pipeline."""
        if self.stages:
            return len(self.stages)
        return 1 if self.replicated else len(self.blocks) - self.blocks.count(0)

    @property
    def shares(self) -> bool:
        """Whether several devices share a stage."""
        return any(len(stage.devices) > 1 for stage in self.stages)

    def among(self, used: Sequence[int], count: int) -> "Partition":
        """Return the partition of the devices ``used`` as one of all ``count`` devices."""
        blocks = [0] * count
        for k, held in zip(used, self.blocks, strict=True):
            blocks[k] = held
        stages = (replace(s, devices=tuple(used[k] for k in s.devices)) for s in self.stages)
        recomputing = tuple(used[k] for k in self.recomputing)
        return replace(self, blocks=tuple(blocks), stages=tuple(stages), recomputing=recomputing)

    def segments(self, devices: Sequence[DeviceProfile]) -> tuple[SegmentPlan, ...]:
        """Return the plan's segments in pipeline order; none for replicas."""
        segments, first = list[SegmentPlan](), 0
        for stage in self.stages:
            names = [devices[k].name for k in stage.devices]
            span = Span(first, stage.blocks)
            segments.append(SegmentPlan(names[0], span, stage.shares_on(names)))
            first += stage.blocks
        if not self.stages and not self.replicated:
            segments += segment_plans(devices, self.blocks)
        own = {devices[k].name for k in self.recomputing}
        return tuple(
            replace(each, recomputing=tuple(name for name in each.devices if name in own))
            for each in segments
        )


def stages_of_plan(
    plan: ClusterPlan, devices: Sequence[DeviceProfile], rows: int
) -> tuple[Stage, ...]:
    """Return the stages of a plan's segments, whose largest micro-batch has ``rows`` rows. Raises
    ``KeyError`` if the plan has other devices."""
    places = {device.name: place for place, device in enumerate(devices)}
    return tuple(
        Stage(
            tuple(places[name] for name in segment.devices),
            segment.rows_of_devices or (rows,),
            segment.span.blocks,
            segment.rows if len(segment.shares) > len(segment.devices) else (),
        )
        for segment in plan.segments
    )


@dataclass(frozen=True, slots=True)
class ClusterSolution:
    """A solver's answer to a ``ClusterProblem``.

    For each number of segments S, ascending, the front holds the partitions with S segments that
    are fastest among all with at most S, ordered by the uplink times for which they are fastest.
    Partitions with more segments than the fastest one are dominated, because the drift Γ grows with
    S. Heuristics return a single point. The certificate refers to ``best`` at its uplink time. If
    not ``complete``, a limit of nodes ended the search and the front may lack points or hold
    slower ones.
    """

    front: tuple[Partition, ...]
    best: Partition  # the fastest for the smallest uplink time
    certificate: Certificate
    complete: bool = True


ClusterSolver = Callable[[ClusterProblem, np.random.Generator], ClusterSolution]
"""Solves Sub-1. Raises ``InfeasibleRoundError`` if the caps cannot hold the model. Exact solvers
and most heuristics do not draw from the generator."""
