"""Tensors in fewer bits, and the correction of their rounding errors."""
