"""Members of a cluster. A certificate names one as ``NAME.ROLE.collapipe``.

This DNS name does not depend on the machine's address.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from collapipe.errors import ConfigError, WireError

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_DOMAIN = "collapipe"
DAYS = 365  # default validity of a certificate
_SOON = timedelta(days=14)


class Role(StrEnum):
    """The permitted uses of a certificate."""

    DEVICE = "device"  # serves, and dials other devices
    CONTROL_UNIT = "control-unit"  # dials devices; TLS refuses it as a server's certificate
    UNIT = "unit"  # dials a deployed federation's server; devices refuse it


@dataclass(frozen=True, slots=True)
class Member:
    """The holder of a certificate; ``serial`` distinguishes the holder's certificates."""

    name: str
    role: Role
    serial: int

    def __str__(self) -> str:
        return f"{self.role} {self.name} (serial {self.serial:x})"


def dns_name(name: str, role: Role) -> str:
    """Return the DNS name in a member's certificate, which a dialer checks."""
    return f"{name}.{role}.{_DOMAIN}"


def parse_dns_name(text: str) -> tuple[str, Role]:
    """Return name and role. Raises ``WireError`` for a name of another form."""
    name, _, rest = text.partition(".")
    role = rest.removesuffix(f".{_DOMAIN}")
    if not _NAME.fullmatch(name) or rest != f"{role}.{_DOMAIN}" or role not in set(Role):
        raise WireError(f"a certificate for {text!r}, expected NAME.ROLE.{_DOMAIN}")
    return name, Role(role)


def expires_soon(expires: datetime) -> bool:
    """Whether a certificate should be renewed."""
    return expires - datetime.now(UTC) < _SOON


def check_name(name: str) -> str:
    """Return ``name``. Raises ``ConfigError`` if a certificate cannot have it."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name {name!r}: must be 1 to 40 characters of a-z, 0-9 and - between them; "
            "choose another"
        )
    return name
