"""A member of a cluster, as its certificate names it: ``NAME.ROLE.collapipe``, a DNS name that does
not depend on the box's address."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from collapipe.errors import ConfigError, WireError

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_DOMAIN = "collapipe"
DAYS = 365  # that a certificate is valid, unless told
_SOON = timedelta(days=14)


class Role(StrEnum):
    """What a certificate is good for."""

    DEVICE = "device"  # serves, and dials other devices
    CONTROL_UNIT = "control-unit"  # dials devices; a server with this role is refused by TLS itself
    UNIT = "unit"  # a control unit towards a deployed federation's server; no device believes it


@dataclass(frozen=True, slots=True)
class Member:
    """Whose certificate it is; ``serial`` tells it from the member's other certificates."""

    name: str
    role: Role
    serial: int

    def __str__(self) -> str:
        return f"{self.role} {self.name} (serial {self.serial:x})"


def dns_name(name: str, role: Role) -> str:
    """The name in the certificate, which a dialer asks for."""
    return f"{name}.{role}.{_DOMAIN}"


def parse_dns_name(text: str) -> tuple[str, Role]:
    """Name and role. Raises ``WireError`` for a name of another form."""
    name, _, rest = text.partition(".")
    role = rest.removesuffix(f".{_DOMAIN}")
    if not _NAME.fullmatch(name) or rest != f"{role}.{_DOMAIN}" or role not in set(Role):
        raise WireError(f"a certificate for {text!r}, expected NAME.ROLE.{_DOMAIN}")
    return name, Role(role)


def expires_soon(expires: datetime) -> bool:
    """Whether a certificate should be renewed."""
    return expires - datetime.now(UTC) < _SOON


def check_name(name: str) -> str:
    """The name itself. Raises ``ConfigError`` where it fits in no certificate."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name {name!r}: must be 1 to 40 characters of a-z, 0-9 and - between them; "
            "choose another"
        )
    return name
