"""Messages between a control unit and a device."""

import json
import tracemalloc

import pytest

from collapipe.errors import WireError
from pipeline.devices import encoding
from pipeline.devices.encoding import as_json, as_tensor, from_json, packed, unpacked
from pipeline.devices.messages import DeviceStatus, PartHeader, Trouble, Wanted, place_of


def test_the_validator_of_a_message_type_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """This saves time, because each part of each copy has a header."""
    header = PartHeader("blocks.0", 0)
    assert unpacked(PartHeader, packed(header)) == header
    monkeypatch.setattr(encoding, "TypeAdapter", None)
    assert unpacked(PartHeader, packed(header)) == header


def test_only_names_of_neighbours_have_a_place() -> None:
    assert place_of("behind-127") == ("behind", 127)
    others = "before-" + "9" * 5000, "before-128", "before-01", "before-", "before-x", "above-0", ""
    assert not any(map(place_of, others))


@pytest.mark.parametrize("long", ["kind", "neighbour"])
def test_the_names_in_an_error_report_are_limited(long: str) -> None:
    names = {"kind": "HopError", "neighbour": "before-0"}
    report = Trouble(message="x", **names)
    assert unpacked(Trouble, packed(report)) == report
    with pytest.raises(WireError, match=long):
        unpacked(Trouble, packed(Trouble(message="x", **(names | {long: "9" * 5000}))))


def test_long_texts_of_a_device_become_short_lines() -> None:
    """To look for addresses in a text takes the square of its length."""
    long = "a\x1b[2J\n" * 1000
    idle = DeviceStatus(long, long, "2", "cpu", 1, 1.0, 1.0, 1.0, None, False, None, None)
    status = from_json(DeviceStatus, as_json(idle))
    for text in (unpacked(Trouble, packed(Trouble("HopError", long))).message, status.name):
        assert text.isprintable() and len(text) < 450
    assert (status.version, status.torch_version) == (status.name, "2")


def test_many_invalid_values_are_counted_and_not_read() -> None:
    """Each would take a kilobyte."""
    message = as_tensor(json.dumps({"blocks": [0] * 50_000}).encode())
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="50,"):
            unpacked(Wanted, message)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
