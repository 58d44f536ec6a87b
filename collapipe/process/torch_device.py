"""Find the torch device for a name: ``auto``, ``cpu``, ``cuda``, …"""

import torch

from collapipe.errors import ConfigError

CPU = torch.device("cpu")


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


def present() -> list[str]:
    """Return the names of the devices that torch finds on this machine, the fastest kind first."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [*(f"cuda:{number}" for number in range(count)), *mps, "cpu"]
