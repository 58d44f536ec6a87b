"""Messages between a control unit and a device."""

import pytest

from pipeline.devices import messages
from pipeline.devices.messages import PartHeader, packed, unpacked


def test_each_kind_of_message_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device sends a header with every part of every copy."""
    header = PartHeader("blocks.0", 0)
    assert unpacked(PartHeader, packed(header)) == header
    monkeypatch.setattr(messages, "TypeAdapter", None)
    assert unpacked(PartHeader, packed(header)) == header
