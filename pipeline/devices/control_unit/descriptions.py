"""Describe each device's segment of a plan."""

from collections.abc import Mapping
from dataclasses import replace

from collapipe.models.split import block_name
from collapipe.plan import ClusterPlan
from pipeline import schedule
from pipeline.devices.control_unit.connection import Cluster
from pipeline.devices.control_unit.pairs import dialled_by
from pipeline.devices.messages import Peer, RoundDescription, SegmentDescription, secret_for


def describe_segment(
    device: str,
    plan: ClusterPlan,
    cluster: Cluster,
    common: RoundDescription,
    base: int | None,
    sessions: Mapping[str, str],
) -> SegmentDescription:
    """Return the description of a device's segment. Its weights are as of step ``base``, None for
    the round's start; ``sessions`` are the secrets of all devices."""
    (stage,) = (k for k, each in enumerate(plan.segments) if device in each.devices)
    segment, m = plan.segments[stage], plan.num_micro_batches
    member, parts = segment.devices.index(device), segment.parts
    around = [None, *plan.segments, None][stage : stage + 3 : 2]
    rows_before, rows_behind = (each.parts if each else (1,) for each in around)
    kept = schedule.kept(plan.schedule, len(plan.segments), m)[stage]
    recompute = common.recompute or device in segment.recomputing
    held = set(map(block_name, segment.span.indices()))
    return SegmentDescription(
        **replace(common, recompute=recompute).for_blocks(held),
        session=sessions[device],
        memory_bytes=cluster.needed_bytes(
            segment.span.blocks,
            kept,
            parts[member] / sum(parts),
            segment.extra_gradients(device),
            recompute,
        ),
        span=segment.span,
        stage=stage,
        num_segments=len(plan.segments),
        num_micro_batches=m,
        schedule=plan.schedule,
        base=-1 if base is None else base,
        shares=segment.rows,
        cuts=tuple(segment.shares_of(each).stop for each in segment.devices),
        member=member,
        rows_before=rows_before,
        rows_behind=rows_behind,
        peers=tuple(
            Peer(
                address=cluster.devices[pair.second],
                neighbour=pair.name_of_second,
                secret=secret_for(sessions[pair.second], pair.name_of_first),
            )
            for pair in dialled_by(device, plan, cluster.relay)
        ),
    )
