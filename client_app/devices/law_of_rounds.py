"""The law of a step after several rounds on real devices: busy rounds fade."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from client_app.devices.measured_law import (
    OTHER_SIZE,
    have_other_rows,
    known_profile,
    measured_law,
    not_tiny,
)
from collapipe.plan import ClusterPlan
from collapipe.process.host import Host
from collapipe.state import DeviceProfile
from collapipe.step_law import (
    LEAST_FACTOR,
    MOST_MEASURED,
    OWN_TIMES,
    DeviceTimes,
    LaunchTimes,
    MeasuredPlan,
    StepLaw,
)
from optim.step import step_s, works_of
from pipeline.devices.control_unit.step_times import StepTimes

_RENEWED = 0.5  # weight of a round's measurements
_REMEMBERED = 0.9  # factor of a slowness's logarithm for each round without a measurement
_REMEMBERED_PLAN = 0.8  # factor of the weight of an earlier plan's time for each later round
_KEPT_DOUBT = 0.95  # factor of the spread of new plans for each round without one
_AS_USUAL = math.log(1.05)  # largest logarithm of another slowness that is then forgotten
_LEAST_SPREAD, _MOST_SPREAD = 0.02, 1.0


def law_after(
    before: StepLaw | None,
    plan: ClusterPlan,
    times: StepTimes,
    hosts: Mapping[str | None, Host],
    described: Mapping[str, DeviceProfile],
    missing: Collection[str],
    batch_size: int,
) -> StepLaw:
    """Return the law after a round with this ``plan`` and the law ``before`` it.

    ``described`` has all devices, as the inventory describes them; those that are ``missing`` can
    hold no blocks. See ``measured_law`` for the other arguments. Raises ``ConfigError`` for
    impossible times.
    """
    modes = plan.in_modes(described)
    left = {name: each for name, each in modes.items() if name not in missing}
    measured = measured_law(plan, times, hosts, left, batch_size, before)
    if before is None:
        return measured
    known = {name: known_profile(each, before, batch_size) for name, each in described.items()}
    of_m = before.with_micro_batches(plan.num_micro_batches)
    works = works_of(of_m, measured.stages, plan.in_modes(known), batch_size)
    planned_s = step_s(of_m, works, plan.schedule)
    law = updated(before, measured, planned_s=planned_s, step_s=times.step_s)
    known = {name: known_profile(each, law, batch_size) for name, each in left.items()}
    return fitted_to_last(law, known, batch_size, plan.schedule)


def launch_times(before: StepLaw, now: StepLaw, known: LaunchTimes) -> LaunchTimes:
    """Return the part of the control unit's times ``now`` that a micro-batch of any size takes.

    If the law ``before`` has another number of micro-batches, this is a of the line a + b/m through
    the times of both, else it is the ``known`` part.
    """
    m, n = before.num_micro_batches, now.num_micro_batches
    found = {}
    for name in OWN_TIMES:
        old_s, now_s, launch_s = (getattr(each, name) for each in (before, now, known))
        if max(m, n) > OTHER_SIZE * min(m, n) and old_s and now_s:
            launch_s = (n * now_s - m * old_s) / (n - m)
        found[name] = not_tiny(min(max(launch_s, 0.0), now_s))
    return LaunchTimes(**found)


def with_other_size(law: StepLaw, other: StepLaw) -> StepLaw:
    """Return the ``law`` with what rounds with another number of micro-batches have shown."""
    launch = launch_times(other, law, known=law.launch)
    return replace(law, launch=launch, measured=_measured(other, law))


def updated(before: StepLaw, now: StepLaw, planned_s: float, step_s: float) -> StepLaw:
    """Return the law after a round that measured ``now``: the mean of both, so that a busy round
    fades. ``planned_s`` are the seconds of a step that ``before`` predicted for the measured
    ``step_s``."""
    devices = _devices(before, now)
    hosts = {now.host, *(each.host for each in devices.values())}
    cores = {k: n for k, n in {**before.cores, **now.cores}.items() if k in hosts}
    error = math.log(step_s / planned_s) if min(step_s, planned_s) > 0 else 0.0
    known = {each.plan for each in now.measured} <= {each.plan for each in before.measured}
    if now.num_micro_batches == before.num_micro_batches and not now.head_pace_s:
        now = replace(now, head_pace_s=before.head_pace_s)  # it had no queue
    of_new = before.spread_of_new * _KEPT_DOUBT if known else _spread(before.spread_of_new, error)
    now = replace(
        now,
        devices=devices,
        cores=cores,
        spread=_spread(before.spread, error),
        spread_of_new=max(of_new, _LEAST_SPREAD),
        launch=launch_times(before, now, known=before.launch),
        measured=_measured(before, now),
    )
    if before.num_micro_batches != now.num_micro_batches:  # other tensors, other times
        return now
    own: dict[str, Any] = {
        name: _mean(getattr(before, name), getattr(now, name)) for name in OWN_TIMES
    }
    return replace(
        now,
        **own,
        overhead_s=_mean(before.overhead_s, now.overhead_s),
        sync_slowness=_sync_slowness(before, now),
    )


def _spread(before: float, error: float) -> float:
    """Return the mean spread after a prediction with this error of its logarithm."""
    spread = math.sqrt(_mean(before**2, error**2))
    return min(max(spread, _LEAST_SPREAD), _MOST_SPREAD)


def fitted_to_last(
    law: StepLaw, known: Mapping[str, DeviceProfile], batch_size: int, schedule: str
) -> StepLaw:
    """Return the law with the factor that gives the last plan its measured time, a mean if it was
    the plan of several rounds."""
    simulated_s = step_s(law, works_of(law, law.stages, known, batch_size), schedule) / law.factor
    ratio = law.measured[0].step_s / (simulated_s or math.inf)  # a device may report zeros
    return replace(law, factor=min(max(ratio, LEAST_FACTOR), 1 / LEAST_FACTOR))


def _measured(before: StepLaw, now: StepLaw) -> tuple[MeasuredPlan, ...]:
    """Return the plans of both laws, the latest first."""
    plans = list(now.measured)
    for each in before.measured:
        if plans and each.plan == plans[0].plan:
            plans[0] = replace(plans[0], step_s=_mean(each.step_s, plans[0].step_s))
        else:
            plans.append(replace(each, weight=_REMEMBERED_PLAN * each.weight))
    return tuple(plans[:MOST_MEASURED])


def _sync_slowness(before: StepLaw, now: StepLaw) -> float | None:
    if before.sync_slowness is None or now.sync_slowness is None:
        return now.sync_slowness
    return _mean(before.sync_slowness, now.sync_slowness)


def _devices(before: StepLaw, now: StepLaw) -> dict[str, DeviceTimes]:
    """Return the devices of both laws.

    A device without blocks is not measured, so one busy round could exclude it from all later
    plans. Therefore its slowness decays to the usual one, by a tenth of their logarithms'
    difference per round.
    """
    found, usual = {}, now.usual_slowness
    for name, old in before.devices.items():
        logarithm = _REMEMBERED * math.log(old.slowness / usual)
        kept = usual * (math.exp(logarithm) if abs(logarithm) > _AS_USUAL else 1.0)
        found[name] = replace(old, slowness=kept, launch_s=not_tiny(_REMEMBERED * old.launch_s))
    for name, each in now.devices.items():
        old = before.devices.get(name, each)
        times = replace(each, forward_share=_mean(old.forward_share, each.forward_share))
        if not have_other_rows(old, each.rows):  # else the new times have both numbers of rows
            times = replace(
                times,
                send_s=_mean(old.send_s, each.send_s),
                slowness=math.sqrt(old.slowness * each.slowness),
                launch_s=_mean(old.launch_s, each.launch_s),
            )
        found[name] = times
    return found


def _mean(before: float, now: float) -> float:
    return not_tiny((1 - _RENEWED) * before + _RENEWED * now)
