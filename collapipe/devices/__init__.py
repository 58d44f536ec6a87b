"""Devices and channels: hardware, presets that draw them, what a block costs on them."""
