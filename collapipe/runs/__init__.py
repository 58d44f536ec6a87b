"""A run's folder: written, read again, and its figures."""
