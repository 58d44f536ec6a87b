"""Read a deployed unit's owner file, which must have all keys that deployment needs."""

from pathlib import Path

from collapipe.credentials.credentials import Credentials, load
from collapipe.credentials.member import Role
from collapipe.credentials.verified_channel import host_and_port
from collapipe.errors import ConfigError
from collapipe.owner_file import OwnerSection, read_owner


def read_unit(file: Path) -> tuple[OwnerSection, Credentials]:
    """Return the file's contents and the unit's credentials.

    Raises ``ConfigError`` if the file lacks a key, or the credentials do not fit it.
    """
    owner = read_owner(file)
    for key in ("name", "number", "server", "credentials"):
        if getattr(owner, key) is None:
            raise ConfigError(f"{file}: {key} is missing; collapipe deploy init writes it")
    try:
        host_and_port(str(owner.server))
    except ConfigError as error:
        raise ConfigError(f"{file}: server: {error}") from error
    own = load(file.parent / str(owner.credentials))
    if (own.member.name, own.member.role) != (owner.name, Role.UNIT):
        raise ConfigError(
            f"{own.folder}: has the certificate of {own.member}, the file is of unit {owner.name}; "
            "sign its request with --role unit"
        )
    return owner, own
