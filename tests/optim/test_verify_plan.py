"""What a strategy plans, held against what the units have."""

from dataclasses import replace

import numpy as np
import pytest

from collapipe.errors import PlanViolationError
from collapipe.plan import ClusterPlan, RoundPlan, SegmentPlan, Span, UplinkPlan
from collapipe.state import AffineLaw, Channel, ClusterState, DeviceProfile, EnergyBudget
from optim.baselines import EvenSplit
from optim.planner import RoundRequest
from optim.verify import verify_plan

LAW = AffineLaw(1.0, 0.0, 0.0, 0.0)
DEVICES = (
    DeviceProfile("a", LAW, 2),
    DeviceProfile("b", LAW, None, EnergyBudget(16.0, LAW)),
    DeviceProfile("c", LAW),
)
REQUEST = RoundRequest(
    round=1,
    clusters=tuple(ClusterState(unit, DEVICES, 10) for unit in (3, 5)),
    num_blocks=6,
    batch_size=8,
    local_steps=1,
    num_segments=None,
    num_micro_batches=4,
    schedule="gpipe",
    channels=(Channel(1.0, 1.0, 1.0), Channel(1.0, 1.0, 1.0)),
    queues=(0.0, 0.0),
    losses=(None, None),
)


def plan(*held: tuple[str, int], unit: int = 3, m: int = 4, channel: int = 0) -> ClusterPlan:
    segments, first = [], 0
    for device, blocks in held:
        segments.append(SegmentPlan(device, Span(first, blocks)))
        first += blocks
    return ClusterPlan(unit, tuple(segments), m, "gpipe", uplink=UplinkPlan(channel, 0.1, 1.0))


SOUND = plan(("a", 2), ("b", 2), ("c", 2))


def test_a_sound_plan_passes() -> None:
    other = plan(("c", 4), ("a", 2), unit=5, channel=1)
    verify_plan(RoundPlan(1, (SOUND, other)), REQUEST)
    verify_plan(EvenSplit().plan_round(REQUEST, np.random.default_rng(0)), REQUEST)


@pytest.mark.parametrize(
    ("clusters", "message"),
    [
        ((plan(("a", 3), ("c", 3)),), "unit 3: C7: a holds 3 blocks, its memory 2"),
        ((plan(("b", 3), ("c", 3)),), "unit 3: C9': b spends 24 J a batch on 3 blocks"),
        ((plan(("a", 2), ("c", 3)),), "unit 3: C1: .* sum up to 5, not L=6"),
        ((plan(("c", 6), m=9),), "unit 3: C1: .*m=9, must be 1 to 8"),
        ((plan(("c", 3), ("d", 3)),), "unit 3: C2: segments on d; the devices are a, b, c"),
        ((plan(("c", 3), ("c", 3)),), "unit 3: C2: segments on c"),
        ((replace(SOUND, unit=4),), "C3: unit 4 takes part, known are"),
        ((SOUND, replace(SOUND, uplink=None)), "C5: units"),
        ((SOUND, plan(("c", 6), unit=5)), "C5: channels"),
    ],
)
def test_every_violation_is_named(clusters: tuple[ClusterPlan, ...], message: str) -> None:
    with pytest.raises(PlanViolationError, match=message):
        verify_plan(RoundPlan(1, clusters), REQUEST)
