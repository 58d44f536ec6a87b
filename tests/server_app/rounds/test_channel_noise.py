"""Uplink noise: its variance follows Lemma 2, it repeats for a seed and is off by default."""

from pathlib import Path

import pytest
import torch
from federated import run
from made_request import request_for

from collapipe.plan import ClusterPlan, UplinkPlan
from collapipe.state import AffineLaw, Channel, ClusterState, DeviceProfile, Uplink
from server_app.rounds.replies import noise_variance, with_noise

CLUSTER = ClusterState(
    4,
    (DeviceProfile("a", AffineLaw(1, 0, 0, 0)),),
    10,
    Uplink(0.5, 10.0, 1e6, 1e6, (0.9, 0.5)),
)
CHANNELS = (Channel(1e6, 0.06, 0.0), Channel(1e6, 0.08, 0.0))
REQUEST = request_for([CLUSTER], 1, 1, 1, "gpipe", channels=CHANNELS)


def plan(uplink: UplinkPlan | None) -> ClusterPlan:
    return ClusterPlan(4, (), 1, "gpipe", 1.0, uplink)


def test_the_variance_follows_eq_25() -> None:
    variance = noise_variance(plan(UplinkPlan(1, 0.4, 1.0, 1.0)), REQUEST, 0.08, 3.0)
    assert variance == pytest.approx(3 * 0.08 / (0.4 * 0.5 + 0.08))
    louder = noise_variance(plan(UplinkPlan(1, 0.5, 1.0, 1.0)), REQUEST, 0.08, 3.0)
    assert louder < variance  # more power, less noise
    assert noise_variance(plan(None), REQUEST, 0.08, 3.0) == 0


def test_noise_has_the_given_variance_and_mean_zero() -> None:
    weights = {"a": torch.full((200, 500), 7.0), "count": torch.tensor([3])}
    noisy = with_noise(weights, 0.25, seed=1)
    assert noisy["count"] is weights["count"]
    assert float(noisy["a"].mean()) == pytest.approx(7.0, abs=0.01)
    assert float(noisy["a"].var()) == pytest.approx(0.25, rel=0.02)
    assert torch.equal(with_noise(weights, 0.25, seed=1)["a"], noisy["a"])
    assert not torch.equal(with_noise(weights, 0.25, seed=2)["a"], noisy["a"])


def test_a_run_with_noise_is_repeatable_and_differs_from_a_run_without_noise(
    tmp_path: Path,
) -> None:
    short = "federation.rounds=1", "federation.local_steps=1"
    world = ("cluster=paper", "channel=paper", "strategy.energy=adapters", *short)
    noise = ("federation.channel_noise=1.0e-6", *world)
    first, second = (run(tmp_path / name, *noise) for name in ("first", "second"))
    quiet = run(tmp_path / "quiet", *noise[1:])
    assert all(torch.equal(first[name], second[name]) for name in first)
    sent = [name for name in quiet if not name.startswith("head.")]
    assert not any(torch.equal(first[name], quiet[name]) for name in sent)
