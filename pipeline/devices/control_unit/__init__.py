"""The control unit's end: segments on devices, and recovery from their loss."""
