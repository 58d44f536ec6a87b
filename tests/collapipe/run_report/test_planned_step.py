"""The planned times shown with a trace come from the plan that ran."""

import gzip
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_request import request_for
from pydantic import TypeAdapter

from collapipe.report import DeviceReport, DeviceTrace, RoundTraces
from collapipe.run_report.devices import _cells
from collapipe.run_report.planned_step import planned_step
from collapipe.run_report.trace import PLANNED, _events
from collapipe.runs.reading import read_run
from collapipe.state import AffineLaw, Channel, ClusterState, DeviceProfile, MemoryBudget, Uplink
from optim.dssra import Dssra
from optim.planner import RoundRequest

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


def test_the_model_is_uploaded_when_the_last_activation_has_been() -> None:
    device = DeviceProfile("a", AffineLaw(1.0, 0.0, 0.0, 0.0))
    state = ClusterState(0, (device,), 4, Uplink(0.5, 10.0, 1e6, 3e6, (1.0,)))
    request = request_for([state], 2, 4, 2, "gpipe", channels=(Channel(5e5, 0.07, 4e-21),))
    (cluster,) = Dssra().plan_round(request, np.random.default_rng(0)).clusters
    assert cluster.uplink is not None
    *_, last = planned_step(RUN, request, cluster)["uplink"]
    model_s = 0.25 * cluster.uplink.upload_s  # a million of four million bits
    assert last.end_s + model_s == pytest.approx(cluster.uplink.finish_s)


@pytest.mark.parametrize("lost", [False, True])
def test_no_plan_is_shown_for_devices_that_ran_another_one(run: Path, lost: bool) -> None:
    """After a loss one device holds the blocks of both."""
    read = read_run(run)
    line = read.rounds[-1]
    cluster = line.plan.clusters[0]
    law = AffineLaw(0.01, 0.002, 0.001, 0.003)
    devices = tuple(DeviceProfile(f"device-{n}", law) for n in range(3))
    states = [ClusterState(unit, devices, 1000) for unit in range(8)]
    request = request_for(states, 6, 64, 4, round=line.round)
    packed = TypeAdapter(RoundRequest).dump_json(request) + b"\n"
    (run / "requests.jsonl.gz").write_bytes(gzip.compress(packed))
    held = {each.device: 6 if lost else each.span.blocks for each in cluster.segments[lost:]}
    step = ((0.0, 0.1, 0.2, 0.2),) * 8
    traces = tuple(DeviceTrace(name, 0.0, (step,)) for name in held)
    reports = tuple(DeviceReport(name, n, *(1.0,) * 7) for name, n in held.items())
    line = replace(line, devices={cluster.unit: reports})
    events = _events(read, line, RoundTraces(line.round, {cluster.unit: traces}))
    assert (PLANNED in {each["tid"] for each in events if each["ph"] == "X"}) != lost
    assert all((row[2] == "–") == lost for row in _cells(read, line))
