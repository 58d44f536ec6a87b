"""What was measured of devices' speeds, round after round."""

import math

import pytest
import torch

from collapipe.devices.slowness import Slowness
from collapipe.errors import WireError
from collapipe.state import AffineLaw, DeviceProfile

PI = DeviceProfile("pi", AffineLaw(1.0, 2.0, 3.0, 4.0))


def test_a_busy_round_is_forgotten_by_a_device_that_is_not_measured_again() -> None:
    slow, rounds = Slowness().after({"pi": 4.0}), 0
    assert slow.times == {"pi": 4.0}
    assert slow.known([PI]) == (DeviceProfile("pi", AffineLaw(4.0, 8.0, 3.0, 4.0)),)
    seen = [4.0]
    while "pi" in slow.times:
        slow, rounds = slow.after({"other": 1.0}), rounds + 1
        seen.append(slow.times.get("pi", 1.0))
    assert seen == sorted(seen, reverse=True) and seen[7] == pytest.approx(2, rel=0.1)
    assert rounds < 40
    assert slow.known([PI]) == (PI,)


def test_a_first_measurement_is_taken_and_later_ones_count_half() -> None:
    slow = Slowness({"pi": 4.0}).after({"pi": 1.0, "nano": 0.2})
    assert slow.times == {"pi": 2.0, "nano": pytest.approx(0.2)}
    assert slow.after({"pi": 2.0}).times["pi"] == pytest.approx(2.0)
    assert Slowness().after({"pi": 0.0, "nano": 1e300}).times == {"pi": 1e-6, "nano": 1e6}


def test_a_process_that_starts_anew_goes_on_with_it() -> None:
    slow = Slowness({"pi": 4.1}).after({})
    assert Slowness.unpack(slow.pack(), ["pi", "nano"]) == slow


@pytest.mark.parametrize("value", [0.0, -1.0, 1e9, math.nan, math.inf])
def test_what_no_device_is_measured_to_be_is_refused(value: float) -> None:
    with pytest.raises(WireError, match="slowness of 'pi'"):
        Slowness.unpack({"pi": torch.tensor(value, dtype=torch.float64)}, ["pi"])


@pytest.mark.parametrize("tensor", [torch.tensor(2.0), torch.ones(2).double()])
def test_other_tensors_and_other_devices_are_refused(tensor: torch.Tensor) -> None:
    for name in ("pi", "stranger"):
        with pytest.raises(WireError, match="slowness of"):
            Slowness.unpack({name: tensor if name == "pi" else tensor.double().sum()}, ["pi"])
