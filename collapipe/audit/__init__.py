"""Audits: attacks that measure how much of the units' texts a run's edge server could read."""
