"""A run's folder: write it, read it again, and evaluate its figures."""
