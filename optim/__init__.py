"""Decides: pure functions from state to plan."""
