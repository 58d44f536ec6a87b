"""Runs whose plans share a stage between several simulated devices."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from federated import run, weights
from run_files import rounds_of

from collapipe.state import AffineLaw, SharingLaw
from optim.cost import round_cost
from optim.dssra import Dssra
from optim.planner import RoundRequest
from optim.verify import verify_plan
from tests.optim.drawn_requests import drawn_request

INVENTORY = """
batch_size: 16
model:
  {num_blocks: 4, forward_flops: 1.0e8, backward_flops: 2.0e8,
   activation_bits: 1.0e5, gradient_bits: 1.0e5}
clusters:
  - name: workshop
    devices:
      - {name: x, flops_per_s: 1.0e9, d2d_rate_bps: 1.0e9}
      - {name: y, flops_per_s: 2.0e9, d2d_rate_bps: 1.0e9}
      - {name: z, flops_per_s: 0.7e9, d2d_rate_bps: 1.0e9}
"""
SHARED = (
    "cluster=file",
    "adapter=lora",
    "federation.num_units=1",
    "federation.rounds=2",
    "federation.local_steps=1",
)


def test_a_run_trains_its_shared_stages(tmp_path: Path) -> None:
    """Every round has a stage on several devices, and equal seeds give equal weights."""
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    file = f"cluster.file={tmp_path / 'inventory.yaml'}"
    runs = [run(tmp_path / name, *SHARED, file) for name in ("one", "two")]
    for line in rounds_of(tmp_path / "one"):
        (cluster,) = line["plan"]["clusters"]
        assert any(len(segment["shares"]) > 1 for segment in cluster["segments"])
    first, second = runs[0], weights(tmp_path / "two")
    assert all(first[name].equal(second[name]) for name in first)


def _adapters(request: RoundRequest) -> RoundRequest:
    """The request with small trainable weights and fast links, so that shared stages are faster."""
    clusters = []
    for state in request.clusters:
        devices = []
        for device in state.devices:
            time = AffineLaw(device.time.u, 0.0, 1e-5, 0.0)
            devices.append(replace(device, time=time, sharing=SharingLaw(1e-4)))
        clusters.append(replace(state, devices=tuple(devices)))
    return replace(request, clusters=tuple(clusters))


@pytest.mark.parametrize("seed", range(4))
def test_a_shared_round_is_verified_and_costs_what_was_planned(seed: int) -> None:
    """The round is never slower than without sharing, up to the objective's drift."""
    request, shared = _adapters(drawn_request("edge", seed)), 0
    plans = {}
    for sharing in ("never", "auto"):
        strategy = Dssra(sharing=sharing, drift_weight=1e3)
        plan = plans[sharing] = strategy.plan_round(request, np.random.default_rng(0))
        verify_plan(plan, request)
        cost = round_cost(plan, request, "overlap", "none", "streamed")
        for cluster, own in zip(plan.clusters, cost.clusters, strict=True):
            assert own.pipeline_s == pytest.approx(cluster.latency_s)
            shared += any(segment.shares for segment in cluster.segments)
    assert shared
    objectives = [plans[name].certificate.objective for name in ("auto", "never")]
    assert objectives[0] <= objectives[1] * (1 + 1e-9)
    assert not any(each.shares for own in plans["never"].clusters for each in own.segments)


@pytest.mark.parametrize(
    ("options", "bound"),
    [({"solver": "paper"}, None), ({"segment_price": "paper"}, None), ({}, 3)],
    ids=["solver", "price", "bound"],
)
def test_a_bound_or_price_of_segments_excludes_sharing(
    options: dict[str, str], bound: int | None
) -> None:
    request = replace(_adapters(drawn_request("edge", 0)), num_segments=bound)
    plan = Dssra(**options).plan_round(request, np.random.default_rng(0))  # type: ignore[arg-type]
    verify_plan(plan, request)
    assert not any(each.shares for own in plan.clusters for each in own.segments)
