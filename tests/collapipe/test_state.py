"""Invalid cluster states are refused when they are created."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.errors import ConfigError
from collapipe.state import (
    AffineLaw,
    BlockCost,
    ClusterState,
    DeviceProfile,
    EnergyBudget,
    Link,
    MemoryBudget,
    Payload,
    SharingLaw,
    Uplink,
    received_gradients,
)

LAW = AffineLaw(1.0, 2.0, 3.0, 4.0)


@pytest.mark.parametrize("names", [(), ("a", "a"), tuple(map(str, range(129)))])
def test_a_cluster_has_1_to_128_devices_with_unique_names(names: tuple[str, ...]) -> None:
    devices = tuple(DeviceProfile(name, LAW) for name in names)
    with pytest.raises(ConfigError, match=rf"^unit 3: {len(names)} devices"):
        ClusterState(3, devices, 5)
    assert ClusterState(3, (DeviceProfile("a", LAW), DeviceProfile("b", LAW)), 5).unit == 3


@pytest.mark.parametrize("u", [-1.0, 1e-19, 1e7, float("nan"), float("inf")])
def test_coefficients_of_a_law_must_be_within_bounds(u: float) -> None:
    with pytest.raises(ConfigError, match="AffineLaw: u="):
        AffineLaw(u, 0.0, 0.0, 0.0)


def test_other_types_than_a_law_of_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^AffineLaw: u='1' must be 0, or within"):
        AffineLaw("1", 0.0, 0.0, 0.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^device a: time=\(1, 2, 3, 4\): .* AffineLaw$"):
        DeviceProfile("a", (1, 2, 3, 4))  # type: ignore[arg-type]
    assert AffineLaw(np.float32(0.5), np.float64(0.5), np.int64(1), 0).chunk(1, 1) == 2  # type: ignore[arg-type]


def test_other_objects_than_devices_and_an_uplink_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^unit 3: devices=\{\}: must be an object of Device"):
        ClusterState(3, (DeviceProfile("a", LAW), {}), 5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^unit 3: uplink=\{\}: must be an object of Uplink$"):
        ClusterState(3, (DeviceProfile("a", LAW),), 5, {})  # type: ignore[arg-type]


def test_the_time_of_a_chunk_is_compute_plus_hop() -> None:
    assert LAW.compute(5, 10) == 5 * (1 * 10 + 2)
    assert LAW.hop(10) == 3 * 10 + 4
    assert LAW.chunk(5, 10) == LAW.compute(5, 10) + LAW.hop(10)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "x" * 65])
def test_device_names_are_printable_and_at_most_64_characters(name: str) -> None:
    with pytest.raises(ConfigError, match="at most 64 characters, all printable") as caught:
        DeviceProfile(name, LAW)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200
    assert DeviceProfile("ä" * 64, LAW).name == "ä" * 64


@pytest.mark.parametrize("digits", [19, 400, 5000])
def test_fractions_and_counts_outside_0_to_1e18_are_refused(digits: int) -> None:
    for count in (-(10**digits), 10**digits, 1.5):
        with pytest.raises(ConfigError, match=r"device a: max_blocks must be a whole"):
            DeviceProfile("a", LAW, max_blocks=count)
        with pytest.raises(ConfigError, match=r"unit 3: num_samples must be a whole"):
            ClusterState(3, (DeviceProfile("a", LAW),), count)
        with pytest.raises(ConfigError, match=r"unit must be a whole"):
            ClusterState(count, (DeviceProfile("a", LAW),), 1)


def test_invalid_limits_of_shares_and_energies_of_links_are_refused() -> None:
    """A unit can report any values."""
    with pytest.raises(ConfigError, match="SharingLaw: max_blocks must be a whole number within"):
        SharingLaw(0.0, max_blocks=-1)
    with pytest.raises(ConfigError, match=r"batch_block_bytes=2\.0 is more than block_bytes=1\.0"):
        MemoryBudget(9.0, 0.0, 1.0, 0.0, batch_block_bytes=2.0)
    links = Link("b", 0.0, 1.0), Link("c", 0.0, 1.0)
    for names in ("d", "bb", "a"):
        energy = EnergyBudget(1.0, LAW, links=tuple(Link(to, 0.0, 0.0) for to in names))
        with pytest.raises(ConfigError, match=r"device a: each of energy\.links needs one"):
            DeviceProfile("a", LAW, energy=energy, links=links)
    assert DeviceProfile("a", LAW, energy=replace(energy, links=links[:1]), links=links).links


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": None}, "^DeviceProfile: name=None: must be an object of str$"),
        ({"energy": 5.0}, r"^device a: energy=5\.0: must be an object of EnergyBudget$"),
        ({"memory": 2e9}, "^device a: memory=.*: must be an object of MemoryBudget$"),
        ({"sharing": 0.1}, "^device a: sharing=.*: must be an object of SharingLaw$"),
        ({"recomputing": True}, "^device a: recomputing=True: must be an object of Recomputing$"),
        ({"links": ["b"]}, "^device a: links=b: must be an object of Link$"),
        ({"links": None}, "^device a: links=None: must be a list of objects of Link$"),
    ],
)
def test_other_objects_than_a_devices_parts_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceProfile(**{"name": "a", "time": LAW, **changes})
    assert hash(DeviceProfile("a", LAW, links=cast(Any, [])))  # the planner's key


@pytest.mark.parametrize("gains", [None, 0.9, (None,), ("0.9",), [[0.9]]])
def test_gains_that_are_no_numbers_are_refused(gains: Any) -> None:
    with pytest.raises(ConfigError, match=r"^Uplink: gain"):
        Uplink(0.5, 9.0, 1.0, 1.0, gains)


def test_a_link_to_no_device_of_the_cluster_is_refused() -> None:
    """Else its hop would silently take the usual time. An empty name is refused, too."""
    for to, near in ("boxx", "; nearest: box"), ("pi", ""), ("", ""):
        devices = DeviceProfile("a", LAW, links=(Link(to, 0.0, 5.0),)), DeviceProfile("box", LAW)
        with pytest.raises(ConfigError, match=rf"^device a: .* '{to}', .* cluster{near}$"):
            ClusterState(3, devices, 5)


def test_an_uplink_with_neither_power_nor_bits_is_refused() -> None:
    """The planner would treat it as unable to send, the cost model as having sent already."""
    with pytest.raises(ConfigError, match="needs max_power_w above 0"):
        Uplink(0.0, 1.0, 0.0, 0.0, (1.0,))
    assert Uplink(0.0, 1.0, 1.0, 0.0, (1.0,)).max_power_w == 0


EXACT = Payload("float32", "float32", 8.0, 4.0, 0.0)
ROUGH = Payload("int4", "int4", 1.0, 0.0, 1e-3)
OFFERING = Uplink(1.0, 1.0, 8.0, 4.0, (1.0,), payloads=(EXACT, ROUGH))


def test_a_gradient_error_above_1_is_refused() -> None:
    """An error of 1 means that nothing is sent. Added to a larger error, all other costs of a round
    would be lost to rounding.
    """
    assert replace(ROUGH, gradient_error=1.0).gradient_error == 1
    for error in (1.1, 1e18, float("nan")):
        with pytest.raises(ConfigError, match="Payload: gradient_error="):
            replace(ROUGH, gradient_error=error)


def test_a_head_on_the_control_unit_has_no_activation_bits() -> None:
    at_control_unit = replace(EXACT, activation_bits=0.0, head="control_unit")
    assert at_control_unit.choice == ("float32", "float32", "control_unit")
    with pytest.raises(ConfigError, match=r"4.0 bits of activations"):
        replace(at_control_unit, activation_bits=4.0)


def test_two_payloads_with_equal_precisions_are_refused() -> None:
    twin = replace(EXACT, model_bits=1.0)
    with pytest.raises(ConfigError, match="two payloads"):
        replace(OFFERING, payloads=(EXACT, ROUGH, twin))


def test_without_power_every_payload_needs_bits() -> None:
    assert replace(OFFERING, max_power_w=0.0).sending(ROUGH).model_bits == 1
    without_bits = replace(ROUGH, model_bits=0.0)
    with pytest.raises(ConfigError, match="needs max_power_w above 0"):
        replace(OFFERING, max_power_w=0.0, payloads=(EXACT, without_bits))


def test_the_first_payload_must_have_the_uplinks_bits() -> None:
    device = DeviceProfile("a", LAW)
    assert ClusterState(3, (device,), 5, OFFERING).uplink == OFFERING
    with pytest.raises(ConfigError, match=r"unit 3: .* must be alike"):
        ClusterState(3, (device,), 5, replace(OFFERING, activation_bits=5.0))


def test_a_share_needs_memory_for_its_rows_and_the_gradients_it_receives() -> None:
    """Six blocks, three of nine rows; half of the share's tensors are kept at the same time."""
    cost = BlockCost(
        *(1.0, 1.0, 1.0, 1.0),
        block_bytes=50.0,
        sample_bytes=2.0,
        segment_bytes=20.0,
        batch_block_bytes=30.0,
        batch_segment_bytes=12.0,
        trained_bytes=5.0,
    )
    kept = 1 / 6  # of the whole batch's tensors
    expected = (20 - 12 + 12 * kept) + 6 * (50 - 30 + 30 * kept + 2 * 3)
    assert cost.segment_needs(6, 9, 1 / 2) == pytest.approx(14 + 6 * (35 + 18))
    assert cost.segment_needs(6, 3, kept) == pytest.approx(expected)
    received = received_gradients(6, 1 / 3, 3)
    assert received == pytest.approx(2 * (6 + 2) / 3)
    assert cost.segment_needs(6, 3, kept, received) == pytest.approx(expected + 5 * received)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0]), min_size=4, max_size=4))
def test_the_number_of_blocks_is_the_largest_that_fits_into_memory(bytes_: list[float]) -> None:
    """This also holds if a unit reports zeros."""
    limit, segment, block, sample = bytes_
    blocks = MemoryBudget(limit, segment, block, sample).blocks(1.5, most=4)
    fit = [count for count in range(5) if segment + count * (block + 2 * sample) <= limit]
    assert blocks == max(fit, default=0)
