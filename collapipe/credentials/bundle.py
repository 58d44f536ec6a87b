"""Bundles, which an authority issues to members as one PEM file.

A bundle has the member's certificate, the authority's certificate, and the authority's list of
revoked certificates: a CRL in PEM.
"""

import logging
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.credentials.keys import PEM, UNREADABLE, key_pem, public_key, reading
from collapipe.credentials.member import Member, parse_dns_name
from collapipe.errors import ConfigError, WireError
from collapipe.process import files

KEY, REQUEST = "key.pem", "request.pem"
CERTIFICATE, AUTHORITY, REVOKED = "certificate.pem", "authority.pem", "revoked.crl"
_log = logging.getLogger(__name__)
_WAY_OUT = "put the authority's revoked.crl there"


class Revocations:
    """Serials of revoked certificates; the file is read again whenever it has changed.

    If a changed file is unreadable, older or from another authority, a warning is logged and the
    present list stays in use. Raises ``ConfigError`` if the first list is invalid.
    """

    def __init__(self, file: Path, authority: x509.Certificate) -> None:
        self._file, self._authority = file, authority
        self._seen = _version(file)
        self._list = read_list(file, authority)

    def __contains__(self, serial: int) -> bool:
        seen = _version(self._file)
        if seen != self._seen:
            try:
                self._list = newer_list(self._file, self._list, self._authority)
            except ConfigError as error:
                _log.warning("%s; the list that was read before holds", error)
            self._seen = seen  # after the list: other threads ask, too
        return is_revoked(serial, self._list)


def is_revoked(serial: int, present: x509.CertificateRevocationList) -> bool:
    """Whether the list names the certificate with this serial."""
    return present.get_revoked_certificate_by_serial_number(serial) is not None


def read_list(file: Path, authority: x509.Certificate) -> x509.CertificateRevocationList:
    """Return the list in a PEM file. Raises ``ConfigError`` if ``authority`` did not sign it."""
    return parse_list(files.read(file, _WAY_OUT), authority, file)


def newer_list(
    file: Path, present: x509.CertificateRevocationList, authority: x509.Certificate
) -> x509.CertificateRevocationList:
    """Return the list in ``file``. Raises ``ConfigError`` if it is older than ``present``."""
    offered = read_list(file, authority)
    if number_of(offered) < number_of(present):
        raise ConfigError(
            f"{file}: list {number_of(offered)} of revoked certificates is older than the "
            f"present one, {number_of(present)}; {_WAY_OUT}"
        )
    return offered


def parse_list(
    content: bytes, authority: x509.Certificate, file: Path
) -> x509.CertificateRevocationList:
    """Return the list in the PEM text of ``file``. Raises ``ConfigError`` as ``read_list`` does."""
    with reading(file, f"holds no list of revoked certificates; {_WAY_OUT}"):
        found = x509.load_pem_x509_crl(content)
        number_of(found)
        signed = found.is_signature_valid(public_key(authority))
    if not signed:
        raise ConfigError(
            f"{file}: a list of revoked certificates that another authority signed; {_WAY_OUT}"
        )
    return found


def number_of(found: x509.CertificateRevocationList) -> int:
    """Return the list's number; the authority's first list has number 1."""
    return found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number


def _version(file: Path) -> tuple[int, ...]:
    """Return values that differ after a change of the file; empty if the file is missing."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size


@dataclass(frozen=True, slots=True)
class Bundle:
    """A member's certificate, and its authority's certificate and revocation list."""

    certificate: x509.Certificate
    authority: x509.Certificate
    revoked: x509.CertificateRevocationList

    @property
    def member(self) -> Member:
        """The member that holds the certificate."""
        return issued_to(self.certificate, self.authority)

    @property
    def expires(self) -> datetime:
        """Time at which the certificate expires."""
        return self.certificate.not_valid_after_utc

    def pem(self) -> bytes:
        """Return the PEM text of all three parts."""
        parts = (self.certificate, self.authority, self.revoked)
        return b"".join(part.public_bytes(PEM) for part in parts)

    def write(self, folder: Path, key: ec.EllipticCurvePrivateKey | None = None) -> None:
        """Write the three parts to a member's folder, and a new member's ``key``.

        Existing parts are replaced; an existing key is an error.
        """
        if key is not None:
            files.write_new(folder / KEY, key_pem(key), files.PRIVATE)
        files.replace(folder / AUTHORITY, self.authority.public_bytes(PEM))
        files.replace(folder / REVOKED, self.revoked.public_bytes(PEM))
        files.replace(folder / CERTIFICATE, self.certificate.public_bytes(PEM))


def read_bundle(content: bytes, file: Path) -> Bundle:
    """Return the bundle in the ``content`` of ``file``. Raises ``ConfigError`` if it is invalid."""
    try:
        certificate, authority = x509.load_pem_x509_certificates(content)
        issued_to(certificate, authority)
    except (*UNREADABLE, WireError) as error:
        raise ConfigError(
            f"{file}: must hold a member's certificate and its authority's certificate; bring the "
            "file that collapipe credentials sign has named"
        ) from error
    return Bundle(certificate, authority, parse_list(content, authority, file))


def read_certificate(file: Path, way_out: str) -> x509.Certificate:
    """Return the certificate in a PEM file. Raises ``ConfigError`` if it cannot be read."""
    with reading(file, f"holds no certificate that can be read; {way_out}"):
        return x509.load_pem_x509_certificate(files.read(file, way_out))


def issued_to(certificate: x509.Certificate, authority: x509.Certificate) -> Member:
    """Return the member in a certificate. Raises ``WireError`` if ``authority`` did not sign it."""
    try:
        certificate.verify_directly_issued_by(authority)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (dns_name,) = names.get_values_for_type(x509.DNSName)
    except UNREADABLE as error:
        raise WireError("a certificate that this cluster's authority did not sign") from error
    return Member(*parse_dns_name(dns_name), certificate.serial_number)
