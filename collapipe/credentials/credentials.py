"""A member's credentials: request and install them in a folder, and use them for mutual TLS."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from shlex import quote

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.credentials.bundle import (
    AUTHORITY,
    CERTIFICATE,
    KEY,
    REQUEST,
    REVOKED,
    Bundle,
    Revocations,
    issued_to,
    newer_list,
    number_of,
    read_bundle,
    read_certificate,
    read_list,
)
from collapipe.credentials.keys import (
    PEM,
    UNREADABLE,
    Request,
    key_pem,
    make_key,
    read_key,
    request_pem,
)
from collapipe.credentials.member import Member
from collapipe.errors import ConfigError, WireError
from collapipe.process import files


@dataclass(frozen=True, slots=True)
class Credentials:
    """A member's key, certificate and trusted authority, as PEM texts that ``repr`` omits."""

    folder: Path
    member: Member
    expires: datetime
    key: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    authority: bytes = field(repr=False)
    revocations: Revocations = field(repr=False)

    def server(self) -> grpc.ServerCredentials:
        """Return the server's end: TLS refuses callers without a valid certificate.

        TLS does not check roles and revocations, so a server also needs a ``Doorkeeper``. A renewed
        certificate takes effect when the server starts again.
        """
        pair = (self.key, self.certificate)
        return grpc.ssl_server_credentials([pair], self.authority, require_client_auth=True)

    def channel(self, trusted: bytes) -> grpc.ChannelCredentials:
        """Return the dialer's end, for servers whose certificate is ``trusted`` or signed by it.

        TLS does not check revocations: ``dial`` fetches and checks the certificate first.
        """
        return grpc.ssl_channel_credentials(trusted, self.key, self.certificate)

    def check(self, certificate: bytes) -> Member:
        """Return the member of a peer's certificate (PEM).

        Raises ``WireError`` if it is from another authority, not valid now, or revoked.
        """
        member, first, last = _issued(certificate, self.authority)
        now = datetime.now(UTC)
        if not first <= now <= last:
            raise WireError(
                f"{member}: its certificate is valid from {first:%F %T} to {last:%F %T} UTC, and "
                f"this machine's clock is {now:%F %T}"
            )
        if member.serial in self.revocations:
            raise WireError(f"{member}: its certificate was revoked")
        return member


@lru_cache(maxsize=256)  # a peer's signature is verified once, not with every stream
def _issued(certificate: bytes, authority: bytes) -> tuple[Member, datetime, datetime]:
    """Return the member in a certificate, and the times from and until which it is valid. Raises
    ``WireError`` if it cannot be read, or ``authority`` did not sign it."""
    try:
        shown = x509.load_pem_x509_certificate(certificate)
        own = x509.load_pem_x509_certificate(authority)
    except UNREADABLE as error:
        raise WireError("the peer's certificate cannot be read") from error
    return issued_to(shown, own), shown.not_valid_before_utc, shown.not_valid_after_utc


def load(folder: Path) -> Credentials:
    """Return the credentials in ``folder``, after checking that they are valid now.

    Raises ``ConfigError`` if a file is missing or invalid, if others may read the key, or if the
    key does not fit the certificate. Also raises it if the certificate is from another authority,
    not valid now, or revoked.
    """
    key, here = _own_key(folder), quote(str(folder))
    way_out = f"install the file that sign has named: collapipe credentials install {here} FILE"
    signed = (files.read(folder / name, way_out) for name in (CERTIFICATE, AUTHORITY, REVOKED))
    bundle = read_bundle(b"".join(signed), folder)
    if bundle.certificate.public_key() != key.public_key():
        raise ConfigError(f"{folder / CERTIFICATE}: is not of the key in {KEY}; {way_out}")
    found = opened(folder, key, bundle)
    try:
        found.check(found.certificate)
    except WireError as error:
        way_out = (
            f"set it, or renew: collapipe credentials request {here} --name {found.member.name}"
        )
        if found.member.serial in found.revocations:
            way_out = "make a new key in a new folder"
        raise ConfigError(f"{folder}: {error}; {way_out}") from error
    return found


def opened(folder: Path, key: ec.EllipticCurvePrivateKey, bundle: Bundle) -> Credentials:
    """Return the credentials of a ``folder`` with this key and this bundle, without any check."""
    return Credentials(
        folder=folder,
        member=bundle.member,
        expires=bundle.expires,
        key=key_pem(key),
        certificate=bundle.certificate.public_bytes(PEM),
        authority=bundle.authority.public_bytes(PEM),
        revocations=Revocations(folder / REVOKED, bundle.authority),
    )


def request(folder: Path, name: str) -> Request:
    """Make ``request.pem`` in ``folder``, a request for a certificate; make a key if needed.

    Raises ``ConfigError`` for an invalid name or key, or if the folder has a request but no key.
    """
    has_key = (folder / KEY).exists()
    if not has_key and (folder / REQUEST).exists():
        raise ConfigError(f"{folder}: holds a request without its key; choose another folder")
    key = _own_key(folder) if has_key else make_key()
    content = request_pem(key, name)
    if not has_key:
        files.make_folder(folder)
        files.write_new(folder / KEY, key_pem(key), files.PRIVATE)
    files.replace(folder / REQUEST, content)
    return Request(name, key.public_key())


def install(folder: Path, file: Path) -> Bundle | None:
    """Install a signed ``file`` in ``folder``: a bundle, or only a newer revocation list.

    Returns the bundle, or None for a list. Raises ``ConfigError`` if the bundle is for another key,
    or if the file is from another authority or has an older list.
    """
    content = files.read(file, "bring the file that collapipe credentials sign has named")
    if b"-----BEGIN CERTIFICATE-----" not in content:
        _install_list(folder, file)
        return None
    bundle = read_bundle(content, file)
    if bundle.certificate.public_key() != _own_key(folder).public_key():
        raise ConfigError(
            f"{file}: certifies another key, of {bundle.member}, than the one in {folder}; bring "
            f"the certificate for {folder / REQUEST}"
        )
    if (folder / AUTHORITY).exists() and _authority(folder) != bundle.authority:
        raise ConfigError(f"{file}: {folder} is of another authority; choose another folder")
    if (folder / REVOKED).exists():
        present = read_list(folder / REVOKED, bundle.authority)
        bundle = replace(bundle, revoked=max(present, bundle.revoked, key=number_of))
    bundle.write(folder)
    return bundle


def _install_list(folder: Path, file: Path) -> None:
    authority, own = _authority(folder), folder / REVOKED
    offered = read_list(file, authority)
    if own.exists():
        offered = newer_list(file, read_list(own, authority), authority)
    files.replace(own, offered.public_bytes(PEM))


def _authority(folder: Path) -> x509.Certificate:
    return read_certificate(folder / AUTHORITY, "install a certificate there first")


def _own_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    way_out = f"make it: collapipe credentials request {quote(str(folder))} --name NAME"
    return read_key(files.read(folder / KEY, way_out, private=True), folder / KEY)
