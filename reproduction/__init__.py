"""Reproduce the paper's figures, from the model of time and energy only, or also by training."""
