"""Collect the devices' measurements of a round's steps, which use the devices' clocks."""

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
    """The offset from a device's clock to the control unit's clock, and its largest error."""

    offset_s: float
    error_s: float


class Measurements:
    """Each device's times and resource usage since it received its blocks.

    A step's table is float64 [actions, 4], in seconds: when each action requested its input, began,
    ended, and had sent its output. ``usage`` is float64 [2]: bytes sent to neighbours since the
    segment was loaded, and the process's peak memory in bytes.
    """

    def __init__(self) -> None:
        self._tables: dict[str, list[Tensor]] = {}
        self._usage: dict[str, tuple[float, float]] = {}
        self._began_s = time.monotonic()

    def clear(self) -> None:
        """Remove all measurements, because another plan begins."""
        self._tables.clear()
        self._usage.clear()

    def add(self, device: str, num_actions: int, table: Tensor, usage: Tensor) -> None:
        """Add the measurements of a step. Raises ``WireError`` if they are impossible."""
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
        """Summarise the measurements of the plan's devices, in their order."""
        actions = len(schedule.build(plan.schedule, 1, 1)[0])  # per micro-batch
        return [
            self._report(segment, actions, self._tables[segment.device])
            for segment in plan.segments
            if segment.device in self._tables
        ]

    def traces(self, plan: ClusterPlan, clocks: Mapping[str, Clock]) -> list[DeviceTrace]:
        """Return the times of the devices' actions by the control unit's clock."""
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
