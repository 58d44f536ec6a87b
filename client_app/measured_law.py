"""Fit the law of a step to a round's measurements on real devices."""

import math
from collections.abc import Mapping
from dataclasses import replace

from collapipe.formatting import seconds
from collapipe.plan import ClusterPlan, SegmentPlan
from collapipe.process.host import Host
from collapipe.step_law import MOST_SLOWNESS, DeviceTimes, StepLaw, interval
from optim.step import StageWork, alone, step_s, works_of
from pipeline.devices.control_unit.action_times import StepTimes

_RENEWED = 0.5  # weight of a round's measurements
_REMEMBERED = 0.9  # factor of a slowness's logarithm for each round without a measurement
_AS_DESCRIBED = math.log(1.05)  # largest logarithm of a slowness that is then forgotten
_LEAST_SPREAD, _MOST_SPREAD = 0.02, 1.0


def measured_law(
    plan: ClusterPlan,
    times: StepTimes,
    hosts: Mapping[str | None, Host],
    described_s: Mapping[str, float],
) -> StepLaw:
    """Return the law that explains a round's ``times``.

    ``hosts`` are the machines of the plan's devices, and of the control unit by None.
    ``described_s`` has the described seconds of a block in a micro-batch for all devices that can
    hold blocks.

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
        present=tuple(described_s),
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
        segment.device: _device(segment, work, described_s[segment.device])
        for segment, work in zip(plan.segments, works, strict=True)
    }
    return replace(law, devices=devices, factor=times.step_s / step_s(law, works, plan.schedule))


def updated(before: StepLaw, now: StepLaw, planned_s: float, step_s: float) -> StepLaw:
    """Return the law after a round that measured ``now``: the mean of both, so that a busy round
    fades. ``planned_s`` are the seconds of a step that ``before`` predicted for the measured
    ``step_s``."""
    devices = _devices(before, now)
    hosts = {now.host, *(each.host for each in devices.values())}
    cores = {k: n for k, n in {**before.cores, **now.cores}.items() if k in hosts}
    if before.num_micro_batches != now.num_micro_batches:
        return replace(now, devices={**devices, **now.devices}, cores=cores)
    error = math.log(step_s / planned_s) if min(step_s, planned_s) > 0 else 0.0
    spread = math.sqrt(_mean(before.spread**2, error**2))
    return replace(
        now,
        devices=devices,
        cores=cores,
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


def without_devices(
    law: StepLaw, block_s: Mapping[str, float], blocks: Mapping[str, int], schedule: str
) -> str | None:
    """Return a message if these ``blocks`` are all on the control unit's machine, and a step in its
    process alone is planned to be faster by more than the prediction's error: the same work in
    one thread, without hops."""
    works = works_of(law, [*blocks], [block_s[name] for name in blocks], [*blocks.values()])
    if any(each.host != law.host for each in works):
        return None
    forward_s = law.embedding_forward_s + sum(each.forward_s for each in works) + law.submit_s
    backward_s = sum(each.backward_s for each in works) + law.embedding_backward_s
    rest = replace(law, embedding_forward_s=0.0, embedding_backward_s=0.0, submit_s=0.0, send_s=0.0)
    alone_s = step_s(rest, [StageWork(forward_s, backward_s, 0.0, law.host)], schedule)
    planned_s = step_s(law, works, schedule)
    if alone_s >= interval(planned_s, law.spread)[0]:
        return None
    return (
        f"devices share the control unit's machine: without cluster=devices a step would take "
        f"about {seconds(alone_s)} instead of {seconds(planned_s)}"
    )


def _devices(before: StepLaw, now: StepLaw) -> dict[str, DeviceTimes]:
    """Return the devices of both laws.

    A device without blocks is not measured, so one busy round could exclude it from all later
    plans. Therefore its slowness decays to 1, by a tenth of its logarithm per round.
    """
    found = {}
    for name, old in before.devices.items():
        logarithm = _REMEMBERED * math.log(old.slowness)
        kept = math.exp(logarithm) if abs(logarithm) > _AS_DESCRIBED else 1.0
        found[name] = replace(old, slowness=kept)
    for name, each in now.devices.items():
        old = before.devices.get(name, each)
        share = _mean(old.forward_share, each.forward_share)
        slowness = math.exp(_mean(math.log(old.slowness), math.log(each.slowness)))
        found[name] = DeviceTimes(share, _mean(old.send_s, each.send_s), each.host, slowness)
    return found


def _mean(before: float, now: float) -> float:
    return (1 - _RENEWED) * before + _RENEWED * now


def _device(segment: SegmentPlan, work: StageWork, described_s: float) -> DeviceTimes:
    """Return a device's part of the law; ``described_s`` are its described seconds of a block."""
    taken_s = work.forward_s + work.backward_s
    ratio = taken_s / (segment.span.blocks * described_s) if described_s else 1.0
    slowness = min(max(ratio, 1 / MOST_SLOWNESS), MOST_SLOWNESS)
    assert work.host is not None  # a measured device is on a machine
    return DeviceTimes(work.forward_s / (taken_s or 1.0), work.send_s, work.host, slowness)
