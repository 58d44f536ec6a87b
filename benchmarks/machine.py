"""What a figure was measured on."""

import os
import platform

import torch

import collapipe


def machine() -> dict[str, object]:
    """Cores and versions."""
    return {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "collapipe": collapipe.__version__,
    }
