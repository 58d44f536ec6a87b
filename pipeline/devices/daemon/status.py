"""A device's status, which control units ask for outside of rounds."""

import time
from datetime import datetime

import psutil
import torch

from collapipe import __version__
from pipeline.devices.daemon.session import Session
from pipeline.devices.messages import DeviceStatus

_SIDE, _PRODUCTS = 384, 3  # side of the matrices, and number of their products, that measure speed


def device_status(
    name: str, memory_bytes: float, expires: datetime | None, session: Session | None
) -> DeviceStatus:
    """Return the status of a device that offers ``memory_bytes``. Measure its speed if it has no
    ``session``."""
    segment = session.held if session else None  # read once, as the session's thread may change it
    held = segment.description if segment else None
    return DeviceStatus(
        name=name,
        version=__version__,
        torch_version=torch.__version__,
        torch_device=str(torch.get_default_device()),
        threads=torch.get_num_threads(),
        memory_bytes=memory_bytes,
        free_bytes=float(psutil.virtual_memory().available),
        flops_per_s=_flops_per_s() if session is None else None,
        expires=expires,
        busy=session is not None,
        unit=held.unit if held else None,
        span=held.span if held else None,
    )


def _flops_per_s() -> float:
    """Measure the FLOP/s of a matrix product, the best of a few."""
    matrix = torch.rand(_SIDE, _SIDE)
    return max(_product_flops(matrix) for _ in range(1 + _PRODUCTS))


def _product_flops(matrix: torch.Tensor) -> float:
    began = time.perf_counter()
    torch.mm(matrix, matrix)
    return 2 * _SIDE**3 / (time.perf_counter() - began)
