"""A cluster's authority, and members whose certificates no command would issue."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from collapipe.credentials.bundle import REVOKED, Bundle
from collapipe.credentials.credentials import Credentials, opened
from collapipe.credentials.keys import PEM, make_key
from collapipe.credentials.member import Member, Role
from collapipe.credentials.signing import Authority, make_authority, revoked_now
from collapipe.process import files

HOUR = timedelta(hours=1)


@dataclass
class Cluster:
    """An authority and its members' folders, in the order of creation."""

    folder: Path
    authority: Authority = field(default_factory=make_authority)
    number: int = 1
    entries: list[x509.RevokedCertificate] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)

    def member(
        self,
        name: str = "jetson",
        role: Role = Role.DEVICE,
        starts_in: timedelta = timedelta(0),
        expires_in: timedelta = HOUR,
    ) -> Credentials:
        """Issue credentials, valid or not, and return them as ``load`` would."""
        key, now = make_key(), datetime.now(UTC)
        folder = self.folder / f"{len(self.folders)}-{name}"
        expires = now + expires_in
        starts = min(now + starts_in, expires)
        certificate = self.authority.issue(key.public_key(), name, role, starts, expires)
        bundle = Bundle(certificate, self.authority.certificate, self.revoked)
        with files.new_folder(folder) as partial:
            bundle.write(partial, key)
        self.folders.append(folder)
        return opened(folder, key, bundle)

    @property
    def revoked(self) -> x509.CertificateRevocationList:
        """The current revocation list."""
        return self.authority.revocation_list(self.entries, self.number)

    def revoke(self, member: Member) -> None:
        """Add a member to the revocation list, and write the list to all folders."""
        self.entries.append(revoked_now(member.serial))
        self.number += 1
        for folder in self.folders:
            files.replace(folder / REVOKED, self.revoked.public_bytes(PEM))
