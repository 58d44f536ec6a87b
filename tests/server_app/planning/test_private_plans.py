"""With noise, plans ignore values that noise does not cover: losses, gradients, rounding errors."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from federated import settings_of

from collapipe.errors import ConfigError
from collapipe.plan import RoundPlan
from collapipe.report import ClusterReport, RoundingErrors
from collapipe.state import AffineLaw, ClusterState, DeviceProfile, Estimates, Payload, Uplink
from optim.planner import RoundRequest
from server_app.planning.estimates import RoundObservation
from server_app.planning.scheduler import Scheduler, Trained

NOISY = "privacy=private", "federation.num_units=3", "compression.upload=auto"
PLAIN = (*NOISY, "privacy.noise_multiplier=0", "privacy.max_epsilon=null")


def cluster(unit: int) -> ClusterState:
    device = DeviceProfile("one", AffineLaw(0.0, 1e-3, 0.0, 0.0), max_blocks=9)
    payloads = tuple(
        Payload("float32", upload, 1e6, 0.0, gradient_error=error)
        for upload, error in (("float32", 0.0), ("int8", 1e-4))
    )
    uplink = Uplink(0.5, 10.0, 1e6, 0.0, (0.9, 0.8, 0.7), payloads=payloads)
    return ClusterState(unit, (device,), 9, uplink)


def after_a_round(
    tmp_path: Path, losses: Mapping[int, float], *overrides: str
) -> tuple[RoundRequest, RoundPlan]:
    """The request and the plan of the second round."""
    settings = settings_of(tmp_path, overrides)
    scheduler = Scheduler(settings)
    state = scheduler.begin([cluster(unit) for unit in range(3)])
    reports = {
        unit: ClusterReport(
            unit, (loss,), 6, 6, squared_norms=(loss,), rounding=RoundingErrors({}, {"int8": loss})
        )
        for unit, loss in losses.items()
    }
    trained = Trained(losses, reports, RoundObservation(1.0, 2.0, 3.0))
    state, report = scheduler.end(state, scheduler.decide(state, 1), trained, 1.0)
    second = scheduler.decide(state, 2)
    assert report.estimates == second.request.estimates
    return second.request, second.plan


def test_with_noise_the_next_plan_does_not_depend_on_the_rows(tmp_path: Path) -> None:
    low, high = {0: 0.1, 1: 0.2, 2: 0.3}, {0: 3.0, 1: 2.0, 2: 1.0}
    request, plan = after_a_round(tmp_path, low, *NOISY)
    assert request.losses == (None,) * 3
    assert request.estimates == Estimates()
    other, same = after_a_round(tmp_path, high, *NOISY)
    assert other == request
    assert replace(same, certificate=None) == replace(plan, certificate=None)


def test_without_noise_plans_use_losses_gradients_and_rounding_errors(tmp_path: Path) -> None:
    request, _ = after_a_round(tmp_path, {0: 0.1, 1: 0.2, 2: 0.3}, *PLAIN)
    assert request.losses == (0.1, 0.2, 0.3)
    assert request.estimates != Estimates()
    errors = [each.uplink.payloads[-1].gradient_error for each in request.clusters if each.uplink]
    assert len({*errors}) == 3


@pytest.mark.parametrize("option", ["strategy=loss_only", "strategy.constants=estimated"])
def test_a_strategy_that_reads_losses_is_refused_with_noise(option: str, tmp_path: Path) -> None:
    settings_of(tmp_path, [*PLAIN, option])
    with pytest.raises(ConfigError, match=r"reads .* noise") as refused:
        settings_of(tmp_path, [*NOISY, option])
    assert "strategy.constants=set" in str(refused.value)
    assert "delay_only" in str(refused.value)
