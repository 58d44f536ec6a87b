"""Find the torch device for a name: ``auto``, ``cpu``, ``cuda``, …; set torch's threads."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from collapipe.errors import ConfigError, one_line

M = TypeVar("M", bound=nn.Module | Tensor)
CPU = torch.device("cpu")
_CORES = torch.get_num_threads()  # torch's own choice, which OMP_NUM_THREADS may limit
_in_run = threading.Lock()


def torch_device(option: str, name: str, dtype: str = "float32") -> torch.device:
    """Return the device ``name``, the value of ``option``.

    ``cuda`` is the first GPU, and ``auto`` the first of ``present``. Raises ``ConfigError`` if this
    machine lacks the device, or the device cannot compute in ``dtype``.
    """
    there = present()
    chosen = {"auto": there[0], "cuda": "cuda:0"}.get(name, name)
    if chosen not in there:
        raise ConfigError(
            f"{option}={name}: torch {torch.__version__} finds {', '.join(there)} on this machine; "
            "set one of these, or auto"
        )
    if chosen == "mps" and dtype == "float64":
        raise ConfigError(
            f"{option}={name}: mps has no float64; set pipeline.dtype=float32 or {option}=cpu"
        )
    return torch.device(chosen)


def moved(module: M, device: torch.device) -> M:
    """Return ``module`` on ``device``. Raises ``ConfigError`` if the device lacks a dtype of it."""
    try:
        return cast(M, module.to(device))
    except TypeError as error:
        raise ConfigError(
            f"{device}: cannot hold the model's weights ({one_line(error)}); set model.dtype and "
            "pipeline.dtype to float32, or choose another device"
        ) from error


def present() -> list[str]:
    """Return the names of the devices that torch finds on this machine, the fastest kind first."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [*(f"cuda:{number}" for number in range(count)), *mps, "cpu"]


def use_threads(number: int | None, at_once: int) -> None:
    """Let torch use ``number`` threads in this process; None: an equal share of the cores, which
    ``at_once`` computing parts of the run use at the same time."""
    torch.set_num_threads(number or max(1, _CORES // at_once))


def keep_to_threads() -> None:
    """Let the calling thread compute with as many threads as torch was told to use.

    In a new Python thread matrix products use all cores until torch has looked at its own number
    there. Their last bits depend on how many compute.
    """
    torch.get_num_threads()


@contextmanager
def torch_for_a_run() -> Iterator[None]:
    """Give a run torch's defaults, and then restore what the calling program has set.

    Raises ``ConfigError`` during another thread's run: both would seed torch's one generator.
    """
    if not _in_run.acquire(blocking=False):
        raise ConfigError(
            "runtime=local: another thread of this process trains; wait for its end, or train in "
            "another process"
        )
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with ExitStack() as stack:
            if torch.get_default_device() != CPU:  # a mode slows every operation
                stack.enter_context(CPU)
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast("cpu", enabled=False))
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        _in_run.release()
