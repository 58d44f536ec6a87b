"""Fit the law of a step to a round's measurements on real devices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from collapipe.plan import ClusterPlan
from collapipe.process.host import Host
from collapipe.state import AffineLaw, DeviceProfile
from collapipe.step_law import MOST_SLOWNESS, DeviceTimes, HeldStage, MeasuredPlan, StepLaw
from optim.step import DeviceWork, StageWork, alone, like_hop, step_s, syncs_s, ways
from pipeline.devices.control_unit.step_times import StepTimes

_LEAST_MEAN = 1e-12  # below which a mean counts as 0
OTHER_SIZE = 1.8
"""Ratio from which two sizes of micro-batches are different: noise is less than that."""


def measured_law(
    plan: ClusterPlan,
    times: StepTimes,
    hosts: Mapping[str | None, Host],
    described: Mapping[str, DeviceProfile],
    batch_size: int,
    before: StepLaw | None = None,
) -> StepLaw:
    """Return the law that explains a round's ``times``.

    ``hosts`` are the machines of the plan's devices, and of the control unit by None. ``described``
    has all devices that can hold blocks, as the inventory describes them. ``before`` is the law of
    earlier rounds.

    Waiting for cores that workers of one machine share is removed from the times of actions.
    """
    stages, host = held_stages(plan), hosts[None]
    names = [name for each in stages for name in each.devices]
    size, known = batch_size / plan.num_micro_batches, before.devices if before else {}
    law = StepLaw(
        num_micro_batches=plan.num_micro_batches,
        stages=stages,
        present=tuple(described),
        devices={},
        host=host.name,
        cores={each.name: each.cores for each in (*map(hosts.__getitem__, names), host)},
        embedding_forward_s=times.embedding_forward_s,
        embedding_backward_s=times.embedding_backward_s,
        submit_s=times.submit_s,
        send_s=times.send_s[None],
        head_s=times.head_s,
        head_pace_s=times.head_pace_s,
        overhead_s=times.overhead_s,
        sync_slowness=before.sync_slowness if before else None,
        measured=(MeasuredPlan(stages, plan.num_micro_batches, times.step_s, plan.schedule),),
    )
    works = _works(stages, times, hosts, _sent_s(stages, times, described, known, size))
    law, works = alone(law, works, plan.schedule)
    found, to = {}, ways(stages, described)
    for stage, work in zip(stages, works, strict=True):
        for (name, rows), own in zip(stage.rows_of(size), work.devices, strict=True):
            time, send_s = described[name].time, own.send_s
            if name in times.send_s:  # as if its hops were usual ones
                ahead_s, back_s = (way.hop(rows) for way in to[name])
                mean_s = ahead_s + times.gradients.get(name, 0.0) * (back_s - ahead_s)
                send_s = like_hop(send_s, mean_s, time.hop(rows))
            found[name] = _device(
                replace(own, send_s=send_s), stage.blocks, rows, time, known.get(name)
            )
    if plan.shares:
        law, works = _with_sync(law, works, described, times.late_s, before)
    law = replace(law, devices=found)
    return replace(law, factor=times.step_s / step_s(law, works, plan.schedule))


def _sent_s(
    stages: Sequence[HeldStage],
    times: StepTimes,
    described: Mapping[str, DeviceProfile],
    known: Mapping[str, DeviceTimes],
    size: float,
) -> dict[str, float]:
    """Return the seconds of each device's hop: measured, or as in earlier rounds for its rows, or
    as the control unit's."""
    found = {}
    for name, rows in (each for stage in stages for each in stage.rows_of(size)):
        hop_s, old = described[name].time.hop, known.get(name)
        usual_s = like_hop(old.send_s, hop_s(old.rows or size), hop_s(rows)) if old else None
        found[name] = times.send_s.get(name, times.send_s[None] if usual_s is None else usual_s)
    return found


def _works(
    stages: Sequence[HeldStage],
    times: StepTimes,
    hosts: Mapping[str | None, Host],
    sent_s: Mapping[str, float],
) -> list[StageWork]:
    """Return the measured work of each stage; ``sent_s`` has the devices in the stages' order."""
    pairs = zip(sent_s.items(), times.forward_s, times.backward_s, strict=True)
    devices = (DeviceWork(a, b, send_s, hosts[name].name) for (name, send_s), a, b in pairs)
    return [
        StageWork(tuple(islice(devices, len(each.devices))), rows=each.rows or (1,))
        for each in stages
    ]


def _with_sync(
    law: StepLaw,
    works: Sequence[StageWork],
    described: Mapping[str, DeviceProfile],
    late_s: float,
    before: StepLaw | None,
) -> tuple[StepLaw, list[StageWork]]:
    """Return the law and the works with the time of adding gradients: what a step takes beyond its
    actions, and beyond the same time of plans without shared stages if they were measured."""
    each_s = [syncs_s(stage, described) for stage in law.stages]
    if not (longest_s := max(each_s)):
        return law, list(works)
    overhead_s = min(before.overhead_s, law.overhead_s) if before else 0.0
    ratio = (law.overhead_s - overhead_s + late_s) / longest_s
    slowness = min(max(ratio, 1 / MOST_SLOWNESS), MOST_SLOWNESS)
    if ratio <= 0 and law.sync_slowness is not None:  # noise
        slowness = law.sync_slowness
    law = replace(law, overhead_s=overhead_s, sync_slowness=slowness)
    pairs = zip(works, each_s, strict=True)
    return law, [replace(work, sync_s=slowness * sync_s) for work, sync_s in pairs]


def held_stages(plan: ClusterPlan) -> tuple[HeldStage, ...]:
    """Return the stages of a plan."""
    return tuple(
        HeldStage(
            each.devices, each.span.blocks, each.rows_of_devices if len(each.devices) > 1 else ()
        )
        for each in plan.segments
    )


def known_profile(described: DeviceProfile, law: StepLaw | None, batch_size: int) -> DeviceProfile:
    """Return a described device with its measured speeds. A device that was not measured is as slow
    as others usually are. Before adding gradients was measured, their bytes are as slow as those of
    the measured hops."""
    if law is None:
        return described
    times, time = law.devices.get(described.name), described.time
    sharing, links = described.sharing, described.links
    time = time.taking(law.usual_slowness if times is None else times.slowness)
    if times is not None:
        time = replace(time, v=time.v + times.launch_s)
    if sharing is not None:
        slowness = 1.0 if law.sync_slowness is None else law.sync_slowness
        if law.sync_slowness is None and times is not None:
            hop_s = time.hop(times.rows or batch_size / law.num_micro_batches)
            slowness = max(1.0, 2 * times.send_s / hop_s) if hop_s else 1.0
        sharing = replace(sharing, sync_s=slowness * sharing.sync_s)
        links = tuple(
            replace(each, sync_s=each.sync_s and slowness * each.sync_s) for each in links
        )
    return replace(described, time=time, sharing=sharing, links=links)


def have_other_rows(old: DeviceTimes, rows: float) -> bool:
    """Whether the device computed other numbers of rows in earlier rounds."""
    return old.rows > 0 and max(rows / old.rows, old.rows / rows) > OTHER_SIZE


def not_tiny(value: float) -> float:
    """Return 0 for a value that has halved in many rounds: a law refuses tiny times."""
    return value if value >= _LEAST_MEAN else 0.0


def _device(
    work: DeviceWork, blocks: int, rows: float, described: AffineLaw, old: DeviceTimes | None
) -> DeviceTimes:
    """Return a device's part of the law after it computed ``rows`` rows of each micro-batch.

    Two different numbers of rows, the other one in an earlier round, tell apart what a block takes
    for its rows and for a micro-batch.
    """
    taken_s = work.forward_s + work.backward_s
    block_s, described_s = taken_s / blocks, described.compute(1, rows)
    ratio, launch_s = block_s / described_s if described_s else 1.0, 0.0
    if old and described_s and have_other_rows(old, rows):
        old_s = old.slowness * described.compute(1, old.rows) + old.launch_s
        slope = (block_s - old_s) / (described_s - described.compute(1, old.rows) or math.inf)
        if 0 < slope < ratio:  # other slopes are noise
            ratio, launch_s = slope, block_s - slope * described_s
    elif old and (expected_s := old.slowness * described_s + old.launch_s):
        slower = block_s / expected_s  # both parts
        ratio, launch_s = slower * old.slowness, slower * old.launch_s
    assert work.host is not None  # a measured device is on a machine
    return DeviceTimes(
        forward_share=work.forward_s / (taken_s or 1.0),
        send_s=work.send_s,
        host=work.host,
        slowness=min(max(ratio, 1 / MOST_SLOWNESS), MOST_SLOWNESS),
        launch_s=not_tiny(launch_s),
        rows=rows,
    )
