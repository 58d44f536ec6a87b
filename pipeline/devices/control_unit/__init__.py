"""The control unit's end of the device protocol."""
