"""The measured law of a step on real devices."""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from collapipe.errors import ConfigError, is_printable

_LEAST_S, _MOST_S = 1e-15, 1e4  # of an action
_MOST_NAME = 64  # characters
_MOST_DEVICES, _MOST_CORES, _MOST_MICRO_BATCHES, _MOST_ROWS = 128, 4096, 4096, 2**31
LEAST_FACTOR = 1e-6
_LEAST_ROWS = 1 / _MOST_MICRO_BATCHES
MOST_MEASURED = 4  # plans of a law
MOST_SLOWNESS = 1e6
FORWARD_SHARE = 1 / 3  # of a block's time, before it was measured: backward has twice the FLOPs


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """A device's part of the law.

    ``forward_share`` is the fraction of a block's time that forward takes. ``send_s`` are the
    seconds from the end of an action until its output is at the next stage. ``host`` is the label
    of the device's machine, the same for devices of one machine. A block takes ``slowness`` times
    the described seconds, and ``launch_s`` more for each micro-batch, which is known after rounds
    with different numbers of rows; ``rows`` is the last round's number, 0 if unknown.
    """

    forward_share: float
    send_s: float
    host: str
    slowness: float = 1.0
    launch_s: float = 0.0
    rows: float = 0.0


@dataclass(frozen=True, slots=True)
class HeldStage:
    """The devices that hold the same ``blocks`` blocks, with the rows of a micro-batch that each
    computes; a device alone has no ``rows`` here, because it computes all."""

    devices: tuple[str, ...]
    blocks: int
    rows: tuple[int, ...] = ()

    def rows_of(self, size: float) -> Iterator[tuple[str, float]]:
        """Yield each device and its rows of a micro-batch of ``size`` samples."""
        return zip(self.devices, self.rows or (size,), strict=True)

    def __str__(self) -> str:
        shares = ", ".join(f"{n} {name}" for n, name in zip(self.rows, self.devices, strict=False))
        return f"{self.blocks} {f'({shares})' if shares else self.devices[0]}"


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan that was measured, and the seconds of its steps. ``weight`` is 1 after its round and
    decreases with each later round."""

    stages: tuple[HeldStage, ...]
    num_micro_batches: int
    step_s: float
    schedule: str
    weight: float = 1.0

    @property
    def plan(self) -> tuple[tuple[HeldStage, ...], int, str]:
        """Its stages, micro-batches and schedule."""
        return self.stages, self.num_micro_batches, self.schedule


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """The part of each of the control unit's times in a ``StepLaw`` that a micro-batch of any size
    takes, in seconds; 0 before different numbers of micro-batches were measured."""

    embedding_forward_s: float = 0.0
    embedding_backward_s: float = 0.0
    submit_s: float = 0.0
    send_s: float = 0.0
    head_s: float = 0.0
    head_pace_s: float = 0.0


OWN_TIMES = tuple(each.name for each in fields(LaunchTimes))
"""The times of the control unit that depend on the number of micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLaw:
    """Measured seconds of a step on a cluster's real devices, at its micro-batch size.

    The devices' profiles have the time of a block. The control unit's thread computes the
    embedding (``embedding_forward_s``, ``embedding_backward_s`` for a micro-batch), submits
    activations to the head (``submit_s``), and sends tensors (``send_s`` until they arrive). The
    head answers after ``head_s``; if it has a queue, answers follow each other in ``head_pace_s``,
    which is 0 if it never had one. ``embedding_backward_s`` is 0 if no gradient returns to it.
    ``overhead_s`` is the rest of a step: its start, and the norms at its end. Adding the
    gradients of shared stages takes ``sync_slowness`` times the described seconds; None before it
    was measured.
    """

    num_micro_batches: int  # m of the measured steps
    stages: tuple[HeldStage, ...]  # the plan at the end of the last round, in pipeline order
    present: tuple[str, ...]  # names of the devices that could hold blocks then
    devices: Mapping[str, DeviceTimes]  # all that were measured, in this run or before it
    host: str  # label of the control unit's machine
    cores: Mapping[str, int]  # number of cores of each machine by its label
    embedding_forward_s: float
    embedding_backward_s: float
    submit_s: float
    send_s: float
    head_s: float
    head_pace_s: float
    overhead_s: float
    factor: float = 1.0  # measured to simulated time of a step, a mean over the last rounds
    spread: float = 0.1  # standard deviation of the logarithm of measured to planned time
    spread_of_new: float = 0.1  # the same for plans that had not been measured before
    sync_slowness: float | None = None
    launch: LaunchTimes = LaunchTimes()  # at most the times themselves
    # The last plans, the latest first. A processor with a quota follows no simple law: a plan's
    # own time predicts it better than the times of other plans.
    measured: tuple[MeasuredPlan, ...] = ()

    @property
    def blocks(self) -> dict[str, int]:
        """Blocks of each device at the end of the last round."""
        return {name: each.blocks for each in self.stages for name in each.devices}

    @property
    def usual_slowness(self) -> float:
        """The geometric mean of the slowness of the last round's devices, 1 without one. Others are
        expected to have it, because the same inventory describes them."""
        known = (self.devices[name].slowness for name in self.blocks if name in self.devices)
        logarithms = list(map(math.log, known))
        mean = math.exp(sum(logarithms) / max(1, len(logarithms)))
        return min(max(mean, 1 / MOST_SLOWNESS), MOST_SLOWNESS)  # which rounding may exceed

    def expected_s(self, stages: Sequence[HeldStage], simulated_s: float, schedule: str) -> float:
        """Return the seconds of a step with the law's m: the simulated ones, but those of a plan
        before the last one are the weighted geometric mean with its measured ones."""
        for each in self.measured[1:]:
            if simulated_s and each.plan == (tuple(stages), self.num_micro_batches, schedule):
                return simulated_s * math.pow(each.step_s / simulated_s, each.weight)
        return simulated_s

    def with_micro_batches(self, m: int) -> "StepLaw":
        """Return the law for m micro-batches: the control unit's times beyond ``launch`` follow
        their size."""

        def of_size(name: str) -> float:
            launch_s: float = getattr(self.launch, name)
            sized_s = (getattr(self, name) - launch_s) * self.num_micro_batches / m
            found = min(launch_s + sized_s, _MOST_S)
            return found if found >= _LEAST_S else 0.0

        own: dict[str, Any] = {name: of_size(name) for name in OWN_TIMES}
        return replace(self, num_micro_batches=m, **own)

    def __post_init__(self) -> None:
        own: list[float] = [getattr(self, name) for name in OWN_TIMES]
        launch: list[float] = [getattr(self.launch, name) for name in OWN_TIMES]
        parts = (s for each in self.devices.values() for s in (each.send_s, each.launch_s))
        for time_s in (*own, *launch, self.overhead_s, *parts):
            self._check("seconds", time_s == 0 or _LEAST_S <= time_s <= _MOST_S)
        self._check("launch", all(map(operator.le, launch, own)))
        self._check("factor", LEAST_FACTOR <= self.factor <= 1 / LEAST_FACTOR)
        self._check("spread", all(0 <= s <= 10 for s in (self.spread, self.spread_of_new)))
        self._check("num_micro_batches", 1 <= self.num_micro_batches <= _MOST_MICRO_BATCHES)
        self._check("devices", max(map(len, (self.devices, self.present))) <= _MOST_DEVICES)
        self._check("measured", len(self.measured) <= MOST_MEASURED)
        self._check_stages(self.stages)
        for plan in self.measured:
            self._check_stages(plan.stages)
            self._check("seconds", _LEAST_S <= plan.step_s <= 1 / _LEAST_S)
            self._check("weight", 0 <= plan.weight <= 1)
            self._check_names((plan.schedule,))
            self._check("num_micro_batches", 1 <= plan.num_micro_batches <= _MOST_MICRO_BATCHES)
        self._check("cores", self.host in self.cores and len(self.cores) <= _MOST_DEVICES + 1)
        self._check("cores", all(1 <= each <= _MOST_CORES for each in self.cores.values()))
        self._check_names((*self.devices, *self.present, *self.cores))
        for each in self.devices.values():
            self._check("forward_share", 0 <= each.forward_share <= 1)
            self._check("host", each.host in self.cores)
            self._check("slowness", 1 / MOST_SLOWNESS <= each.slowness <= MOST_SLOWNESS)
            self._check("rows", each.rows == 0 or _LEAST_ROWS <= each.rows < _MOST_ROWS)
        sync = 1.0 if self.sync_slowness is None else self.sync_slowness
        self._check("sync_slowness", 1 / MOST_SLOWNESS <= sync <= MOST_SLOWNESS)

    def _check_stages(self, stages: Sequence[HeldStage]) -> None:
        held = [name for each in stages for name in each.devices]
        self._check("devices", len({*held}) == len(held) <= _MOST_DEVICES)
        self._check_names(held)
        for stage in stages:
            self._check("blocks", 1 <= stage.blocks <= _MOST_MICRO_BATCHES)
            alone, shares = not stage.rows and len(stage.devices) == 1, len(stage.rows) > 1
            self._check("stages", alone or (shares and len(stage.rows) == len(stage.devices)))
            self._check("rows", all(1 <= each < _MOST_ROWS for each in stage.rows))

    def _check_names(self, names: Sequence[str]) -> None:
        self._check("names", all(len(n) <= _MOST_NAME and is_printable(n) for n in names))

    def _check(self, name: str, fits: bool) -> None:
        if not fits:
            raise ConfigError(f"step law: impossible {name}")


def interval(planned_s: float, spread: float) -> tuple[float, float]:
    """Return the bounds of a planned time, two deviations of its logarithm away."""
    return planned_s * math.exp(-2 * spread), planned_s * math.exp(2 * spread)
