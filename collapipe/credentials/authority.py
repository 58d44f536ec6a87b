"""An authority's folder: it signs, revokes and lists the certificates of members."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from shlex import quote

from collapipe.credentials.bundle import (
    REVOKED,
    Bundle,
    is_revoked,
    number_of,
    read_bundle,
    read_certificate,
    read_list,
)
from collapipe.credentials.keys import (
    PEM,
    Request,
    fingerprint,
    key_pem,
    make_key,
    public_key,
    read_key,
)
from collapipe.credentials.member import DAYS, Member, Role, check_name, expires_soon
from collapipe.credentials.signing import SERVER, Authority, make_authority, revoked_now
from collapipe.errors import ConfigError, few_of
from collapipe.process import files

CONTROL_UNIT = "control-unit"  # the folder and name of its own credentials
_TEMPORARY_DAYS = 30
_USABLE = "valid", "not yet valid"  # now or later
_KEY, _CERTIFICATE, _ISSUED = "authority.key", "authority.crt", "issued"


class AuthorityFolder:
    """Signs, revokes and lists certificates. Raises ``ConfigError`` if the folder is invalid."""

    def __init__(self, folder: Path) -> None:
        way_out = f"make an authority: collapipe credentials init {quote(str(folder))}"
        key = read_key(files.read(folder / _KEY, way_out, private=True), folder / _KEY)
        certificate = read_certificate(folder / _CERTIFICATE, way_out)
        if certificate.public_key() != key.public_key():
            raise ConfigError(f"{folder / _KEY}: is not of {_CERTIFICATE}; restore both")
        self._folder, self._authority = folder, Authority(key, certificate)
        self._revoked = read_list(folder / REVOKED, certificate)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the authority's public key."""
        return fingerprint(self._authority.key.public_key())

    def issued(self) -> list[Bundle]:
        """Return all issued certificates, ordered by name and number."""
        kept = sorted((self._folder / _ISSUED).glob("*.crt"))
        return [read_bundle(files.read(file, "restore it"), file) for file in kept]

    def usual_role(self) -> Role:
        """Return the role of new members: device in a cluster, which began with a control unit's
        certificate, and unit in a federation."""
        roles = {each.member.role for each in self.issued()}
        return Role.DEVICE if Role.CONTROL_UNIT in roles else Role.UNIT

    def state(self, issued: Bundle) -> str:
        """Return ``valid``, ``not yet valid``, ``expired`` or ``revoked``."""
        if is_revoked(issued.certificate.serial_number, self._revoked):
            return "revoked"
        if (now := datetime.now(UTC)) > issued.expires:
            return "expired"
        return "valid" if now >= issued.certificate.not_valid_before_utc else "not yet valid"

    def sign(self, request: Request, role: Role, days: int) -> tuple[Path, Bundle]:
        """Issue a certificate; return its file, to bring back to the member, and its bundle.

        Raises ``ConfigError`` if another valid certificate has the name or the key, if the key was
        revoked, or if the authority expires within ``days``.
        """
        now = datetime.now(UTC)
        left = (self._authority.expires - now).days
        if not 1 <= days <= left:
            raise ConfigError(f"--days {days}: must be 1 to {left}, for then the authority expires")
        self.check_free(request, role)
        period = now, now + timedelta(days=days)
        certificate = self._authority.issue(request.public_key, request.name, role, *period)
        bundle = Bundle(certificate, self._authority.certificate, self._revoked)
        names = (self._folder / _ISSUED / f"{request.name}.{n}.crt" for n in count(1))
        file = next(file for file in names if not file.exists())
        files.write_new(file, bundle.pem())
        return file, bundle

    def check_free(self, request: Request, role: Role) -> None:
        """Raise ``ConfigError`` unless the request is for a new member or a renewal."""
        for each in self.issued():
            member, state = each.member, self.state(each)
            same_key = public_key(each.certificate) == request.public_key
            if same_key and state == "revoked":
                raise ConfigError(
                    f"{request.name}: its key belonged to {member}, which was revoked; make a new "
                    "key in a new folder: collapipe credentials request DIR --name NAME"
                )
            same = same_key, member.name == request.name
            if state in _USABLE and any(same) and not (all(same) and member.role == role):
                here, then = quote(str(self._folder)), ", then make a new key" if same_key else ""
                renew = f"renew it with --role {member.role}, or " if all(same) else ""
                raise ConfigError(
                    f"{role} {request.name}: {member} has a valid certificate with this name or "
                    f"key; {renew}revoke it first{then}: collapipe credentials revoke {here} "
                    f"{member.serial:x}"
                )

    def add(self, name: str, role: Role, days: int, folder: Path) -> Bundle:
        """Make a member's key and certificate in a new ``folder``, for a trial.

        Outside a trial a member makes its key itself, so that the key never leaves its machine.
        Raises ``ConfigError`` as ``sign`` does.
        """
        key = make_key()
        with files.new_folder(folder) as partial:
            _, bundle = self.sign(Request(check_name(name), key.public_key()), role, days)
            bundle.write(partial, key)
        return bundle

    def add_server(self, hosts: Sequence[str], key_file: Path, certificate_file: Path) -> None:
        """Write a new key and a certificate for a server with the names or addresses ``hosts``.

        The certificate is valid until the authority expires. Raises ``ConfigError`` if that is
        soon.
        """
        key, period = make_key(), (datetime.now(UTC), self._authority.expires)
        if expires_soon(self._authority.expires):
            raise ConfigError(
                f"{self._folder}: the authority ends on {self._authority.expires:%F}; make a new "
                "federation: collapipe deploy init"
            )
        issued = self._authority.issue_for(hosts, key.public_key(), [SERVER], *period)
        files.replace(key_file, key_pem(key), files.PRIVATE)
        files.replace(certificate_file, issued.public_bytes(PEM))

    def revoke(self, which: str) -> list[Member]:
        """Revoke all valid certificates with a name, or the one with a serial.

        Returns their members. Raises ``ConfigError`` if no valid certificate matches.
        """
        valid = [each.member for each in self.issued() if self.state(each) in _USABLE]
        named = [member for member in valid if member.name == which]
        found = named or [member for member in valid if f"{member.serial:x}" == which]
        if not found:
            known = few_of(sorted({member.name for member in valid}), ", ") or "none"
            raise ConfigError(
                f"{which}: no valid certificate has this name or serial; names: {known}"
            )
        entries = [*self._revoked, *(revoked_now(member.serial) for member in found)]
        self._revoked = self._authority.revocation_list(entries, number_of(self._revoked) + 1)
        for folder in (self._folder, self._folder / CONTROL_UNIT):
            if folder.is_dir():
                files.replace(folder / REVOKED, self._revoked.public_bytes(PEM))
        return found


def create(folder: Path, control_unit: bool = True) -> AuthorityFolder:
    """Make a new authority in ``folder``; with ``control_unit`` also that member's credentials.

    Raises ``ConfigError`` if the folder is not empty.
    """
    authority = make_authority()
    with files.new_folder(folder) as partial:
        files.write_new(partial / _KEY, key_pem(authority.key), files.PRIVATE)
        files.write_new(partial / _CERTIFICATE, authority.certificate.public_bytes(PEM))
        files.write_new(partial / REVOKED, authority.revocation_list((), 1).public_bytes(PEM))
        files.make_folder(partial / _ISSUED)
        if control_unit:
            own = partial / CONTROL_UNIT
            AuthorityFolder(partial).add(CONTROL_UNIT, Role.CONTROL_UNIT, DAYS, own)
    return AuthorityFolder(folder)


def temporary_authority(folder: Path, devices: Sequence[str]) -> dict[str, Path]:
    """Make credentials for ``devices`` and ``control-unit`` below ``folder``; return name → folder.

    They are valid for 30 days. The authority's key is not stored, so no more can be signed.
    """
    authority = make_authority()
    revoked = authority.revocation_list((), 1)
    now = datetime.now(UTC)
    period = now, now + timedelta(days=_TEMPORARY_DAYS)
    roles = {CONTROL_UNIT: Role.CONTROL_UNIT} | {check_name(name): Role.DEVICE for name in devices}
    for name, role in roles.items():
        key = make_key()
        certificate = authority.issue(key.public_key(), name, role, *period)
        with files.new_folder(folder / name) as partial:
            Bundle(certificate, authority.certificate, revoked).write(partial, key)
    return {name: folder / name for name in roles}
