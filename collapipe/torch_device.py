"""The kind of device that a process computes on, by its name: ``auto``, ``cpu``, ``cuda``, …"""

import torch

from collapipe.errors import ConfigError

CPU = torch.device("cpu")


def torch_device(option: str, name: str, dtype: str = "float32") -> torch.device:
    """The device that ``option`` calls ``name``; ``cuda`` is the first of its kind, and ``auto``
    the first of ``present``.

    Raises ``ConfigError`` where this machine has none, or it cannot compute in ``dtype``.
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


def present() -> list[str]:
    """Names of the devices that torch finds on this machine, the fastest kind first."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [*(f"cuda:{number}" for number in range(count)), *mps, "cpu"]
