"""A unit's report of devices and of bits to send: the real bits, or the channel preset's bits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from federated import TINY

from client_app.control_unit import ControlUnit
from collapipe.config import load_overrides
from collapipe.runs.rows import build_tokenizer
from collapipe.state import ClusterState, Uplink


def state(*overrides: str) -> ClusterState:
    settings = load_overrides([*TINY, *overrides])
    tokenizer = build_tokenizer(settings)
    return ControlUnit(settings, 0, tokenizer).state()


def uplink(*overrides: str) -> Uplink:
    reported = state(*overrides).uplink
    assert reported is not None
    return reported


@pytest.mark.parametrize("cluster", ["uneven", "paper", "edge"])
def test_recomputing_adds_the_time_and_energy_of_a_forward_pass(cluster: str) -> None:
    """This holds for each source of devices. Hops do not change, and VanillaFL does not
    recompute."""
    once = state(f"cluster={cluster}", "pipeline.recompute=false").devices
    twice = state(f"cluster={cluster}", "pipeline.recompute=true").devices
    for first, second in zip(once, twice, strict=True):
        ratio = second.time.u / first.time.u
        assert 1.25 < ratio < 1.4  # a backward pass takes two to three forward passes
        assert second.time == first.time.taking(ratio)
        if first.energy and second.energy:
            assert second.energy == replace(first.energy, law=first.energy.law.taking(ratio))
        assert (second.memory is not None) == (
            cluster == "edge"
        )  # other memory limits are in blocks
    either = state(f"cluster={cluster}", "pipeline.recompute=auto").devices
    assert tuple(each.in_mode(False) for each in either) == once
    assert [bool(each.recomputing) for each in either] == [cluster == "edge"] * len(either)
    if cluster == "edge":
        assert tuple(each.in_mode(True) for each in either) == twice
    alone = f"cluster={cluster}", "framework=vanilla_fl"
    assert state(*alone, "pipeline.recompute=true") == state(*alone)


def test_a_unit_reports_whether_its_devices_are_real(tmp_path: Path) -> None:
    device = {"name": "box", "address": "127.0.0.1:1", "flops_per_s": 1e9, "d2d_rate_bps": 1e9}
    tree = {"batch_size": 6, "model": {"name": "transformer"}, "clusters": []}
    tree["clusters"] = [{"name": "here", "devices": [device]}]
    (tmp_path / "boxes.yaml").write_text(json.dumps(tree), encoding="utf-8")
    of_file = f"cluster.file={tmp_path / 'boxes.yaml'}", "federation.num_units=1"
    real, described = state("cluster=devices", *of_file), state("cluster=file", *of_file)
    assert (real.real_devices, described.real_devices) == (True, False)
    assert [each.max_blocks for each in real.devices] == [0]  # no daemon answers


def test_rounding_activations_between_devices_reduces_hop_times() -> None:
    once = state("cluster=edge").devices
    for precision, share in (("bfloat16", 1 / 2), ("int8", (16 + 4) / (4 * 16))):  # rows of 16
        rounded = state("cluster=edge", f"pipeline.wire_dtype={precision}").devices
        for first, second in zip(once, rounded, strict=True):
            assert second.time == replace(first.time, w=first.time.w * share)
            assert first.time.w > 0


def test_a_presets_activation_bits_count_for_each_local_step() -> None:
    preset = uplink("channel=paper", "federation.local_steps=3")
    assert preset.activation_bits == 3 * 64 * 64 * 768 * 32
    free = uplink("channel=paper", "channel.activation_bits=0")
    assert free.activation_bits == 0


def test_without_a_preset_activation_bits_are_the_real_ones() -> None:
    once, twice = (uplink(f"federation.local_steps={steps}") for steps in (1, 2))
    real = uplink("channel=paper", "channel.activation_bits=null", "federation.local_steps=2")
    assert real.activation_bits == twice.activation_bits == 2 * once.activation_bits
    assert once.activation_bits > 6 * 16 * 32  # at least b tokens of width d


@pytest.mark.parametrize("computed", ["float32", "float64"])
def test_a_presets_bits_do_not_depend_on_the_compute_dtype(computed: str) -> None:
    """They are float32's bits."""
    with_dtype = uplink("channel=paper", "compression=auto", f"pipeline.dtype={computed}")
    single = uplink("channel=paper", "compression=auto")
    for payload in with_dtype.payloads:
        like = single.payload(*payload.choice)
        assert like is not None
        assert payload.bits == like.bits
    assert single.payloads[0].bits == (9.6e6, 2 * 64 * 64 * 768 * 32)


@pytest.mark.parametrize("alone", ["decoder.mode=control_unit", "framework=vanilla_fl"])
def test_a_preset_adds_no_activations_to_units_that_send_none(alone: str) -> None:
    assert uplink("channel=paper", alone).activation_bits == 0
