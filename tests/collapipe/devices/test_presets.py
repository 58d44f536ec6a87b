"""Presets draw clusters and channels within their ranges, in SI units, reproducibly by seed."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from collapipe import config
from collapipe.devices.hardware import PhysicalDevice, from_db, from_dbm
from collapipe.devices.presets import ChannelPreset, ClusterPreset, SyntheticCluster
from collapipe.errors import ConfigError
from collapipe.state import BlockCost

COST = BlockCost(9e8, 18e8, 1.5e6, 1.5e6, 1.2e8)


def preset(option: str, *overrides: str) -> ClusterPreset | ChannelPreset:
    return config.load_overrides(overrides).build(option)


@pytest.mark.parametrize("name", ["even", "uneven", "paper", "edge"])
def test_the_same_seed_draws_the_same_cluster(name: str) -> None:
    cluster = preset("cluster", f"cluster={name}", "cluster.num_devices=5")
    first, again, other = (cluster.draw(COST, 0, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first == again
    assert (first == other) == (name == "even")
    assert len({device.name for device in first}) == len(first) == 5


def test_the_papers_devices_have_the_figures_of_table_2() -> None:
    cluster = preset("cluster", "cluster=paper", "cluster.num_devices=128")
    for device in cluster.draw(COST, 0, np.random.default_rng(0)):
        law, budget = device.time, device.energy
        assert device.max_blocks == 6
        assert 1e6 <= 2e6 / law.u <= 19.2e6
        assert law.u == law.v
        assert law.w == 0
        snr = 0.085 * 1e-3 / 5e-10
        assert law.ell == pytest.approx(3145728 / (0.5e6 * math.log2(1 + snr)), rel=0.02)
        # Eq. 16: a block's energy is f²·FLOP/φ, and its time FLOP/(φ f); their quotient is f³.
        assert 0.1**3 <= budget.law.u / law.u <= 0.8**3
        assert 0.07 <= budget.law.ell / law.ell <= 0.1
        assert (budget.limit_j, budget.scope) == (5, "micro_batch")


def test_edge_devices_have_70_to_100_percent_of_their_data_sheets_speed() -> None:
    cluster = preset("cluster", "cluster=edge", "cluster.num_devices=60")
    speeds = {kind.name: kind.flops_per_s for kind in cluster.kinds}
    devices = cluster.draw(COST, 0, np.random.default_rng(0))
    assert {device.name.rsplit("-", 1)[0] for device in devices} == set(speeds)
    for device in devices:
        peak = speeds[device.name.rsplit("-", 1)[0]]
        assert 0.7 <= 27e8 / device.time.u / peak <= 1.0
        assert device.memory_cap(1, 99) in (
            int(4e9 // COST.block_bytes),
            int(8e9 // COST.block_bytes),
        )


def test_a_physical_device_is_converted_to_an_affine_law() -> None:
    device = PhysicalDevice(
        name="box",
        flops_per_s=1e9,
        d2d_rate_bps=1e6,
        memory_bytes=3.6e8,
        energy_j=50,
        power_w=4,
        launch_s=0.25,
        hop_latency_s=0.5,
    ).profile(COST)
    assert (device.time.u, device.time.v, device.time.w, device.time.ell) == (2.7, 0.25, 3.0, 0.5)
    assert device.memory_cap(1, 99) == 3
    assert device.energy.law.chunk(2, 3) == pytest.approx(4 * device.time.chunk(2, 3))


@pytest.mark.parametrize("name", ["paper", "edge"])
def test_channels_and_uplinks_lie_within_their_ranges(name: str) -> None:
    channel = preset("channel", f"channel={name}", "channel.num_channels=7")
    channels = channel.draw(np.random.default_rng(0))
    assert channels == channel.draw(np.random.default_rng(0))
    assert len(channels) == 7
    for one in channels:
        assert channel.bandwidth_hz[0] <= one.bandwidth_hz <= channel.bandwidth_hz[1]
        assert channel.interference_w[0] <= one.interference_w <= channel.interference_w[1]
    uplink = channel.draw_uplink(3e6, 4e6, np.random.default_rng(0))
    low, high = (from_db(gain) for gain in channel.gain_db)
    assert all(low <= gain <= high for gain in uplink.gains)
    assert len(uplink.gains) == 7
    assert uplink.model_bits == 3e6
    assert channel.model_bits == (9.6e6 if name == "paper" else None)
    assert uplink.activation_bits == 4e6


@pytest.mark.parametrize("option", ["cluster", "channel"])
@pytest.mark.parametrize("name", ["paper", "edge"])
def test_a_preset_is_hashable_and_its_ranges_are_tuples(option: str, name: str) -> None:
    built = preset(option, f"{option}={name}")
    assert hash(built) == hash(preset(option, f"{option}={name}"))
    ranges = [value for value in vars(built).values() if isinstance(value, list | tuple)]
    assert ranges
    assert all(isinstance(value, tuple) for value in ranges)


def test_a_preset_built_in_python_is_validated() -> None:
    with pytest.raises(ValidationError, match="block_s"):
        SyntheticCluster(num_devices=3, block_s=(2.0, 1.0), hop_s=(0.0, 0.0))


def test_decibels_are_converted_to_numbers() -> None:
    assert from_db(-30) == pytest.approx(1e-3)
    assert from_dbm(30) == pytest.approx(1)
    assert from_dbm(-174) == pytest.approx(3.98e-21, rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("cluster.num_devices=0", r"cluster\.num_devices=0: .*\b1\b"),
        ("cluster.num_devices=129", r"cluster\.num_devices=129: .*\b128\b"),
        ("cluster.block_s=[1e300,1e300]", r"cluster\.block_s.*1e\+300: "),
        ("cluster.hop_s=[0,1e7]", r"cluster\.hop_s.*: "),
        (("cluster=edge", "cluster.launch_s=1e7"), r"cluster\.launch_s=.*: "),
        ("channel.num_channels=0", r"channel\.num_channels=0: .*\b1\b"),
        ("cluster.block_s=fast", r"cluster\.block_s"),
        ("cluster.block_s=[2,1]", r"cluster\.block_s=.*2.*1.*: .*least, most"),
        ("cluster.block_s=[1]", r"cluster\.block_s=.*1.*: .*least, most"),
        ("cluster.hop_s=[-1,1]", r"cluster\.hop_s.*-1.*: .*\b0\b"),
        ("channel.energy_j=inf", r"channel\.energy_j=inf: .*finite"),
        ("channel.energy_j=0", r"channel\.energy_j=0(\.0)?: .*\b0\b"),
        ("channel.gain_db=[-181,0]", r"channel\.gain_db.*-181.*: .*-180\b"),
        ("channel.activation_bits=-1", r"channel\.activation_bits=-1(\.0)?: .*\b0\b"),
        ("channel=dry", r"conf/channel/dry\.yaml"),
        (("cluster=edge", "cluster.kinds=[]"), r"cluster\.kinds"),
        (
            (
                "cluster=edge",
                "cluster.kinds=[{name: a, flops_per_s: 1, memory_bytes: -1, power_w: 1, "
                "d2d_rate_bps: 1}]",
            ),
            r"cluster\.kinds\[0\]\.memory_bytes=-1",
        ),
    ],
)
def test_impossible_presets_are_refused(overrides: str | tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.load_overrides([overrides] if isinstance(overrides, str) else list(overrides))
