"""The environment depends only on its laws and the seed, and its state can be stored as JSON."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from collapipe import config
from collapipe.config.settings import CONF
from collapipe.errors import ConfigError
from collapipe.seeds import derive
from collapipe.state import (
    AffineLaw,
    ClusterState,
    DeviceProfile,
    EnergyBudget,
    MemoryBudget,
    Uplink,
)
from collapipe.validation import typed
from server_app.world.environment import (
    DeviceCondition,
    Environment,
    EnvironmentState,
    Mobility,
    UnitCondition,
    Walk,
)

LAW = AffineLaw(0.01, 0.02, 0.003, 0.004)
STATES = TypeAdapter(EnvironmentState)


def cluster(unit: int, num_devices: int = 2) -> ClusterState:
    budget = EnergyBudget(5.0, AffineLaw(0.1, 0.2, 0.3, 0.4))
    devices = (DeviceProfile(f"d{k}", LAW, 6 + k, budget) for k in range(num_devices))
    return ClusterState(unit, tuple(devices), 10, Uplink(0.5, 10.0, 1e6, 1e7, (0.9, 0.8)))


def named(name: str) -> Environment:
    """The environment of this file, with defaults from ``static.yaml``."""
    read = [OmegaConf.load(CONF / "environment" / f"{each}.yaml") for each in ("static", name)]
    values: Any = OmegaConf.to_container(OmegaConf.merge(*read))
    own = {key: value for key, value in values.items() if key not in ("_target_", "defaults")}
    return typed("environment", Environment, own)


STATIC, JITTER, MOBILE = map(named, ("static", "jitter", "mobile"))
WALKING = replace(STATIC, mobility=MOBILE.mobility)


def generator(seed: int, round_: int) -> np.random.Generator:
    return np.random.default_rng(derive(seed, "environment", round_))


def rounds(
    environment: Environment, count: int, *clusters: ClusterState, seed: int = 0
) -> Iterator[EnvironmentState]:
    """The state of each round."""
    state = environment.start(clusters, 2, generator(seed, 0))
    for round_ in range(1, count + 1):
        state = environment.step(state, generator(seed, round_))
        yield state


# The same environment for the same seed


def test_the_static_environment_changes_no_cluster() -> None:
    clusters = tuple(cluster(unit, 3) for unit in range(30))
    for state in rounds(STATIC, 4, *clusters):
        assert STATIC.conditions(state, clusters) == clusters


def test_equal_seeds_give_equal_environments_and_different_seeds_do_not() -> None:
    units = (cluster(0), cluster(1))
    first, again = (list(rounds(MOBILE, 5, *units)) for _ in range(2))
    assert first == again
    assert first != list(rounds(MOBILE, 5, *units, seed=1))
    assert first[0].units[0] != first[0].units[1]


def test_further_devices_of_a_unit_change_no_other_unit_or_device() -> None:
    few = list(rounds(MOBILE, 10, cluster(0, 2), cluster(1, 2)))
    many = list(rounds(MOBILE, 10, cluster(0, 5), cluster(1, 2)))
    for state, other in zip(few, many, strict=True):
        assert state.units[1] == other.units[1]
        assert state.units[0] == replace(other.units[0], devices=other.units[0].devices[:2])


@pytest.mark.parametrize(
    ("off", "same"),
    [
        ({"fading": "none"}, ["devices", "walk", "energy_share"]),
        ({"speed_deviation": 0.0}, ["walk", "energy_share", "gains"]),
        ({"leave_probability": 0.0}, ["walk", "energy_share", "gains"]),
        ({"memory_share": (1.0, 1.0)}, ["walk", "energy_share", "gains"]),
        ({"mobility": STATIC.mobility}, ["devices", "energy_share"]),
    ],
)
def test_the_effect_of_an_option_does_not_depend_on_other_options(
    off: dict[str, Any], same: list[str]
) -> None:
    less = replace(MOBILE, **off)
    every, fewer = (list(rounds(world, 10, cluster(0, 6))) for world in (MOBILE, less))
    assert every != fewer
    for state, other in zip(every, fewer, strict=True):
        for name in same:
            assert getattr(state.units[0], name) == getattr(other.units[0], name)


def test_a_state_read_from_json_is_equal_and_has_an_equal_successor() -> None:
    states = list(rounds(MOBILE, 60, *(cluster(unit) for unit in range(6))))
    read = [STATES.validate_json(STATES.dump_json(state)) for state in states]
    assert read == states  # floats bit by bit
    assert STATES.dump_json(read[-1]) == STATES.dump_json(states[-1])
    following = MOBILE.step(read[30], generator(0, 32))
    assert following == states[31]


# Laws of the environment


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_speeds_are_a_stationary_autoregression(correlation: float) -> None:
    environment = replace(STATIC, speed_deviation=0.3, speed_correlation=correlation)
    units = tuple(cluster(unit, 40) for unit in range(10))
    start = environment.start(units, 2, generator(0, 0))
    states = [start, *rounds(environment, 30, *units)]
    logs = np.array([[d.log_speed for u in state.units for d in u.devices] for state in states])
    for each in logs:  # 400 devices in each round and at the start
        assert each.mean() == pytest.approx(0, abs=4 * 0.3 / math.sqrt(400))
        assert each.std() == pytest.approx(0.3, rel=4 / math.sqrt(800))
    assert logs.std() == pytest.approx(0.3, rel=0.03)
    pairs = np.corrcoef(logs[:-1].ravel(), logs[1:].ravel())
    assert pairs[0, 1] == pytest.approx(correlation, abs=0.03)


def test_the_jitter_of_the_system_model_changes_only_speeds_by_ten_per_cent() -> None:
    (unit,) = units = (cluster(0, 3),)
    states = list(rounds(JITTER, 300, *units))
    worlds = [JITTER.conditions(state, units)[0] for state in states]
    times = np.array([[device.time.u for device in now.devices] for now in worlds])
    assert np.log(times / LAW.u).std() == pytest.approx(0.1, rel=0.1)
    assert np.corrcoef(times[:-1, 0], times[1:, 0])[0, 1] == pytest.approx(0, abs=0.2)
    for now in worlds:
        slow = replace(now, devices=tuple(replace(d, time=LAW) for d in now.devices))
        assert slow == unit


def test_devices_are_present_in_their_share_of_rounds() -> None:
    environment = replace(STATIC, leave_probability=0.2, return_probability=0.3)
    units = tuple(cluster(unit, 20) for unit in range(5))
    states = list(rounds(environment, 200, *units))
    there = np.array([[d.present for u in state.units for d in u.devices] for state in states])
    assert there[20:].mean() == pytest.approx(0.3 / (0.2 + 0.3), abs=0.02)
    left = there[:-1] & ~there[1:]
    assert left.sum() / there[:-1].sum() == pytest.approx(0.2, abs=0.02)
    assert environment.start(units, 2, generator(0, 0)).units[0].devices[0].present


def test_fading_is_exponential_with_mean_one_and_without_memory() -> None:
    environment = replace(STATIC, fading="rayleigh")
    states = list(rounds(environment, 1000, cluster(0), cluster(1), cluster(2)))
    gains = np.array([[unit.gains for unit in state.units] for state in states])
    assert gains.mean() == pytest.approx(1, abs=0.05)
    assert (gains > 1).mean() == pytest.approx(math.exp(-1), abs=0.03)
    flat = gains.reshape(1000, -1)
    correlations = np.corrcoef(np.hstack([flat[:-1], flat[1:]]), rowvar=False)
    assert np.abs(correlations - np.eye(12)).max() < 0.15  # between channels, units and rounds


def test_walkers_stay_in_the_disc_and_have_the_given_mean_speed() -> None:
    mobility = replace(WALKING.mobility, speed_m_per_s=1.0)
    environment = replace(WALKING, mobility=mobility)
    units = tuple(cluster(unit, 1) for unit in range(30))
    states = list(rounds(environment, 150, *units))
    walks = [unit.walk for state in states for unit in state.units]
    assert max(walk.distance_m for walk in walks) <= mobility.radius_m
    speeds = [math.hypot(walk.x_m_per_s, walk.y_m_per_s) for walk in walks]
    assert np.mean(speeds) == pytest.approx(1.0, rel=0.05)
    assert inner_share(walks, mobility.radius_m) == pytest.approx(0.5, abs=0.06)


def test_starting_points_are_uniform_in_the_disc() -> None:
    mobility, rng = WALKING.mobility, np.random.default_rng(0)
    walks = [mobility.start(rng) for _ in range(2000)]
    assert inner_share(walks, mobility.radius_m) == pytest.approx(0.5, abs=0.04)
    x, y = np.mean([(walk.x_m, walk.y_m) for walk in walks], axis=0)
    assert math.hypot(x, y) < mobility.radius_m / 20
    speeds = [math.hypot(walk.x_m_per_s, walk.y_m_per_s) for walk in walks]
    assert np.mean(speeds) == pytest.approx(mobility.speed_m_per_s, rel=0.04)


def inner_share(walks: Sequence[Walk], radius_m: float) -> float:
    """The share of walks in the inner half of the disc's area."""
    return float(np.mean([walk.distance_m <= radius_m / math.sqrt(2) for walk in walks]))


def test_velocities_have_the_given_correlation() -> None:
    mobility = replace(WALKING.mobility, radius_m=1e6, least_distance_m=1e6, correlation=0.9)
    environment = replace(WALKING, mobility=mobility)
    states = list(rounds(environment, 200, *(cluster(unit, 1) for unit in range(20))))
    speeds = np.array([[unit.walk.x_m_per_s for unit in state.units] for state in states])
    assert np.corrcoef(speeds[:-1].ravel(), speeds[1:].ravel())[0, 1] == pytest.approx(
        0.9, abs=0.03
    )
    places = np.array([[unit.walk.x_m for unit in state.units] for state in states])
    moved = np.diff(places, axis=0) / environment.mobility.round_s
    assert moved == pytest.approx(speeds[1:], abs=1e-6)


@pytest.mark.parametrize("step_s", [60.0, 1e5])
def test_the_edge_of_the_disc_reflects_walkers(step_s: float) -> None:
    mobility = replace(WALKING.mobility, round_s=step_s, correlation=1.0)
    walk = mobility.step(Walk(280.0, 0.0, 1.0, 0.5, 280.0), np.random.default_rng(0))
    assert walk.distance_m <= mobility.radius_m
    assert walk.x_m * walk.x_m_per_s + walk.y_m * walk.y_m_per_s <= 0
    assert math.hypot(walk.x_m_per_s, walk.y_m_per_s) == pytest.approx(math.hypot(1.0, 0.5))


def test_a_gain_falls_with_a_power_of_the_distance() -> None:
    mobility = replace(WALKING.mobility, path_loss_exponent=2.0, least_distance_m=35)
    assert mobility.relative_gain(Walk(60, 80, 0, 0, 50)) == pytest.approx(0.25)
    assert mobility.relative_gain(Walk(1, 0, 0, 0, 70)) == pytest.approx(4.0)
    assert mobility.relative_gain(Walk(1, 0, 0, 0, 20)) == 1.0


def test_shares_are_uniform_in_their_ranges() -> None:
    environment = replace(STATIC, memory_share=(0.5, 0.9), energy_share=(0.1, 0.3))
    states = list(rounds(environment, 500, cluster(0)))
    devices = [device for state in states for device in state.units[0].devices]
    for drawn, least, most in (
        ([device.memory_share for device in devices], 0.5, 0.9),
        ([device.energy_share for device in devices], 0.1, 0.3),
        ([state.units[0].energy_share for state in states], 0.1, 0.3),
    ):
        assert least <= min(drawn) < max(drawn) <= most
        assert np.mean(drawn) == pytest.approx((least + most) / 2, abs=0.02)


# Effects on a cluster


def conditions(device: DeviceCondition, *others: DeviceCondition) -> EnvironmentState:
    walk = Walk(1.0, 0.0, 0.0, 0.0, 1.0)
    return EnvironmentState((UnitCondition((device, *others), walk, 0.5, (2.0, 0.25)),))


def test_a_condition_scales_speed_memory_energy_and_gains() -> None:
    slow = DeviceCondition(-math.log(2), True, 0.49, 0.4)
    away = DeviceCondition(0.0, False, 1.0, 1.0)
    (now,) = STATIC.conditions(conditions(slow, away), (cluster(0),))
    first, second = now.devices
    assert (first.time.u, first.time.v) == pytest.approx((0.02, 0.04))
    assert (first.time.w, first.time.ell) == (LAW.w, LAW.ell)
    assert (first.max_blocks, second.max_blocks) == (2, 0)  # 0.49 · 6 = 2.94
    assert first.energy == EnergyBudget(2.0, AffineLaw(0.1, 0.2, 0.3, 0.4))
    assert second == replace(cluster(0).devices[1], max_blocks=0)
    assert now.uplink == Uplink(0.5, 5.0, 1e6, 1e7, (1.8, 0.2))


def test_the_limit_of_a_memory_budget_is_scaled_as_well() -> None:
    budget = MemoryBudget(8.0, 1.0, 2.0, 3.0)
    reported = ClusterState(0, (DeviceProfile("a", LAW, memory=budget),), 10)
    (now,) = STATIC.conditions(conditions(DeviceCondition(0.0, True, 0.25, 1.0)), (reported,))
    assert now.devices[0].memory == replace(budget, limit_bytes=2.0)


def test_a_device_without_limits_gets_no_limits() -> None:
    half = DeviceCondition(0.0, True, 0.5, 0.5)
    free = ClusterState(0, (DeviceProfile("a", LAW), DeviceProfile("b", LAW)), 10)
    away = replace(half, present=False)
    (now,) = STATIC.conditions(conditions(half, away), (free,))
    assert now == replace(free, devices=(free.devices[0], replace(free.devices[1], max_blocks=0)))


def test_extreme_values_in_a_report_do_not_end_the_run() -> None:
    slow, fast = (DeviceCondition(log_speed, True, 1.0, 0.5) for log_speed in (-3.0, 3.0))
    least, most = 1e-18, 1e18
    laws = AffineLaw(1e6, least, 0.0, 1e6), AffineLaw(least, 0.0, least, 0.0)
    budgets = (EnergyBudget(limit, LAW) for limit in (least, most))
    devices = tuple(
        DeviceProfile(name, law, None, budget)
        for name, law, budget in zip("ab", laws, budgets, strict=True)
    )
    reported = ClusterState(0, devices, 1, Uplink(most, least, 0.0, 0.0, (most, least)))
    (now,) = STATIC.conditions(conditions(slow, fast), (reported,))
    assert now.devices[0].time.u == 1e6
    assert now.devices[1].time.u == 0
    assert now.uplink == replace(reported.uplink, energy_j=0.0, gains=(most, 0.0))


# Invalid states and options


@pytest.mark.parametrize(
    ("clusters", "message"),
    [
        ((cluster(0), cluster(1)), "units: 2 now, 1"),
        ((cluster(0, 3),), "unit 0: devices: 3 now, 2"),
        (
            (replace(cluster(0), uplink=Uplink(1, 1, 1, 1, (0.1,))),),
            "unit 0: gains of channels: 1 now, 2",
        ),
    ],
)
def test_a_state_of_other_units_devices_or_channels_is_refused(
    clusters: tuple[ClusterState, ...], message: str
) -> None:
    (state,) = rounds(STATIC, 1, cluster(0))
    with pytest.raises(ConfigError, match=f"^{message} in the environment's state; set cluster"):
        STATIC.conditions(state, clusters)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("speed_deviation", -0.1),
        ("speed_deviation", math.nan),
        ("speed_correlation", 1.1),
        ("leave_probability", -1e-9),
        ("return_probability", 2),
        ("memory_share", [0.5]),
        ("memory_share", [0.9, 0.5]),
        ("energy_share", [0.5, 1.5]),
        ("fading", "rician"),
        ("mobility.speed_m_per_s", -1.0),
        ("mobility.correlation", 1.01),
        ("mobility.round_s", math.inf),
        ("mobility.radius_m", 0.5),
        ("mobility.least_distance_m", 300.0),
        ("mobility.path_loss_exponent", 11.0),
    ],
)
def test_invalid_values_are_refused_with_their_option(option: str, value: Any) -> None:
    values: Any = asdict(STATIC)
    section, _, name = option.rpartition(".")
    (values[section] if section else values)[name] = value
    with pytest.raises(ConfigError, match=rf"^environment\.{re.escape(option)}\b"):
        typed("environment", Environment, values)


def test_an_environment_from_a_configuration_can_be_hashed() -> None:
    """Its fields have their declared types: tuples, not lists."""
    environment = config.load_overrides(["environment=mobile"]).build("environment")
    assert environment == MOBILE
    assert type(environment.memory_share) is tuple
    assert {environment: 1}[replace(environment)] == 1


def test_an_unrealistically_large_path_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match="path_loss_exponent=10: makes 200 dB, at most 120"):
        Mobility(1.0, 0.5, 60, 100, 1, 10)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment.fading=rician", r"environment\.fading=rician: must be one of"),
        (
            "environment.mobility.radius_m=0",
            r"environment\.mobility\.radius_m=0: must be at least 1",
        ),
        ("environment.mobility.radius_m=far", r"environment\.mobility\.radius_m"),
        ("environment.memory_share=1", r"environment\.memory_share=1: must be a list"),
        ("environment.wind=1", r"unknown option environment\.wind.*\+environment\.wind="),
        ("environment=windy", r"there is no conf/environment/windy\.yaml"),
    ],
)
def test_bad_options_end_a_run_before_it_begins(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config.load_overrides([override])
    assert "\n" not in str(caught.value)


def test_a_memory_share_also_scales_the_memory_for_recomputing() -> None:
    memory = MemoryBudget(20.0, 1.0, 6.0, 0.5)
    device = DeviceProfile("a", LAW, memory=memory)
    smaller = replace(device, memory=replace(memory, block_bytes=2.0))
    either = ClusterState(0, (device.or_recomputing(4 / 3, smaller),), 10)
    tight = replace(STATIC, memory_share=(0.25, 0.25))
    (state,) = rounds(tight, 1, either)
    (now,) = tight.conditions(state, (either,))
    for on in (False, True):
        (own,) = tight.conditions(
            state, (replace(either, devices=(either.devices[0].in_mode(on),)),)
        )
        assert now.devices[0].in_mode(on) == own.devices[0]
        assert own.devices[0].memory is not None and own.devices[0].memory.limit_bytes == 5.0
