"""Bundles, which an authority issues to members as one PEM file.

A bundle has the member's certificate, the authority's certificate, and the revocation list.
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe.credentials import files
from collapipe.credentials.keys import PEM, UNREADABLE, key_pem, reading
from collapipe.credentials.member import Member, parse_dns_name
from collapipe.credentials.revocations import parse_list
from collapipe.errors import ConfigError, WireError

KEY, REQUEST = "key.pem", "request.pem"
CERTIFICATE, AUTHORITY, REVOKED = "certificate.pem", "authority.pem", "revoked.crl"


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
