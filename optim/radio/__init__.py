"""The uplink: rates, fading and transmit power."""
