"""Solve Sub-1 with stages that several devices share (Asteroid, arXiv 2408.08015), exactly."""
