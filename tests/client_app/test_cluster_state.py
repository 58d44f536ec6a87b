"""What a unit says that it will send: the real bits, or those of the channel's preset."""

import pytest
from federated import TINY

from client_app.control_unit import ControlUnit
from collapipe.config import load_overrides
from collapipe.runs.rows import build_tokenizer, load_splits
from collapipe.state import Uplink


def uplink(*overrides: str) -> Uplink:
    settings = load_overrides([*TINY, *overrides])
    tokenizer = build_tokenizer(settings, load_splits(settings).train)
    told = ControlUnit(settings, 0, tokenizer).state.uplink
    assert told is not None
    return told


def test_a_presets_activations_are_those_of_each_local_step() -> None:
    preset = uplink("channel=paper", "federation.local_steps=3")
    assert preset.activation_bits == 3 * 64 * 64 * 768 * 32
    free = uplink("channel=paper", "channel.activation_bits=0")
    assert free.activation_bits == 0


def test_without_a_preset_they_are_what_the_unit_really_sends() -> None:
    once, twice = (uplink(f"federation.local_steps={steps}") for steps in (1, 2))
    real = uplink("channel=paper", "channel.activation_bits=null", "federation.local_steps=2")
    assert real.activation_bits == twice.activation_bits < 2 * once.activation_bits  # one farewell
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
