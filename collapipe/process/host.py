"""The machine on which a process runs."""

import hashlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine
_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


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


def usable_memory_bytes() -> int:
    """Return the machine's memory, or less if a container or service limits that of this
    process."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits()])


def _limits() -> Iterator[int]:
    """Yield the memory limits of the control groups, of version 1 or 2, that hold this process."""
    for line in _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            group = Path(path.lstrip("/"))
            for each in (group, *group.parents):
                file = _GROUPS / controllers / each / name
                if file.is_file() and (limit := file.read_text().strip()).isdecimal():
                    yield int(limit)
