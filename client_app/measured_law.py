"""Fit the law of a step to a round's measurements on real devices."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from collapipe.plan import ClusterPlan
from collapipe.process.host import Host
from collapipe.step_law import DeviceTimes, StepLaw
from optim.step import StageWork, alone, step_s, works_of
from pipeline.devices.control_unit.action_times import StepTimes

_RENEWED = 0.5  # weight of a round's measurements
_LEAST_SPREAD, _MOST_SPREAD = 0.02, 1.0


def measured_law(
    plan: ClusterPlan,
    times: StepTimes,
    hosts: Mapping[str | None, Host],
    present: Collection[str],
) -> tuple[StepLaw, list[StageWork]]:
    """Return the law and the work of each segment that explain a round's ``times``.

    ``hosts`` are the machines of the plan's devices, and of the control unit by None. ``present``
    are all devices that can hold blocks.

    Waiting for cores that workers of one machine share is removed from the times of actions.
    """
    names, own = [each.device for each in plan.segments], hosts[None]
    works = [
        StageWork(forward_s, backward_s, times.send_s[name], hosts[name].name)
        for name, forward_s, backward_s in zip(
            names, times.forward_s, times.backward_s, strict=True
        )
    ]
    law = StepLaw(
        num_micro_batches=plan.num_micro_batches,
        blocks={each.device: each.span.blocks for each in plan.segments},
        present=tuple(present),
        devices={},
        host=own.name,
        cores={each.name: each.cores for each in (*map(hosts.__getitem__, names), own)},
        embedding_forward_s=times.embedding_forward_s,
        embedding_backward_s=times.embedding_backward_s,
        submit_s=times.submit_s,
        send_s=times.send_s[None],
        head_s=times.head_s,
        head_pace_s=times.head_pace_s,
        overhead_s=times.overhead_s,
    )
    law, works = alone(law, works, plan.schedule)
    devices = {
        name: DeviceTimes(_share(work), work.send_s, hosts[name].name)
        for name, work in zip(names, works, strict=True)
    }
    law = replace(law, devices=devices, factor=times.step_s / step_s(law, works, plan.schedule))
    return law, works


def updated(before: StepLaw, now: StepLaw, planned_s: float, step_s: float) -> StepLaw:
    """Return the law after a round that measured ``now``: the mean of both, so that a busy round
    fades. ``planned_s`` are the seconds of a step that ``before`` predicted for the measured
    ``step_s``."""
    if before.num_micro_batches != now.num_micro_batches:
        return now
    devices = _devices(before, now)
    hosts = {now.host, *(each.host for each in devices.values())}
    error = math.log(step_s / planned_s) if min(step_s, planned_s) > 0 else 0.0
    spread = math.sqrt(_mean(before.spread**2, error**2))
    return replace(
        now,
        devices=devices,
        cores={k: n for k, n in {**before.cores, **now.cores}.items() if k in hosts},
        spread=min(max(spread, _LEAST_SPREAD), _MOST_SPREAD),
        embedding_forward_s=_mean(before.embedding_forward_s, now.embedding_forward_s),
        embedding_backward_s=_mean(before.embedding_backward_s, now.embedding_backward_s),
        submit_s=_mean(before.submit_s, now.submit_s),
        send_s=_mean(before.send_s, now.send_s),
        head_s=_mean(before.head_s, now.head_s),
        head_pace_s=_mean(before.head_pace_s, now.head_pace_s or before.head_pace_s),
        overhead_s=_mean(before.overhead_s, now.overhead_s),
        factor=_mean(before.factor, now.factor),
    )


def planned_step_s(
    law: StepLaw, block_s: Mapping[str, float], blocks: Mapping[str, int], schedule: str
) -> float:
    """Return the planned seconds of a step with these ``blocks`` of devices in pipeline order;
    ``block_s`` are the devices' seconds of a block in a micro-batch."""
    each_s = [block_s[name] for name in blocks]
    return step_s(law, works_of(law, [*blocks], each_s, [*blocks.values()]), schedule)


def _devices(before: StepLaw, now: StepLaw) -> dict[str, DeviceTimes]:
    """Return the devices of both laws."""
    found = dict(before.devices)
    for name, each in now.devices.items():
        old = before.devices.get(name, each)
        share = _mean(old.forward_share, each.forward_share)
        found[name] = DeviceTimes(share, _mean(old.send_s, each.send_s), each.host)
    return found


def _mean(before: float, now: float) -> float:
    return (1 - _RENEWED) * before + _RENEWED * now


def _share(work: StageWork) -> float:
    return work.forward_s / ((work.forward_s + work.backward_s) or 1.0)
