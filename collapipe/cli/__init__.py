"""The ``collapipe`` command: the only place that starts the rooms."""
