"""Bound how much a model reveals about a single unit: clipping, noise, and their privacy loss ε."""
