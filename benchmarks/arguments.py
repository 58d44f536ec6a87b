"""Types of command-line arguments, which refuse what would end in a traceback after hours."""

import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """Whole numbers from ``least`` on."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise ArgumentTypeError(f"{value}: must be at least {least}")
        return value

    return number


def writable(text: str) -> Path:
    """A folder, which is made, or a file ``*.json`` in one. Both must be writable."""
    path = Path(text)
    folder = path.parent if path.suffix == ".json" else path
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentTypeError(f"{folder}: cannot be made ({error.strerror})") from None
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ArgumentTypeError(f"{path}: cannot be written")
    return path
