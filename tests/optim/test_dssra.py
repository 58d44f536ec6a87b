"""DSSRA as a strategy: from the clusters' states to a feasible round."""

from dataclasses import replace

import numpy as np
import pytest
from made_request import request_for

from collapipe.errors import ConfigError, InfeasibleRoundError
from collapipe.plan import RoundPlan
from collapipe.state import AffineLaw, Channel, ClusterState, DeviceProfile, Estimates, Uplink
from optim.dssra import Dssra
from optim.planner import RoundRequest

BLOCKS = 6
SOLVERS = pytest.mark.parametrize("solver", ["exact", "paper"])


def cluster(unit: int, rng: np.random.Generator) -> ClusterState:
    """Return a unit with three uneven devices and gains of two channels."""
    devices = tuple(
        DeviceProfile(f"device-{k}", AffineLaw(rng.uniform(0.01, 0.1), 0.01, 0.002, 0.02), 4)
        for k in range(3)
    )
    gains = tuple(rng.uniform(0.5, 1.5, size=2))
    return ClusterState(unit, devices, 50, Uplink(0.5, 10.0, 1e6, 2e6, gains))


def request_of(num_units: int = 4) -> RoundRequest:
    """Return a request of N units and two channels."""
    rng = np.random.default_rng(0)
    clusters = [cluster(10 * n, rng) for n in range(num_units)]
    channels = Channel(5e5, 0.07, 4e-21), Channel(4e5, 0.06, 4e-21)
    return request_for(clusters, BLOCKS, 8, 8, local_steps=3, channels=channels)


def plan(request: RoundRequest, strategy: Dssra | None = None) -> RoundPlan:
    return (strategy or Dssra()).plan_round(request, np.random.default_rng(0))


@SOLVERS
def test_a_round_has_one_unit_per_channel_and_each_holds_all_blocks(solver: str) -> None:
    planned = plan(request_of(), Dssra(solver=solver))
    assert len(planned.clusters) == 2
    assert {one.uplink.channel for one in planned.clusters} == {0, 1}
    for one in planned.clusters:
        assert one.unit in {0, 10, 20, 30}
        assert one.segments[-1].span.stop == BLOCKS
        assert max(segment.span.blocks for segment in one.segments) <= 4
        assert 1 <= one.num_micro_batches <= 8
        assert 0 < one.uplink.power_w <= 0.5
    assert planned.certificate.solver == solver
    assert planned == plan(request_of(), Dssra(solver=solver))


def test_the_papers_solver_is_not_better_than_the_exact_one() -> None:
    exact, paper = (plan(request_of(), Dssra(solver=solver)) for solver in ("exact", "paper"))
    assert exact.certificate.gap <= 1e-9
    assert paper.certificate.objective >= exact.certificate.objective * (1 - 1e-9)


def test_queues_follow_eq_29_and_give_every_unit_a_turn() -> None:
    request, seen = request_of(), []
    for round_ in range(1, 13):
        planned = plan(replace(request, round=round_))
        assert len(planned.gammas) == len(planned.queues) == 4
        for before, gamma, after in zip(
            request.queues, planned.gammas, planned.queues, strict=True
        ):
            assert after == pytest.approx(max(before + gamma - 0.84, 0.0))
        request = replace(request, queues=planned.queues)
        seen += [one.unit for one in planned.clusters]
    assert set(seen) == {0, 10, 20, 30}
    assert max(seen.count(unit) for unit in set(seen)) <= 8


def test_all_times_but_the_models_upload_scale_with_local_steps() -> None:
    """The model has 1e6 bits. The activations have 2e6 bits a step, sent while the pipeline
    runs."""
    hurried = Dssra(drift_weight=1e3)
    once, thrice = (plan(of_steps(steps), hurried).clusters[0] for steps in (1, 3))
    model_s = once.uplink.upload_s / 3
    assert thrice.uplink.upload_s == pytest.approx(7 * model_s)
    assert thrice.uplink.power_w == once.uplink.power_w
    assert thrice.latency_s == pytest.approx(3 * once.latency_s)
    assert thrice.uplink.finish_s - model_s == pytest.approx(3 * (once.uplink.finish_s - model_s))
    after = [plan(of_steps(3), replace(hurried, uplink=each)) for each in ("after", "streamed")]
    waits, streams = (each.clusters[0] for each in after)
    assert waits.uplink.finish_s == pytest.approx(waits.latency_s + waits.uplink.upload_s)
    assert streams.uplink.finish_s < waits.uplink.finish_s


def of_steps(steps: int) -> RoundRequest:
    """Return a request of one unit with ``steps`` local steps."""
    (state,) = request_of(1).clusters
    uplink = replace(state.uplink, activation_bits=steps * 2e6)
    return replace(request_of(1), local_steps=steps, clusters=(replace(state, uplink=uplink),))


def test_segments_and_micro_batches_have_an_upper_limit() -> None:
    hurried = Dssra(drift_weight=1e3)
    quick = replace(request_of(1), clusters=(without_hops(request_of(1).clusters[0]),))
    free = plan(quick, hurried).clusters[0]
    assert len(free.segments) == 3
    assert free.num_micro_batches > 2
    limited = plan(replace(quick, num_segments=2, num_micro_batches=2), hurried).clusters[0]
    assert len(limited.segments) == 2
    assert limited.num_micro_batches <= 2
    with pytest.raises(
        InfeasibleRoundError, match=r"fewer than 2 segments, pipeline\.num_segments=1"
    ):
        plan(replace(request_of(1), num_segments=1))


def without_hops(state: ClusterState) -> ClusterState:
    """Return the cluster with equal devices and free hops, in which every further device helps."""
    devices = tuple(
        replace(device, time=AffineLaw(0.05, 0.0, 0.0, 0.0)) for device in state.devices
    )
    return replace(state, devices=devices)


def small(state: ClusterState) -> ClusterState:
    """Return the cluster with memory for only two of the six blocks."""
    devices = tuple(replace(device, max_blocks=k) for k, device in enumerate(state.devices[:2]))
    return replace(state, devices=(*devices, replace(state.devices[2], max_blocks=1)))


def test_a_cluster_that_cannot_hold_the_model_takes_no_part() -> None:
    request = request_of(3)
    first, *rest = request.clusters
    planned = plan(replace(request, clusters=(small(first), *rest)))
    assert [one.unit for one in planned.clusters] == [10, 20]
    message = r"^unit 0: .*; 2 more units cannot either$"
    with pytest.raises(InfeasibleRoundError, match=message) as caught:
        plan(replace(request, clusters=tuple(small(state) for state in request.clusters)))
    assert "\n" not in str(caught.value)


def test_a_unit_without_an_uplink_takes_no_part() -> None:
    request = request_of(3)
    silent = [replace(each, uplink=None) for each in request.clusters]
    planned = plan(replace(request, clusters=(*silent[:2], request.clusters[2])))
    assert [one.unit for one in planned.clusters] == [20]
    with pytest.raises(InfeasibleRoundError, match=r"no uplink to a channel \(channels: 2\)"):
        plan(replace(request, clusters=tuple(silent)))
    with pytest.raises(InfeasibleRoundError, match=r"no uplink to a channel \(channels: 0\)"):
        plan(replace(request, channels=()))


def test_an_uplink_without_a_gain_for_each_channel_is_refused() -> None:
    """Else its unit would never train."""
    request = request_of(3)
    first, *others = request.clusters
    for gains in (), (1.0,), (1.0, 1.0, 1.0):
        other = replace(first, uplink=replace(first.uplink, gains=gains))
        with pytest.raises(
            ConfigError, match=f"^unit 0: {len(gains)} gains, expected 2, one for each"
        ):
            replace(request, clusters=(other, *others))


def test_estimated_constants_give_kappa_by_its_definition() -> None:
    """κ = βη²/(2N) = 3·0.1²/(2·4), which the Γ of idle units shows."""
    request = replace(request_of(), learning_rate=0.1, estimates=Estimates(0.2, 3.0))
    planned = plan(request, Dssra(constants="estimated"))
    idle = 0.00375 * (0.08 / 0.065 + 0.2)
    busy = {one.unit // 10 for one in planned.clusters}
    assert [planned.gammas[n] for n in range(4) if n not in busy] == [pytest.approx(idle)] * 2


def test_idle_queues_are_longer_than_queues_only_for_scheduled_units() -> None:
    planned = plan(request_of())
    scheduled = {one.unit // 10 for one in planned.clusters}
    for unit, (queue, idle) in enumerate(zip(planned.queues, planned.idle_queues, strict=True)):
        assert (queue < idle) == (unit in scheduled)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "best"}, r"strategy\.solver=best: must be one of exact, paper"),
        ({"latency": "none"}, r"strategy\.latency=none"),
        ({"drift": "up"}, r"^strategy\.drift=up: must be one of gamma, paper"),
        ({"fading": "snow"}, "fading=snow"),
        ({"drift_weight": -1.0}, "drift_weight=-1.0"),
        ({"gamma_max": float("nan")}, "gamma_max=nan"),
        ({"gamma_max": None}, r"gamma_max=None: must be a number from 0 to 1e\+18$"),
        ({"drift_weight": "1"}, r"drift_weight='1': must be a number from 0 to 1e\+18$"),
        ({"kappa": 1e19}, r"^strategy\.kappa=1e\+19: must be a number from 0 to 1e\+18$"),
        ({"hard_gamma": "no"}, "hard_gamma='no': must be true or false$"),
        ({"drift": "paper", "drift_weight": 0.0}, r"^strategy\.drift_weight=0: drift paper needs"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dssra(**options)
