"""The machine on which a process runs."""

import hashlib
import os
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: a name that its processes share, and its number of cores."""

    name: Annotated[str, Field(max_length=64)]
    cores: Annotated[int, Field(ge=1, le=4096)]


@cache
def this_host() -> Host:
    """Return this process's machine. Its name is a digest, another one after each boot of
    Linux."""
    identity = _BOOT.read_bytes() if _BOOT.exists() else uuid.getnode().to_bytes(8, "big")
    return Host(hashlib.sha256(identity).hexdigest()[:16], min(os.cpu_count() or 1, 4096))
