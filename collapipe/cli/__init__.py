"""The ``collapipe`` command: the only package that starts the apps."""
