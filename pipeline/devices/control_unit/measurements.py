"""Collect the times that devices report of their actions, and summarise them."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from collapipe.errors import WireError
from collapipe.plan import ClusterPlan
from collapipe.report import TRACED_STEPS, DeviceReport, DeviceTrace
from pipeline import schedule
from pipeline.devices.control_unit.own_times import OwnTimes
from pipeline.devices.control_unit.step_times import StepTimes, typical_times
from pipeline.schedule import FORWARD

_KINDS = 2  # of actions: forward and backward
MOST_S = 1e9  # of a device's clock, which counts from its start: sums over a round fit a report
_MOST_BYTES = 2.0**53


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
        self._own = list[OwnTimes]()
        self._began_s = time.monotonic()

    def clear(self) -> None:
        """Remove all measurements, because another plan begins."""
        self._own.clear()
        self._tables.clear()
        self._usage.clear()

    def add(self, device: str, num_actions: int, table: Tensor, usage: Tensor) -> None:
        """Add the measurements of a step. Raises ``WireError`` if they are impossible."""
        for name, each, shape in (("times", table, (num_actions, 4)), ("usage", usage, (2,))):
            if each.dtype != torch.float64 or each.shape != shape or not each.isfinite().all():
                raise WireError(f"{name} of its actions as {each.dtype} {list(each.shape)}")
        thread, sending = table[:, :3].flatten().diff(), table[:, 3] - table[:, 2]
        grows, near = torch.cat((thread, sending)) >= 0, table.abs() <= MOST_S
        counts = (usage >= 0) & (usage <= _MOST_BYTES)
        if not (grows.all() and near.all() and counts.all()):
            raise WireError(
                f"times {float(table.min())} to {float(table.max())}, usage {usage.tolist()}"
            )
        self._tables.setdefault(device, []).append(table)
        sent, peak = usage.tolist()
        self._usage[device] = sent, peak

    def add_own(self, own: OwnTimes) -> None:
        """Add the control unit's times of a step that all devices have finished."""
        self._own.append(own)

    @property
    def last_step(self) -> list[Tensor]:
        """The tables of the last step, in the segments' order."""
        return [tables[-1] for tables in self._tables.values()]

    def reports(self, plan: ClusterPlan, clocks: Mapping[str, Clock]) -> list[DeviceReport]:
        """Summarise the measurements of the plan's devices, in their order."""
        return [
            self._report(plan, stage, name, clocks.get(name))
            for stage, segment in enumerate(plan.segments)
            for name in segment.devices
            if name in self._tables
        ]

    def traces(self, plan: ClusterPlan, clocks: Mapping[str, Clock]) -> list[DeviceTrace]:
        """Return the times of all stages' actions by the control unit's clock, in order."""
        names = [name for name in plan.devices if name in self._tables]
        if not self._own:
            return [self._trace(name, clocks[name]) for name in names]
        own = self._own[:TRACED_STEPS]
        actions = schedule.build(plan.schedule, len(plan.segments), plan.num_micro_batches)[-1]
        return [
            self._own_trace("embedding", [each.embedding_rows() for each in own]),
            *(self._trace(name, clocks[name]) for name in names),
            self._own_trace("head", [each.head_rows(actions) for each in own]),
        ]

    def _own_trace(
        self, stage: Literal["embedding", "head"], steps: Iterable[Iterable[Sequence[float]]]
    ) -> DeviceTrace:
        """Return a stage of the control unit, with rows of when it became free, began and ended."""
        began_s = self._began_s
        times = tuple(
            tuple((a - began_s, b - began_s, c - began_s, c - began_s) for a, b, c in step)
            for step in steps
        )
        return DeviceTrace("control unit", 0.0, times, stage)

    def step_times(self, plan: ClusterPlan, clocks: Mapping[str, Clock]) -> StepTimes | None:
        """Return the typical times of the plan's steps; None if no step has all its times."""
        shifted = {
            name: [(table + clocks[name].offset_s).tolist() for table in tables]
            for name, tables in self._tables.items()
        }
        return typical_times(plan, self._own, shifted)

    def _report(
        self, plan: ClusterPlan, stage: int, name: str, clock: Clock | None
    ) -> DeviceReport:
        segment, last, tables = plan.segments[stage], len(plan.segments) - 1, self._tables[name]
        requested, began, ended, sent = torch.cat(list(tables)).T
        control_unit_wait_s = send_alone_s = 0.0
        for table, own in zip_longest(tables, self._own if clock else ()):
            until = torch.cat((table[1:, 0], table[-1:, 3]))  # the next request for an input
            send_alone_s += float((torch.minimum(table[:, 3], until) - table[:, 2]).sum())
            lists = schedule.build(plan.schedule, last + 1, len(table) // _KINDS)
            edge = torch.tensor([stage == (0 if a.kind == FORWARD else last) for a in lists[stage]])
            waits_s = edge * table.diff()[:, 0]
            if own and clock:
                busy_s = own.busy_s(lists[-1], table[:, :2] + clock.offset_s)
                waits_s += ~edge * busy_s.diff()[:, 0].clamp(min=0.0)
            control_unit_wait_s += float(waits_s.sum())
        sent_bytes, peak_bytes = self._usage[name]
        return DeviceReport(
            name,
            segment.span.blocks,
            chunk_s=median(
                float((each[:, 2] - each[:, 1]).sum()) * _KINDS / len(each) for each in tables
            ),
            compute_s=float((ended - began).sum()),
            wait_s=float((began - requested).sum()),
            send_s=float((sent - ended).sum()),
            span_s=sum(float(table[:, 3].max() - table[0, 0]) for table in tables),
            sent_bytes=sent_bytes,
            peak_bytes=peak_bytes,
            control_unit_wait_s=control_unit_wait_s,
            send_alone_s=send_alone_s,
        )

    def _trace(self, name: str, clock: Clock) -> DeviceTrace:
        offset_s = clock.offset_s - self._began_s
        shifted = ((table + offset_s).tolist() for table in self._tables[name][:TRACED_STEPS])
        steps = tuple(tuple((a, b, c, d) for a, b, c, d in table) for table in shifted)
        return DeviceTrace(name, clock.error_s, steps)
