"""Messages between a control unit and a device."""

import pytest

from pipeline.devices import messages
from pipeline.devices.messages import PartHeader, packed, unpacked


def test_the_validator_of_a_message_type_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """This saves time, because each part of each copy has a header."""
    header = PartHeader("blocks.0", 0)
    assert unpacked(PartHeader, packed(header)) == header
    monkeypatch.setattr(messages, "TypeAdapter", None)
    assert unpacked(PartHeader, packed(header)) == header
