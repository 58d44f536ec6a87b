"""A device's status, which control units ask for outside of rounds."""

import time
from datetime import datetime

import psutil
import torch

from collapipe import __version__
from pipeline.devices.daemon.session import Session
from pipeline.devices.messages import DeviceStatus

_PRODUCTS = 3  # number of matrix products that measure speed
_CPU_SIDE, _GPU_SIDE = 384, 2048  # of the matrices; on a GPU a small product is mostly its launch


def device_status(
    name: str,
    memory_bytes: float,
    device: torch.device,
    expires: datetime | None,
    session: Session | None,
) -> DeviceStatus:
    """Return the status of a daemon that offers ``memory_bytes`` on ``device``, whose speed is
    measured if there is no ``session``."""
    segment = session.held if session else None  # read once, as the session's thread may change it
    held = segment.description if segment else None
    gpu = device.type == "cuda"  # with its own memory
    free = torch.cuda.mem_get_info(device)[0] if gpu else psutil.virtual_memory().available
    return DeviceStatus(
        name=name,
        version=__version__,
        torch_version=torch.__version__,
        torch_device=str(device),
        threads=torch.get_num_threads(),
        memory_bytes=memory_bytes,
        free_bytes=float(free),
        flops_per_s=_flops_per_s(device) if session is None else None,
        expires=expires,
        busy=session is not None,
        unit=held.unit if held else None,
        span=held.span if held else None,
    )


def _flops_per_s(device: torch.device) -> float:
    """Measure the FLOP/s of a matrix product on ``device``, the best of a few."""
    side = _CPU_SIDE if device.type == "cpu" else _GPU_SIDE
    matrix = torch.rand(side, side).to(device)
    return max(_product_flops(matrix) for _ in range(1 + _PRODUCTS))


def _product_flops(matrix: torch.Tensor) -> float:
    began = time.perf_counter()
    torch.mm(matrix, matrix)[0, 0].item()  # waits for a GPU
    return 2 * len(matrix) ** 3 / (time.perf_counter() - began)
