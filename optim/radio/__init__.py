"""The uplink: rates, fading, and the power that a transfer needs."""
