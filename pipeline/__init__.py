"""Runs a plan's segments inside one cluster. Depends on torch, not on Flower."""
