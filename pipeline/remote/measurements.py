"""What devices measured of a round's steps, by their own clocks."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from collapipe.errors import WireError
from collapipe.plan import ClusterPlan, SegmentPlan
from collapipe.report import TRACED_STEPS, DeviceReport, DeviceTrace
from pipeline import schedule

_MOST = 2.0**53  # seconds, or bytes: sums of them are finite


@dataclass(frozen=True, slots=True)
class Clock:
    """What to add to a device's clock for the control unit's, and how far that may be wrong."""

    offset_s: float
    error_s: float


class Measurements:
    """Of each device since it has had its blocks: seconds of its actions, and what it used.

    A step's table is float64 [actions, 4]: when each action asked for its input, began and ended,
    and when what it made had left. ``usage`` is
    float64 [2]: bytes sent to neighbours since the segment came, and the process's peak memory.
    """

    def __init__(self) -> None:
        self._tables: dict[str, list[Tensor]] = {}
        self._usage: dict[str, tuple[float, float]] = {}
        self._began_s = time.monotonic()

    def clear(self) -> None:
        """Another plan begins."""
        self._tables.clear()
        self._usage.clear()

    def add(self, device: str, num_actions: int, table: Tensor, usage: Tensor) -> None:
        """Take in a step. Raises ``WireError`` for what cannot be one's measurements."""
        for name, came, shape in (("times", table, (num_actions, 4)), ("usage", usage, (2,))):
            if came.dtype != torch.float64 or came.shape != shape or not came.isfinite().all():
                raise WireError(f"{name} of its actions as {came.dtype} {list(came.shape)}")
        grows, known = table.diff() >= 0, torch.cat((table.flatten(), usage))
        if not grows.all() or usage.amin() < 0 or known.abs().amax() > _MOST:
            raise WireError(f"times down to {float(table.min())}, usage {usage.tolist()}")
        self._tables.setdefault(device, []).append(table)
        sent, peak = usage.tolist()
        self._usage[device] = sent, peak

    @property
    def last_step(self) -> list[Tensor]:
        """The tables of the last step, in the segments' order."""
        return [tables[-1] for tables in self._tables.values()]

    def reports(self, plan: ClusterPlan) -> list[DeviceReport]:
        """Of the plan's devices, in their order."""
        actions = len(schedule.build(plan.schedule, 1, 1)[0])  # of a micro-batch
        return [
            self._report(segment, actions, self._tables[segment.device])
            for segment in plan.segments
            if segment.device in self._tables
        ]

    def traces(self, plan: ClusterPlan, clocks: Mapping[str, Clock]) -> list[DeviceTrace]:
        """When the plan's devices did what, by the control unit's clock."""
        names = [each.device for each in plan.segments if each.device in self._tables]
        return [self._trace(name, clocks[name]) for name in names]

    def _report(self, segment: SegmentPlan, actions: int, tables: Sequence[Tensor]) -> DeviceReport:
        asked, began, ended, sent = torch.cat(list(tables)).T
        sent_bytes, peak_bytes = self._usage[segment.device]
        return DeviceReport(
            segment.device,
            segment.span.blocks,
            chunk_s=median(
                float((each[:, 2] - each[:, 1]).sum()) * actions / len(each) for each in tables
            ),
            compute_s=float((ended - began).sum()),
            wait_s=float((began - asked).sum()),
            send_s=float((sent - ended).sum()),
            span_s=sum(float(table[:, 3].max() - table[0, 0]) for table in tables),
            sent_bytes=sent_bytes,
            peak_bytes=peak_bytes,
        )

    def _trace(self, name: str, clock: Clock) -> DeviceTrace:
        offset_s = clock.offset_s - self._began_s
        shifted = ((table + offset_s).tolist() for table in self._tables[name][:TRACED_STEPS])
        steps = tuple(tuple((a, b, c, d) for a, b, c, d in table) for table in shifted)
        return DeviceTrace(name, clock.error_s, steps)
