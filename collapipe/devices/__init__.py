"""Devices and channels: hardware, presets that draw them, and a block's cost on them."""
