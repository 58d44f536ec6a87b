"""An authority's key: it signs certificates of members and servers, and lists of revoked ones."""

import ipaddress
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from collapipe.credentials.keys import fingerprint, make_key, x509_name
from collapipe.credentials.member import Role, dns_name

_VALID = timedelta(days=3650)
_CLOCKS_DIFFER = timedelta(days=1)  # clocks of boards without a battery may be behind
_CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
_USES = {Role.DEVICE: [SERVER, _CLIENT], Role.CONTROL_UNIT: [_CLIENT], Role.UNIT: [_CLIENT]}
Revoked = Iterable[x509.RevokedCertificate]


@dataclass(frozen=True, slots=True)
class Authority:
    """A signing key, and the certificate that verifies its signatures."""

    key: ec.EllipticCurvePrivateKey = field(repr=False)
    certificate: x509.Certificate

    @property
    def expires(self) -> datetime:
        """Time at which the authority and all its certificates become invalid."""
        return self.certificate.not_valid_after_utc

    def issue(
        self,
        key: ec.EllipticCurvePublicKey,
        name: str,
        role: Role,
        starts: datetime,
        expires: datetime,
    ) -> x509.Certificate:
        """Return a certificate for ``key``, valid from one day before ``starts`` to ``expires``."""
        return self.issue_for([dns_name(name, role)], key, _USES[role], starts, expires)

    def issue_for(
        self,
        hosts: Sequence[str],
        key: ec.EllipticCurvePublicKey,
        uses: Sequence[x509.ObjectIdentifier],
        starts: datetime,
        expires: datetime,
    ) -> x509.Certificate:
        """Return a certificate as ``issue`` does, for the names or addresses ``hosts``."""
        names = x509.SubjectAlternativeName([*map(general_name, hosts)])
        return (
            _builder(hosts[0], self.certificate.subject, key, starts, expires)
            .add_extension(names, critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(_issuer_key(self.key), critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def revocation_list(self, revoked: Revoked, number: int) -> x509.CertificateRevocationList:
        """Return a signed list with ``number``; a member refuses a lower number than it has."""
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(datetime.now(UTC) - _CLOCKS_DIFFER)
            .next_update(self.expires)
            .add_extension(x509.CRLNumber(number), critical=False)
            .add_extension(_issuer_key(self.key), critical=False)
        )
        for entry in revoked:
            builder = builder.add_revoked_certificate(entry)
        return builder.sign(self.key, hashes.SHA256())


def make_authority() -> Authority:
    """Make a new authority; it is named after its key, so that names are unique."""
    key = make_key()
    subject = f"CollaPipe {fingerprint(key.public_key())}"
    certificate = self_signed(key, subject, _VALID).add_extension(_usage(signs=True), critical=True)
    return Authority(key, certificate.sign(key, hashes.SHA256()))


def self_signed(
    key: ec.EllipticCurvePrivateKey, subject: str, valid: timedelta
) -> x509.CertificateBuilder:
    """Return a builder of a self-signed certificate for ``key``, valid from now."""
    now = datetime.now(UTC)
    return _builder(subject, x509_name(subject), key.public_key(), now, now + valid).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )


def revoked_now(serial: int) -> x509.RevokedCertificate:
    """Return a list entry that revokes a serial now."""
    builder = x509.RevokedCertificateBuilder().serial_number(serial)
    return builder.revocation_date(datetime.now(UTC)).build()


def _builder(
    subject: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    starts: datetime,
    expires: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509_name(subject))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(secrets.randbits(63) | 1 << 63)  # 16 digits, which people can type
        .not_valid_before(starts - _CLOCKS_DIFFER)
        .not_valid_after(expires)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def general_name(host: str) -> x509.GeneralName:
    """Return a host's name or address in the form of certificates."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _issuer_key(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _usage(signs: bool) -> x509.KeyUsage:
    """Return the key's permitted uses: sign certificates and lists, or only handshakes."""
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
