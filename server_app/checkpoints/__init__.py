"""Checkpoints, from which an interrupted run is resumed: write, read and check them."""
