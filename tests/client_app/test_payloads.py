"""The payloads that a scheduler may choose from."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from client_app.payloads import HeadChoice, payloads
from collapipe.errors import ConfigError
from collapipe.report import BENCHMARKED
from collapipe.sections import CompressionSettings
from collapipe.state import AffineLaw, ClusterState, DeviceProfile, Payload, Precision, Uplink

NAMES = get_args(Precision)


def bits(precision: str) -> float:
    return {"float32": 32.0, "bfloat16": 16.0}.get(precision) or float(precision[-1])


def offered(upload: Any, activation: Any, *, linked: bool = True) -> tuple[Payload, ...]:
    settings = CompressionSettings(upload, activation, "float32", feedback=False)
    return payloads(settings, (HeadChoice(None, bits, _ten_times if linked else None),))


def _ten_times(precision: str) -> float:
    return 10 * bits(precision)


def test_every_precision_has_an_error_that_grows_as_bits_fall() -> None:
    for errors in (BENCHMARKED.activation, BENCHMARKED.upload):
        assert sorted(errors) == sorted(NAMES)
        by_bits = [errors[name] for name in sorted(NAMES, key=bits, reverse=True)]
        assert by_bits == sorted(by_bits)
        assert by_bits[0] == 0


def test_all_pairs_are_offered_in_the_order_of_their_errors() -> None:
    found = offered("auto", "auto")
    assert {(each.activation, each.upload) for each in found} == {
        (a, u) for a in NAMES for u in NAMES
    }
    assert len(found) == 25
    assert [each.gradient_error for each in found] == sorted(each.gradient_error for each in found)
    for each in found:
        assert (each.model_bits, each.activation_bits) == (
            bits(each.upload),
            10 * bits(each.activation),
        )
    Uplink(1.0, 1.0, 32.0, 320.0, (1.0,), payloads=found)  # a unit may report it


@pytest.mark.parametrize("precision", NAMES)
def test_a_fixed_precision_counts_as_exact(precision: str) -> None:
    for found in (offered(precision, "auto"), offered("auto", precision)):
        assert len(found) == 5
        assert found[0].gradient_error == 0
    (one,) = offered(precision, precision)
    assert one == Payload(precision, precision, bits(precision), 10 * bits(precision), 0.0)


def test_a_unit_without_a_link_offers_only_uploads() -> None:
    found = offered("auto", "auto", linked=False)
    assert [each.upload for each in found] == sorted(NAMES, key=bits, reverse=True)
    assert {(each.activation, each.activation_bits) for each in found} == {("float32", 0.0)}


def test_a_unit_whose_payloads_all_have_errors_is_refused() -> None:
    uplink = Uplink(1.0, 1.0, 32.0, 320.0, (1.0,))
    inexact = replace(uplink, payloads=offered("auto", "auto")[1:])
    device = DeviceProfile("a", AffineLaw(1.0, 0.0, 0.0, 0.0))
    with pytest.raises(ConfigError, match="gradient_error"):
        ClusterState(0, (device,), 1, inexact)
    with pytest.raises(ConfigError, match="two payloads"):
        replace(uplink, payloads=offered("auto", "auto")[:1] * 65)


def test_both_places_of_a_head_are_offered_and_the_server_is_first() -> None:
    settings = CompressionSettings("auto", "auto", "float32", feedback=False)
    heads = HeadChoice("server", bits, _ten_times), HeadChoice("control_unit", _ten_times, None)
    found = payloads(settings, heads)
    assert len({each.choice for each in found}) == len(found) == 25 + 5
    assert [each.gradient_error for each in found] == sorted(each.gradient_error for each in found)
    assert found[0].choice == ("float32", "float32", "server")
    at_control_unit = [each for each in found if each.head == "control_unit"]
    assert {each.activation for each in at_control_unit} == {"float32"}
    assert all(each.bits == (10 * bits(each.upload), 0.0) for each in at_control_unit)
    assert all(each.gradient_error == BENCHMARKED.upload[each.upload] for each in at_control_unit)
