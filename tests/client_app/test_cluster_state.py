"""What a unit says that it will send: the real bits, or those of the channel's preset."""

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
    told = state(*overrides).uplink
    assert told is not None
    return told


@pytest.mark.parametrize("cluster", ["uneven", "paper", "edge"])
def test_devices_that_recompute_take_a_forward_more_and_joules_for_it(cluster: str) -> None:
    """Whatever describes them; hops stay what they are, and replicas do nothing twice."""
    once = state(f"cluster={cluster}", "pipeline.recompute=false").devices
    twice = state(f"cluster={cluster}", "pipeline.recompute=true").devices
    for first, second in zip(once, twice, strict=True):
        ratio = second.time.u / first.time.u
        assert 1.25 < ratio < 1.4  # backward takes two to three forwards
        assert second.time == first.time.taking(ratio)
        if first.energy and second.energy:
            assert second.energy == replace(first.energy, law=first.energy.law.taking(ratio))
        assert (second.memory is not None) == (cluster == "edge")  # the others count in blocks
    either = state(f"cluster={cluster}", "pipeline.recompute=auto").devices
    assert tuple(each.in_mode(False) for each in either) == once
    assert [bool(each.recomputing) for each in either] == [cluster == "edge"] * len(either)
    if cluster == "edge":
        assert tuple(each.in_mode(True) for each in either) == twice
    alone = f"cluster={cluster}", "framework=vanilla_fl"
    assert state(*alone, "pipeline.recompute=true") == state(*alone)


def test_a_unit_says_whether_its_devices_are_real(tmp_path: Path) -> None:
    device = {"name": "box", "address": "127.0.0.1:1", "flops_per_s": 1e9, "d2d_rate_bps": 1e9}
    tree = {"batch_size": 6, "model": {"name": "transformer"}, "clusters": []}
    tree["clusters"] = [{"name": "here", "devices": [device]}]
    (tmp_path / "boxes.yaml").write_text(json.dumps(tree), encoding="utf-8")
    of_file = f"cluster.file={tmp_path / 'boxes.yaml'}", "federation.num_units=1"
    real, described = state("cluster=devices", *of_file), state("cluster=file", *of_file)
    assert (real.real_devices, described.real_devices) == (True, False)
    assert [each.max_blocks for each in real.devices] == [0]  # nobody answers there


def test_devices_that_round_what_they_hand_over_take_less_time_for_it() -> None:
    once = state("cluster=edge").devices
    for precision, share in (("bfloat16", 1 / 2), ("int8", (16 + 4) / (4 * 16))):  # of 16 wide rows
        rounded = state("cluster=edge", f"pipeline.wire_dtype={precision}").devices
        for first, second in zip(once, rounded, strict=True):
            assert second.time == replace(first.time, w=first.time.w * share)
            assert first.time.w > 0


def test_a_presets_activations_are_those_of_each_local_step() -> None:
    preset = uplink("channel=paper", "federation.local_steps=3")
    assert preset.activation_bits == 3 * 64 * 64 * 768 * 32
    free = uplink("channel=paper", "channel.activation_bits=0")
    assert free.activation_bits == 0


def test_without_a_preset_they_are_what_the_unit_really_sends() -> None:
    once, twice = (uplink(f"federation.local_steps={steps}") for steps in (1, 2))
    real = uplink("channel=paper", "channel.activation_bits=null", "federation.local_steps=2")
    assert real.activation_bits == twice.activation_bits == 2 * once.activation_bits
    assert once.activation_bits > 6 * 16 * 32  # a token each of b samples of width d, at least


@pytest.mark.parametrize("computed", ["float32", "float64"])
def test_a_presets_bits_are_those_of_float32(computed: str) -> None:
    """Whatever the model computes in."""
    told = uplink("channel=paper", "compression=auto", f"pipeline.dtype={computed}")
    single = uplink("channel=paper", "compression=auto")
    for payload in told.payloads:
        like = single.payload(*payload.choice)
        assert like is not None
        assert payload.bits == like.bits
    assert single.payloads[0].bits == (9.6e6, 2 * 64 * 64 * 768 * 32)


@pytest.mark.parametrize("alone", ["decoder.mode=control_unit", "framework=vanilla_fl"])
def test_units_that_send_no_activations_send_none_whatever_the_preset(alone: str) -> None:
    assert uplink("channel=paper", alone).activation_bits == 0
