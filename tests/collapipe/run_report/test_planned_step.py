"""The planned times shown with a trace come from the plan that ran."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_request import request_for

from collapipe.run_report.planned_step import planned_step
from collapipe.state import AffineLaw, Channel, ClusterState, DeviceProfile, MemoryBudget, Uplink
from optim.dssra import Dssra

RUN: Any = SimpleNamespace(called=str, option=lambda _: "overlap")


def test_devices_that_recompute_take_longer_in_the_plan() -> None:
    """The device's two blocks fit into its memory only if it recomputes."""
    memory = MemoryBudget(6.0, 0.0, 6.0, 0.0)
    device = DeviceProfile("a", AffineLaw(1.0, 0.0, 0.0, 0.0), memory=memory)
    smaller = replace(device, memory=replace(memory, block_bytes=2.0))
    device = device.or_recomputing(4 / 3, smaller)
    state = ClusterState(0, (device,), 4, Uplink(0.5, 10.0, 1.0, 1.0, (1.0,)))
    request = request_for([state], 2, 1, 1, "gpipe", channels=(Channel(5e5, 0.07, 4e-21),))
    (cluster,) = Dssra().plan_round(request, np.random.default_rng(0)).clusters
    assert cluster.segments[0].recomputing == ("a",)
    (first, *_) = planned_step(RUN, request, cluster)["a"]
    assert first.end_s - first.begin_s == pytest.approx(2 * 4 / 3)
