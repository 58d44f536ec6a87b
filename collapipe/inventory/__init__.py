"""Inventories: YAML files that describe a user's devices."""
