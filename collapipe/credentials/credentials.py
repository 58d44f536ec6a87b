"""A member's credentials, as a folder holds them, and what they open: both ends of mutual TLS."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography import x509

from collapipe.credentials import files
from collapipe.credentials.bundle import (
    AUTHORITY,
    CERTIFICATE,
    KEY,
    REVOKED,
    issued_to,
    read_bundle,
)
from collapipe.credentials.keys import PEM, UNREADABLE, read_key
from collapipe.credentials.member import Member, Role
from collapipe.credentials.revocations import Revocations
from collapipe.errors import ConfigError, WireError


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a member shows and whom it believes; PEM texts, none of which ``repr`` prints."""

    folder: Path
    member: Member
    expires: datetime
    key: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    authority: bytes = field(repr=False)
    revocations: Revocations = field(repr=False)

    @property
    def name(self) -> str:
        """The member's own name."""
        return self.member.name

    @property
    def role(self) -> Role:
        """The member's own role."""
        return self.member.role

    def server(self) -> grpc.ServerCredentials:
        """The server's end: TLS refuses who shows no valid certificate of this authority.

        TLS knows neither roles nor revocations: a server needs a ``Doorkeeper`` as well. A
        certificate that was renewed is shown after the server's next start.
        """
        pair = (self.key, self.certificate)
        return grpc.ssl_server_credentials([pair], self.authority, require_client_auth=True)

    def channel(self, server_certificate: bytes | None = None) -> grpc.ChannelCredentials:
        """The dialer's end, for any server of this authority or for one certificate alone.

        TLS knows no revocations: ``dialing.dial`` asks for the certificate first.
        """
        trusted = server_certificate or self.authority
        return grpc.ssl_channel_credentials(trusted, self.key, self.certificate)

    def check(self, certificate: bytes) -> Member:
        """Whose certificate (PEM) a peer has shown. Raises ``WireError`` where it is another
        authority's, out of its time or revoked."""
        try:
            shown = x509.load_pem_x509_certificate(certificate)
            authority = x509.load_pem_x509_certificate(self.authority)
        except UNREADABLE as error:
            raise WireError("the peer's certificate cannot be read") from error
        member = issued_to(shown, authority)
        now = datetime.now(UTC)
        if not shown.not_valid_before_utc <= now <= shown.not_valid_after_utc:
            raise WireError(
                f"{member}: its certificate is valid from {shown.not_valid_before_utc:%F %R} to "
                f"{shown.not_valid_after_utc:%F %R} UTC, and this box's clock says {now:%F %R}"
            )
        if member.serial in self.revocations:
            raise WireError(f"{member}: its certificate was revoked")
        return member


def load(folder: Path) -> Credentials:
    """The credentials in ``folder``, which are good for a handshake now.

    Raises ``ConfigError`` where a file is missing or bad, the key is open to others or not that of
    the certificate, or the certificate is another authority's, out of its time or revoked.
    """
    renewal = f"collapipe credentials request {folder} --name NAME"
    key = files.read(folder / KEY, f"make it: {renewal}", private=True)
    way_out = f"collapipe credentials install {folder} FILE puts there what sign has named"
    signed = (files.read(folder / name, way_out) for name in (CERTIFICATE, AUTHORITY, REVOKED))
    bundle = read_bundle(b"".join(signed), folder)
    if bundle.certificate.public_key() != read_key(key, folder / KEY).public_key():
        raise ConfigError(f"{folder / CERTIFICATE}: is not of the key in {KEY}; {way_out}")
    found = Credentials(
        folder=folder,
        member=bundle.member,
        expires=bundle.certificate.not_valid_after_utc,
        key=key,
        certificate=bundle.certificate.public_bytes(PEM),
        authority=bundle.authority.public_bytes(PEM),
        revocations=Revocations(folder / REVOKED, bundle.authority),
    )
    try:
        found.check(found.certificate)
    except WireError as error:
        revoked = found.member.serial in found.revocations
        way_out = "make a new key in a new folder" if revoked else f"set it, or renew: {renewal}"
        raise ConfigError(f"{folder}: {error}; {way_out}") from error
    return found
